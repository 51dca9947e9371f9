"""Real worker processes: killed, stopped, frozen, blocked, cut off from their server, poisoned."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from waypost import Waypost
from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import EmbeddedServer, ValkeyServer

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 30.0
LEASE = 0.8


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.01)


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and only waits to be looked at does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


class Crew:
    """Worker processes on one store, the notes that their handlers write, and a client to look on."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.notes = folder / "notes"
        self.notes.touch()
        self.post = Waypost(url, retry_budget=20)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *queues: str, processes: int = 1) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-m", "waypost.cli.main", "worker", "tests.fault.crew:post"]
        command += ["--queues", ",".join(queues), "--timeout", "5", "--processes", str(processes)]
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"CREW_URL": self.url, "CREW_NOTES": str(self.notes), "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        self.processes.append(process)
        return process

    def told(self) -> list[tuple[str, str, int, int]]:
        """What the handlers noted: what, body, delivery, process."""
        lines = (line.split() for line in self.notes.read_text().splitlines())
        return [(what, body, int(delivery), int(pid)) for what, body, delivery, pid in lines]

    def count(self, what: str) -> int:
        return sum(line[0] == what for line in self.told())

    def freeze(self, process: subprocess.Popen[str]) -> None:
        """Stop it where it stands, but not inside a transaction: whoever holds a SQLite file holds it for all."""

        def frozen() -> bool:
            process.send_signal(signal.SIGSTOP)
            # A signal stops one thread after the other: before the last one stops, it can still begin a transaction.
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if not self.url.startswith("sqlite"):
                return True
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=0.2)) as connection:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError:
                    process.send_signal(signal.SIGCONT)
                    return False
                connection.rollback()
                return True

        until(frozen, "a freeze between two steps")

    def stop(self, process: subprocess.Popen[str], how: signal.Signals = signal.SIGTERM) -> str:
        """Ask it to stop; what it said."""
        process.send_signal(how)
        said = process.communicate(timeout=PATIENCE_SECONDS)[1]
        assert process.returncode == 0, said
        return said

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.post.close()


SERVERS: dict[str, Callable[[], EmbeddedServer]] = {
    "valkey": lambda: ValkeyServer(appendonly=True, appendfsync="always"),
    "postgres": lambda: PostgresServer(durable=True),
}


@contextmanager
def crew_on(store: str, folder: Path) -> Iterator[tuple[Crew, EmbeddedServer | None]]:
    with ExitStack() as stack:
        server = stack.enter_context(SERVERS[store]()) if store in SERVERS else None
        url = f"sqlite:///{folder / 'crew.db'}" if server is None else server.url
        if store == "postgres":
            migrate(url)
        crew = Crew(url, folder)
        stack.callback(crew.close)
        yield crew, server


@pytest.fixture(params=["sqlite", *SERVERS])
def crew(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Crew]:
    with crew_on(request.param, tmp_path) as (made, _):
        yield made
        for queue in made.post.queues():
            ledger = made.post.ledger(queue)
            assert (ledger.balance, ledger.unexplained) == (0, 0)


@pytest.mark.promise("LEASE-3", "LEASE-4")
def test_a_message_whose_worker_is_killed_is_delivered_again_when_its_lease_ends(crew: Crew) -> None:
    crew.post.configure("hanging", lease=LEASE)
    published = crew.post.publish("hanging", 1)
    first, second = crew.start("hanging"), crew.start("hanging")
    until(lambda: crew.count("began") == 1, "the first delivery")
    killed = crew.told()[0][3]
    os.kill(killed, signal.SIGKILL)
    until(lambda: crew.post.ledger("hanging").done == 1, "the second delivery")
    assert [(what, delivery) for what, _, delivery, _ in crew.told()] == [("began", 1), ("began", 2), ("ended", 2)]
    events = {event.event: event for event in crew.post.history("hanging", published.id)}
    assert events["expired"].run_ms is not None
    assert {first.pid, second.pid} >= {killed}


@pytest.mark.promise("LEASE-3", "LEASE-4", "LEASE-11")
def test_a_handler_in_a_process_ends_with_its_killed_worker_and_is_delivered_again(crew: Crew) -> None:
    crew.post.configure("grinding", lease=LEASE)
    crew.post.publish_many("grinding", range(30))
    killed = crew.start("grinding")
    until(lambda: crew.count("ended") >= 3, "some work")
    (grinding,) = until(lambda: {pid for _, body, _, pid in crew.told() if body == "0"}, "the message that never ends")
    killed.kill()
    until(lambda: not is_there(grinding), "the end of its process")
    other = crew.start("grinding")
    until(lambda: crew.post.ledger("grinding").done == 30, "the rest")
    assert "given back" in crew.stop(other)
    ended = Counter(body for what, body, _, _ in crew.told() if what == "ended")
    assert set(ended) == {str(number) for number in range(30)}
    # Only what was under way or not settled when the worker was killed can have run twice.
    assert sum(ended.values()) - 30 <= crew.post.ledger("grinding").expired
    assert not any(is_there(pid) for _, _, _, pid in crew.told())


@pytest.mark.promise("LEASE-11", "LEASE-5")
def test_a_worker_that_is_asked_to_stop_under_load_loses_nothing(crew: Crew) -> None:
    crew.post.publish_many("slow", range(300))
    worker = crew.start("slow")
    until(lambda: crew.count("ended") >= 10, "some work")
    said = crew.stop(worker)
    ledger = crew.post.ledger("slow")
    assert ledger.leased == 0
    assert ledger.done == crew.count("ended") == crew.count("began")
    assert ledger.done + ledger.ready == 300
    assert all(stored.deliveries == 0 for stored in crew.post.peek("slow", 300))
    assert f"{ledger.done} handled" in said
    assert "slow       slow: 5 at once on the event loop" in said
    again = crew.start("slow", processes=2)
    until(lambda: crew.post.ledger("slow").done == 300, "the rest")
    crew.stop(again, signal.SIGINT)
    assert set(Counter(body for what, body, _, _ in crew.told() if what == "ended").values()) == {1}


@pytest.mark.promise("LEASE-11")
def test_a_second_signal_does_not_wait(crew: Crew) -> None:
    crew.post.publish("hanging", 1)
    worker = crew.start("hanging")
    until(lambda: crew.count("began") == 1, "the first delivery")
    worker.send_signal(signal.SIGTERM)

    def ended() -> bool:
        worker.send_signal(signal.SIGTERM)
        return worker.poll() is not None

    until(ended, "its end")
    assert worker.returncode == -signal.SIGTERM
    assert crew.post.ledger("hanging").leased == 1


@pytest.mark.promise("LEASE-2", "LEASE-3")
def test_a_worker_that_was_frozen_for_longer_than_its_lease_cannot_settle(crew: Crew) -> None:
    crew.post.configure("late", lease=LEASE)
    published = crew.post.publish("late", 1)
    frozen = crew.start("late")
    until(lambda: crew.count("began") == 1, "the first delivery")
    crew.freeze(frozen)
    other = crew.start("late")
    until(lambda: crew.post.ledger("late").done == 1, "the second delivery")
    (crew.folder / "thawed").touch()
    frozen.send_signal(signal.SIGCONT)
    # Its own clock or a renewal told the handler and cancelled it, or it ended first and its settle was refused.
    said = crew.stop(frozen)
    assert "the lease of message" in said
    crew.stop(other)
    names = [event.event for event in crew.post.history("late", published.id)]
    assert names == ["published", "claimed", "expired", "claimed", "done"]
    assert crew.post.ledger("late").done == 1


@pytest.mark.promise("LEASE-3", "LEASE-2")
def test_a_handler_whose_process_was_frozen_hears_that_its_lease_is_lost(crew: Crew) -> None:
    crew.post.configure("told", lease=LEASE)
    published = crew.post.publish("told", 1)
    frozen = crew.start("told")
    until(lambda: crew.count("began") == 1, "the first delivery")
    crew.freeze(frozen)
    other = crew.start("told")
    until(lambda: crew.post.ledger("told").done == 1, "the second delivery")
    frozen.send_signal(signal.SIGCONT)
    until(lambda: crew.count("lost-True") == 1, "the news")
    assert [(what, delivery, pid) for what, _, delivery, pid in crew.told() if what != "began"] == [
        ("lost-False", 2, other.pid),
        ("lost-True", 1, frozen.pid),
    ]
    assert "the lease of message" in crew.stop(frozen)
    crew.stop(other)
    names = [event.event for event in crew.post.history("told", published.id)]
    assert names == ["published", "claimed", "expired", "claimed", "done"]


@pytest.mark.promise("LEASE-2", "LEASE-4")
def test_a_worker_that_was_frozen_in_its_sleep_starts_nothing_that_is_no_longer_its_own(crew: Crew) -> None:
    # Long enough a lease for an idle worker to be in a blocking wait: the server claims for it there.
    crew.post.configure("slow", lease=2.4)
    frozen = crew.start("slow")
    until(lambda: crew.post.stats("slow").sleepers == 1, "a sleeper")
    crew.freeze(frozen)
    crew.post.publish("slow", 1)
    other = crew.start("slow")
    until(lambda: crew.count("ended") == 1, "the work of the other one")
    frozen.send_signal(signal.SIGCONT)
    until(lambda: crew.post.stats("slow").sleepers == 2, "two sleepers")
    crew.post.publish("slow", 2)
    until(lambda: crew.post.ledger("slow").done == 2, "the second message")
    assert [(what, body) for what, body, _, _ in crew.told()] == [
        ("began", "1"), ("ended", "1"), ("began", "2"), ("ended", "2"),
    ]  # fmt: skip
    assert crew.told()[0][3] == other.pid
    for worker in (frozen, other):
        crew.stop(worker)


@pytest.mark.promise("LEASE-3")
def test_an_event_loop_that_is_blocked_for_longer_than_the_lease_loses_nothing(crew: Crew) -> None:
    crew.post.configure("blocking", lease=LEASE)
    crew.post.publish_many("blocking", range(5))
    blocked, other = crew.start("blocking"), crew.start("blocking")
    until(lambda: crew.post.ledger("blocking").done == 5, "all of it")
    assert crew.post.ledger("blocking").expired == 0
    assert crew.count("began") == 5
    crew.stop(blocked)
    crew.stop(other)


@pytest.mark.promise("LEASE-5", "DEAD-1")
def test_a_poison_message_ends_after_exactly_its_limit_while_others_flow(crew: Crew) -> None:
    crew.post.configure("poison", lease=0.3, max_deliveries=3)
    crew.post.publish_many("poison", ["a", "poison", "b", "c"])
    # Each delivery kills a process, and the one that looks after them starts another.
    workers = crew.start("poison", processes=2)
    until(lambda: crew.post.ledger("poison").dead == 1 and crew.post.ledger("poison").done == 3, "the end of all")
    (letter,) = crew.post.dead_letters("poison")
    assert (letter.body, letter.reason, letter.deliveries) == ("poison", "max_deliveries", 3)
    assert [delivery for what, body, delivery, _ in crew.told() if body == "poison"] == [1, 2, 3]
    said = crew.stop(workers)
    assert said.count("starting another") == 3


@pytest.mark.promise("LEASE-14")
@pytest.mark.parametrize("store", SERVERS)
def test_workers_go_on_by_themselves_after_their_server_was_restarted_under_load(tmp_path: Path, store: str) -> None:
    with crew_on(store, tmp_path) as (crew, server):
        assert server is not None
        crew.post.configure("slow", lease=2)
        crew.post.publish_many("slow", range(200))
        workers = [crew.start("slow"), crew.start("slow")]
        # One that has not connected yet would rightly give up: its first connection has a start timeout.
        until(lambda: len(crew.post.workers()) == 2, "both at work")
        until(lambda: crew.count("ended") >= 20, "some work")
        server.kill()
        server.restart()
        until(lambda: crew.post.ledger("slow").done == 200, "the rest")
        ledger = crew.post.ledger("slow")
        assert (ledger.balance, ledger.unexplained, ledger.dead) == (0, 0, 0)
        assert {body for what, body, _, _ in crew.told() if what == "ended"} == {str(number) for number in range(200)}
        for worker in workers:
            crew.stop(worker)


#: A client whose module is never fully imported, as of a program that connects or reads much when it starts.
SLOW_START = """
import os, time
from pathlib import Path
Path(f"importing-{os.getpid()}").touch()
time.sleep(600)
"""

#: The command, with a signal that comes in the middle of the start of its first process.
SIGNALLED = """
import os, signal, subprocess, sys
from waypost.cli.main import main
class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Popen
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def supervisor(folder: Path, *python: str) -> Iterator[subprocess.Popen[str]]:
    """`waypost worker --processes 2` whose processes never finish their start; none is left behind."""
    (folder / "slow_start.py").write_text(SLOW_START)
    # A file, not a pipe: the end of a pipe would be awaited for as long as one of the processes holds it.
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, *python, "worker", "slow_start:post", "--processes", "2"], cwd=folder, stderr=said,
            text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in importing(folder):
            if is_there(pid):
                os.kill(pid, signal.SIGKILL)


def importing(folder: Path) -> list[int]:
    """The processes that have begun to start."""
    return [int(path.name.partition("-")[2]) for path in folder.glob("importing-*")]


@pytest.mark.promise("LEASE-11")
def test_processes_that_are_asked_to_stop_while_they_start_end_in_order(tmp_path: Path) -> None:
    with supervisor(tmp_path, "-m", "waypost.cli.main") as asked:
        until(lambda: len(importing(tmp_path)) == 2, "the start of both")
        asked.send_signal(signal.SIGTERM)
        assert asked.wait(PATIENCE_SECONDS) == 0, (tmp_path / "said").read_text()
        assert not any(is_there(pid) for pid in importing(tmp_path))


@pytest.mark.promise("LEASE-11")
def test_a_signal_that_comes_while_a_process_is_started_reaches_it(tmp_path: Path) -> None:
    with supervisor(tmp_path, "-c", SIGNALLED) as asked:
        assert asked.wait(PATIENCE_SECONDS) == 0, (tmp_path / "said").read_text()
