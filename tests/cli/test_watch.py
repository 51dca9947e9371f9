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
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import DataTable, Static

from scripts import watch_screens
from tests.cli.conftest import CommandRunner
from tests.fault.proxy import Proxy
from tests.waiting import WAIT_SECONDS_MAX
from waypost import NoRetry, Waypost
from waypost.cli.watch.collector import IDLE_COMMANDS_PER_SECOND, TICK_SECONDS, Collector
from waypost.cli.watch.columns import (
    COLUMNS,
    NAME_WIDTH_MIN,
    choose_columns,
    format_duration,
    format_number,
    sort_lines,
    sparkline,
)
from waypost.cli.watch.detail import format_detail
from waypost.cli.watch.screen import Help, Question, QueueView, WatchScreen
from waypost.store.port import Heartbeat, ServedQueue
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace

pytestmark = pytest.mark.promise("FACE-2")

ROOT = Path(__file__).parents[2]
#: An array whose first part is a text: the begin of every command, and of nothing in the scripts.
COMMAND_HEAD = re.compile(rb"\*\d+\r\n\$\d+\r\n")


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
    """Count commands of Valkey's protocol by their heads: a large one, as a script, comes in several parts."""
    return len(COMMAND_HEAD.findall(data))


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


@pytest.mark.parametrize(("queues", "opened"), [(1, None), (30, None), (30, "queue-7")])
def test_an_idle_watch_sends_less_than_two_requests_a_second(
    counted: tuple[Counter, Waypost], queues: int, opened: str | None
) -> None:
    proxy, post = counted
    for number in range(queues):
        post.publish(f"queue-{number}", 1)
    watcher = Collector(post)
    watcher.opened = opened
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
            assert [row[:2] for row in rows(view)] == [["mails", "0"], ["! orders", "1"]]
            await until(pilot, lambda: "redrive" in screen(view)[-1] and "orders" in screen(view)[3])
            seen = screen(view)
            assert seen[0] == "2 queues, 1 ready, 0 leased, 2 dead, 0 workers, 1 unserved"
            names = ["ready", "delayed", "leased", "dead", "oldest", "done/s", "workers", "state"]
            assert seen[1].split() == ["queue▾", *names]
            assert re.fullmatch(r"! orders +1 +0 +0 +0 +\S+ +0 +0 no worker", seen[3].strip())
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
            await until(pilot, lambda: ["! orders", "2"] in [row[:2] for row in rows(view)])
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
                    assert [row[:2] for row in rows(view)] == [["! orders", "1"]]
                    proxy.heal()
                    await until(pilot, lambda: status(view) == "")

        asyncio.run(scenario())


# ---- what is wrong, one queue, filter, sort ------------------------------------------------------------------------


def fail_once(cli: CommandRunner, queue: str, text: str) -> None:
    """Publish a message and make it a dead letter by an error."""
    cli.post.publish(queue, 1)
    with pytest.raises(LookupError), cli.post.receive(queue, retry=NoRetry()):
        raise LookupError(text)


def register(post: Waypost, name: str, queue: str, status: str = "green", *reasons: str) -> None:
    executor = post.store.connect(start_timeout=20)
    try:
        served = (ServedQueue(queue, 10, 1, 5),)
        executor.run(post.store.heartbeat(Heartbeat(name, status=status, reasons=reasons, queues=served), 60_000))
    finally:
        executor.close()


@pytest.mark.promise("FACE-6")
def test_a_queue_that_is_open_is_described_in_full(cli: CommandRunner) -> None:
    cli.bury("orders", 1, 2, reason="too big")
    fail_once(cli, "orders", "no such order")
    cli.post.publish("orders", 4)
    with cli.post.receive("orders"):
        pass
    register(cli.post, "shop-1:4711", "orders", "red", "no claim was possible for 95 s")
    watcher = Collector(cli.post)
    assert watcher.detail("orders") is None
    watcher.opened = "orders"
    watcher.tick(0.0)
    watcher.poll_now("orders", 1.0)
    found = watcher.detail("orders")
    assert found is not None
    assert [(one.count, one.reason, one.error_type) for one in found.dead_reasons] == [
        (2, "too big", None), (1, "retries_exhausted", "LookupError"),
    ]  # fmt: skip
    assert (found.dead_read, [event.error for event in found.errors]) == (3, ["no such order"])
    assert sum(one.counts["published"] for one in found.minutes) == 4
    assert (found.line.trend[-1] + found.line.trend[-2], found.line.red_workers, found.line.unserved) == (1, 1, False)
    printed = str(format_detail(found, 60))
    assert max(map(len, printed.splitlines())) <= 60
    for text in ("1 worker of 1 red", "     2  too big", "no claim was possible for 95 s", "LookupError:", "orders"):
        assert text in printed
    # The number of dead letters is the same, and they are others.
    cli.post.redrive("orders", reason="too big", limit=1)
    with cli.post.receive("orders") as message:
        assert message is not None
        message.dead("too small")
    watcher.tick(20.0)
    later = watcher.detail("orders")
    assert later is not None
    assert {one.reason for one in later.dead_reasons} == {"too big", "too small", "retries_exhausted"}


@pytest.mark.promise("FACE-6")
def test_what_is_wrong_is_red_and_marked(sqlite_cli: CommandRunner) -> None:
    post = sqlite_cli.post
    fail_once(sqlite_cli, "dead", "no such order")
    for queue in ("lonely", "paused", "red", "well"):
        post.publish(queue, 1)
    post.pause("paused")
    register(post, "shop-1", "red", "red", "no claim was possible for 95 s")
    for queue in ("well", "paused"):
        register(post, f"shop-{queue}", queue)

    async def scenario() -> None:
        view = WatchScreen(post)
        async with view.run_test(size=(140, 24)) as pilot:
            await until(pilot, lambda: len(rows(view)) == 5)
            table = view.query_one("#queues", DataTable)
            names = [str(column.key.value) for column in table.columns.values()]
            colors: dict[str, set[str]] = {}
            for number in range(5):
                cells = dict(zip(names, table.get_row_at(number), strict=True))
                colors[str(cells["queue"])] = {name for name, cell in cells.items() if "red" in str(cell.style)}
            assert colors == {
                "dead": {"dead"}, "! lonely": {"queue", "workers", "state"}, "‖ paused": set(),
                "! red": {"queue", "workers", "state"}, "well": set(),
            }  # fmt: skip

    asyncio.run(scenario())


@pytest.mark.promise("FACE-6")
def test_keys_open_a_queue_filter_sort_and_help(sqlite_cli: CommandRunner) -> None:
    sqlite_cli.bury("orders", 1, reason="too big")
    sqlite_cli.post.publish_many("mails", range(3))

    def names(view: WatchScreen) -> list[str]:
        return [row[0].removeprefix("! ") for row in rows(view)]

    async def scenario() -> None:
        view = WatchScreen(sqlite_cli.post)
        async with view.run_test(size=(70, 24)) as pilot:
            await until(pilot, lambda: names(view) == ["mails", "orders"])
            await pilot.press("s")
            await until(pilot, lambda: names(view) == ["mails", "orders"] and "ready▾" in screen(view)[1])
            await pilot.press("s", "s")
            await until(pilot, lambda: names(view) == ["orders", "mails"] and status(view) == "sorted by dead")
            await pilot.press("slash", "O", "R")
            await until(pilot, lambda: names(view) == ["orders"])
            await pilot.press("enter")
            await until(pilot, lambda: view.focused is view.query_one("#queues"))
            await pilot.press("enter")
            await until(pilot, lambda: any("1  too big" in line for line in screen(view)))
            assert isinstance(view.screen, QueueView)
            await pilot.press("slash", "p")
            await until(pilot, lambda: any("paused: r resumes it" in line for line in screen(view)))
            await pilot.press("r", "escape")
            await until(pilot, lambda: not isinstance(view.screen, QueueView))
            assert names(view) == ["orders"]
            await pilot.press("escape")
            await until(pilot, lambda: names(view) == ["orders", "mails"])
            await pilot.press("question_mark")
            await until(pilot, lambda: isinstance(view.screen, Help))
            await pilot.press("q")
            await until(pilot, lambda: not isinstance(view.screen, Help))
            await pilot.resize_terminal(140, 24)
            await until(pilot, lambda: "published/s" in screen(view)[1])

    asyncio.run(scenario())
    assert not sqlite_cli.post.stats("orders").paused


@pytest.mark.promise("FACE-6")
def test_columns_fit_every_width_and_have_the_names_of_stats(sqlite_cli: CommandRunner) -> None:
    for width in range(50, 220):
        chosen = choose_columns(width, NAME_WIDTH_MIN)
        assert sum(column.width for column in chosen) + NAME_WIDTH_MIN <= width
    assert {"ready", "dead", "leased", "oldest", "workers"} <= {one.name for one in choose_columns(70, 18)}
    assert len(choose_columns(160, 20)) == len(COLUMNS)
    sqlite_cli.post.publish("orders", 1)
    assert set(sqlite_cli.run("stats").split()[:9]) <= {"queue", *(column.name for column in COLUMNS)}
    assert sqlite_cli.run("watch", "--once").split()[:10] == [
        "queue", "ready", "delayed", "waiting", "leased", "dead", "done", "oldest", "published/s", "done/s",
    ]  # fmt: skip


def test_lines_are_sorted_with_the_most_first_and_by_name_within(sqlite_cli: CommandRunner) -> None:
    for queue, number in (("a", 1), ("b", 3), ("c", 1)):
        sqlite_cli.post.publish_many(queue, range(number))
    watcher = Collector(sqlite_cli.post)
    watcher.tick(0.0)
    for column in COLUMNS:
        assert len(sort_lines(watcher.lines(), column.name)) == 3
    assert [line.queue for line in sort_lines(watcher.lines(), "ready")] == ["b", "a", "c"]
    assert [line.queue for line in sort_lines(watcher.lines(), "queue")] == ["a", "b", "c"]


def test_a_sparkline_has_a_bar_for_each_value() -> None:
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "··"
    assert sparkline([0, 1, 4, 8]) == "·▂▅█"


# ---- on a terminal -------------------------------------------------------------------------------------------------


def on_a_terminal(
    cli: CommandRunner, program: str, steps: Sequence[tuple[bytes, bytes]] = (), **environment: str
) -> tuple[int, bytes]:
    """Run a program on a new terminal; return its exit code and its output.

    Each step is a text, and the keys that are pressed once it was printed, after those of the step before.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, "watch", *cli.options], stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        | environment,
    )  # fmt: skip
    os.close(theirs)
    printed, seen, left = b"", 0, list(steps)
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.1)[0]:
                continue
            printed += os.read(ours, 65_536)
            if left and left[0][0] in printed[seen:]:
                seen = len(printed)
                os.write(ours, left.pop(0)[1])
    except OSError:
        pass  # the other end is closed
    finally:
        if process.poll() is None and time.monotonic() >= deadline:
            process.kill()
        os.close(ours)
    return process.wait(WAIT_SECONDS_MAX), printed


PROGRAM = "import sys; from waypost.cli.main import main; sys.exit(main())"
#: Sequences that set a color of the text or of what is behind it.
COLOR = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


@pytest.mark.promise("FACE-6")
def test_a_real_terminal_is_driven_by_keys(sqlite_cli: CommandRunner) -> None:
    sqlite_cli.bury("orders", 1, reason="too big")
    sqlite_cli.post.publish("mails", 1)
    steps = [
        (b"quit", b"\x1b[B\r"),
        (b"recent errors", b"\x1b"),
        (b"filter", b"s"),
        (b"sorted by ready", b"/"),
        (b"part of a name", b"mai"),
        (b"/mai", b"\x11"),  # control and q
    ]
    code, printed = on_a_terminal(sqlite_cli, PROGRAM, steps)
    assert (code, b"Traceback" in printed) == (0, False), printed
    assert b"2 queues, 1 ready, 0 leased" in printed
    assert b"too big" in printed
    assert COLOR.search(printed)


def test_the_view_has_no_colors_if_no_color_is_set(sqlite_cli: CommandRunner) -> None:
    sqlite_cli.bury("orders", 1, reason="too big")
    code, printed = on_a_terminal(sqlite_cli, PROGRAM, [(b"quit", b"\r"), (b"recent errors", b"q")], NO_COLOR="1")
    assert (code, b"Traceback" in printed) == (0, False), printed
    assert COLOR.findall(printed) == []
    assert re.search(rb"\x1b\[(?:1;)?7[;m]", printed)  # the cursor is reversed


def test_without_its_extra_the_view_names_it_and_the_alternative(sqlite_cli: CommandRunner) -> None:
    code, printed = on_a_terminal(sqlite_cli, "import sys; sys.modules['textual'] = None; " + PROGRAM)
    assert code == 2
    assert b'pip install "waypost[cli]"; --once works without it' in printed


@pytest.mark.promise("FACE-6")
def test_the_screens_in_the_documentation_are_those_of_the_view() -> None:
    page = watch_screens.PAGE.read_text()
    found = watch_screens.BEGIN + page.partition(watch_screens.BEGIN)[2].partition(watch_screens.END)[0]
    assert found + watch_screens.END == watch_screens.written(), "run python -m scripts.watch_screens"
