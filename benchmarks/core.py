"""The core's rates beside the ceilings: publish one by one, publish in bulk, claim and settle; and its import.

    python -m benchmarks.core --quick --json

`publish-one` and `publish-many` go through `Waypost`, `claim-settle` through the store's verbs with a `Message` built
for each, as a worker does. Figures without a suffix are the defaults: journal `all`, chunks of 512. The peer `raw` does
the least that such a step must do on the same store, in the same run, by turns. `publish-one-cpu` and
`publish-one-server-cpu` are the processor time per message of the client and of the server. `import` and
`import-cpu` are the time of a fresh interpreter that imports waypost, beside one that imports nothing; with `--store`
they are left out.
"""

from __future__ import annotations

import itertools
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Contender, Report, arguments
from benchmarks.raw import RawPostgres, RawSqlite, RawValkey
from waypost import Waypost
from waypost.identity import Session
from waypost.message import Message
from waypost.store.opening import open_store
from waypost.store.port import Executor, Store
from waypost.store.postgres import migrate
from waypost.testing.clock import ClockTime
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer
from waypost.values import Settlement

BODY = {"order": 1, "customer": "c-0042", "lines": [{"sku": "A-1", "count": 2}], "total": 1999}
PAYLOAD_BYTES = 130
BATCHES = (1, 32, 256, 512)
WORKER = "bench:1:0000"
Raw = RawValkey | RawSqlite | RawPostgres


class Subject:
    """Waypost on one store: the client for publishing, the store's verbs for claim and settle."""

    def __init__(self, url: str) -> None:
        self.post = Waypost(url)
        self.store: Store = open_store(url, namespace="wp", clock=None, replay_ttl_ms=300_000, durability="server")
        self.executor: Executor = self.store.connect(start_timeout=3)
        self.session = Session(ClockTime())
        self._names = (f"bench-{number}" for number in itertools.count())
        self.queue = ""
        #: The process id of the server, 0 if there is none.
        self.server = 0

    def new_queue(self, **settings: Any) -> None:
        """Return a new queue for each run, so that no run is slowed by the one before."""
        if self.queue:
            self.post.purge(self.queue, "ready")
        self.queue = next(self._names)
        if settings:
            self.post.configure(self.queue, **settings)

    def publish_one(self, count: int) -> int:
        publish, queue = self.post.publish, self.queue
        for _ in range(count):
            publish(queue, BODY)
        return count

    def publish_many(self, count: int, batch: int) -> int:
        if batch >= BATCHES[-1]:
            return len(self.post.publish_many(self.queue, itertools.repeat(BODY, count)))
        for _ in range(count // batch):
            self.post.publish_many(self.queue, itertools.repeat(BODY, batch))
        return count // batch * batch

    def claim_settle(self, batch: int) -> int:
        """Claim, make a message object for each, settle all; one step after the other."""
        store, run, queue, done = self.store, self.executor.run, self.queue, 0
        while True:
            claimed = run(store.claim(queue, batch, self.session.operation(queue), worker=WORKER))
            messages: list[Message[Any]] = [Message(queue, lease) for lease in claimed.leases]
            if not messages:
                return done
            settlements = [Settlement(m.id, m.token, m._lease.nonce) for m in messages]
            run(store.settle(queue, settlements, self.session.operation(queue)))
            done += len(messages)

    def close(self) -> None:
        self.executor.close()
        self.post.close()


@contextmanager
def valkey() -> Iterator[tuple[Subject, RawValkey]]:
    with ValkeyServer() as server:
        subject, raw = Subject(server.url), RawValkey(server.url, PAYLOAD_BYTES)
        subject.server = server.pid or 0
        try:
            yield subject, raw
        finally:
            subject.close()
            raw.client.close()


@contextmanager
def sqlite() -> Iterator[tuple[Subject, RawSqlite]]:
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(f"sqlite:///{Path(folder).absolute() / 'bench.db'}")
        raw = RawSqlite(Path(folder) / "raw.db", PAYLOAD_BYTES)
        try:
            yield subject, raw
        finally:
            subject.close()
            raw.close()


@contextmanager
def postgres() -> Iterator[tuple[Subject, RawPostgres]]:
    """A server that waits for its disk at each commit and vacuums by itself, as a real one does."""
    with PostgresServer(durable=True, autovacuum="on", shared_buffers="256MB", max_wal_size="4GB") as server:
        migrate(server.url)
        subject, raw = Subject(server.url), RawPostgres(server.url, PAYLOAD_BYTES)
        subject.server = server.pid or 0
        try:
            yield subject, raw
        finally:
            subject.close()
            raw.close()


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run."""

    ones: int
    many: int
    rounds: int


def publishing(report: Report, store: str, subject: Subject, raw: Raw, sizes: Sizes) -> None:
    """One by one, and in bulk."""
    ones, many = sizes.ones, sizes.many
    contenders = [
        Contender("waypost", partial(subject.publish_one, ones), ones, subject.new_queue),
        Contender("raw", partial(raw.publish_one, ones), ones, raw.empty),
    ]
    if isinstance(raw, RawPostgres):
        in_transaction = partial(raw.publish_one_in_transaction, ones)
        contenders.append(Contender("raw", in_transaction, ones, raw.empty, "in-transaction"))
        contenders.append(Contender("raw", partial(raw.publish_one, ones, prepare=True), ones, raw.empty, "prepared"))
    report.rates("publish-one", store, contenders, sizes.rounds, subject.server)
    publish = partial(subject.publish_many, many, BATCHES[-1])
    rates = report.rates(
        "publish-many",
        store,
        [
            Contender("waypost", publish, many, subject.new_queue),
            Contender("raw", partial(raw.publish_many, many, BATCHES[-1]), many, raw.empty),
            Contender("waypost", publish, many, partial(subject.new_queue, journal="off"), "journal-off"),
        ],
        sizes.rounds,
    )
    journal_cost(report, "publish-many", store, rates)
    for batch in BATCHES[1:-1]:
        count = many // 4 // batch * batch
        contender = Contender("waypost", partial(subject.publish_many, count, batch), count, subject.new_queue)
        report.rates(f"publish-many-batch-{batch}", store, [contender], sizes.rounds)


def claiming(report: Report, store: str, subject: Subject, raw: Raw, sizes: Sizes) -> None:
    """Claim and settle in several batch sizes."""

    def fill(count: int, **settings: Any) -> None:
        subject.new_queue(**settings)
        subject.publish_many(count, BATCHES[-1])

    def fill_raw(count: int) -> None:
        raw.empty()
        raw.publish_many(count, BATCHES[-1])

    for batch in BATCHES[:-1]:
        count = sizes.ones if batch == 1 else sizes.many // 4
        contenders = [
            Contender("waypost", partial(subject.claim_settle, batch), count, partial(fill, count)),
            Contender("raw", partial(raw.claim_settle, batch), count, partial(fill_raw, count)),
        ]
        report.rates(f"claim-settle-batch-{batch}", store, contenders, sizes.rounds)
    batch, count = BATCHES[-1], sizes.many
    claim_settle = partial(subject.claim_settle, batch)
    rates = report.rates(
        "claim-settle",
        store,
        [
            Contender("waypost", claim_settle, count, partial(fill, count)),
            Contender("raw", partial(raw.claim_settle, batch), count, partial(fill_raw, count)),
            Contender("waypost", claim_settle, count, partial(fill, count, journal="off"), "journal-off"),
        ],
        sizes.rounds,
    )
    journal_cost(report, "claim-settle", store, rates)


def journal_cost(report: Report, name: str, store: str, rates: dict[str, float]) -> None:
    """Report by how much the journal lowers the rate."""
    share = 1 - rates["waypost"] / rates["journal-off waypost"]
    report.add(f"{name}-journal-cost", store, "waypost", round(100 * share, 1), "%")


def round_trips(report: Report, subject: Subject, raw: RawValkey) -> None:
    """Requests that reach the server per message, counted by the server itself."""

    def calls() -> int:
        stats: dict[str, dict[str, int]] = raw.client.info("commandstats")
        return stats.get("cmdstat_evalsha", {}).get("calls", 0)

    for batch in BATCHES:
        subject.new_queue()
        count = batch * 4
        before = calls()
        subject.publish_many(count, batch)
        report.add(
            f"round-trips-publish-batch-{batch}", "valkey", "waypost", (calls() - before) / count, "calls/message"
        )
        before = calls()
        subject.claim_settle(batch)
        # The last claim finds the queue empty, and belongs to no message.
        trips = (calls() - before - 1) / count
        report.add(f"round-trips-claim-settle-batch-{batch}", "valkey", "waypost", trips, "calls/message")


def importing(report: Report, interpreters: int = 10) -> None:
    """The median time of fresh interpreters that import waypost, and of as many that import nothing, by turns."""
    programs = {"waypost": "import waypost", "raw": "pass"}
    # Without compiled files each of them would compile what it imports, where it is told to keep none.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    wall: dict[str, list[float]] = {peer: [] for peer in programs}
    processor: dict[str, list[float]] = {peer: [] for peer in programs}
    for turn in range(interpreters + 1):
        for peer, program in programs.items():
            start = time.perf_counter()
            process = subprocess.Popen([sys.executable, "-c", program], env=environment)
            _, status, used = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise RuntimeError(f"python -c {program!r} ended with {process.returncode}")
            if turn:  # the first one may have to compile, and to read from the disk
                wall[peer].append(1000 * seconds)
                processor[peer].append(1000 * (used.ru_utime + used.ru_stime))
    for name, times in (("import", wall), ("import-cpu", processor)):
        medians = {peer: statistics.median(found) for peer, found in times.items()}
        for peer, median in medians.items():
            report.add(name, "none", peer, round(median, 1), "ms")
        report.add(f"{name}-over-raw", "none", "waypost", round(medians["waypost"] - medians["raw"], 1), "ms")


def main() -> None:
    """Run the benchmark of the command line."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)  # a server without persistence is intended here
    report = Report(options.json)
    sizes = Sizes(1_500, 25_600, 3) if options.quick else Sizes(5_000, 102_400, 7)
    if options.store is None:
        importing(report)
    if options.store in (None, "valkey"):
        with valkey() as (subject, raw):
            publishing(report, "valkey", subject, raw, sizes)
            claiming(report, "valkey", subject, raw, sizes)
            round_trips(report, subject, raw)
    if options.store in (None, "sqlite"):
        # Each commit waits for the disk: fewer one by one.
        sizes = Sizes(sizes.ones // 5, sizes.many, sizes.rounds)
        with sqlite() as (subject, raw_sqlite):
            publishing(report, "sqlite", subject, raw_sqlite, sizes)
            claiming(report, "sqlite", subject, raw_sqlite, sizes)
    if options.store in (None, "postgres"):
        with postgres() as (subject, raw_postgres):
            publishing(report, "postgres", subject, raw_postgres, sizes)
            claiming(report, "postgres", subject, raw_postgres, sizes)


if __name__ == "__main__":
    main()
