"""Bulk reads of the journal and the messages of a SQLite store, by short queries, so that the log does not grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from waypost.store.bulk.columns import batch_of, constant, envelope_columns
from waypost.store.bulk.reader import BulkConnection, PageSize, Span
from waypost.store.bulk.tables import ENVELOPE_COLUMNS, JOURNAL, MESSAGES, Table
from waypost.store.sqlite.entries import events_between
from waypost.store.sqlite.schema import STATE_NUMBERS
from waypost.store.sqlite.step import SqliteCall, Step
from waypost.values import MessageState

if TYPE_CHECKING:
    from waypost.store.sqlite.store import SqliteStore

ROWS_A_PAGE = 20_000
FIRST_PAGE_ROWS = 200
PAGE_BYTES = 32_000_000
#: The size of a row without its body, roughly.
ROW_BYTES = 500

_HELD_KEY, _PUBLISHED_KEY = 'm."key"', "coalesce(m.key, m.freed_key)"
_LEASE_COLUMNS = frozenset(("claimed_ms", "lease_end_ms", "worker"))
_QUEUE = "(SELECT number FROM {queue} WHERE name = ?)"


class SqliteBulkReader:
    """Bulk reads of a SQLite store: one file on the machine where everything runs."""

    def __init__(self, store: SqliteStore, connection: BulkConnection) -> None:
        self._store = store
        self._run = connection.run

    def close(self) -> None:
        """Do nothing: nothing was opened."""

    def _rows(self, query: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        return self._run(SqliteCall("read", lambda step: step.execute(query, parameters).fetchall(), writes=False))

    def _events(self, queue: str, after: int, to: int, fields: Sequence[str]) -> list[tuple[Any, ...]]:
        def read(step: Step) -> list[tuple[Any, ...]]:
            return events_between(step.queue_for_reading(queue), after, to, to - after, fields)

        return self._run(SqliteCall("read", read, writes=False))

    def journal(self, queue: str, after: int, to: int, columns: Sequence[str]) -> Iterator[Any]:
        """Yield events with numbers in (after, to], a page of numbers at a time."""
        names = [name for name in columns if name != "queue" and name not in ENVELOPE_COLUMNS]
        bodies = any(name in ENVELOPE_COLUMNS for name in columns)
        fields = [*names, *(["body"] if bodies else [])]
        # Trimmed events no longer exist, although they may not have been deleted yet.
        after = max(after, self._run(self._store.journal(queue, after, 1)).first_kept - 1)
        page = PageSize(FIRST_PAGE_ROWS, ROWS_A_PAGE, PAGE_BYTES)
        while after < to:
            page_to = min(to, after + page.rows)
            rows = self._events(queue, after, page_to, fields)
            if rows:
                yield _batch(JOURNAL, queue, columns, ["number", *names], rows, {})
                page.learn(len(rows), _size(rows, bodies))
            after = page_to

    def unnumbered(self, queue: str) -> set[str]:
        """Return nothing: an event has its number when it is written."""
        return set()

    def spans(self, queue: str, state: MessageState, parts: int) -> list[Span]:
        """Return parts by the order in which messages were stored in the file."""
        where = f"WHERE queue = {_QUEUE} AND state = {STATE_NUMBERS[state]}"
        total = self._rows(f"SELECT count(*) FROM {{message}} {where}", (queue,))[0][0]
        bounds: list[str] = []
        for part in range(1, min(parts, total)):
            found = self._rows(
                f"SELECT seq FROM {{message}} {where} ORDER BY seq LIMIT 1 OFFSET ?", (queue, total * part // parts)
            )
            if found:
                bounds.append(str(found[0][0]))
        return [
            Span(queue, state, low, high, total // (len(bounds) + 1))
            for low, high in zip([None, *bounds], [*bounds, None], strict=True)
        ]

    def messages(self, span: Span, columns: Sequence[str]) -> Iterator[Any]:
        """Yield the messages of a span, a page at a time."""
        hidden = frozenset() if span.state == "leased" else _LEASE_COLUMNS
        if span.state == "dead":
            hidden |= {"expires_ms"}
        names = [
            name for name in columns if name not in ("queue", "state", "size", *ENVELOPE_COLUMNS) and name not in hidden
        ]
        selected = _selected([f"m.{name}" for name in names], "e.data")
        query = (
            f"SELECT m.seq, {selected.replace(_HELD_KEY, _PUBLISHED_KEY)} FROM {{message}} m "
            f"JOIN {{envelope}} e ON e.seq = m.seq WHERE m.queue = {_QUEUE} AND m.state = {STATE_NUMBERS[span.state]} "
            "AND m.seq >= ? AND m.seq < ? ORDER BY m.seq LIMIT ?"
        )
        low = int(span.low or 0)
        high = int(span.high or 2**63 - 1)
        page = PageSize(FIRST_PAGE_ROWS, ROWS_A_PAGE, PAGE_BYTES)
        while True:
            limit = page.rows
            rows = self._rows(query, (span.queue, low, high, limit))
            if rows:
                extra = {
                    "state": constant(span.state, len(rows)),
                    "size": pa.array([len(row[-1]) for row in rows], pa.int64()),
                }
                yield _batch(MESSAGES, span.queue, columns, names, [row[1:] for row in rows], extra)
            if len(rows) < limit:
                return
            page.learn(len(rows), _size(rows, True))
            low = rows[-1][0] + 1


def _size(rows: Sequence[tuple[Any, ...]], bodies: bool) -> int:
    """Return roughly how many bytes a page has; bodies are the last columns."""
    return len(rows) * ROW_BYTES + (sum(len(row[-1] or b"") for row in rows) if bodies else 0)


def _selected(names: Sequence[str], envelope: str | None) -> str:
    quoted = [f'{prefix}{dot}"{name}"' for prefix, dot, name in (_parted(name) for name in names)]
    return ", ".join([*quoted, *([envelope] if envelope else [])]) or "1"


def _parted(name: str) -> tuple[str, str, str]:
    prefix, dot, column = name.rpartition(".")
    return prefix, dot, column


def _batch(
    table: Table,
    queue: str,
    columns: Sequence[str],
    names: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
    extra: dict[str, Any],
) -> Any:
    """Return rows as a batch: their values are those of `names`, then the envelope if there is one."""
    values = list(zip(*rows, strict=True))
    arrays = dict(extra)
    for name, column in zip(names, values, strict=False):
        if name == "cancel_requested":
            column = tuple(map(bool, column))
        arrays[name] = pa.array(column, table.arrow_type(name))
    arrays["queue"] = constant(queue, len(rows))
    if len(values) > len(names):
        arrays |= envelope_columns(values[-1], columns)
    return batch_of(table, columns, arrays, len(rows))
