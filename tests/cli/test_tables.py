"""Tables and texts of commands: whole when they are piped, wrapped on a terminal, never cut."""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

import pytest

from tests.cli.conftest import CommandRunner
from tests.cli.test_every_command import ELSEWHERE, list_commands
from waypost import NoRetry
from waypost.cli import output
from waypost.cli.main import make_parser
from waypost.store.port import Heartbeat, ServedQueue
from waypost.views import LoggedAction

pytestmark = pytest.mark.promise("FACE-6")

#: A queue, a key, a group, an error and a body that are longer than a terminal is wide, each with its own character.
LONG = {
    "queue": "Q" * 60, "key": "κ" * 200, "group": "γ" * 100, "error": " ".join(["ε" * 9] * 30),
    "body": "β" * 150 + " β" * 150,
}  # fmt: skip
QUEUE = LONG["queue"]

#: Every command whose output is longer than a line if what it lists is, and which of the texts above it prints.
TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "queues": ("", ("queue",)),
    "stats": ("", ("queue",)),
    "stats of one": (f"{QUEUE} --minutes 5", ("queue",)),
    "watch": ("--once", ("queue",)),
    "peek": (f"{QUEUE} --state delayed", ("key", "body")),
    "peek of one": (f"{QUEUE} --id TIMER", ("key", "queue")),
    "groups list": ("grouped", ("group",)),
    "find": ("TIMER", ("queue",)),
    "history": (f"{QUEUE} DEAD", ("error",)),
    "journal": (QUEUE, ("error",)),
    "journal of new ones": (f"{QUEUE} -n 0 --after 0 --follow --limit 5", ("error",)),
    "ledger": ("", ("queue",)),
    "configure": (QUEUE, ("queue",)),
    "dead list": ("", ("queue", "error")),
    "dead list of one": (QUEUE, ("error",)),
    "dead list by reason": ("--by-reason", ()),
    "dead peek": (f"{QUEUE} DEAD", ("error",)),
    "timers list": (QUEUE, ("key", "body")),
    "schedules list": ("", ("queue",)),
    "bulk list": ("", ("queue",)),
    "actions": ("", ("queue", "error")),
    "workers": ("", ("queue",)),
    "doctor": ("", ("queue",)),
}
#: Commands that print a sentence, a document, or what they do until they are stopped.
WITHOUT_TABLE = {
    "publish", "pause", "resume", "cancel", "purge", "remove", "dead redrive", "dead purge", "dead edit",
    "bulk start", "bulk run", "bulk pause", "bulk resume", "bulk cancel", "timers cancel", "timers reschedule",
    "schedules preview", "schedules save", "schedules backfill", "schedules pause", "schedules resume",
    "schedules trigger", "schedules remove", "worker", "relay", "scheduler", "promoter", "init", "migrate", "bench",
    "completion", "groups pause", "groups resume", "groups configure", "groups skip",
}  # fmt: skip


def command_of(name: str) -> str:
    return name.partition(" of ")[0].partition(" by ")[0]


def test_every_command_is_known_to_print_a_table_or_not() -> None:
    printing = {command_of(name) for name in TABLES}
    known = [path for path in list_commands(make_parser()) if path.split()[0] not in ELSEWHERE]
    assert sorted(printing | WITHOUT_TABLE) == sorted(known)
    assert printing & WITHOUT_TABLE == set()


class Filled(NamedTuple):
    """A store whose queue, keys, errors and bodies are long, and the ids of two messages."""

    cli: CommandRunner
    ids: dict[str, str]

    def lines(self, name: str) -> list[str]:
        """Return the output of a command of the table."""
        given = [self.ids.get(one, one) for one in TABLES[name][0].split()]
        return self.cli.run(*command_of(name).split(), *given).splitlines()


@pytest.fixture
def filled(sqlite_cli: CommandRunner) -> Filled:
    post = sqlite_cli.post
    timer = post.publish(QUEUE, LONG["body"], key=LONG["key"], delay=86_400).id
    dead = post.publish(QUEUE, 1).id
    with pytest.raises(LookupError), post.receive(QUEUE, retry=NoRetry()):
        raise LookupError(LONG["error"])
    post.publish(QUEUE, LONG["body"])
    post.configure("grouped", fair=True)
    post.publish("grouped", 1, group=LONG["group"])
    post.save_schedule("rollup", queue=QUEUE, cron="0 9 * * *")
    post.start_bulk(QUEUE, "redrive")
    post.log_action(LoggedAction("mara", "web", "pause", QUEUE, False, LONG["error"]))
    executor = post.store.connect(start_timeout=20)
    try:
        served = (ServedQueue(QUEUE, 10, 1, 5), ServedQueue("grouped", 10, 1, 5))
        executor.run(post.store.heartbeat(Heartbeat("shop-1:4711", queues=served), 60_000))
    finally:
        executor.close()
    return Filled(sqlite_cli, {"TIMER": timer, "DEAD": dead})


@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_cut_or_wrapped_when_output_is_piped(
    name: str, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # some shells export it
    lines = filled.lines(name)
    for text in TABLES[name][1]:
        assert any(LONG[text] in line for line in lines), (text, lines)
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("columns", [70, 140])
@pytest.mark.parametrize("name", TABLES)
def test_long_texts_take_several_lines_of_a_terminal(
    name: str, columns: int, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = filled.lines(name)
    assert not any("…" in line for line in lines)
    # The figures of minutes are as wide as they are; bodies, tracebacks and commands are there to be copied.
    if name not in ("stats of one", "peek of one", "dead peek", "doctor"):
        assert max(map(len, lines)) <= columns
    monkeypatch.undo()
    piped = filled.lines(name)
    for text in LONG.values():
        assert "".join(lines).count(text[0]) == "".join(piped).count(text[0])


def test_the_width_is_that_of_columns_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "97")
    assert output.terminal_width() is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert output.terminal_width() == 97


@pytest.mark.parametrize("columns", [40, 70, 80, 100, 140])
def test_a_table_keeps_every_character(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: columns)
    row = ("1m7fra5gs06ap4cfk9b5jsq9", 5, "κ" * 100, "β" * 500)
    lines = output.format_table(("id", "pri", "key", "body"), [row], flexible=(2, 3))
    joined = "".join(lines[1:])
    assert (joined.count("κ"), joined.count("β")) == (100, 500)
    assert max(map(len, lines)) <= columns
    assert row[0] in joined


def test_a_very_long_cell_ends_with_how_much_more_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 60)
    lines = output.format_table(("id", "body"), [("a", "x" * 1_000_000)], flexible=(1,))
    assert len(lines) < 60
    assert re.fullmatch(r" *\(and 9\d\d,\d\d\d more characters\)", lines[-1])
    monkeypatch.setattr(output, "terminal_width", lambda: None)
    assert len(output.format_table(("id", "body"), [("a", "x" * 1_000_000)], flexible=(1,))[1]) > 1_000_000


def test_wide_characters_are_aligned_by_the_columns_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 34)
    rows = [("注文", "x"), ("mails", "受注 " * 12)]
    lines = output.format_table(("queue", "body"), rows, flexible=(1,))
    assert lines[1] == "注文   x"
    assert max(map(output.text_width, lines)) <= 34
    assert "".join(lines).count("受注") == 12


def test_a_wrapped_text_keeps_its_indentation() -> None:
    assert output.wrap_text("    one two three", 12) == ["    one two", "three"]
    assert output.wrap_text("see valkey://127.0.0.1:6379 there", 12, break_long=False) == [
        "see", "valkey://127.0.0.1:6379", "there",
    ]  # fmt: skip
    assert output.wrap_text("", 12) == [""]
