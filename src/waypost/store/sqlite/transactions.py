"""Transactions of the user's on the file of a SQLite store."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import TYPE_CHECKING, Any

from waypost.store.port import AsyncExecutor, Executor
from waypost.store.sqlite.within import AsyncSqliteWithin, SqliteWithin
from waypost.store.transactions import CallerTransaction, Checks, another_database

if TYPE_CHECKING:
    from waypost.store.sqlite.store import SqliteStore

#: SQLite waits so long for its turn to write.
TURN_SECONDS = 5.0


class SqliteTransactions:
    """Steps on the user's own connection. Each of them looks at the connection anew, which costs no round trip."""

    library = "sqlite3"
    waits = False
    engine = None

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    def checks(self, connection: Any, queue: str) -> Checks:
        if not isinstance(connection, sqlite3.Connection):
            raise another_database(self._store.kind)
        yield from ()

    def is_checked(self, connection: Any, queue: str) -> bool:
        return isinstance(connection, sqlite3.Connection)

    def executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> Executor:
        return SqliteWithin(self._store, connection, queue)

    def async_executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> AsyncExecutor:
        return AsyncSqliteWithin(SqliteWithin(self._store, connection, queue))

    @contextmanager
    def begin(self, executor: Callable[[], Executor]) -> Iterator[sqlite3.Connection]:
        # By Python's own rules it begins with the first write, so that nobody waits for a handler that only reads.
        with closing(sqlite3.connect(self._store.path, timeout=TURN_SECONDS)) as connection, connection:
            yield connection

    @asynccontextmanager
    async def begin_async(self, executor: Callable[[], Awaitable[AsyncExecutor]]) -> AsyncIterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._store.path, timeout=TURN_SECONDS)) as connection, connection:
            yield connection
