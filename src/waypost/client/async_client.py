"""The client for an event loop: the same methods as `Waypost`, awaited."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, Unpack, cast, overload
from weakref import WeakKeyDictionary

from waypost.checks import SECONDS_MAX, check_count, check_function, check_id, check_items, check_seconds
from waypost.client.base import (
    DEFAULT_RETRY,
    BaseClient,
    Listing,
    begin_transaction,
    is_stop,
    ttl_ms,
)
from waypost.client.handler_types import (
    PlainBatchDecorator,
    PlainDecorator,
    PlainJobDecorator,
    TypedBatchDecorator,
    TypedDecorator,
    TypedJobDecorator,
)
from waypost.client.in_progress import SharedCalls
from waypost.client.options import (
    DeadFilters,
    GroupOptions,
    HandlerOptions,
    ListingFilters,
    PageFilters,
    PublishKeywords,
    PublishManyKeywords,
    QueueName,
    QueueSettings,
    ScheduleKeywords,
    SparkJobOptions,
)
from waypost.errors import UnusableClient
from waypost.message import Message, MessagePage, Queue, Retry, StoredMessage, queue_name, queue_type
from waypost.middleware import Outgoing
from waypost.operations import action_log, edit, manage, publish, publish_middleware, receive, records, schedules, wait
from waypost.operations.backfill import Backfilled
from waypost.operations.edit import UNCHANGED
from waypost.operations.flow import AfterCommit, Flow, drive_async
from waypost.operations.publish import PublishOptions, split_transaction, validate_options
from waypost.operations.settle_target import SettleTarget
from waypost.policy import (
    BACKFILL_INSTANTS,
    HEALTH_WINDOW_SECONDS,
    LEADER_TTL_MS,
    PAGE_MAX,
    RECORDS_MAX,
    RetryPolicy,
)
from waypost.schedule.schedule import Schedule
from waypost.times import Duration
from waypost.values import (
    CancelStatus,
    CheckReport,
    Counted,
    Drained,
    ExtendStatus,
    FoundMessage,
    Lease,
    Ledger,
    Links,
    MessageState,
    Published,
    Redriven,
    RescheduleStatus,
)
from waypost.views import (
    BulkAction,
    BulkActions,
    Event,
    GroupList,
    JournalPage,
    LoggedAction,
    LoggedActions,
    Policy,
    RegisteredWorker,
    SavedRecord,
    Stats,
    StoredRecords,
)

if TYPE_CHECKING:
    import asyncio

    from waypost.operations.receive import Make
    from waypost.schedule.promoter import PromoterTick
    from waypost.schedule.scheduler import Tick
    from waypost.store.port import AsyncExecutor, Call, Executor
    from waypost.worker.handler import HandledQueues, SeveralQueues
    from waypost.worker.worker import Worker

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


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
        self._message = await self._client._receive(self._queue, self._wait, self._as_type)
        if self._message is not None:
            self._message.settle_target = self._client._settle_target(self._retry, renew=self._renew)
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
            return await self._client._finish(message, error, self._retry)
        finally:
            self._client._gate.end_block()


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
            return await self._client._finish(self, error, self._retry)
        finally:
            self._client._gate.end_block()


class _Connection:
    """The executor of one event loop; connections cannot move between loops."""

    __slots__ = ("lock", "opened", "shared_calls")

    def __init__(self, lock: asyncio.Lock) -> None:
        self.lock = lock
        self.opened: AsyncExecutor | None = None
        #: What tasks of this loop do at the same time.
        self.shared_calls = SharedCalls(on_loop=True)

    @property
    def executor(self) -> AsyncExecutor:
        """Return the executor of an opened connection."""
        assert self.opened is not None
        return self.opened


class AsyncWaypost(BaseClient):
    """A client for asyncio. Tasks may share it; each event loop gets its own connections. A forked child makes its own.

    Give a `url` (`sqlite:///orders.db`, `valkey://127.0.0.1:6379`, `postgresql://…`, `memory://`), or your own client,
    pool or engine as `client`, which stays yours, or a `store`. It connects at the first use, within `start_timeout`
    (3 s); after that, connections that fail are tried again for `retry_budget` (120 s; 0: never) without doing anything
    twice. The other options:

    - `namespace` ("wp") separates its queues from others on the same server.
    - `durability="fsync"` reports a write as done when it is on the disk of a Valkey server.
    - `queues` declares queues; with `strict_queues=True` only those, and those with handlers, can be used.
    - `middleware` is called around publishes and handlers; handlers get `state` as a parameter.
    - `on_event` is called with an `Observed` for every step; `redact` removes secrets from bodies in the journal.
    - `wake` chooses how idle workers are woken; `clock` is a clock for tests.

    Each method checks its arguments before anything is sent, and raises an `InvalidInput` that names the wrong one.
    Those that talk to the store raise `StoreUnavailable` if nothing was done, and `OutcomeUnknown` if the reply was
    lost for longer than the retry budget. All errors are in `waypost.errors`.
    """

    _awaited = True
    _connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection] | None = None

    async def open(self) -> Self:
        """Connect now rather than at the first use, or again after `close`, and return the client.

        Raises `StoreUnavailable` if the store does not reply within `start_timeout`.
        """
        self._closed = False
        await self._connected()
        return self

    async def close(self) -> None:
        """Close the connections. It may be called again, and `open` connects again.

        A client passed as `client=` stays open: it is yours. Workers are not stopped: `drain` does that.
        """
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
        if connection is not None and connection.opened is not None:
            await connection.opened.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *ended: object) -> None:
        await self.close()

    async def _connected(self) -> AsyncExecutor:
        return (await self._connection()).executor

    def _opened_connection(self) -> _Connection | None:
        """Return the connection of this event loop if there is an open one, as there usually is."""
        import asyncio

        self._check_usable()
        connections = self._connections
        connection = None if connections is None else connections.get(asyncio.get_running_loop())
        return None if connection is None or connection.opened is None else connection

    async def _connection(self) -> _Connection:
        import asyncio

        self._check_usable()
        loop = asyncio.get_running_loop()
        with self._connecting:
            if self._connections is None:
                self._connections = WeakKeyDictionary()
            connection = self._connections.get(loop)
            if connection is None:
                connection = self._connections[loop] = _Connection(asyncio.Lock())
        if connection.opened is None:
            async with connection.lock:
                if connection.opened is None:
                    connection.opened = await self._store.connect_async(start_timeout=self._start_timeout)
        return connection

    def _connect_blocks(self) -> Executor:
        from waypost.worker.executor_adapters import LoopExecutor

        try:
            return super()._connect_blocks()
        except UnusableClient:
            # The caller's asyncio client: renewals share the event loop of the block.
            connections = [] if self._connections is None else list(self._connections.items())
            for loop, connection in connections:
                if connection.opened is not None and loop.is_running():
                    return LoopExecutor(connection.opened, loop)
            raise

    async def _run(self, flow: Flow[T]) -> T:
        return await drive_async(await self._connected(), flow)

    async def _run_in(self, transaction: object, flow_of: Callable[[AfterCommit | None], tuple[str, Flow[T]]]) -> T:
        """Run what `flow_of` returns in the caller's transaction, or by itself if that is None."""
        if transaction is None:
            return await self._run(flow_of(None)[1])
        from waypost.outbox.transaction_adapters import run_in_transaction, wake_after_commit

        name, flow = flow_of(partial(wake_after_commit, transaction, self._context.wake))
        return await run_in_transaction(self._store, transaction, name, flow, self._call)

    async def _call(self, call: Call[T]) -> T:
        return await drive_async(await self._connected(), self._context.attempt(call))

    async def _finish(self, message: Message[Any], error: BaseException | None, retry: RetryPolicy) -> bool:
        connection = await self._connection()
        flow = publish_middleware.finish(
            self._context, message, error, retry, stopped=is_stop(error), lines=connection.shared_calls.settles
        )
        return await drive_async(connection.executor, flow)

    def _settle_target(self, retry: RetryPolicy, *, renew: bool) -> SettleTarget:
        held = self._blocks if renew else None
        return SettleTarget(self._context, retry, begin_transaction, async_executor=self._connected, held=held)

    # ---- the way of a message ----------------------------------------------------------------------------

    @overload
    async def publish(self, queue: Queue[T], body: T, **options: Unpack[PublishKeywords]) -> Published: ...
    @overload
    async def publish(self, queue: str, body: object, **options: Unpack[PublishKeywords]) -> Published: ...
    async def publish(self, queue: QueueName, body: object, **options: Unpack[PublishKeywords]) -> Published:
        """Publish a message and return its id and what happened to it.

        That is `queued`, `delayed`, `duplicate`, `replaced` or `extended`. `body` is bytes, text, a JSON value, a
        dataclass, a msgspec Struct or a pydantic model; with a `Queue("orders", Order)` as `queue` it must be an
        `Order`. The options:

        - `key` (text, a function of the body, or `CONTENT`) makes it the only message of its key while it is
          unfinished, or for `window` (seconds, timedelta). With `unique="until_claimed"` the key is free once it is
          claimed, with `unique="live_or_dead"` it stays in use while it is a dead letter. `on_conflict` decides what
          happens to a second one: `keep` the first (the default), `replace` it, `extend` its due time, or `error`.
        - `delay` (seconds, timedelta) or `at` (a datetime with a time zone) makes it a timer.
        - `expires` (seconds, timedelta, or a datetime with a time zone): if it is not claimed by then, it is never
          handed out and ends `dropped`, cause `lapsed`.
        - `priority` is 0 to 9 (5), higher first. `group`, `headers`, `trace` (W3C), `correlation_id` and `reply_to` are
          sent with the message.
        - `chain=True` begins a chain, which `message.then` continues and `wait_chain` waits for. `after` (chain ids, or
          the results of `publish` for their first messages) makes this message wait until those chains have ended.
        - `retry` (`Exponential`, `Linear`, `Constant` or `NoRetry`) and `timeout` (seconds, timedelta) override those
          of the handler for this message. `max_deliveries` of the queue still applies.
        - `block_timeout` (1 s) is how long it waits for room in a full queue whose policy is `block`.
        - `transaction` (a session or connection of SQLAlchemy, psycopg, asyncpg, Django, Tortoise or SQLite) makes the
          message a part of it: it exists if and only if that transaction commits, which you do yourself.

        Raises `QueueFull` if there is no room, `KeyInUse` with `on_conflict="error"`, `InvalidBody`, `BodyTooLarge` or
        `BodyTooDeep` for a body that cannot be published, and `QueueDrained` after `drain`.

            post.publish("orders", {"id": 7}, key="order:7", delay=timedelta(minutes=1))
        """
        name = self._name(queue)
        with self._gate.publish():
            if self._registry.middleware or "transaction" in options:
                return (await self._published_through(queue, [body], options, self._send_one))[0]  # type: ignore[no-any-return]
            connection = self._opened_connection() or await self._connection()
            return await drive_async(
                connection.executor,
                publish.publish(
                    self._context,
                    name,
                    body,
                    validate_options(options),
                    queue_type(queue),
                    connection.shared_calls.publishes,
                ),
            )

    async def _send_one(self, outgoing: Outgoing) -> list[Published]:
        transaction, options = split_transaction(outgoing.options)
        if transaction is not None:
            return await self._send_within(transaction, outgoing, validate_options(options))
        (body,) = outgoing.bodies
        name, connection = self._name(outgoing.queue), await self._connection()
        flow = publish.publish(
            self._context, name, body, validate_options(options), outgoing.type, connection.shared_calls.publishes
        )
        return [await drive_async(connection.executor, flow)]

    async def _send_within(self, transaction: object, outgoing: Outgoing, options: PublishOptions) -> list[Published]:
        from waypost.outbox.transaction_adapters import run_in_transaction, wake_after_commit

        name, after_commit = self._name(outgoing.queue), partial(wake_after_commit, transaction, self._context.wake)
        flow = publish.publish_within(self._context, name, outgoing.bodies, options, outgoing.type, after_commit)
        return await run_in_transaction(self._store, transaction, name, flow, self._call)

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
        """Publish a batch and return the results in the order of `bodies`.

        `bodies` may be a generator: it is encoded while earlier parts are being sent. The options are those of
        `publish`, for all messages of the batch; `key` and `group` may be functions of the body; a constant key is
        refused, since a key belongs to one message. The batch is sent in parts of up to 512 messages; of each part all
        messages are stored or none.

        Raises `PartialPublish`, which has the known result of each message, if a part fails or a body is refused after
        others were stored; the error itself if nothing was stored.

            post.publish_many(orders, (Order(number) for number in range(10_000)), key=lambda order: str(order.id))
        """
        name = self._name(queue)
        with self._gate.publish():
            if self._registry.middleware or "transaction" in options:
                return await self._published_through(queue, bodies, options, self._send_many)  # type: ignore[no-any-return]
            return await self._run(
                publish.publish_many(self._context, name, bodies, self._many_options(options), queue_type(queue))
            )

    async def _send_many(self, outgoing: Outgoing) -> list[Published]:
        transaction, given = split_transaction(outgoing.options)
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
        """Claim a message of a `queue` for a `with` block, whose end settles it; None after `wait` seconds without one.

        `wait=None` waits for ever. By default the message is done; `message.retry()`, `.snooze()`, `.dead()` and
        `.drop()` decide otherwise, and so do `Retry`, `Snooze`, `Dead` and `Drop` when raised. Any other exception is a
        failure: `retry` decides when the message is tried again or that it is dead, and the exception reaches the
        caller. `SystemExit` is a failure too. A stop from outside releases the message unchanged: `KeyboardInterrupt`,
        an exception raised by a signal handler of the program, the cancellation of the task, or the end of a generator
        that contains the block.

        The lease is renewed while the block runs, from a thread; with `renew=False` you call `extend` yourself. If it
        is lost nevertheless, that is logged, `message.lease_lost` is True, the settle changes nothing, and no error is
        raised.

            with post.receive("orders", wait=5) as message:
                if message is not None:
                    charge(message.body)
        """
        self._check_receive(queue, wait, retry, renew)
        return AsyncReception(self, queue, wait, queue_type(queue), retry, renew)

    async def _receive(
        self, queue: QueueName, wait: Duration | None, as_type: type[T] | None, make: Make[T] = Message
    ) -> Message[T] | None:
        message = None
        self._gate.begin_claim()
        try:
            message = await self._run(self._receive_flow(queue, wait, as_type, make))
        finally:
            self._gate.end_claim(found=message is not None)
        return message

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
        """Yield the messages of a `queue`, each for a `with` block of its own as in `receive`; ends with a drain.

        With `wait` (seconds, timedelta) it ends after this time without a message; without `wait` it continues. `retry`
        and `renew` are those of `receive`. A message that is settled neither by its block nor by a call
        (`message.done()`) before the next one is retried; after a `break` the current message is released.

            for message in post.consume("orders", wait=30):
                with message:
                    charge(message.body)
        """
        self._check_receive(queue, wait, retry, renew)
        return self._consumed(queue, wait, retry, renew)

    async def _consumed(
        self, queue: QueueName, wait: Duration | None, retry: RetryPolicy, renew: bool
    ) -> AsyncIterator[AsyncConsumed[Any]]:
        def make(name: str, lease: Lease, as_type: type[Any] | None) -> AsyncConsumed[Any]:
            return AsyncConsumed(name, lease, as_type, self, retry, renew)

        while True:
            message = await self._receive(queue, wait, queue_type(queue), make)
            if message is None:
                return
            assert isinstance(message, AsyncConsumed)
            if renew:
                self._blocks.add(message)
            try:
                yield message
            except GeneratorExit as left:
                await message._end(left)
                raise
            await message._end(None if message.outcome is not None else Retry(reason="left unsettled"))

    async def extend(self, message: Message[Any]) -> ExtendStatus:
        """Renew the lease of a received `message`: `ok`, `lost`, or `cancel` if a cancel was requested.

        It is needed only with `renew=False`. After `lost` another worker may have the message, and a settle of it
        changes nothing.
        """
        return (await self._run(self._extend_flow(message)))[0]

    async def cancel(
        self,
        queue: QueueName | Published,
        id: str | None = None,
        *,
        key: str | None = None,
        transaction: object = None,
    ) -> CancelStatus:
        """Cancel a message: `cancelled`, `requested` (it is running), `finished` or `unknown`.

        Pass the result of `publish` as `queue`, or a queue with an `id` or a `key`. A running handler is notified of
        the request at the next renewal of its lease at the latest; its effects so far remain.

        `transaction` is that of `publish`: the message is cancelled if and only if that transaction commits. Until then
        no worker can claim it, and the worker of a running message finds the request only when it renews the lease.

            post.cancel("orders", key="order:7")
        """
        return await self._run_in(transaction, partial(self._cancel_flow, queue, id, key))

    async def reschedule(
        self,
        queue: QueueName | Published,
        id: str | None = None,
        *,
        key: str | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        transaction: object = None,
    ) -> RescheduleStatus:
        """Change the due time of a timer: `moved`, `due` (it is due already, and unchanged) or `unknown`.

        Pass the result of `publish` as `queue`, or a queue with an `id` or a `key`; and `delay` (seconds or a
        timedelta) or `at`. A time in the past makes it ready now. A message that waits for a retry is a timer too.

        `transaction` is that of `publish`: the timer is moved if and only if that transaction commits.

            post.reschedule("mails", key="welcome-7", delay=3600)
        """
        return await self._run_in(transaction, partial(self._reschedule_flow, queue, id, key, delay, at))

    async def result(
        self,
        queue: QueueName | Published,
        id: str | None = None,
        *,
        default: Any = None,
        as_type: type[Any] | None = None,
    ) -> Any:
        """Return the result that a handler kept for a message, `default` if there is none or it is too old.

        Pass the result of `publish` as `queue`, or a queue and an `id`. `as_type` decodes the result as this type.

        Raises `ResultNotKept` if the result could not be encoded, `Undecodable` if it is not of `as_type`.
        """
        return self._result_value(await self._call(self._result_call(queue, id, as_type)), default, as_type)

    async def wait_result(
        self,
        queue: QueueName | Published,
        id: str | None = None,
        *,
        timeout: Duration = 60.0,
        as_type: type[Any] | None = None,
    ) -> Any:
        """Wait until a message is done and return the result that its handler kept, None if it kept none.

        Pass the result of `publish` as `queue`, or a queue and an `id`; `timeout` is in seconds or a timedelta.
        `as_type` decodes the result as this type.

        Raises `MessageDead` or `MessageRemoved` if it ends in another way, `ResultNotKept` if its result could not be
        encoded, `EndUnknown` if nothing of it is stored any more, and `WaitTimeout` when the time is up, which changes
        nothing: it can be waited for again.

            published = post.publish("sums", [1, 2, 3])
            total = post.wait_result(published, timeout=5)
        """
        return await self._run(wait.wait_result(self._context, *self._reference(queue, id), timeout, as_type))

    async def wait_chain(
        self, chain: str | Published, timeout: Duration = 60.0, *, as_type: type[Any] | None = None
    ) -> Any:
        """Wait until every message of a chain is done and return the result that the last one kept, None if none.

        `chain` is what `publish(…, chain=True)` returned, or its `chain_id`; `timeout` is in seconds or a timedelta.
        `as_type` decodes the result as this type.

        Raises `ChainFailed` if a message of it ends in another way, `EndUnknown` if no such chain is known, and
        `WaitTimeout` when the time is up.
        """
        return await self._run(wait.wait_chain(self._context, chain, timeout, as_type))

    # ---- handlers and workers ----------------------------------------------------------------------------

    @overload
    def handler(
        self, queue: Queue[T], *, batch: None = None, **options: Unpack[HandlerOptions]
    ) -> TypedDecorator[T, Coroutine[Any, Any, Published]]: ...
    @overload
    def handler(
        self, queue: Queue[T], *, batch: int, **options: Unpack[HandlerOptions]
    ) -> TypedBatchDecorator[T, Coroutine[Any, Any, Published]]: ...
    @overload
    def handler(
        self, queue: str, *, batch: None = None, **options: Unpack[HandlerOptions]
    ) -> PlainDecorator[Coroutine[Any, Any, Published]]: ...
    @overload
    def handler(
        self, queue: str, *, batch: int, **options: Unpack[HandlerOptions]
    ) -> PlainBatchDecorator[Coroutine[Any, Any, Published]]: ...
    @overload
    def handler(
        self,
        queue: SeveralQueues,
        *,
        batch: int | None = None,
        **options: Unpack[HandlerOptions],
    ) -> Callable[[F], F]: ...
    def handler(self, queue: HandledQueues, *, batch: int | None = None, **options: Unpack[HandlerOptions]) -> Any:
        """Register a function for the messages of a `queue`, or of several; a worker runs it.

        It gets the body, as the annotated type of its first parameter, and by annotation or name the `Message`, the
        `headers` and the client's `state`. An async function runs on the worker's event loop, any other in a thread, or
        with `process=True` in a separate process, which is killed where a coroutine would be cancelled. It ends by
        returning (done), by returning or raising `Retry`, `Snooze`, `Dead` or `Drop`, or by an error, for which `retry`
        decides (`Exponential()`). With `manual=True` the message is retried unless the function settles it by
        `message.done()` or a similar method.

        `concurrency` calls (10) run at once in a worker. `timeout` stops a handler that can be stopped, which then has
        failed; `max_run` (an hour) does so too, and also ends the renewal of its lease. With `batch` it gets lists of
        up to this number. Several queues share the concurrency: pass a list, or a mapping to weights as in `{"urgent":
        3, "normal": 1}`, by which turns are divided among the queues with messages. With `types`, classes or their
        names, it handles only messages of these types: a queue may have several such handlers, and one without `types`
        for all other types; without that one, other workers handle the other types.

        `on_lease_lost` is called with a message whose lease was lost while it was handled. With `result_ttl` its return
        value is kept as the result of the message for this time (`wait_result`).

        A parameter annotated as a session or connection of SQLAlchemy, psycopg or sqlite3 gets a transaction of the
        store's database, committed together with the settle; `engine` is an engine or a session maker of SQLAlchemy, if
        it is not the client's own.

        The function is unchanged, except for a new method `publish`, which publishes to its queue, if it has a single
        one, with the handler's body type. Raises `ConfigurationError` for options or parameters that cannot be
        combined.

            @post.handler(Queue("orders", Order), concurrency=50, timeout=30)
            async def charge(order: Order, message: Message[Order]) -> None: ...

            charge.publish(Order(7), key="order:7")
        """
        return self._register_handler(queue, batch, options, self.publish)

    @overload
    def spark_job(
        self, queue: Queue[T], **options: Unpack[SparkJobOptions]
    ) -> TypedJobDecorator[T, Coroutine[Any, Any, Published]]: ...
    @overload
    def spark_job(
        self, queue: str, **options: Unpack[SparkJobOptions]
    ) -> PlainJobDecorator[Coroutine[Any, Any, Published]]: ...
    @overload
    def spark_job(self, queue: SeveralQueues, **options: Unpack[SparkJobOptions]) -> Callable[[F], F]: ...
    def spark_job(self, queue: HandledQueues, **options: Unpack[SparkJobOptions]) -> Any:
        """Register a function for the messages of a `queue`, or of several, that computes with Spark, in a thread.

        It gets a session as its parameter named `spark` or annotated `SparkSession`, and otherwise the parameters of a
        handler: the body, the message, the headers, the state. Its outcomes are those of a handler. The session is
        opened for the first message, and shared by all jobs of the client: on `master` (`local[*]`; `sc://host` is
        Spark Connect) with the settings `config`, or by a function `session` that returns one.

        The lease is renewed while it runs. All Spark jobs that it starts belong to one group, which is cancelled when
        the lease is lost, when the message is cancelled, after `timeout` or `max_run` (an hour), and when the time
        limit of the worker's stop is over; the message is then released or retried once the function has ended. An
        error of Spark is kept with one line of text. `concurrency` is 1. `retry`, `manual`, `on_lease_lost`,
        `result_ttl`, `types` and several queues are those of `handler`.

        PySpark is imported by the worker, not here. Raises `ConfigurationError` for options or parameters that cannot
        be combined.

            @post.spark_job(Queue("reports", Day), timeout=timedelta(minutes=30))
            def summarize(day: Day, spark: SparkSession) -> None: ...

            summarize.publish(Day("2026-03-01"), key="summary:2026-03-01")
        """
        return self._register_spark_job(queue, options, self.publish)

    def worker(
        self,
        queues: Iterable[QueueName] | None = None,
        *,
        max_handlers: int | None = None,
        health_window: Duration = HEALTH_WINDOW_SECONDS,
        scheduler: bool = True,
        promoter: bool = False,
    ) -> Worker:
        """Return a worker for the registered handlers, or for those of `queues` only.

        `run` it until it is stopped, or let it run in the background during a `with` block. With `max_handlers` at most
        that many handlers run at once over all its queues, which take turns. Its `health()` is red when it could have
        claimed and did not for `health_window` (30 s). It also fires schedules, unless `scheduler=False`, and with
        `promoter=True` it promotes timers of all queues: one of all workers does so at a time.

        Raises `ConfigurationError` if there is no handler for one of the queues, or none at all.

            post.worker().run()
        """
        return self._make_worker(
            queues, health_window, max_handlers=max_handlers, scheduler=scheduler, promoter=promoter
        )

    async def drain(self, timeout: Duration = 25.0) -> Drained:
        """Stop claiming and publishing, wait for calls in progress, release messages that have not started, and report.

        Workers of this client are stopped; handlers have `timeout` (25 s, or a timedelta) to end. Publishes raise
        `QueueDrained` from now on, except those of handlers that still run; `receive` returns None. It may be called
        again; with `timeout=0` it changes nothing and only reports. Other clients, even of the same queues, continue.
        """
        import asyncio

        timeout = check_seconds("timeout", timeout, least=-SECONDS_MAX)
        for pause in self._drain_pauses(timeout):
            await asyncio.sleep(pause)
        lost = 0
        if timeout > 0 and self._context.queues_with_lost_claims() and not self._closed:
            lost = await self._run(receive.give_back_lost_claims(self._context))
        return self._drained(lost)

    # ---- reading -----------------------------------------------------------------------------------------

    @overload
    async def peek(self, queue: Queue[T], n: int = 10, state: MessageState = "ready") -> list[StoredMessage[T]]: ...
    @overload
    async def peek(self, queue: str, n: int = 10, state: MessageState = "ready") -> list[StoredMessage[Any]]: ...
    async def peek(self, queue: QueueName, n: int = 10, state: MessageState = "ready") -> list[StoredMessage[Any]]:
        """Return the first `n` messages of a `state` in a `queue` as a list: `messages` with a limit."""
        check_count("n", n, 1, PAGE_MAX)
        return [stored async for stored in self.messages(queue, state, limit=n)]

    async def _pages(self, listing: Listing[T]) -> AsyncIterator[StoredMessage[T]]:
        while listing.more:
            for stored in await self._run(listing.flow()):
                yield stored

    @overload
    def messages(
        self, queue: Queue[T], state: MessageState = "ready", **filters: Unpack[ListingFilters]
    ) -> AsyncIterator[StoredMessage[T]]: ...
    @overload
    def messages(
        self, queue: str, state: MessageState = "ready", **filters: Unpack[ListingFilters]
    ) -> AsyncIterator[StoredMessage[Any]]: ...
    def messages(
        self, queue: QueueName, state: MessageState = "ready", **filters: Unpack[ListingFilters]
    ) -> AsyncIterator[StoredMessage[Any]]:
        """List the messages of a `queue` in a `state`, page by page, without changing them.

        The states are `ready`, `delayed`, `waiting`, `leased`, `dead` and `done`. `id`, `key`, `group` and `reason`
        select; `before` (a datetime with a time zone) selects timers by their due time, and `died_after` those of the
        dead letters that died then or later, without reading older ones; `limit` ends the listing. `key_prefix`,
        `type_name`, `header`, `published_before`, `published_after`, and of errors `error_type`, `error` and
        `died_before` are those of `purge`: no store has an index for them, so each message is read and compared here.
        Messages that change meanwhile may be missed or listed twice.

            for letter in post.messages("orders", "dead", reason="rejected", limit=100):
                print(letter.id, letter.ended_at, letter.error)
        """
        return self._pages(Listing(self._context, queue, state, **filters))

    @overload
    async def page(
        self,
        queue: Queue[T],
        state: MessageState = "ready",
        *,
        cursor: str | None = None,
        limit: int = 50,
        **filters: Unpack[PageFilters],
    ) -> MessagePage[T]: ...
    @overload
    async def page(
        self,
        queue: str,
        state: MessageState = "ready",
        *,
        cursor: str | None = None,
        limit: int = 50,
        **filters: Unpack[PageFilters],
    ) -> MessagePage[Any]: ...
    async def page(
        self,
        queue: QueueName,
        state: MessageState = "ready",
        *,
        cursor: str | None = None,
        limit: int = 50,
        **filters: Unpack[PageFilters],
    ) -> MessagePage[Any]:
        """Return one part of a listing of a `queue`, and the cursor of the next one, for programs that page through it.

        `state` and the filters (`id`, `key`, `group`, `reason`, `before`, `died_after`) are those of `messages`. Pass
        the `cursor` of a part with the same queue, state and filters to continue; None is the beginning, and the end. A
        part may have fewer than `limit` messages, or none, and still have a cursor.

            page = post.page("orders", "dead", limit=20)
            if page.cursor is not None:
                page = post.page("orders", "dead", limit=20, cursor=page.cursor)
        """
        return await self._run(self._page_flow(queue, state, cursor, limit, filters))

    async def find(self, id: str) -> list[FoundMessage]:
        """Find a message by its `id` in all queues: where it is, or how it ended if that is still stored.

        All queues are read in one flush. If none has it, their journals are searched for its events. The list is empty
        if nothing of it is stored any more.
        """
        return await self._run(manage.find(self._context, check_id(id)))

    async def find_key(self, key: str, queue: QueueName | None = None) -> list[FoundMessage]:
        """Find the unfinished messages that have a `key`: in one `queue`, or in all of them, read in one flush.

        A queue has at most two of them: one that is handled, and the one that was published meanwhile. A key is free
        again when its message has ended; list finished messages and dead letters by `messages(queue, state, key=…)`.
        """
        name = None if queue is None else queue_name(queue)
        return await self._run(manage.find_key(self._context, key, name))

    async def links(self, queue: QueueName | Published, id: str | None = None) -> Links:
        """Return the chains of a message: the one that it is part of, began, or waits for.

        Pass the result of `publish` as `queue`, or a queue and an `id`. Chains and messages are named as `queue/id`. Of
        a chain that it began, unfinished messages and those that wait for its end are listed, up to 100 of each.
        """
        return await self._call(self._store.links(*self._reference(queue, id)))

    def dead_letters(self, queue: QueueName, **filters: Unpack[ListingFilters]) -> AsyncIterator[StoredMessage[Any]]:
        """List the dead letters of a `queue`, oldest first: `messages` with `state="dead"` and its filters.

        These are `id`, `key`, `group`, `reason`, `error_type`, `error`, `key_prefix`, `type_name`, `header`,
        `died_after`, `died_before`, `published_after`, `published_before` and `limit`; `before` is for timers.
        """
        return self.messages(queue, "dead", **filters)

    def timers(self, queue: QueueName, before: datetime | None = None) -> AsyncIterator[StoredMessage[Any]]:
        """List the messages of a `queue` that are not due yet, soonest first: `messages` with `state="delayed"`.

        `before` (a datetime with a time zone) lists those that are due before it.
        """
        return self.messages(queue, "delayed", before=before)

    async def stats(self, queue: QueueName, minutes: int = 0) -> Stats:
        """Return the state of a `queue`: its ledger, ages, readers of its journal, and counters of its last `minutes`.

        Up to 1,440 minutes are kept. A queue that does not exist is returned as empty.
        """
        return Stats.from_record(await self._call(self._stats_call(queue, minutes)))

    async def stats_many(self, queues: Iterable[QueueName], minutes: int = 0) -> list[Stats]:
        """Return the state of several `queues`, in their order, read in one flush: `stats` for each.

        `minutes` is that of `stats`.
        """
        return [Stats.from_record(one) for one in await self._run(self._stats_many_flow(queues, minutes))]

    async def ledger(self, queue: QueueName) -> Ledger:
        """Return what became of every message of a `queue`. Its `balance` is 0 at any moment."""
        return (await self._call(self._stats_call(queue))).ledger

    async def history(self, queue: QueueName | Published, id: str | None = None) -> list[Event]:
        """Return all events of one message that the journal still has, oldest first.

        Pass the result of `publish` as `queue`, or a queue and an `id`.
        """
        found = await self._run(manage.history(self._context, *self._reference(queue, id)))
        return [Event.from_record(one) for one in found]

    async def queues(self) -> list[str]:
        """Return the names of all queues in this namespace."""
        return await self._call(self._store.queues())

    async def workers(self) -> list[RegisteredWorker]:
        """Return the registered workers: where they run, what they serve, and their health."""
        return [RegisteredWorker.from_record(one) for one in await self._call(self._store.workers())]

    async def stop_worker(self, name: str) -> bool:
        """Request a worker to stop, by its `name`; return whether there is one of that name.

        It reads the request with its next heartbeat, within 15 seconds, and then drains as after a signal: running
        handlers may end, and messages that have not started are returned to their queues. `workers` lists the names.
        """
        return await self._run(self._request_worker_flow(name, "stop"))

    async def quiet_worker(self, name: str) -> bool:
        """Request a worker to stop claiming, and to finish its messages; return whether there is one of that name.

        `name` is one of `workers`. It reads the request with its next heartbeat, within 15 seconds.
        """
        return await self._run(self._request_worker_flow(name, "quiet"))

    # ---- shared records ----------------------------------------------------------------------------------

    async def save_record(
        self,
        kind: str,
        name: str,
        data: bytes | None,
        *,
        version: int | None = None,
        ttl: Duration | None = None,
        keep: int = RECORDS_MAX,
    ) -> SavedRecord:
        """Save a small piece of `data` under a `kind` and `name`, for all programs of this store; None removes it.

        With a `version` it is saved only if the record still has that version; 0: only if there is no record. The
        result has the current record. A record with exactly this data counts as saved, so that a repeat after a lost
        reply succeeds. After `ttl` the store deletes it; of each kind the newest `keep` records stay. Choose a `kind`
        of your own; those of waypost begin with `waypost-`.

            saved = post.save_record("deploys", "lock", b"me", version=0, ttl=600)
        """
        flow = records.save_record(self._context, kind, name, data, version=version, ttl=ttl, keep=keep)
        return SavedRecord.from_record(await self._run(flow))

    async def records(
        self, kind: str, *, names: Iterable[str] = (), cursor: str | None = None, limit: int = 100
    ) -> StoredRecords:
        """Return the shared records of a `kind`, the newest first, page by page, or those of these `names`.

        `limit` is the size of a page, `cursor` the cursor of the previous page.
        """
        flow = records.records(self._context, kind, names=list(check_items("names", names)), cursor=cursor, limit=limit)
        return StoredRecords.from_record(await self._run(flow))

    # ---- the log of actions ------------------------------------------------------------------------------

    async def log_action(self, action: LoggedAction) -> LoggedAction:
        """Append an `action` of a person to the log that the web page and `waypost actions` show.

        The log keeps the newest 1,000 entries. The web page, its API and commands append to it themselves; methods of a
        client do not, because a program may call them for each message.
        """
        return await self._run(action_log.log_action(self._context, action))

    async def actions(self, *, cursor: str | None = None, limit: int = 50) -> LoggedActions:
        """Return the log of actions, the newest first, page by page: who did what, with what result.

        `limit` is the size of a page, `cursor` the cursor of the previous page.
        """
        return await self._run(action_log.actions(self._context, cursor=cursor, limit=limit))

    # ---- running a queue ---------------------------------------------------------------------------------

    async def configure(self, queue: QueueName, **settings: Unpack[QueueSettings]) -> Policy:
        """Change the settings of a `queue`, for every client, and return its new policy.

        A change applies from the next publish, claim or settle on. Durations are seconds or timedeltas, and None
        removes a limit. The settings:

        - `lease`: how long a claimed message belongs to its worker (60 s). None: at most once, a claim removes it.
        - `max_deliveries`: how often a message may be claimed before it is dead (10).
        - `max_pending`: how many messages may wait, and `overload` what a publish beyond that does: `raise`, `block` or
          `drop_oldest`.
        - `max_running`: how many messages may be leased at once, over all workers. `rate`: claims in a window, as
          "100/m".
        - `journal`: what is journalled: `off`, `failures`, `all` or `full`. `journal_max`: how many events are kept.
        - `dead_max`, `dead_keep`: how many dead letters are kept, and for how long.
        - `completed`: how many finished messages are kept for listings; True for 1,000.
        - `hide_bodies`: True hides bodies, headers and results of this queue from all users of web pages.
        - `tracebacks`: False stores the last error of a message without its traceback (True).
        - `fair`: True takes turns between groups, so that a group with many messages does not delay the others.
        - `order`: "group" hands out the messages of a group one at a time, in order. `on_failure`: whether one that
          failed lets the next one `pass` or `hold`s the group until it is tried again (`hold`).
        - `group_max_running`, `group_rate`, `group_max_pending`: the same limits for each group.

        Raises `InvalidPolicy` for an invalid setting or value.

            post.configure("orders", lease=timedelta(minutes=2), max_running=20, rate="100/m")
        """
        return Policy.from_record(await self._run(manage.configure(self._context, self._name(queue), settings)))

    async def policy(self, queue: QueueName) -> Policy:
        """Return the current settings of a `queue`, by the names of `configure`."""
        return Policy.from_record(await self._call(self._store.policy(queue_name(queue))))

    async def pause(self, queue: QueueName) -> bool:
        """Hand out no messages of a `queue` until `resume`; publishes, settles and renewals continue.

        Returns whether this changed anything.
        """
        return await self._run(manage.pause(self._context, self._name(queue)))

    async def resume(self, queue: QueueName) -> bool:
        """Hand out messages of a `queue` again, and wake workers for them. Returns whether this changed anything."""
        return await self._run(manage.resume(self._context, self._name(queue)))

    async def groups(
        self, queue: QueueName, *, group: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> GroupList:
        """Return up to `limit` groups of a `queue` that takes turns between them, by name, or only one `group`.

        Groups are listed that have unfinished messages, are paused or have settings of their own. The result has a
        `cursor` if there are more: pass it to continue. Raises `InvalidInput` if the queue does not take turns.
        """
        found = await self._run(manage.groups(self._context, self._name(queue), limit, cursor, group))
        return GroupList.from_record(found)

    async def configure_group(self, queue: QueueName, group: str, **settings: Unpack[GroupOptions]) -> bool:
        """Change the settings of a single `group` of a `queue`; return whether that changed anything.

        `weight` is how many messages it hands out where another group hands out one (1 to 100). `max_running`, `rate`
        and `max_pending` are its limits in place of the queue's `group_max_running`, `group_rate` and
        `group_max_pending`; None restores those of the queue.

            post.configure_group("orders", "acme", weight=3, rate="100/m")
        """
        return await self._run(manage.configure_group(self._context, self._name(queue), group, settings))

    async def pause_group(self, queue: QueueName, group: str) -> bool:
        """Hand out no messages of a `group` of a `queue` until `resume_group`; return whether this changed anything."""
        return await self._run(manage.pause_group(self._context, self._name(queue), group, paused=True))

    async def resume_group(self, queue: QueueName, group: str) -> bool:
        """Hand out messages of a `group` of a `queue` again, and wake workers; return whether this changed anything."""
        return await self._run(manage.pause_group(self._context, self._name(queue), group, paused=False))

    async def skip_held(self, queue: QueueName, group: str) -> str | None:
        """Let the next message of an ordered `group` of a `queue` pass the failed one; return the id of the failed one.

        The failed message keeps its place, is tried again when it is due, and is then the next of its group. None if no
        message holds the group.
        """
        return await self._run(manage.skip_held(self._context, self._name(queue), group))

    async def redrive(
        self,
        queue: QueueName,
        *,
        id: str | None = None,
        ids: Iterable[str] | None = None,
        reason: str | None = None,
        limit: int | None = None,
        rate: str | None = None,
        transaction: object = None,
    ) -> Redriven:
        """Make dead letters of a `queue` ready again with new counts, and return their ids.

        Choose one by its `id`, some by `ids`, those of a `reason`, or all. `limit` bounds their number, `rate`
        ("100/s") their rate. A letter whose key is in use meanwhile stays dead, and is among the `duplicates` of the
        result.

        `transaction` is that of `publish`: the letters are redriven if and only if that transaction commits. It locks
        them until then, and takes no `rate`.

            post.redrive("orders", reason="retries_exhausted", rate="100/s")
        """
        return await self._run_in(transaction, partial(self._redrive_flow, queue, id, ids, reason, limit, rate))

    async def purge(
        self,
        queue: QueueName,
        state: MessageState | None = None,
        *,
        ids: Iterable[str] | None = None,
        **filters: Unpack[DeadFilters],
    ) -> int:
        """Remove all messages of a `queue` in a `state`, and return how many there were.

        The states are `ready` (the default), `delayed`, `waiting`, `dead` and `done`. It cannot be undone. In the
        ledger, messages that could still be handed out count as cancelled. Filters select some of them: `error_type`,
        `error`, `group`, `key_prefix`, `type_name`, `header` ("NAME=VALUE"), `published_before`, `published_after`; of
        dead letters also `reason`, `died_before`, `died_after`. With `ids` it removes those dead letters and nothing
        else.

            post.purge("orders", "dead", reason="rejected", died_before=last_week)
        """
        return await self._run(self._purge_flow(queue, state, ids, filters))

    async def replace_dead(
        self, queue: QueueName, id: str, body: object = UNCHANGED, *, headers: Mapping[str, str] | None = None
    ) -> Published | None:
        """Send a dead letter again with another `body` or other `headers`; None if there is no such letter any more.

        `queue` and `id` are those of the letter.

        A new message replaces it in one step, however often the call is repeated: its header `waypost-edited-from` has
        the id of the letter, and key, group, priority and correlation id are those of the letter. If the key is in use
        meanwhile the status is `duplicate`, and the letter stays. Raises `QueueFull` as a publish does.

            post.replace_dead("orders", letter.id, {"id": 7, "amount": 10})
        """
        return await self._run(edit.replace_dead(self._context, self._name(queue), id, body, headers))

    async def count_messages(
        self, queue: QueueName, state: MessageState = "dead", *, limit: int = 40_000, **filters: Unpack[DeadFilters]
    ) -> Counted:
        """Count the messages of a `queue` in a `state` that match the filters, reading at most `limit` of them.

        The states are `ready`, `delayed`, `waiting` and `dead`, the filters those of `purge`: `reason`, `error_type`,
        `error`, `group`, `key_prefix`, `type_name`, `header`, `died_before`, `died_after`, `published_before`,
        `published_after`. The result says how many messages were searched, of how many.

            post.count_messages("orders", "delayed", header="tenant=acme").count
        """
        return await self._run(self._count_flow(queue, state, limit, filters))

    # ---- bulk actions ------------------------------------------------------------------------------------

    async def start_bulk(
        self,
        queue: QueueName,
        verb: Literal["redrive", "purge", "cancel", "reschedule", "prioritize"],
        *,
        state: MessageState | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        priority: int | None = None,
        rate: str | None = None,
        user: str | None = None,
        via: str = "python",
        **filters: Unpack[DeadFilters],
    ) -> BulkAction:
        """Start a bulk action on the messages of a `queue` that match the filters, and return at once.

        `verb` is `redrive` or `purge` (dead letters), `cancel` (`state` is `ready`, `delayed` or `waiting`),
        `reschedule` (timers: `delay` from now, or `at`; a delay of 0 makes them due), or `prioritize` (`state` is
        `ready` or `delayed`: they get the `priority`, and ready ones become the last of it; messages of ordered groups
        keep theirs, because it has no effect there).

        The action is saved in the store, and continues when this program ends: web servers (`waypost web`) and
        `run_bulk` continue it, one at a time. Messages that die or are published after the start are not included. The
        filters are those of `purge`: `reason`, `error_type`, `error`, `group`, `key_prefix`, `type_name`, `header`,
        `died_before`, `died_after`, `published_before`, `published_after`. `rate` ("100/s") limits its rate; `user` and
        `via` are stored in the log of actions.

            action = post.start_bulk("orders", "redrive", error_type="builtins.TimeoutError", rate="50/s")
        """
        flow = self._start_bulk_flow(queue, verb, state, (delay, at), priority, rate, user, via, filters)
        return await self._run(flow)

    async def bulk_action(self, id: str) -> BulkAction:
        """Return the bulk action with this `id` and its progress."""
        return await self._run(self._find_bulk_flow(id))

    async def bulk_actions(self, *, cursor: str | None = None, limit: int = 50) -> BulkActions:
        """Return the bulk actions of the store, the newest first, page by page; it keeps the newest 200.

        `limit` is the size of a page, `cursor` the cursor of the previous page.
        """
        return await self._run(self._list_bulk_flow(cursor, limit))

    async def change_bulk(self, id: str, change: Literal["pause", "resume", "cancel"]) -> BulkAction:
        """Pause, resume or cancel the bulk action with this `id`, as `change` says.

        A step of up to 100 letters that is in progress ends first.
        """
        return await self._run(self._change_bulk_flow(id, change))

    async def run_bulk(self, id: str, *, seconds: Duration = 60) -> BulkAction:
        """Continue a bulk action until it ends or for `seconds`; do nothing if another program works on it.

        `id` is that of the action.
        """
        return await self._run(self._run_bulk_flow(id, check_seconds("seconds", seconds)))

    async def remove_queue(self, queue: QueueName) -> bool:
        """Remove an empty `queue`, with its settings, counters, history and journal; return whether there was one.

        Raises `QueueNotEmpty`, which names what is left, if it holds messages in any state, dead letters, schedules,
        chains that have not finished, or registered readers of its journal. The next publish creates a new queue of
        this name; a worker that still serves it does not.
        """
        return await self._run(manage.remove_queue(self._context, queue_name(queue)))

    async def check(
        self, queue: QueueName, *, mend: bool = False, progress: Callable[[int], object] | None = None
    ) -> CheckReport:
        """Find damaged records of a `queue`: messages that no claim can reach, missing bodies, wrong counters.

        It goes step by step and can run beside workers; `progress` is called with the number of records read so far.
        With `mend=True`, messages that can be handed out become the first of their priority, the others are removed and
        counted as dropped, and counters are corrected. Each change is journalled.
        """
        return await self._run(self._check_flow(queue, mend, progress))

    # ---- schedules ----------------------------------------------------------------------------------------

    async def save_schedule(
        self, name: str, *, queue: QueueName, key: str | None = None, **rule: Unpack[ScheduleKeywords]
    ) -> Schedule:
        """Save a schedule, which publishes `body` to `queue` by a `cron` pattern in zone `tz`, or `every` n seconds.

        It is identified by its queue and `key`, which is made of `name` and rule unless given. To save it again changes
        nothing; another rule under the same key determines the next fire anew. The options:

        - `cron` may be a list of patterns, and `exclude` has dates, in zone `tz`, on which they do not fire.
        - `missed` decides what happens to instants that were not fired in time (`grace`, 60 s): `skip` them (the
          default), fire `once` for all, or `CatchUp(n)`.
        - `overlap` decides what happens to an instant while the last run has not ended: `allow` it to fire (the
          default), `skip` it, or `queue_one`: fire when the run ends.
        - `start` and `end` (datetimes with a time zone) and `max_fires` bound it; `jitter` delays its fires by random
          times up to this.
        - `priority`, `group`, `headers`, `correlation_id`, `reply_to`, `retry` and `timeout` are those of its messages.
        - `expires` (seconds, timedelta): a message that is not claimed within this time after its fire is never handed
          out. The time begins when the message is published, also for a catch-up, a trigger or a backfill.

        Raises `InvalidSchedule` for an invalid pattern, zone or rule.

            post.save_schedule("rollup", queue="reports", cron="0 9 * * *", tz="Europe/Madrid", missed="once")
        """
        schedule = await self._run(self._save_flow(name, queue, key, rule))
        self._refresh_schedulers()
        return schedule

    async def remove_schedule(self, name: str, *, queue: QueueName | None = None) -> bool:
        """Remove the schedule of this `name` or key; return whether there was one. Its published messages stay.

        `queue` is needed if several queues have one of that name: without it, `UnknownSchedule` is raised.
        """
        return await self._run(self._change_flow(schedules.remove, name, queue))

    async def pause_schedule(self, name: str, *, queue: QueueName | None = None) -> bool:
        """Stop firing the schedule of this `name` or key until it is resumed; return whether that changed anything.

        `queue` is needed if several queues have one of that name. Raises `UnknownSchedule` if there is none.
        """
        return await self._run(self._change_flow(schedules.pause, name, queue))

    async def resume_schedule(self, name: str, *, queue: QueueName | None = None) -> bool:
        """Fire the schedule of this `name` or key again from its next instant on; return whether that changed it.

        Instants during the pause do not count as missed. `queue` is needed if several queues have one of that name.
        Raises `UnknownSchedule` if there is none.
        """
        changed = await self._run(self._change_flow(schedules.resume, name, queue))
        self._refresh_schedulers()
        return changed

    async def trigger_schedule(self, name: str, *, queue: QueueName | None = None) -> Published:
        """Publish the message of the schedule of this `name` or key now. Its next fire does not change.

        `queue` is needed if several queues have one of that name. Raises `UnknownSchedule` if there is none, and
        `QueueFull` if the queue has no room.
        """
        return await self._run(self._change_flow(schedules.trigger, name, queue))

    async def backfill(
        self,
        name: str,
        start: datetime,
        end: datetime,
        *,
        queue: QueueName | None = None,
        limit: int = BACKFILL_INSTANTS,
        dry_run: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> Backfilled:
        """Publish the messages of the schedule `name` for past instants, from `start` on, before `end`.

        Instants that fired, in time or by an earlier backfill, are skipped: a rerun publishes nothing twice. A paused
        schedule can be backfilled too. `queue` is needed if several queues have one of that name. `limit` is the most
        instants that the interval may have (10,000); `progress` is called with the number of instants done so far;
        `dry_run` only counts.

        Raises `InvalidSchedule` for an interval that is empty, ends in the future or has too many instants,
        `UnknownSchedule` if there is no such schedule, and `QueueFull` when the queue has no room for more: messages
        published until then stay.

            post.backfill("rollup", datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 8, tzinfo=UTC))
        """
        return await self._run(self._backfill_flow(name, start, end, queue, limit, dry_run, progress))

    async def schedules(self, queue: QueueName | None = None, *, count: int = 1) -> list[Schedule]:
        """Return all schedules, or those of a `queue`, each with its next `count` fires."""
        return await self._run(self._schedules_flow(queue, count))

    async def run_scheduler(
        self, *, ttl: Duration = LEADER_TTL_MS / 1000, on_tick: Callable[[Tick], object] | None = None
    ) -> None:
        """Fire schedules until it is cancelled. Workers do this too; one of all leads at a time.

        A leader that does not renew its lease for `ttl` (15 s) is replaced. `on_tick` is called with the result of each
        tick.
        """
        from waypost.schedule.loop import BackgroundLoop
        from waypost.schedule.scheduler import Scheduler

        scheduler = Scheduler(self._context, ttl_ms=ttl_ms(ttl), on_tick=check_function("on_tick", on_tick))
        background = BackgroundLoop(await self._connected(), scheduler)
        self._backgrounds.add(background)
        await background.run()

    async def run_promoter(
        self, *, ttl: Duration = LEADER_TTL_MS / 1000, on_tick: Callable[[PromoterTick], object] | None = None
    ) -> None:
        """Make timers ready when they are due and wake workers for them until it is cancelled.

        Claims make due timers ready by themselves: no message depends on this. A leader that does not renew its lease
        for `ttl` (15 s) is replaced. `on_tick` is called with the result of each tick.
        """
        from waypost.schedule.loop import BackgroundLoop
        from waypost.schedule.promoter import Promoter

        promoter = Promoter(self._context, ttl_ms=ttl_ms(ttl), on_tick=check_function("on_tick", on_tick))
        await BackgroundLoop(await self._connected(), promoter).run()

    # ---- the journal -------------------------------------------------------------------------------------

    async def journal(self, queue: QueueName, after: int = 0, limit: int = PAGE_MAX) -> JournalPage:
        """Return up to `limit` events of a `queue` after the number `after`, in order. Continue from the page's `last`.

        Events that were trimmed are missing: `first_kept` of the page is the number of the first event that is kept.

            page = post.journal("orders", after=0)
            while page.events:
                page = post.journal("orders", after=page.last)
        """
        return JournalPage.from_record(await self._call(self._journal_call(queue, after, limit)))

    async def journal_reader(self, queue: QueueName, name: str, read_to: int | None = None) -> int:
        """Register a reader of a queue's journal, or record how far it has read; return its position.

        Events of `queue` that the reader `name` has not read are not trimmed, up to `journal_max`. `read_to` is the
        number of the last event that it no longer needs; without it only the registration is renewed.
        """
        return await self._call(self._reader_call(queue, name, read_to))

    async def journal_forget(self, queue: QueueName, name: str) -> bool:
        """Remove the reader `name` of the journal of `queue`. Returns whether it was registered."""
        return await self._call(self._forget_call(queue, name))

    async def journal_trim(self, queue: QueueName, up_to: int) -> int:
        """Delete events of a `queue` up to the number `up_to`, but none that a reader still needs.

        Returns the number of the first event that is kept.
        """
        return await self._call(self._trim_call(queue, up_to))
