"""Calls as a part of the user's own transaction on the file of a SQLite store.

No transaction is begun or committed here. A step that fails is rolled back to its beginning, and the rest of the
transaction stays. The row and text factories of the user's connection are replaced during a step.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from waypost.errors import ConfigurationError, InvalidInput, WaypostError
from waypost.store.aiosqlite_internals import connection_of, is_aiosqlite, run_in_thread
from waypost.store.port import AsyncExecutor, Call, Executor, Woken, blocks
from waypost.store.sqlite.chains import deliver_notices
from waypost.store.sqlite.connection import same_file
from waypost.store.sqlite.schema import TRANSACTION_WAKES, check_schema, complete
from waypost.store.sqlite.step import SqliteCall, Step
from waypost.store.transactions import CallerTransaction, Checks, another_database

if TYPE_CHECKING:
    from waypost.store.sqlite.store import SqliteStore

T = TypeVar("T")

#: How long SQLite waits for the write lock.
LOCK_WAIT_SECONDS = 5.0


class SqliteTransactions:
    """Steps on the user's own connection. Each step checks the connection, which costs no round trip."""

    library = "sqlite3"
    waits = False
    notifies = False
    engine = None

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.on_busy: Callable[[], None] | None = None

    def checks(self, connection: Any, queue: str) -> Checks:
        if not self.needs_no_checks(connection, queue):
            raise another_database(self._store.kind)
        yield from ()

    def needs_no_checks(self, connection: Any, queue: str) -> bool:
        return isinstance(connection, sqlite3.Connection) or is_aiosqlite(connection)

    def executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> Executor:
        return SqliteTransactionExecutor(self._store, connection, queue)

    def async_executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> AsyncExecutor:
        if is_aiosqlite(connection):
            inner = SqliteTransactionExecutor(self._store, connection_of(connection), queue)
            return AiosqliteTransactionExecutor(inner, connection)
        return AsyncSqliteTransactionExecutor(SqliteTransactionExecutor(self._store, connection, queue))

    @contextmanager
    def begin(self, executor: Callable[[], Executor]) -> Iterator[sqlite3.Connection]:
        # By Python's own rules the transaction begins with the first write, so writers do not wait for a handler that
        # only reads.
        with closing(sqlite3.connect(self._store.path, timeout=LOCK_WAIT_SECONDS)) as connection, connection:
            yield connection

    @asynccontextmanager
    async def begin_async(self, executor: Callable[[], Awaitable[AsyncExecutor]]) -> AsyncIterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._store.path, timeout=LOCK_WAIT_SECONDS)) as connection, connection:
            yield connection


#: Takes the write lock before anything is read; the connection begins the transaction in its own way.
_LOCK_FOR_WRITING = "UPDATE {meta} SET value = value WHERE 0"
#: Other processes watch the file, and find by this number that a commit has woken sleepers.
_COUNT_WAKE = """
    INSERT INTO {meta} (name, value) VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET value = value + 1"""
_SAVE, _BACK, _KEEP = "SAVEPOINT waypost", "ROLLBACK TO waypost", "RELEASE waypost"


class SqliteTransactionExecutor:
    """Runs calls in the caller's transaction."""

    def __init__(self, store: SqliteStore, connection: sqlite3.Connection, queue: str) -> None:
        self._store = store
        self._connection = connection
        self._queue = queue

    def check(self) -> None:
        """Refuse a connection that is not in a transaction of the store's own file."""
        connection = self._connection
        attached = [(name, path) for _, name, path in connection.execute("PRAGMA database_list") if name != "temp"]
        main = dict(attached).get("main")
        if main is None or not same_file(self._store.path, main):
            raise ConfigurationError(
                "this connection is to another file than the SQLite store of this client, so they cannot be committed "
                "together; nothing was published. Keep your tables and waypost's in one file"
            )
        if len(attached) > 1:
            raise ConfigurationError(
                "this connection has other databases attached, which are not committed together with this one after a "
                "crash; detach them"
            )
        if not connection.in_transaction and not begins_transactions(connection):
            raise InvalidInput(
                "this connection commits each statement by itself, so a crash could keep a part of your work without "
                "the rest; execute BEGIN IMMEDIATE first, or connect with isolation_level other than None"
            )
        if not check_schema(connection, self._store.spelling, self._store.path):
            raise ConfigurationError(
                f"{self._store.path} does not have waypost's tables yet; nothing was published. Open the client first "
                "(`with post:`, `post.open()`, the lifespan of your application), which creates them"
            )
        complete(connection, self._store.spelling)

    def run(self, call: Call[T]) -> T:
        """Run one call as a part of the transaction."""
        mine = cast("SqliteCall[T]", call)
        connection = self._connection
        rows, texts = connection.row_factory, connection.text_factory
        connection.row_factory, connection.text_factory = None, str
        try:
            self.check()
            connection.execute(self._store.spelling[_LOCK_FOR_WRITING])
            connection.execute(_SAVE)
            try:
                result = self._step(mine)
            except BaseException:
                connection.execute(_BACK)
                connection.execute(_KEEP)
                raise
            connection.execute(_KEEP)
            return result
        finally:
            connection.row_factory, connection.text_factory = rows, texts

    def _step(self, call: SqliteCall[T]) -> T:
        store = self._store
        step = Step(self._connection, store.spelling, store.clock(), replay_ttl_ms=None, fills=call.fills)
        if call.fills:
            policy = step.queue_for_reading(self._queue).policy
            if policy.max_pending is not None and policy.overload == "block":
                raise blocks(self._queue)
        result = call.step(step)
        if step.notices:
            deliver_notices(step)
        if step.waiters_to_wake or (isinstance(result, Woken) and any(result.wake.values())):
            step.execute(_COUNT_WAKE, (TRANSACTION_WAKES,))
        step.finish()
        return result

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        """Run calls in order."""
        results: list[T | Exception] = []
        for call in calls:
            try:
                results.append(self.run(call))
            except WaypostError as error:
                results.append(error)
        return results

    def close(self) -> None:
        """Do nothing: the connection is the caller's."""


def begins_transactions(connection: sqlite3.Connection) -> bool:
    """Return whether a connection begins a transaction by itself before it writes."""
    try:
        autocommit = getattr(connection, "autocommit", None)
    except sqlite3.ProgrammingError:
        autocommit = None  # it can be read only in the connection's own thread, as that of aiosqlite
    if isinstance(autocommit, bool):  # from Python 3.12 on; otherwise isolation_level decides
        return not autocommit
    return connection.isolation_level is not None


class AsyncSqliteTransactionExecutor:
    """The same for an event loop: with a file there is nothing to wait for but the disk."""

    def __init__(self, executor: SqliteTransactionExecutor) -> None:
        self._sync = executor

    async def run(self, call: Call[T]) -> T:
        return self._sync.run(call)

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return self._sync.run_many(calls)

    async def close(self) -> None:
        """Do nothing: the connection is the caller's."""


class AiosqliteTransactionExecutor:
    """The same on a connection of aiosqlite, in its thread."""

    def __init__(self, executor: SqliteTransactionExecutor, connection: Any) -> None:
        self._sync = executor
        self._connection = connection

    async def run(self, call: Call[T]) -> T:
        return await run_in_thread(self._connection, self._sync.run, call)

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return await run_in_thread(self._connection, self._sync.run_many, list(calls))

    async def close(self) -> None:
        """Do nothing: the connection is the caller's."""
