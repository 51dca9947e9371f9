"""The face for an event loop: the same names, awaited."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack, cast, overload
from weakref import WeakKeyDictionary

from waypost.checks import SECONDS_MAX, check_id, check_seconds
from waypost.client.base import (
    DEFAULT_RETRY,
    BaseClient,
    Listing,
    PublishKeywords,
    PublishManyKeywords,
    QueueName,
    begin_transaction,
    is_stop,
)
from waypost.client.schedule_methods import AwaitedSchedules
from waypost.client.sync_client import Waypost
from waypost.errors import UnusableClient
from waypost.message import Duration, Message, Queue, Retry, StoredMessage, queue_name, queue_type
from waypost.middleware import Outgoing
from waypost.operations import manage, publish, publish_middleware, receive, wait
from waypost.operations.flow import Flow, drive_async
from waypost.operations.publish import PublishOptions, checked, taken
from waypost.operations.settle_target import SettleTarget
from waypost.policy import HEALTH_WINDOW_SECONDS, PAGE_MAX, Policy, RetryPolicy
from waypost.values import (
    CancelStatus,
    Checked,
    Drained,
    Event,
    ExtendStatus,
    JournalPage,
    Lease,
    Ledger,
    MessageState,
    Published,
    Redriven,
    RegisteredWorker,
    Stats,
)

if TYPE_CHECKING:
    import asyncio

    from waypost.store.port import AsyncExecutor, Call, Executor
    from waypost.worker.worker import Worker

T = TypeVar("T")


class AsyncReception(Generic[T]):
    """A message for the length of an `async with` block: claimed at its start, settled at its end."""

    __slots__ = ("_as_type", "_client", "_message", "_queue", "_renew", "_retry", "_wait")

    def __init__(
        self,
        client: AsyncWaypost,
        queue: QueueName,
        wait: Duration | None,
        as_type: type[T] | None,
        retry: RetryPolicy,
        renew: bool,
    ) -> None:
        self._client = client
        self._queue = queue
        self._wait = wait
        self._as_type = as_type
        self._retry = retry
        self._renew = renew
        self._message: Message[T] | None = None

    async def __aenter__(self) -> Message[T] | None:
        self._message = await self._client._run(self._client._receive_flow(self._queue, self._wait, self._as_type))
        if self._message is not None:
            self._message.settle_target = self._client._settle_target(self._retry, renew=self._renew)
            self._client._gate.received(1)
            if self._renew:
                self._client._blocks.add(self._message)
        return self._message

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        message, self._message = self._message, None
        if message is None:
            return False
        self._client._blocks.discard(message)
        try:
            return await self._client._run(
                publish_middleware.finish(self._client._context, message, error, self._retry, stopped=is_stop(error))
            )
        finally:
            self._client._gate.received(-1)


class AsyncConsumed(Message[T]):
    """A message of `consume`: the end of its `async with` block settles it."""

    __slots__ = ("_client", "_ended", "_renew", "_retry")

    def __init__(
        self, queue: str, lease: Lease, as_type: type[T] | None, client: AsyncWaypost, retry: RetryPolicy, renew: bool
    ) -> None:
        super().__init__(queue, lease, as_type, client._settle_target(retry, renew=renew))
        self._client = client
        self._retry = retry
        self._renew = renew
        self._ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return await self._end(error)

    async def _end(self, error: BaseException | None) -> bool:
        if self._ended:
            return False
        self._ended = True
        self._client._blocks.discard(self)
        try:
            return await self._client._run(
                publish_middleware.finish(self._client._context, self, error, self._retry, stopped=is_stop(error))
            )
        finally:
            self._client._gate.received(-1)


class _Connection:
    """The executor of one event loop; connections cannot move between loops."""

    __slots__ = ("executor", "lock")

    def __init__(self, lock: asyncio.Lock) -> None:
        self.lock = lock
        self.executor: AsyncExecutor | None = None


class AsyncWaypost(BaseClient, AwaitedSchedules):
    """A client for asyncio. Tasks may share it; each event loop gets its own connections. A forked child makes its own.

    Give a URL (`sqlite:///orders.db`, `valkey://127.0.0.1:6379`, `memory://`), or your own redis client with
    `client=`. It connects at the first use, within `start_timeout`; after that, connections that fail are retried
    for `retry_budget` seconds (0: never) without doing anything twice.
    """

    _awaited = True
    _connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection] | None = None

    async def open(self) -> Self:
        self._closed = False
        await self._connected()
        return self

    async def close(self) -> None:
        import asyncio

        self._closed = True
        # In a forked child the connections are the parent's. Even to let go of them would disturb it: a transport that
        # is collected takes its socket off the loop's selector, which both processes share.
        if self._session.pid != os.getpid():
            return
        if self._blocks.renews:
            await asyncio.to_thread(self._blocks.close)
        self._wakeups.close()
        if not self._wakeups.flush(0):
            await asyncio.to_thread(self._wakeups.flush)
        connections, self._connections = self._connections, None
        connection = None if connections is None else connections.get(asyncio.get_running_loop())
        if connection is not None and connection.executor is not None:
            await connection.executor.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *ended: object) -> None:
        await self.close()

    async def _connected(self) -> AsyncExecutor:
        import asyncio

        self._check_usable()
        loop = asyncio.get_running_loop()
        with self._connecting:
            if self._connections is None:
                self._connections = WeakKeyDictionary()
            connection = self._connections.get(loop)
            if connection is None:
                connection = self._connections[loop] = _Connection(asyncio.Lock())
        if connection.executor is None:
            async with connection.lock:
                if connection.executor is None:
                    connection.executor = await self._store.connect_async(start_timeout=self._start_timeout)
        return connection.executor

    def _connect_blocks(self) -> Executor:
        from waypost.worker.bridges import LoopExecutor

        try:
            return super()._connect_blocks()
        except UnusableClient:
            # The caller's asyncio client: renewals share the event loop of the block.
            connections = [] if self._connections is None else list(self._connections.items())
            for loop, connection in connections:
                if connection.executor is not None and loop.is_running():
                    return LoopExecutor(connection.executor, loop)
            raise

    async def _run(self, flow: Flow[T]) -> T:
        return await drive_async(await self._connected(), flow)

    async def _call(self, call: Call[T]) -> T:
        return await drive_async(await self._connected(), self._context.attempt(call))

    def _settle_target(self, retry: RetryPolicy, *, renew: bool) -> SettleTarget:
        held = self._blocks if renew else None
        return SettleTarget(self._context, retry, begin_transaction, async_executor=self._connected, held=held)

    # ---- the way of a message ----------------------------------------------------------------------------

    @overload
    async def publish(self, queue: Queue[T], body: T, **options: Unpack[PublishKeywords]) -> Published: ...
    @overload
    async def publish(self, queue: str, body: object, **options: Unpack[PublishKeywords]) -> Published: ...
    async def publish(self, queue: QueueName, body: object, **options: Unpack[PublishKeywords]) -> Published:
        name = self._name(queue)
        with self._gate.publish():
            if self._registry.middleware or "transaction" in options:
                return (await self._published_through(queue, [body], options, self._send_one))[0]  # type: ignore[no-any-return]
            return await self._run(publish.publish(self._context, name, body, checked(options), queue_type(queue)))

    async def _send_one(self, outgoing: Outgoing) -> list[Published]:
        transaction, options = taken(outgoing.options)
        if transaction is not None:
            return await self._send_within(transaction, outgoing, checked(options))
        (body,) = outgoing.bodies
        flow = publish.publish(self._context, self._name(outgoing.queue), body, checked(options), outgoing.type)
        return [await self._run(flow)]

    async def _send_within(self, transaction: object, outgoing: Outgoing, options: PublishOptions) -> list[Published]:
        from waypost.outbox.transaction_adapters import run_async

        name = self._name(outgoing.queue)
        flow = publish.publish_within(self._context, name, outgoing.bodies, options, outgoing.type)
        return await run_async(self._store, transaction, name, flow, self._call)

    @overload
    async def publish_many(
        self, queue: Queue[T], bodies: Iterable[T], **options: Unpack[PublishManyKeywords]
    ) -> list[Published]: ...
    @overload
    async def publish_many(
        self, queue: str, bodies: Iterable[object], **options: Unpack[PublishManyKeywords]
    ) -> list[Published]: ...
    async def publish_many(
        self, queue: QueueName, bodies: Iterable[Any], **options: Unpack[PublishManyKeywords]
    ) -> list[Published]:
        name = self._name(queue)
        with self._gate.publish():
            if self._registry.middleware or "transaction" in options:
                return await self._published_through(queue, bodies, options, self._send_many)  # type: ignore[no-any-return]
            return await self._run(
                publish.publish_many(self._context, name, bodies, self._many_options(options), queue_type(queue))
            )

    async def _send_many(self, outgoing: Outgoing) -> list[Published]:
        transaction, given = taken(outgoing.options)
        options = self._many_options(cast("PublishManyKeywords", given))
        if transaction is not None:
            return await self._send_within(transaction, outgoing, options)
        flow = publish.publish_many(self._context, self._name(outgoing.queue), outgoing.bodies, options, outgoing.type)
        return await self._run(flow)

    @overload
    def receive(
        self, queue: Queue[T], *, wait: Duration | None = 0, retry: RetryPolicy = DEFAULT_RETRY, renew: bool = True
    ) -> AsyncReception[T]: ...
    @overload
    def receive(
        self, queue: str, *, wait: Duration | None = 0, retry: RetryPolicy = DEFAULT_RETRY, renew: bool = True
    ) -> AsyncReception[Any]: ...
    def receive(
        self, queue: QueueName, *, wait: Duration | None = 0, retry: RetryPolicy = DEFAULT_RETRY, renew: bool = True
    ) -> AsyncReception[Any]:
        self._check_receive(queue, wait, retry, renew)
        return AsyncReception(self, queue, wait, queue_type(queue), retry, renew)

    @overload
    def consume(
        self, queue: Queue[T], *, wait: Duration | None = None, retry: RetryPolicy = DEFAULT_RETRY, renew: bool = True
    ) -> AsyncIterator[AsyncConsumed[T]]: ...
    @overload
    def consume(
        self, queue: str, *, wait: Duration | None = None, retry: RetryPolicy = DEFAULT_RETRY, renew: bool = True
    ) -> AsyncIterator[AsyncConsumed[Any]]: ...
    def consume(
        self, queue: QueueName, *, wait: Duration | None = None, retry: RetryPolicy = DEFAULT_RETRY, renew: bool = True
    ) -> AsyncIterator[AsyncConsumed[Any]]:
        self._check_receive(queue, wait, retry, renew)
        return self._consumed(queue, wait, retry, renew)

    async def _consumed(
        self, queue: QueueName, wait: Duration | None, retry: RetryPolicy, renew: bool
    ) -> AsyncIterator[AsyncConsumed[Any]]:
        def make(name: str, lease: Lease, as_type: type[Any] | None) -> AsyncConsumed[Any]:
            return AsyncConsumed(name, lease, as_type, self, retry, renew)

        while True:
            message = await self._run(self._receive_flow(queue, wait, queue_type(queue), make))
            if message is None:
                return
            assert isinstance(message, AsyncConsumed)
            self._gate.received(1)
            if renew:
                self._blocks.add(message)
            try:
                yield message
            except GeneratorExit as left:
                await message._end(left)
                raise
            await message._end(None if message.outcome is not None else Retry(reason="left unsettled"))

    async def extend(self, message: Message[Any]) -> ExtendStatus:
        return (await self._run(self._extend_flow(message)))[0]

    async def cancel(self, queue: QueueName, *, id: str | None = None, key: str | None = None) -> CancelStatus:
        return await self._run(manage.cancel(self._context, self._name(queue), id=id, key=key))

    async def result(self, queue: QueueName, id: str, default: Any = None, *, as_type: type[Any] | None = None) -> Any:
        return self._result_value(await self._call(self._result_call(queue, id, as_type)), default, as_type)

    async def wait_result(
        self, published: Published, timeout: float = 60.0, *, as_type: type[Any] | None = None
    ) -> Any:
        return await self._run(wait.wait_result(self._context, published, timeout, as_type))

    async def wait_chain(
        self, chain: str | Published, timeout: float = 60.0, *, as_type: type[Any] | None = None
    ) -> Any:
        return await self._run(wait.wait_chain(self._context, chain, timeout, as_type))

    # ---- workers -----------------------------------------------------------------------------------------

    def worker(
        self,
        queues: Iterable[QueueName] | None = None,
        *,
        health_window: float = HEALTH_WINDOW_SECONDS,
        scheduler: bool = True,
        promoter: bool = False,
    ) -> Worker:
        return self._make_worker(queues, health_window, scheduler=scheduler, promoter=promoter)

    async def drain(self, timeout: float = 25.0) -> Drained:
        import asyncio

        timeout = check_seconds("timeout", timeout, least=-SECONDS_MAX)
        for pause in self._drain_pauses(timeout):
            await asyncio.sleep(pause)
        lost = 0
        if timeout > 0 and self._context.queues_with_lost_claims() and not self._closed:
            lost = await self._run(receive.give_back_lost_claims(self._context))
        return self._drained(lost)

    # ---- looking -----------------------------------------------------------------------------------------

    @overload
    async def peek(self, queue: Queue[T], n: int = 10, state: MessageState = "ready") -> list[StoredMessage[T]]: ...
    @overload
    async def peek(self, queue: str, n: int = 10, state: MessageState = "ready") -> list[StoredMessage[Any]]: ...
    async def peek(self, queue: QueueName, n: int = 10, state: MessageState = "ready") -> list[StoredMessage[Any]]:
        return await self._run(self._peek_flow(queue, n, state))

    async def _pages(self, listing: Listing[T]) -> AsyncIterator[StoredMessage[T]]:
        while listing.more:
            for stored in await self._run(listing.flow()):
                yield stored

    def messages(
        self,
        queue: QueueName,
        state: MessageState = "ready",
        *,
        id: str | None = None,
        key: str | None = None,
        group: str | None = None,
        reason: str | None = None,
    ) -> AsyncIterator[StoredMessage[Any]]:
        filters = {"id": id, "key": key, "group": group, "reason": reason}
        return self._pages(Listing(self._context, queue, state, filters))

    def dead_letters(
        self,
        queue: QueueName,
        *,
        reason: str | None = None,
        id: str | None = None,
        key: str | None = None,
        group: str | None = None,
    ) -> AsyncIterator[StoredMessage[Any]]:
        return self.messages(queue, "dead", id=id, key=key, group=group, reason=reason)

    def timers(self, queue: QueueName, before: datetime | None = None) -> AsyncIterator[StoredMessage[Any]]:
        return self._pages(Listing(self._context, queue, "delayed", {}, before))

    async def stats(self, queue: QueueName, minutes: int = 0) -> Stats:
        return await self._call(self._stats_call(queue, minutes))

    async def ledger(self, queue: QueueName) -> Ledger:
        return (await self._call(self._stats_call(queue))).ledger

    async def history(self, queue: QueueName, message_id: str) -> list[Event]:
        return await self._run(manage.history(self._context, queue_name(queue), check_id(message_id)))

    async def queues(self) -> list[str]:
        return await self._call(self._store.queues())

    async def workers(self) -> list[RegisteredWorker]:
        return await self._call(self._store.workers())

    # ---- running a queue ---------------------------------------------------------------------------------

    async def configure(self, queue: QueueName, **settings: Any) -> Policy:
        return await self._run(manage.configure(self._context, self._name(queue), settings))

    async def policy(self, queue: QueueName) -> Policy:
        return await self._call(self._store.policy(queue_name(queue)))

    async def pause(self, queue: QueueName) -> bool:
        return await self._run(manage.pause(self._context, self._name(queue)))

    async def resume(self, queue: QueueName) -> bool:
        return await self._run(manage.resume(self._context, self._name(queue)))

    async def redrive(
        self,
        queue: QueueName,
        *,
        id: str | None = None,
        ids: Iterable[str] | None = None,
        reason: str | None = None,
        limit: int | None = None,
        rate: str | None = None,
    ) -> Redriven:
        return await self._run(self._redrive_flow(queue, id, ids, reason, limit, rate))

    async def purge(self, queue: QueueName, state: MessageState = "ready") -> int:
        return await self._run(self._purge_flow(queue, state))

    async def remove_queue(self, queue: QueueName) -> bool:
        return await self._run(manage.remove_queue(self._context, queue_name(queue)))

    async def check(
        self, queue: QueueName, *, mend: bool = False, progress: Callable[[int], object] | None = None
    ) -> Checked:
        return await self._run(self._check_flow(queue, mend, progress))

    # ---- the journal -------------------------------------------------------------------------------------

    async def journal(self, queue: QueueName, after: int = 0, limit: int = PAGE_MAX) -> JournalPage:
        return await self._call(self._journal_call(queue, after, limit))

    async def journal_reader(self, queue: QueueName, name: str, read_to: int | None = None) -> int:
        return await self._call(self._reader_call(queue, name, read_to))

    async def journal_forget(self, queue: QueueName, name: str) -> bool:
        return await self._call(self._forget_call(queue, name))

    async def journal_trim(self, queue: QueueName, up_to: int) -> int:
        return await self._call(self._trim_call(queue, up_to))


# One text for both faces: what a method means does not depend on how it is called.
for _name, _method in vars(AsyncWaypost).items():
    if callable(_method) and not _method.__doc__:
        _method.__doc__ = getattr(getattr(Waypost, _name, None), "__doc__", None)
