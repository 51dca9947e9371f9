"""The rows of many queues, read together: each table of the lake once for many queues, not once for each.

A queue is usually in every file, so reading one costs nearly as much as reading all. How many are read together is
bounded by the deliveries that they have had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from waypost.spark.insight.history import RECORDED
from waypost.spark.lake.lake import Lake, State
from waypost.spark.lake.tables import (
    BRONZE_JOURNAL,
    SILVER_DELIVERIES,
    SILVER_MESSAGES,
    SILVER_OPEN_MESSAGES,
    LakeTable,
)

#: Queues are read together while they have no more claims than this in all, by what the lake has counted.
CLAIMS_TOGETHER_MAX: Final = 1_000_000
#: The events that advice and models read, and the columns of each table.
EVENTS: Final = ("configured", "paused", "resumed", "dead", "redriven", "dead_trimmed")
COLUMNS: Final[Mapping[str, Sequence[str]]] = {
    BRONZE_JOURNAL.name: ("queue", "at_ms", "number", "event", "group", "cause"),
    SILVER_DELIVERIES.name: ("queue", *RECORDED),
    SILVER_MESSAGES.name: ("queue", "message_id", "schedule", "published_ms", "due_ms", "claimed_ms", "ended_ms"),
    SILVER_OPEN_MESSAGES.name: (
        "queue", "message_id", "schedule", "published_ms", "due_ms", "claimed_ms", "ended_ms", "claimed",
        "last_event", "last_number", "last_ms", "state",
    ),
}  # fmt: skip


class QueueRows:
    """What a lake has of one queue, in place of the lake: filters are evaluated on rows that were read with others."""

    def __init__(self, lake: Lake, rows: Mapping[str, Any]) -> None:
        self._lake = lake
        self._rows = rows

    @property
    def state(self) -> State:
        """The state of the lake."""
        return self._lake.state

    def arrow(self, table: LakeTable, columns: Sequence[str], filter: Any) -> Any:
        """Return rows of the queue, as `Lake.arrow` does."""
        return self._rows[table.name].filter(filter).select(list(columns))


def read_together(lake: Lake, queues: Iterable[str], since_ms: int, until_ms: int) -> Iterator[tuple[str, QueueRows]]:
    """Return the rows of queues, those that advice and models read in a window of time."""
    for together in split_queues(lake.state, queues):
        rows = {name: _by_queue(table, together) for name, table in _read(lake, together, since_ms, until_ms)}
        for queue in together:
            yield queue, QueueRows(lake, {name: tables[queue] for name, tables in rows.items()})


def split_queues(state: State, queues: Iterable[str]) -> Iterator[list[str]]:
    """Return queues in parts that are read together."""
    part: list[str] = []
    claims = 0
    for queue in queues:
        seen = state.seen.get(queue)
        count = 0 if seen is None else seen.counts.get("claimed", 0)
        if part and claims + count > CLAIMS_TOGETHER_MAX:
            yield part
            part, claims = [], 0
        part.append(queue)
        claims += count
    if part:
        yield part


def _read(lake: Lake, queues: Sequence[str], since_ms: int, until_ms: int) -> Iterator[tuple[str, Any]]:
    of_queues = ds.field("queue").isin(queues) if len(queues) < len(lake.state.seen) else ds.scalar(True)
    within = (ds.field("claimed_ms") >= since_ms) & (ds.field("claimed_ms") < until_ms)
    chosen = {
        BRONZE_JOURNAL.name: of_queues & ds.field("event").isin(list(EVENTS)),
        SILVER_DELIVERIES.name: of_queues & within,
        SILVER_MESSAGES.name: of_queues & ds.field("schedule").is_valid(),
        SILVER_OPEN_MESSAGES.name: of_queues,
    }
    for name, columns in COLUMNS.items():
        yield name, lake.arrow(name, list(columns), chosen[name])


def _by_queue(rows: Any, queues: Sequence[str]) -> dict[str, Any]:
    """Return the rows of each queue."""
    if not rows.num_rows:
        return dict.fromkeys(queues, rows)
    codes = pc.index_in(rows.column("queue"), value_set=pa.array(queues, rows.schema.field("queue").type))
    rows = rows.take(pc.sort_indices(codes))
    counts = {one["values"]: one["counts"] for one in pc.value_counts(pc.drop_null(codes)).to_pylist()}
    found, begin = {}, 0
    for number, queue in enumerate(queues):
        count = counts.get(number, 0)
        found[queue] = rows.slice(begin, count)
        begin += count
    return found
