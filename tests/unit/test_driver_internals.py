"""Private names of redis-py and psycopg are used in one module each, so that a new version is checked in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "waypost"
ALLOWED = {SRC / "store/valkey/redis_py.py", SRC / "store/postgres/psycopg_internals.py"}
PACKAGES = ("redis", "psycopg")
#: Modules without an underscore that no manual of the package describes.
UNDOCUMENTED = ("psycopg.generators", "psycopg.waiting")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def names_of_drivers() -> frozenset[str]:
    """Return the private attributes of the packages' objects."""
    found = set()
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        for path in Path(spec.origin).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_private(node.attr):
                    found.add(node.attr)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_private(node.name):
                    found.add(node.name)
    return frozenset(found)


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def own_names(tree: ast.Module) -> set[str]:
    """Return the private names that a module defines."""
    stored = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    made = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return stored | made


def uses(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    relative, theirs, brought = path.relative_to(ROOT), names_of_drivers(), list(imports(tree))
    for line, name in brought:
        private = any(is_private(part) for part in name.split(".")) or name.startswith(UNDOCUMENTED)
        if name.split(".")[0] in PACKAGES and private:
            yield f"{relative}:{line}: {name}"
    if not any(name.split(".")[0] in PACKAGES for _, name in brought) and "store/valkey" not in str(relative):
        return
    theirs -= own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in theirs:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield f"{relative}:{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in theirs:
            yield f"{relative}:{node.lineno}: {node.value!r}"


def test_private_names_of_drivers_are_used_in_one_module_each() -> None:
    assert [use for path in sorted(SRC.rglob("*.py")) if path not in ALLOWED for use in uses(path)] == []


def test_the_search_finds_the_private_names_that_those_modules_use() -> None:
    found = " ".join(use for path in sorted(ALLOWED) for use in uses(path))
    for name in ("._sock", "._writer", "._parser", "_num_transactions", "psycopg.generators", "psycopg.waiting"):
        assert name in found, name
