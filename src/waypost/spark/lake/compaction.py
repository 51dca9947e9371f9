"""Compaction and retention: fewer and larger files with the same rows, and fewer old rows. Each is a step.

Small files are merged when there are many of them, whatever their days, so the number of files stays bounded. Tables of
open rows are merged by message, which drops what has ended: of a part of the files when there are many, of all files
when the rows have doubled since the last time. So each row is rewritten a few times, however long the history.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow.compute as pc

from waypost.errors import InvalidInput
from waypost.policy import LAKE_KEEP_DAYS_MAX
from waypost.spark.delta.compaction import concatenate
from waypost.spark.delta.data_source import TO, Target, write_frame
from waypost.spark.delta.parquet import FILE_BYTES, DataFile, FileWriter, read_batches, read_rows, write_rows
from waypost.spark.delta.table import Change
from waypost.spark.lake import silver
from waypost.spark.lake.tables import (
    BRONZE_JOURNAL,
    CLOSED_TABLES,
    KEYS,
    OPEN_TABLES,
    SILVER_DELIVERIES,
    SILVER_MESSAGES,
    SILVER_OPEN_DELIVERIES,
    SILVER_OPEN_MESSAGES,
    LakeTable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from waypost.spark.lake.lake import Lake

#: A running pipeline merges small files if a table has more of them than this.
FILES_MAX: Final = 32
#: A table of open rows is merged as a whole when it has twice the rows of the last time, and this many more.
OPEN_ROWS_MORE: Final = 500_000
#: Merged rows up to this number are written by the driver.
DRIVER_ROWS_MAX: Final = 100_000
#: The time by which rows of a table are old.
TIMES: Final = {BRONZE_JOURNAL.name: "at_ms", SILVER_DELIVERIES.name: "ended_ms", SILVER_MESSAGES.name: "last_ms"}
MERGES: Final[dict[str, Callable[..., DataFrame]]] = {
    SILVER_OPEN_DELIVERIES.name: silver.merge_open_deliveries,
    SILVER_OPEN_MESSAGES.name: silver.merge_open_messages,
}

#: What rows of a table of open rows are merged by, and which of them mark an end.
MARKS: Final[dict[str, tuple[list[str], Any]]] = {
    SILVER_OPEN_DELIVERIES.name: (["queue", "message_id", "claim"], pc.field("ends") > 0),
    SILVER_OPEN_MESSAGES.name: (["queue", "message_id"], pc.field("last_event").isin(silver.CLOSING)),
}


def compact(lake: Lake, spark: SparkSession, *, at_least: int = 2) -> int:
    """Merge small files of every table that has this many of them; return by how many files there are fewer."""
    changes: dict[str, Change] = {}
    merged_rows: dict[str, int] = {}
    for table in (*CLOSED_TABLES, KEYS):
        small = [file for file in lake.data_files(table) if file.size < FILE_BYTES // 2]
        if len(small) >= max(2, at_least):
            made = concatenate(lake.files, table.name, small, lake.schema(table), table.statistics)
            changes[table.name] = Change(tuple(made), tuple(small), changes_rows=False)
    for table in OPEN_TABLES:
        files, whole = choose_open_files(lake, table, at_least)
        if files:
            made = _merge_open(lake, spark, table, files, whole=whole)
            changes[table.name] = Change(tuple(made), tuple(files))
            if whole:
                merged_rows[table.name] = sum(file.rows for file in made)
    if not changes:
        return 0
    lake.commit_beside_others(
        "compact", changes,
        lambda state: msgspec.structs.replace(state, merged_rows={**state.merged_rows, **merged_rows}),
    )  # fmt: skip
    return sum(len(change.remove) - len(change.add) for change in changes.values())


def choose_open_files(lake: Lake, table: LakeTable, at_least: int) -> tuple[list[DataFile], bool]:
    """Return the files of open rows that are to be merged, and whether they are all."""
    files = sorted(lake.data_files(table), key=lambda file: file.rows)
    rows = sum(file.rows for file in files)
    if rows > 2 * lake.state.merged_rows.get(table.name, 0) + OPEN_ROWS_MORE or (at_least <= 2 and len(files) > 1):
        return files, True
    if len(files) < max(2, at_least):
        return [], False
    # The largest stay: a merge costs about as much as what has come since the last one.
    return files[: max(2, len(files) * 3 // 4)], False


def _merge_open(
    lake: Lake, spark: SparkSession, table: LakeTable, files: Sequence[DataFile], *, whole: bool
) -> list[DataFile]:
    partials = lake.frame(spark, table, files)
    if not whole and (marks := find_marks_within(lake, table, files)).num_rows:
        partials = partials.unionByName(spark.createDataFrame(marks))
    rows = MERGES[table.name](partials, all_of_them=whole)
    if sum(file.rows for file in files) <= DRIVER_ROWS_MAX:
        made = rows.toArrow().cast(table.arrow(table.columns)).sort_by("message_id")
        return write_rows(lake.files, table.name, made, table.statistics)
    from pyspark.sql import functions as f

    target = Target(table.name, tuple(table.columns), table.statistics)
    routed = rows.repartitionByRange("message_id").sortWithinPartitions("message_id")
    return write_frame(routed.withColumn(TO, f.lit("")), lake.files, {"": target}).get("", [])


def find_marks_within(lake: Lake, table: LakeTable, files: Sequence[DataFile]) -> Any:
    """Return the marks of ended messages or deliveries in other files after which these files have newer rows.

    An id that was published again after its end is another message: without the mark of that end the rows of both
    would be merged.
    """
    keys, has_ended = MARKS[table.name]
    schema, names = table.arrow(table.columns), [*keys, "last_number"]
    chosen = {file.path for file in files}
    others = [file for file in lake.data_files(table) if file.path not in chosen]
    marks = read_rows(lake.files, table.name, others, schema, filter=has_ended)
    if not marks.num_rows:
        return marks
    rows = read_rows(lake.files, table.name, files, schema, names)
    newest = rows.group_by(keys).aggregate([("last_number", "max")])
    found = marks.select(names).join(newest, keys, join_type="inner")
    found = found.filter(pc.greater(found.column("last_number_max"), found.column("last_number"))).select(names)
    return marks.join(found, names, join_type="left semi").select(schema.names)


def remove_old_rows(lake: Lake, keep_days: int, today: date) -> int:
    """Remove older rows of bronze, and ended ones of silver; return how many. Gold, keys and open rows stay."""
    if not 1 <= keep_days <= LAKE_KEEP_DAYS_MAX:
        raise InvalidInput(
            f"rows are kept for a whole number of days from 1 to {LAKE_KEEP_DAYS_MAX:,}, not {keep_days:,}"
        )
    first_kept = datetime.combine(today - timedelta(days=keep_days), datetime.min.time(), UTC)
    oldest_ms = int(first_kept.timestamp() * 1000)
    changes: dict[str, Change] = {}
    gone = 0
    for table in CLOSED_TABLES:
        column = TIMES[table.name]
        old = [file for file in lake.data_files(table) if file.may_hold(column, 0, oldest_ms - 1)]
        if old:
            made = _without_old(lake, table, old, column, oldest_ms)
            changes[table.name] = Change(tuple(made), tuple(old))
            gone += sum(file.rows for file in old) - sum(file.rows for file in made)
    if changes:
        lake.commit_beside_others(
            "remove old rows", changes,
            lambda state: msgspec.structs.replace(state, deleted_before_ms=max(oldest_ms, state.deleted_before_ms)),
        )  # fmt: skip
    return gone


def _without_old(
    lake: Lake, table: LakeTable, files: Sequence[DataFile], column: str, oldest_ms: int
) -> list[DataFile]:
    schema = lake.schema(table)
    writer = FileWriter(lake.files, table.name, schema, table.statistics)
    with writer:
        for file in files:
            if file.highest.get(column, oldest_ms) < oldest_ms:
                continue
            for rows in read_batches(lake.files, f"{table.name}/{file.path}", schema):
                kept = pc.fill_null(pc.greater_equal(rows.column(column), oldest_ms), True)
                writer.write(rows.filter(kept))
    return writer.made
