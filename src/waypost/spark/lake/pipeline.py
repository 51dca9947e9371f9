"""The pipeline: batches of events through bronze and silver to gold, each of them one step of the lake.

    from waypost.spark.lake.pipeline import Pipeline

    Pipeline(spark, "lake", store="valkey://127.0.0.1:6379").run()

A step reads the events between two offsets, writes new files for all tables, and commits them together (see `lake`). A
run that is killed before has changed nothing; one that is killed after is completed by whatever opens the lake next.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import inheritable_thread_target
from pyspark.sql import functions as f

from waypost.checks import check_number
from waypost.errors import ConfigurationError, InvalidInput, StoreError
from waypost.formatting import format_count
from waypost.spark.delta.data_source import TO, Target, write_frame
from waypost.spark.delta.parquet import DataFile, read_rows, write_rows
from waypost.spark.delta.steps import StepConflict
from waypost.spark.delta.table import Change
from waypost.spark.lake import gold, silver
from waypost.spark.lake.compaction import FILES_MAX, compact, remove_old_rows
from waypost.spark.lake.journal import (
    BATCH_ROWS,
    DRIVER_EVENTS_MAX,
    Written,
    check_batch_rows,
    check_offsets,
    plan_ranges,
    write_events,
)
from waypost.spark.lake.keys import fill_keys, write_keys
from waypost.spark.lake.lake import Lake, Seen, Source, State, retry_conflicts
from waypost.spark.lake.sums import JOURNAL_LEVEL, SUMS, merge_sums, sum_events, sum_late
from waypost.spark.lake.tables import (
    BRONZE_JOURNAL,
    KEYS,
    SILVER_DELIVERIES,
    SILVER_MESSAGES,
    SILVER_OPEN_DELIVERIES,
    SILVER_OPEN_MESSAGES,
    LakeTable,
)
from waypost.spark.session import JAVA_OPTIONS, parallelism
from waypost.spark.source.bulk import Bulk, open_bulk
from waypost.spark.source.credentials import Place
from waypost.spark.source.reader import report_gone
from waypost.spark.source.stream import admit
from waypost.spark.spark_errors import map_spark_error
from waypost.times import format_datetime, to_datetime, to_ms
from waypost.urls import holds_secret

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from waypost.spark.lake.rebuild import Rebuilt

log = logging.getLogger("waypost")

#: Settings for every session of a pipeline: many paths are looked up by the driver, which is faster than a query.
SETTINGS: Final = {"spark.sql.sources.parallelPartitionDiscovery.threshold": "1000000"}
#: Spark's error when a Python process was too slow to start, and how often it is started again.
SLOW_START: Final = "failed to connect back"
STARTS_MAX: Final = 5
VACUUM_EVERY_MS: Final = 86_400_000
#: The longest pause of a pipeline that follows the journal: a year.
EVERY_SECONDS_MAX: Final = 365 * 86_400
#: Ids up to this number are sent to every task, instead of sorting both sides.
BROADCAST_IDS_MAX: Final = 200_000
#: Up to this many rows one task is faster than several that exchange rows between them.
ONE_TASK_ROWS_MAX: Final = 5_000
_DELIVERIES: Final = (SILVER_DELIVERIES, SILVER_OPEN_DELIVERIES)
_MESSAGES: Final = (SILVER_MESSAGES, SILVER_OPEN_MESSAGES)


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


class SparkNeeded(StoreError):
    """Raised when a pipeline without a session has something to compute; nothing of it is committed."""


class NoSession:
    """In place of a session, for a run that is expected to find nothing new: Spark takes seconds to start."""

    def __getattr__(self, name: str) -> Any:
        raise SparkNeeded("there is something to compute, and no Spark session")


@dataclass(frozen=True, slots=True)
class Earlier:
    """Open rows of earlier steps, and whether they are read from few rows."""

    rows: DataFrame
    is_small: bool


class Pipeline:
    """A lake and the store that it is made from."""

    def __init__(
        self,
        spark: SparkSession | NoSession,
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
        gold_without_backfills: bool | None = None,
        progress: Callable[[str], None] = ignore_progress,
    ) -> None:
        self.spark = cast("SparkSession", spark)
        self.lake = Lake(lake, format=format)
        self.progress = progress
        self.batch_rows = check_batch_rows(batch_rows)
        #: A part for each core: starting one costs more than what a finer cut would gain.
        self.partitions = partitions or parallelism(self.spark)
        self.reader = reader
        self.moved = moved
        #: None: as the lake has it.
        self.gold_without_backfills = gold_without_backfills
        # A list without a name chooses nothing: an audit of no queue would always be clean.
        queues = queues or None
        known = self.lake.state.source
        if store is None and store_env is None:
            if known is None:
                raise ConfigurationError(f"the lake {lake} is new: give its store with --store")
            self.source = known if queues is None else msgspec.structs.replace(known, queues=queues)
        else:
            if queues is None and known is not None:
                queues = known.queues
            self.source = make_source(store, store_env, namespace, queues)
            self._check_source(known)

    def _check_source(self, known: Source | None) -> None:
        given = self.source
        if known is None or self.moved:
            return
        if (known.url, known.url_env, known.namespace) != (given.url, given.url_env, given.namespace):
            raise ConfigurationError(
                f"the lake {self.lake.files.address} was made from {known.url or known.url_env} (namespace "
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
            "numPartitions": str(self.partitions),
        }
        chosen |= {"url": source.url} if source.url is not None else {"urlEnv": source.url_env or ""}
        if source.queues:
            chosen["queue"] = ",".join(source.queues)
        return chosen

    # ---- runs ------------------------------------------------------------------------------------------------

    def run(self, *, since: datetime | None = None, until: datetime | None = None) -> State:
        """Load the new events of the journal, and update all tables.

        With `until` only events before that time are loaded. With `since` queues of which the lake has nothing begin at
        that time: their older events are never loaded. Times are those of the store.
        """
        since_ms, until_ms = _check_span(since, until)
        with open_bulk(self.place) as bulk:
            self.prepare()
            self._load(bulk, since_ms=since_ms, until_ms=until_ms)
        self._maintain()
        return self.lake.state

    def rebuild(self, day: date) -> Rebuilt:
        """Make a day (in UTC) of silver and gold anew from the events in bronze, as one step. The store is not read."""
        from waypost.spark.lake.rebuild import rebuild_day

        self.lake.create()
        self.lake.refresh(to_write=True)
        self._merge_unmerged()
        try:
            return rebuild_day(self, day)
        except Exception as error:
            raise map_spark_error(error) from error

    def follow(
        self,
        every_seconds: float,
        stop: threading.Event,
        after_turn: Callable[[], None] = lambda: None,
        *,
        since: datetime | None = None,
    ) -> None:
        """Load new events every `every_seconds`, until `stop` is set; call `after_turn` after each time."""
        since_ms, _ = _check_span(since, None)
        check_every(every_seconds)
        self.prepare()
        self.progress(f"following, every {every_seconds:g} seconds; interrupt to stop")
        with open_bulk(self.place) as bulk:
            while not stop.is_set():
                began = time.monotonic()
                self._load(bulk, quiet=True, since_ms=since_ms)
                since_ms = None
                self._maintain()
                after_turn()
                stop.wait(max(0.0, every_seconds - (time.monotonic() - began)))

    def prepare(self) -> None:
        """Create the tables of a new lake, and record where events come from."""
        self.place.open()
        self.lake.create()
        while (wanted := self._settings()) != self.lake.state:
            # Another process may have recorded its store since the lake was opened.
            self._check_source(self.lake.state.source)
            try:
                self.lake.commit("source", {}, wanted)
            except StepConflict:
                self.lake.refresh(to_write=True)
        fill_keys(self.lake)

    def _settings(self) -> State:
        """Return the state with what this run sets in it."""
        state, chosen = self.lake.state, self.gold_without_backfills
        return msgspec.structs.replace(
            state, source=self.source, has_keys=state.has_keys or not (state.offsets or state.unmerged),
            gold_without_backfills=state.gold_without_backfills if chosen is None else chosen,
        )  # fmt: skip

    def _load(
        self, bulk: Bulk, *, quiet: bool = False, since_ms: int | None = None, until_ms: int | None = None
    ) -> None:
        """Load the events that the journal has now, batch by batch."""
        self.lake.refresh(to_write=True)
        self._merge_unmerged()
        queues = list(self.source.queues) if self.source.queues else bulk.run(bulk.store.queues())
        if self.reader is not None:
            for queue in set(queues) - self.lake.state.offsets.keys():
                bulk.run(bulk.store.journal_reader(queue, self.reader, None))
        # Fixed once: a run must end even if events come faster than they are read. Read after the lake, in which
        # another run may have put newer events meanwhile.
        ends = {queue: bulk.bounds(queue)[1] for queue in queues}
        check_offsets(self.lake.state.offsets, ends)
        self._report_removed(bulk, ends)
        if since_ms is not None:
            self._begin(bulk, ends, since_ms)
        if until_ms is not None:
            ends = {queue: min(end, bulk.first_since(queue, until_ms) - 1) for queue, end in ends.items()}
        batches = events = 0
        while True:
            offsets = self.lake.state.offsets
            to = admit(offsets, ends, self.batch_rows)
            if all(to[queue] <= offsets.get(queue, 0) for queue in to):
                break
            try:
                events += self._step(bulk, to)
                batches += 1
            except StepConflict as conflict:
                # Another run was faster: what it has loaded is not loaded again.
                log.info("%s", conflict, extra={"event": "step_conflict"})
                self.lake.refresh(to_write=True)
        if self.reader is not None:
            # After the step is on disk: trimming no longer waits for these events. A registration creates its queue,
            # and the lake has those too that were removed.
            there = bulk.run(bulk.store.queues())
            for queue in sorted(ends.keys() & set(there)):
                bulk.run(bulk.store.journal_reader(queue, self.reader, self.lake.state.offsets.get(queue, 0)))
        if batches or not quiet:
            self.progress(f"bronze, silver, gold: {events:,} events in {format_count(batches, 'batch', 'batches')}")

    def _begin(self, bulk: Bulk, ends: Mapping[str, int], since_ms: int) -> None:
        """Let queues of which the lake has nothing begin at a time; refuse an earlier time than a queue has begun at.

        Which event a time means is decided once: events are not quite in the order of their times, so the same time may
        mean another event when the journal has grown.
        """
        while True:
            state = self.lake.state
            searched = [
                queue
                for queue in ends
                if queue not in state.offsets or (queue in state.left_out and since_ms < state.begins_ms.get(queue, 0))
            ]
            before = {queue: min(ends[queue], bulk.first_since(queue, since_ms) - 1) for queue in searched}
            for queue, number in before.items():
                if number < state.left_out.get(queue, 0):
                    raise ConfigurationError(
                        f"queue {queue}: the lake {self.lake.files.address} begins after event "
                        f"{state.left_out[queue]}, and {format_datetime(to_datetime(since_ms))} is earlier: older "
                        "events cannot be added to tables that have newer ones. Begin a new lake"
                    )
            new = {queue: number for queue, number in before.items() if number and queue not in state.offsets}
            if not new:
                return
            begun = msgspec.structs.replace(
                state, offsets={**state.offsets, **new}, left_out={**state.left_out, **new},
                begins_ms={**state.begins_ms, **dict.fromkeys(new, since_ms)},
            )  # fmt: skip
            try:
                self.lake.commit("begin", {}, begun)
            except StepConflict:
                self.lake.refresh(to_write=True)

    def _merge_unmerged(self) -> None:
        """Merge events that release 0.1 had loaded before the lake was converted."""
        while files := self.lake.state.unmerged:
            rows = read_rows(self.lake.files, BRONZE_JOURNAL.name, files, BRONZE_JOURNAL.arrow(BRONZE_JOURNAL.columns))
            changes, state = self.build(Written(files, sum_events(rows)))
            read = {queue: seen.newest for queue, seen in state.seen.items()}
            try:
                self.lake.commit("run", changes, msgspec.structs.replace(state, offsets=read, unmerged=()))
            except StepConflict:
                self.lake.refresh(to_write=True)

    def _report_removed(self, bulk: Bulk, ends: Mapping[str, int]) -> None:
        """Log the unread events of queues that were removed."""
        for queue, number in self.lake.state.offsets.items():
            if queue not in ends and (self.source.queues is None or queue in self.source.queues):
                newest = bulk.bounds(queue)[1]
                if newest > number:
                    report_gone(bulk, queue, number, newest + 1, fail=False)

    def _maintain(self) -> None:
        """Keep the number of files within bounds, and once a day delete those that are in no table."""
        try:
            fewer = compact(self.lake, self.spark, at_least=FILES_MAX)
            if fewer:
                self.progress(f"compaction: {fewer} files fewer")
            now = time.time_ns() // 1_000_000
            # In the future if the clock was ahead then.
            if abs(now - self.lake.state.vacuumed_ms) > VACUUM_EVERY_MS:
                self.lake.vacuum()
        except StepConflict:
            # Another process changed the lake meanwhile; its own run, or the next one, compacts.
            self.lake.refresh(to_write=True)
        except Exception as error:
            raise map_spark_error(error) from error

    def tidy(self, keep_days: int | None = None) -> None:
        """Merge all small files, delete rows older than some days, and files that are in no table since a day."""
        self.lake.create()
        self.lake.refresh(to_write=True)
        # Their files are in no table yet, so they would be deleted below.
        self._merge_unmerged()
        fewer = retry_conflicts(self.lake, lambda: compact(self.lake, self.spark))
        self.progress(f"compaction: {fewer} files fewer")
        if keep_days is not None:
            today = datetime.now(UTC).date()
            gone = retry_conflicts(self.lake, lambda: remove_old_rows(self.lake, keep_days, today))
            self.progress(f"removed {gone:,} rows older than {keep_days} days")
        deleted = retry_conflicts(self.lake, self.lake.vacuum)
        self.progress(f"deleted {deleted:,} files that are in no table since a day")

    # ---- a step ----------------------------------------------------------------------------------------------

    def _step(self, bulk: Bulk, to: Mapping[str, int]) -> int:
        """Load the events up to some offsets, as one step; return how many."""
        if isinstance(self.spark, NoSession):
            raise SparkNeeded("there are events to load, and no Spark session")
        ranges = plan_ranges(bulk, self.lake.state.offsets, to)
        for turn in range(STARTS_MAX):
            try:
                written = write_events(self.spark, self.place, self.lake.files, bulk, ranges, self.partitions)
                changes, state = self.build(written)
                break
            except Exception as error:
                # Spark gives a Python process ten seconds to start, which a busy machine may need and more.
                if SLOW_START not in str(error) or turn == STARTS_MAX - 1:
                    raise map_spark_error(error) from error
        state = msgspec.structs.replace(state, offsets={**self.lake.state.offsets, **to})
        self.lake.commit("run", changes, state)
        return written.rows

    def build(self, written: Written) -> tuple[dict[str, Change], State]:
        """Write what a batch of events means for silver and gold; return the changes of all tables and the state."""
        state = self.lake.state
        if not written.files:
            return {}, state
        files = self._silver(written)
        changes = {name: Change(tuple(made)) for name, made in files.items()}
        changes[BRONZE_JOURNAL.name] = Change(written.files)
        changes[KEYS.name] = Change(tuple(write_keys(self.lake.files, written.files)))
        sums = merge_sums([written.sums, self._late_sums(files)])
        changes |= gold.add_sums(self.lake, sums)
        return changes, msgspec.structs.replace(state, seen=add_sums_to_seen(state.seen, written.sums))

    def _silver(self, written: Written) -> dict[str, list[DataFile]]:
        columns = ["queue", "number", "event", "message_id", "cause", "run_ms", "claims"]
        schema = BRONZE_JOURNAL.arrow(BRONZE_JOURNAL.columns)
        known = read_rows(self.lake.files, BRONZE_JOURNAL.name, written.files, schema, columns)
        events = self.lake.frame(self.spark, BRONZE_JOURNAL, written.files)
        begins = silver.find_lives(known)

        steps, few = silver.delivery_steps(events), written.rows <= ONE_TASK_ROWS_MAX
        old = self._earlier(SILVER_OPEN_DELIVERIES, silver.ids_of_earlier_deliveries(known, begins))
        if old is not None:
            few = few and old.is_small
            partials = silver.current_deliveries(silver.in_one_task(old.rows) if few else old.rows)
            steps = steps.unionByName(silver.open_delivery_steps(partials))
        deliveries = silver.route_deliveries(silver.deliveries(silver.with_lives(steps, begins), few=few))
        if written.rows > DRIVER_EVENTS_MAX:
            made = self._write(deliveries, _DELIVERIES, written.rows)
            return made | self._write(self._messages(events, known, begins, written), _MESSAGES, written.rows)
        with ThreadPoolExecutor(1) as beside:
            # While Spark computes the deliveries, the query for the messages is made. The thread takes over the job
            # group of this one, so that both are cancelled together.
            write: Callable[..., dict[str, list[DataFile]]] = inheritable_thread_target(self.spark)(self._write)
            writing = beside.submit(write, deliveries, _DELIVERIES, written.rows)
            made = self._write(self._messages(events, known, begins, written), _MESSAGES, written.rows)
            return writing.result() | made

    def _messages(self, events: DataFrame, known: Any, begins: silver.Lives, written: Written) -> DataFrame:
        """Return the rows of messages of a batch, with the table that each goes to."""
        steps, few = silver.message_steps(events), written.rows <= ONE_TASK_ROWS_MAX
        old = self._earlier(SILVER_OPEN_MESSAGES, silver.ids_of_earlier_messages(known, begins))
        if old is not None:
            few = few and old.is_small
            partials = silver.current_partials(silver.in_one_task(old.rows) if few else old.rows)
            steps = steps.unionByName(silver.open_steps(partials))
        return silver.route_messages(silver.messages(silver.with_lives(steps, begins), few=few))

    def _earlier(self, table: LakeTable, ids: Any) -> Earlier | None:
        """Return the open rows of some messages, by queue and id; None if there are none to be found."""
        if not len(ids):
            return None
        low, high = pc.min_max(ids.column("message_id")).as_py().values()
        files = [file for file in self.lake.data_files(table) if file.may_hold("message_id", low, high)]
        if not files:
            return None
        wanted = self.spark.createDataFrame(ids)
        if len(ids) <= BROADCAST_IDS_MAX:
            wanted = f.broadcast(wanted)
        # The bounds let groups of rows be skipped: rows of a file are in the order of their ids.
        rows = self.lake.frame(self.spark, table, files, ("message_id", low, high))
        found = rows.join(wanted, ["queue", "message_id"], "left_semi")
        return Earlier(found, sum(file.rows for file in files) <= ONE_TASK_ROWS_MAX)

    def _write(self, rows: DataFrame, tables: Sequence[LakeTable], events: int) -> dict[str, list[DataFile]]:
        """Write rows to the tables that they are routed to: by the driver if they are few, otherwise by tasks."""
        if events > DRIVER_EVENTS_MAX:
            targets = {one.name: Target(one.name, tuple(one.columns), one.statistics) for one in tables}
            return write_frame(rows.sortWithinPartitions("message_id"), self.lake.files, targets)
        found = rows.toArrow()
        made = {}
        for table in tables:
            mine = found.filter(pc.equal(found.column(TO), table.name)).select(list(table.columns))
            mine = mine.cast(table.arrow(table.columns)).sort_by("message_id")
            made[table.name] = write_rows(self.lake.files, table.name, mine, table.statistics)
        return made

    def _late_sums(self, made: Mapping[str, Sequence[DataFile]]) -> Any:
        """Return how late timers were claimed, of the claims that are new in these files."""
        sums = [SUMS.empty_table()]
        offsets = self.lake.state.offsets
        for table, late, extra in (
            (SILVER_DELIVERIES, "late_ms", ()),
            (SILVER_OPEN_DELIVERIES, "wait_ms", ("timer", "ends")),
        ):
            columns = ["queue", "message_id", "claimed_ms", "claimed_number", late, *extra]
            rows = read_rows(self.lake.files, table.name, made.get(table.name, ()), table.arrow(table.columns), columns)
            is_claim = pc.and_(pc.is_valid(rows.column(late)), pc.is_valid(rows.column("claimed_number")))
            if extra:
                is_claim = pc.and_(
                    is_claim, pc.and_(pc.equal(rows.column("timer"), 1), pc.equal(rows.column("ends"), 0))
                )
            rows = rows.filter(is_claim)
            for queue in pc.unique(rows.column("queue")).to_pylist():
                new = pc.and_(
                    pc.equal(rows.column("queue"), queue),
                    pc.greater(rows.column("claimed_number"), offsets.get(queue, 0)),
                )
                mine = rows.filter(new)
                measured = (mine.column(name) for name in ("queue", "message_id", "claimed_ms", late))
                sums.append(sum_late(*measured))
        return merge_sums(sums)


def _check_span(since: datetime | None, until: datetime | None) -> tuple[int | None, int | None]:
    """Return times as milliseconds; refuse those that have no zone or are in the wrong order."""
    for name, at in (("since", since), ("until", until)):
        if at is not None and (not isinstance(at, datetime) or at.tzinfo is None):
            raise InvalidInput(f"{name} is a datetime with a time zone, not {at!r}")
    if since is not None and until is not None and since >= until:
        raise InvalidInput(
            f"the beginning of a run, {format_datetime(since)}, must be before its end, {format_datetime(until)}"
        )
    return None if since is None else to_ms(since), None if until is None else to_ms(until)


def check_every(seconds: float) -> float:
    """Return the seconds between two turns of a pipeline that follows the journal unchanged."""
    return check_number("the seconds between two turns", seconds, 0, EVERY_SECONDS_MAX)


def add_sums_to_seen(seen: Mapping[str, Seen], sums: Any) -> dict[str, Seen]:
    """Return what the lake has seen of each queue, with these sums of events."""
    known = dict(seen)
    level = pc.if_else(pc.equal(sums.column("event"), "configured"), sums.column("reason"), None)
    groups = sums.set_column(sums.schema.get_field_index("reason"), "reason", level.cast(pa.string()))
    found = groups.group_by(["queue", "event", "reason"]).aggregate(
        [("events", "sum"), ("first_number", "min"), ("last_number", "max")]
    )
    rows = found.rename_columns(["queue", "event", "reason", "events", "first_number", "last_number"]).to_pylist()
    for queue in {row["queue"] for row in rows}:
        # Lateness is a measure of claims, which are counted as such.
        mine = [row for row in rows if row["queue"] == queue and row["last_number"] is not None]
        known[queue] = _add_seen(known.get(queue, Seen()), mine)
    return known


def _add_seen(before: Seen, rows: Sequence[Mapping[str, Any]]) -> Seen:
    """Return what was seen of a queue, with some more of it."""
    count = sum(row["events"] for row in rows)
    first, last = min(row["first_number"] for row in rows), max(row["last_number"] for row in rows)
    gap_end, counts = before.gap_end, dict(before.counts)
    if first > before.newest + 1:
        gap_end = first - 1
    if last - first + 1 > count:
        # Somewhere among these: events that were trimmed while they were read.
        gap_end = last
    for row in rows:
        counts[row["event"]] = counts.get(row["event"], 0) + row["events"]
    levels = [row["last_number"] for row in rows if row["event"] == "configured" and row["reason"] == JOURNAL_LEVEL]
    return Seen(before.events + count, max(before.newest, last), gap_end, max([before.level_end, *levels]), counts)
