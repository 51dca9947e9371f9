"""The sync client: its methods block."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack, cast, overload

from waypost.checks import SECONDS_MAX, check_count, check_function, check_id, check_seconds
from waypost.client.base import (
    DEFAULT_RETRY,
    BaseClient,
    Listing,
    begin_transaction,
    check_stop,
    is_stop,
    ttl_ms,
)
from waypost.client.options import (
    ListingFilters,
    PageFilters,
    PublishKeywords,
    PublishManyKeywords,
    QueueName,
    QueueSettings,
    ScheduleKeywords,
)
from waypost.message import Duration, Message, MessagePage, Queue, Retry, StoredMessage, queue_name, queue_type
from waypost.middleware import Outgoing
from waypost.operations import manage, publish, publish_middleware, receive, schedules, wait
from waypost.operations.flow import Flow, drive
from waypost.operations.publish import PublishOptions, split_transaction, validate_options
from waypost.operations.settle_target import SettleTarget
from waypost.policy import HEALTH_WINDOW_SECONDS, LEADER_TTL_MS, PAGE_MAX, Policy, RetryPolicy
from waypost.schedule.promoter import Promoter, PromoterTick
from waypost.schedule.schedule import Schedule
from waypost.schedule.scheduler import Scheduler, Tick
from waypost.values import (
    CancelStatus,
    CheckReport,
    Drained,
    Event,
    ExtendStatus,
    FoundMessage,
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
    from waypost.store.port import Call, Executor
    from waypost.worker.sync_worker import SyncWorker

T = TypeVar("T")


class Reception(Generic[T]):
    """A message for the length of a `with` block: claimed at its start, settled at its end."""

    __slots__ = ("_as_type", "_client", "_message", "_queue", "_renew", "_retry", "_wait")

    def __init__(
        self,
        client: Waypost,
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

    def __enter__(self) -> Message[T] | None:
        self._message = self._client._run(self._client._receive_flow(self._queue, self._wait, self._as_type))
        if self._message is not None:
            self._message.settle_target = self._client._settle_target(self._retry, renew=self._renew)
            self._client._gate.received(1)
            if self._renew:
                self._client._blocks.add(self._message)
        return self._message

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        message, self._message = self._message, None
        if message is None:
            return False
        self._client._blocks.discard(message)
        try:
            return self._client._run(
                publish_middleware.finish(self._client._context, message, error, self._retry, stopped=is_stop(error))
            )
        finally:
            self._client._gate.received(-1)


class Consumed(Message[T]):
    """A message of `consume`: the end of its `with` block settles it."""

    __slots__ = ("_client", "_ended", "_renew", "_retry")

    def __init__(
        self, queue: str, lease: Lease, as_type: type[T] | None, client: Waypost, retry: RetryPolicy, renew: bool
    ) -> None:
        super().__init__(queue, lease, as_type, client._settle_target(retry, renew=renew))
        self._client = client
        self._retry = retry
        self._renew = renew
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return self._end(error)

    def _end(self, error: BaseException | None) -> bool:
        if self._ended:
            return False
        self._ended = True
        self._client._blocks.discard(self)
        try:
            return self._client._run(
                publish_middleware.finish(self._client._context, self, error, self._retry, stopped=is_stop(error))
            )
        finally:
            self._client._gate.received(-1)


class Waypost(BaseClient):
    """A client that blocks. Threads may share it; a forked child must make its own.

    Give a URL (`sqlite:///orders.db`, `valkey://127.0.0.1:6379`, `memory://`), or your own redis client with
    `client=`. It connects at the first use, within `start_timeout`; after that, connections that fail are retried
    for `retry_budget` seconds (0: never) without doing anything twice.
    """

    _executor: Executor | None = None

    def open(self) -> Self:
        """Connect now rather than at the first use, or again after `close`."""
        self._closed = False
        self._connected()
        return self

    def close(self) -> None:
        """Give the connections back. A client handed in with `client=` stays open: it is yours."""
        executor, self._executor, self._closed = self._executor, None, True
        # In a forked child the connections are the parent's, and closing them would disturb it.
        if self._session.pid == os.getpid():
            self._blocks.close()
            self._wakeups.close()
            self._wakeups.flush()
            if executor is not None:
                executor.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *ended: object) -> None:
        self.close()

    def _connected(self) -> Executor:
        self._check_usable()
        executor = self._executor
        if executor is None:
            with self._connecting:
                executor = self._executor
                if executor is None:
                    executor = self._executor = self._store.connect(start_timeout=self._start_timeout)
        return executor

    def _run(self, flow: Flow[T]) -> T:
        return drive(self._connected(), flow)

    def _call(self, call: Call[T]) -> T:
        return drive(self._connected(), self._context.attempt(call))

    def _settle_target(self, retry: RetryPolicy, *, renew: bool) -> SettleTarget:
        held = self._blocks if renew else None
        return SettleTarget(self._context, retry, begin_transaction, executor=self._connected, held=held)

    # ---- the way of a message ----------------------------------------------------------------------------

    @overload
    def publish(self, queue: Queue[T], body: T, **options: Unpack[PublishKeywords]) -> Published: ...
    @overload
    def publish(self, queue: str, body: object, **options: Unpack[PublishKeywords]) -> Published: ...
    def publish(self, queue: QueueName, body: object, **options: Unpack[PublishKeywords]) -> Published:
        """Publish a message: bytes, text, a JSON value, a dataclass, a msgspec Struct or a pydantic model.

        `key` (text, a function of the body, or `CONTENT`) makes it the only one of its key: while it is unfinished,
        or for `window` seconds. `on_conflict` decides what happens to a second one: `keep` the first (the default),
        `replace` it, `extend` its due time, or `error` (`KeyInUse`).
        `delay` (seconds, timedelta) or `at` (with a time zone) makes it a timer. `priority` is 0 to 9, higher first.
        `group`, `headers`, `trace` (W3C), `correlation_id` and `reply_to` travel along. `chain=True` begins a chain,
        which goes on with `message.then` and can be waited for; `after` (chain ids, or what `publish` returned for
        their first messages) holds this message back until those chains have ended. On a full queue whose policy is
        `block`, waits for room up to `timeout` seconds (1), then raises `QueueFull`.

        `transaction` (a SQLAlchemy session or connection, a connection of psycopg, asyncpg, Django or sqlite3) makes
        the message a part of it: it is there if and only if that transaction commits, which is left to you.
        """
        name = self._name(queue)
        with self._gate.publish():
            if self._registry.middleware or "transaction" in options:
                return (self._published_through(queue, [body], options, self._send_one))[0]  # type: ignore[no-any-return]
            return self._run(publish.publish(self._context, name, body, validate_options(options), queue_type(queue)))

    def _send_one(self, outgoing: Outgoing) -> list[Published]:
        transaction, options = split_transaction(outgoing.options)
        if transaction is not None:
            return self._send_within(transaction, outgoing, validate_options(options))
        (body,) = outgoing.bodies
        flow = publish.publish(
            self._context, self._name(outgoing.queue), body, validate_options(options), outgoing.type
        )
        return [self._run(flow)]

    def _send_within(self, transaction: object, outgoing: Outgoing, options: PublishOptions) -> list[Published]:
        from waypost.outbox.transaction_adapters import open_executor

        name = self._name(outgoing.queue)
        executor = open_executor(self._store, transaction, name, self._call)
        return drive(executor, publish.publish_within(self._context, name, outgoing.bodies, options, outgoing.type))

    @overload
    def publish_many(
        self, queue: Queue[T], bodies: Iterable[T], **options: Unpack[PublishManyKeywords]
    ) -> list[Published]: ...
    @overload
    def publish_many(
        self, queue: str, bodies: Iterable[object], **options: Unpack[PublishManyKeywords]
    ) -> list[Published]: ...
    def publish_many(
        self, queue: QueueName, bodies: Iterable[Any], **options: Unpack[PublishManyKeywords]
    ) -> list[Published]:
        """Publish a batch with the options of `publish` for all; the results are in the order of the bodies.

        `bodies` may be a generator: it is encoded while earlier parts are under way. `key` and `group` may be
        functions of the body. The batch goes in parts of up to 512 messages, each of them whole or not at all. If a
        part fails after others are stored, or a body is refused, `PartialPublish` says what is known of each; if
        nothing was stored, the error itself is raised.
        """
        name = self._name(queue)
        with self._gate.publish():
            if self._registry.middleware or "transaction" in options:
                return self._published_through(queue, bodies, options, self._send_many)  # type: ignore[no-any-return]
            return self._run(
                publish.publish_many(self._context, name, bodies, self._many_options(options), queue_type(queue))
            )

    def _send_many(self, outgoing: Outgoing) -> list[Published]:
        transaction, given = split_transaction(outgoing.options)
        options = self._many_options(cast("PublishManyKeywords", given))
        if transaction is not None:
            return self._send_within(transaction, outgoing, options)
        flow = publish.publish_many(self._context, self._name(outgoing.queue), outgoing.bodies, options, outgoing.type)
        return self._run(flow)

    @overload
    def receive(
        self, queue: Queue[T], *, wait: Duration | None = 0, retry: RetryPolicy = DEFAULT_RETRY, renew: bool = True
    ) -> Reception[T]: ...
    @overload
    def receive(
        self, queue: str, *, wait: Duration | None = 0, retry: RetryPolicy = DEFAULT_RETRY, renew: bool = True
    ) -> Reception[Any]: ...
    def receive(
        self, queue: QueueName, *, wait: Duration | None = 0, retry: RetryPolicy = DEFAULT_RETRY, renew: bool = True
    ) -> Reception[Any]:
        """Claim a message for a `with` block, waiting up to `wait` seconds (None: for ever); None if none came.

        The block's end settles it. By default it is done; `message.retry()`, `.snooze()`, `.dead()` and `.drop()`
        decide otherwise, and so do `Retry`, `Snooze`, `Dead` and `Drop` when raised. Any other exception is a failure:
        `retry` decides when it comes back or that it is dead, and the exception reaches the caller. `SystemExit` is a
        failure too. A stop from outside releases the message as it was: `KeyboardInterrupt`, what a signal handler of
        the program raises, the cancellation of the task, and the end of a generator that the block is in.

        The lease is renewed while the block runs, from a thread; `renew=False` leaves that to you (`extend`). If it is
        lost all the same, that is logged, `message.lease_lost` is True, the settle changes nothing, and no error is
        raised.
        """
        self._check_receive(queue, wait, retry, renew)
        return Reception(self, queue, wait, queue_type(queue), retry, renew)

    @overload
    def consume(
        self, queue: Queue[T], *, wait: Duration | None = None, retry: RetryPolicy = DEFAULT_RETRY, renew: bool = True
    ) -> Iterator[Consumed[T]]: ...
    @overload
    def consume(
        self, queue: str, *, wait: Duration | None = None, retry: RetryPolicy = DEFAULT_RETRY, renew: bool = True
    ) -> Iterator[Consumed[Any]]: ...
    def consume(
        self, queue: QueueName, *, wait: Duration | None = None, retry: RetryPolicy = DEFAULT_RETRY, renew: bool = True
    ) -> Iterator[Consumed[Any]]:
        """One message after the other, each for a `with` block of its own as in `receive`; ends with a drain.

        `wait` ends it when none came for this time. A message that is settled neither by its block nor by a call
        (`message.done()`) before the next one is retried; one that a `break` abandons is given back.
        Leases are renewed as in `receive`.
        """
        self._check_receive(queue, wait, retry, renew)
        return self._consumed(queue, wait, retry, renew)

    def _consumed(
        self, queue: QueueName, wait: Duration | None, retry: RetryPolicy, renew: bool
    ) -> Iterator[Consumed[Any]]:
        def make(name: str, lease: Lease, as_type: type[Any] | None) -> Consumed[Any]:
            return Consumed(name, lease, as_type, self, retry, renew)

        while True:
            message = self._run(self._receive_flow(queue, wait, queue_type(queue), make))
            if message is None:
                return
            assert isinstance(message, Consumed)
            self._gate.received(1)
            if renew:
                self._blocks.add(message)
            try:
                yield message
            except GeneratorExit as left:
                message._end(left)
                raise
            message._end(None if message.outcome is not None else Retry(reason="left unsettled"))

    def extend(self, message: Message[Any]) -> ExtendStatus:
        """Renew the lease of a message: `ok`, `lost`, or `cancel` if a cancel was requested."""
        return self._run(self._extend_flow(message))[0]

    def cancel(self, queue: QueueName | Published, id: str | None = None, *, key: str | None = None) -> CancelStatus:
        """Cancel a message: `cancelled`, `requested` (it is running), `finished` or `unknown`.

        Give what `publish` returned, or a queue with an id or a `key`.
        """
        return self._run(self._cancel_flow(queue, id, key))

    def result(
        self,
        queue: QueueName | Published,
        id: str | None = None,
        *,
        default: Any = None,
        as_type: type[Any] | None = None,
    ) -> Any:
        """Return the result that a handler kept for a message, `default` if there is none or it is too old.

        Give what `publish` returned, or a queue and an id.
        """
        return self._result_value(self._call(self._result_call(queue, id, as_type)), default, as_type)

    def wait_result(
        self,
        queue: QueueName | Published,
        id: str | None = None,
        *,
        timeout: float = 60.0,
        as_type: type[Any] | None = None,
    ) -> Any:
        """Wait until a message is done and return the result that its handler kept, None if it kept none this long.

        Give what `publish` returned, or a queue and an id. Raises `MessageDead` or `MessageRemoved` if it ends in
        another way, `EndUnknown` if no trace of it is left, and `WaitTimeout` when the time is up, which changes
        nothing: it can be waited for again.
        """
        return self._run(wait.wait_result(self._context, *self._reference(queue, id), timeout, as_type))

    def wait_chain(self, chain: str | Published, timeout: float = 60.0, *, as_type: type[Any] | None = None) -> Any:
        """Wait until every message of a chain is done; the result that the last one kept, None if it kept nothing.

        Raises `ChainFailed` if a message of it ends in another way, `EndUnknown` if no such chain is known, and
        `WaitTimeout` when the time is up.
        """
        return self._run(wait.wait_chain(self._context, chain, timeout, as_type))

    # ---- workers -----------------------------------------------------------------------------------------

    def worker(
        self,
        queues: Iterable[QueueName] | None = None,
        *,
        health_window: float = HEALTH_WINDOW_SECONDS,
        scheduler: bool = True,
        promoter: bool = False,
    ) -> SyncWorker:
        """A worker for the registered handlers, or for those of some queues only.

        `run` it until it is stopped; or let it work in the background for the length of a `with` block. Its
        `health()` is red when it could have claimed and did not for `health_window` seconds. It also fires schedules,
        unless `scheduler=False`, and with `promoter=True` it promotes timers of all queues: of all workers one does so
        at a time.
        """
        from waypost.worker.sync_worker import SyncWorker

        return SyncWorker(self._make_worker(queues, health_window, scheduler=scheduler, promoter=promoter))

    def drain(self, timeout: float = 25.0) -> Drained:
        """Stop claiming and publishing, wait for what is under way, give back what has not started, and report.

        Publishes raise `QueueDrained` from here on, but for those of handlers that still run; `receive` gives None.
        Workers of this client are stopped. It may be called again; with `timeout=0` it changes nothing and only
        reports. Other clients, also of the same queues, go on.
        """
        timeout = check_seconds("timeout", timeout, least=-SECONDS_MAX)
        for pause in self._drain_pauses(timeout):
            time.sleep(pause)
        lost = 0
        if timeout > 0 and self._context.queues_with_lost_claims() and not self._closed:
            lost = self._run(receive.give_back_lost_claims(self._context))
        return self._drained(lost)

    # ---- reading -----------------------------------------------------------------------------------------

    @overload
    def peek(self, queue: Queue[T], n: int = 10, state: MessageState = "ready") -> list[StoredMessage[T]]: ...
    @overload
    def peek(self, queue: str, n: int = 10, state: MessageState = "ready") -> list[StoredMessage[Any]]: ...
    def peek(self, queue: QueueName, n: int = 10, state: MessageState = "ready") -> list[StoredMessage[Any]]:
        """Return the first `n` messages of a state as a list: `messages` with a limit."""
        check_count("n", n, 1, PAGE_MAX)
        return list(self.messages(queue, state, limit=n))

    def _pages(self, listing: Listing[T]) -> Iterator[StoredMessage[T]]:
        while listing.more:
            yield from self._run(listing.flow())

    @overload
    def messages(
        self, queue: Queue[T], state: MessageState = "ready", **filters: Unpack[ListingFilters]
    ) -> Iterator[StoredMessage[T]]: ...
    @overload
    def messages(
        self, queue: str, state: MessageState = "ready", **filters: Unpack[ListingFilters]
    ) -> Iterator[StoredMessage[Any]]: ...
    def messages(
        self, queue: QueueName, state: MessageState = "ready", **filters: Unpack[ListingFilters]
    ) -> Iterator[StoredMessage[Any]]:
        """List the messages of a state, page by page, without changing them.

        `id`, `key`, `group` and `reason` select; `before` (a datetime with a time zone) selects timers by their due
        time; `limit` ends the listing. Messages that change meanwhile may be missed or listed twice.
        """
        return self._pages(Listing(self._context, queue, state, **filters))

    @overload
    def page(
        self,
        queue: Queue[T],
        state: MessageState = "ready",
        *,
        cursor: str | None = None,
        limit: int = 50,
        **filters: Unpack[PageFilters],
    ) -> MessagePage[T]: ...
    @overload
    def page(
        self,
        queue: str,
        state: MessageState = "ready",
        *,
        cursor: str | None = None,
        limit: int = 50,
        **filters: Unpack[PageFilters],
    ) -> MessagePage[Any]: ...
    def page(
        self,
        queue: QueueName,
        state: MessageState = "ready",
        *,
        cursor: str | None = None,
        limit: int = 50,
        **filters: Unpack[PageFilters],
    ) -> MessagePage[Any]:
        """Return one part of a listing, and the cursor of the next one, for programs that page through it.

        The filters are those of `messages`. Give the cursor back with the same queue, state and filters; None is the
        beginning, and the end. A part may have fewer than `limit` messages, or none, and a cursor all the same.
        """
        return self._run(self._page_flow(queue, state, cursor, limit, filters))

    def find(self, id: str) -> list[FoundMessage]:
        """Find a message by its id in all queues: where it is, or how it ended if that is still known.

        All queues are asked in one flush. If none has it, their journals are searched for its events.
        """
        return self._run(manage.find(self._context, check_id(id)))

    def dead_letters(self, queue: QueueName, **filters: Unpack[ListingFilters]) -> Iterator[StoredMessage[Any]]:
        """List the dead letters of a queue, oldest first: `messages` with `state="dead"`."""
        return self.messages(queue, "dead", **filters)

    def timers(self, queue: QueueName, before: datetime | None = None) -> Iterator[StoredMessage[Any]]:
        """List messages that are not due yet, soonest first: `messages` with `state="delayed"`."""
        return self.messages(queue, "delayed", before=before)

    def stats(self, queue: QueueName, minutes: int = 0) -> Stats:
        """Return the state of a queue, with counters of its last `minutes`."""
        return self._call(self._stats_call(queue, minutes))

    def stats_many(self, queues: Iterable[QueueName], minutes: int = 0) -> list[Stats]:
        """Return the state of several queues, in their order, read in one flush."""
        return self._run(self._stats_many_flow(queues, minutes))

    def ledger(self, queue: QueueName) -> Ledger:
        """Where every message of a queue went. Its `balance` is 0."""
        return self._call(self._stats_call(queue)).ledger

    def history(self, queue: QueueName | Published, id: str | None = None) -> list[Event]:
        """Return all events of one message that the journal still has.

        Give what `publish` returned, or a queue and an id.
        """
        return self._run(manage.history(self._context, *self._reference(queue, id)))

    def queues(self) -> list[str]:
        """The names of all queues in this namespace."""
        return self._call(self._store.queues())

    def workers(self) -> list[RegisteredWorker]:
        """Return the registered workers: where they run, what they serve, and their health."""
        return self._call(self._store.workers())

    # ---- running a queue ---------------------------------------------------------------------------------

    def configure(self, queue: QueueName, **settings: Unpack[QueueSettings]) -> Policy:
        """Change how a queue behaves, for every client, at once.

        Known are lease, max_deliveries, max_pending, overload ("raise", "block", "drop_oldest"), max_running, rate
        ("100/m"), journal ("off", "failures", "all", "full"), journal_max, dead_max, dead_keep and completed.
        """
        return self._run(manage.configure(self._context, self._name(queue), settings))

    def policy(self, queue: QueueName) -> Policy:
        """How a queue behaves now."""
        return self._call(self._store.policy(queue_name(queue)))

    def pause(self, queue: QueueName) -> bool:
        """Hand out nothing until `resume`; publishes and settles go on. Whether this changed anything."""
        return self._run(manage.pause(self._context, self._name(queue)))

    def resume(self, queue: QueueName) -> bool:
        """Hand out messages again. Whether this changed anything."""
        return self._run(manage.resume(self._context, self._name(queue)))

    def redrive(
        self,
        queue: QueueName,
        *,
        id: str | None = None,
        ids: Iterable[str] | None = None,
        reason: str | None = None,
        limit: int | None = None,
        rate: str | None = None,
    ) -> Redriven:
        """Make dead letters ready again with fresh counts: one, some, those of a reason, or all; "100/s" at most.

        A letter whose key is in use by now stays dead, as `duplicate`.
        """
        return self._run(self._redrive_flow(queue, id, ids, reason, limit, rate))

    def purge(self, queue: QueueName, state: MessageState = "ready") -> int:
        """Remove all messages that are `ready`, `delayed`, `dead` or `done`; how many there were."""
        return self._run(self._purge_flow(queue, state))

    def remove_queue(self, queue: QueueName) -> bool:
        """Remove a queue that is empty, with its settings, counters, history and journal; whether there was one.

        Raises `QueueNotEmpty`, which names what is left, if it holds messages in any state, dead letters, schedules,
        chains that have not finished, or registered readers of its journal. The next publish makes a new queue of
        this name; a worker that still serves it does not.
        """
        return self._run(manage.remove_queue(self._context, queue_name(queue)))

    def check(
        self, queue: QueueName, *, mend: bool = False, progress: Callable[[int], object] | None = None
    ) -> CheckReport:
        """Find damaged records of a queue: messages that no claim can reach, missing bodies, wrong counters.

        It goes step by step and can run beside workers; `progress` gets the number of records read so far. With
        `mend`, messages that can be handed out go back to the head of their priority, the rest is removed and counted
        as dropped, and counters are corrected. Each change is journalled.
        """
        return self._run(self._check_flow(queue, mend, progress))

    # ---- schedules ----------------------------------------------------------------------------------------

    def save_schedule(
        self, name: str, *, queue: QueueName, key: str | None = None, **rule: Unpack[ScheduleKeywords]
    ) -> Schedule:
        """Save a schedule: it publishes `body` to `queue` by a `cron` pattern in zone `tz`, or `every` n seconds.

        `missed` decides about instants that were not fired in time (`grace`, 60 s): `skip` them (the default),
        fire `once` for all, or `CatchUp(n)`. `start`, `end` and `max_fires` bound it; `jitter` spreads its fires over
        so many seconds. `priority`, `group`, `headers`, `correlation_id` and `reply_to` are those of its messages.

        It is known by queue and `key`, which is made of name and rule unless given. To save it again changes nothing;
        another rule under the same key decides its next fire.
        """
        schedule = self._run(self._save_flow(name, queue, key, rule))
        self._refresh_schedulers()
        return schedule

    def remove_schedule(self, name: str, *, queue: QueueName | None = None) -> bool:
        """Remove a schedule by key or name; whether there was one. What it has published stays."""
        return self._run(self._change_flow(schedules.remove, name, queue))

    def pause_schedule(self, name: str, *, queue: QueueName | None = None) -> bool:
        """Fire no more until it is resumed; whether that changed anything."""
        return self._run(self._change_flow(schedules.pause, name, queue))

    def resume_schedule(self, name: str, *, queue: QueueName | None = None) -> bool:
        """Fire again from the next instant on; whether that changed anything. The pause makes no missed fires."""
        changed = self._run(self._change_flow(schedules.resume, name, queue))
        self._refresh_schedulers()
        return changed

    def trigger_schedule(self, name: str, *, queue: QueueName | None = None) -> Published:
        """Publish a schedule's message now. Its next fire stays where it is."""
        return self._run(self._change_flow(schedules.trigger, name, queue))

    def schedules(self, queue: QueueName | None = None, *, count: int = 1) -> list[Schedule]:
        """All schedules, or those of a queue, each with its next `count` fires."""
        return self._run(self._schedules_flow(queue, count))

    def run_scheduler(
        self,
        stop: threading.Event | None = None,
        *,
        ttl: float = LEADER_TTL_MS / 1000,
        on_tick: Callable[[Tick], object] | None = None,
    ) -> None:
        """Fire schedules in this thread until `stop` is set. Workers do this too; of all of them one leads at a time.

        A leader that does not renew its lease for `ttl` seconds is replaced. `on_tick` gets the result of each tick.
        """
        from waypost.schedule.loop import run_blocking

        check_stop(stop)
        scheduler = Scheduler(self._context, ttl_ms=ttl_ms(ttl), on_tick=check_function("on_tick", on_tick))
        run_blocking(self._connected(), scheduler, stop or threading.Event())

    def run_promoter(
        self,
        stop: threading.Event | None = None,
        *,
        ttl: float = LEADER_TTL_MS / 1000,
        on_tick: Callable[[PromoterTick], object] | None = None,
    ) -> None:
        """Make timers ready when they are due and wake workers for them until `stop` is set. Nothing depends on it."""
        from waypost.schedule.loop import run_blocking

        check_stop(stop)
        promoter = Promoter(self._context, ttl_ms=ttl_ms(ttl), on_tick=check_function("on_tick", on_tick))
        run_blocking(self._connected(), promoter, stop or threading.Event())

    # ---- the journal -------------------------------------------------------------------------------------

    def journal(self, queue: QueueName, after: int = 0, limit: int = PAGE_MAX) -> JournalPage:
        """Events of a queue after a number, in order. Go on from the page's `last`."""
        return self._call(self._journal_call(queue, after, limit))

    def journal_reader(self, queue: QueueName, name: str, read_to: int | None = None) -> int:
        """Register a reader, or record how far it has read; return its position. Unread events are not trimmed."""
        return self._call(self._reader_call(queue, name, read_to))

    def journal_forget(self, queue: QueueName, name: str) -> bool:
        """Forget a reader. Whether it was known."""
        return self._call(self._forget_call(queue, name))

    def journal_trim(self, queue: QueueName, up_to: int) -> int:
        """Forget events up to a number, but none that a reader still needs; the first event kept."""
        return self._call(self._trim_call(queue, up_to))
