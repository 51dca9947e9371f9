"""Handlers that settle in their own transaction: what they write and the end of the message are committed together.

A settle is fenced by the lease's token and nonce, so a handler whose lease was lost finds out inside its transaction,
which is rolled back: of all deliveries of a message, the writes of exactly one are kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, cast

from waypost.delivery import Message, Snooze
from waypost.errors import ConfigurationError, InvalidInput, LeaseLost, UnusableClient
from waypost.message import Settlement, SettleStatus
from waypost.operations.around import pass_sent_on
from waypost.operations.flow import ClientContext, Flow, drive, drive_async
from waypost.operations.receive import tell_settled
from waypost.outbox.transaction_adapter import PostgresWithin, TransactionAdapter
from waypost.outbox.transactions import recognise
from waypost.policy import RetryPolicy
from waypost.store.port import AsyncExecutor, Executor, Woken

if TYPE_CHECKING:
    import sqlite3

#: SQLite waits so long for its turn to write.
FILE_TURN_SECONDS = 5.0

Settled = Woken[list[SettleStatus]]


class Held(Protocol):
    """The messages whose leases are renewed."""

    def add(self, message: Message[Any], /) -> None: ...
    def discard(self, message: Message[Any], /) -> None: ...


class Home:
    """What messages of one client or worker have in common: where they came from, and who renews their leases."""

    __slots__ = ("_adapter", "_awaited", "_blocking", "_held", "context", "retry")

    def __init__(
        self,
        context: ClientContext,
        retry: RetryPolicy,
        *,
        blocking: Callable[[], Executor | None] | None = None,
        awaited: Callable[[], Awaitable[AsyncExecutor]] | None = None,
        held: Held | None = None,
        adapter: TransactionAdapter | None = None,
    ) -> None:
        self.context = context
        self.retry = retry
        self._blocking = blocking
        self._awaited = awaited
        self._held = held
        self._adapter = adapter or TransactionAdapter(context.store)

    def transaction(self, message: Message[Any], given: object) -> MessageTransaction:
        """See `Message.transaction`."""
        return MessageTransaction(self, [message], given)

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
        store: Any = self.context.store
        if isinstance(given, Sessions):
            with given.begin() as session:
                yield session, self._entered(session, message.queue)
        elif given is not None:
            yield given, self._entered(given, message.queue)
        elif store.kind == "sqlite":
            with _file(store.path) as connection:
                yield connection, cast("Executor", self._on_file(connection, message))
        elif store.kind == "postgres":
            with _transaction(store, self._blocking_executor) as lent:
                transaction = recognise(lent)
                transaction.begin()
                yield lent, cast("Executor", PostgresWithin(transaction))
        else:
            raise no_transactions(store.kind)

    @asynccontextmanager
    async def opened_async(self, message: Message[Any], given: object) -> AsyncIterator[tuple[Any, AsyncExecutor]]:
        """The same for an event loop."""
        store: Any = self.context.store
        if isinstance(given, Sessions):
            async with given.begin() as session:
                yield session, await self._entered_async(session, message.queue)
        elif given is not None:
            yield given, await self._entered_async(given, message.queue)
        elif store.kind == "sqlite":
            from waypost.store.sqlite.within import AsyncSqliteWithin

            with _file(store.path) as connection:
                yield connection, AsyncSqliteWithin(self._on_file(connection, message))
        elif store.kind == "postgres":
            if self._awaited is None:
                raise _other_mode()
            async with _transaction_async(store, self._awaited) as lent:
                transaction: Any = recognise(lent)
                await transaction.begin()
                yield lent, cast("AsyncExecutor", PostgresWithin(transaction))
        else:
            raise no_transactions(store.kind)

    def _entered(self, given: object, queue: str) -> Executor:
        executor = self._blocking_executor()
        return self._adapter.enter(given, queue, lambda call: drive(executor, self.context.attempt(call)))

    async def _entered_async(self, given: object, queue: str) -> AsyncExecutor:
        if self._awaited is None:
            raise _other_mode()
        executor = await self._awaited()
        return await self._adapter.enter_async(
            given, queue, lambda call: drive_async(executor, self.context.attempt(call))
        )

    def _blocking_executor(self) -> Executor:
        executor = None if self._blocking is None else self._blocking()
        if executor is None:
            raise _other_mode()
        return executor

    def _on_file(self, connection: sqlite3.Connection, message: Message[Any]) -> Any:
        from waypost.store.sqlite.within import SqliteWithin

        return SqliteWithin(cast(Any, self.context.store), connection, message.queue)


def no_transactions(kind: str) -> ConfigurationError:
    """The messages of this kind of store are in no database of the user's."""
    return ConfigurationError(
        f"a {kind} store is no part of your database, so no transaction of yours can settle its messages; record them "
        "in your own with waypost.outbox.Inbox"
    )


def _other_mode() -> InvalidInput:
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


@dataclass(frozen=True, slots=True)
class Sessions:
    """Where transactions are opened for handlers that ask for one: `begin` gives what is entered for each."""

    begin: Callable[[], Any]


def transaction(messages: Sequence[Message[Any]], transaction: object = None) -> MessageTransaction:
    """One transaction for a batch, as `message.transaction()` is for one message: all are settled at its end.

    If the lease of one of them was lost, all is rolled back; the others are given back and come again at once.
    """
    if not messages:
        raise InvalidInput("a transaction settles at least one message")
    home = cast("Home | None", messages[0].home)
    if home is None or any(message.home is None or message.home.context is not home.context for message in messages):
        raise InvalidInput("messages are settled together by the client or handler that claimed all of them")
    if len({message.queue for message in messages}) > 1:
        raise InvalidInput("messages that are settled together are of one queue")
    if len({message.id for message in messages}) < len(messages):
        raise InvalidInput("a message is settled once: it stands here twice")
    return MessageTransaction(home, messages, transaction)


class MessageTransaction:
    """A transaction for the length of a `with` or `async with` block, at whose end the messages are settled in it."""

    __slots__ = ("_block", "_given", "_home", "_messages")

    def __init__(self, home: Home, messages: Sequence[Message[Any]], given: object, *, injected: bool = False) -> None:
        for message in messages:
            # A handler that asked for a session is given one all the same: there is only nothing to settle in it.
            if message.at_most_once and not injected:
                raise InvalidInput(f"message {message.id} left the store at its claim (lease=None): it has no settle")
            if message.settled is not None:
                raise InvalidInput(f"message {message.id} is settled already: {message.settled}")
        self._home = home
        self._messages = messages
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
        settlements: list[Settlement] = []
        settled: Settled | None = None
        try:
            with self._home.opened(self._messages[0], self._given) as (shown, executor):
                yield shown
                drive(executor, self._pass_sent_on())
                settlements = self._settlements()
                if settlements:
                    settled = drive(executor, self._settle(settlements))
        except BaseException:
            self._failed(settlements)
            raise
        self._settled(settlements, settled)

    @asynccontextmanager
    async def _awaited(self) -> AsyncIterator[Any]:
        settlements: list[Settlement] = []
        settled: Settled | None = None
        try:
            async with self._home.opened_async(self._messages[0], self._given) as (shown, executor):
                yield shown
                await drive_async(executor, self._pass_sent_on())
                settlements = self._settlements()
                if settlements:
                    settled = await drive_async(executor, self._settle(settlements))
        except BaseException:
            self._failed(settlements)
            raise
        self._settled(settlements, settled)

    def _pass_sent_on(self) -> Flow[None]:
        for message in self._messages:
            yield from pass_sent_on(self._home.context, message)

    def _settlements(self) -> list[Settlement]:
        if self._messages[0].at_most_once:
            return []
        for message in self._messages:
            message.home.let_go(message)
        return [message.settlement(None, message.home.retry) for message in self._messages]

    def _settle(self, settlements: list[Settlement]) -> Flow[Settled]:
        context, queue = self._home.context, self._messages[0].queue
        operation = context.replay_windows.begin(queue)
        try:
            settled: Settled = yield context.store.settle(queue, settlements, operation)
        finally:
            context.replay_windows.end(queue, operation)
        lost = [message for message, status in zip(self._messages, settled.result, strict=True) if status == "lost"]
        if lost:
            for message in self._messages:
                if message in lost:
                    message.lease_lost = message.fenced = True
                elif message.outcome is None:
                    # What happened to another one of the batch is no failure of this one.
                    message.outcome = Snooze(0)
            others = "" if len(lost) == 1 else f" and {len(lost) - 1} others"
            raise LeaseLost(
                f"the lease of message {lost[0].id} of queue {queue}{others} was lost before its transaction ended: it "
                "was or will be handled again, so what this transaction wrote is rolled back"
            )
        return settled

    def _failed(self, settlements: list[Settlement]) -> None:
        if settlements:
            for message in self._messages:
                if not message.fenced:
                    message.home.take_back(message)

    def _settled(self, settlements: list[Settlement], settled: Settled | None) -> None:
        if settled is None:
            return
        context = self._home.context
        statuses = context.take(settled)
        for message, settlement, status in zip(self._messages, settlements, statuses, strict=True):
            message.settled = status
            if context.on_event is not None:
                tell_settled(context, message, settlement, status, "success")
