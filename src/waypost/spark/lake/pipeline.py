"""The pipeline: bronze, silver and gold as steps, each of which is atomic and happens once, also if it is killed.

    from waypost.spark.lake.pipeline import Pipeline

    Pipeline(spark, "lake", store="valkey://127.0.0.1:6379").run()

Each step writes under new names and then moves one small file into place (see `lake`). A run first completes what an
earlier one left incomplete.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql import functions as f

from waypost.errors import ConfigurationError
from waypost.spark.lake import gold, silver
from waypost.spark.lake.bronze import BATCH_ROWS, Bronze, batch_name, new_folders
from waypost.spark.lake.compaction import FOLDERS_MAX, compact, remove_old_rows
from waypost.spark.lake.lake import PART, Folder, Lake, Seen, Source, State
from waypost.spark.lake.tables import (
    BRONZE_JOURNAL,
    FOLDER_TABLES,
    SILVER_DELIVERIES,
    SILVER_MESSAGES,
    SILVER_SUMS,
)
from waypost.spark.session import JAVA_OPTIONS
from waypost.spark.source.bulk import open_bulk
from waypost.spark.source.credentials import Place
from waypost.spark.spark_errors import map_spark_error
from waypost.store.bulk.tables import Table
from waypost.urls import holds_secret

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger("waypost")

#: What makes the writes of a local session fast: files of several days are written side by side, without a sort.
SETTINGS: Final = {"spark.sql.maxConcurrentOutputFileWriters": "64"}


#: Spark's error when a Python process was too slow to start, and how often it is started again.
SLOW_START: Final = "failed to connect back"
STARTS_MAX: Final = 5
#: How often a stream that follows checks whether it is to stop.
STOP_POLL_SECONDS: Final = 0.2


def local_settings() -> dict[str, str]:
    """Return Spark settings for this machine: memory to sort a batch, and a collector that uses no extra core."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    megabytes = max(1024, min(4096, memory // 4 // 2**20))
    return {**SETTINGS, "spark.driver.memory": f"{megabytes}m", JAVA_OPTIONS: "-XX:+UseParallelGC"}


def ignore_progress(text: str) -> None:
    """Ignore a line of progress."""


def make_source(url: str | None, url_env: str | None, namespace: str, queues: tuple[str, ...] | None) -> Source:
    """Where events come from. A URL with a password must be named, not given: it would be written into the lake."""
    if url is not None and holds_secret(url):
        raise ConfigurationError(
            "the URL of the store holds a password, and it would be written into the lake and into Spark's plans: put "
            "it into an environment variable and name that"
        )
    return Source(url, url_env, namespace, queues)


class Pipeline:
    """A lake and the store that it is made from."""

    def __init__(
        self,
        spark: SparkSession,
        lake: str,
        *,
        store: str | None = None,
        store_env: str | None = None,
        namespace: str = "wp",
        queues: tuple[str, ...] | None = None,
        batch_rows: int = BATCH_ROWS,
        partitions: int | None = None,
        format: str | None = None,
        reader: str | None = None,
        moved: bool = False,
        progress: Callable[[str], None] = ignore_progress,
    ) -> None:
        self.spark = spark
        self.lake = Lake(lake, format=format)
        self.progress = progress
        self.batch_rows = batch_rows
        #: A part for each core: starting one costs more than what a finer cut would gain.
        self.partitions = partitions or spark.sparkContext.defaultParallelism
        self.reader = reader
        known = self.lake.state.source
        if store is None and store_env is None:
            if known is None:
                raise ConfigurationError(f"the lake {lake} is new: give its store with --store")
            self.source = known
        else:
            if queues is None and known is not None:
                queues = known.queues
            self.source = make_source(store, store_env, namespace, queues)
            self._check_source(known, moved)

    def _check_source(self, known: Source | None, moved: bool) -> None:
        given = self.source
        if known is None or moved:
            return
        if (known.url, known.url_env, known.namespace) != (given.url, given.url_env, given.namespace):
            raise ConfigurationError(
                f"the lake {self.lake.files.root} was made from {known.url or known.url_env} (namespace "
                f"{known.namespace}), not from this store: two stores in one lake cannot be kept apart. Give each "
                "its own lake; if the store has only moved, pass --moved"
            )

    @property
    def place(self) -> Place:
        """Where the store is."""
        source = self.source
        return Place(url=source.url, url_env=source.url_env, namespace=source.namespace)

    def options(self) -> dict[str, str]:
        """The options of the source."""
        source = self.source
        chosen = {
            "namespace": source.namespace,
            "maxRowsPerBatch": str(self.batch_rows),
            "numPartitions": str(self.partitions),
            # What is trimmed before it is read is counted and reported by the audit; it must not end the pipeline.
            "failOnDataLoss": "false",
        }
        chosen |= {"url": source.url} if source.url is not None else {"urlEnv": source.url_env or ""}
        if source.queues:
            chosen["queue"] = ",".join(source.queues)
        if self.reader is not None:
            chosen["reader"] = self.reader
        return chosen

    # ---- runs ------------------------------------------------------------------------------------------------

    def run(self) -> State:
        """Load the new events of the journal, and update all tables."""
        with self.lake.lock():
            return self.run_locked()

    def run_locked(self) -> State:
        """Run while the caller holds the lock of the lake."""
        self.prepare()
        self.catch_up(self.spark)
        self.bronze()
        self.catch_up(self.spark)
        return self.lake.state

    def follow(self, every_seconds: float, stop: threading.Event) -> None:
        """Load new events every `every_seconds`, until `stop` is set."""
        with self.lake.lock():
            self.prepare()
            self.catch_up(self.spark)
            bronze = Bronze(self.lake, then=self.catch_up)
            self.progress(f"following, every {every_seconds:g} seconds; interrupt to stop")
            run_stream(lambda: bronze.start(self.spark, self.options(), every_seconds=every_seconds), stop)

    def prepare(self) -> None:
        """Note where events come from, and remove what a killed run left."""
        self.place.open()
        if self.lake.state.source != self.source:
            self.lake.commit(msgspec.structs.replace(self.lake.state, source=self.source))
        removed = self.lake.remove_unreferenced(FOLDER_TABLES)
        if removed:
            self.progress(f"removed {removed} folders that an interrupted run left")

    def bronze(self) -> None:
        """Load the current events."""
        before = self.lake.state.bronze_batch
        run_stream(lambda: Bronze(self.lake).start(self.spark, self.options(), every_seconds=None))
        self.progress(f"bronze: {self.lake.state.bronze_batch - before} batches of events")

    def catch_up(self, spark: SparkSession) -> None:
        """Bring silver and gold up to bronze, and keep the number of folders within bounds."""
        self.silver(spark)
        self.gold(spark)
        fewer = compact(self.lake, spark, at_least=FOLDERS_MAX)
        if fewer:
            self.progress(f"put together what was in {fewer} more folders")
        if self.reader is not None:
            # Spark commits to its source a batch late, and never the last batch.
            with open_bulk(self.place) as bulk:
                for queue, seen in self.lake.state.seen.items():
                    bulk.run(bulk.store.journal_reader(queue, self.reader, seen.newest))

    def tidy(self, keep_days: int | None = None) -> None:
        """Merge all small folders, and delete rows older than some days."""
        with self.lake.lock():
            self.prepare()
            self.catch_up(self.spark)
            fewer = compact(self.lake, self.spark)
            self.progress(f"put together what was in {fewer} more folders")
            if keep_days is not None:
                gone = remove_old_rows(self.lake, keep_days, datetime.now(UTC).date())
                self.progress(f"let go of {gone} folders of rows older than {keep_days} days")

    # ---- silver ----------------------------------------------------------------------------------------------

    def silver(self, spark: SparkSession) -> None:
        """Merge new events with open rows, and close rows that can no longer change."""
        fresh = new_folders(self.lake)
        lake, state = self.lake, self.lake.state
        if not fresh:
            return
        events = lake.frame(spark, BRONZE_JOURNAL, [folder.path for folder in fresh])
        first, last = fresh[0].first, fresh[-1].last
        name = batch_name(last)
        old_deliveries, old_messages = self._open(spark, SILVER_DELIVERIES), self._open(spark, SILVER_MESSAGES)

        steps = silver.delivery_steps(events)
        if old_deliveries is not None:
            steps = steps.unionByName(silver.open_deliveries(old_deliveries))
        if old_messages is not None:
            steps = steps.unionByName(silver.waiting_timers(old_messages))
        deliveries = lake.write(
            silver.deliveries(steps).transform(silver.partition_deliveries), SILVER_DELIVERIES, name, (PART, "date")
        )

        steps = silver.message_steps(events)
        if old_messages is not None:
            steps = steps.unionByName(silver.open_steps(old_messages))
        messages = lake.write(
            silver.messages(steps).transform(silver.partition_messages), SILVER_MESSAGES, name, (PART, "date")
        )
        sums = self._write_sums(spark, events, deliveries, name)
        seen, days = self._seen(lake.frame(spark, SILVER_SUMS, [sums]))

        tables, open_rows = dict(state.tables), dict(state.open)
        for table, folder in ((SILVER_DELIVERIES, deliveries), (SILVER_MESSAGES, messages)):
            closed, still_open = f"{folder}/{PART}=closed", f"{folder}/{PART}=open"
            if lake.files.has_rows(f"{table.name}/{closed}"):
                newest = max(lake.files.folders(f"{table.name}/{closed}")).removeprefix("date=")
                tables[table.name] = (*state.folders(table), Folder(closed, first, last, newest))
            open_rows[table.name] = (still_open,) if lake.files.has_rows(f"{table.name}/{still_open}") else ()
        tables[SILVER_SUMS.name] = (*state.folders(SILVER_SUMS), Folder(sums, first, last, max(days)))
        stale = tuple(sorted({*state.stale_days, *days}))
        lake.commit(
            msgspec.structs.replace(
                state, silver_batch=last, tables=tables, open=open_rows, seen=seen, stale_days=stale
            )
        )
        self._remove_replaced(state)
        self.progress(f"silver: {sum(one.events for one in seen.values()):,} events so far")

    def _open(self, spark: SparkSession, table: Table) -> DataFrame | None:
        paths = self.lake.state.open.get(table.name, ())
        return self.lake.frame(spark, table, paths) if paths else None

    def _write_sums(self, spark: SparkSession, events: DataFrame, deliveries: str, name: str) -> str:
        newest = [part for queue, seen in self.lake.state.seen.items() for part in (f.lit(queue), f.lit(seen.newest))]
        known = f.create_map(*newest)[f.col("queue")] if newest else f.lit(None)
        first_new = f.coalesce(known, f.lit(0)) + 1
        claims = self.lake.frame(spark, SILVER_DELIVERIES, [deliveries])
        sums = silver.event_sums(events).unionByName(silver.late_sums(claims, first_new))
        day = silver.day_of(f.col("minute_ms"))
        return self.lake.write(sums.coalesce(1).withColumn("date", day), SILVER_SUMS, name)

    def _seen(self, sums: DataFrame) -> tuple[dict[str, Seen], list[str]]:
        """What the lake has seen of each queue with these sums, and the days that they concern."""
        day = silver.day_of(f.col("minute_ms")).alias("day")
        rows = (
            sums.groupBy("queue", day, "event", f.when(f.col("event") == "configured", f.col("reason")).alias("level"))
            .agg(
                f.sum("events").alias("events"),
                f.min("first_number").alias("first"),
                f.max("last_number").alias("last"),
            )
            .collect()
        )
        seen = dict(self.lake.state.seen)
        for queue in {row["queue"] for row in rows}:
            # Lateness is a measure of claims, which are counted as such.
            mine = [row for row in rows if row["queue"] == queue and row["last"] is not None]
            seen[queue] = _add_seen(seen.get(queue, Seen()), mine)
        return seen, sorted({row["day"] for row in rows})

    def _remove_replaced(self, before: State) -> None:
        """Remove open rows that were replaced. Closed rows in the same folder stay."""
        for table, paths in before.open.items():
            for path in paths:
                if path not in self.lake.state.open.get(table, ()):
                    self.lake.files.remove(f"{table}/{path}")

    # ---- gold ------------------------------------------------------------------------------------------------

    def gold(self, spark: SparkSession) -> None:
        """Update gold for the days whose sums have changed."""
        lake, days = self.lake, self.lake.state.stale_days
        if not days:
            return
        paths = [folder.path for folder in lake.state.folders(SILVER_SUMS)]
        sums = lake.frame(spark, SILVER_SUMS, paths).transform(lambda rows: gold.select_days(rows, days))
        for table, make in gold.TABLE_BUILDERS:
            rows = make(sums).toArrow().cast(table.arrow(table.columns))
            lake.replace_days(table, rows, days)
        lake.commit(msgspec.structs.replace(lake.state, stale_days=()))
        self.progress(f"gold: {len(days)} day{'s' if len(days) > 1 else ''} made anew, the newest {max(days)}")


def _add_seen(before: Seen, rows: Sequence[Any]) -> Seen:
    """What was seen of a queue, with some more of it."""
    count, first, last = sum(row.events for row in rows), min(row.first for row in rows), max(row.last for row in rows)
    gap_end, counts = before.gap_end, dict(before.counts)
    if first > before.newest + 1:
        gap_end = first - 1
    if last - first + 1 > count:
        # Somewhere among these: events that were trimmed while they were read.
        gap_end = last
    for row in rows:
        counts[row.event] = counts.get(row.event, 0) + row.events
    levels = [row.last for row in rows if row.level == silver.JOURNAL_LEVEL]
    return Seen(before.events + count, max(before.newest, last), gap_end, max([before.level_end, *levels]), counts)


def run_stream(start: Callable[[], StreamingQuery], stop: threading.Event | None = None) -> None:
    """Run a stream to its end, or until `stop` is set. Raises its error as one of waypost's."""
    for turn in range(STARTS_MAX):
        query = start()
        try:
            while stop is not None and query.isActive and not stop.wait(STOP_POLL_SECONDS):
                pass
            if stop is None or not stop.is_set():
                query.awaitTermination()
            return
        except Exception as error:
            # Spark gives the process that plans a stream ten seconds to start, which a busy machine may need and more.
            # Nothing has happened yet, or nothing that a repetition would do twice.
            if SLOW_START not in str(error) or turn == STARTS_MAX - 1:
                raise map_spark_error(error) from error
        finally:
            query.stop()
