"""Single publishes that are made at the same time, beside the same publishes one after the other.

    python -m benchmarks.publish --quick --json

`publish-concurrent` is 100 tasks of one event loop that publish one message each, all at once, again and again;
`publish-threads` is 16 threads of one blocking client. `publish-lone` is one task that publishes one message after the
other: it must not pay for what the others gain. `calls-concurrent` is how many requests the store gets per message. All
with the defaults: journal `all`, one client. PostgreSQL and SQLite wait for the disk, Valkey has no persistence.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.core import BODY
from benchmarks.measure import Contender, Report, arguments
from benchmarks.peers.hosts import host
from waypost import AsyncWaypost, Waypost
from waypost.store.port import Call
from waypost.store.postgres import migrate

STORES = ("valkey", "postgres", "sqlite")
TASKS, THREADS = 100, 16
#: Waves of 100 tasks, messages of a thread, and lone publishes in one round.
WAVES, EACH, LONE = 40, 200, 400


class Subject:
    """Both clients on one store."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self._post = AsyncWaypost(url)
        self._sync = Waypost(url)
        self._queues = (f"bench-{number}" for number in itertools.count())
        self._queue = ""
        self.calls = 0
        self._runner.run(self._open())

    async def _open(self) -> None:
        executor = await self._post._connected()
        send = executor.run

        async def run(call: Call[Any]) -> Any:
            self.calls += 1
            return await send(call)

        executor.run = run  # type: ignore[method-assign]

    def new_queue(self) -> None:
        """Return a new queue for each run, so that no run is slowed by the one before."""
        if self._queue:
            self._sync.purge(self._queue, "ready")
        self._queue = next(self._queues)

    def concurrent(self, waves: int) -> None:
        async def run() -> None:
            publish, queue = self._post.publish, self._queue
            for _ in range(waves):
                await asyncio.gather(*(publish(queue, BODY) for _ in range(TASKS)))

        self._runner.run(run())

    def lone(self, count: int) -> None:
        async def run() -> None:
            for _ in range(count):
                await self._post.publish(self._queue, BODY)

        self._runner.run(run())

    def in_threads(self, each: int) -> None:
        def run() -> None:
            for _ in range(each):
                self._sync.publish(self._queue, BODY)

        threads = [threading.Thread(target=run) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        self._runner.run(self._post.close())
        self._runner.close()
        self._sync.close()


@contextmanager
def subject_on(store: str) -> Iterator[Subject]:
    """Start a server if the store needs one, and open both clients."""
    with host(store) as place, place.place() as url:
        if store == "postgres":
            migrate(url)
        subject = Subject(url)
        try:
            yield subject
        finally:
            subject.close()


def publishing(report: Report, store: str, subject: Subject, share: float, rounds: int) -> None:
    """The figures of one store."""
    waves, each, lone = (max(1, round(count * share)) for count in (WAVES, EACH, LONE))
    report.rates(
        "publish-concurrent",
        store,
        [Contender("waypost", lambda: subject.concurrent(waves), waves * TASKS, subject.new_queue)],
        rounds,
    )
    report.rates(
        "publish-threads",
        store,
        [Contender("waypost", lambda: subject.in_threads(each), each * THREADS, subject.new_queue)],
        rounds,
    )
    report.rates(
        "publish-lone",
        store,
        [Contender("waypost", lambda: subject.lone(lone), lone, subject.new_queue)],
        rounds,
    )
    subject.calls = 0
    subject.concurrent(waves)
    report.add("calls-concurrent", store, "waypost", round(subject.calls / (waves * TASKS), 3), "calls/message")


def main() -> None:
    """Run the benchmark of the command line."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)  # a server without persistence is intended here
    report = Report(options.json)
    share, rounds = (0.5, 3) if options.quick else (1.0, 5)
    for store in STORES:
        if options.store in (None, store):
            with subject_on(store) as subject:
                publishing(report, store, subject, share, rounds)


if __name__ == "__main__":
    main()
