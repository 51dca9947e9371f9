"""Queues that take turns between groups, beside the same messages in a queue that does not.

    python -m benchmarks.groups --quick --json

`drain-fair` and `drain-ordered` claim and settle messages of 1,000 groups in batches of 100, `publish-fair` publishes
them. The peer `ungrouped` is the same queue without the settings; `-cpu` and `-server-cpu` are the processor time per
message of the client and of the server. Without `--quick` also 100,000 messages of 100,000 groups, beside the peer
`1000-groups`, as many messages of fewer groups: claims should not cost more where there are more groups. And 1 and 10
ordered groups, of which each hands out one message at a time, to a worker. `neighbour-wait-p99` is how long messages of
one group wait, from the publish to the start of the handler, while another group has a backlog: handlers of 5 ms,
concurrency 10. The first messages are not counted: the worker is starting meanwhile, and each connection plans its
statements. The peer `empty` is the same without the backlog, `unfair` the same without turns (20 messages, a
backlog of 4,000).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from benchmarks.core import BODY
from benchmarks.measure import Contender, Report, arguments
from benchmarks.peers.hosts import host
from benchmarks.peers.protocol import server_seconds
from waypost import AsyncWaypost, Waypost
from waypost.identity import Session
from waypost.store.postgres import migrate
from waypost.testing.clock import ClockTime
from waypost.values import Settlement

STORES = ("valkey", "postgres", "sqlite")
GROUPS, MANY_GROUPS = 1_000, 100_000
MESSAGES, BATCH = 20_000, 100
BACKLOG, QUICK_BACKLOG = 200_000, 20_000
NEIGHBOURS, HANDLER_SECONDS, CONCURRENCY = 500, 0.005, 10
#: Messages of the quiet group before those that are counted.
WARM_UP = 20
SETTINGS: dict[str, dict[str, Any]] = {"fair": {"fair": True}, "ordered": {"order": "group"}}


class Subject:
    """A client on one store, and its connection for claims and settles."""

    def __init__(self, url: str, server: int) -> None:
        self.url = url
        #: The process id of the server, 0 if there is none.
        self.server = server
        self.post = Waypost(url)
        self._session = Session(ClockTime())
        self._queues = (f"bench-{number}" for number in itertools.count())
        self.queue = ""

    def fill(self, count: int, groups: int, **settings: Any) -> None:
        """Publish messages of this many groups into a new queue."""
        self.new_queue(**settings)
        self.publish(count, groups)

    def new_queue(self, **settings: Any) -> None:
        """Use a new queue from now on."""
        if self.queue:
            self.post.purge(self.queue, "ready")
        self.queue = next(self._queues)
        if settings:
            self.post.configure(self.queue, **settings)

    def publish(self, count: int, groups: int) -> None:
        """Publish messages, the groups one after the other."""
        numbers = itertools.count()
        self.post.publish_many(
            self.queue, itertools.repeat(BODY, count), group=lambda body: f"group-{next(numbers) % groups}"
        )

    def drain(self, count: int) -> None:
        """Claim and settle all messages, a batch at a time."""
        store, run, session, queue = self.post._store, self.post._call, self._session, self.queue
        left = count
        while left:
            claimed = run(store.claim(queue, BATCH, session.operation(queue), worker="bench"))
            if not claimed.leases:
                raise RuntimeError(f"{left} messages are left that no claim finds")
            done = [Settlement(lease.id, lease.token, lease.nonce) for lease in claimed.leases]
            run(store.settle(queue, done, session.operation(queue)))
            left -= len(done)

    def close(self) -> None:
        self.post.close()


@contextmanager
def subject_on(store: str) -> Iterator[Subject]:
    """Start a server if the store needs one, and open a client."""
    with host(store) as place, place.place() as url:
        if store == "postgres":
            migrate(url)
        with closing(Subject(url, place.pid)) as subject:
            yield subject


def draining(report: Report, store: str, subject: Subject, count: int, rounds: int) -> None:
    """The figures of claims and settles."""
    for name, settings in SETTINGS.items():
        contenders = [
            drain_of(subject, "waypost", count, GROUPS, settings), drain_of(subject, "ungrouped", count, GROUPS, {}),
        ]  # fmt: skip
        report.rates(f"drain-{name}", store, contenders, rounds, subject.server)


def many_groups(report: Report, store: str, subject: Subject, count: int, rounds: int) -> None:
    """The same with a group for each message, beside as many messages of fewer groups."""
    for name, settings in SETTINGS.items():
        contenders = [
            drain_of(subject, "waypost", count, count, settings),
            drain_of(subject, f"{GROUPS}-groups", count, GROUPS, settings),
            drain_of(subject, "ungrouped", count, count, {}),
        ]
        report.rates(f"drain-{name}-{count // 1000}k-groups", store, contenders, rounds, subject.server)


def drain_of(subject: Subject, peer: str, count: int, groups: int, settings: dict[str, Any]) -> Contender:
    """A contender that claims and settles messages of so many groups."""
    return Contender(peer, partial(subject.drain, count), count, partial(subject.fill, count, groups, **settings))


def publishing(report: Report, store: str, subject: Subject, count: int, rounds: int) -> None:
    """The figure of publishes."""
    contenders = [
        Contender(peer, partial(subject.publish, count, GROUPS), count, partial(subject.new_queue, **given))
        for peer, given in (("waypost", SETTINGS["fair"]), ("ungrouped", {}))
    ]
    report.rates("publish-fair", store, contenders, rounds, subject.server)


def few_groups(report: Report, store: str, subject: Subject, count: int) -> None:
    """What 1 and 10 ordered groups hand out to a worker, one message of each at a time."""
    for groups in (1, 10):
        subject.fill(count, groups, order="group")
        name, spent = f"ordered-{groups}-groups", time.process_time()
        seconds, served = asyncio.run(handle_all(subject, count))
        costs = {"cpu": time.process_time() - spent, "server-cpu": served}
        report.add(name, store, "waypost", round(count / seconds / groups), "messages/s/group")
        for suffix, cost in costs.items():
            report.add(f"{name}-{suffix}", store, "waypost", round(cost / count * 1e6, 1), "us/message")


async def handle_all(subject: Subject, count: int) -> tuple[float, float]:
    """Handle all messages of a queue; return how many seconds that took, and how many of the server's processor."""
    handled, done = 0, asyncio.Event()
    async with AsyncWaypost(subject.url) as post:

        @post.handler(subject.queue, concurrency=CONCURRENCY * 2)
        async def handle(body: Any) -> None:
            nonlocal handled
            handled += 1
            if handled == count:
                done.set()

        start, served = time.perf_counter(), server_seconds(subject.server)
        async with post.worker(), asyncio.timeout(600):
            await done.wait()
            return time.perf_counter() - start, server_seconds(subject.server) - served


def neighbours(report: Report, store: str, subject: Subject, backlog: int) -> None:
    """How long one group waits beside the backlog of another."""
    for peer, waiting, fair, count in (
        ("waypost", backlog, True, NEIGHBOURS), ("empty", 0, True, NEIGHBOURS), ("unfair", 4_000, False, 20),
    ):  # fmt: skip
        subject.new_queue(**(SETTINGS["fair"] if fair else {}))
        if waiting:
            subject.post.publish_many(subject.queue, itertools.repeat(0.0, waiting), group="noisy")
        waits = asyncio.run(wait_times(subject.url, subject.queue, count))
        p99 = statistics.quantiles(waits, n=100)[98]
        report.add("neighbour-wait-p99", store, peer, round(p99 * 1000, 2), "ms")


async def wait_times(url: str, queue: str, count: int) -> list[float]:
    """Publish messages of a quiet group, one every few milliseconds, and return how long each waited."""
    waits, done = list[float](), asyncio.Event()
    async with AsyncWaypost(url) as post:

        @post.handler(queue, concurrency=CONCURRENCY)
        async def handle(body: float) -> None:
            if body:
                waits.append(time.perf_counter() - body)
                if len(waits) == WARM_UP + count:
                    done.set()
            await asyncio.sleep(HANDLER_SECONDS)

        async with post.worker():
            for _ in range(WARM_UP + count):
                await post.publish(queue, time.perf_counter(), group="quiet")
                await asyncio.sleep(HANDLER_SECONDS)
            async with asyncio.timeout(120):
                await done.wait()
    return waits[WARM_UP:]


def main() -> None:
    """Run the benchmark of the command line."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)  # a server without persistence is intended here
    report = Report(options.json)
    for store in STORES:
        if options.store not in (None, store):
            continue
        with subject_on(store) as subject:
            count, rounds = (MESSAGES // 4, 3) if options.quick else (MESSAGES, 5)
            draining(report, store, subject, count, rounds)
            publishing(report, store, subject, count, rounds)
            neighbours(report, store, subject, QUICK_BACKLOG if options.quick else BACKLOG)
            if not options.quick:
                few_groups(report, store, subject, 2_000)
                many_groups(report, store, subject, MANY_GROUPS, 1)


if __name__ == "__main__":
    main()
