"""Conversion of a lake that release 0.1 made: its files become Delta tables. Needs pyarrow only, no Spark.

Files of bronze, of final rows and of gold stay where they are and are committed as they are. Rows that may still change
are written once more, as partial rows. Events that were loaded and not merged yet are merged by the next run. Ingested
messages are converted queue by queue (see `upgrade_messages`).

The conversion is one step: killed before it, the lake is one of 0.1 still; killed after it, it is converted, and what
is no longer needed is deleted by the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from waypost.errors import InvalidInput, StoreError
from waypost.spark.delta.parquet import DataFile, describe_file, write_rows
from waypost.spark.delta.table import Change
from waypost.spark.files import LakeFiles, open_lake_files
from waypost.spark.lake import gold
from waypost.spark.lake.lake import OLD_FOLDER, OLD_STATE, Lake, Seen, Source, State
from waypost.spark.lake.sums import SUMS
from waypost.spark.lake.tables import (
    BRONZE_JOURNAL,
    DATE,
    GOLD,
    SILVER_DELIVERIES,
    SILVER_MESSAGES,
    SILVER_OPEN_DELIVERIES,
    SILVER_OPEN_MESSAGES,
    LakeTable,
)
from waypost.spark.lake.upgrade_messages import find_old_messages, upgrade_messages

OLD_SUMS: Final = "silver/sums"
#: What the pipeline has there beside its state.
OLD_CHECKPOINT: Final = "_state/checkpoint"
OLD_LOCK: Final = "_state/pipeline.lock"


class OldFolder(msgspec.Struct, frozen=True):
    """A folder of a table, and the newest batch in it."""

    path: str
    last: int


class OldState(msgspec.Struct, frozen=True):
    """What is needed of a state of 0.1."""

    format: str = "parquet"
    source: Source | None = None
    bronze_batch: int = -1
    silver_batch: int = -1
    tables: dict[str, tuple[OldFolder, ...]] = msgspec.field(default_factory=dict)
    open: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    seen: dict[str, Seen] = msgspec.field(default_factory=dict)
    stale_days: tuple[str, ...] = ()


def upgrade(root: str, progress: Callable[[str], None] = lambda text: None) -> Lake:
    """Convert a lake of release 0.1; one that is converted already stays as it is."""
    files = open_lake_files(root)
    content, messages = files.read(OLD_STATE), find_old_messages(files)
    if content is None and not messages and not files.exists("_steps"):
        raise InvalidInput(f"there is no lake at {root}")
    for name in messages:
        upgrade_messages(files, name, progress)
    lake = Lake(root, converting=True)
    if content is not None and not lake.step:
        try:
            old = msgspec.json.decode(content, type=OldState)
        except msgspec.MsgspecError as error:
            raise StoreError(f"{files.path(OLD_STATE)} is not the state of a lake: {error}") from None
        _convert(lake, old, progress)
    elif not messages:
        progress("the lake is converted already")
    files.remove(OLD_CHECKPOINT)
    files.remove_file(OLD_LOCK)
    files.remove_file(OLD_STATE)
    left = [name for name in files.walk(OLD_FOLDER) if not name.endswith(".crc")]
    if not left:
        files.remove(OLD_FOLDER)
    files.remove(OLD_SUMS)
    return lake


def _convert(lake: Lake, old: OldState, progress: Callable[[str], None]) -> None:
    lake.create()
    changes: dict[str, Change] = {}
    for table in (BRONZE_JOURNAL, SILVER_DELIVERIES, SILVER_MESSAGES):
        folders = [one.path for one in old.tables.get(table.name, ()) if one.last <= old.silver_batch]
        changes[table.name] = Change(tuple(_take_over(lake.files, table, folders, old.format)))
        progress(f"{table.name}: {sum(file.rows for file in changes[table.name].add):,} rows")
    for table, closed, to_partial in (
        (SILVER_OPEN_DELIVERIES, SILVER_DELIVERIES, _partial_deliveries),
        (SILVER_OPEN_MESSAGES, SILVER_MESSAGES, lambda rows: rows),
    ):
        schema = closed.arrow(closed.columns)
        found = to_partial(_read_old(lake.files, closed.name, old.open.get(closed.name, ()), schema, old.format))
        if table is SILVER_OPEN_DELIVERIES:
            messages = SILVER_MESSAGES.arrow(SILVER_MESSAGES.columns)
            paths = old.open.get(SILVER_MESSAGES.name, ())
            timers = _waiting_timers(_read_old(lake.files, SILVER_MESSAGES.name, paths, messages, old.format))
            found = pa.concat_tables([found, timers])
        made = write_rows(lake.files, table.name, found.sort_by("message_id"), table.statistics)
        changes[table.name] = Change(tuple(made))
        progress(f"{table.name}: {found.num_rows:,} rows")
    changes |= _gold(lake, old)
    offsets = {queue: seen.newest for queue, seen in old.seen.items()}
    ahead = [one.path for one in old.tables.get(BRONZE_JOURNAL.name, ()) if one.last > old.silver_batch]
    unmerged = tuple(_take_over(lake.files, BRONZE_JOURNAL, ahead, old.format))
    lake.commit("upgrade", changes, State(source=old.source, offsets=offsets, seen=old.seen, unmerged=unmerged))


def _take_over(files: LakeFiles, table: LakeTable, folders: Iterable[str], format: str) -> list[DataFile]:
    if format != "parquet":
        rows = _read_old(files, table.name, folders, table.arrow(table.columns), format)
        return write_rows(files, table.name, rows, table.statistics)
    return [
        describe_file(files, table.name, f"{folder}/{name}", table.statistics, {})
        for folder in folders
        for name in sorted(_data_names(files, f"{table.name}/{folder}"))
    ]


def _data_names(files: LakeFiles, folder: str) -> list[str]:
    return [name for name in files.walk(folder) if not name.rpartition("/")[2].startswith(("_", "."))]


def _read_old(files: LakeFiles, table: str, folders: Iterable[str], schema: Any, format: str) -> Any:
    paths = [
        files.path(f"{table}/{folder}/{name}") for folder in folders for name in _data_names(files, f"{table}/{folder}")
    ]
    if not paths:
        return schema.empty_table()
    rows = ds.dataset(paths, schema=schema, format=format, filesystem=files.arrow_system(), partitioning=None)
    return rows.to_table()


def _partial_deliveries(rows: Any) -> Any:
    """Return open rows of 0.1 as partial rows. Before it counted claims, the token was that count."""
    schema = SILVER_OPEN_DELIVERIES.arrow(SILVER_OPEN_DELIVERIES.columns)
    given = {
        "claim": pc.coalesce(rows.column("claim"), rows.column("token")),
        "timer": pc.is_valid(rows.column("late_ms")).cast(pa.int32()),
        "last_number": pc.coalesce(rows.column("ended_number"), rows.column("claimed_number")),
    }
    columns = {name: given[name] if name in given else rows.column(name) for name in schema.names}
    return pa.table(columns).cast(schema)


def _waiting_timers(messages: Any) -> Any:
    """Return partial rows for timers that were promoted and whose message was not claimed yet."""
    schema = SILVER_OPEN_DELIVERIES.arrow(SILVER_OPEN_DELIVERIES.columns)
    claims = pc.fill_null(pc.coalesce(messages.column("claims"), messages.column("token")), 0)
    waiting = messages.filter(pc.fill_null(pc.greater(messages.column("timer_claim"), claims), False))
    count = waiting.num_rows
    given = {
        "queue": waiting.column("queue"), "message_id": waiting.column("message_id"),
        "claim": waiting.column("timer_claim"), "last_number": waiting.column("last_number"),
        "timer": pa.nulls(count, pa.int32()).fill_null(1), "claims": pa.nulls(count, pa.int64()).fill_null(0),
        "ends": pa.nulls(count, pa.int64()).fill_null(0),
    }  # fmt: skip
    return pa.table({one.name: given.get(one.name, pa.nulls(count, one.type)) for one in schema}).cast(schema)


def _gold(lake: Lake, old: OldState) -> dict[str, Change]:
    """Take over the files of each day; those of days that were not up to date are made anew from the old sums."""
    changes = {}
    stale = set(old.stale_days)
    for table in GOLD:
        files = [
            describe_file(lake.files, table.name, f"{folder}/{name}", (), {DATE: folder.removeprefix(f"{DATE}=")})
            for folder in lake.files.folders(table.name)
            if folder.startswith(f"{DATE}=") and folder.removeprefix(f"{DATE}=") not in stale
            for name in _data_names(lake.files, f"{table.name}/{folder}")
        ]
        changes[table.name] = Change(tuple(file for file in files if file.rows))
    if not stale:
        return changes
    folders = [one.path for one in old.tables.get(OLD_SUMS, ())]
    sums = _read_old(lake.files, OLD_SUMS, folders, SUMS, old.format)
    days = pc.strftime(pc.multiply(sums.column("minute_ms"), 1000).cast(pa.timestamp("us", tz="UTC")), "%Y-%m-%d")
    for name, change in gold.add_sums(lake, sums.filter(pc.is_in(days, pa.array(sorted(stale))))).items():
        changes[name] = Change((*changes[name].add, *change.add))
    return changes
