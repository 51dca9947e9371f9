"""Every promise of the page has a test, and no test names a promise that is not on the page."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "promises.md"
PLACES = (ROOT / "tests", ROOT / "src" / "waypost" / "testing")

ID = re.compile(r"\b[A-Z]+-\d+\b")
MARK = re.compile(r"\bpromise\(([^)]*)\)")


def promises() -> tuple[set[str], set[str]]:
    """Return the ids in the tables of the page: the current ones, and those under a heading with `later`."""
    kept: set[str] = set()
    later: set[str] = set()
    chapter = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            chapter = line.lower()
        if line.startswith("| "):
            (later if "later" in chapter else kept).update(ID.findall(line.split("|")[1]))
    return kept, later


def carried() -> dict[str, list[str]]:
    """Return the files in which a mark names each id."""
    found: dict[str, list[str]] = {}
    for place in PLACES:
        for path in sorted(place.rglob("*.py")):
            for mark in MARK.findall(path.read_text()):
                for id in re.findall(r'"([A-Z]+-\d+)"', mark):
                    found.setdefault(id, []).append(str(path.relative_to(ROOT)))
    return found


def test_a_promise_is_kept_today_or_planned() -> None:
    kept, later = promises()
    assert len(kept) > 20
    assert kept.isdisjoint(later)


def test_every_current_promise_has_a_test() -> None:
    kept, _ = promises()
    assert sorted(kept - set(carried())) == []


def test_no_test_names_a_promise_that_is_not_on_the_page() -> None:
    kept, later = promises()
    assert sorted(set(carried()) - kept - later) == []
