"""Compaction and retention: merges many small folders into one for each day, and deletes old ones.

Both replace the state in one move, like every step: before it the old folders are the table, after it the new one. Old
folders are deleted after that.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import functions as f

from waypost.errors import InvalidInput
from waypost.spark.lake.bronze import batch_name, with_date
from waypost.spark.lake.lake import DATE, PART, Folder, Lake
from waypost.spark.lake.silver import day_of, merge_sums, partition_deliveries, partition_messages
from waypost.spark.lake.tables import (
    BRONZE_JOURNAL,
    FOLDER_TABLES,
    SILVER_DELIVERIES,
    SILVER_MESSAGES,
    SILVER_SUMS,
)
from waypost.store.bulk.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: A running pipeline merges the folders of one day if there are more than this.
FOLDERS_MAX: Final = 32
#: How large a file is made.
FILE_BYTES: Final = 256 * 1024 * 1024
#: Tables of rows. What gold is made of stays: it is small, and gold could not take in a late event without it.
RETAINED: Final = (BRONZE_JOURNAL, SILVER_DELIVERIES, SILVER_MESSAGES)


def _sums_by_day(rows: DataFrame) -> DataFrame:
    return merge_sums(rows).withColumn(DATE, day_of(f.col("minute_ms")))


#: How the rows of each table are laid out anew, and by which columns.
LAYOUTS: Final[dict[str, tuple[Callable[[DataFrame], DataFrame], tuple[str, ...]]]] = {
    BRONZE_JOURNAL.name: (with_date, (DATE,)),
    SILVER_DELIVERIES.name: (partition_deliveries, (PART, DATE)),
    SILVER_MESSAGES.name: (partition_messages, (PART, DATE)),
    SILVER_SUMS.name: (_sums_by_day, (DATE,)),
}


def find_groups(lake: Lake, table: Table, at_least: int) -> list[list[Folder]]:
    """Folders to put together: small ones of one day, if there are enough. None that is not in silver yet."""
    if len(lake.state.folders(table)) < max(2, at_least):
        return []
    days: dict[str, list[Folder]] = {}
    for folder in lake.state.folders(table):
        is_large = lake.files.size(f"{table.name}/{folder.path}") >= FILE_BYTES // 2
        if folder.last <= lake.state.silver_batch and not is_large:
            days.setdefault(folder.newest, []).append(folder)
    return [folders for folders in days.values() if len(folders) >= max(2, at_least)]


def compact(lake: Lake, spark: SparkSession, *, at_least: int = 2) -> int:
    """Merge the folders of one day, in every table; return by how many their number fell."""
    fewer = 0
    for table in FOLDER_TABLES:
        for folders in find_groups(lake, table, at_least):
            made = _merge_folders(lake, spark, table, folders)
            kept = [folder for folder in lake.state.folders(table) if folder not in folders]
            tables = {**lake.state.tables, table.name: tuple(sorted([*kept, made], key=lambda one: one.first))}
            lake.commit(msgspec.structs.replace(lake.state, tables=tables))
            fewer += len(folders) - 1
    if fewer:
        lake.remove_unreferenced(FOLDER_TABLES)
    return fewer


def _merge_folders(lake: Lake, spark: SparkSession, table: Table, folders: list[Folder]) -> Folder:
    lay_out, by = LAYOUTS[table.name]
    size = sum(lake.files.size(f"{table.name}/{folder.path}") for folder in folders)
    rows = lake.frame(spark, table, [folder.path for folder in folders]).transform(lay_out)
    first, last = min(folder.first for folder in folders), max(folder.last for folder in folders)
    name = lake.write(rows.coalesce(max(1, size // FILE_BYTES)), table, f"{batch_name(first)}-{last:09d}", by)
    path = f"{name}/{PART}=closed" if PART in by else name
    return Folder(path, first, last, max(folder.newest for folder in folders))


def remove_old_rows(lake: Lake, keep_days: int, today: date) -> int:
    """Remove rows of bronze and silver whose newest day is longer ago; return the number of folders removed."""
    if keep_days < 1:
        raise InvalidInput(f"rows are kept for a whole number of days, at least 1, not {keep_days}")
    oldest = (today - timedelta(days=keep_days)).isoformat()
    tables, gone = dict(lake.state.tables), 0
    for table in RETAINED:
        folders = lake.state.folders(table)
        kept = tuple(one for one in folders if one.newest >= oldest or one.last > lake.state.silver_batch)
        gone += len(folders) - len(kept)
        tables[table.name] = kept
    if gone:
        lake.commit(msgspec.structs.replace(lake.state, tables=tables))
        lake.remove_unreferenced(RETAINED)
    return gone
