"""Running a queue: redrive, purge, configure, pause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from waypost.policy import Policy
from waypost.store.port import told
from waypost.store.sqlite.check import usable
from waypost.store.sqlite.moves import end, forget_completed, make_claimable
from waypost.store.sqlite.peek import ORDERS
from waypost.store.sqlite.publish import count_over_cap, taken_windows
from waypost.store.sqlite.queue_records import COLUMNS, Holder, QueueBook, as_list
from waypost.store.sqlite.schema import DEAD, STATE_NUMBERS
from waypost.values import MessageState, Purged, Redriven

_DEAD_ALL = f"""
    SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:dead}}
    WHERE m.queue = ? AND m.state = {DEAD} AND m.reason <> 'duplicate' ORDER BY m.ended_ms, m.id LIMIT ?"""
_DEAD_BY_REASON = f"""
    SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:reason}}
    WHERE m.queue = ? AND m.state = {DEAD} AND m.reason = ? ORDER BY m.ended_ms, m.id LIMIT ?"""
_DEAD_BY_ID = f"""
    SELECT {COLUMNS}
    FROM (SELECT DISTINCT value FROM json_each(?)) j CROSS JOIN {{message}} m INDEXED BY {{message:id}}
    WHERE m.queue = ? AND m.id = j.value AND m.state = {DEAD} AND (?3 IS NULL OR m.reason = ?3)
    ORDER BY m.ended_ms, m.id LIMIT ?"""


def redrive(book: QueueBook, limit: int, operation: str, ids: Sequence[str], reason: str | None) -> Redriven:
    """Dead letters back to the ready messages; their counts start anew, their token goes on."""
    parameters: tuple[object, ...]
    if ids:
        query, parameters = _DEAD_BY_ID, (as_list(ids), book.number, reason, limit + 1)
    elif reason is not None:
        query, parameters = _DEAD_BY_REASON, (book.number, reason, limit + 1)
    else:
        # Without a filter, those left dead as duplicates would be chosen again and again.
        query, parameters = _DEAD_ALL, (book.number, limit + 1)
    chosen = [book.hold(row) for row in usable(book, book.step.execute(query, parameters).fetchall())]
    book.load_holders([record.key for record in chosen if record.key is not None])
    windows = taken_windows(book, [record.key for record in chosen if record.key is not None])
    moved, duplicates = [], []
    for record in chosen[:limit]:
        if record.key is not None:
            if book.holders[record.key] is not None or record.key in windows:
                record.reason = "duplicate"
                book.touch(record)
                duplicates.append(record.id)
                continue
            book.holders[record.key] = Holder(record)
        record.deliveries = record.attempts = record.cancel_requested = 0
        record.reason = record.error_type = record.error = record.ended_ms = None
        record.cause = "redriven"
        book.numbers["redriven"] += 1
        book.note("redriven", operation, record)
        make_claimable(book, record, book.now)
        moved.append(record.id)
    count_over_cap(book, len(moved))
    return Redriven(moved, duplicates, len(chosen) > limit)


def purge(book: QueueBook, state: MessageState, limit: int, operation: str) -> Purged:
    """Remove messages of one state, in the order of its listing, up to a bound."""
    if state == "done":
        return Purged(forget_completed(book, limit), book.numbers["completed"] > 0)
    query = (
        f"SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:{state}}} "
        f"WHERE m.queue = ? AND m.state = {STATE_NUMBERS[state]} ORDER BY {ORDERS[state]} LIMIT ?"
    )
    rows = book.step.execute(query, (book.number, limit + 1)).fetchall()
    records = [book.hold(row) for row in usable(book, rows[:limit])]
    book.load_holders([record.key for record in records if record.key is not None])
    for record in records:
        if state == "dead":
            book.remove(record)
            book.note("dead_trimmed", operation, record, cause="purge")
        else:
            end(book, record, "cancelled", operation, cause="purge")
    return Purged(len(records), len(rows) > limit)


def configure(book: QueueBook, changes: Mapping[str, Any]) -> Policy:
    """Change the queue's policy; it acts from the next step on."""
    book.make()
    book.set_policy(book.policy.changed(changes))
    book.note("configured", None, cause=told(changes))
    return book.policy


def set_paused(book: QueueBook, paused: bool) -> bool:
    """Whether this changed anything."""
    if paused:
        book.make()
    if book.paused == paused:
        return False
    book.paused = paused
    book.note("paused" if paused else "resumed", None)
    return True


def worth_waking(book: QueueBook) -> int:
    """How many sleepers a changed limit can have made useful."""
    return book.numbers["ready"] + (book.numbers["delayed"] > 0)


def worth_resuming(book: QueueBook) -> int:
    """How many sleepers a resume can have made useful: one of them looks after timers and the ends of leases."""
    return book.numbers["ready"] + (book.numbers["delayed"] + book.numbers["leased"] > 0)
