"""Settling in the handler's transaction: its writes and the settle of the message are committed together.

A settle is fenced by the lease's token and nonce, so the settle of a lost lease fails inside the transaction, which is
rolled back: of all deliveries of a message, the writes of exactly one are kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

from waypost.errors import ConfigurationError, InvalidInput, LeaseLost
from waypost.message import Message, Snooze
from waypost.operations.flow import Flow, drive, drive_async
from waypost.operations.publish_middleware import pass_sent_on
from waypost.operations.receive import emit_settled, settling
from waypost.operations.settle_target import SettleTarget
from waypost.outbox.transaction_adapters import adapt, open_async_executor, open_executor, wake_after_commit
from waypost.store.port import AsyncExecutor, Executor, Store, Woken
from waypost.values import Settlement, SettleStatus
from waypost.wake.port import ALL_SLEEPERS

Settled = Woken[list[SettleStatus]]


def no_transaction_support(store: Store) -> ConfigurationError:
    """Return the error for a store whose messages are not in the user's database."""
    return ConfigurationError(
        f"a {store.kind} store is not in your database, so your transactions cannot settle its messages; record them "
        "there with waypost.outbox.Inbox"
    )


# ---- transactions --------------------------------------------------------------------------------------------


@contextmanager
def _open_transaction(target: SettleTarget, message: Message[Any], given: object) -> Iterator[tuple[Any, Executor]]:
    """Open the caller's transaction or our own; yield the session for the handler, and an executor in it."""
    store, queue = target.context.store, message.queue

    def open_executor_in(transaction: object) -> Executor:
        executor = target.executor()
        return open_executor(store, transaction, queue, lambda call: drive(executor, target.context.attempt(call)))

    if isinstance(given, SessionSource):
        with given.begin() as session:
            yield session, open_executor_in(session)
    elif given is not None:
        yield given, open_executor_in(given)
    elif store.transactions is None:
        raise no_transaction_support(store)
    else:
        with store.transactions.begin(target.executor) as lent:
            transaction = adapt(lent)
            yield lent, store.transactions.executor(transaction, transaction.begin(), queue)


@asynccontextmanager
async def _open_transaction_async(
    target: SettleTarget, message: Message[Any], given: object
) -> AsyncIterator[tuple[Any, AsyncExecutor]]:
    """Async version of `_open_transaction`."""
    store, queue = target.context.store, message.queue

    async def open_executor_in(transaction: object) -> AsyncExecutor:
        executor = await target.async_executor()
        return await open_async_executor(
            store, transaction, queue, lambda call: drive_async(executor, target.context.attempt(call))
        )

    if isinstance(given, SessionSource):
        async with given.begin() as session:
            yield session, await open_executor_in(session)
    elif given is not None:
        yield given, await open_executor_in(given)
    elif store.transactions is None:
        raise no_transaction_support(store)
    else:
        if store.transactions.waits:
            target.check_async()
        async with store.transactions.begin_async(target.async_executor) as lent:
            transaction: Any = adapt(lent)
            connection = (await transaction.begin()) if transaction.awaited else transaction.begin()
            yield lent, store.transactions.async_executor(transaction, connection, queue)


# ---- the block -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionSource:
    """Opens sessions for handlers: `begin` returns a context manager for each."""

    begin: Callable[[], Any]


def transaction(messages: Sequence[Message[Any]], transaction: object = None) -> MessageTransaction:
    """Return one transaction for a batch, like `message.transaction()` for one message: all are settled at its end.

    If the lease of one was lost, all is rolled back; the others are released and redelivered at once.
    """
    if not messages:
        raise InvalidInput("a transaction settles at least one message")
    target: SettleTarget | None = messages[0].settle_target
    if target is None or any(
        message.settle_target is None or message.settle_target.context is not target.context for message in messages
    ):
        raise InvalidInput("messages that are settled together must be claimed by one client or handler")
    if len({message.queue for message in messages}) > 1:
        raise InvalidInput("messages that are settled together must be of one queue")
    if len({message.id for message in messages}) < len(messages):
        raise InvalidInput("a message is settled once, and one is in the list twice")
    return MessageTransaction(target, messages, transaction)


class MessageTransaction:
    """A `with` or `async with` block around a transaction, at whose end the messages are settled in it."""

    __slots__ = ("_block", "_given", "_messages", "_target")

    def __init__(
        self, target: SettleTarget, messages: Sequence[Message[Any]], given: object, *, injected: bool = False
    ) -> None:
        for message in messages:
            # A handler with a session parameter gets one all the same: there is only nothing to settle in it.
            if message.at_most_once and not injected:
                raise InvalidInput(f"message {message.id} left the store at its claim (lease=None): it has no settle")
            if message.settled is not None:
                raise InvalidInput(f"message {message.id} is settled already: {message.settled}")
        self._target = target
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
            with _open_transaction(self._target, self._messages[0], self._given) as (session, executor):
                yield session
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
            async with _open_transaction_async(self._target, self._messages[0], self._given) as (session, executor):
                yield session
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
            yield from pass_sent_on(self._target.context, message)

    def _settlements(self) -> list[Settlement]:
        if self._messages[0].at_most_once:
            return []
        for message in self._messages:
            message.settle_target.stop_renewing(message)
        return [message.settlement(None, message.settle_target.retry) for message in self._messages]

    def _settle(self, settlements: list[Settlement]) -> Flow[Settled]:
        context, queue = self._target.context, self._messages[0].queue
        operation = context.replay_windows.begin(queue)
        try:
            settled: Settled = yield settling(context, queue, settlements)(operation)
        finally:
            context.replay_windows.end(queue, operation)
        lost = [message for message, status in zip(self._messages, settled.result, strict=True) if status == "lost"]
        if lost:
            for message in self._messages:
                if message in lost:
                    message.lease_lost = message.fenced = True
                elif message.outcome is None:
                    # The lost lease of another message is no failure of this one.
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
                    message.settle_target.renew_again(message)

    def _wakes_after_commit(self, chosen: dict[str, list[str]]) -> bool:
        """Return whether the commit of the caller's own session, which is still to come, notifies sleepers."""
        support = self._target.context.store.transactions
        if self._given is None or isinstance(self._given, SessionSource) or support is None:
            return False  # it is committed
        # As for a publish: those that a store chose that does not see the commit may be awake by then, others asleep.
        names = chosen if support.notifies else {queue: [ALL_SLEEPERS] for queue in chosen}
        return wake_after_commit(self._given, self._target.context.wake, names)

    def _settled(self, settlements: list[Settlement], settled: Settled | None) -> None:
        if settled is None:
            return
        context = self._target.context
        if self._wakes_after_commit(settled.wake):
            context.report(settled.also)
            statuses = settled.result
        else:
            statuses = context.wake_and_report(settled)
        for message, settlement, status in zip(self._messages, settlements, statuses, strict=True):
            message.settled = status
            if context.on_event is not None:
                emit_settled(context, message, settlement, status, "success")
