"""Undocumented names of FastStream are imported by one module."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_private_names_of_faststream_are_imported_by_one_module() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "src").rglob("*.py")
        if any(name.startswith("faststream._internal") for name in modules(path))
    }
    assert users == {"src/waypost/faststream/internals.py"}
