"""One Delta table: what is committed, and commits that happen once.

Every commit carries the same application id and a number that grows. A writer opens the table, compares the number that
was committed last, and commits through that same handle: if another writer was faster, the library refuses the commit,
and the table is opened and compared again. So a number is committed once, however many programs try.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow as pa
from deltalake import DeltaTable, Field, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.schema import ArrayType, MapType, StructType
from deltalake.transaction import (
    AddAction,
    CommitProperties,
    RemoveAction,
    Transaction,
    create_table_with_add_actions,
)

from waypost.errors import StoreError
from waypost.spark.delta.parquet import DataFile, read_rows
from waypost.spark.files import LakeFiles, join_path

#: The application id of every step, so that any two writers of steps conflict.
APP_ID: Final = "waypost"
READER_VERSION, WRITER_VERSION = 1, 2
#: How long the log of a table is kept, and files that are in no version of it any more (see `vacuum`).
LOG_KEPT: Final = "interval 7 days"
FILES_KEPT: Final = "interval 24 hours"
COPY_AGAIN: Final = (
    "it was copied at another moment than the rest of the lake; copy the lake again while no run changes it"
)
#: How often a commit is tried when others are faster.
TRIES_MAX: Final = 100


class MissingTable(StoreError):
    """Raised when there is no Delta table at a path."""


class TableMismatch(StoreError):
    """Raised when a table and the steps of its lake are of different times, as in a copy of a changing lake."""


class Change(msgspec.Struct, frozen=True):
    """What a commit does to a table: files that are added and the paths of files that are removed."""

    add: tuple[DataFile, ...] = ()
    remove: tuple[DataFile, ...] = ()
    #: False if the rows stay the same (compaction).
    changes_rows: bool = True

    def __bool__(self) -> bool:
        return bool(self.add or self.remove)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A version of a table: its number, the number of the newest commit of ours, its files and its columns."""

    version: int
    step: int
    files: tuple[DataFile, ...]
    schema: pa.Schema

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(file.rows for file in self.files)


class DeltaFolder:
    """A Delta table at a path below a root."""

    def __init__(self, files: LakeFiles, name: str, app_id: str = APP_ID) -> None:
        self.files = files
        self.name = name
        #: Commits of one application id are numbered; those of another may come between them.
        self.app_id = app_id
        self._address = files.path(name) if files.is_local else files.uri(name)

    def open(self, version: int | None = None) -> DeltaTable:
        """Open the table. One that needs features which this release does not know is refused by name."""
        try:
            table = DeltaTable(self._address, version=version)
        except TableNotFoundError:
            raise MissingTable(f"there is no Delta table at {self.files.path(self.name)}") from None
        except DeltaError as error:
            raise StoreError(f"the Delta table {self.files.path(self.name)} cannot be opened: {error}") from None
        protocol = table.protocol()
        if protocol.min_reader_version > READER_VERSION or protocol.min_writer_version > WRITER_VERSION:
            features = sorted({*(protocol.reader_features or ()), *(protocol.writer_features or ())})
            needed = (
                ", ".join(features) or f"reader {protocol.min_reader_version}, writer {protocol.min_writer_version}"
            )
            raise StoreError(
                f"the Delta table {self.files.path(self.name)} was changed by another program and needs {needed}; "
                f"waypost works with reader version {READER_VERSION} and writer version {WRITER_VERSION}: "
                "remove the feature"
            )
        return table

    def exists(self) -> bool:
        """Return whether there is a table: its log has its first entry, or a checkpoint after which that was deleted.

        The library's own function waits for an object store without letting other threads run.
        """
        log = join_path(self.name, "_delta_log")
        return self.files.exists(f"{log}/{0:020}.json") or self.files.exists(f"{log}/_last_checkpoint")

    def create(self, schema: Schema, *, statistics: Sequence[str] = (), partition_by: Sequence[str] = ()) -> None:
        """Create an empty table, unless there is one."""
        if self.files.is_local:
            self.files.create_folder(self.name)
        configuration: dict[str, str | None] = {
            "delta.logRetentionDuration": LOG_KEPT,
            "delta.deletedFileRetentionDuration": FILES_KEPT,
        }
        if statistics:
            configuration["delta.dataSkippingStatsColumns"] = ",".join(statistics)
        else:
            configuration["delta.dataSkippingNumIndexedCols"] = "0"
        try:
            create_table_with_add_actions(
                self._address, schema, [], mode="error", partition_by=list(partition_by), configuration=configuration
            )
        except DeltaError:
            if not self.exists():
                raise
        self.sync(0)
        self.open()

    def remove_unused(self) -> bool:
        """Remove the table if nothing was ever committed to it, so that it can be created with other columns."""
        found = self.snapshot()
        if found.step or found.files:
            return False
        self.files.remove(join_path(self.name, "_delta_log"))
        return True

    def snapshot(self, version: int | None = None) -> Snapshot:
        """Return the newest version, or another one."""
        return self._snapshot(self.open(version))

    def _snapshot(self, table: DeltaTable) -> Snapshot:
        done = table.transaction_version(self.app_id)
        return Snapshot(table.version(), done or 0, _data_files(table), pa.schema(table.schema().to_arrow()))

    def commit(self, step: int, change: Change, *, after: int | None = None, sync: bool = True) -> Snapshot:
        """Commit a step, unless it is committed already; return the version after it. On disk when this returns.

        A table that has not reached version `after` is refused. With `sync=False` an entry that another process wrote
        may not be on disk yet.
        """
        for _ in range(TRIES_MAX):
            table = self.open()
            done = table.transaction_version(self.app_id)
            if done is not None and done >= step:
                if sync:
                    # The process that wrote it may have died before it synced it.
                    self.sync(table.version())
                return self._snapshot(table)
            if after is not None and table.version() < after:
                raise TableMismatch(
                    f"the table {self.files.path(self.name)} has version {table.version()}, and step {step} of the "
                    f"lake needs {after} or later: {COPY_AGAIN}"
                )
            if self.try_commit(table, step, change):
                return self._snapshot(table)
        raise StoreError(f"{self.files.path(self.name)}: step {step} was not committed in {TRIES_MAX} tries")

    def try_commit(self, table: DeltaTable, step: int, change: Change) -> bool:
        """Commit through a handle whose newest step was compared; return False if another writer was faster."""
        now = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [
            RemoveAction(
                file.path, change.changes_rows, now, size=file.size, partition_values=dict(file.partition) or None
            )
            for file in change.remove
        ]
        actions += [
            AddAction(file.path, file.size, file.partition, file.modified_ms, change.changes_rows, file.statistics)
            for file in change.add
        ]
        return self._commit(
            lambda: table.create_write_transaction(
                actions, "append", table.schema(), list(table.metadata().partition_columns) or None,
                commit_properties=self._properties(step),
            ),
            table,
        )  # fmt: skip

    def add_columns(self, columns: Mapping[str, Any]) -> None:
        """Add columns that the table lacks, by name and Arrow type, and fields of structs: null in older rows."""
        for _ in range(TRIES_MAX):
            table = self.open()
            known = {field.name: field.type for field in table.schema().fields}
            given = {name: _delta_type(kind) for name, kind in columns.items()}
            new = [Field(name, kind) for name, kind in given.items() if not _is_within(kind, known.get(name))]
            if not new:
                return
            done = table.transaction_version(self.app_id) or 0
            if self._commit(
                lambda table=table, new=new, done=done: table.alter.add_columns(  # type: ignore[misc]
                    new, commit_properties=self._properties(done)
                ),
                table,
            ):
                return
        raise StoreError(f"{self.files.path(self.name)}: columns were not added in {TRIES_MAX} tries")

    def _commit(self, act: Callable[[], None], table: DeltaTable) -> bool:
        before = table.version()
        try:
            act()
        except CommitFailedError:
            return False
        # The handle stays at its version; every entry that came since is synced, also one of another writer.
        table.update_incremental()
        for version in range(before + 1, table.version() + 1):
            self.sync(version)
        return True

    def _properties(self, step: int) -> CommitProperties:
        return CommitProperties(app_transactions=[Transaction(self.app_id, step)])

    def sync(self, version: int) -> None:
        """Sync an entry of the log to disk. The library does not."""
        if self.files.is_local:
            log = join_path(self.name, "_delta_log")
            entry = f"{log}/{version:020}"
            self.files.sync_file(f"{entry}.json")
            if self.files.exists(f"{entry}.checkpoint.parquet"):
                self.files.sync_file(f"{entry}.checkpoint.parquet")
                self.files.sync_file(f"{log}/_last_checkpoint")
            for folder in (log, self.name):
                self.files.sync_folder(folder)

    def arrow(self, snapshot: Snapshot, columns: Sequence[str] | None = None, filter: Any = None) -> pa.Table:
        """Return rows of a version as an Arrow table, without the columns that it is partitioned by."""
        partition = {name for file in snapshot.files[:1] for name in file.partition}
        schema = pa.schema([field for field in snapshot.schema if field.name not in partition])
        return read_rows(self.files, self.name, snapshot.files, schema, columns, filter)


def _delta_type(kind: Any) -> Any:
    return Schema.from_arrow(pa.schema([("x", kind)])).fields[0].type


def _is_within(kind: Any, known: Any) -> bool:
    """Return whether a type is known with all fields of its structs."""
    if isinstance(kind, StructType) and isinstance(known, StructType):
        fields = {field.name: field.type for field in known.fields}
        return all(_is_within(field.type, fields.get(field.name)) for field in kind.fields)
    if isinstance(kind, ArrayType) and isinstance(known, ArrayType):
        return _is_within(kind.element_type, known.element_type)
    if isinstance(kind, MapType) and isinstance(known, MapType):
        return _is_within(kind.value_type, known.value_type)
    return known is not None


def _data_files(table: DeltaTable) -> tuple[DataFile, ...]:
    """Return the files of a version with their statistics."""
    partition_by = table.metadata().partition_columns
    files = []
    for row in pa.table(table.get_add_actions()).to_pylist():
        partition = row.get("partition") or {}
        lowest = {name: value for name, value in (row.get("min") or {}).items() if value is not None}
        highest = {name: value for name, value in (row.get("max") or {}).items() if value is not None}
        nulls = {name: value for name, value in (row.get("null_count") or {}).items() if value is not None}
        values = {name: _text(partition.get(name)) for name in partition_by}
        # The library returns paths as a URL has them.
        path, size, count = unquote(row["path"]), row["size_bytes"], row["num_records"] or 0
        files.append(DataFile(path, size, count, row["modification_time"], values, lowest, highest, nulls))
    return tuple(files)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
