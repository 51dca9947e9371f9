"""Keys: every key that was ever published, so that an import can be compared with the whole history.

A step adds the keys of its events. A backfill adds those that it has published itself, in commits of its own between
the steps: what it publishes must be known whether or not the journal keeps it and the pipeline runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from waypost.spark.delta.parquet import DataFile, FileWriter, read_rows
from waypost.spark.delta.steps import StepConflict
from waypost.spark.delta.table import Change
from waypost.spark.files import LakeFiles
from waypost.spark.lake.tables import BRONZE_JOURNAL, KEYS

if TYPE_CHECKING:
    from waypost.spark.lake.lake import Lake

#: What is read of events to know their keys.
EVENT_COLUMNS: Final = ("queue", "number", "at_ms", "event", "message_id", "key")


def published_keys(events: Any) -> Any:
    """Return the keys of those events that published a message, as rows of `keys`."""
    is_key = pc.and_(pc.equal(events.column("event"), "published"), pc.is_valid(events.column("key")))
    rows = pa.table(events) if isinstance(events, pa.RecordBatch) else events
    rows = rows.filter(is_key)
    columns = [
        rows.column(name) if name != "backfill" else pa.nulls(rows.num_rows, pa.string()) for name in KEYS.columns
    ]
    return pa.table(columns, names=list(KEYS.columns)).cast(KEYS.arrow(KEYS.columns))


def write_keys(files: LakeFiles, events: Iterable[DataFile]) -> list[DataFile]:
    """Write the keys of some files of bronze as files of `keys`; none if there are no keys."""
    schema = BRONZE_JOURNAL.arrow(BRONZE_JOURNAL.columns)
    writer = FileWriter(files, KEYS.name, KEYS.arrow(KEYS.columns), KEYS.statistics)
    with writer:
        for file in events:
            is_key = (pc.field("event") == "published") & pc.field("key").is_valid()
            rows = read_rows(files, BRONZE_JOURNAL.name, [file], schema, EVENT_COLUMNS, is_key)
            writer.write(published_keys(rows).sort_by("key"))
    return writer.made


def fill_keys(lake: Lake) -> None:
    """Add the keys of events that were loaded before there was a table of keys, as one step."""
    while not lake.state.has_keys:
        made = write_keys(lake.files, lake.data_files(BRONZE_JOURNAL))
        state = msgspec.structs.replace(
            lake.state, has_keys=True, keys_begin_ms=max(lake.state.keys_begin_ms, lake.state.deleted_before_ms)
        )
        try:
            lake.commit("keys", {KEYS.name: Change(tuple(made))}, state)
        except StepConflict:
            lake.refresh(to_write=True)


def read_keys(lake: Lake, columns: Iterable[str], filter: Any) -> Iterator[Any]:
    """Yield rows of `keys` that a filter chooses, one file at a time."""
    wanted, schema = list(columns), KEYS.arrow(KEYS.columns)
    for file in lake.data_files(KEYS):
        rows = read_rows(lake.files, KEYS.name, [file], schema, wanted, filter)
        if rows.num_rows:
            yield rows
