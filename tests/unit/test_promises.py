"""No promise without a test: what `docs/promises.md` lists as kept is carried by a mark on the tests that show it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text()
ID = re.compile(r"[A-Z]+-\d+")


def rows(part: str) -> list[str]:
    return [found for row in re.findall(r"^\| ([^|]+) \|", part, re.MULTILINE) for found in ID.findall(row)]


KEPT_PART, LATER_PART = PAGE.split("## Planned for later versions")
KEPT, LATER = rows(KEPT_PART), rows(LATER_PART)


def marked() -> Iterator[tuple[str, str]]:
    """Every id that a test carries, and where."""
    for folder in ("tests", "src/waypost/testing"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.promise"):
                    for argument in node.args:
                        assert isinstance(argument, ast.Constant), f"{path}: a promise is named by a plain text"
                        yield str(argument.value), f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_promise_is_listed_once() -> None:
    listed = KEPT + LATER
    assert len(listed) > 80
    assert sorted(listed) == sorted(set(listed))


def test_every_kept_promise_is_shown_by_a_test() -> None:
    shown = {promise for promise, _ in marked()}
    assert [promise for promise in KEPT if promise not in shown] == []


def test_every_mark_names_a_promise() -> None:
    assert [f"{where}: {promise}" for promise, where in marked() if promise not in {*KEPT, *LATER}] == []
