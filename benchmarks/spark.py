"""Spark's side: reading the journal and publishing in bulk, beside other ways to do the same in the same session.

    python -m benchmarks.spark --quick --json

`read` takes all columns of the journal into Spark's `noop` sink. Peers: `tuples` reads the same events with the same
parts by the store's own verb and yields a tuple for each; `jdbc-like` is ours with one connection and one part, as a
JDBC reader without bounds would do; `parquet` is the same rows from files, the ceiling. `write` publishes rows of a
DataFrame; its peer `python` is the same publish, deduplication included, in one process without Spark, and `plain` is
`publish_many`, which does not remember what it sent. `pipeline` is the way from the journal to gold (see `lake`).
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import LongType, StructField, StructType

from benchmarks.lake import pipelining
from benchmarks.measure import Contender, Report, arguments
from waypost import Waypost
from waypost.identity import Session
from waypost.spark.lake.pipeline import local_settings
from waypost.spark.session import session
from waypost.spark.source.bulk import open_bulk
from waypost.spark.source.credentials import Place
from waypost.spark.source.options import write_options
from waypost.spark.source.partitions import EventRange, Partition, split_ranges
from waypost.spark.source.publishing import RowIds
from waypost.spark.source.writer import BatchWriter
from waypost.store.bulk.tables import ENVELOPE_COLUMNS, JOURNAL
from waypost.store.postgres import migrate
from waypost.testing.clock import ClockTime
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer
from waypost.values import Settlement

QUEUE = "orders"
BODY = StructType([StructField("body", StructType([StructField("id", LongType())]))])
FIELDS = [name for name in JOURNAL.columns if name not in ENVELOPE_COLUMNS]


class TuplesReader(DataSourceReader):
    """Reads events one by one, like a reader without Arrow."""

    def __init__(self, url: str) -> None:
        self.place = Place(url)

    def partitions(self) -> Sequence[InputPartition]:
        with open_bulk(self.place) as bulk:
            first, newest = bulk.bounds(QUEUE)
        return [Partition(numbers=part) for part in split_ranges([EventRange(QUEUE, first - 1, newest)], 4)]

    def read(self, partition: Any) -> Iterator[tuple[Any, ...]]:
        nothing = (None,) * len(ENVELOPE_COLUMNS)
        with open_bulk(self.place) as bulk:
            for numbers in partition.numbers:
                after = numbers.after
                while after < numbers.to:
                    page = bulk.run(bulk.store.journal(QUEUE, after, min(5000, numbers.to - after)))
                    for event in page.events:
                        yield (*(getattr(event, name) for name in FIELDS), *nothing)
                    after = page.last


class Tuples(DataSource):
    """The peer as a data source."""

    @classmethod
    def name(cls) -> str:
        return "tuples"

    def schema(self) -> str:
        return JOURNAL.ddl

    def reader(self, schema: StructType) -> DataSourceReader:
        return TuplesReader(self.options["url"])


def fill(url: str, events: int) -> int:
    """Make a journal of about `events` events: published, claimed, done."""
    with Waypost(url) as post, open_bulk(Place(url)) as bulk:
        post.configure(QUEUE, journal_max=10_000_000)
        post.publish_many(QUEUE, ({"id": number} for number in range(events // 3)))
        caller, store = Session(ClockTime()), bulk.store
        while leases := bulk.run(store.claim(QUEUE, 512, caller.operation(QUEUE), worker="bench:1:0000")).leases:
            settlements = [Settlement(lease.id, lease.token, lease.nonce) for lease in leases]
            bulk.run(store.settle(QUEUE, settlements, caller.operation(QUEUE)))
        return bulk.bounds(QUEUE)[1]


def drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def reading(report: Report, spark: SparkSession, store: str, url: str, events: int, rounds: int, folder: Path) -> None:
    count = fill(url, events)

    def ours(**options: str) -> DataFrame:
        return spark.read.format("waypost").options(url=url, queue=QUEUE, **options).load()

    path = str(folder / f"{store}-{events}.parquet")
    ours().write.parquet(path)
    in_python = partial(bulk_read, url)
    rates = report.rates(
        "read",
        store,
        [
            Contender("waypost", lambda: drain(ours()), count),
            Contender("tuples", lambda: drain(spark.read.format("tuples").option("url", url).load()), count),
            Contender("jdbc-like", lambda: drain(ours(numPartitions="1")), count),
            Contender("parquet", lambda: drain(spark.read.parquet(path)), count),
            Contender("python", in_python, count),
        ],
        rounds,
    )
    for peer in ("tuples", "jdbc-like", "parquet"):
        report.add(f"read-to-{peer}", store, "waypost", round(rates["waypost"] / rates[peer], 2), "x")


def bulk_read(url: str) -> None:
    """Run the bulk reader alone, in this process."""
    with open_bulk(Place(url)) as bulk:
        first, newest = bulk.bounds(QUEUE)
        for _ in bulk.journal(QUEUE, first - 1, newest, list(JOURNAL.columns)):
            pass


def writing(report: Report, spark: SparkSession, store: str, url: str, rows: int, rounds: int) -> None:
    names = (f"out-{number}" for number in itertools.count())
    frame = spark.range(0, rows, 1, 2).select(f.struct("id").alias("body"))

    def by_spark() -> None:
        frame.write.format("waypost").options(url=url, queue=next(names)).mode("append").save()

    def by_python() -> None:
        writer = BatchWriter(write_options({"url": url, "queue": next(names)}), BODY)
        numbers = range(0, rows, 10_000)
        batches = (
            pa.RecordBatch.from_pylist([{"body": {"id": n}} for n in range(start, min(rows, start + 10_000))])
            for start in numbers
        )
        writer.publish(batches, RowIds(writer.write_id, 0, writer.made_ms))

    def plainly() -> None:
        with Waypost(url) as post:
            post.publish_many(next(names), ({"id": number} for number in range(rows)))

    rates = report.rates(
        "write",
        store,
        [
            Contender("waypost", by_spark, rows),
            Contender("python", by_python, rows),
            Contender("plain", plainly, rows),
        ],
        rounds,
    )
    report.add("write-to-python", store, "waypost", round(rates["waypost"] / rates["python"], 2), "x")


@contextmanager
def store_url(store: str) -> Iterator[str]:
    if store == "valkey":
        with ValkeyServer(tcp=False) as server:
            yield server.url
    elif store == "postgres":
        with PostgresServer() as server:
            migrate(server.url)
            yield server.socket_url
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield f"sqlite:///{directory}/bench.db"


def main() -> None:
    """Run the benchmark of the command line."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)
    report = Report(options.json)
    events, rows, rounds = (200_000, 50_000, 3) if options.quick else (1_000_000, 200_000, 3)
    with tempfile.TemporaryDirectory() as directory:
        spark = session("local[2]", local_settings(), name="waypost benchmarks", progress=False)
        spark.dataSource.register(Tuples)
        for store in ("valkey", "postgres", "sqlite"):
            if options.store in (None, store):
                with store_url(store) as url:
                    reading(report, spark, store, url, events, rounds, Path(directory))
                    writing(report, spark, store, url, rows, rounds)
        if options.store in (None, "valkey"):
            sizes = ["100k"] if options.quick else ["100k", "300k", "3m"]
            pipelining(report, spark, events, sizes, rounds, Path(directory))
        spark.stop()


if __name__ == "__main__":
    main()
