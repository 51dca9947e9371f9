"""The lake: how fast a history becomes tables, and what an increment costs when the lake is old or much is open.

    python -m benchmarks.lake --quick --json

`pipeline` takes events of a Valkey store through bronze and silver to gold, in an empty lake each time, in a session of
two cores. Its variants are histories of other lengths: their rates are to be alike.

An increment is a run that loads 10,000 new events (publishes, claims and ends of the oldest messages) into a lake that
exists, in a session that is warm. `increment-days-ratio` is its time after 365 days of history over its time after one
day with as many events; `increment-open-ratio` is its time with 1,000,000 open messages over its time with 10,000.
`increment-floor` is the time of a run with one new event. `files` are the data files of all tables after 300,000 events
over 365 days, and `files-on-disk` are all files of that lake, logs included.
"""

from __future__ import annotations

import itertools
import logging
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.measure import Contender, Report, arguments
from waypost import Waypost
from waypost.identity import Session
from waypost.spark.lake.pipeline import Pipeline, local_settings
from waypost.spark.session import session
from waypost.spark.source.bulk import open_bulk
from waypost.spark.source.credentials import Place
from waypost.store.sqlite.entries import entries_to_rows
from waypost.store.sqlite.schema import Spelling
from waypost.testing.clock import ClockTime
from waypost.testing.servers import ValkeyServer
from waypost.values import Settlement

#: Variants by their number of events.
SIZES = {"100k": 100_000, "300k": 300_000, "1m": 1_000_000, "3m": 3_000_000}
QUEUE = "orders"
DAY_MS = 86_400_000
INCREMENT_EVENTS = 10_000
#: Of so many ended messages one is a dead letter, which stays open.
DEAD_EVERY = 100


def pipelining(report: Report, spark: SparkSession, events: int, sizes: list[str], rounds: int, folder: Path) -> None:
    """The figures of the pipeline."""
    from benchmarks.spark import fill

    lakes = (str(folder / f"lake-{number}") for number in itertools.count())

    def run(url: str) -> None:
        Pipeline(spark, next(lakes), store=url).run()

    with ValkeyServer(tcp=False) as server:
        count = fill(server.url, events)
        report.rates("pipeline", "lake", [Contender("waypost", lambda: run(server.url), count)], rounds)
    for size in sizes:
        with ValkeyServer(tcp=False) as server:
            url, count = server.url, fill(server.url, SIZES[size])
            contender = Contender("waypost", lambda url=url: run(url), count, variant=size)  # type: ignore[misc]
            report.rates("pipeline", "lake", [contender], 1)


@dataclass
class Grown:
    """A store with a history, and the lake that has it."""

    folder: Path
    spark: SparkSession
    name: str

    @property
    def file(self) -> Path:
        """The file of the store."""
        return self.folder / f"{self.name}.db"

    @property
    def url(self) -> str:
        """The store."""
        return f"sqlite:///{self.file}"

    @property
    def lake(self) -> Path:
        """The lake."""
        return self.folder / f"{self.name}-lake"

    def grow(self, *, closed_events: int, open_messages: int, days: int) -> None:
        """Make the history and load it."""
        with Waypost(self.url) as post:
            post.configure(QUEUE, journal_max=100_000_000)
            if closed_events:
                publish(post, closed_events // 3)
                self.work(closed_events // 3)
            publish(post, open_messages)
        with sqlite3.connect(self.file) as file:
            entries_to_rows(file, Spelling("wp"))
            count = file.execute("SELECT max(number) FROM wp_journal").fetchone()[0]
            start = time.time_ns() // 1_000_000 - days * DAY_MS
            file.execute(
                "UPDATE wp_journal SET at_ms = ? + CAST(number * ? AS INTEGER)", (start, days * DAY_MS / count)
            )
        Pipeline(self.spark, str(self.lake), store=self.url).run()

    def work(self, count: int) -> None:
        """Claim the oldest messages and settle them."""
        with open_bulk(Place(self.url)) as bulk:
            caller, store = Session(ClockTime()), bulk.store
            done = 0
            while done < count:
                limit = min(512, count - done)
                leases = bulk.run(store.claim(QUEUE, limit, caller.operation(QUEUE), worker="bench:1:0000")).leases
                settlements = [
                    Settlement(lease.id, lease.token, lease.nonce, **ending(done + number))
                    for number, lease in enumerate(leases)
                ]
                bulk.run(store.settle(QUEUE, settlements, caller.operation(QUEUE)))
                done += len(leases)

    def increment(self, events: int = INCREMENT_EVENTS) -> float:
        """Make new events; return how long the run takes that loads them."""
        with Waypost(self.url) as post:
            publish(post, max(1, events // 3))
        if events > 2:
            self.work(events // 3)
        start = time.perf_counter()
        Pipeline(self.spark, str(self.lake)).run()
        return time.perf_counter() - start


def publish(post: Waypost, count: int) -> None:
    for start in range(0, count, 20_000):
        post.publish_many(QUEUE, [{"id": number} for number in range(start, min(count, start + 20_000))])


def ending(number: int) -> dict[str, Any]:
    return {"outcome": "dead", "reason": "rejected"} if number % DEAD_EVERY == 1 else {}


def compare(report: Report, name: str, small: Grown, large: Grown, rounds: int) -> None:
    """Print the time of an increment in both lakes, by turns, and their ratio."""
    times: dict[str, list[float]] = {small.name: [], large.name: []}
    for turn in range(rounds + 1):
        for grown in (small, large):
            seconds = grown.increment()
            if turn:
                times[grown.name].append(seconds)
    medians = {which: statistics.median(found) for which, found in times.items()}
    for which, seconds in medians.items():
        report.add(f"increment-{which}", "lake", "waypost", round(seconds, 3), "s")
    report.add(f"increment-{name}-ratio", "lake", "waypost", round(medians[large.name] / medians[small.name], 2), "x")


def count_files(grown: Grown) -> tuple[int, int]:
    """Return the number of data files of all tables, and of all files of the lake."""
    lake = Pipeline(grown.spark, str(grown.lake)).lake
    data = sum(len(lake.data_files(name)) for name in lake.table_names())
    return data, sum(path.is_file() for path in grown.lake.rglob("*"))


def aging(report: Report, spark: SparkSession, rounds: int, folder: Path, *, full: bool) -> None:
    """The figures of increments."""
    made: Callable[[str], Grown] = lambda name: Grown(folder, spark, name)  # noqa: E731
    young, old = made("1-day"), made("365-days")
    young.grow(closed_events=300_000, open_messages=3_000, days=1)
    old.grow(closed_events=300_000, open_messages=3_000, days=365)
    data, on_disk = count_files(old)
    report.add("files", "lake", "waypost", data, "files")
    report.add("files-on-disk", "lake", "waypost", on_disk, "files")
    compare(report, "days", young, old, rounds)
    report.add("increment-floor", "lake", "waypost", round(min(young.increment(1) for _ in range(3)), 3), "s")
    few, many = made("10k-open"), made("1m-open")
    few.grow(closed_events=0, open_messages=10_000, days=1)
    many.grow(closed_events=0, open_messages=1_000_000, days=1)
    compare(report, "open", few, many, rounds)
    if full:
        more = made("2m-open")
        more.grow(closed_events=0, open_messages=2_000_000, days=1)
        compare(report, "open-2m", few, more, rounds)


def main() -> None:
    """Run the benchmark of the command line."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)
    report = Report(options.json)
    with tempfile.TemporaryDirectory() as directory:
        spark = session("local[2]", local_settings(), name="waypost benchmarks", progress=False)
        pipelining(report, spark, 200_000, [], 3, Path(directory))
        aging(report, spark, 3 if options.quick else 5, Path(directory), full=not options.quick)
        spark.stop()


if __name__ == "__main__":
    main()
