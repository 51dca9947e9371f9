"""Gold: what happened in each queue and minute. Small enough to be made and read without Spark.

Every column is a count or a sum, so rows of the same minute merge by adding: a step adds what is new in it to the days
that it touches, and reads no other day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from waypost.spark.delta.parquet import DataFile, read_rows, write_rows
from waypost.spark.delta.table import Change
from waypost.spark.lake.sums import add_up, without_backfilled
from waypost.spark.lake.tables import (
    DATE,
    GOLD_DEAD_LETTERS,
    GOLD_HISTOGRAMS,
    GOLD_MINUTES,
    GOLD_REDELIVERIES,
    MEASURES,
    MINUTE_EVENTS,
    LakeTable,
)

if TYPE_CHECKING:
    from waypost.spark.lake.lake import Lake

#: Files that are written at the same time.
THREADS: Final = 8
ZERO: Final = pa.scalar(0, pa.int64())


def minutes(sums: Any) -> Any:
    """One row for each queue and minute."""
    event, measure, events = sums.column("event"), sums.column("measure"), sums.column("events")

    def where(condition: Any, values: Any) -> Any:
        return pc.if_else(pc.fill_null(condition, False), values, ZERO)

    columns = {name: where(pc.equal(event, wanted), events) for name, wanted in MINUTE_EVENTS.items()}
    columns["woken"] = sums.column("woken")
    for name in MEASURES:
        of_measure = pc.equal(measure, name)
        columns[f"{name}_ms_sum"] = where(of_measure, sums.column("total_ms"))
        columns[f"{name}_count"] = where(of_measure, events)
    return pa.table({"queue": sums.column("queue"), "minute": _minute(sums), **columns})


def histograms(sums: Any) -> Any:
    """How often each measure fell into each bucket."""
    rows = sums.filter(pc.is_valid(sums.column("measure")))
    return _counted(rows, measure=rows.column("measure"), bucket=rows.column("bucket"))


def redeliveries(sums: Any) -> Any:
    """Claims of messages that had been claimed before, by their cause."""
    rows = sums.filter(pc.and_(pc.equal(sums.column("event"), "claimed"), pc.is_valid(sums.column("cause"))))
    return _counted(rows, cause=rows.column("cause"))


def dead_letters(sums: Any) -> Any:
    """Deaths by their reason and error."""
    rows = sums.filter(pc.equal(sums.column("event"), "dead"))
    reason = pc.fill_null(rows.column("reason"), "unknown")
    return _counted(rows, reason=reason, error_type=rows.column("error_type"))


def _counted(rows: Any, **columns: Any) -> Any:
    return pa.table({"queue": rows.column("queue"), "minute": _minute(rows), **columns, "count": rows.column("events")})


def _minute(sums: Any) -> Any:
    return pc.multiply(sums.column("minute_ms"), 1000).cast(pa.timestamp("us", tz="UTC"))


#: Each table of gold, how it is made, and the columns that its rows are distinguished by.
TABLE_BUILDERS: Final[tuple[tuple[LakeTable, Callable[[Any], Any], tuple[str, ...]], ...]] = (
    (GOLD_MINUTES, minutes, ("queue", "minute")),
    (GOLD_HISTOGRAMS, histograms, ("queue", "minute", "measure", "bucket")),
    (GOLD_REDELIVERIES, redeliveries, ("queue", "minute", "cause")),
    (GOLD_DEAD_LETTERS, dead_letters, ("queue", "minute", "reason", "error_type")),
)


def add_sums(lake: Lake, sums: Any) -> dict[str, Change]:
    """Return the changes of gold that add these sums to it: the files of their days are replaced."""
    changes = {}
    sums = counted_sums(lake, sums)
    for table, build, keys in TABLE_BUILDERS:
        schema = table.arrow(table.columns)
        counts = [name for name in table.columns if name not in keys]
        new = build(sums).cast(schema)
        if not new.num_rows:
            continue
        days = days_of(new)
        old = [file for file in lake.data_files(table) if file.partition[DATE] in days]
        before = read_rows(lake.files, table.name, old, schema)
        rows = add_up([before, new], keys, counts).select(schema.names).cast(schema)
        changes[table.name] = Change(tuple(write_days(lake, table, rows)), tuple(old))
    return changes


def counted_sums(lake: Lake, sums: Any) -> Any:
    """Return the sums that gold counts: all, or those without messages of backfills."""
    return without_backfilled(sums) if lake.state.gold_without_backfills else sums


def days_of(rows: Any) -> set[str]:
    """Return the days of rows of gold."""
    return set(pc.unique(pc.strftime(rows.column("minute"), "%Y-%m-%d")).to_pylist())


def replace_days(lake: Lake, table: LakeTable, rows: Any, days: Iterable[str]) -> Change:
    """Return the change that makes these rows all that a table of gold has of some days."""
    wanted = set(days)
    old = [file for file in lake.data_files(table) if file.partition[DATE] in wanted]
    return Change(tuple(write_days(lake, table, rows)), tuple(old))


def write_days(lake: Lake, table: LakeTable, rows: Any) -> list[DataFile]:
    """Write rows of gold, one file for each day."""
    rows = rows.sort_by([("minute", "ascending"), ("queue", "ascending")])
    days = pc.strftime(rows.column("minute"), "%Y-%m-%d").combine_chunks()
    # Sorted by time, so each day is one run of rows.
    found: Sequence[Any] = (
        pc.run_end_encode(days).chunks if isinstance(days, pa.ChunkedArray) else [pc.run_end_encode(days)]
    )
    parts, start = [], 0
    for encoded in found:
        for end, day in zip(encoded.run_ends.to_pylist(), encoded.values.to_pylist(), strict=True):
            parts.append((day, rows.slice(start, end - start)))
            start = end
    with ThreadPoolExecutor(THREADS) as pool:
        made = pool.map(lambda part: write_rows(lake.files, table.name, part[1], (), {DATE: part[0]}), parts)
        return [file for files in made for file in files]
