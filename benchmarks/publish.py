"""Single publishes that are made at the same time, beside other queues, and one after the other.

    python -m benchmarks.publish --quick --json

`publish-concurrent` is 100 tasks of one event loop that publish one message each, all at once, again and again;
`publish-threads` is 16 threads of one blocking client, each one message after the other. `…-cpu` is the processor
time of the publishing program per message, `…-server-cpu` that of the server. Each contender is a program of its own,
by turns; what counts is the median of the rounds. Peers that block publish from threads only.

`publish-lone` is one task that publishes one message after the other: it must not pay for what the others gain.
`calls-concurrent` is how many requests the store gets per message. `publish-tx` is one message in a transaction of
the caller's, beside faststream-outbox. All with the defaults: journal `all`, one client. PostgreSQL and SQLite wait
for the disk, Valkey has no persistence.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import statistics
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.core import BODY
from benchmarks.measure import Contender, Report, arguments
from benchmarks.outbox import transactions
from benchmarks.peers.harness import together
from benchmarks.peers.hosts import empty_store
from benchmarks.peers.protocol import TASKS
from benchmarks.peers.turns import Entry, Turns
from waypost import AsyncWaypost, Waypost
from waypost.store.port import Call

STORES = ("valkey", "postgres", "sqlite")
#: Peers with an asyncio client (or one of Node), and peers with a blocking one.
TASK_PEERS = ("arq", "taskiq", "bullmq", "pgqueuer", "procrastinate", "faststream-outbox")
THREAD_PEERS = ("dramatiq", "huey", "procrastinate")
#: Messages in one round: of waypost by store, of a peer, and lone ones.
OURS = {"valkey": 16_000, "postgres": 16_000, "sqlite": 8_000}
THEIRS, LONE = 3_200, 400
ROUNDS = 3


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

    def close(self) -> None:
        self._runner.run(self._post.close())
        self._runner.close()
        self._sync.close()


@contextmanager
def subject_on(store: str) -> Iterator[Subject]:
    """Start a server if the store needs one, and open both clients."""
    with empty_store(store) as url, closing(Subject(url)) as subject:
        yield subject


def alone(report: Report, store: str, share: float, rounds: int) -> None:
    """One publish after the other, and how many requests the store gets when they are made at the same time."""
    with subject_on(store) as subject:
        lone, waves = round(LONE * share), round(20 * share)
        report.rates(
            "publish-lone",
            store,
            [Contender("waypost", partial(subject.lone, lone), lone, subject.new_queue)],
            rounds,
        )
        subject.calls = 0
        subject.concurrent(waves)
        report.add("calls-concurrent", store, "waypost", round(subject.calls / (waves * TASKS), 3), "calls/message")


def at_the_same_time(report: Report, turns: Turns, name: str, kind: str, peers: tuple[str, ...], share: float) -> None:
    """Tasks or threads of waypost and of its peers, by turns."""
    entries: list[Entry] = []
    for store in STORES:
        entries += turns.ours([store], round(OURS[store] * share))
    entries += [
        Entry(entry.store, replace(entry.contestant, count=round(THEIRS * share))) for entry in turns.theirs(*peers)
    ]
    for entry, runs in turns.take(entries, ROUNDS, partial(together, kind=kind)).items():
        peer = entry.contestant.name
        report.add(name, entry.store, peer, round(statistics.median(run.rate for run in runs)), "messages/s")
        cpu = round(statistics.median(run.cpu_us for run in runs), 1)
        report.add(f"{name}-cpu", entry.store, peer, cpu, "us/message")
        if entry.store != "sqlite":
            server = round(statistics.median(run.server_cpu_us for run in runs), 1)
            report.add(f"{name}-server-cpu", entry.store, peer, server, "us/message")


def main() -> None:
    """Run the benchmark of the command line."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)  # a server without persistence is intended here
    report = Report(options.json)
    share = 0.5 if options.quick else 1.0
    for store in STORES:
        if options.store in (None, store):
            alone(report, store, share, ROUNDS)
    if options.store in (None, "postgres"):
        transactions(report, "publish-tx", round(2_000 * share / 5), 1)
    with Turns(options.quick, options.store) as turns:
        at_the_same_time(report, turns, "publish-concurrent", "tasks", TASK_PEERS, share)
        at_the_same_time(report, turns, "publish-threads", "threads", THREAD_PEERS, share)


if __name__ == "__main__":
    main()
