"""Read the journal, the history of one message, and the positions of readers."""

from __future__ import annotations

from waypost.store.sqlite.queue_records import QueueBook
from waypost.values import Event, JournalPage, TracePage

_EVENT_COLUMNS = (
    'number, at_ms, event, message_id, key, "group", priority, token, claims, deliveries, attempts, worker, due_ms, '
    "cause, reason, error_type, run_ms, wait_ms, size, operation_id, chain_id, schedule, body"
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


def journal(book: QueueBook, after: int, limit: int) -> JournalPage:
    """Events after a number."""
    first = book.numbers["journal_first"]
    start = max(after, first - 1)
    events = [Event(book.name, *row) for row in book.step.execute(_JOURNAL, (book.number, start, limit))]
    return JournalPage(events, events[-1].number if events else start, first, book.numbers["journal_last"])


def trace(book: QueueBook, message_id: str) -> TracePage:
    """The history of one message, as far as the journal reaches."""
    parameters = (book.number, message_id, book.numbers["journal_first"])
    return TracePage([Event(book.name, *row) for row in book.step.execute(_TRACE, parameters)], None)


def reader(book: QueueBook, name: str, read_to: int | None) -> int:
    """Register a reader, or move it forward; where it stands."""
    book.make()
    row = book.step.execute(_READER, (book.number, name)).fetchone()
    position = book.numbers["journal_first"] - 1 if row is None else int(row[0])
    if read_to is not None:
        position = max(position, min(read_to, book.numbers["journal_last"]))
    book.step.execute(_READER_SET, (book.number, name, position))
    return position


def forget_reader(book: QueueBook, name: str) -> bool:
    """Whether there was such a reader."""
    return book.step.execute(_READER_FORGET, (book.number, name)).rowcount > 0
