"""What is to be sent, what is being sent and what was: the steps of one backfill or redrive, in a Delta table.

    DIR/backfills/NAME/steps/    one row for each step: its kind, and the state after it
    DIR/backfills/NAME/rows/     the rows of the plan, as Parquet files that the state names

A step is committed only if no other process has committed one since the state was read, so two processes never carry
out one plan together for long: the second to commit stops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from waypost.errors import InvalidInput, StoreError
from waypost.spark.delta.parquet import DataFile
from waypost.spark.delta.steps import StepConflict, Steps
from waypost.spark.files import LakeFiles

FOLDER: Final = "backfills"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
#: Reasons of rows that were refused which the state keeps.
REASONS_MAX: Final = 20

Kind = Literal["backfill", "redrive"]
Phase = Literal["running", "paused", "finished"]


class Input(msgspec.Struct, frozen=True):
    """What a plan is made from: a plan that is not finished is continued only for the same."""

    kind: Kind
    #: Where the rows come from, or the condition of the dead letters, as text.
    source: str
    #: The queues of dead letters, or the queue that rows are published to; empty: all.
    queues: tuple[str, ...]
    ids: tuple[str, ...] = ()
    #: Another queue that messages are published to.
    to_queue: str | None = None


class Intent(msgspec.Struct, frozen=True):
    """A chunk that may have been sent: its rows, and the newest event of the journal before it was."""

    first: int
    rows: int
    at_ms: int
    journal: int
    #: For letters that are redriven in place, the same by their queues; and the sessions that may have redriven them,
    #: by which the journal tells these from letters that others have redriven.
    queues: dict[str, int] = msgspec.field(default_factory=dict)
    sessions: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """The rows to send, what the input had, and how far the journal was read before they were chosen."""

    number: int
    input: Input
    made_ms: int
    files: tuple[DataFile, ...]
    #: rows, collapsed (with the id of another row), known (in the history), new.
    counts: dict[str, int]
    #: By queue, the newest event of the journal when the history was read.
    journal: dict[str, int]
    #: The type of the bodies as JSON of Spark, None for dead letters.
    body_type: str | None = None
    is_json: bool = False
    priority: int = 0

    @property
    def rows(self) -> int:
        """How many rows are to be sent."""
        return sum(file.rows for file in self.files)


class State(msgspec.Struct, frozen=True):
    """How far a plan was carried out."""

    plan: Plan
    phase: Phase = "running"
    #: Rows before this one are settled.
    next_row: int = 0
    intent: Intent | None = None
    #: What became of the rows: queued, delayed, duplicate, known, refused; redriven, duplicate, gone, unsure.
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    #: Why rows were refused, the first of them.
    reasons: tuple[str, ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether every row is settled."""
        return self.phase == "finished"

    def settle(self, rows: int, counts: Mapping[str, int], reasons: tuple[str, ...]) -> State:
        """Return the state after the first rows of the intended chunk were settled."""
        total = dict(self.counts)
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
        known = (*self.reasons, *reasons)[:REASONS_MAX]
        return replace(self, next_row=self.next_row + rows, intent=None, counts=total, reasons=known)


class Records:
    """The steps of one backfill."""

    def __init__(self, files: LakeFiles, name: str) -> None:
        if NAME.fullmatch(name) is None:
            raise InvalidInput(
                f"a backfill is named with letters, digits, dots, - and _, at most 100 characters, not {name!r}"
            )
        self.files, self.name = files, name
        self.folder = f"{FOLDER}/{name}"
        #: The table of the rows: files below it that the newest plan does not name are left behind by killed plans.
        self.rows = f"{self.folder}/rows"
        self._steps = Steps(files, f"{self.folder}/steps")
        self._number = 0
        self.state: State | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the newest state."""
        if not self._steps.exists():
            return
        step = self._steps.newest()
        if step is None:
            return
        self._number = step.number
        try:
            self.state = msgspec.json.decode(step.state, type=State)
        except msgspec.MsgspecError as error:
            raise StoreError(f"{self.files.path(self.folder)} has no state of a backfill: {error}") from None

    def begin(self, plan: Plan) -> None:
        """Record a new plan; files of the plan before it are removed."""
        before = self.state
        self.commit("plan", State(plan))
        for file in () if before is None else before.plan.files:
            self.files.remove_file(f"{self.rows}/{file.path}")

    def commit(self, kind: str, state: State) -> None:
        """Commit a state; refused if another process has committed one since this was read."""
        if not self._steps.exists():
            if self.files.is_local:
                self.files.create_folder(self.folder)
            self._steps.create()
        try:
            step, _ = self._steps.commit(self._number, kind, msgspec.json.encode(state).decode(), {}, {})
        except StepConflict:
            raise StepConflict(
                f"another process carries out {self.name} in the lake {self.files.address}: this one stops, and "
                "what it has sent is known to the other"
            ) from None
        self._number, self.state = step.number, state


def list_names(files: LakeFiles) -> list[str]:
    """Return the names of the backfills and redrives that a lake has."""
    return sorted(files.folders(FOLDER))


def find_records(files: LakeFiles, name: str) -> Records:
    """Return a backfill that exists."""
    records = Records(files, name)
    if records.state is None:
        known = ", ".join(list_names(files)) or "none"
        raise InvalidInput(f"the lake {files.address} has no backfill or redrive {name!r}; it has {known}")
    return records
