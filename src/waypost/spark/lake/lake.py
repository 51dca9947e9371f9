"""A lake: Delta tables that change in steps.

A step is one batch of events, or a compaction: it adds files to several tables, removes others, and records how far the
journal was read. The table `_steps` decides whether it happened (see `waypost.spark.delta.steps`); opening a lake
completes a step that a killed process left behind. Everything that one `Lake` reads is of one step.

    DIR/_steps/              one row for each step: what it did, and the state after it
    DIR/bronze/journal/      events as they were journalled
    DIR/silver/…/            ended deliveries and messages, and partial rows of those that have not ended
    DIR/gold/…/date=…/       what happened in each queue and minute
    DIR/keys/                every key that was published
    DIR/messages/QUEUE/      messages that were ingested

Spark is needed for `frame` and the views; everything else reads with pyarrow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa

from waypost.errors import ConfigurationError, InvalidInput, StoreError
from waypost.spark.delta.parquet import DataFile
from waypost.spark.delta.steps import StepConflict, Steps
from waypost.spark.delta.table import Change, Snapshot
from waypost.spark.delta.vacuum import are_deleted, vacuum
from waypost.spark.files import LakeFiles, open_lake_files
from waypost.spark.lake.tables import (
    BRONZE_JOURNAL,
    DATE,
    SILVER_DELIVERIES,
    SILVER_MESSAGES,
    SILVER_OPEN_DELIVERIES,
    SILVER_OPEN_MESSAGES,
    TABLES,
    LakeTable,
)
from waypost.store.bulk.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from waypost.spark.delta.parquet import Bounds

LAYOUT = 2
STEPS = "_steps"
#: The state of a lake of release 0.1, before its tables were Delta tables.
OLD_FOLDER = "_state"
OLD_STATE = "_state/pipeline.json"
#: How often changes are committed that still fit, while other processes commit steps.
COMMITS_MAX = 100
#: How often changes are computed again that do not fit any more.
TRIES_MAX = 5
T = TypeVar("T")


class Seen(msgspec.Struct, frozen=True):
    """What the lake has of one queue's journal. Numbers begin with 1, so every one that is missing was not seen."""

    events: int = 0
    newest: int = 0
    #: The number of the newest event that was missing, and of the newest that changed how much is journalled.
    gap_end: int = 0
    level_end: int = 0
    #: How many events of each kind.
    counts: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def not_seen(self) -> int:
        """How many events were trimmed from the journal before they were read."""
        return self.newest - self.events


class Source(msgspec.Struct, frozen=True):
    """Where the events come from; secrets are named here, never written."""

    url: str | None = None
    url_env: str | None = None
    namespace: str = "wp"
    queues: tuple[str, ...] | None = None


class State(msgspec.Struct, frozen=True):
    """What the lake is made from, and how far it has come."""

    layout: int = LAYOUT
    source: Source | None = None
    #: What bodies are parsed by, in a table of messages.
    schema: str | None = None
    #: By queue, the number of the last event that was read.
    offsets: dict[str, int] = msgspec.field(default_factory=dict)
    seen: dict[str, Seen] = msgspec.field(default_factory=dict)
    #: By table of open rows, how many there were when all of them were last merged.
    merged_rows: dict[str, int] = msgspec.field(default_factory=dict)
    vacuumed_ms: int = 0
    #: The step of the newest vacuum.
    vacuum_step: int = 0
    #: By queue, the number of the last event that was left out because it was older than the beginning of the lake.
    left_out: dict[str, int] = msgspec.field(default_factory=dict)
    #: By queue, the time that this beginning was chosen by.
    begins_ms: dict[str, int] = msgspec.field(default_factory=dict)
    #: Events before this time were deleted from bronze.
    deleted_before_ms: int = 0
    #: Files of bronze that release 0.1 wrote and had not merged; the next run does.
    unmerged: tuple[DataFile, ...] = ()
    #: Whether gold leaves out messages that backfills have published.
    gold_without_backfills: bool = False
    #: Whether `keys` has the keys of the events that were loaded before that table was there.
    has_keys: bool = False
    #: Events before this time were deleted from bronze before their keys were taken.
    keys_begin_ms: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """A step, and what each table is after it."""

    step: int = 0
    state: State = field(default_factory=State)
    snapshots: Mapping[str, Snapshot] = field(default_factory=dict)


class Lake:
    """A lake at one place."""

    def __init__(
        self,
        root: str,
        *,
        format: str | None = None,
        steps: str = STEPS,
        tables: Sequence[LakeTable] = TABLES,
        converting: bool = False,
    ) -> None:
        if format not in (None, "parquet", "delta"):
            raise ConfigurationError(
                f"tables of a lake are Delta tables with Parquet files; {format!r} is not supported: leave format out"
            )
        self.files: LakeFiles = open_lake_files(root)
        self.tables = tuple(tables)
        self.steps = Steps(self.files, steps)
        self._view = View()
        self._converting = converting
        self.refresh()

    # ---- steps -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The state after the step that is read."""
        return self._view.state

    @property
    def step(self) -> int:
        """The number of the step that is read, 0 before the first."""
        return self._view.step

    def refresh(self, *, to_write: bool = False) -> None:
        """Move on to the newest step; one that a killed process left incomplete is completed first.

        Where that fails, a reader gets the step before; a writer gets the error.
        """
        if not self.steps.exists():
            self._refuse_old()
            return
        step, snapshots = self.steps.snapshots([table.name for table in self.tables], to_write=to_write)
        if step is None:
            self._refuse_old()
            self._view = View(snapshots=snapshots)
        else:
            self._view = View(step.number, self._decode_state(step.state), snapshots)

    def _refuse_old(self) -> None:
        """Refuse a lake whose conversion has not been committed."""
        if self.steps.table.name == STEPS and not self._converting and self.files.exists(OLD_STATE):
            raise StoreError(
                f"the lake {self.files.address} was made by release 0.1 of waypost: convert it once, with "
                f"`waypost pipeline upgrade --lake {self.files.address}`"
            )

    def _decode_state(self, content: str) -> State:
        try:
            layout = msgspec.json.decode(content, type=dict[str, Any])["layout"]
            if layout <= LAYOUT:
                return msgspec.json.decode(content, type=State)
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise StoreError(f"{self.files.path(self.steps.table.name)} has no state of a lake: {error}") from None
        raise StoreError(f"the lake {self.files.address} was made by a newer release of waypost: update this one")

    def create(self) -> None:
        """Create the tables that are missing, and columns that are new in this release."""
        is_new, changed = not self._view.snapshots and not self.steps.exists(), False
        for table in self.tables:
            folder = self.steps.folder(table.name)
            known = None if is_new else self._view.snapshots.get(table.name)
            if known is None:
                folder.create(
                    table.delta_schema(), statistics=table.statistics, partition_by=(DATE,) if table.by_date else ()
                )
                known, changed = folder.snapshot(), True
            missing = [name for name in table.columns if name not in known.schema.names]
            if missing and table.schema_json is None:
                folder.add_columns({name: table.arrow_type(name) for name in missing})
                changed = True
        if is_new:
            # Last: where there are steps, there are all tables.
            self.steps.create()
        if changed:
            self.refresh(to_write=True)

    def commit(self, kind: str, changes: Mapping[str, Change], state: State) -> None:
        """Commit a step: all of its changes, and the state after it. `StepConflict` if another process was first."""
        view = self._view
        inputs = {name: snapshot.version for name, snapshot in view.snapshots.items()}
        content = msgspec.json.encode(state).decode()
        step, made = self.steps.commit(view.step, kind, content, changes, inputs)
        self._view = View(step.number, state, {**view.snapshots, **made})

    def commit_beside_others(self, kind: str, changes: Mapping[str, Change], amend: Callable[[State], State]) -> None:
        """Commit changes that stay right if other processes add rows meanwhile: the same rows in other files.

        `amend` returns the state after it from the one before. Raises `StepConflict` if another process replaced one of
        these files, or deleted those that are added: then they must be computed again.
        """
        computed_at = self.step
        for _ in range(COMMITS_MAX):
            try:
                return self.commit(kind, changes, amend(self.state))
            except StepConflict as conflict:
                self.refresh(to_write=True)
                if not self.still_fits(changes, computed_at):
                    raise conflict from None
        raise StepConflict(f"other processes changed the lake {self.files.address} {COMMITS_MAX} times meanwhile")

    def still_fits(self, changes: Mapping[str, Change], computed_at: int) -> bool:
        """Return whether the files are there that changes of an earlier step remove and add."""
        for name, change in changes.items():
            there = {file.path for file in self.data_files(name)}
            if any(file.path not in there for file in change.remove):
                return False
        vacuum_step = self.state.vacuum_step
        return vacuum_step <= computed_at or not are_deleted(self.steps, vacuum_step, changes)

    def vacuum(self) -> int:
        """Delete files that no table needs since a day; return how many. `StepConflict` if others commit meanwhile."""

        def commit() -> int:
            now = time.time_ns() // 1_000_000
            state = msgspec.structs.replace(self.state, vacuumed_ms=now, vacuum_step=self.step + 1)
            self.commit("vacuum", {}, state)
            return self.step

        # What 0.1 had loaded and not merged is in no table yet.
        kept = {BRONZE_JOURNAL.name: self.state.unmerged}
        return vacuum(self.steps, self.table_names(), commit, kept)

    # ---- tables ------------------------------------------------------------------------------------------------

    def table_names(self) -> list[str]:
        """Return the names of the tables."""
        return [table.name for table in self.tables if table.name in self._view.snapshots]

    def version(self, table: Table | str) -> int:
        """Return the version of a Delta table that is read."""
        return self._snapshot(table).version

    def data_files(self, table: Table | str) -> tuple[DataFile, ...]:
        """Return the files that a table is made of."""
        name = table if isinstance(table, str) else table.name
        found = self._view.snapshots.get(name)
        return () if found is None else found.files

    def count_rows(self) -> dict[str, int]:
        """Return how many rows each table has, by its commits; no file is read."""
        return {name: sum(file.rows for file in self.data_files(name)) for name in self.table_names()}

    def schema(self, table: Table | str) -> Any:
        """Return the columns of a table as an Arrow schema, without those that it is partitioned by."""
        declared, found = self._declared(table), self._snapshot(table).schema
        return found.remove(found.get_field_index(DATE)) if declared.by_date else found

    def _snapshot(self, table: Table | str) -> Snapshot:
        name = table if isinstance(table, str) else table.name
        try:
            return self._view.snapshots[name]
        except KeyError:
            known = ", ".join(self.table_names()) or "no tables yet"
            raise InvalidInput(f"there is no table {name} in the lake {self.files.address}; it has {known}") from None

    def _declared(self, table: Table | str) -> LakeTable:
        name = table if isinstance(table, str) else table.name
        found = next((one for one in self.tables if one.name == name), None)
        if found is None:
            raise InvalidInput(f"a lake has no table {name}; it has {', '.join(one.name for one in self.tables)}")
        return found

    def frame(
        self,
        spark: SparkSession,
        table: Table,
        files: Iterable[DataFile] | None = None,
        bounds: Bounds | None = None,
    ) -> DataFrame:
        """Return the rows of a table as a DataFrame, or those of some of its files.

        With `bounds`, a column and its smallest and largest value, only the rows between them.
        """
        from waypost.spark.delta.data_source import read_frame

        data = self.data_files(table) if files is None else tuple(files)
        return read_frame(spark, self.files, table.name, data, table.ddl, bounds=bounds)

    def arrow(self, table: Table | str, columns: Sequence[str] | None = None, filter: Any = None) -> Any:
        """Return rows of a table as an Arrow table, in no order: chosen columns, and a filter of `pyarrow.dataset`.

        A column that is new in this release is null until the next run has added it to the table.
        """
        declared = self._declared(table)
        wanted = list(declared.columns if columns is None else columns)
        if declared.name not in self._view.snapshots:
            return declared.arrow(wanted).empty_table()
        snapshot = self._snapshot(declared)
        known = [name for name in wanted if name in snapshot.schema.names]
        rows = self.steps.folder(declared.name).arrow(snapshot, known, filter)
        if declared.schema_json:
            return rows
        for name in wanted:
            if name not in known:
                rows = rows.append_column(name, pa.nulls(rows.num_rows, declared.arrow_type(name)))
        return rows.select(wanted).cast(declared.arrow(wanted))

    def rows(self, table: Table) -> Any:
        """Return a whole table as an Arrow table, in no order; Spark is not needed for it."""
        return self.arrow(table)

    # ---- views -------------------------------------------------------------------------------------------------

    def messages_now(self, spark: SparkSession) -> DataFrame:
        """Return the messages that have not ended, one row each."""
        from waypost.spark.lake import silver

        return silver.messages_now(self.frame(spark, SILVER_OPEN_MESSAGES))

    def deliveries_now(self, spark: SparkSession) -> DataFrame:
        """Return the deliveries that have not ended, one row each."""
        from waypost.spark.lake import silver

        return silver.deliveries_now(self.frame(spark, SILVER_OPEN_DELIVERIES))

    def messages(self, spark: SparkSession) -> DataFrame:
        """Return all messages, ended or not, one row each."""
        return self.frame(spark, SILVER_MESSAGES).unionByName(self.messages_now(spark))

    def deliveries(self, spark: SparkSession) -> DataFrame:
        """Return all deliveries, ended or not, one row each."""
        return self.frame(spark, SILVER_DELIVERIES).unionByName(self.deliveries_now(spark))


def retry_conflicts(lake: Lake, act: Callable[[], T]) -> T:
    """Call a function that commits to a lake; again, a few times, if another process commits a step meanwhile."""
    for turn in range(TRIES_MAX):
        try:
            return act()
        except StepConflict:
            if turn == TRIES_MAX - 1:
                raise StepConflict(
                    f"other processes changed the lake {lake.files.address} {TRIES_MAX} times meanwhile: try again, or "
                    "stop the runs that follow the journal"
                ) from None
            lake.refresh(to_write=True)
    raise AssertionError("the last turn returns or raises")
