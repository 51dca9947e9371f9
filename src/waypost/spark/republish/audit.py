"""What became of the messages of a backfill or redrive: by the lake, and by the journal behind it, without Spark."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from waypost.spark.delta.parquet import read_rows
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.tables import SILVER_MESSAGES, SILVER_OPEN_MESSAGES
from waypost.spark.republish.ids import BackfillIds
from waypost.spark.republish.redriving import CHOSEN, letter_key
from waypost.spark.republish.run import PlanRows
from waypost.spark.republish.state import Phase, Records, State
from waypost.spark.source.bulk import Bulk, open_bulk
from waypost.spark.source.credentials import Place

#: Events after which a message has ended. A dead one may be redriven.
ENDS: Final = ("done", "dead", "dropped", "cancelled", "replaced")
#: Events that leave a message where it is.
ASIDE: Final = ("duplicate", "configured", "paused", "resumed", "trimmed", "dead_trimmed")
ROWS_AT_ONCE: Final = 100_000


class Audit(msgspec.Struct, frozen=True):
    """What was asked for, and what became of it."""

    name: str
    phase: Phase
    #: What the input had: rows, collapsed, known, new.
    input: dict[str, int]
    #: Rows of the plan, how many of them are settled, and how: queued, duplicate, redriven, …
    requested: int
    settled: int
    sent: dict[str, int]
    #: How many of the messages are done, dead, dropped, cancelled, replaced; how many have not ended.
    ended: dict[str, int]
    not_ended: int
    #: Of how many no event is known: trimmed, or not journalled.
    unknown: int
    #: Why rows were refused, the first of them.
    reasons: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The result as one line."""
        parts = [f"{self.requested:,} asked"]
        parts += [f"{count:,} {name}" for name in ENDS if (count := self.ended.get(name))]
        names = {"known": "known already", "gone": "not dead any more", "refused": "refused"}
        if "redriven" in self.sent:
            # These letters have ended, or not, as the others have: others redrove or purged them.
            names = {"gone": "not by this redrive", "unsure": "perhaps not by this redrive"}
        of_them = "of them " if "redriven" in self.sent else ""
        parts += [f"{of_them}{count:,} {text}" for name, text in names.items() if (count := self.sent.get(name))]
        if duplicates := self.sent.get("duplicate"):
            parts.append(f"{duplicates:,} with a key in use")
        if self.not_ended:
            parts.append(f"{self.not_ended:,} not ended")
        if self.unknown:
            parts.append(f"{self.unknown:,} without an event")
        if left := self.requested - self.settled:
            parts.append(f"{left:,} not sent yet")
        return ", ".join(parts)


def audit(records: Records, lake: Lake, place: Place) -> Audit:
    """Return what became of the messages so far."""
    assert records.state is not None
    state, plan = records.state, records.state.plan
    lake.refresh()
    wanted = _ids(records, state)
    ended: Counter[str] = Counter()
    found = 0
    with open_bulk(place) as bulk:
        for queue, ids in wanted.items():
            events = newest_states(lake, bulk, queue, ids)
            ended.update(Counter(state for state in events.column("state").to_pylist() if state in ENDS))
            found += events.num_rows
    sent = sum(state.counts.get(name, 0) for name in ("queued", "delayed", "redriven", "unsure"))
    return Audit(
        records.name, state.phase, plan.counts, plan.rows, state.next_row, state.counts, dict(sorted(ended.items())),
        max(0, found - ended.total()), max(0, sent - found), state.reasons,
    )  # fmt: skip


def _ids(records: Records, state: State) -> dict[str, Any]:
    """Return by queue the ids of the messages whose rows are settled, as Arrow arrays."""
    plan = state.plan
    columns = ("key",) if plan.input.kind == "backfill" else CHOSEN
    rows = PlanRows(records.files, records.rows, plan.files, 0, columns)
    left, found = state.next_row, dict[str, list[str]]()
    is_copy = plan.input.kind == "redrive" and plan.input.to_queue is not None
    target = plan.input.to_queue or (plan.input.queues or ("",))[0]
    ids = BackfillIds(target)
    while left and (part := rows.take(min(left, ROWS_AT_ONCE))) is not None:
        left -= part.num_rows
        if plan.input.kind == "backfill":
            found.setdefault(target, []).extend(map(ids.of_key, part.column("key").to_pylist()))
            continue
        for letter in zip(*(part.column(name).to_pylist() for name in CHOSEN), strict=True):
            queue, id = (target, ids.of_key(letter_key(letter))) if is_copy else letter[:2]
            found.setdefault(queue, []).append(id)
    return {queue: pa.array(names, pa.string()) for queue, names in found.items()}


def newest_states(lake: Lake, bulk: Bulk, queue: str, ids: Any) -> Any:
    """Return the newest known state of those messages of which an event is known: `message_id`, `state`."""
    parts = []
    chosen = (pc.field("queue") == queue) & pc.is_in(pc.field("message_id"), value_set=ids)
    for table in (SILVER_MESSAGES, SILVER_OPEN_MESSAGES):
        columns = ["message_id", "state", "last_number"]
        for file in lake.data_files(table):
            rows = read_rows(lake.files, table.name, [file], table.arrow(table.columns), columns, chosen)
            parts.append(rows.rename_columns(["message_id", "state", "number"]))
    _, newest = bulk.bounds(queue)
    offset = lake.state.offsets.get(queue, 0)
    if newest > offset:
        for batch in bulk.journal(queue, offset, newest, ("message_id", "event", "number")):
            mine = pc.and_(
                pc.is_in(batch.column("message_id"), value_set=ids),
                pc.invert(pc.is_in(batch.column("event"), value_set=pa.array(ASIDE))),
            )
            rows = pa.Table.from_batches([batch]).filter(mine)
            parts.append(rows.rename_columns(["message_id", "state", "number"]))
    schema = pa.schema([("message_id", pa.string()), ("state", pa.string()), ("number", pa.int64())])
    whole = pa.concat_tables([schema.empty_table(), *(part.cast(schema) for part in parts)])
    ordered = whole.sort_by([("message_id", "ascending"), ("number", "ascending")])
    return (
        ordered.group_by("message_id", use_threads=False)
        .aggregate([("state", "last")])
        .rename_columns(["message_id", "state"])
    )
