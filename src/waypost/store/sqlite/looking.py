"""Looking: listings, stats, the journal. Nothing here changes anything but where a reader stands."""

from __future__ import annotations

from typing import Any

import msgspec

from waypost.errors import InvalidInput
from waypost.policy import HEAD_OFFSET, MINUTES_KEPT, PRIORITY_MAX, PRIORITY_MIN
from waypost.store.sqlite.book import QueueBook
from waypost.store.sqlite.schema import DEAD, DELAYED, LEASED, READY, WAITING
from waypost.values import (
    MINUTE_COUNTERS,
    REDELIVERY_CAUSES,
    Event,
    JournalPage,
    Ledger,
    MessageState,
    Minute,
    Page,
    Stats,
    Stored,
    TracePage,
)

STATES: dict[MessageState, int] = {
    "ready": READY, "delayed": DELAYED, "leased": LEASED, "waiting": WAITING, "dead": DEAD,
}  # fmt: skip
#: The order in which each state is listed: that of the index of the same name.
ORDERS: dict[MessageState, str] = {
    "ready": "m.priority DESC, m.position, m.id",
    "delayed": "m.ready_ms, m.id",
    "waiting": "m.id",
    "leased": "m.lease_end_ms, m.id",
    "dead": "m.ended_ms, m.id",
    "done": "m.number",
}
#: The columns of a listing's order as values, for the cursor.
PLACES: dict[MessageState, tuple[str, ...]] = {
    state: tuple(column.removesuffix(" DESC") for column in order.split(", ")) for state, order in ORDERS.items()
}

_STORED = (
    'm.id, {state}, m.key, m."group", m.priority, m.token, m.deliveries, m.attempts, m.published_ms, m.ready_ms, e.data'
)
_ENDED = "m.cancel_requested, m.ended_ms, m.reason, m.error_type, m.error"
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
_HEAD = """
    SELECT ready_ms FROM {message} INDEXED BY {message:ready}
    WHERE queue = ? AND state = {READY} AND priority = ? AND position >= ? ORDER BY position, id LIMIT 1"""
_OLDEST_LEASED = """
    SELECT min(claimed_ms) FROM {message} INDEXED BY {message:leased} WHERE queue = ? AND state = {LEASED}"""
_SLEEPERS = """
    SELECT count(*) FROM {sleeper} INDEXED BY {sleeper:until}
    WHERE queue = ? AND until_ms > ? AND name NOT GLOB '~*'"""
_MINUTES = (
    f"SELECT minute, {', '.join(MINUTE_COUNTERS)} FROM {{minute}} WHERE queue = ? AND minute >= ? ORDER BY minute"
)


# ---- listings ------------------------------------------------------------------------------------------------


def peek(book: QueueBook, state: MessageState, limit: int, cursor: str | None, filters: dict[str, str | None]) -> Page:
    """A page of one state, in the order of its listing. The cursor is the place of the last message looked at."""
    rows = _listed(book, state, limit, _read_cursor(cursor, state), filters)
    messages = [_stored(state, row) for row in rows]
    if len(rows) < limit or not rows:
        return Page(messages, None)
    last = list(rows[-1][-len(PLACES[state]) :])
    # There is a next page if anything at all comes after, even if none of it fits the filters.
    more = _listed(book, state, 1, last, {})
    return Page(messages, msgspec.json.encode(last).decode() if more else None)


def _listed(
    book: QueueBook, state: MessageState, limit: int, after: list[Any] | None, filters: dict[str, str | None]
) -> list[tuple[Any, ...]]:
    """Rows of a listing behind a place. Priorities fall while positions rise, so ready messages take two queries."""
    if after is None:
        return _rows(book, state, limit, filters, "", [])
    if state != "ready":
        columns = ", ".join(PLACES[state])
        marks = ", ".join("?" * len(after))
        return _rows(book, state, limit, filters, f" AND ({columns}) > ({marks})", after)
    same = _rows(book, state, limit, filters, " AND m.priority = ? AND (m.position, m.id) > (?, ?)", after)
    if len(same) < limit:
        same += _rows(book, state, limit - len(same), filters, " AND m.priority < ?", after[:1])
    return same


def _rows(
    book: QueueBook, state: MessageState, limit: int, filters: dict[str, str | None], behind: str, after: list[Any]
) -> list[tuple[Any, ...]]:
    wanted = {name: value for name, value in filters.items() if value is not None}
    table, index = ("completed", "completed:number") if state == "done" else ("message", f"message:{state}")
    if "id" in wanted:
        index = f"{table}:id"
    elif "key" in wanted and state in ("ready", "delayed", "leased"):
        index, behind = "message:owner", " AND m.state < {WAITING}" + behind
    elif "key" in wanted and state == "waiting":
        index = "message:parked"
    elif "reason" in wanted and state == "dead":
        index = "message:reason"
    where = "" if state == "done" else f" AND m.state = {STATES[state]}"
    where += "".join(f' AND m."{name}" = ?' for name in wanted) + behind
    lease = "NULL, NULL, NULL"
    if state == "leased":
        lease = "m.claimed_ms, m.lease_end_ms, m.worker"
    query = (
        f"SELECT {_STORED.format(state=repr(state))}, {lease}, {_ENDED}, {', '.join(PLACES[state])} "
        f"FROM {{{table}}} m INDEXED BY {{{index}}} CROSS JOIN {{envelope}} e ON e.seq = m.seq "
        f"WHERE m.queue = ?{where} ORDER BY {ORDERS[state]} LIMIT ?"
    )
    return book.step.execute(query, (book.number, *wanted.values(), *after, limit)).fetchall()


def _stored(state: MessageState, row: tuple[Any, ...]) -> Stored:
    values = list(row[: len(row) - len(PLACES[state])])
    values[14] = bool(values[14])
    return Stored(*values)


def _read_cursor(cursor: str | None, state: MessageState) -> list[Any] | None:
    if cursor is None:
        return None
    try:
        place = msgspec.json.decode(cursor, type=list[int | str])
    except msgspec.DecodeError:
        place = []
    if len(place) != len(PLACES[state]):
        raise InvalidInput("this cursor is not one that a listing of this state gave; start again without it")
    return place


# ---- stats ---------------------------------------------------------------------------------------------------


def ledger(book: QueueBook) -> Ledger:
    """Where every message of the queue went, from the queue's row alone."""
    n = book.numbers
    return Ledger(
        n["published"], n["redriven"], n["ready"], n["delayed"], n["waiting"], n["leased"],
        n["done"], n["dead"], n["dropped"], n["cancelled"], n["replaced"], n["dead_kept"],
        n["claims"], n["first_claims"], {cause: n[f"again_{cause}"] for cause in REDELIVERY_CAUSES},
        n["expired"], n["released"], n["retried"], n["snoozed"], n["duplicates"], n["transferred"],
        n["over_cap"],
    )  # fmt: skip


def _oldest_ready(book: QueueBook) -> int | None:
    """The longest wait among the messages that stand first: of each priority, reclaimed ones apart."""
    heads = [
        book.step.execute(_HEAD, (book.number, priority, first)).fetchone()
        for priority in range(PRIORITY_MIN, PRIORITY_MAX + 1)
        for first in (-HEAD_OFFSET, 0)
    ]
    return max((book.now - head[0] for head in heads if head is not None), default=None)


def stats(book: QueueBook, minutes: int) -> Stats:
    """A queue at a glance."""
    now, number, execute = book.now, book.number, book.step.execute
    oldest_leased = execute(_OLDEST_LEASED, (number,)).fetchone()[0]
    first = now // 60_000 - min(minutes, MINUTES_KEPT) + 1
    return Stats(
        book.name, now, ledger(book), book.paused,
        _oldest_ready(book),
        None if oldest_leased is None else now - oldest_leased,
        book.next_due(), book.next_lease(),
        execute(_SLEEPERS, (number, now)).fetchone()[0],
        book.numbers["journal_first"], book.numbers["journal_last"], book.readers(),
        [
            Minute(minute * 60_000, dict(zip(MINUTE_COUNTERS, counts, strict=True)))
            for minute, *counts in execute(_MINUTES, (number, first))
        ],
    )  # fmt: skip


# ---- the journal ---------------------------------------------------------------------------------------------


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
