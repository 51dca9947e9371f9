"""List the messages of one state, page by page."""

from __future__ import annotations

from typing import Any

import msgspec

from waypost.store.port import read_cursor
from waypost.store.sqlite.queue_records import QueueRecords
from waypost.store.sqlite.schema import STATE_NUMBERS
from waypost.values import MessageState, Page, Stored

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


def peek(
    records: QueueRecords, state: MessageState, limit: int, cursor: str | None, filters: dict[str, str | None]
) -> Page:
    """A page of one state, in the order of its listing. The cursor is the place of the last message listed."""
    rows = _listed(records, state, limit, read_cursor(cursor, len(PLACES[state])), filters)
    messages = [_stored(state, row) for row in rows]
    if len(rows) < limit or not rows:
        return Page(messages, None)
    last = list(rows[-1][-len(PLACES[state]) :])
    # There is a next page if anything at all comes after, even if none of it fits the filters.
    more = _listed(records, state, 1, last, {})
    return Page(messages, msgspec.json.encode(last).decode() if more else None)


def _listed(
    records: QueueRecords, state: MessageState, limit: int, after: list[Any] | None, filters: dict[str, str | None]
) -> list[tuple[Any, ...]]:
    """Rows of a listing behind a place. Priorities fall while positions rise, so ready messages take two queries."""
    if after is None:
        return _rows(records, state, limit, filters, "", [])
    if state != "ready":
        columns = ", ".join(PLACES[state])
        marks = ", ".join("?" * len(after))
        return _rows(records, state, limit, filters, f" AND ({columns}) > ({marks})", after)
    same = _rows(records, state, limit, filters, " AND m.priority = ? AND (m.position, m.id) > (?, ?)", after)
    if len(same) < limit:
        same += _rows(records, state, limit - len(same), filters, " AND m.priority < ?", after[:1])
    return same


def _rows(
    records: QueueRecords,
    state: MessageState,
    limit: int,
    filters: dict[str, str | None],
    behind: str,
    after: list[Any],
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
    where = "" if state == "done" else f" AND m.state = {STATE_NUMBERS[state]}"
    where += "".join(f' AND m."{name}" = ?' for name in wanted) + behind
    lease = "NULL, NULL, NULL"
    if state == "leased":
        lease = "m.claimed_ms, m.lease_end_ms, m.worker"
    query = (
        f"SELECT {_STORED.format(state=repr(state))}, {lease}, {_ENDED}, {', '.join(PLACES[state])} "
        f"FROM {{{table}}} m INDEXED BY {{{index}}} CROSS JOIN {{envelope}} e ON e.seq = m.seq "
        f"WHERE m.queue = ?{where} ORDER BY {ORDERS[state]} LIMIT ?"
    )
    return records.step.execute(query, (records.number, *wanted.values(), *after, limit)).fetchall()


def _stored(state: MessageState, row: tuple[Any, ...]) -> Stored:
    values = list(row[: len(row) - len(PLACES[state])])
    values[14] = bool(values[14])
    return Stored(*values)
