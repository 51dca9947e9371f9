"""Progress of long work: a bar on a terminal, a line now and then elsewhere, nothing for programs."""

from __future__ import annotations

import io
import sys

import pytest

from tests.cli.conftest import CommandRunner
from waypost.cli import progress
from waypost.cli.progress import Progress

pytestmark = pytest.mark.promise("FACE-2")


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def work(**options: bool) -> None:
    with Progress("publishing to orders", 4_000, **options) as displayed:
        for _ in range(4):
            displayed.advance(1_000)


def test_without_a_terminal_progress_is_printed_as_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    work()
    assert capsys.readouterr().err.splitlines()[-1] == "publishing to orders: 4,000 of 4,000"
    work(quiet=True)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar_or_lines_where_rich_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    work()
    assert "\x1b[" in terminal.getvalue()
    assert "4000/4000" in terminal.getvalue()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name in ("rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    work()
    assert terminal.getvalue().endswith("publishing to orders: 4,000 of 4,000\n")


def test_a_redrive_at_a_rate_shows_each_letter_that_moved(
    sqlite_cli: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    sqlite_cli.bury("orders", *range(5))
    assert sqlite_cli.run("dead", "redrive", "orders", "--all", "--rate", "1000/s").startswith("5 dead letters")
    assert sqlite_cli.stderr.splitlines()[-1] == "redriving orders: 5 of 5"
