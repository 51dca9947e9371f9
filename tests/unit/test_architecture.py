"""The architecture page names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
STEP = re.compile(r"^\|[^|]*\|[^|]*\| `(?P<file>src/[^`]+)` \| (?:`(?P<function>[^`]+)` )?\|$", re.MULTILINE)
STEPS = [(found["file"], found["function"]) for found in STEP.finditer(PAGE.read_text())]


def names(path: Path) -> set[str]:
    """Return the functions and methods of a module, as `function` or `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_the_page_follows_a_message_through_every_step() -> None:
    assert len(STEPS) > 15
    assert {"client", "operations", "store", "worker"} <= {file.split("/")[2] for file, _ in STEPS}


@pytest.mark.parametrize(("file", "function"), STEPS, ids=[f"{file}:{function}" for file, function in STEPS])
def test_each_step_names_a_file_and_a_function_that_exist(file: str, function: str | None) -> None:
    path = ROOT / file
    assert path.is_file()
    if path.suffix == ".py":
        assert function in names(path)
    else:
        assert function is None
