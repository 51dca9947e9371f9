"""Remove a queue, and names that are no queues.

A claim from a name that is no queue needs a row, to register its sleeper and to store its operation, and a removed
queue leaves a row. A row `removal:<name>` of `meta` says that the name is no queue, and when it was last removed. The
row of the queue keeps its number, so that operations and arrivals are found until they expire, and the last number of
the journal. A queue that was created again keeps its row of `meta`: operations from before the removal may still be
repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from waypost.identity import Operation
from waypost.policy import DEFAULT_POLICY, REMOVED_TTL_MS
from waypost.store.repeats import check_removal
from waypost.store.sqlite.entries import first_event, sweep_events
from waypost.values import Removal

if TYPE_CHECKING:
    from waypost.store.sqlite.queue_records import QueueRecords
    from waypost.store.sqlite.step import Step

#: How many events of the journal one step deletes: more would block other writers for too long.
EVENTS_REMOVED_MAX = 50_000
#: Names that are no queues, deleted in one step.
NAMES_SWEPT = 16

_MARK_SET = "INSERT OR REPLACE INTO {meta} (name, value) VALUES (?, ?)"
_MARK_DROP = "DELETE FROM {meta} WHERE name = ?"
_COUNTS = {
    "schedules": "SELECT count(*) FROM {schedule} WHERE queue = ?",
    "chains": """
    SELECT count(*) FROM {chain} c WHERE c.queue = ? AND c.failed IS NULL AND EXISTS (
        SELECT 1 FROM {member} m WHERE m.queue = c.queue AND m.chain = c.id)""",
    "readers": "SELECT count(*) FROM {reader} WHERE queue = ?",
}
_MESSAGES = "SELECT count(*) FROM {message} INDEXED BY {message:id} WHERE queue = ?"
_COMPLETED = "DELETE FROM {completed} WHERE queue = ? RETURNING seq"
_ENVELOPE = "DELETE FROM {envelope} WHERE seq = ?"
#: What is deleted at once. Sessions, their results and arrivals remain until they expire: their operations may be
#: repeated.
_GOES = (
    "journal", "entry", "reader", "window", "result", "chain", "member", "watcher", "waiter", "ending", "sleeper",
    "rate", "minute", "schedule", "group",
)  # fmt: skip
_RUN_OUT = """
    SELECT q.number, q.name FROM {meta} m JOIN {queue} q ON q.name = substr(m.name, 9)
    WHERE m.name >= 'removal:' AND m.name < 'removal;' AND json_extract(m.value, '$.gone')
        AND json_extract(m.value, '$.until') <= ?1 AND q.sleepers_known_until <= ?1
        AND NOT EXISTS (SELECT 1 FROM {session} s WHERE s.queue = q.number AND s.until_ms > ?1)
        AND NOT EXISTS (SELECT 1 FROM {message} m INDEXED BY {message:id} WHERE m.queue = q.number)
    LIMIT ?2"""
_MARKS_RUN_OUT = """
    DELETE FROM {meta} WHERE name >= 'removal:' AND name < 'removal;' AND json_extract(value, '$.until') <= ?
        AND NOT json_extract(value, '$.gone')"""
_ALL = (*_GOES, "session", "replay", "arrival")
_CHANGES_DROP = "UPDATE {queue} SET changes = NULL, grouping = NULL WHERE number = ?"
_QUEUE_DROP = "DELETE FROM {queue} WHERE number = ?"


class RemovalMark(Struct, omit_defaults=True):
    """The row of a name in `meta`: whether it is no queue (any more), when it was removed, and by which operation."""

    gone: bool = False
    ms: int = 0
    mark: bytes = b""
    #: Until when the removal is remembered.
    until: int = 0


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RemovalMark).decode


def read_mark(value: Any) -> RemovalMark:
    """Return the mark of a name; that of an ordinary queue if there is none."""
    return RemovalMark() if value is None else _decode(value)


def write_mark(step: Step, name: str, mark: RemovalMark) -> None:
    """Store the mark of a name; an ordinary queue needs none."""
    if mark == RemovalMark():
        step.execute(_MARK_DROP, (f"removal:{name}",))
    else:
        # With all fields, also defaults: a query reads them.
        value = {"gone": mark.gone, "ms": mark.ms, "mark": mark.mark, "until": mark.until}
        step.execute(_MARK_SET, (f"removal:{name}", _encode(value).decode()))


def remove(step: Step, queue: str, operation: Operation) -> Removal:
    """Remove a queue if it is empty; return what is left in it otherwise."""
    records = step.queue_for_reading(queue)
    mark = records.mark
    if mark.mark == operation.mark:
        return Removal(True, made_again=records.is_made)
    if step.replay_ttl_ms is not None:
        check_removal(queue, operation, step.now, window_ms=step.replay_ttl_ms, removed_ms=mark.ms)
    left = left_in(records)
    if left or not records.is_made:
        return Removal(records.is_made, left)
    records = step.queue_for_writing(queue)
    oldest = first_event(step, records.number)
    if oldest is not None:
        sweep_events(step, records.number, oldest + EVENTS_REMOVED_MAX)
        oldest = first_event(step, records.number)
    if oldest is not None:
        first = max(oldest, records.numbers["journal_first"])
        records.numbers["journal_first"] = records.numbers["journal_swept"] = first
        return Removal(True, more=True)
    step.execute_many(_ENVELOPE, step.execute(_COMPLETED, (records.number,)).fetchall())
    for table in _GOES:
        step.execute(f"DELETE FROM {{{table}}} WHERE queue = ?", (records.number,))
    step.execute(_CHANGES_DROP, (records.number,))
    sweep_names(step)
    records.begin_anew(RemovalMark(True, step.now, operation.mark, step.now + REMOVED_TTL_MS), DEFAULT_POLICY)
    return Removal(True)


def left_in(records: QueueRecords) -> dict[str, int]:
    """Return what prevents the removal of a queue."""
    if records.number == 0:
        return {}
    names = {"ready": "ready", "delayed": "delayed", "waiting": "waiting", "leased": "leased", "dead": "dead_kept"}
    left = {name: records.numbers[column] for name, column in names.items()}
    for name, query in _COUNTS.items():
        left[name] = records.step.execute(query, (records.number,)).fetchone()[0]
    held = sum(left[name] for name in names)
    left["damaged"] = records.step.execute(_MESSAGES, (records.number,)).fetchone()[0] - held
    return {name: count for name, count in left.items() if count}


def sweep_names(step: Step) -> None:
    """Delete a few names that are no queues, if nothing must be remembered of them any longer."""
    step.execute(_MARKS_RUN_OUT, (step.now,))
    for number, name in step.execute(_RUN_OUT, (step.now, NAMES_SWEPT)).fetchall():
        for table in _ALL:
            step.execute(f"DELETE FROM {{{table}}} WHERE queue = ?", (number,))
        step.execute(_QUEUE_DROP, (number,))
        step.execute(_MARK_DROP, (f"removal:{name}",))
