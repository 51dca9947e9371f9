"""Bulk reads of the journal and the messages of a PostgreSQL store: COPY in, Arrow out, no Python object per row.

The only module besides the store that knows its tables (`migrations/`). A journal entry holds the events of one kind of
one step, as arrays; an array of one element applies to all of them. Entries are expanded here, column by column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waypost.errors import MissingExtra, StoreFailed, StoreUnavailable
from waypost.policy import PRIORITY_MAX
from waypost.store.bulk.columns import batch_of, constant, envelope_columns, numbers
from waypost.store.bulk.reader import BulkConnection, PageSize, Span
from waypost.store.bulk.tables import ENVELOPE_COLUMNS, JOURNAL, MESSAGES
from waypost.store.known_events import check_events
from waypost.store.postgres.constants import STATES
from waypost.store.postgres.statement import PostgresCall, number, rows_of, text
from waypost.values import MessageState

if TYPE_CHECKING:
    from waypost.store.postgres.store import PostgresStore

#: Events per page: a whole page is in memory, and may be read again.
EVENTS_A_PAGE = 200_000
FIRST_PAGE_EVENTS = 5_000
MESSAGES_A_PAGE = 20_000
FIRST_PAGE_MESSAGES = 200
PAGE_BYTES = 32_000_000

#: The columns of a bulk read, by the arrays of an entry that hold them. Newer tables may have more than older ones.
ARRAYS = {
    "message_id": "ids", "key": "keys", "group": "groups", "priority": "ranks", "token": "tokens", "claims": "claims",
    "deliveries": "deliveries", "attempts": "attempts", "worker": "workers", "due_ms": "dues", "cause": "causes",
    "reason": "reasons", "error_type": "error_types", "run_ms": "runs", "wait_ms": "waits", "size": "sizes",
    "chain_id": "chains", "schedule": "schedules",
}  # fmt: skip
#: Columns that are not stored as such: stored once per entry, stored only where values differ, or derived from the
#: data.
SELECTED = {
    "schedules": "ARRAY[e.schedule] AS schedules",
    "claims": "coalesce(e.claims, e.tokens) AS claims",
    "size": "length(m.data)::bigint AS size",
    "key": "coalesce(m.key, m.freed_key) AS key",
}
_LEASE_COLUMNS = frozenset(("claimed_ms", "lease_end_ms", "worker"))


class PostgresBulkReader:
    """Bulk reads of a PostgreSQL store. Planning uses the store's connection, reading one of ADBC."""

    def __init__(self, store: PostgresStore, connection: BulkConnection) -> None:
        self._store = store
        self._connection = connection
        self._run = connection.run
        self._adbc: Any = None
        self._queues: dict[str, int | None] = {}
        self._entry_columns: frozenset[str] | None = None

    def close(self) -> None:
        """Close the connection of ADBC."""
        self._drop()

    # ---- running queries -------------------------------------------------------------------------------------

    def _drop(self) -> None:
        connection, self._adbc = self._adbc, None
        if connection is not None:
            try:
                connection.close()
            except Exception:  # closing a lost connection fails too
                return

    def _copied(self, query: str) -> Any:
        """Return the result of a query as one Arrow table; repeated within a budget if the connection fails."""
        return self._connection.attempt(lambda: self._copy(query))

    def _copy(self, query: str) -> Any:
        try:
            from adbc_driver_manager import Error, OperationalError
            from adbc_driver_postgresql import dbapi
        except ImportError:
            raise MissingExtra(
                'reading PostgreSQL from Spark needs the ADBC driver: pip install "waypost[spark,postgres]"'
            ) from None
        try:
            if self._adbc is None:
                self._adbc = dbapi.connect(self._store.source.uri(), autocommit=True)
            with self._adbc.cursor() as cursor:
                cursor.execute(query)
                return cursor.fetch_arrow_table()
        except OperationalError as error:
            self._drop()
            raise StoreUnavailable(f"the PostgreSQL server does not answer ({_first_line(error)})") from None
        except Error as error:
            if str(getattr(error, "sqlstate", None) or "").startswith(("57P", "08")) or not getattr(
                error, "sqlstate", ""
            ):
                self._drop()
                raise StoreUnavailable(f"the PostgreSQL server does not answer ({_first_line(error)})") from None
            raise StoreFailed(f"PostgreSQL refused to read: {_first_line(error)}") from None

    def _query(self, queue: str, query: str, *parameters: tuple[int, bytes | None]) -> list[tuple[Any, ...]]:
        return self._run(PostgresCall("read", queue, query.encode(), parameters, rows_of))

    def _number_of(self, queue: str) -> int | None:
        if self._queues.get(queue) is None:
            found = self._query(
                queue, f"SELECT number FROM {self._store.names.of('queue')} WHERE name = $1", text(queue)
            )
            self._queues[queue] = int(found[0][0]) if found else None
        return self._queues[queue]

    def _columns_of_entries(self) -> frozenset[str]:
        if self._entry_columns is None:
            found = self._query(
                "",
                "SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 "
                "AND NOT a.attisdropped",
                text(self._store.names.of("entry")),
            )
            self._entry_columns = frozenset(name for (name,) in found)
        return self._entry_columns

    # ---- the journal -------------------------------------------------------------------------------------------

    def journal(self, queue: str, after: int, to: int, columns: Sequence[str]) -> Iterator[Any]:
        """Yield events with numbers in (after, to]. The planning step has assigned the numbers."""
        known = self._number_of(queue)
        if known is None:
            return
        after = max(after, self._run(self._store.journal(queue, after, 1)).first_kept - 1)
        there = self._columns_of_entries() | {"schedules"}
        arrays = {name: array for name, array in ARRAYS.items() if name in columns and array in there}
        if any(name in columns for name in ENVELOPE_COLUMNS):
            arrays["body"] = "bodies"
        page = PageSize(FIRST_PAGE_EVENTS, EVENTS_A_PAGE, PAGE_BYTES)
        while after < to:
            page_to = min(to, after + page.rows)
            table = self._copied(self._entries(known, after, page_to, sorted(set(arrays.values()))))
            page.learn(page_to - after, table.nbytes)
            for entries in table.to_batches():
                if entries.num_rows:
                    yield from _spread(queue, entries, arrays, after, page_to, columns)
            after = page_to

    def unnumbered(self, queue: str) -> set[str]:
        """Return the messages of events after the last number: an open transaction may precede them."""
        known = self._number_of(queue)
        if known is None:
            return set()
        names = self._store.names
        found = self._query(
            queue,
            f"SELECT DISTINCT i.id FROM {names.of('entry')} e CROSS JOIN LATERAL unnest(e.ids) i (id) "
            f"WHERE e.queue = $1 AND i.id IS NOT NULL AND (e.xid, e.seq) > (coalesce((SELECT m.xid FROM "
            f"{names.of('mark')} m WHERE m.queue = $1 ORDER BY m.number DESC LIMIT 1), 0), coalesce((SELECT m.seq FROM "
            f"{names.of('mark')} m WHERE m.queue = $1 ORDER BY m.number DESC LIMIT 1), 0))",
            number(known),
        )
        return {message_id for (message_id,) in found}

    def _entries(self, queue: int, after: int, to: int, arrays: Sequence[str]) -> str:
        """Return the entries that contain these events, each with the number of events before it.

        A mark has the number of its entry's last event; the numbers after it are counted. All values in the query are
        our own.
        """
        names = self._store.names
        mark, entry = names.of("mark"), names.of("entry")
        low = (
            "SELECT x.number, x.xid, x.seq FROM (SELECT m.number, m.xid, m.seq FROM "
            f"{mark} m WHERE m.queue = {queue} AND m.number <= {after} ORDER BY m.number DESC LIMIT 1) x "
            f"UNION ALL SELECT 0, 0, 0 WHERE NOT EXISTS (SELECT FROM {mark} m WHERE m.queue = {queue} "
            f"AND m.number <= {after})"
        )
        high = (
            f"SELECT m.xid, m.seq FROM {mark} m WHERE m.queue = {queue} AND m.number >= {to} ORDER BY m.number LIMIT 1"
        )
        selected = "".join(", " + SELECTED.get(name, f"e.{name}") for name in arrays)
        return (
            f"WITH low AS MATERIALIZED ({low}), high AS MATERIALIZED ({high}) "
            "SELECT (low.number + sum(e.count) OVER (ORDER BY e.xid, e.seq ROWS UNBOUNDED PRECEDING))::bigint "
            f"- e.count AS before, e.count, e.at_ms, e.event, e.operation{selected} "
            f"FROM low CROSS JOIN high JOIN {entry} e "
            f"ON e.queue = {queue} AND (e.xid, e.seq) > (low.xid, low.seq) AND (e.xid, e.seq) <= (high.xid, high.seq) "
            "ORDER BY e.xid, e.seq"
        )

    # ---- messages ----------------------------------------------------------------------------------------------

    def spans(self, queue: str, state: MessageState, parts: int) -> list[Span]:
        """Return parts by message id, which increases with time."""
        where = f"m.queue = $1 AND m.state = {STATES[state]}"
        known = self._number_of(queue)
        if known is None:
            return []
        message = self._store.names.of("message")
        total = int(self._query(queue, f"SELECT count(*) FROM {message} m WHERE {where}", number(known))[0][0])
        bounds: list[str] = []
        for part in range(1, min(parts, total)):
            found = self._query(
                queue,
                f"SELECT m.id FROM {message} m WHERE {where} ORDER BY m.id LIMIT 1 OFFSET $2",
                number(known),
                number(total * part // parts),
            )
            if found:
                bounds.append(found[0][0])
        return [
            Span(queue, state, low, high, total // (len(bounds) + 1))
            for low, high in zip([None, *bounds], [*bounds, None], strict=True)
        ]

    def messages(self, span: Span, columns: Sequence[str]) -> Iterator[Any]:
        """Yield the messages of a span, a page at a time."""
        known = self._number_of(span.queue)
        if known is None:
            return
        hidden = frozenset() if span.state == "leased" else _LEASE_COLUMNS
        if span.state == "dead":
            hidden |= {"expires_ms"}
        names = [
            name
            for name in columns
            if name not in ("queue", "state", "priority", "id", *ENVELOPE_COLUMNS) and name not in hidden
        ]
        selected = "".join(", " + SELECTED.get(name, f'm."{name}"') for name in names)
        bodies = any(name in columns for name in ENVELOPE_COLUMNS)
        data = ", m.data" if bodies else ""
        table = f"{self._store.names.of('message')} m"
        low, compare = span.low or "", ">="
        page = PageSize(FIRST_PAGE_MESSAGES, MESSAGES_A_PAGE, PAGE_BYTES)
        high = "" if span.high is None else f" AND m.id < {_quoted(span.high)}"
        while True:
            limit = page.rows
            found = self._copied(
                f"SELECT m.id, m.rank{selected}{data} FROM {table} WHERE m.queue = {known} "
                f"AND m.state = {STATES[span.state]} AND m.id {compare} {_quoted(low)}{high} "
                f"ORDER BY m.id LIMIT {limit}"
            ).combine_chunks()
            if found.num_rows:
                yield _messages_batch(span, found, names, columns, bodies)
            if found.num_rows < limit:
                return
            page.learn(found.num_rows, found.nbytes)
            low, compare = found.column("id")[-1].as_py(), ">"


def _first_line(error: Exception) -> str:
    """Return the first line of the driver's error, which contains no connection string."""
    return str(error).strip().partition("\n")[0][:200]


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _messages_batch(span: Span, found: Any, names: Sequence[str], columns: Sequence[str], bodies: bool) -> Any:
    arrays = {name: _one(found.column(name)).cast(MESSAGES.arrow_type(name)) for name in names}
    arrays["id"] = _one(found.column("id"))
    arrays["queue"] = constant(span.queue, found.num_rows)
    arrays["state"] = constant(span.state, found.num_rows)
    arrays["priority"] = pc.subtract(PRIORITY_MAX, _one(found.column("rank")).cast(pa.int32())).cast(pa.int32())
    if bodies:
        arrays |= envelope_columns(found.column("data").to_pylist(), columns)
    return batch_of(MESSAGES, columns, arrays, found.num_rows)


def _one(column: Any) -> Any:
    """Return a column of a table as one array."""
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def _spread(
    queue: str, entries: Any, arrays: dict[str, str], after: int, to: int, columns: Sequence[str]
) -> Iterator[Any]:
    """Return entries as one row for each of their events with numbers in (after, to]."""
    counts = entries.column("count").to_numpy(zero_copy_only=False).astype(np.int64)
    before = entries.column("before").to_numpy(zero_copy_only=False).astype(np.int64)
    starts = np.cumsum(counts) - counts
    index = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(index)) - starts[index]
    rows = before[index] + place + 1
    wanted = (rows > after) & (rows <= to)
    if not wanted.all():
        index, place, rows = index[wanted], place[wanted], rows[wanted]
    if not len(rows):
        return
    parents = pa.array(index)
    events = entries.column("event").take(parents)
    check_events(queue, int(rows[-1]), pc.unique(events).to_pylist())
    made: dict[str, Any] = {
        "queue": constant(queue, len(rows)),
        "number": numbers(rows, pa.int64()),
        "at_ms": entries.column("at_ms").take(parents),
        "event": events,
    }
    if "operation_id" in columns:
        made["operation_id"] = entries.column("operation").take(parents)
    for name, array in arrays.items():
        values = _values(entries.column(array), counts, index, place)
        if name == "body":
            made |= envelope_columns(values.to_pylist(), columns)
        elif name == "priority":
            made[name] = pc.subtract(PRIORITY_MAX, values.cast(pa.int32())).cast(pa.int32())
        else:
            made[name] = values.cast(JOURNAL.arrow_type(name))
    yield batch_of(JOURNAL, columns, made, len(rows))


def _values(lists: Any, counts: Any, index: Any, place: Any) -> Any:
    """Return the value of each event: its element of the array, the only element, or null without one."""
    offsets = lists.offsets.to_numpy()[: len(lists) + 1].astype(np.int64)
    lengths = np.diff(offsets)
    missing = lists.is_null().to_numpy(zero_copy_only=False)
    own = (lengths == counts)[index]
    picked = offsets[:-1][index] + np.where(own, place, 0)
    if missing.any():
        return lists.values.take(pa.array(picked, mask=missing[index]))
    return lists.values.take(pa.array(picked))
