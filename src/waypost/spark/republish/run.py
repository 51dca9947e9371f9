"""Carrying out a plan, a chunk at a time, without Spark.

A chunk is recorded as intent, then sent, then its keys are added to the lake, and then it is recorded as settled
together with the intent of the next one. So after a kill at most one chunk is in doubt, and it is the one recorded.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from waypost.spark.delta.parquet import DataFile
from waypost.spark.files import LakeFiles, join_path
from waypost.spark.republish.state import Intent, Records, State

#: Rows of a chunk: what is asked about after a kill.
CHUNK_ROWS: Final = 10_000
#: A chunk that has this size ends, and so does what is read from a file at a time.
CHUNK_BYTES: Final = 64 * 1024 * 1024
BATCH_ROWS: Final = 1_000
BATCH_BYTES: Final = 16 * 1024 * 1024
#: How often progress is reported.
REPORT_SECONDS: Final = 5.0

InDoubt = Literal["ask", "send", "skip"]


class Options(msgspec.Struct, frozen=True):
    """How a plan is carried out: may differ each time."""

    rate: str | None = None
    #: Slow down while the oldest ready message has been waiting for longer, in seconds; None: never.
    max_age: float | None = None
    in_doubt: InDoubt = "ask"
    chunk_rows: int = CHUNK_ROWS
    #: The redact hook for the journal, as `module:function`.
    redact: str | None = None
    #: Send rows although some of the keys that were published since the plan was made are not known.
    allow_gaps: bool = False


class PlanRows:
    """The rows of a plan in their order, from any row on."""

    def __init__(
        self,
        files: LakeFiles,
        table: str,
        data: Sequence[DataFile],
        first: int,
        columns: Sequence[str] | None = None,
    ) -> None:
        self._batches = _read_from(files, table, data, first, columns)
        self._rest: pa.Table | None = None

    def take(self, count: int, size: int | None = None) -> pa.Table | None:
        """Return the next rows, at most this many, and about so many bytes; None if there are none."""
        parts = [] if self._rest is None else [self._rest]
        while sum(part.num_rows for part in parts) < count:
            if size is not None and sum(part.nbytes for part in parts) >= size:
                break
            batch = next(self._batches, None)
            if batch is None:
                break
            parts.append(pa.Table.from_batches([batch]))
        if not parts:
            return None
        whole = pa.concat_tables(parts)
        self._rest = whole.slice(count) if whole.num_rows > count else None
        return whole.slice(0, count)


def _read_from(
    files: LakeFiles, table: str, data: Sequence[DataFile], first: int, columns: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    left = first
    for one in data:
        if left >= one.rows:
            left -= one.rows
            continue
        with files.arrow_system().open_input_file(files.path(join_path(table, one.path))) as source:
            file = pq.ParquetFile(source)
            for group in range(file.num_row_groups):
                known = file.metadata.row_group(group)
                if left >= known.num_rows:
                    left -= known.num_rows
                    continue
                fitting = BATCH_BYTES * known.num_rows // max(1, known.total_byte_size)
                size = max(1, min(BATCH_ROWS, fitting))
                for batch in file.iter_batches(size, [group], columns=columns):
                    if left < batch.num_rows:
                        yield batch.slice(left)
                    left = max(0, left - batch.num_rows)


class Sent(msgspec.Struct):
    """What became of the rows of a chunk: how many were settled, and how."""

    rows: int = 0
    counts: Counter[str] = msgspec.field(default_factory=Counter)
    reasons: list[str] = msgspec.field(default_factory=list)
    #: Whether some of the rows behind them may have been sent.
    is_in_doubt: bool = False


class Verb(Protocol):
    """What is done with the rows of a plan."""

    def intend(self, rows: pa.Table, first: int, at_ms: int) -> Intent:
        """Check that a chunk may be sent, and return what is to be recorded before it is."""
        ...

    def resume(self, intent: Intent) -> Intent:
        """Return what is to be recorded before a chunk in doubt is continued."""
        ...

    def settle(self, rows: pa.Table, intent: Intent, is_in_doubt: bool) -> Sent:
        """Send a chunk, and return how much of it is settled: all, unless a stop was asked for."""
        ...


class Runner:
    """Carries out the plan of a backfill or redrive."""

    def __init__(
        self,
        records: Records,
        verb: Verb,
        options: Options,
        stop: threading.Event,
        progress: Callable[[str], None],
    ) -> None:
        self._records, self._verb, self._options = records, verb, options
        self._stop, self._progress = stop, progress
        self._began, self._reported = time.monotonic(), time.monotonic()

    def run(self) -> State:
        """Send all rows that are left; return the state after it: finished, or paused if a stop was asked for."""
        state = self._state()
        if state.is_finished:
            return state
        rows = PlanRows(self._records.files, self._records.rows, state.plan.files, state.next_row)
        first_row, was_sent_to = state.next_row, 0 if state.intent is None else state.intent.first + state.intent.rows
        while not self._stop.is_set():
            in_doubt = state.next_row < was_sent_to
            size = was_sent_to - state.next_row if in_doubt else self._options.chunk_rows
            chunk = rows.take(size, None if in_doubt else CHUNK_BYTES)
            if chunk is None:
                self._records.commit("finished", replace(state, phase="finished", intent=None))
                return self._state()
            if not in_doubt:
                intent = self._verb.intend(chunk, state.next_row, time.time_ns() // 1_000_000)
                state = replace(state, phase="running", intent=intent)
                self._records.commit("intent", state)
            else:
                assert state.intent is not None
                intent = self._verb.resume(state.intent)
                if intent != state.intent:
                    state = replace(state, intent=intent)
                    self._records.commit("intent", state)
            sent = self._verb.settle(chunk, intent, in_doubt)
            is_whole = sent.rows == chunk.num_rows
            # What is left of a chunk in doubt is still in doubt; what is left of another one was not sent.
            keep = state.intent if (in_doubt or sent.is_in_doubt) and not is_whole else None
            state = replace(state.settle(sent.rows, sent.counts, tuple(sent.reasons)), intent=keep)
            self._report(state, state.next_row - first_row)
            if not is_whole:
                break
        self._records.commit("paused", replace(state, phase="paused"))
        return self._state()

    def _state(self) -> State:
        assert self._records.state is not None
        return self._records.state

    def _report(self, state: State, done: int) -> None:
        now, total = time.monotonic(), state.plan.rows
        if now - self._reported < REPORT_SECONDS and state.next_row < total:
            return
        self._reported = now
        rate = done / max(now - self._began, 0.001)
        left = (total - state.next_row) / max(rate, 0.001)
        rest = "" if state.next_row >= total else f", about {left:,.0f} s left"
        self._progress(f"{state.next_row:,} of {total:,} rows, {rate:,.0f} a second{rest}")
