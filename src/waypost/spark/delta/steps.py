"""Steps: changes of several Delta tables that happen together and once.

Delta has no transaction across tables, so one small table decides. A step is one row of it: its number, the state of
the lake after it, the versions of the tables before it, and the files that it adds to each table and removes. When that
row is committed the step has happened; each table follows with a commit of the same number. A program that dies in
between leaves tables that lag, and the next one that opens the lake completes them from the row. No step begins before
the one before it is in every table.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError

from waypost.errors import StoreError
from waypost.spark.delta.parquet import read_rows, write_rows
from waypost.spark.delta.table import (
    APP_ID,
    COPY_AGAIN,
    Change,
    DeltaFolder,
    MissingTable,
    Snapshot,
    TableMismatch,
)
from waypost.spark.files import LakeFiles

#: Steps whose rows are kept.
STEPS_KEPT: Final = 64
#: Tables that are committed at the same time.
THREADS: Final = 4
COLUMNS: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("kind", pa.string()),
        ("at_ms", pa.int64()),
        ("state", pa.string()),
        ("inputs", pa.string()),
        ("changes", pa.string()),
    ]
)


class Step(msgspec.Struct, frozen=True):
    """One step: what it did to each table, and the state after it."""

    number: int
    kind: str
    at_ms: int
    #: JSON of the owner of the steps.
    state: str
    #: The version of each table before the step.
    inputs: dict[str, int] = msgspec.field(default_factory=dict)
    changes: dict[str, Change] = msgspec.field(default_factory=dict)


class StepConflict(StoreError):
    """Raised when another program committed a step first: nothing of this one is in any table."""


_changes = msgspec.json.Decoder(dict[str, Change])
_inputs = msgspec.json.Decoder(dict[str, int])


class Steps:
    """The steps of a lake: a Delta table that names what the others are to be."""

    def __init__(self, files: LakeFiles, name: str) -> None:
        self.files = files
        self.table = DeltaFolder(files, name)
        self._folders: dict[str, DeltaFolder] = {}

    def exists(self) -> bool:
        """Return whether there are steps, and with them all tables."""
        return self.table.exists()

    def create(self) -> None:
        """Create the table of steps. Create the tables that follow it before."""
        self.table.create(Schema.from_arrow(COLUMNS), statistics=("step",))

    def folder(self, name: str) -> DeltaFolder:
        """Return a table that follows the steps."""
        if name not in self._folders:
            self._folders[name] = DeltaFolder(self.files, name)
        return self._folders[name]

    def newest(self) -> Step | None:
        """Return the newest step, None if there is none yet."""
        return self._newest(self.table.snapshot())

    def _newest(self, snapshot: Snapshot, below: int | None = None) -> Step | None:
        numbers = {int(file.highest["step"]): file for file in snapshot.files}
        known = [number for number in numbers if below is None or number < below]
        if not known:
            return None
        newest = numbers[max(known)]
        row = read_rows(self.files, self.table.name, [newest], COLUMNS).to_pylist()[-1]
        return Step(
            row["step"], row["kind"], row["at_ms"], row["state"], _inputs.decode(row["inputs"]),
            _changes.decode(row["changes"]),
        )  # fmt: skip

    def roll_forward(self) -> Step | None:
        """Bring every table up to the newest step; return it."""
        step = self._newest_on_disk(to_write=True)
        if step is not None:
            self.follow(step)
        return step

    def _newest_on_disk(self, *, to_write: bool) -> Step | None:
        """Return the newest step, synced to disk: after a power failure no table may have a step that has no row."""
        snapshot = self.table.snapshot()
        try:
            self.table.sync(snapshot.version)
        except OSError:
            if to_write:
                raise
        return self._newest(snapshot)

    def follow(self, step: Step, *, sync: bool = True) -> dict[str, Snapshot]:
        """Commit a step to each table that it changes, unless it is there already; return their versions."""
        with ThreadPoolExecutor(THREADS) as pool:
            commits = {
                name: pool.submit(self.folder(name).commit, step.number, change, after=step.inputs.get(name), sync=sync)
                for name, change in step.changes.items()
            }
            return {name: commit.result() for name, commit in commits.items()}

    def snapshots(self, tables: Sequence[str], *, to_write: bool = False) -> tuple[Step | None, dict[str, Snapshot]]:
        """Return the newest step, and the version of each table after it; completes it first.

        Without the right to write to the lake, an incomplete step is left out: the step before it is returned, unless
        the caller is going to write. What a writer gets is on disk.
        """
        before_number = -1
        while True:
            step = self._newest_on_disk(to_write=to_write)
            try:
                if step is not None:
                    self.follow(step, sync=to_write)
            except TableMismatch:
                raise
            except (OSError, DeltaError, StoreError):
                if (
                    to_write
                    or step is None
                    or all(self.folder(name).snapshot().step >= step.number for name in step.changes)
                ):
                    raise
                before = {name: self.folder(name).snapshot(step.inputs.get(name)) for name in tables}
                return self._newest(self.table.snapshot(), below=step.number), before
            with ThreadPoolExecutor(THREADS) as pool:
                opened = dict(zip(tables, pool.map(self._open, tables), strict=True))
            # A table that a newer release brings is created by the next run.
            found = {name: snapshot for name, snapshot in opened.items() if snapshot is not None}
            number = step.number if step else 0
            ahead = {name: snapshot.step for name, snapshot in found.items() if snapshot.step > number}
            if not ahead:
                self._check_versions(step, found)
                return step, found
            if number == before_number:
                # A step has its row before it is in a table, so the row would have been found by now.
                name = min(ahead)
                raise TableMismatch(
                    f"the table {self.files.path(name)} has step {ahead[name]}, and the newest step of the lake is "
                    f"{number}: {COPY_AGAIN}"
                )
            before_number = number

    def _check_versions(self, step: Step | None, found: Mapping[str, Snapshot]) -> None:
        """Refuse tables that are older than the newest step had them."""
        for name, version in (step.inputs if step else {}).items():
            if name in found and found[name].version < version:
                raise TableMismatch(
                    f"the table {self.files.path(name)} has version {found[name].version}, and the newest step of the "
                    f"lake has it at {version} or later: {COPY_AGAIN}"
                )

    def _open(self, name: str) -> Snapshot | None:
        try:
            return self.folder(name).snapshot()
        except MissingTable:
            return None

    def commit(
        self, after: int, kind: str, state: str, changes: Mapping[str, Change], inputs: Mapping[str, int]
    ) -> tuple[Step, dict[str, Snapshot]]:
        """Commit the step that follows step `after`, then bring the tables up to it; return the new versions.

        Raises `StepConflict` if another program committed a step since; then nothing has changed.
        """
        step = Step(
            after + 1, kind, time.time_ns() // 1_000_000, state, dict(inputs),
            {name: change for name, change in changes.items() if change},
        )  # fmt: skip
        handle = self.table.open()
        if (handle.transaction_version(APP_ID) or 0) != after:
            raise self._conflict(step.number)
        self._commit_row(handle, step)
        return step, self.follow(step)

    def _commit_row(self, handle: DeltaTable, step: Step) -> None:
        row = {
            "step": step.number, "kind": step.kind, "at_ms": step.at_ms, "state": step.state,
            "inputs": msgspec.json.encode(step.inputs).decode(), "changes": msgspec.json.encode(step.changes).decode(),
        }  # fmt: skip
        added = write_rows(self.files, self.table.name, pa.Table.from_pylist([row], schema=COLUMNS), ("step",))
        old = [
            file for file in self.table._snapshot(handle).files if int(file.highest["step"]) <= step.number - STEPS_KEPT
        ]
        if self.table.try_commit(handle, step.number, Change(tuple(added), tuple(old))):
            return
        # The answer may have been lost on the way: what counts is whose row is there.
        now = self.table.snapshot()
        if added[0].path not in {file.path for file in now.files}:
            raise self._conflict(step.number)
        self.table.sync(now.version)

    def _conflict(self, number: int) -> StepConflict:
        return StepConflict(
            f"another process committed step {number} of the lake {self.files.address} first; nothing of this one was "
            "committed"
        )
