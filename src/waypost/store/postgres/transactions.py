"""Verbs as a part of the caller's own transaction, on any driver.

A call is made for our own executors: `$1` for a value, and the value in the server's binary format. Other drivers need
Python values and their own placeholders; a cast names the type of each value. The reply is one text, as always.

Each connection is checked once (is it to the store's database?), and each queue once (does it exist?). After that a
call is one statement.
"""

from __future__ import annotations

import re
import sqlite3
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

from waypost.errors import ConfigurationError, UnusableClient
from waypost.store.aiosqlite_internals import is_aiosqlite
from waypost.store.port import AsyncExecutor, Call, Executor, blocks
from waypost.store.postgres.failures import map_error
from waypost.store.postgres.schema import Names
from waypost.store.postgres.statement import BOOL, BYTES, INT2, INT4, INT8, TEXT, Parameter, PostgresCall, number, one
from waypost.store.transactions import CallerTransaction, Checks, another_database
from waypost.values import ChainState

if TYPE_CHECKING:
    from waypost.store.postgres.store import PostgresStore

T = TypeVar("T")

#: Queues that are known to exist; beyond this number they are checked again.
QUEUES_KNOWN_MAX = 10_000
#: The position of the time for which a result is kept, in the parameters of a verb that runs once per operation.
TTL_PLACE = 4
_KINDS = {TEXT: "text", BYTES: "bytea", BOOL: "boolean", INT2: "smallint", INT4: "integer", INT8: "bigint"}
_ARRAYS = {1009: TEXT, 1001: BYTES, 1000: BOOL, 1005: INT2, 1007: INT4, 1016: INT8}
_MARK = re.compile(r"\$(\d+)")
_INT32 = struct.Struct("!i").unpack_from
#: The style of a driver's placeholders.
Style = str
NUMBERED, FORMAT = "$", "%"


class TransactionExecutor:
    """Runs calls in a transaction on a blocking driver."""

    def __init__(self, transaction: CallerTransaction) -> None:
        self._transaction = transaction

    def run(self, call: Call[T]) -> T:
        mine = without_replay(call)
        return read(mine, self._transaction.fetch(*format_statement(mine, self._transaction.style)))

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return [self.run(call) for call in calls]

    def close(self) -> None:
        """Do nothing: the transaction is the caller's."""


class AsyncTransactionExecutor:
    """The same for an event loop."""

    def __init__(self, transaction: CallerTransaction) -> None:
        self._transaction = transaction

    async def run(self, call: Call[T]) -> T:
        mine = without_replay(call)
        return read(mine, await self._transaction.fetch(*format_statement(mine, self._transaction.style)))

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        results: list[T | Exception] = []
        for call in calls:
            result: T = await self.run(call)
            results.append(result)
        return results

    async def close(self) -> None:
        """Do nothing: the transaction is the caller's."""


class PostgresTransactions:
    """The transactions of users in the database of a PostgreSQL store."""

    library = "psycopg"
    waits = True
    notifies = True
    on_busy: Callable[[], None] | None = None

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        #: The identity of the store's database.
        self._mark: str | None = None
        #: Connections to that database. They are weak references: the owners decide how long they live.
        self._known: WeakSet[Any] = WeakSet()
        self._queues: set[str] = set()

    @property
    def engine(self) -> object | None:
        return getattr(self._store.source, "engine", None)

    def checks(self, connection: Any, queue: str) -> Checks:
        names = self._store.names
        if connection not in self._known:
            if isinstance(connection, sqlite3.Connection) or is_aiosqlite(connection):
                raise another_database(self._store.kind)
            theirs = yield False, identify_database(names)
            if theirs != self._mark:
                # The stored mark may be out of date: the tables may have been created again.
                self._mark = yield True, identify_database(names)
            if theirs != self._mark:
                raise another_database(self._store.kind)
            self._known.add(connection)
        if queue not in self._queues:
            yield True, open_queue(names, queue)
            if len(self._queues) >= QUEUES_KNOWN_MAX:
                self._queues.clear()
            self._queues.add(queue)

    def needs_no_checks(self, connection: Any, queue: str) -> bool:
        return connection in self._known and queue in self._queues

    def executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> Executor:
        return TransactionExecutor(transaction)

    def async_executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> AsyncExecutor:
        return AsyncTransactionExecutor(transaction)

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


# ---- a call in the form of another driver ----------------------------------------------------------------------------


def without_replay(call: Call[T]) -> PostgresCall[T]:
    """Return a call that stores no result: the transaction of the caller is not repeated."""
    mine = cast("PostgresCall[T]", call)
    if len(mine.parameters) <= TTL_PLACE:
        return mine  # no operation, so there is no result to keep
    if mine.name == "watch_chain":
        return cast("PostgresCall[T]", _is_chain_known(mine))
    parameters = list(mine.parameters)
    parameters[TTL_PLACE] = number(None)
    return PostgresCall(mine.name, mine.queue, mine.command, parameters, mine.decode)


def _is_chain_known(call: PostgresCall[Any]) -> PostgresCall[ChainState]:
    """Return whether a chain exists: its row is read as the single text of a reply."""
    command = b"SELECT count(*)::text FROM (" + call.command + b") found"
    return PostgresCall(call.name, call.queue, command, call.parameters, lambda reply: ChainState(one(reply) == b"1"))


def _scalar(kind: int, raw: bytes) -> Any:
    if kind == TEXT:
        return raw.decode()
    if kind == BYTES:
        return raw
    if kind == BOOL:
        return raw == b"\1"
    return int.from_bytes(raw, "big", signed=True)


def value_of(parameter: Parameter) -> Any:
    """Return a parameter as a Python value."""
    kind, raw = parameter
    if raw is None:
        return None
    element = _ARRAYS.get(kind)
    if element is None:
        return _scalar(kind, raw)
    dimensions, _, _ = struct.unpack_from("!iii", raw)
    values: list[Any] = []
    if dimensions == 0:
        return values
    place = 20
    for _ in range(_INT32(raw, 12)[0]):
        (length,) = _INT32(raw, place)
        place += 4
        if length < 0:
            values.append(None)
            continue
        values.append(_scalar(element, raw[place : place + length]))
        place += length
    return values


@lru_cache(maxsize=256)
def _format_command(command: bytes, kinds: tuple[int, ...], style: Style) -> str:
    def mark(match: re.Match[str]) -> str:
        kind = kinds[int(match[1]) - 1]
        name = f"{_KINDS[_ARRAYS[kind]]}[]" if kind in _ARRAYS else _KINDS[kind]
        return f"{match[0] if style == NUMBERED else '%s'}::{name}"

    text = command.decode()
    return _MARK.sub(mark, text if style == NUMBERED else text.replace("%", "%%"))


def format_statement(call: PostgresCall[Any], style: Style) -> tuple[str, Sequence[Any]]:
    """Return the statement with the placeholders of a driver, and its values in the order of the placeholders."""
    kinds = tuple(kind for kind, _ in call.parameters)
    return _format_command(call.command, kinds, style), [value_of(parameter) for parameter in call.parameters]


class Reply:
    """One value, in place of a result of libpq."""

    __slots__ = ("_value", "ntuples")

    def __init__(self, value: str | bytes | None) -> None:
        # psycopg returns text as bytes if the encoding of the connection is SQL_ASCII.
        self._value = value.encode() if isinstance(value, str) else value
        self.ntuples = 0 if value is None else 1

    def get_value(self, row: int, column: int) -> bytes | None:
        return self._value


def read(call: PostgresCall[T], value: Any) -> T:
    """Decode the single text of a reply."""
    return call.decode(cast(Any, Reply(value)))


def check_publish_reply(letters: str, others: Sequence[str] | None, queue: str) -> None:
    """Raise the error that a publish returned as a reply so that the caller's transaction is not aborted."""
    if letters == "F":
        raise map_error("WPFUL", (others or [""])[0], queue, "publish")
    if letters == "B":
        raise blocks(queue)
    if letters == "I":
        raise ConfigurationError(
            f"queue {queue} has a max_pending, which is exact only where transactions are read committed; this one is "
            "repeatable read or serializable. Publish it in a transaction of its own, or without a cap"
        )


def open_queue(names: Names, queue: str) -> PostgresCall[None]:
    """Make a missing queue in a separate step: a row inserted in a long transaction would block workers."""
    command = f"SELECT ({names.of('open_queue')}($1)).number".encode()
    return PostgresCall("publish", queue, command, [(TEXT, queue.encode())], lambda result: None)


def identify_database(names: Names) -> PostgresCall[str | None]:
    """Identify the database, and whether it has our tables: the same text on every connection to it."""
    statement = (
        "SELECT concat_ws(' ', c.system_identifier, d.oid, coalesce(to_regclass($1)::oid, 0)) "
        "FROM pg_control_system() c, pg_database d WHERE d.datname = current_database()"
    )
    return PostgresCall("publish", "", statement.encode(), [(TEXT, names.of("message").encode())], _text)


def _text(result: Any) -> str | None:
    value = one(result)
    return None if value is None else value.decode()
