"""Conversion of ingested messages of release 0.1: their files become Delta tables. Without Spark.

    DIR/_state/ingest-NAME.json                    which folders the tables consist of, and the newest batch
    DIR/_state/ingest-NAME/offsets/BATCH           how far the journal was read by a batch
    DIR/messages/NAME/batch=…/part=rows/date=…/    messages; those that did not match the schema are in part=corrupt

Rows are copied into fewer files. The conversion of a queue is one step: killed before it, its messages are those of 0.1
still; killed after it, the next call deletes the old files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import pyarrow as pa
from deltalake import Schema

from waypost.errors import InvalidInput, StoreError
from waypost.spark.delta.conversion import copy_files, unify_schemas
from waypost.spark.delta.table import Change
from waypost.spark.files import LakeFiles
from waypost.spark.lake.ingest import ABOUT, STATISTICS, STEPS
from waypost.spark.lake.lake import OLD_FOLDER, Lake, Source, State
from waypost.spark.lake.tables import LakeTable
from waypost.spark.source.tables import PUBLISHED

#: The parts of an old table, and the folders of the tables that they become.
PARTS: Final = {"rows": "messages", "corrupt": "messages_corrupt"}


class OldFolder(msgspec.Struct, frozen=True):
    """A folder of a table."""

    path: str


class OldState(msgspec.Struct, frozen=True):
    """What is needed of the state of 0.1."""

    source: Source | None = None
    schema: str | None = None
    bronze_batch: int = -1
    tables: dict[str, tuple[OldFolder, ...]] = msgspec.field(default_factory=dict)


def find_old_messages(files: LakeFiles) -> list[str]:
    """Return the names of queues, as folders have them, whose messages release 0.1 ingested into a lake."""
    names = files.walk(OLD_FOLDER) if files.exists(OLD_FOLDER) else {}
    return sorted(
        name.removeprefix("ingest-").removesuffix(".json")
        for name in names
        if "/" not in name and name.startswith("ingest-") and name.endswith(".json")
    )


def upgrade_messages(files: LakeFiles, name: str, progress: Callable[[str], None]) -> None:
    """Convert the messages of one queue."""
    state_file = f"{OLD_FOLDER}/ingest-{name}.json"
    try:
        old = msgspec.json.decode(files.read(state_file) or b"", type=OldState)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{files.path(state_file)} is not the state of ingested messages: {error}") from None
    lake = _convert(files, name, old, progress)
    for folder in files.folders(f"messages/{name}"):
        if folder.startswith("batch="):
            files.remove(f"messages/{name}/{folder}")
    files.remove(f"{OLD_FOLDER}/ingest-{name}")
    files.remove_file(f"{OLD_FOLDER}/ingest-{name}.lock")
    files.remove_file(state_file)
    progress(f"messages/{name}: {sum(file.rows for file in lake.data_files(f'messages/{name}')):,} rows")


def _convert(files: LakeFiles, name: str, old: OldState, progress: Callable[[str], None]) -> Lake:
    # Before anything old is read: a call that was killed while it deleted may have left half of it.
    done = _open(files, name, (LakeTable(f"{folder}/{name}", {}, STATISTICS) for folder in PARTS.values()))
    if done.step:
        progress(f"messages/{name} is converted already")
        return done
    offsets = _read_offsets(files, name, old.bronze_batch)
    paths = {part: list(_find_files(files, name, old, part)) for part in PARTS}
    schemas = {}
    for part, found in paths.items():
        columns = _choose_columns(old, part)
        try:
            known = unify_schemas(files, found)
        except pa.ArrowException as error:
            raise InvalidInput(
                f"the messages {name} of the lake {files.address} cannot be converted: their files have columns of "
                f"different types ({error})"
            ) from None
        declared = {column: PUBLISHED.arrow_type(column) for column in columns if column != "value"}
        fields = [
            pa.field(column, declared.get(column) or known.field(column).type)
            for column in columns
            if column in declared or column in known.names
        ]
        schemas[part] = pa.schema(fields)
    tables = {
        part: LakeTable(
            f"{folder}/{name}", {}, STATISTICS, schema_json=Schema.from_arrow(schemas[part]).to_json()
        )
        for part, folder in PARTS.items()
    }  # fmt: skip
    lake = _open(files, name, tables.values())
    lake.create()
    changes = {
        table.name: Change(
            tuple(copy_files(files, table.name, ((path, {}) for path in paths[part]), schemas[part], STATISTICS))
        )
        for part, table in tables.items()
    }
    lake.commit("upgrade", changes, State(source=old.source, schema=old.schema, offsets=offsets))
    return lake


def _open(files: LakeFiles, name: str, tables: Iterable[LakeTable]) -> Lake:
    return Lake(files.address, steps=f"{STEPS}/{name}", tables=tuple(tables))


def _choose_columns(old: OldState, part: str) -> Iterable[str]:
    return (*ABOUT, "value") if part == "rows" and old.schema is not None else (*ABOUT, "body", "text")


def _find_files(files: LakeFiles, name: str, old: OldState, part: str) -> Iterable[str]:
    table = f"messages/{name}"
    for folder in old.tables.get(table, ()):
        if folder.path.endswith(f"part={part}"):
            for file in sorted(files.walk(f"{table}/{folder.path}")):
                if not file.rpartition("/")[2].startswith(("_", ".")):
                    yield f"{table}/{folder.path}/{file}"


def _read_offsets(files: LakeFiles, name: str, batch: int) -> dict[str, int]:
    """Return how far the journal was read, from the checkpoint of Spark's stream: a line of it is the offset."""
    if batch < 0:
        return {}
    path = f"{OLD_FOLDER}/ingest-{name}/offsets/{batch}"
    content = files.read(path)
    if content is None:
        raise StoreError(
            f"the messages {name} of the lake {files.address} cannot be converted: {files.path(path)} is gone, which "
            "says how far the journal was read. Restore it, or load them into a new lake"
        )
    try:
        return msgspec.json.decode(content.strip().rpartition(b"\n")[2], type=dict[str, int])
    except msgspec.MsgspecError as error:
        raise StoreError(f"{files.path(path)} is no offset of the journal: {error}") from None
