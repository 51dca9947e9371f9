"""mypy and pyright accept the correct examples and find the errors in the wrong ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = Path(__file__).with_name("clients.py")
#: An error that both checkers must find.
EXPECTED = re.compile(r"  # type: ignore\[.*$")
PYRIGHT = {
    "typeCheckingMode": "strict",
    "pythonVersion": "3.11",
    # Each checker has its own comments, and one that hides nothing is an error.
    "enableTypeIgnoreComments": False,
    "reportUnnecessaryTypeIgnoreComment": True,
}


def mypy(path: Path) -> dict[int, str]:
    """Return the lines in which mypy finds an error, and the errors."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", "--no-pretty"]
    done = subprocess.run([*command, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^[^:\n]+:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    return {int(line): text for line, text in found}


def pyright(path: Path, folder: Path) -> dict[int, str]:
    """The same by pyright; basedpyright is the build of it that brings its own node."""
    project = folder / "pyrightconfig.json"
    project.write_text(json.dumps(PYRIGHT | {"include": [str(path)], "extraPaths": [str(ROOT / "src")]}))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(project), "--pythonpath", sys.executable],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    return {one["range"]["start"]["line"] + 1: one["message"] for one in report["generalDiagnostics"]}


@pytest.mark.promise("FACE-1")
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_right_uses_have_no_errors_and_wrong_ones_each_have_one(checker: str, tmp_path: Path) -> None:
    lines = EXAMPLES.read_text().splitlines()
    expected = {number for number, line in enumerate(lines, 1) if EXPECTED.search(line)}
    assert len(expected) >= 20
    bare = tmp_path / "bare.py"
    bare.write_text("\n".join(EXPECTED.sub("", line) for line in lines) + "\n")
    found = mypy(bare) if checker == "mypy" else pyright(bare, tmp_path)
    assert {number: lines[number - 1] for number in sorted(set(found) ^ expected)} == {}


@pytest.mark.promise("FACE-1")
def test_the_examples_are_clean_as_they_stand(tmp_path: Path) -> None:
    """The ignores name the right errors for pyright too; `make types` checks them for mypy."""
    assert pyright(EXAMPLES, tmp_path) == {}
