"""An inbox: a table in the user's database that records which messages were handled.

    inbox = Inbox()                                  # once: inbox_sql() creates its table

    with engine.begin() as connection:
        if inbox.first(message, connection):         # the id is recorded in this very transaction
            connection.execute(...)

For messages of any store. A message may be delivered again after a crash or an expired lease; its id was committed
together with the writes of the first delivery, so the second finds it and writes nothing. The second of two concurrent
deliveries waits for the commit of the first.

An entry is deleted after `keep` (a week). Choose it longer than a message can be redelivered.
"""

from __future__ import annotations

import random
import re
from datetime import timedelta
from typing import Any

from waypost.errors import ConfigurationError, InvalidName
from waypost.message import Message
from waypost.outbox.transaction_adapters import Transaction, adapt, check_mode, check_sqlite
from waypost.times import Duration

TABLE = "waypost_inbox"
KEEP = timedelta(days=7)
#: One call in `FORGET_EVERY` deletes up to `FORGET_MAX` old entries: together they keep up with any rate.
FORGET_EVERY, FORGET_MAX = 100, 1_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,62}")

_CREATE = """CREATE TABLE IF NOT EXISTS {table} (
    queue text NOT NULL,
    id text NOT NULL,
    at_ms bigint NOT NULL,
    PRIMARY KEY (queue, id)
);
CREATE INDEX IF NOT EXISTS {index} ON {table} (at_ms);
"""
_POSTGRES_NOW = "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_SQLITE_NOW = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
_FIRST = (
    "INSERT INTO {table} (queue, id, at_ms) VALUES ({one}, {two}, {now}) ON CONFLICT (queue, id) DO NOTHING RETURNING 1"
)
_POSTGRES_FORGET = (
    "WITH gone AS (DELETE FROM {table} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {table} WHERE at_ms < {now} - {one} "
    "ORDER BY at_ms LIMIT {two} FOR UPDATE SKIP LOCKED)) RETURNING 1) SELECT count(*)::text FROM gone"
)
_SQLITE_FORGET = (
    "DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} WHERE at_ms < {now} - ? ORDER BY at_ms LIMIT ?)"
)


def _check_name(name: str, what: str) -> str:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidName(
            f"a {what} has letters, digits, _ and $, begins with a letter or _, and has at most 63 characters"
        )
    return name


def _quote_table(table: str, schema: str | None) -> str:
    name = f'"{_check_name(table, "table name")}"'
    return name if schema is None else f'"{_check_name(schema, "schema name")}".{name}'


def inbox_sql(table: str = TABLE, *, schema: str | None = None) -> str:
    """Return the SQL that creates the table, for your migrations on PostgreSQL and SQLite. It may run again."""
    return _CREATE.format(table=_quote_table(table, schema), index=f'"{_check_name(table, "table name")[:58]}_at"')


class _Table:
    """The table and its statements."""

    def __init__(self, table: str = TABLE, *, schema: str | None = None, keep: Duration = KEEP) -> None:
        self._name = _quote_table(table, schema)
        seconds = keep.total_seconds() if isinstance(keep, timedelta) else keep
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 1 <= seconds <= 1e9:
            raise ConfigurationError(f"keep is a duration of at least a second, not {keep!r}")
        self._keep_ms = round(seconds * 1000)

    def _first(self, style: str) -> str:
        one, two = ("$1::text", "$2::text") if style == "$" else ("%s::text", "%s::text")
        return _FIRST.format(table=self._name, one=one, two=two, now=_POSTGRES_NOW)

    def _forget(self, style: str) -> str:
        one, two = ("$1::bigint", "$2::bigint") if style == "$" else ("%s::bigint", "%s::bigint")
        return _POSTGRES_FORGET.format(table=self._name, one=one, two=two, now=_POSTGRES_NOW)

    def _adapt(self, given: object, *, awaited: bool) -> Transaction:
        transaction = adapt(given)
        check_mode(transaction, awaited=awaited)
        return transaction

    def _first_in_sqlite(self, connection: Any, message: Message[Any]) -> bool:
        # Checked again: some settings of a connection of aiosqlite can be read only in its own thread.
        check_sqlite(connection)
        # Use the row count: the row factory and text factory of the connection are the caller's.
        cursor = connection.execute(
            _FIRST.format(table=self._name, one="?", two="?", now=_SQLITE_NOW).removesuffix(" RETURNING 1"),
            (message.queue, message.id),
        )
        first = bool(cursor.rowcount == 1)
        if first and random.randrange(FORGET_EVERY) == 0:
            self._forget_in_sqlite(connection)
        return first

    def _forget_in_sqlite(self, connection: Any) -> int:
        sql = _SQLITE_FORGET.format(table=self._name, now=_SQLITE_NOW)
        return int(connection.execute(sql, (self._keep_ms, FORGET_MAX)).rowcount)


def _is_sqlite(connection: Any) -> bool:
    import sqlite3

    return isinstance(connection, sqlite3.Connection)


class Inbox(_Table):
    """An inbox for sync transactions: a `table`, in a `schema`, whose entries are kept for `keep`."""

    def first(self, message: Message[Any], transaction: object) -> bool:
        """Record a message in the caller's transaction; return whether it was not recorded before."""
        adapter = self._adapt(transaction, awaited=False)
        connection = adapter.begin()
        if _is_sqlite(connection):
            return self._first_in_sqlite(connection, message)
        first = adapter.fetch(self._first(adapter.style), [message.queue, message.id]) is not None
        if first and random.randrange(FORGET_EVERY) == 0:
            adapter.fetch(self._forget(adapter.style), [self._keep_ms, FORGET_MAX])
        return first

    def forget(self, transaction: object) -> int:
        """Delete up to a thousand entries older than `keep`; return how many. `first` does so now and then."""
        adapter = self._adapt(transaction, awaited=False)
        connection = adapter.begin()
        if _is_sqlite(connection):
            return self._forget_in_sqlite(connection)
        return int(adapter.fetch(self._forget(adapter.style), [self._keep_ms, FORGET_MAX]))


class AsyncInbox(_Table):
    """An inbox for async transactions."""

    async def first(self, message: Message[Any], transaction: object) -> bool:
        """Record a message in the caller's transaction; return whether it was not recorded before."""
        from waypost.store.aiosqlite_internals import connection_of, is_aiosqlite, run_in_thread

        adapter: Any = self._adapt(transaction, awaited=True)
        connection = await adapter.begin() if adapter.awaited else adapter.begin()
        if is_aiosqlite(connection):
            return await run_in_thread(connection, self._first_in_sqlite, connection_of(connection), message)
        if _is_sqlite(connection):
            return self._first_in_sqlite(connection, message)
        first = await adapter.fetch(self._first(adapter.style), [message.queue, message.id]) is not None
        if first and random.randrange(FORGET_EVERY) == 0:
            await adapter.fetch(self._forget(adapter.style), [self._keep_ms, FORGET_MAX])
        return first

    async def forget(self, transaction: object) -> int:
        """Delete up to a thousand entries older than `keep`; return how many. `first` does so now and then."""
        from waypost.store.aiosqlite_internals import connection_of, is_aiosqlite, run_in_thread

        adapter: Any = self._adapt(transaction, awaited=True)
        connection = await adapter.begin() if adapter.awaited else adapter.begin()
        if is_aiosqlite(connection):
            return await run_in_thread(connection, self._forget_in_sqlite, connection_of(connection))
        if _is_sqlite(connection):
            return self._forget_in_sqlite(connection)
        return int(await adapter.fetch(self._forget(adapter.style), [self._keep_ms, FORGET_MAX]))
