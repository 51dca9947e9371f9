"""Where the deliveries of one client or worker are settled, and how their leases are renewed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from waypost.errors import InvalidInput
from waypost.message import Message
from waypost.operations.flow import ClientContext
from waypost.policy import RetryPolicy
from waypost.store.port import AsyncExecutor, Executor


class Held(Protocol):
    """The messages whose leases are renewed."""

    def add(self, message: Message[Any], /) -> None: ...
    def discard(self, message: Message[Any], /) -> None: ...


class HeldMessages(dict[Message[Any], None]):
    """Messages whose leases are renewed, in the order in which they were added. Any thread may copy it."""

    __slots__ = ()

    def add(self, message: Message[Any], /) -> None:
        self[message] = None

    def discard(self, message: Message[Any], /) -> None:
        self.pop(message, None)

    def add_all(self, messages: Iterable[Message[Any]]) -> None:
        self.update(dict.fromkeys(messages))

    def discard_all(self, messages: Iterable[Message[Any]]) -> None:
        for message in messages:
            self.pop(message, None)


class SettleTarget:
    """The common parts of the messages of one client or worker: the access to their store, and the lease renewal.

    `begin` creates a transaction that settles messages at its end, from target, messages and the caller's object.
    """

    __slots__ = ("_async_executor", "_begin", "_executor", "_held", "context", "retry")

    def __init__(
        self,
        context: ClientContext,
        retry: RetryPolicy,
        begin: Callable[[SettleTarget, Sequence[Message[Any]], object], Any],
        *,
        executor: Callable[[], Executor | None] | None = None,
        async_executor: Callable[[], Awaitable[AsyncExecutor]] | None = None,
        held: Held | None = None,
    ) -> None:
        self.context = context
        self.retry = retry
        self._begin = begin
        self._executor = executor
        self._async_executor = async_executor
        self._held = held

    def transaction(self, message: Message[Any], given: object) -> Any:
        """See `Message.transaction`."""
        return self._begin(self, [message], given)

    def stop_renewing(self, message: Message[Any]) -> None:
        """Stop renewing: the transaction of its settle locks its row, so a renewal would wait, and then be lost."""
        if self._held is not None:
            self._held.discard(message)

    def renew_again(self, message: Message[Any]) -> None:
        """Renew its lease again, because it was not settled."""
        if self._held is not None:
            self._held.add(message)

    def executor(self) -> Executor:
        """Return an executor for blocking calls."""
        executor = None if self._executor is None else self._executor()
        if executor is None:
            raise wrong_block()
        return executor

    async def async_executor(self) -> AsyncExecutor:
        """Return an executor for awaited calls."""
        self.check_async()
        assert self._async_executor is not None
        return await self._async_executor()

    def check_async(self) -> None:
        """Raise if it is used inside an event loop but belongs to a sync client."""
        if self._async_executor is None:
            raise wrong_block()


def wrong_block() -> InvalidInput:
    """Return the error for a message of a sync client in an `async with`, or the reverse."""
    return InvalidInput(
        "this message belongs to a client or handler of the other mode: use `with` for sync and `async with` for "
        "async clients"
    )
