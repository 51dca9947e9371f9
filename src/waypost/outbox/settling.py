"""Handlers that settle in their own transaction: what they write and the end of the message are committed together.

A settle is fenced by the lease's token and nonce, so a handler whose lease was lost finds out inside its transaction,
which is rolled back: of all deliveries of a message, the writes of exactly one are kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, closing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from waypost.delivery import Message
from waypost.errors import ConfigurationError, InvalidInput, LeaseLost, UnusableClient
from waypost.message import Settlement, SettleStatus
from waypost.operations.flow import Flow, Link, drive, drive_async
from waypost.operations.receive import tell_settled
from waypost.outbox.seam import PostgresWithin, Seam
from waypost.outbox.transactions import recognise
from waypost.policy import RetryPolicy
from waypost.store.port import AsyncExecutor, Executor, Woken

if TYPE_CHECKING:
    import sqlite3

#: SQLite waits so long for its turn to write.
FILE_TURN_SECONDS = 5.0

Settled = Woken[list[SettleStatus]]


class Home:
    """What messages of one client or worker have in common: where they came from, and who renews their leases."""

    __slots__ = ("_awaited", "_blocking", "_held", "_seam", "link", "retry")

    def __init__(
        self,
        link: Link,
        retry: RetryPolicy,
        *,
        blocking: Callable[[], Executor | None] | None = None,
        awaited: Callable[[], Awaitable[AsyncExecutor]] | None = None,
        held: set[Message[Any]] | None = None,
        seam: Seam | None = None,
    ) -> None:
        self.link = link
        self.retry = retry
        self._blocking = blocking
        self._awaited = awaited
        self._held = held
        self._seam = seam or Seam(link.store)

    def transaction(self, message: Message[Any], given: object) -> MessageTransaction:
        """See `Message.transaction`."""
        return MessageTransaction(self, message, given)

    def let_go(self, message: Message[Any]) -> None:
        """Its settle is under way, and holds its row: a renewal would wait for that and then believe it lost."""
        if self._held is not None:
            self._held.discard(message)

    def take_back(self, message: Message[Any]) -> None:
        """It was not settled after all."""
        if self._held is not None:
            self._held.add(message)

    # ---- transactions ------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, message: Message[Any], given: object) -> Iterator[tuple[Any, Executor]]:
        """A transaction, the caller's or our own: what the handler is given, and an executor in it."""
        store: Any = self.link.store
        if given is not None:
            executor = self._blocking_executor()
            yield given, self._seam.enter(given, message.queue, lambda call: drive(executor, self.link.attempt(call)))
        elif store.kind == "sqlite":
            with _file(store.path) as connection:
                yield connection, cast("Executor", self._on_file(connection, message))
        elif store.kind == "postgres":
            with _transaction(store, self._blocking_executor) as lent:
                transaction = recognise(lent)
                transaction.begin()
                yield lent, cast("Executor", PostgresWithin(transaction))
        else:
            raise _no_transactions(store.kind)

    @asynccontextmanager
    async def opened_async(self, message: Message[Any], given: object) -> AsyncIterator[tuple[Any, AsyncExecutor]]:
        """The same for an event loop."""
        store: Any = self.link.store
        if given is not None:
            if self._awaited is None:
                raise _other_colour()
            executor = await self._awaited()
            yield (
                given,
                await self._seam.enter_async(
                    given, message.queue, lambda call: drive_async(executor, self.link.attempt(call))
                ),
            )
        elif store.kind == "sqlite":
            from waypost.store.sqlite.within import AsyncSqliteWithin

            with _file(store.path) as connection:
                yield connection, AsyncSqliteWithin(self._on_file(connection, message))
        elif store.kind == "postgres":
            if self._awaited is None:
                raise _other_colour()
            async with _transaction_async(store, self._awaited) as lent:
                transaction: Any = recognise(lent)
                await transaction.begin()
                yield lent, cast("AsyncExecutor", PostgresWithin(transaction))
        else:
            raise _no_transactions(store.kind)

    def _blocking_executor(self) -> Executor:
        executor = None if self._blocking is None else self._blocking()
        if executor is None:
            raise _other_colour()
        return executor

    def _on_file(self, connection: sqlite3.Connection, message: Message[Any]) -> Any:
        from waypost.store.sqlite.within import SqliteWithin

        return SqliteWithin(cast(Any, self.link.store), connection, message.queue)


def _no_transactions(kind: str) -> ConfigurationError:
    return ConfigurationError(
        f"a {kind} store is no part of your database, so no transaction of yours can settle its messages; record them "
        "in your own with waypost.outbox.Inbox"
    )


def _other_colour() -> InvalidInput:
    return InvalidInput(
        "this message came from a client or handler of the other colour: say `with` where it blocks and `async with` "
        "where it is awaited"
    )


@contextmanager
def _file(path: str) -> Iterator[sqlite3.Connection]:
    import sqlite3

    # By Python's own rules it begins with the first write, so that nobody waits for one who only reads.
    with closing(sqlite3.connect(path, timeout=FILE_TURN_SECONDS)) as connection, connection:
        yield connection


@contextmanager
def _transaction(store: Any, executor_of: Callable[[], Executor]) -> Iterator[Any]:
    engine = getattr(store.source, "engine", None)
    if engine is not None:
        from sqlalchemy import Engine
        from sqlalchemy.orm import Session

        if not isinstance(engine, Engine):
            raise UnusableClient("this client has an AsyncEngine: its transactions are awaited")
        with Session(engine) as session, session.begin():
            yield session
        return
    executor = executor_of()
    if not hasattr(executor, "lend"):
        raise UnusableClient("this client has an asyncio pool: its transactions are awaited")
    connection = executor.lend()
    try:
        with connection.transaction():
            yield connection
    finally:
        executor.take_back(connection)  # type: ignore[attr-defined]


@asynccontextmanager
async def _transaction_async(store: Any, executor_of: Callable[[], Awaitable[AsyncExecutor]]) -> AsyncIterator[Any]:
    engine = getattr(store.source, "engine", None)
    if engine is not None:
        from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

        if not isinstance(engine, AsyncEngine):
            raise UnusableClient("this client has an Engine, whose transactions block: use a handler that is not async")
        async with AsyncSession(engine) as session, session.begin():
            yield session
        return
    executor = await executor_of()
    if not hasattr(executor, "lend"):
        raise UnusableClient(
            "this client has a pool whose connections block: use a handler that is not async, or an AsyncConnectionPool"
        )
    connection = await executor.lend()
    try:
        async with connection.transaction():
            yield connection
    finally:
        await executor.take_back(connection)  # type: ignore[attr-defined]


# ---- the block -----------------------------------------------------------------------------------------------


class MessageTransaction:
    """A transaction for the length of a `with` or `async with` block, at whose end the message is settled in it."""

    __slots__ = ("_block", "_given", "_home", "_message")

    def __init__(self, home: Home, message: Message[Any], given: object) -> None:
        if message.at_most_once:
            raise InvalidInput(f"message {message.id} left the store at its claim (lease=None): it has no settle")
        if message.settled is not None:
            raise InvalidInput(f"message {message.id} is settled already: {message.settled}")
        self._home = home
        self._message = message
        self._given = given
        self._block: AbstractContextManager[Any] | AbstractAsyncContextManager[Any] | None = None

    def __enter__(self) -> Any:
        block = self._block = self._blocking()
        return block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return cast("AbstractContextManager[Any]", self._block).__exit__(kind, error, traceback)

    async def __aenter__(self) -> Any:
        block = self._block = self._awaited()
        return await block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await cast("AbstractAsyncContextManager[Any]", self._block).__aexit__(kind, error, traceback)

    @contextmanager
    def _blocking(self) -> Iterator[Any]:
        settlement: Settlement | None = None
        try:
            with self._home.opened(self._message, self._given) as (shown, executor):
                yield shown
                settlement = self._settlement()
                settled = drive(executor, self._settle(settlement))
        except BaseException:
            self._failed(settlement)
            raise
        self._settled(settlement, settled)

    @asynccontextmanager
    async def _awaited(self) -> AsyncIterator[Any]:
        settlement: Settlement | None = None
        try:
            async with self._home.opened_async(self._message, self._given) as (shown, executor):
                yield shown
                settlement = self._settlement()
                settled = await drive_async(executor, self._settle(settlement))
        except BaseException:
            self._failed(settlement)
            raise
        self._settled(settlement, settled)

    def _settlement(self) -> Settlement:
        self._home.let_go(self._message)
        return self._message.settlement(None, self._home.retry)

    def _settle(self, settlement: Settlement) -> Flow[Settled]:
        link, message = self._home.link, self._message
        operation = link.lanes.begin(message.queue)
        try:
            settled: Settled = yield link.store.settle(message.queue, [settlement], operation)
        finally:
            link.lanes.end(message.queue, operation)
        if settled.result[0] == "lost":
            message.lease_lost = True
            raise LeaseLost(
                f"the lease of message {message.id} of queue {message.queue} was lost before its transaction ended: it "
                "was or will be handled again, so what this transaction wrote is rolled back"
            )
        return settled

    def _failed(self, settlement: Settlement | None) -> None:
        if settlement is not None and not self._message.lease_lost:
            self._home.take_back(self._message)

    def _settled(self, settlement: Settlement, settled: Settled) -> None:
        link, message = self._home.link, self._message
        message.settled = settled.result[0]
        if settled.wake:
            link.wake(settled.wake)
        if link.on_event is not None:
            tell_settled(link, message, settlement, message.settled, "success")
