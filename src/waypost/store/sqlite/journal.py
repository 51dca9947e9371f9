"""Read the journal, the history of one message, and the positions of readers."""

from __future__ import annotations

from waypost.store.known_events import check_events
from waypost.store.sqlite.entries import events_between, events_of
from waypost.store.sqlite.queue_records import QueueRecords
from waypost.values import EventPage, EventRecord, TracePage

_READER = "SELECT read_to FROM {reader} WHERE queue = ? AND name = ?"
_READER_SET = """
    INSERT INTO {reader} (queue, name, read_to) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET read_to = excluded.read_to"""
_READER_FORGET = "DELETE FROM {reader} WHERE queue = ? AND name = ?"


def journal(records: QueueRecords, after: int, limit: int) -> EventPage:
    """Return the events after a number."""
    first = records.numbers["journal_first"]
    start = max(after, first - 1)
    last = records.numbers["journal_last"]
    events = [EventRecord(records.name, *row) for row in events_between(records, start, last, limit)]
    return EventPage(events, events[-1].number if events else start, first, last)


def trace(records: QueueRecords, message_id: str) -> TracePage:
    """Return the history of one message, as far as the journal has it."""
    first = records.numbers["journal_first"]
    rows = events_of(records.step, records.number, message_id)
    found = [EventRecord(records.name, *row) for row in rows if row[0] >= first]
    check_events(records.name, found[-1].number if found else 0, [one.event for one in found])
    return TracePage(found, None)


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
    """Return whether there was such a reader."""
    return records.step.execute(_READER_FORGET, (records.number, name)).rowcount > 0
