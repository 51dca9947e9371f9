"""Real worker processes in the register: killed, stopped, and with a store that goes away and comes back."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path

import pytest

from tests.fault.worker_group import ROOT, WorkerGroup
from tests.waiting import until
from waypost.testing.servers import EmbeddedServer, ValkeyServer

pytestmark = pytest.mark.promise("SEE-4")
#: Heartbeats come every second then, and the store forgets a worker three seconds after its last.
WINDOW = 1.5


class RecordedGroup(WorkerGroup):
    """Worker processes that record changes of their health, and a store that can be made unreachable."""

    def __init__(self, url: str, folder: Path, server: EmbeddedServer | None) -> None:
        super().__init__(url, folder)
        self.server = server

    def start_recorder(self, queue: str) -> tuple[subprocess.Popen[str], Callable[[], list[str]]]:
        """Start a process; return it, and a function that reads its health so far."""
        path = self.folder / f"health-{len(self.processes)}"
        path.touch()
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.fault.health_recorder", str(path), str(WINDOW), queue],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"APP_URL": self.url, "APP_NOTES": str(self.notes), "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        self.processes.append(process)
        return process, lambda: path.read_text().split()

    def pids(self) -> set[int]:
        """Return the processes of the workers that are listed."""
        return {worker.pid for worker in self.post.workers()}

    @contextmanager
    def away(self) -> Iterator[None]:
        """The store does not answer: its server is killed, or another connection has locked its file."""
        if self.server is not None:
            self.server.kill()
            try:
                yield
            finally:
                self.server.restart()
            return
        with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=30)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.rollback()


@contextmanager
def served(store: str) -> Iterator[EmbeddedServer]:
    if store == "valkey":
        with ValkeyServer(appendonly=True) as server:
            yield server
        return
    from waypost.store.postgres import migrate
    from waypost.testing.postgres import PostgresServer

    # Acknowledged data must survive the kill.
    with PostgresServer(durable=True) as postgres:
        migrate(postgres.url)
        yield postgres


@pytest.fixture(params=["sqlite", "valkey", "postgres"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RecordedGroup]:
    @contextmanager
    def open_group(url: str, server: EmbeddedServer | None) -> Iterator[RecordedGroup]:
        made = RecordedGroup(url, tmp_path, server)
        try:
            yield made
        finally:
            made.close()

    if request.param == "sqlite":
        with open_group(f"sqlite:///{tmp_path / 'workers.db'}", None) as made:
            yield made
        return
    with served(request.param) as server, open_group(server.url, server) as made:
        yield made


def test_a_killed_worker_is_forgotten_after_its_time_and_a_stopped_one_at_once(group: RecordedGroup) -> None:
    (killed, _), (stopped, _), (kept, _) = (group.start_recorder("slow") for _ in range(3))
    until(lambda: group.pids() == {killed.pid, stopped.pid, kept.pid}, "three workers")
    group.stop(stopped)
    assert group.pids() == {killed.pid, kept.pid}
    killed.kill()
    killed.wait()
    (last,) = (worker for worker in group.post.workers() if worker.pid == killed.pid)
    until(lambda: group.pids() == {kept.pid}, "the end of the killed one's time")
    (left,) = group.post.workers()
    # Not before its time was over by the store's clock, by the record of the worker that is left.
    until(lambda: group.post.workers()[0].seen_at >= last.expires_at, "the next heartbeat")
    assert left.pid == kept.pid
    assert [(queue.name, queue.concurrency) for queue in left.queues] == [("slow", 5)]
    group.stop(kept)
    assert group.pids() == set()


@pytest.mark.promise("SEE-4", "LEASE-14")
def test_health_is_red_while_the_store_is_away_and_green_again_when_it_is_back(group: RecordedGroup) -> None:
    group.post.configure("slow", lease=3)
    group.post.publish_many("slow", range(100))
    recorders = [group.start_recorder("slow"), group.start_recorder("slow")]
    until(lambda: group.count("ended") >= 20, "some work")
    until(lambda: all(health()[-1:] == ["green"] for _, health in recorders), "two workers that are well")
    with group.away():
        until(lambda: all(health()[-1] == "red" for _, health in recorders), "the notice that the store is away")
    until(lambda: all(health()[-1] == "green" for _, health in recorders), "the notice that it is back")
    until(lambda: group.post.ledger("slow").done == 100, "the rest")
    until(lambda: group.pids() == {process.pid for process, _ in recorders}, "both in the register")
    ledger = group.post.ledger("slow")
    assert (ledger.balance, ledger.unexplained, ledger.dead) == (0, 0, 0)
    assert {body for what, body, _, _ in group.read_notes() if what == "ended"} == {
        str(number) for number in range(100)
    }
    for process, health in recorders:
        group.stop(process)
        # Heartbeats that failed before or after may have degraded it in between.
        turns = [status for status, _ in groupby(one for one in health() if one != "degraded")]
        assert turns[-3:] == ["green", "red", "green"]


def test_a_server_that_hangs_is_noticed_as_one_that_is_gone(tmp_path: Path) -> None:
    with ValkeyServer(appendonly=True) as server, closing(RecordedGroup(server.url, tmp_path, server)) as group:
        worker, health = group.start_recorder("slow")
        until(lambda: health()[-1:] == ["green"], "a worker that is well")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            until(lambda: health()[-1] == "red", "the notice that the server hangs")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        until(lambda: health()[-1] == "green", "the notice that it goes on")
        until(lambda: group.pids() == {worker.pid}, "the worker in the register")
        group.stop(worker)
        assert group.pids() == set()
