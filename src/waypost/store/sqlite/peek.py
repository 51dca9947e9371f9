"""List the messages of one state, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from waypost.policy import CHUNK_BYTES_MAX, SCANNED_MAX
from waypost.store.port import read_cursor
from waypost.store.sqlite.queue_records import QueueRecords, as_list
from waypost.store.sqlite.schema import STATE_NUMBERS
from waypost.store.sqlite.step import Step
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
#: The order of ready messages in a queue with turns between groups.
BY_GROUP = 'm."group", m.rank, m.position, m.id'
#: The columns of a listing's order as values, for the cursor.
PLACES: dict[MessageState, tuple[str, ...]] = {
    state: tuple(column.removesuffix(" DESC") for column in order.split(", ")) for state, order in ORDERS.items()
}
PLACES_BY_GROUP = ("coalesce(m.\"group\", '')", "m.rank", "m.position", "m.id")

_STORED = (
    'm.id, {state}, {key}, m."group", m.priority, m.token, m.deliveries, m.attempts, m.published_ms, m.ready_ms, e.data'
)
_ENDED = "m.cancel_requested, m.ended_ms, m.reason, m.error_type, m.error"


def peek(
    records: QueueRecords, state: MessageState, limit: int, cursor: str | None, filters: dict[str, str | None]
) -> Page:
    """Return a page of one state, in the order of its listing. The cursor is the place of the last message seen.

    A filter without an index is applied to a bounded number of messages: the caller continues after them.
    """
    wanted = {name: value for name, value in filters.items() if value is not None}
    by_group = state == "ready" and records.groups is not None and records.groups.takes_turns
    indexed = {name: value for name, value in wanted.items() if _index_of(state, name) is not None}
    others = {name: value for name, value in wanted.items() if name not in indexed}
    seen_max = SCANNED_MAX if others else limit
    after = read_cursor(cursor, len(PLACES_BY_GROUP if by_group else PLACES[state]))
    find = _seen_by_group if by_group else _seen
    seen = find(records, state, seen_max, after, indexed, others)
    fitting = [row for row in seen if row[0]]
    limit = _within_bytes(records, [row[1] for row in fitting[:limit]])
    messages = _read(records, state, [row[1] for row in fitting[:limit]])
    if len(fitting) > limit:
        return Page(messages, _cursor(fitting[limit - 1]))
    # There is a next page if any message follows, even if none of them matches the filters.
    more = len(seen) == seen_max and find(records, state, 1, list(seen[-1][2:]), {}, {})
    return Page(messages, _cursor(seen[-1]) if more else None)


def _within_bytes(records: QueueRecords, numbers: list[int]) -> int:
    """Return how many of these messages to read in one call: by a page's bytes, and at least one message."""
    query = "SELECT length(e.data) FROM json_each(?) j CROSS JOIN {envelope} e ON e.seq = j.value ORDER BY j.key"
    bytes_read = 0
    for count, (size,) in enumerate(records.step.execute(query, (as_list(numbers),)), 1):
        bytes_read += size
        if bytes_read >= CHUNK_BYTES_MAX:
            return count
    return max(1, len(numbers))


def _cursor(row: tuple[Any, ...]) -> str:
    return msgspec.json.encode(row[2:]).decode()


def _index_of(state: MessageState, filter: str) -> str | None:
    """Return the index that finds messages of a state by a filter."""
    if filter == "id":
        return "completed:id" if state == "done" else "message:id"
    if filter == "key" and state in ("ready", "delayed", "leased", "waiting"):
        return "message:parked" if state == "waiting" else "message:owner"
    return "message:reason" if filter == "reason" and state == "dead" else None


def _seen(
    records: QueueRecords,
    state: MessageState,
    limit: int,
    after: list[Any] | None,
    indexed: dict[str, str],
    others: dict[str, str],
) -> list[tuple[Any, ...]]:
    """Return messages after a place: whether each matches the other filters, its number, its place.

    Priorities decrease while positions increase, so ready messages need two queries.
    """

    def select(number: int, behind: str, place: list[Any]) -> list[tuple[Any, ...]]:
        table, index = ("completed", "completed:number") if state == "done" else ("message", f"message:{state}")
        index = next((found for found in (_index_of(state, name) for name in indexed) if found is not None), index)
        fits = " AND ".join(f'm."{name}" IS ?' for name in others) or "1"
        where = "" if state == "done" else f" AND m.state = {STATE_NUMBERS[state]}"
        # The index of owners has several states.
        where += " AND m.state < {WAITING}" if index == "message:owner" else ""
        where += "".join(f' AND m."{name}" = ?' for name in indexed) + behind
        query = (
            f"SELECT {fits}, m.seq, {', '.join(PLACES[state])} FROM {{{table}}} m INDEXED BY {{{index}}} "
            f"WHERE m.queue = ?{where} ORDER BY {ORDERS[state]} LIMIT ?"
        )
        parameters = (*others.values(), records.number, *indexed.values(), *place, number)
        return records.step.execute(query, parameters).fetchall()

    if after is None:
        return select(limit, "", [])
    if state != "ready":
        columns = ", ".join(PLACES[state])
        marks = ", ".join("?" * len(after))
        return select(limit, f" AND ({columns}) > ({marks})", after)
    same = select(limit, " AND m.priority = ? AND (m.position, m.id) > (?, ?)", after)
    if len(same) < limit:
        same += select(limit - len(same), " AND m.priority < ?", after[:1])
    return same


def _seen_by_group(
    records: QueueRecords,
    state: MessageState,
    limit: int,
    after: list[Any] | None,
    indexed: dict[str, str],
    others: dict[str, str],
) -> list[tuple[Any, ...]]:
    """The same for ready messages of a queue with turns between groups."""
    group = others.get("group") if len(others) == 1 else None
    others = {} if group is not None else others

    def select(number: int, behind: str, place: list[Any]) -> list[tuple[Any, ...]]:
        index = next((found for found in (_index_of(state, name) for name in indexed) if found), "message:group")
        fits = " AND ".join(f'm."{name}" IS ?' for name in others) or "1"
        where = "".join(f' AND m."{name}" = ?' for name in indexed) + behind
        where += " AND m.state < {WAITING}" if index == "message:owner" else ""
        query = (
            f"SELECT {fits}, m.seq, {', '.join(PLACES_BY_GROUP)} FROM {{message}} m INDEXED BY {{{index}}} "
            f"WHERE m.queue = ? AND m.state = {STATE_NUMBERS[state]} AND m.rank IS NOT NULL{where} "
            f"ORDER BY {BY_GROUP} LIMIT ?"
        )
        parameters = (*others.values(), records.number, *indexed.values(), *place, number)
        return records.step.execute(query, parameters).fetchall()

    same_group = ' AND m."group" IS ?'
    if after is None:
        return select(limit, "", []) if group is None else select(limit, same_group, [group])
    name, *place = after
    if group is not None and group != name:
        return select(limit, same_group, [group]) if group > str(name) else []
    found = select(limit, f"{same_group} AND (m.rank, m.position, m.id) > (?, ?, ?)", [name or None, *place])
    if len(found) < limit and group is None:
        # Messages without a group come first.
        behind = (' AND m."group" > ?', [name]) if name else (' AND m."group" IS NOT NULL', [])
        found += select(limit - len(found), *behind)
    return found


def _read(records: QueueRecords, state: MessageState, numbers: list[int]) -> list[Stored]:
    """Return the messages with these numbers, in their order."""
    table = "completed" if state == "done" else "message"
    lease = "m.claimed_ms, m.lease_end_ms, m.worker" if state == "leased" else "NULL, NULL, NULL"
    expiry = "NULL" if state in ("dead", "done") else "m.expires_ms"
    key = "m.key" if state in ("dead", "done") else "coalesce(m.key, m.freed_key)"
    query = (
        f"SELECT {_STORED.format(state=repr(state), key=key)}, {lease}, {_ENDED}, {expiry} FROM json_each(?) j "
        f"CROSS JOIN {{{table}}} m ON m.seq = j.value CROSS JOIN {{envelope}} e ON e.seq = m.seq ORDER BY j.key"
    )
    rows = [list(row) for row in records.step.execute(query, (as_list(numbers),))] if numbers else []
    for row in rows:
        row[14] = bool(row[14])
    return [Stored(*row) for row in rows]


def holders(step: Step, queues: Sequence[str], key: str) -> list[tuple[str, str]]:
    """Return queue and id of the unfinished messages of a key: the owners, then the next generations."""
    found: list[tuple[str, str]] = []
    for index, state in (("owner", "< {WAITING}"), ("parked", "= {WAITING}")):
        query = (
            "SELECT q.name, m.id FROM json_each(?) j CROSS JOIN {queue} q ON q.name = j.value "
            f"CROSS JOIN {{message}} m INDEXED BY {{message:{index}}} "
            f"ON m.queue = q.number AND m.key = ? AND m.state {state}"
        )
        found += step.execute(query, (as_list(queues), key))
    return found
