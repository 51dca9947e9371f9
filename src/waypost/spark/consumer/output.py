"""The output of a consumer: Delta tables in which each message of a queue is once.

    output/                     the table, if there is one only
    output/TABLE/               or several tables
    output/_consumed/           the messages of each batch, with what a settle needs
    output/_steps/              one row for each step: a batch, a compaction (see `waypost.spark.delta.steps`)

A batch is one step: its rows and its messages are committed together, or not at all. A driver reads all steps before
its own, and commits no message that is in one of them. So a message is in the output once whatever happens to leases: a
driver that was frozen for an hour finds at its commit what others committed. What is committed and not settled is
settled by its own driver, or by the next one that opens the output.

The messages of a batch are kept until all of them have ended in the store, and for some more steps, for drivers that
have not read them yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from deltalake import DeltaTable, Schema

from waypost.errors import ConfigurationError, InvalidInput, StoreError
from waypost.spark.delta.compaction import merge_small_files
from waypost.spark.delta.data_source import Target, TargetWriter, read_frame, write_frame
from waypost.spark.delta.parquet import DataFile, read_rows, write_rows
from waypost.spark.delta.schemas import PARTITION_TYPES, compare_schemas, describe_type, make_delta_schema
from waypost.spark.delta.steps import Step, StepConflict, Steps
from waypost.spark.delta.table import Change, MissingTable, Snapshot
from waypost.spark.delta.vacuum import are_deleted, vacuum
from waypost.spark.files import join_path, open_lake_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LAYOUT: Final = 1
STEPS: Final = "_steps"
CONSUMED: Final = "_consumed"
#: Where release 0.1 had the log of an output, and its column, by which its folders are named.
OLD_LOG: Final = "_waypost/log"
#: The column that readers of the output see: which batch a row came with.
BATCH_COLUMN: Final = "waypost_batch"
#: Batches that are kept after all of their messages have ended, in steps. A driver that missed more starts again.
STEPS_KEPT: Final = 64
VACUUM_EVERY_MS: Final = 86_400_000
COLUMNS: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("batch", pa.string()),
        ("id", pa.string()),
        ("token", pa.int64()),
        ("nonce", pa.binary()),
        ("chain", pa.string()),
    ]
)
STATISTICS: Final = ("step", "batch")


class Fence(msgspec.Struct, frozen=True):
    """A message of a batch, as a settle needs it."""

    id: str
    token: int
    nonce: bytes
    chain: str | None = None


class OutputState(msgspec.Struct, frozen=True):
    """What an output is: whose messages it has, its tables, and which batches have messages that may come again."""

    #: Named after what it is, so that an output is not taken for a lake.
    output: int = LAYOUT
    queue: str = ""
    namespace: str = ""
    #: Names of tables; "" is the output itself.
    tables: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()
    vacuumed_ms: int = 0
    #: The step of the newest vacuum.
    vacuum_step: int = 0
    #: Batches of release 0.1 that were converted, until their files are deleted.
    converted: tuple[str, ...] = ()


@dataclass(slots=True)
class Pending:
    """A batch that is not known to be settled, and which of its messages may come again."""

    step: int
    messages: tuple[Fence, ...]
    open: set[str] = field(default_factory=set)


class AlreadyCommitted(Exception):
    """Messages of a batch were committed by another one meanwhile."""

    def __init__(self, ids: Collection[str]) -> None:
        super().__init__(f"{len(ids)} messages were committed by another batch")
        self.ids = frozenset(ids)


class RowsDeleted(Exception):
    """Files that were written for a batch are deleted by a vacuum: its rows must be written again."""


class Output:
    """The tables of one output, as of the newest step that was read."""

    def __init__(self, root: str, *, converting: bool = False) -> None:
        self.files = open_lake_files(root, "output")
        self.steps = Steps(self.files, STEPS)
        #: The newest step that was read, the newest before the last claim, and the newest before rows were written.
        self.step = self._claim_step = self._write_step = 0
        self.state = OutputState()
        #: Batches whose messages may come again, by name.
        self.pending: dict[str, Pending] = {}
        #: Batches that are settled; the next step records it.
        self._settled: set[str] = set()
        #: What others committed since the last claim.
        self._committed_since: set[str] = set()
        self._snapshots: dict[str, Snapshot] = {}
        #: Tables that were written since the last claim: the columns and the partitions of each write.
        self._written: dict[str, list[tuple[Schema, tuple[str, ...]]]] = {}
        #: Tables to which a small batch wrote more rows than the driver collects.
        self._many_rows: set[str] = set()
        #: Tables that the last batch changed.
        self._changed: tuple[str, ...] = ()
        self._converting = converting
        if self.files.exists(OLD_LOG) and not converting:
            where = self.files.address
            raise ConfigurationError(
                f"the output {where} was made by release 0.1 of waypost, as plain Parquet: convert it once, with "
                f"`waypost pipeline upgrade --output {where}`; or give another folder as the output and read this one "
                "with spark.read.parquet, after release 0.1 has consumed it to its end"
            )

    # ---- reading ---------------------------------------------------------------------------------------------

    def open_for(self, queue: str, namespace: str) -> None:
        """Open the output for the messages of a queue; create it if there is none."""
        if not self.steps.exists():
            self._refuse_other_files()
            self.steps.folder(CONSUMED).create(Schema.from_arrow(COLUMNS), statistics=STATISTICS)
            self.steps.create()
        self.state = OutputState(queue=queue, namespace=namespace, vacuumed_ms=time.time_ns() // 1_000_000)
        self.read_before_claim()

    def _refuse_other_files(self) -> None:
        """Refuse a folder with files of others: those that are in no table are deleted one day."""
        found = () if self._converting else sorted(self.files.walk(""))
        other = next((name for name in found if not name.startswith(("_", "."))), None)
        if other is not None:
            raise ConfigurationError(
                f"{self.files.address} is no output of a consumer and has files already ({other}): give a folder of "
                "its own as the output"
            )

    def read_before_claim(self) -> set[str]:
        """Read the newest step; return the messages that are in the output already and may be claimed again."""
        self.refresh(to_write=True)
        self._claim_step = self._write_step = self.step
        self._committed_since = set()
        self._written = {}
        return self.ids_that_may_come_again()

    def refresh(self, *, to_write: bool = False) -> None:
        """Read the newest step; one that a killed driver left incomplete is completed first."""
        while True:
            names = (CONSUMED, *self.state.tables)
            step, found = self.steps.snapshots(names, to_write=to_write)
            if CONSUMED not in found:
                raise self._no_output()
            if step is None:
                return
            self._take_state(step, to_write=to_write)
            if set(self.state.tables) <= set(names):
                break
        known, self.step, self._snapshots = self.step, step.number, found
        unsettled = set(self.state.unsettled) - self._settled
        for batch in [batch for batch in self.pending if batch not in unsettled]:
            del self.pending[batch]
        for file in self._snapshots[CONSUMED].files:
            batch, number = file.lowest["batch"], file.lowest["step"]
            is_new, may_come = number > known, batch in unsettled and batch not in self.pending
            if is_new or may_come:
                messages = self._read_messages(file)
                if is_new:
                    self._committed_since |= {message.id for message in messages}
                if may_come:
                    self.pending[batch] = Pending(number, messages, {message.id for message in messages})

    def _take_state(self, step: Step, *, to_write: bool) -> None:
        try:
            layout = msgspec.json.decode(step.state, type=dict[str, Any])["output"]
            state = msgspec.json.decode(step.state, type=OutputState) if layout <= LAYOUT else None
        except (msgspec.MsgspecError, KeyError, TypeError):
            raise self._no_output() from None
        if state is None:
            raise StoreError(f"the output {self.files.address} was made by a newer release of waypost: update this one")
        if to_write and (state.queue, state.namespace) != (self.state.queue, self.state.namespace):
            raise ConfigurationError(
                f"the output {self.files.address} belongs to queue {state.queue} of namespace {state.namespace}: one "
                f"output takes the messages of one queue, so give {self.state.queue} an output of its own"
            )
        self.state = state

    def _no_output(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self.files.address} is no output of a consumer, but a lake: give a folder of its own as the output"
        )

    def _read_messages(self, file: DataFile) -> tuple[Fence, ...]:
        rows = read_rows(self.files, CONSUMED, [file], COLUMNS, ["id", "token", "nonce", "chain"])
        return tuple(Fence(**row) for row in rows.to_pylist())

    def ids_that_may_come_again(self) -> set[str]:
        """Return the messages that are in the output already and may be claimed again."""
        return {message_id for pending in self.pending.values() for message_id in pending.open}

    # ---- tables ----------------------------------------------------------------------------------------------

    def prepare_table(self, table: str, schema: Schema, partition_by: Sequence[str]) -> None:
        """Create a table, or add the columns that it lacks."""
        self.check_table_name(table)
        folder = self.steps.folder(table)
        opened = self._open_or_create(table, schema, partition_by)
        found = None if table in self.state.tables else folder.snapshot()
        if found is not None and (found.step or found.files):
            self.refresh(to_write=True)
            if table not in self.state.tables:
                raise ConfigurationError(
                    f"{self.files.path(table)} is a Delta table that this output does not know: give a folder of its "
                    "own as the output"
                )
        try:
            new = self._compare(table, opened, schema, partition_by)
        except InvalidInput:
            # Another write of this batch created it; or a function that failed or a killed driver did, and committed
            # nothing.
            if table in self._written:
                raise
            self.refresh(to_write=True)
            if table in self.state.tables or not folder.remove_unused():
                raise
            folder.create(schema, partition_by=partition_by)
        else:
            self._add_columns(table, schema, new)
        self._written.setdefault(table, []).append((schema, tuple(partition_by)))

    def _open_or_create(self, table: str, schema: Schema, partition_by: Sequence[str]) -> DeltaTable:
        folder = self.steps.folder(table)
        try:
            return folder.open()
        except MissingTable:
            folder.create(schema, partition_by=partition_by)
            return folder.open()

    def _add_columns(self, table: str, schema: Schema, names: Collection[str]) -> None:
        columns = {field.name: field.type for field in pa.schema(schema.to_arrow()) if field.name in names}
        if columns:
            self.steps.folder(table).add_columns(columns)

    def _check_written(self, table: str) -> None:
        """Refuse rows that do not fit the table any more: another driver may have created it anew, or added columns."""
        known = self._snapshots.get(table) if table in self.state.tables else None
        for schema, partition_by in self._written.get(table, ()):
            if known is not None:
                before = Schema.from_arrow(known.schema)
                new = compare_schemas(before, schema, self.files.path(table))[0]
            else:
                opened = self._open_or_create(table, schema, partition_by)
                new = self._compare(table, opened, schema, partition_by)
            self._add_columns(table, schema, new)

    def _compare(self, table: str, opened: DeltaTable, schema: Schema, partition_by: Sequence[str]) -> list[str]:
        """Return which columns are new; a table keeps the types of its columns, and its partitions."""
        known = opened.metadata().partition_columns
        if list(known) != list(partition_by):
            raise InvalidInput(
                f"the table {self.files.path(table)} is partitioned by {', '.join(known) or 'nothing'}, not by "
                f"{', '.join(partition_by) or 'nothing'}: a table keeps its partitions"
            )
        return compare_schemas(opened.schema(), schema, self.files.path(table))[0]

    def check_table_name(self, table: str, others: Iterable[str] = ()) -> None:
        """Refuse a table inside of another one: old files of the outer one are deleted with all that is below it."""
        for other in (*self.state.tables, *others):
            inner, outer = max(table, other, key=len), min(table, other, key=len)
            if inner != outer and (not outer or inner.startswith(f"{outer}/")):
                where = f"the table {outer}" if outer else "the output itself, which is a table"
                raise InvalidInput(
                    f"the table {inner} would be inside of {where}: an output is one table, or several side by side"
                )

    def write(
        self, frame: DataFrame, table: str, batch: str, partition_by: Sequence[str], *, driver_rows_max: int = 0
    ) -> list[DataFile]:
        """Write a DataFrame as files of a table. They are in no version of it until they are committed.

        Up to `driver_rows_max` rows are collected and written here: tasks of Python take seconds to start. If there
        are more, it is computed once more by tasks, and from then on tasks write this table at once.
        """
        from pyspark.sql import functions as f

        if BATCH_COLUMN in frame.columns:
            raise InvalidInput(f"the column {BATCH_COLUMN} is added to every row: rename yours, or leave it out")
        rows = frame.withColumn(BATCH_COLUMN, f.lit(batch))
        schema = make_delta_schema(rows.schema)
        kinds = {one.name: describe_type(one.type) for one in schema.fields}
        for name in partition_by:
            if name not in kinds:
                raise InvalidInput(f"there is no column {name} to partition by; there are {', '.join(frame.columns)}")
            if kinds[name] not in PARTITION_TYPES:
                raise InvalidInput(
                    f"column {name} is {kinds[name]}, and its values would be names of folders: partition by a date "
                    "or a whole number, or not at all"
                )
        self.prepare_table(table, schema, partition_by)
        target = Target(table, tuple(rows.columns), (), tuple(partition_by))
        if driver_rows_max and table not in self._many_rows:
            found = rows.limit(driver_rows_max + 1).toArrow()
            if found.num_rows <= driver_rows_max:
                writer = TargetWriter(self.files, target)
                for part in found.to_batches():
                    writer.write(part)
                return writer.close()
            self._many_rows.add(table)
        return write_frame(rows, self.files, {"": target}).get("", [])

    def frame(self, spark: SparkSession, table: str = "") -> DataFrame:
        """Return the committed rows of a table."""
        from pyspark.sql.types import StructType

        if table not in self.state.tables:
            known = ", ".join(name or "the output itself" for name in self.state.tables) or "no table yet"
            raise InvalidInput(
                f"there is no table {table or '(the output itself)'} in the output {self.files.address}; it has {known}"
            )
        handle = self.steps.folder(table).open()
        schema = StructType.fromJson(json.loads(handle.schema().to_json()))
        data = self.steps.folder(table).snapshot(handle.version()).files
        partitioned = bool(handle.metadata().partition_columns)
        return read_frame(spark, self.files, table, data, schema, with_partition=partitioned)

    # ---- writing ---------------------------------------------------------------------------------------------

    def commit(self, batch: str, tables: Mapping[str, Sequence[DataFile]], messages: Iterable[Fence]) -> None:
        """Commit a batch: from here on its messages are in the output. `AlreadyCommitted` if one of them was before.

        `InvalidInput` if its rows do not fit a table as it is now, `RowsDeleted` if a vacuum took them; then nothing is
        committed. The output must have been read before the messages were claimed.
        """
        fences = tuple(messages)
        ids = {message.id for message in fences}
        while True:
            self.refresh(to_write=True)
            twice = (self._committed_since | self.ids_that_may_come_again()) & ids
            if twice:
                raise AlreadyCommitted(twice)
            if self.step - self._claim_step > STEPS_KEPT:
                raise StoreError(
                    f"steps {self._claim_step + 1} to {self.step - STEPS_KEPT} of the output {self.files.address} were "
                    "made since this consumer last read it, and their messages are not kept any more, so it cannot "
                    "know what is in them. Nothing of this batch was committed; start it again"
                )
            changes = {name: Change(tuple(files)) for name, files in tables.items()}
            vacuum_step = self.state.vacuum_step
            if vacuum_step > self._write_step and are_deleted(self.steps, vacuum_step, changes):
                raise RowsDeleted
            for table in tables:
                self.check_table_name(table, tables)
                self._check_written(table)
            names = dict.fromkeys((*self.state.tables, *tables))
            unsettled = tuple(dict.fromkeys((*self._unsettled(), batch)))
            state = msgspec.structs.replace(self.state, tables=tuple(names), unsettled=unsettled)
            rows = self._write_messages(self.step + 1, batch, fences)
            old = self._trim_messages()
            changes[CONSUMED] = Change((*rows, *old.add), old.remove)
            if self._try_commit("batch", changes, state):
                self.pending[batch] = Pending(self.step, fences, ids)
                self._changed = tuple(tables)
                self._written = {}
                return

    def commit_converted(
        self,
        tables: Mapping[str, Sequence[DataFile]],
        messages: Mapping[str, Sequence[Fence]],
        batches: Iterable[str],
    ) -> None:
        """Commit what an older release had as the first step: its rows, and its messages that may come again.

        `batches` are all of its batches, whose files may be deleted then.
        """
        changes = {name: Change(tuple(files)) for name, files in tables.items()}
        rows = [file for batch, fences in messages.items() for file in self._write_messages(1, batch, fences)]
        state = msgspec.structs.replace(
            self.state, tables=tuple(tables), unsettled=tuple(messages), converted=tuple(sorted(batches))
        )
        if not self._try_commit("upgrade", {**changes, CONSUMED: Change(tuple(rows))}, state):
            raise StoreError(f"another process converts the output {self.files.address} at this moment")

    def record_upgraded(self) -> None:
        """Record that the files of the older release are deleted."""
        while self.state.converted:
            state = msgspec.structs.replace(self.state, converted=())
            if not self._try_commit("upgraded", {}, state):
                self.refresh()

    def _unsettled(self) -> list[str]:
        return [batch for batch in self.state.unsettled if batch not in self._settled]

    def _try_commit(self, kind: str, changes: Mapping[str, Change], state: OutputState) -> bool:
        """Commit the next step; return False if another driver did."""
        inputs = {
            name: self._snapshots[name].version if name in self._snapshots else self.steps.folder(name).open().version()
            for name, change in changes.items()
            if change
        }
        content = msgspec.json.encode(state).decode()
        try:
            step, made = self.steps.commit(self.step, kind, content, changes, inputs)
        except StepConflict:
            return False
        self.step, self.state, self._snapshots = step.number, state, {**self._snapshots, **made}
        self._settled &= set(state.unsettled)
        return True

    def _write_messages(self, step: int, batch: str, messages: Sequence[Fence]) -> list[DataFile]:
        columns = [
            [step] * len(messages), [batch] * len(messages), [one.id for one in messages],
            [one.token for one in messages], [one.nonce for one in messages], [one.chain for one in messages],
        ]  # fmt: skip
        arrays = [pa.array(values, kind.type) for values, kind in zip(columns, COLUMNS, strict=True)]
        return write_rows(self.files, CONSUMED, pa.Table.from_arrays(arrays, schema=COLUMNS), STATISTICS)

    def _trim_messages(self) -> Change:
        """Return what goes of the messages of old batches: all if the batch is settled, or those that have ended."""
        added: list[DataFile] = []
        removed: list[DataFile] = []
        unsettled = set(self._unsettled())
        for file in self._snapshots[CONSUMED].files if CONSUMED in self._snapshots else ():
            step, batch = file.lowest["step"], file.lowest["batch"]
            if step > self.step - STEPS_KEPT:
                continue
            pending = self.pending.get(batch) if batch in unsettled else None
            if batch not in unsettled:
                removed.append(file)
            elif pending is not None and len(pending.open) < file.rows:
                left = [message for message in pending.messages if message.id in pending.open]
                added += self._write_messages(step, batch, left)
                removed.append(file)
        return Change(tuple(added), tuple(removed))

    def mark_settled(self, ids: Collection[str]) -> None:
        """Note that these messages cannot be claimed again. The next step records it."""
        gone = set(ids)
        for batch, pending in list(self.pending.items()):
            pending.open -= gone
            if not pending.open:
                del self.pending[batch]
                self._settled.add(batch)

    def record_settled(self) -> None:
        """Record which batches are settled, if any is since the last step."""
        while set(self.state.unsettled) & self._settled:
            state = msgspec.structs.replace(self.state, unsettled=tuple(self._unsettled()))
            old = self._trim_messages()
            if self._try_commit("settled", {CONSUMED: old}, state):
                return
            self.refresh(to_write=True)

    # ---- maintenance -----------------------------------------------------------------------------------------

    def maintain(self) -> None:
        """Merge small files of the tables that the last step changed, and once a day delete files that are in none."""
        found = {name: self._snapshots[name] for name in self._changed if name in self._snapshots}
        merged = {name: merge_small_files(self.files, name, one.files, one.schema) for name, one in found.items()}
        changes = {name: change for name, change in merged.items() if change}
        self._changed = ()
        now = time.time_ns() // 1_000_000
        # In the future if the clock was ahead then.
        is_late = abs(now - self.state.vacuumed_ms) > VACUUM_EVERY_MS
        # If another driver was faster, the next batch tries it again.
        if changes and not self._try_commit("compact", changes, self.state):
            return
        if is_late:
            with suppress(StepConflict):
                vacuum(self.steps, (CONSUMED, *self.state.tables), partial(self._commit_vacuum, now))

    def _commit_vacuum(self, now: int) -> int:
        state = msgspec.structs.replace(self.state, vacuumed_ms=now, vacuum_step=self.step + 1)
        if not self._try_commit("vacuum", {}, state):
            raise StepConflict("another driver committed a step first")
        return self.step

    def discard(self, tables: Mapping[str, Sequence[DataFile]]) -> None:
        """Delete files that were written and will not be committed."""
        for table, files in tables.items():
            for file in files:
                self.files.remove_file(join_path(table, file.path))
        self._written, self._write_step = {}, self.step


def read_output(spark: SparkSession, output: str, table: str = "") -> DataFrame:
    """Return the committed rows of the output of a consumer, or of one of its tables, as of now."""
    opened = Output(output)
    if not opened.steps.exists():
        raise InvalidInput(f"there is no output of a consumer at {output}")
    opened.refresh()
    return opened.frame(spark, table)
