"""The documentation is correct: links resolve, code runs, tables list what the code has."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from waypost import errors
from waypost.errors import InvalidPolicy, WaypostError
from waypost.policy import policy_changes

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
#: A block that opens with ```python run is executed; the blocks of a page share one program.
RUNNABLE = re.compile(r"^```python run\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the headings of a page in the form that links use."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def run_program(program: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as a user would, in an empty directory, with warnings as errors."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=directory, env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", [page for page in PAGES if RUNNABLE.search(page.read_text())], ids=relative)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    program = tmp_path / "page.py"
    program.write_text("".join(RUNNABLE.findall(page.read_text())))
    ran = run_program(program, tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_the_readme_has_the_first_worker_as_it_is() -> None:
    example = (ROOT / "examples" / "shop.py").read_text()
    code = example.split('"""', 2)[2].strip()
    assert f"```python\n{code}\n```" in (ROOT / "README.md").read_text()


def test_every_error_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, WaypostError)]
    assert len(classes) > 20
    assert [kind.__name__ for kind in classes if f"`{kind.__name__}`" not in page] == []


def test_every_queue_setting_is_in_the_reference_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "queue-settings.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    with pytest.raises(InvalidPolicy) as refused:
        policy_changes({"no such setting": 1})
    known = str(refused.value).partition("known are ")[2].split(", ")
    assert sorted(listed) == sorted(known)


def test_every_decision_is_in_their_list() -> None:
    folder = ROOT / "docs" / "decisions"
    listing = (folder / "README.md").read_text()
    assert [path.name for path in folder.glob("0*.md") if f"({path.name})" not in listing] == []
