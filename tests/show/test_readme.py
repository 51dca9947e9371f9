"""The README: every row names a test that exists, and the recording is one of a real demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from scripts import record_demo

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
#: A link whose title is the name of a test.
TITLED = re.compile(r'\[[^\]]*\]\(([^)\s]+) "(\w+)"\)')


def section(heading: str) -> str:
    return README.split(f"## {heading}\n")[1].split("\n## ")[0]


def test_every_row_of_what_happens_when_names_a_test() -> None:
    rows = [
        line
        for line in section("What happens when …").splitlines()
        if line.startswith("| a") or line.startswith("| the")
    ]
    assert len(rows) >= 12
    assert [row for row in rows if not re.search(r"\[[^\]]*\]\((?:tests|src)/", row)] == []


def test_every_test_that_the_page_names_exists() -> None:
    named = TITLED.findall(README)
    assert len(named) >= 12
    missing = [name for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert missing == []


def test_the_figures_beside_others_are_those_of_the_benchmarks() -> None:
    figures = re.findall(r"\d[\d.,]* ?(?:/s|ms)", section("Comparison"))
    printed = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(figures) >= 12
    assert [figure for figure in figures if figure not in printed] == []


@pytest.mark.promise("FACE-5", "FACE-6")
def test_the_first_commands_print_what_the_page_has() -> None:
    program = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    session = re.search(r"```console\n(.*?)```", README, re.DOTALL)
    assert program is not None
    assert session is not None
    # Short, as the folder of a person is: beside a long path there is no room for sockets, which is logged.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder, "shop.py").write_text(program[1])
        printed = ""
        for command in re.findall(r"^\$ (.*)$", session[1], re.MULTILINE):
            name, *arguments = command.split()
            start = [sys.executable] if name == "python" else [sys.executable, "-u", "-m", "waypost.cli.main"]
            done = subprocess.run(
                [*start, *arguments], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True,
            )  # fmt: skip
            text = re.sub(r"^waypost worker \S+:\d+:\S+$", "waypost worker …", done.stdout, flags=re.MULTILINE)
            printed += f"$ {command}\n{text}"
    assert printed == session[1]


@pytest.mark.promise("FACE-5")
def test_the_recording_shows_a_killed_worker_and_a_clean_account_and_fetches_nothing() -> None:
    picture = (ROOT / "docs" / "recording.svg").read_text()
    tree = ElementTree.fromstring(picture)
    printed = " ".join("".join(part.itertext()) for part in tree.iter() if part.tag.endswith("text")).replace(
        "\xa0", " "
    )
    for text in ("$ waypost demo", "kill -9", "leases have ended", "0 unaccounted of"):
        assert text in printed
    assert re.findall(r"https?://(?!www\.w3\.org/)", picture) == []
    assert "@font-face" not in picture
    assert "@import" not in picture


def test_a_recording_plays_what_a_command_wrote_to_a_terminal() -> None:
    program = "print('\\033[32mgood & <well>\\033[0m'); print('half\\r\\033[Kwhole')"
    lines = record_demo.record([sys.executable, "-c", program])
    assert [line for _, line in lines] == ["\033[32mgood & <well>\033[0m", "whole"]
    picture = record_demo.render(lines, "a test")
    texts = ["".join(part.itertext()) for part in ElementTree.fromstring(picture).iter() if part.tag.endswith("text")]
    assert [text.replace("\xa0", " ").rstrip() for text in texts if text.strip()][-2:] == ["good & <well>", "whole"]
    assert "@keyframes w1" in picture


def test_long_pauses_are_shortened_and_their_order_stays() -> None:
    assert record_demo.shortened([0.0, 1.0, 60.0, 61.0]) == [0.0, 1.0, 3.5, 4.5]
