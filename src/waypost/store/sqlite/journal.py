"""Read the journal, the history of one message, and the positions of readers."""

from __future__ import annotations

from waypost.store.sqlite.queue_records import QueueRecords
from waypost.values import EventPage, EventRecord, TracePage

_EVENT_COLUMNS = (
    'number, at_ms, event, message_id, key, "group", priority, token, claims, deliveries, attempts, worker, due_ms, '
    "cause, reason, error_type, run_ms, wait_ms, size, operation_id, chain_id, schedule, body, error"
)
_JOURNAL = f"""
    SELECT {_EVENT_COLUMNS} FROM {{journal}} WHERE queue = ? AND number > ? ORDER BY number LIMIT ?"""
_TRACE = f"""
    SELECT {_EVENT_COLUMNS} FROM {{journal}} INDEXED BY {{journal:message}}
    WHERE queue = ? AND message_id = ? AND number >= ? ORDER BY number"""
_READER = "SELECT read_to FROM {reader} WHERE queue = ? AND name = ?"
_READER_SET = """
    INSERT INTO {reader} (queue, name, read_to) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET read_to = excluded.read_to"""
_READER_FORGET = "DELETE FROM {reader} WHERE queue = ? AND name = ?"


def journal(records: QueueRecords, after: int, limit: int) -> EventPage:
    """Events after a number."""
    first = records.numbers["journal_first"]
    start = max(after, first - 1)
    events = [EventRecord(records.name, *row) for row in records.step.execute(_JOURNAL, (records.number, start, limit))]
    return EventPage(events, events[-1].number if events else start, first, records.numbers["journal_last"])


def trace(records: QueueRecords, message_id: str) -> TracePage:
    """The history of one message, as far as the journal reaches."""
    parameters = (records.number, message_id, records.numbers["journal_first"])
    return TracePage([EventRecord(records.name, *row) for row in records.step.execute(_TRACE, parameters)], None)


def reader(records: QueueRecords, name: str, read_to: int | None) -> int:
    """Register a reader, or move it forward; return its position."""
    records.make()
    row = records.step.execute(_READER, (records.number, name)).fetchone()
    position = records.numbers["journal_first"] - 1 if row is None else int(row[0])
    if read_to is not None:
        position = max(position, min(read_to, records.numbers["journal_last"]))
    records.step.execute(_READER_SET, (records.number, name, position))
    return position


def forget_reader(records: QueueRecords, name: str) -> bool:
    """Whether there was such a reader."""
    return records.step.execute(_READER_FORGET, (records.number, name)).rowcount > 0
