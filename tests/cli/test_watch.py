"""`waypost watch`: what it shows, what it can do, and how few requests it sends when idle."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import DataTable, Static

from tests.cli.conftest import CommandRunner
from tests.fault.proxy import Proxy
from tests.waiting import WAIT_SECONDS_MAX
from waypost import Waypost
from waypost.cli.watch.collector import (
    HEADERS,
    IDLE_COMMANDS_PER_SECOND,
    TICK_SECONDS,
    Collector,
    format_duration,
    format_number,
)
from waypost.cli.watch.screen import Question, WatchScreen
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace

pytestmark = pytest.mark.promise("FACE-2")

ROOT = Path(__file__).parents[2]


class Counter(Proxy):
    """A proxy that counts the requests of clients: commands of Valkey, or Sync messages of PostgreSQL."""

    def __init__(self, target_port: int, count: Callable[[bytes], int]) -> None:
        super().__init__(target_port)
        self._count = count
        self.requests = 0

    def takes_reply_of(self, request: bytes) -> bool:
        self.requests += self._count(request)
        return super().takes_reply_of(request)


def commands_in(data: bytes) -> int:
    """Count commands of Valkey's protocol: each is an array, and arrays of requests hold no others."""
    number, at = 0, 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        parts, at = int(data[at + 1 : end]), end + 2
        for _ in range(parts):
            end = data.index(b"\r\n", at)
            at = end + 2 + int(data[at + 1 : end]) + 2
        number += 1
    return number


def turns_in(data: bytes) -> int:
    """Count Sync messages, which end statements; the first message of a connection has no type and counts as one."""
    number, at = 0, 0
    if data[:1] == b"\0":
        return 1
    while at < len(data):
        number += data[at : at + 1] in (b"S", b"Q")
        at += 1 + int.from_bytes(data[at + 1 : at + 5], "big")
    return number


@pytest.fixture(params=["valkey", "postgres"])
def counted(request: pytest.FixtureRequest) -> Iterator[tuple[Counter, Waypost]]:
    """A client whose requests are counted."""
    server = request.getfixturevalue(f"{request.param}_server")
    namespace = fresh_namespace()
    if request.param == "postgres":
        migrate(server.url, namespace=namespace)
    with Counter(server.port, commands_in if request.param == "valkey" else turns_in) as proxy:
        url = server.url.replace(f":{server.port}", f":{proxy.port}")
        with Waypost(url, namespace=namespace, retry_budget=0) as post:
            yield proxy, post


@pytest.mark.parametrize("queues", [1, 30])
def test_an_idle_watch_sends_less_than_two_requests_a_second(counted: tuple[Counter, Waypost], queues: int) -> None:
    proxy, post = counted
    for number in range(queues):
        post.publish(f"queue-{number}", 1)
    watcher = Collector(post)
    now = 1_000.0
    for _ in range(3):  # the first ticks read everything once, and find that nothing changes
        watcher.tick(now)
        now += TICK_SECONDS
    proxy.requests, began = 0, now
    while now < began + 120:
        watcher.tick(now)
        now += TICK_SECONDS
    assert 0.5 < proxy.requests / (now - began) < 2
    assert proxy.requests / (now - began) <= IDLE_COMMANDS_PER_SECOND + 0.1


def test_changing_queues_are_read_every_second_and_others_in_turn(cli: CommandRunner) -> None:
    for number in range(10):
        cli.post.publish(f"queue-{number}", number)
    watcher = Collector(cli.post)
    watcher.tick(0.0)
    watcher.tick(1.0)
    cli.post.publish("queue-7", 1)
    for second in range(2, 12):  # in ten seconds each of ten unchanged queues has its turn
        watcher.tick(float(second))
    assert {line.queue: line.ready for line in watcher.lines()}["queue-7"] == 2
    cli.post.publish("queue-7", 1)
    watcher.selected = "queue-7"
    watcher.tick(20.0)
    assert {line.queue: line.ready for line in watcher.lines()}["queue-7"] == 3


def test_waits_and_run_times_come_from_the_journal_and_lag_from_its_readers(cli: CommandRunner) -> None:
    cli.post.journal_reader("orders", "lake")
    cli.post.publish_many("orders", range(20))
    for _ in range(20):
        with cli.post.receive("orders"):
            pass
    watcher = Collector(cli.post)
    watcher.tick(0.0)
    (line,) = watcher.lines()
    assert line.wait_time is not None
    assert line.run_time is not None
    assert (line.lag, line.workers, line.published_per_second > 0) == (60, 0, True)


@pytest.mark.parametrize(
    ("number", "printed"),
    [(0, "0"), (0.25, "0.2"), (999, "999"), (9_999, "9999"), (12_345, "12.3k"), (5e6, "5.0M"), (2e11, "200G")],
)
def test_a_number_is_five_characters_wide(number: float, printed: str) -> None:
    assert format_number(number) == printed


def test_a_duration_is_five_characters_wide() -> None:
    spans = [None, *(timedelta(seconds=seconds) for seconds in (0.012, 1.5, 90, 600, 7_200, 9e5))]
    assert [format_duration(one) for one in spans] == ["–", "12ms", "1.5s", "90.0s", "10.0m", "2.0h", "10d"]


# ---- the live view -------------------------------------------------------------------------------------------------


def screen(view: WatchScreen) -> list[str]:
    """Return the text of the screen, line by line."""
    return ["".join(segment.text for segment in strip).rstrip() for strip in view.screen._compositor.render_strips()]


async def until(pilot: Any, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "the condition did not happen"
        await pilot.pause(0.05)


def status(view: WatchScreen) -> str:
    return str(view.query_one("#status", Static).content)


def rows(view: WatchScreen) -> list[list[str]]:
    listing = view.query_one("#queues", DataTable)
    return [[str(cell) for cell in listing.get_row_at(number)] for number in range(listing.row_count)]


def test_the_view_shows_queues_and_acts_on_the_one_chosen(cli: CommandRunner) -> None:
    cli.bury("mails", 1, 2)
    cli.post.publish("orders", 1)

    async def scenario() -> None:
        view = WatchScreen(cli.post)
        async with view.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: len(rows(view)) == 2)
            assert [row[:2] for row in rows(view)] == [["mails", "0"], ["orders", "1"]]
            await until(pilot, lambda: "redrive dead letters" in screen(view)[-1] and "orders" in screen(view)[3])
            seen = screen(view)
            assert seen[0] == "2 queues, 1 ready, 0 leased, 2 dead, 0 workers"
            assert seen[1].split() == list(HEADERS)
            assert re.fullmatch(r"orders +1 +0 +0 +0 +\S+ +\S+ +0 +– +– +0 +–", seen[3].strip())
            await pilot.press("p")
            await until(pilot, lambda: status(view) == "mails is paused")
            assert rows(view)[0][0] == "‖ mails"
            assert cli.post.stats("mails").paused
            await pilot.press("r")
            await until(pilot, lambda: status(view) == "mails is resumed")
            await pilot.press("d")
            await until(pilot, lambda: isinstance(view.screen, Question))
            await pilot.press("n")
            await until(pilot, lambda: status(view) == "nothing was done")
            assert cli.post.ledger("mails").dead_kept == 2
            await pilot.press("d")
            await until(pilot, lambda: isinstance(view.screen, Question))
            await pilot.press("y")
            await until(pilot, lambda: status(view) == "2 dead letters of mails made ready again")
            await pilot.press("down", "d")
            await until(pilot, lambda: status(view) == "orders has no dead letters")
            cli.post.publish("new", 1)
            cli.post.publish("orders", 2)
            await until(pilot, lambda: ["orders", "2"] in [row[:2] for row in rows(view)])
            await pilot.press("q")

    asyncio.run(scenario())
    assert cli.post.ledger("mails").ready == 2
    assert [one.command for one in cli.post.actions().actions] == [
        "waypost dead redrive mails --all", "waypost resume mails", "waypost pause mails",
    ]  # fmt: skip


def test_the_view_reports_an_unreachable_store_and_goes_on_when_it_is_back(valkey_server: Any) -> None:
    with Proxy(valkey_server.port) as proxy:
        url = valkey_server.url_at(proxy.port)

        async def scenario() -> None:
            with Waypost(url, namespace=fresh_namespace(), retry_budget=0) as post:
                post.publish("orders", 1)
                view = WatchScreen(post)
                async with view.run_test(size=(80, 24)) as pilot:
                    await until(pilot, lambda: len(rows(view)) == 1)
                    proxy.refuse()
                    proxy.cut()
                    await until(pilot, lambda: status(view).startswith("the store does not answer"))
                    assert [row[:2] for row in rows(view)] == [["orders", "1"]]
                    proxy.heal()
                    await until(pilot, lambda: status(view) == "")

        asyncio.run(scenario())


def on_a_terminal(cli: CommandRunner, program: str, printed_text: bytes, keys: bytes = b"") -> tuple[int, bytes]:
    """Run a program on a new terminal, press keys once it has printed a text; return its exit code and its output."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, "watch", *cli.options], stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    )  # fmt: skip
    os.close(theirs)
    printed, deadline = b"", time.monotonic() + WAIT_SECONDS_MAX
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.1)[0]:
                continue
            printed += os.read(ours, 65_536)
            if keys and printed_text in printed:
                os.write(ours, keys)
                keys = b""
    except OSError:
        pass  # the other end is closed
    finally:
        if process.poll() is None and time.monotonic() >= deadline:
            process.kill()
        os.close(ours)
    return process.wait(WAIT_SECONDS_MAX), printed


PROGRAM = "import sys; from waypost.cli.main import main; sys.exit(main())"


def test_a_real_terminal_shows_the_view_until_q_is_pressed(sqlite_cli: CommandRunner) -> None:
    sqlite_cli.post.publish("orders", 1)
    code, printed = on_a_terminal(sqlite_cli, PROGRAM, b"orders", b"q")
    assert (code, b"Traceback" in printed) == (0, False), printed
    assert b"1 queue, 1 ready, 0 leased" in printed


def test_without_its_extra_the_view_names_it_and_the_alternative(sqlite_cli: CommandRunner) -> None:
    code, printed = on_a_terminal(sqlite_cli, "import sys; sys.modules['textual'] = None; " + PROGRAM, b"")
    assert code == 2
    assert b'pip install "waypost[cli]"; --once works without it' in printed
