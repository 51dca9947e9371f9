"""Listings and histories: the statements that are composed here, and the reading of their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from waypost.policy import CHUNK_BYTES_MAX, SCANNED_MAX
from waypost.store.known_events import check_events
from waypost.store.port import read_cursor
from waypost.store.postgres.constants import STATES
from waypost.store.postgres.schema import Names
from waypost.store.postgres.statement import Parameter, number, one, rows_of, text
from waypost.values import (
    MINUTE_COUNTERS,
    REDELIVERY_CAUSES,
    ChangeRecord,
    EventPage,
    EventRecord,
    FoundMessage,
    HolderState,
    Ledger,
    MessageState,
    MinuteRecord,
    Page,
    StatsRecord,
    Stored,
    TracePage,
    TurnLimit,
)

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

#: The order in which each state is listed: that of its index.
ORDERS: dict[MessageState, tuple[str, ...]] = {
    "ready": ("rank", "position", "id"),
    "delayed": ("ready_ms", "id"),
    "leased": ("lease_end_ms", "id"),
    "waiting": ("id",),
    "dead": ("ended_ms", "id"),
    "done": ("number",),
}
#: The columns of that index, for states whose index does not end with the id.
INDEXED: dict[MessageState, tuple[str, ...]] = {
    "ready": ("rank", "position"), "delayed": ("ready_ms",), "leased": ("lease_end_ms",),
}  # fmt: skip
#: The same for ready messages of a queue with turns between groups.
BY_GROUP = ("coalesce(m.\"group\", '')", "m.group_rank", "m.position", "m.id")
INDEXED_KEYS = ("NULL", "NOT NULL")
STATE_OF: dict[int, MessageState] = {number: state for state, number in STATES.items()}
#: The fields of `GroupRecord`, as the function `groups` returns them.
GroupRow = tuple[
    str | None, int, int, int, int | None, bool, str | None, HolderState | None, TurnLimit | None, int | None, bool,
    int, int | None, int | None, int | None, int | None,
]  # fmt: skip
#: The fields of a journal entry as `journal` and `trace` return them.
ENTRY = (
    "before, (entry).count, (entry).at_ms, (entry).event, (entry).operation, (entry).schedule, (entry).ids, "
    "(entry).keys, (entry).groups, (entry).ranks, (entry).tokens, (entry).deliveries, (entry).attempts, "
    "(entry).workers, (entry).dues, (entry).causes, (entry).reasons, (entry).error_types, (entry).runs, "
    "(entry).waits, (entry).sizes, (entry).bodies, (entry).chains, "
    "coalesce((entry).claims, (entry).tokens), (entry).errors"
)

#: Which queues have a message, or have stored how it ended. Each table is read by its index, whatever the planner
#: estimates.
LOCATE = """
    WITH time AS MATERIALIZED (SELECT {clock}($3) AS now)
    SELECT * FROM (
        SELECT q.name,
            (SELECT m.state FROM {message} m WHERE m.queue = q.number AND m.id = $2) AS state,
            coalesce(
                (SELECT 'done' FROM {result} r WHERE r.queue = q.number AND r.id = $2 AND r.until_ms > time.now),
                (SELECT e.how FROM {ending} e WHERE e.queue = q.number AND e.id = $2 AND e.until_ms > time.now)
            ) AS ended
        FROM {queue} q, time WHERE q.name = ANY ($1)
        OFFSET 0
    ) known WHERE state IS NOT NULL OR ended IS NOT NULL ORDER BY name"""
#: Which queues have an event of a message in their journal. Entries of a single message are found by an index; of
#: entries with many messages a bounded number is scanned, from the time at which the id was made; a queue with more of
#: them is returned as one that may have an event.
LOCATE_IN_JOURNALS = """
    SELECT q.name, NULL::smallint, NULL::text FROM {queue} q
    WHERE q.name = ANY ($1) AND (
        EXISTS (SELECT 1 FROM {entry} t
            WHERE t.queue = q.number AND t.count = 1 AND t.ids IS NOT NULL AND t.ids[1] = $2)
        OR (SELECT count(*) >= $4 OR coalesce(bool_or($2 = ANY (many.ids)), false) FROM (
            SELECT t.ids FROM {entry} t WHERE t.queue = q.number AND t.count > 1 AND t.at_ms >= $3
            ORDER BY t.xid, t.seq LIMIT $4) many))
    ORDER BY q.name"""


def read_located(message_id: str, result: PGresult) -> list[FoundMessage]:
    """Read the result of `LOCATE` or `LOCATE_IN_JOURNALS`."""
    found = list[FoundMessage]()
    for queue, state_number, how in rows_of(result):
        state = None if state_number is None else STATE_OF[state_number]
        ended: Any = "dead" if state == "dead" else how if state is None else None
        found.append(FoundMessage(queue, message_id, state, ended))
    return found


def _is_indexed(state: MessageState, filter: str, *, by_group: bool = False) -> bool:
    """Return whether an index finds messages of a state by a filter."""
    if filter == "key":
        return state in ("ready", "delayed", "leased", "waiting")
    return filter == "id" or (filter == "reason" and state == "dead") or (filter == "group" and by_group)


def _first_rows(source: str, state: MessageState, limit: str, *, by_id: bool, by_group: bool) -> str:
    """Return the query for the first rows of a listing; it may return some more rows, which the caller ignores.

    Its order is exactly that of an index, so that no plan sorts: for a queue that has just grown the planner expects a
    row or two, and would choose to read and sort all rows.
    """
    if state == "waiting" and not by_id:
        # Messages with a key and messages without one have separate indexes.
        parts = (f"SELECT m.* FROM {source} AND m.key IS {key} ORDER BY m.id LIMIT {limit}" for key in INDEXED_KEYS)
        return " UNION ALL ".join(f"({part})" for part in parts)
    order = ", ".join(BY_GROUP[:-1] if by_group else (f"m.{column}" for column in INDEXED.get(state, ORDERS[state])))
    return f"SELECT m.* FROM {source} ORDER BY {order} FETCH FIRST ({limit}) ROWS WITH TIES"


def listing(
    names: Names,
    queue: str,
    state: MessageState,
    limit: int,
    cursor: str | None,
    filters: dict[str, str | None],
) -> tuple[bytes, list[Parameter]]:
    """Return the statement for one page of a state and one more message, after the last message seen.

    A filter without an index is applied to a bounded number of messages. If the search stops there, the last message
    seen is returned too, whether it fits or not: the caller continues after it. Ready messages of a queue with turns
    between groups are listed by group; the first page reads from the queue which of the two orders applies.
    """
    parameters = [text(queue), number(limit + 1)]
    given = {name: len(parameters) + at for at, name in enumerate((n for n, v in filters.items() if v is not None), 1)}
    parameters += [text(value) for value in filters.values() if value is not None]
    by_group = state == "ready" and cursor is not None and cursor.startswith('["')
    after = read_cursor(cursor, len(BY_GROUP) if by_group else len(ORDERS[state]))
    marks = []
    for place in after or ():
        parameters.append(text(place) if isinstance(place, str) else number(place))
        # A query, not a constant: with old statistics the planner would conclude that no rows follow it.
        marks.append(f"(SELECT ${len(parameters)})")
    if state != "ready" or after is not None:
        return _page(names, state, given, marks, by_group=by_group).encode(), parameters
    mode = f"(SELECT q.claim_mode > 0 FROM {names.of('queue')} q WHERE q.name = $1)"
    plain = _page(names, state, given, marks, by_group=False)
    grouped = _page(names, state, given, marks, by_group=True)
    statement = f"SELECT * FROM ({plain}) a WHERE {mode} IS NOT TRUE UNION ALL SELECT * FROM ({grouped}) b WHERE {mode}"
    return statement.encode(), parameters


def _page(names: Names, state: MessageState, given: dict[str, int], marks: list[str], *, by_group: bool) -> str:
    """Return the query for one page in one order.

    `given` has the parameters of the filters, `marks` those of the last message seen.
    """
    order = BY_GROUP if by_group else tuple(f"m.{column}" for column in ORDERS[state])
    table = names.of("completed" if state == "done" else "message")
    where = "" if state == "done" else f" AND m.state = {STATES[state]}"
    if by_group:
        where += " AND m.group_rank IS NOT NULL"
    fits = []
    for name, place in given.items():
        condition = f'm."{name}" = ${place}'
        if not _is_indexed(state, name, by_group=by_group):
            fits.append(f"({condition}) IS TRUE")
        elif name == "group":
            where += f" AND {BY_GROUP[0]} = ${place}"
        else:
            where += f" AND {condition}"
            if name == "key":
                where += " AND m.key IS NOT NULL"
    columns = ", ".join(order)
    if marks:
        where += f" AND ({columns}) > ({', '.join(marks)})"
    source = f"{table} m WHERE m.queue = (SELECT q.number FROM {names.of('queue')} q WHERE q.name = $1){where}"
    lease = "m.claimed_ms, m.lease_end_ms, m.worker" if state == "leased" else "NULL::bigint, NULL::bigint, NULL::text"
    is_by_id = "id" in given or ("key" in given and _is_indexed(state, "key"))
    fit, end = "true, false", f"ORDER BY {columns}"
    if not fits:
        source = f"({_first_rows(source, state, '$2', by_id=is_by_id, by_group=by_group)}) m"
    else:
        first = _first_rows(source, state, f"{SCANNED_MAX}", by_id=is_by_id, by_group=by_group)
        counted = (
            f"count(*) FILTER (WHERE m.fits) OVER (ORDER BY {columns}) AS place, count(*) OVER (ORDER BY {columns})"
        )
        source = f"(SELECT m.*, {counted} AS seen FROM (SELECT m.*, {' AND '.join(fits)} AS fits FROM ({first}) m) m) m"
        fit = f"m.fits, m.seen = {SCANNED_MAX}"
        chosen = f"(m.fits AND m.place <= $2 AND m.seen <= {SCANNED_MAX})"
        end = f"WHERE {chosen} OR m.seen = {SCANNED_MAX} ORDER BY {columns}"
    # Only as many of the fitting rows as fit into a page have their bodies, the first always: the rest is for the
    # next page.
    size = "octet_length(m.data)" if not fits else "CASE WHEN m.fits THEN octet_length(m.data) ELSE 0 END"
    before = f"coalesce(sum({size}) OVER (ORDER BY {columns} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)"
    data = f"CASE WHEN {before} < {CHUNK_BYTES_MAX} THEN m.data END"
    expires = "NULL::bigint" if state in ("dead", "done") else "m.expires_ms"
    key = "m.key" if state in ("dead", "done") else "coalesce(m.key, m.freed_key)"
    return (
        f'SELECT m.id, {key}, m."group", m.rank, m.token, m.deliveries, m.attempts, m.published_ms, m.ready_ms, '
        f"{data}, {lease}, m.cancel_requested, m.ended_ms, m.reason, m.error_type, m.error, {fit}, "
        f"json_build_array({columns})::text, {expires} FROM {source} {end}"
    )


def read_listing(state: MessageState, limit: int, result: PGresult) -> Page:
    """Return the page, and the cursor of the next one."""
    rows = rows_of(result)
    fitting = [row for row in rows if row[18]]
    limit = min(limit, sum(row[9] is not None for row in fitting))
    messages = [
        Stored(
            row[0], state, row[1], row[2], 9 - row[3], row[4], row[5], row[6], row[7], row[8], row[9], row[10], row[11],
            row[12], row[13], row[14], row[15], row[16], row[17], row[21],
        )
        for row in fitting[:limit]
    ]  # fmt: skip
    if len(fitting) > limit:
        return Page(messages, fitting[limit - 1][20])
    # The search may have stopped at the last message seen.
    return Page(messages, rows[-1][20] if rows and rows[-1][19] else None)


def read_stats(queue: str, result: PGresult) -> StatsRecord:
    """Read the figures of one queue."""
    return read_figures(queue, one(result) or b"{}")


def read_figures(queue: str, figures: bytes | str) -> StatsRecord:
    """Read the figures of one queue from their JSON object."""
    reply: dict[str, Any] = msgspec.json.decode(figures)
    c: dict[str, int] = reply["counts"]
    ledger = Ledger(
        c["published"], c["redriven"], c["ready"], c["delayed"], c["waiting"], c["leased"], c["done"], c["dead"],
        c["dropped"], c["cancelled"], c["replaced"], c["dead_kept"], c["claims"], c["first_claims"],
        {cause: c[f"again_{cause}"] for cause in REDELIVERY_CAUSES},
        c["expired"], c["released"], c["retried"], c["snoozed"], c["duplicates"], c["transferred"],
        c["over_cap"],
    )  # fmt: skip
    return StatsRecord(
        queue, reply["now"], ledger, reply["paused"], reply["oldest_ready"], reply["oldest_leased"], reply["next_due"],
        reply["next_lease"], reply["sleepers"], reply["first"], reply["last"], reply["readers"],
        [
            MinuteRecord(minute["minute"] * 60_000, read_counts(minute))
            for minute in reply["minutes"] or ()
        ],
        changes=[ChangeRecord(*change) for change in reply["changes"] or ()],
    )  # fmt: skip


def read_counts(minute: dict[str, int | None]) -> dict[str, int]:
    """Return the counters of a minute; counters that did not exist then are null."""
    return {name: count for name in MINUTE_COUNTERS if (count := minute[name]) is not None}


def _spread(values: list[Any] | None, count: int) -> list[Any]:
    """Return a field of an entry for each of its events."""
    if values is None:
        return [None] * count
    return values * count if len(values) == 1 else values


def _events(queue: str, row: tuple[Any, ...]) -> list[EventRecord]:
    """Return the events of one entry."""
    before, count, at_ms, event, operation, schedule = row[:6]
    check_events(queue, before + count, (event,))
    fields = [_spread(values, count) for values in row[6:]]
    return [
        EventRecord(
            queue, before + index, at_ms, event, id, key, group, None if rank is None else 9 - rank, token, claims,
            deliveries, attempts, worker, due, cause, reason, error_type, run, wait, size, operation, chain, schedule,
            None if body is None else bytes(body), error,
        )
        for index, (
            id, key, group, rank, token, deliveries, attempts, worker, due, cause, reason, error_type, run, wait, size,
            body, chain, claims, error,
        ) in enumerate(zip(*fields, strict=True), 1)
    ]  # fmt: skip


def read_journal(queue: str, after: int, limit: int, result: PGresult) -> EventPage:
    """Return the events after a number."""
    (head, *_), *rows = rows_of(result)
    first, newest = msgspec.json.decode(head, type=tuple[int, int])
    start = max(after, first - 1)
    events = [event for row in rows for event in _events(queue, row[1:]) if event.number > start][:limit]
    return EventPage(events, events[-1].number if events else start, first, newest)


def read_trace(queue: str, message_id: str, result: PGresult) -> TracePage:
    """Return the events of one message."""
    (head, *_), *rows = rows_of(result)
    first, _ = msgspec.json.decode(head, type=tuple[int, int])
    events = [event for row in rows for event in _events(queue, row[1:])]
    return TracePage([event for event in events if event.message_id == message_id and event.number >= first], None)
