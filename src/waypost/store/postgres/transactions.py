"""Transactions of the user's in the database of a PostgreSQL store.

It is looked once for each connection where it leads, and once for each queue whether it is there: after that a call is
one statement.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from waypost.errors import UnusableClient
from waypost.store.port import AsyncExecutor, Call, Executor
from waypost.store.postgres.within import open_queue, place, read, spelled, within
from waypost.store.transactions import CallerTransaction, Checks, another_database

if TYPE_CHECKING:
    from waypost.store.postgres.store import PostgresStore

T = TypeVar("T")
#: Queues that are known to be there; beyond so many, some are asked for again.
QUEUES_KNOWN_MAX = 10_000


class PostgresWithin:
    """Runs calls in a transaction that blocks."""

    def __init__(self, transaction: CallerTransaction) -> None:
        self._transaction = transaction

    def run(self, call: Call[T]) -> T:
        mine = within(call)
        return read(mine, self._transaction.fetch(*spelled(mine, self._transaction.style)))

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return [self.run(call) for call in calls]

    def close(self) -> None:
        """It is the caller's."""


class AsyncPostgresWithin:
    """The same for an event loop."""

    def __init__(self, transaction: CallerTransaction) -> None:
        self._transaction = transaction

    async def run(self, call: Call[T]) -> T:
        mine = within(call)
        return read(mine, await self._transaction.fetch(*spelled(mine, self._transaction.style)))

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        results: list[T | Exception] = []
        for call in calls:
            result: T = await self.run(call)
            results.append(result)
        return results

    async def close(self) -> None:
        """It is the caller's."""


class PostgresTransactions:
    """What a store knows of its users' connections."""

    library = "psycopg"
    waits = True

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        #: The database of the store, as it tells itself apart.
        self._mark: str | None = None
        #: Connections that lead there. They are their owners', and forgotten with them.
        self._known: WeakSet[Any] = WeakSet()
        self._queues: set[str] = set()

    @property
    def engine(self) -> object | None:
        return getattr(self._store.source, "engine", None)

    def checks(self, connection: Any, queue: str) -> Checks:
        names = self._store.names
        if connection not in self._known:
            if isinstance(connection, sqlite3.Connection):
                raise another_database(self._store.kind)
            theirs = yield False, place(names)
            if theirs != self._mark:
                # Ours may be of another day: tables can be made anew.
                self._mark = yield True, place(names)
            if theirs != self._mark:
                raise another_database(self._store.kind)
            self._known.add(connection)
        if queue not in self._queues:
            yield True, open_queue(names, queue)
            if len(self._queues) >= QUEUES_KNOWN_MAX:
                self._queues.clear()
            self._queues.add(queue)

    def is_checked(self, connection: Any, queue: str) -> bool:
        return connection in self._known and queue in self._queues

    def executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> Executor:
        return PostgresWithin(transaction)

    def async_executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> AsyncExecutor:
        return AsyncPostgresWithin(transaction)

    @contextmanager
    def begin(self, executor: Callable[[], Executor]) -> Iterator[Any]:
        if self.engine is not None:
            from sqlalchemy import Engine
            from sqlalchemy.orm import Session

            if not isinstance(self.engine, Engine):
                raise UnusableClient("this client has an AsyncEngine: its transactions are awaited")
            with Session(self.engine) as session, session.begin():
                yield session
            return
        lender: Any = executor()
        if not hasattr(lender, "lend"):
            raise UnusableClient("this client has an asyncio pool: its transactions are awaited")
        connection = lender.lend()
        try:
            with connection.transaction():
                yield connection
        finally:
            lender.take_back(connection)

    @asynccontextmanager
    async def begin_async(self, executor: Callable[[], Awaitable[AsyncExecutor]]) -> AsyncIterator[Any]:
        if self.engine is not None:
            from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

            if not isinstance(self.engine, AsyncEngine):
                raise UnusableClient(
                    "this client has an Engine, whose transactions block: use a handler that is not async"
                )
            async with AsyncSession(self.engine) as session, session.begin():
                yield session
            return
        lender: Any = await executor()
        if not hasattr(lender, "lend"):
            raise UnusableClient(
                "this client has a pool whose connections block: use a handler that is not async, or an "
                "AsyncConnectionPool"
            )
        connection = await lender.lend()
        try:
            async with connection.transaction():
                yield connection
        finally:
            await lender.take_back(connection)
