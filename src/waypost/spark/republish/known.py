"""What the store, the lake and the journal know: keys that were published, and messages that may have been.

The table `keys` has what the pipeline has loaded and what backfills have added. What was published since is in the
store's journal, behind the last event that the lake has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from waypost.client import Waypost
from waypost.client.internals import context_of, run_flow
from waypost.errors import InvalidInput, StoreFailed
from waypost.operations.flow import Flow, Together
from waypost.spark.lake.keys import EVENT_COLUMNS, published_keys, read_keys
from waypost.spark.lake.lake import Lake, Seen
from waypost.spark.lake.tables import BRONZE_JOURNAL
from waypost.spark.source.bulk import Bulk
from waypost.times import format_datetime, to_datetime

#: Levels of a journal that record every publish.
LEVELS: Final = ("all", "full")
#: Messages that the store is asked about in one flush.
LOCATED_TOGETHER: Final = 64
#: What is read of events behind the lake: their keys, and changes of how much is journalled.
TAIL_COLUMNS: Final = (*EVENT_COLUMNS, "cause")
#: What is read of events that may have redriven a letter.
REDRIVEN_COLUMNS: Final = ("message_id", "event", "number", "operation_id")
#: Keys of other backfills count from this long before a plan was made: planning takes time, and clocks differ.
OTHERS_MS: Final = 24 * 3_600_000


def check_history(lake: Lake, bulk: Bulk, queue: str, *, allow_gaps: bool) -> None:
    """Refuse a queue of whose published keys some are not known, and say from when on they are."""
    if allow_gaps:
        return
    gap = find_gap(lake, bulk, queue)
    if gap is not None:
        raise InvalidInput(
            f"{gap}. Rows whose keys were published before may be published again; pass --allow-gaps to accept that"
        )


def find_gap(lake: Lake, bulk: Bulk, queue: str) -> str | None:
    """Return what is missing from the history of a queue's keys, as a sentence; None if nothing is."""
    state = lake.state
    seen, offset = state.seen.get(queue), state.offsets.get(queue, 0)
    first, newest = bulk.bounds(queue)
    if first > offset + 1 and newest > offset:
        return (
            f"queue {queue}: its keys are known from event {first:,} of the journal on{_time_of(bulk, queue, first)}: "
            f"events {offset + 1:,} to {first - 1:,} were trimmed before the lake {lake.files.address} loaded them"
        )
    if seen is not None and seen.not_seen:
        since = _first_known(lake, queue, seen.gap_end)
        begin = "" if since is None else f", {format_datetime(to_datetime(since))}"
        return (
            f"queue {queue}: its keys are known from event {seen.gap_end + 1:,} of the journal on{begin}: "
            f"{seen.not_seen:,} older events are not in the lake {lake.files.address} (trimmed, or left out by --from)"
        )
    if left_out := state.left_out.get(queue):
        return (
            f"queue {queue}: its keys are known from event {left_out + 1:,} of the journal on: older events were left "
            f"out when the lake {lake.files.address} began (--from)"
        )
    if state.keys_begin_ms:
        return (
            f"queue {queue}: its keys are known from {format_datetime(to_datetime(state.keys_begin_ms))} on: older "
            f"events were deleted from the lake {lake.files.address} before it had a table of keys"
        )
    level = bulk.run(bulk.store.policy(queue)).journal
    if level not in LEVELS:
        return (
            f"queue {queue}: its journal is at level {level}, which does not record what is published: its keys are "
            f"not known from {'the beginning' if seen is None else f'event {seen.level_end + 1:,}'} on"
        )
    missing = count_unrecorded(lake, bulk, queue)
    if missing:
        return (
            f"queue {queue}: the store has counted {missing:,} published messages of which its journal has no event: "
            "for some time it was at a level that does not record what is published. Their keys are not known"
        )
    return None


def count_unrecorded(lake: Lake, bulk: Bulk, queue: str) -> int:
    """Return how many published messages the store has counted that neither the lake nor the journal has."""
    # The counter first: what is published meanwhile is then in the journal alone.
    missing = bulk.run(bulk.store.stats(queue)).ledger.published
    missing -= lake.state.seen.get(queue, Seen()).counts.get("published", 0)
    if missing <= 0:
        return 0
    # Those without a number before the newest number is read: if they get one meanwhile, the journal has them.
    missing -= len(bulk.unnumbered(queue))
    offset, (_, newest) = lake.state.offsets.get(queue, 0), bulk.bounds(queue)
    batches = bulk.journal(queue, offset, newest, ("event",)) if newest > offset else ()
    for batch in batches:
        missing -= pc.sum(pc.equal(batch.column("event"), "published")).as_py() or 0
    return max(0, missing)


def _time_of(bulk: Bulk, queue: str, number: int) -> str:
    events = bulk.run(bulk.store.journal(queue, number - 1, 1)).events
    return f", {format_datetime(to_datetime(events[0].at_ms))}" if events else ""


def _first_known(lake: Lake, queue: str, after: int) -> int | None:
    chosen = (pc.field("queue") == queue) & (pc.field("number") > after)
    times = [pc.min(rows.column("at_ms")).as_py() for rows in read_keys(lake, ("at_ms",), chosen)]
    return min(times, default=None)


class Tail:
    """Keys that were published since a moment: from the lake what it has loaded since, and from the journal the rest.

    With `plan`, the name and the time of a plan, the keys count too that other backfills have added to the lake.
    """

    def __init__(self, lake: Lake, bulk: Bulk, queue: str, after: int, plan: tuple[str, int] | None = None) -> None:
        self.queue = queue
        #: What is missing from the events since, None if nothing is.
        self.missing = find_loss_in_lake(lake, queue, after)
        self._bulk = bulk
        self._read_to = max(after, lake.state.offsets.get(queue, 0))
        chosen = pc.field("number") > after
        if plan is not None:
            name, made_ms = plan
            since = pc.field("at_ms") > made_ms - OTHERS_MS
            chosen = chosen | (pc.field("number").is_null() & (pc.field("backfill") != name) & since)
        found = read_keys(lake, ("key",), (pc.field("queue") == queue) & chosen)
        self._keys = [rows.column("key") for rows in found]

    def read_on(self) -> Any:
        """Read what was published since the last time, and return these keys as one Arrow column."""
        first, newest = self._bulk.bounds(self.queue)
        if first > self._read_to + 1 and newest > self._read_to:
            self.missing = f"events {self._read_to + 1:,} to {first - 1:,} of its journal were trimmed"
        found = []
        for batch in read_events(self._bulk, self.queue, self._read_to, newest):
            if level := find_level(batch):
                self.missing = describe_level(level)
            found.append(published_keys(batch).column("key"))
        self._read_to = max(self._read_to, newest)
        self._keys += found
        return _join(found)

    def are_known(self, keys: Any) -> Any:
        """Return for each key whether it was published since."""
        return pc.is_in(keys, value_set=self.whole().combine_chunks())

    def whole(self) -> Any:
        """Return the keys, as one Arrow column."""
        return _join(self._keys)


def _join(columns: Sequence[Any]) -> Any:
    return pa.chunked_array([chunk for column in columns for chunk in column.chunks], pa.string())


def read_events(bulk: Bulk, queue: str, after: int, to: int) -> Iterator[Any]:
    """Yield events of the journal with numbers in (after, to] as record batches."""
    return bulk.journal(queue, after, to, TAIL_COLUMNS) if to > after else iter(())


def find_level(events: Any) -> int:
    """Return the number of the newest event that changed how much is journalled, 0 if there is none."""
    is_level = pc.and_(
        pc.equal(events.column("event"), "configured"),
        pc.fill_null(pc.match_substring(events.column("cause"), "journal="), False),
    )
    return pc.max(events.column("number").filter(is_level)).as_py() or 0


def describe_level(number: int) -> str:
    """Return what a changed level means for the events before it."""
    return f"the level of its journal was changed by event {number:,}"


def find_loss(lake: Lake, bulk: Bulk, queue: str, after: int, level: int = 0) -> str | None:
    """Return why a publish after an event of the journal may have left no trace, None if each has left one.

    `level` is the newest event behind the lake that changed how much is journalled.
    """
    start = max(after, lake.state.offsets.get(queue, 0))
    first, newest = bulk.bounds(queue)
    if first > start + 1 and newest > start:
        return f"events {start + 1:,} to {first - 1:,} of its journal were trimmed"
    missing = find_loss_in_lake(lake, queue, after) or find_loss_by_level(bulk, queue)
    return describe_level(level) if missing is None and level > after else missing


def find_loss_in_lake(lake: Lake, queue: str, after: int) -> str | None:
    """Return which events after another one the lake should have and does not have, None if it has all."""
    seen = lake.state.seen.get(queue, Seen())
    if seen.gap_end > after:
        return f"events of its journal up to {seen.gap_end:,} were trimmed before the lake loaded them"
    if lake.state.left_out.get(queue, 0) > after:
        return f"events of its journal up to {lake.state.left_out[queue]:,} were left out of the lake (--from)"
    return describe_level(seen.level_end) if seen.level_end > after else None


def find_loss_by_level(bulk: Bulk, queue: str) -> str | None:
    """Return that a queue does not journal what is published, None if it does."""
    is_recorded = bulk.run(bulk.store.policy(queue)).journal in LEVELS
    return None if is_recorded else "its journal does not record what is published"


@dataclass(frozen=True, slots=True)
class Doubt:
    """A chunk that may have been sent."""

    queue: str
    ids: Sequence[str]
    #: The newest event of the journal before it was sent.
    journal: int


class Undecided(StoreFailed):
    """Raised when neither store nor lake can tell whether a chunk was sent."""


def find_sent(lake: Lake, bulk: Bulk, post: Waypost, doubt: Doubt) -> set[str]:
    """Return those messages of a chunk in doubt that have been published.

    Asked are the store, which has those that have not ended; the table of keys; and the journal behind it. Raises
    `Undecided` if events that would tell are gone.
    """
    found = set(_in_store(post, doubt.queue, doubt.ids))
    left = [id for id in doubt.ids if id not in found]
    if not left:
        return found
    wanted = pa.array(left, pa.string())
    chosen = (pc.field("queue") == doubt.queue) & pc.is_in(pc.field("message_id"), value_set=wanted)
    for rows in read_keys(lake, ("message_id",), chosen):
        found.update(rows.column("message_id").to_pylist())
    offset, level = max(doubt.journal, lake.state.offsets.get(doubt.queue, 0)), 0
    for batch in read_events(bulk, doubt.queue, offset, bulk.bounds(doubt.queue)[1]):
        level = max(level, find_level(batch))
        rows = published_keys(batch)
        found.update(
            rows.filter(pc.is_in(rows.column("message_id"), value_set=wanted)).column("message_id").to_pylist()
        )
    if len(found) < len(doubt.ids) and (missing := find_loss(lake, bulk, doubt.queue, doubt.journal, level)):
        raise Undecided(
            f"queue {doubt.queue}: it is not known which messages of the last chunk were published: {missing}. "
            "Choose with --in-doubt send (some may come twice) or --in-doubt skip (some may be missing)"
        )
    return found


@dataclass(frozen=True, slots=True)
class Earlier:
    """The letters of a chunk in doubt that were redriven by it, and whether there may be more of them."""

    redriven: Set[str] = frozenset()
    may_miss: bool = False


NOTHING_EARLIER: Final = Earlier()


def find_redriven(
    lake: Lake, bulk: Bulk, queue: str, ids: Sequence[str], after: int, sessions: Sequence[str]
) -> Earlier:
    """Return which letters these sessions have redriven after an event of the journal: by the lake, and behind it."""
    wanted, level = pa.array(ids, pa.string()), 0
    mine = (pc.field("event") == "redriven") & pc.is_in(pc.field("message_id"), value_set=wanted)
    columns = ["message_id", "operation_id"]
    parts = [lake.arrow(BRONZE_JOURNAL, columns, (pc.field("queue") == queue) & (pc.field("number") > after) & mine)]
    start, newest = max(after, lake.state.offsets.get(queue, 0)), bulk.bounds(queue)[1]
    batches = bulk.journal(queue, start, newest, (*REDRIVEN_COLUMNS, "cause")) if newest > start else ()
    for batch in batches:
        level = max(level, find_level(batch))
        parts.append(pa.Table.from_batches([batch]).filter(mine).select(columns))
    # An operation is named by its session and its number.
    found = {
        id
        for part in parts
        for id, operation in zip(*(part.column(name).to_pylist() for name in columns), strict=True)
        if operation is not None and operation.partition(".")[0] in sessions
    }
    is_open = not bulk.unnumbered(queue).isdisjoint(ids)
    return Earlier(found, is_open or find_loss(lake, bulk, queue, after, level) is not None)


def _in_store(post: Waypost, queue: str, ids: Sequence[str]) -> list[str]:
    def locate(part: Sequence[str]) -> Flow[list[str]]:
        context = context_of(post)
        calls = [call for id in part for call in context.store.locate([queue], id)]
        answers: list[Any] = yield Together(calls)
        found = []
        for call, answer in zip(calls, answers, strict=True):
            if isinstance(answer, Exception):
                # The first attempt has failed; this one repeats it within the budget, or raises.
                answer = yield from context.attempt(call)
            found += [one.id for one in answer]
        return found

    parts = (ids[start : start + LOCATED_TOGETHER] for start in range(0, len(ids), LOCATED_TOGETHER))
    return [id for part in parts for id in run_flow(post, locate(part))]
