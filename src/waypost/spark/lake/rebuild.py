"""A day of silver and gold made anew from the events in bronze, and swapped in one step.

Rows of the day are removed: ended deliveries by the time of their end, ended messages by their last event, gold by its
date. Their replacements are computed from all events that bronze has of the messages concerned, whatever their day. The
store is not read, so queues that were removed from it keep their history.

Open rows have no day. They are corrected only where they contradict bronze: a message that has ended and is still open
gets the mark of its end, and one that has not ended and is missing gets its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as f

from waypost.errors import InvalidInput
from waypost.spark.delta.parquet import DataFile, FileWriter, read_batches, read_rows
from waypost.spark.delta.steps import StepConflict
from waypost.spark.delta.table import Change
from waypost.spark.lake import gold, silver
from waypost.spark.lake.compaction import TIMES
from waypost.spark.lake.sums import SUM_COLUMNS, SUMS, add_up, merge_sums, sum_events, sum_late
from waypost.spark.lake.tables import (
    BRONZE_JOURNAL,
    CLOSED_TABLES,
    DATE,
    GOLD,
    OPEN_TABLES,
    SILVER_DELIVERIES,
    SILVER_MESSAGES,
    SILVER_OPEN_DELIVERIES,
    SILVER_OPEN_MESSAGES,
    LakeTable,
)
from waypost.times import to_datetime, to_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from waypost.spark.lake.lake import Lake
    from waypost.spark.lake.pipeline import Pipeline

#: How often a day is computed again because other steps changed what it was computed from.
TRIES_MAX: Final = 5
#: Messages whose rows are computed at once, and held in memory.
IDS_AT_ONCE: Final = 200_000


class Rebuilt(msgspec.Struct, frozen=True):
    """What was made of a day: the step, the events of the day, and the rows of it that each table has now."""

    day: str
    step: int
    events: int
    rows: dict[str, int]


@dataclass(frozen=True, slots=True)
class Day:
    """A day in UTC, and its first and last millisecond."""

    name: str
    first_ms: int
    last_ms: int

    def mask(self, times: Any) -> Any:
        """Return for each time whether it is in the day."""
        inside = pc.and_(pc.greater_equal(times, self.first_ms), pc.less_equal(times, self.last_ms))
        return pc.fill_null(inside, False)

    def rows(self, column: str) -> Any:
        """Return the filter of rows whose time is in the day."""
        return (pc.field(column) >= self.first_ms) & (pc.field(column) <= self.last_ms)

    def files(self, lake: Lake, table: LakeTable) -> list[DataFile]:
        """Return the files that may have rows of the day."""
        column = TIMES[table.name]
        return [file for file in lake.data_files(table) if file.may_hold(column, self.first_ms, self.last_ms)]


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes that make a day anew, and what they were computed from."""

    changes: Mapping[str, Change]
    rebuilt: Rebuilt
    #: By table, the paths of its files at that time.
    files: Mapping[str, frozenset[str]]


def make_day(day: date) -> Day:
    """Return a day as the tables have it."""
    if isinstance(day, datetime) or not isinstance(day, date):
        raise InvalidInput(f"a day is a datetime.date, such as date(2026, 3, 1), not {day!r}")
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return Day(day.isoformat(), to_ms(start), to_ms(start + timedelta(days=1)) - 1)


def rebuild_day(pipeline: Pipeline, day: date) -> Rebuilt:
    """Make a day of silver and gold anew. Steps that other processes commit meanwhile are kept."""
    wanted, lake = make_day(day), pipeline.lake
    for turn in range(TRIES_MAX):
        lake.refresh(to_write=True)
        check_bronze(lake, wanted)
        plan = plan_day(pipeline, wanted)
        while True:
            try:
                if any(plan.changes.values()):
                    lake.commit("rebuild", plan.changes, lake.state)
                return msgspec.structs.replace(plan.rebuilt, step=lake.step)
            except StepConflict:
                lake.refresh(to_write=True)
                if is_current(lake, plan, wanted):
                    continue
                if turn == TRIES_MAX - 1:
                    raise StepConflict(
                        f"day {wanted.name} of the lake {lake.files.address} was changed by other processes "
                        f"{TRIES_MAX} times while it was rebuilt: stop the runs that follow the journal, or rebuild "
                        "the day when it is over"
                    ) from None
                break
    raise AssertionError("the last turn returns or raises")


def check_bronze(lake: Lake, day: Day) -> None:
    """Refuse a day whose events were deleted from bronze: nothing could be made of it."""
    kept_ms = bronze_begins(lake)
    if kept_ms > day.first_ms:
        raise InvalidInput(
            f"day {day.name} cannot be rebuilt: events before {to_datetime(kept_ms):%Y-%m-%d} were deleted from "
            f"{BRONZE_JOURNAL.name} of the lake {lake.files.address} (tidy --keep-days)"
        )


def bronze_begins(lake: Lake) -> int:
    """Return the time from which bronze has all events, in milliseconds; 0 if none was deleted."""
    if lake.state.deleted_before_ms:
        return lake.state.deleted_before_ms
    # A lake of release 0.1 did not record what it deleted, but gold has stayed.
    oldest = [file.lowest["at_ms"] for file in lake.data_files(BRONZE_JOURNAL) if "at_ms" in file.lowest]
    days = [str(file.partition[DATE]) for table in GOLD for file in lake.data_files(table)]
    if not days:
        return 0
    first = datetime.fromisoformat(min(days)).replace(tzinfo=UTC)
    if not oldest:
        return to_ms(datetime.fromisoformat(max(days)).replace(tzinfo=UTC) + timedelta(days=1))
    return 0 if min(oldest) < to_ms(first + timedelta(days=1)) else int(min(oldest))


def is_current(lake: Lake, plan: Plan, day: Day) -> bool:
    """Return whether a plan is right after steps of others: they touched neither its files nor its day."""
    if any(plan.changes.get(table.name) for table in OPEN_TABLES):
        return False
    return lake.still_fits(plan.changes, plan.rebuilt.step) and not any(
        file.path not in plan.files[table.name] for table in CLOSED_TABLES for file in day.files(lake, table)
    )


def plan_day(pipeline: Pipeline, day: Day) -> Plan:
    """Write the rows of a day, and return the changes that put them in place of those that are there."""
    lake = pipeline.lake
    known = {table.name: frozenset(file.path for file in lake.data_files(table)) for table in lake.tables}
    sums, count = _sum_day(lake, day)
    writers = {
        table.name: FileWriter(lake.files, table.name, table.arrow(table.columns), table.statistics)
        for table in (*CLOSED_TABLES[1:], *OPEN_TABLES)
    }
    late = []
    with ExitStack() as stack:
        for writer in writers.values():
            stack.enter_context(writer)
        ids = _ids_of_day(lake, day)
        for start in range(0, ids.num_rows, IDS_AT_ONCE):
            part = Part(pipeline, day, ids.slice(start, IDS_AT_ONCE))
            late.append(part.write(writers))
    made = {name: writer.made for name, writer in writers.items()}
    rows = {table.name: sum(file.rows for file in made[table.name]) for table in CLOSED_TABLES[1:]}
    changes = {table.name: Change(tuple(made[table.name])) for table in OPEN_TABLES}
    for table in CLOSED_TABLES[1:]:
        old = day.files(lake, table)
        changes[table.name] = Change((*made[table.name], *_without_day(lake, table, old, day)), tuple(old))
    sums = gold.counted_sums(lake, merge_sums([sums, *late]))
    for table, build, keys in gold.TABLE_BUILDERS:
        schema = table.arrow(table.columns)
        counts = [name for name in table.columns if name not in keys]
        whole = add_up([build(sums).cast(schema)], keys, counts).select(schema.names).cast(schema)
        rows[table.name] = whole.num_rows
        changes[table.name] = gold.replace_days(lake, table, whole, [day.name])
    return Plan(changes, Rebuilt(day.name, lake.step, count, rows), known)


def _sum_day(lake: Lake, day: Day) -> tuple[Any, int]:
    """Return the sums of the events of a day, and how many events it has; one file at a time."""
    schema = BRONZE_JOURNAL.arrow(BRONZE_JOURNAL.columns)
    sums, count = [SUMS.empty_table()], 0
    for file in day.files(lake, BRONZE_JOURNAL):
        rows = read_rows(lake.files, BRONZE_JOURNAL.name, [file], schema, SUM_COLUMNS, day.rows("at_ms"))
        sums.append(sum_events(rows))
        count += rows.num_rows
    return merge_sums(sums), count


def _ids_of_day(lake: Lake, day: Day) -> Any:
    """Return the messages with an event of the day, or with an ended row of the day, in the order of their ids."""
    names = ["queue", "message_id"]
    found = []
    for table in CLOSED_TABLES:
        column, schema = TIMES[table.name], table.arrow(table.columns)
        for file in day.files(lake, table):
            rows = read_rows(lake.files, table.name, [file], schema, names, day.rows(column))
            found.append(rows.filter(pc.is_valid(rows.column("message_id"))).group_by(names).aggregate([]))
    whole = pa.concat_tables([BRONZE_JOURNAL.arrow(names).empty_table(), *found])
    return whole.group_by(names).aggregate([]).sort_by([("message_id", "ascending"), ("queue", "ascending")])


class Part:
    """Some messages of a day: what bronze has of them, and the rows that follow from it."""

    def __init__(self, pipeline: Pipeline, day: Day, ids: Any) -> None:
        self._pipeline, self._lake, self._day, self._ids = pipeline, pipeline.lake, day, ids
        #: The smallest and the largest id: files and groups of rows without any between them are not read.
        self._low, self._high = ids.column("message_id")[0].as_py(), ids.column("message_id")[-1].as_py()
        self._is_whole = not bronze_begins(pipeline.lake)

    def write(self, writers: Mapping[str, FileWriter]) -> Any:
        """Write the rows of the day; return the sums of how late timers were claimed on it."""
        events = self._events()
        begins = silver.find_lives(self._read(BRONZE_JOURNAL, ["queue", "message_id", "event", "number"]))
        # All columns of either table: a row goes to one of them, or to both.
        steps = silver.with_lives(silver.delivery_steps(events), begins)
        deliveries = silver.deliveries(steps).select(*silver.DELIVERY_COLUMNS).toArrow()
        if not self._is_whole:
            deliveries = self._keep_deliveries(deliveries)
        steps = silver.with_lives(silver.message_steps(events), begins)
        messages = silver.messages(steps).select(*SILVER_MESSAGES.columns).toArrow()
        if not self._is_whole:
            messages = self._keep_messages(messages)
        self._route(
            writers, deliveries, SILVER_DELIVERIES, SILVER_OPEN_DELIVERIES, ["queue", "message_id", "claim"],
            lambda rows: pc.greater(rows.column("ends"), 0), "last_number",
        )  # fmt: skip
        self._route(
            writers, messages, SILVER_MESSAGES, SILVER_OPEN_MESSAGES, ["queue", "message_id"],
            lambda rows: pc.is_in(rows.column("last_event"), pa.array(silver.CLOSING)), "first_number",
        )  # fmt: skip
        of_day = pc.and_(self._day.mask(deliveries.column("claimed_ms")), pc.is_valid(deliveries.column("late_ms")))
        late = deliveries.filter(of_day)
        return sum_late(*(late.column(name) for name in ("queue", "message_id", "claimed_ms", "late_ms")))

    def _events(self) -> DataFrame:
        """All events of the messages. Those of an older release have no count of claims; there it was the token."""
        spark = self._pipeline.spark
        files = [
            file for file in self._lake.data_files(BRONZE_JOURNAL) if file.may_hold("message_id", self._low, self._high)
        ]
        rows = self._lake.frame(spark, BRONZE_JOURNAL, files, ("message_id", self._low, self._high))
        wanted = f.broadcast(spark.createDataFrame(self._ids))
        events = rows.join(wanted, ["queue", "message_id"], "left_semi")
        return events.withColumn("claims", f.coalesce("claims", "token"))

    def _read(self, table: LakeTable, columns: Sequence[str] | None = None) -> Any:
        """Return the rows that a table has of the messages."""
        files = [file for file in self._lake.data_files(table) if file.may_hold("message_id", self._low, self._high)]
        within = (pc.field("message_id") >= self._low) & (pc.field("message_id") <= self._high)
        rows = read_rows(self._lake.files, table.name, files, table.arrow(table.columns), columns, within)
        return rows.join(self._ids, ["queue", "message_id"], join_type="left semi")

    def _route(
        self, writers: Mapping[str, FileWriter], rows: Any, closed: LakeTable, still_open: LakeTable,
        keys: list[str], has_ended: Callable[[Any], Any], number: str,
    ) -> None:  # fmt: skip
        """Write ended rows of the day, marks of those that are open still, and open rows that are missing."""
        partials = self._read(still_open)
        ends = partials.filter(has_ended(partials)).group_by(keys).aggregate([("last_number", "max")])
        partials = partials.select([*keys, number]).join(ends, keys, join_type="left outer")
        is_current = pc.greater(partials.column(number), pc.fill_null(partials.column("last_number_max"), 0))
        open_from = partials.filter(is_current).group_by(keys).aggregate([(number, "min")])
        open_from = open_from.rename_columns([*keys, "open_from"])
        rows = rows.join(open_from, keys, join_type="left outer")
        is_open = pc.fill_null(pc.less_equal(rows.column("open_from"), rows.column("last_number")), False)
        ended = pc.fill_null(has_ended(rows), False)
        of_day = pc.and_(ended, self._day.mask(rows.column(TIMES[closed.name])))
        not_known = pc.and_(pc.invert(ended), pc.invert(is_open))
        _write(writers[closed.name], closed, rows.filter(of_day))
        _write(writers[still_open.name], still_open, rows.filter(pc.or_(pc.and_(of_day, is_open), not_known)))

    def _keep_deliveries(self, rows: Any) -> Any:
        """Add to each delivery what only the row has that is there: some of its events were deleted from bronze."""
        keys, summed = ["queue", "message_id", "claim", "ended_number"], ("claims", "ends")
        old = self._read(SILVER_DELIVERIES)
        kept = [name for name in SILVER_DELIVERIES.columns if name not in keys]
        joined = rows.join(old, keys, join_type="left outer", right_suffix="_old")
        for name in kept:
            merge = pc.max_element_wise if name in summed else pc.coalesce
            merged = merge(joined.column(name), joined.column(f"{name}_old"))
            joined = joined.set_column(joined.schema.get_field_index(name), name, merged)
        return joined.select(rows.column_names)

    def _keep_messages(self, rows: Any) -> Any:
        """Return messages, with the row that is there for those whose first events were deleted from bronze."""
        keys = ["queue", "message_id", "last_number"]
        old = self._read(SILVER_MESSAGES).select(rows.column_names)
        found = rows.select([*keys, "first_number"]).rename_columns([*keys, "found_first"])
        known = old.join(found, keys, join_type="inner")
        kept = known.filter(pc.less(known.column("first_number"), known.column("found_first"))).select(old.column_names)
        others = rows.join(kept.select(keys), keys, join_type="left anti").select(rows.column_names)
        return pa.concat_tables([others, kept.cast(others.schema)])


def _write(writer: FileWriter, table: LakeTable, rows: Any) -> None:
    writer.write(rows.select(list(table.columns)).cast(table.arrow(table.columns)).sort_by("message_id"))


def _without_day(lake: Lake, table: LakeTable, files: Sequence[DataFile], day: Day) -> list[DataFile]:
    """Write the rows of some files that are not of a day."""
    schema, column = lake.schema(table), TIMES[table.name]
    writer = FileWriter(lake.files, table.name, schema, table.statistics)
    with writer:
        for file in files:
            for rows in read_batches(lake.files, f"{table.name}/{file.path}", schema):
                writer.write(rows.filter(pc.invert(day.mask(rows.column(column)))))
    return writer.made
