"""A group of worker processes on one store, for the fault tests: they run the handlers of `worker_app.py`."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from tests.waiting import WAIT_SECONDS_MAX, until
from waypost import Waypost
from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import EmbeddedServer, ValkeyServer

ROOT = Path(__file__).parents[2]


def is_there(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


class WorkerGroup:
    """Worker processes on one store, the notes that their handlers write, and a client to inspect the store."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.notes = folder / "notes"
        self.notes.touch()
        self.post = Waypost(url, retry_budget=20)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *queues: str, processes: int = 1) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-m", "waypost.cli.main", "worker", "tests.fault.worker_app:post"]
        command += ["--queues", ",".join(queues), "--timeout", "5", "--processes", str(processes)]
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"APP_URL": self.url, "APP_NOTES": str(self.notes), "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        self.processes.append(process)
        return process

    def read_notes(self) -> list[tuple[str, str, int, int]]:
        """Return what the handlers noted: event, body, delivery, process."""
        lines = (line.split() for line in self.notes.read_text().splitlines())
        return [(what, body, int(delivery), int(pid)) for what, body, delivery, pid in lines]

    def count(self, what: str) -> int:
        return sum(line[0] == what for line in self.read_notes())

    def freeze(self, process: subprocess.Popen[str]) -> None:
        """Freeze it, but not inside a transaction: a locked SQLite file is locked for all processes."""

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
        """Stop it with a signal, and return its output."""
        process.send_signal(how)
        output = process.communicate(timeout=WAIT_SECONDS_MAX)[1]
        assert process.returncode == 0, output
        return output

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
def worker_group_on(store: str, folder: Path) -> Iterator[tuple[WorkerGroup, EmbeddedServer | None]]:
    with ExitStack() as stack:
        server = stack.enter_context(SERVERS[store]()) if store in SERVERS else None
        url = f"sqlite:///{folder / 'workers.db'}" if server is None else server.url
        if store == "postgres":
            migrate(url)
        group = WorkerGroup(url, folder)
        stack.callback(group.close)
        yield group, server
