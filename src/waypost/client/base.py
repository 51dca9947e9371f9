"""The common part of both clients: construction, handlers, schedules, and the checks before a flow."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar, Unpack, cast
from weakref import WeakSet

from waypost import codec
from waypost.checks import (
    COUNTED_STATES,
    PURGED_STATES,
    check_choice,
    check_count,
    check_delay,
    check_flag,
    check_function,
    check_id,
    check_items,
    check_moment,
    check_namespace,
    check_options,
    check_queue,
    check_seconds,
    check_state,
    check_text,
    show,
)
from waypost.client.handler_types import HandlerPublish, with_publish
from waypost.client.in_progress import Blocks, Gate, SharedCalls
from waypost.client.options import (
    RULE_OPTIONS,
    DeadFilters,
    HandlerKeywords,
    HandlerOptions,
    ListingFilters,
    PageFilters,
    PublishManyKeywords,
    QueueName,
    RuleKeywords,
    ScheduleKeywords,
    SparkJobOptions,
)
from waypost.client.registry import Registry, split_weights
from waypost.errors import (
    ConfigurationError,
    ForkedClient,
    InvalidInput,
    InvalidName,
    InvalidTime,
    QueueDrained,
    SchemaTooNew,
)
from waypost.identity import Session
from waypost.message import Message, MessagePage, Queue, StoredMessage, queue_name, queue_type
from waypost.middleware import Middleware, Outgoing, observed_by, published_through
from waypost.operations import bulk, in_transaction, manage, receive, schedules
from waypost.operations.backfill import Backfilled, backfill
from waypost.operations.flow import AfterCommit, ClientContext, Flow, OnEvent
from waypost.operations.publish import OPTIONS, PublishOptions
from waypost.operations.publish_middleware import PublishMiddleware
from waypost.policy import (
    CHUNK_MESSAGES_MAX,
    HEALTH_WINDOW_SECONDS,
    KEY_CHARACTERS_MAX,
    MINUTES_KEPT,
    PAGE_MAX,
    REASON_CHARACTERS_MAX,
    RETRY_BUDGET_SECONDS,
    RETRY_BUDGET_SECONDS_MAX,
    START_TIMEOUT_SECONDS,
    WORKER_CHARACTERS_MAX,
    Durability,
    Exponential,
    RetryPolicy,
    attempts_allowed,
    check_retry,
)
from waypost.schedule.rule import Spec
from waypost.schedule.schedule import Schedule
from waypost.times import Duration, to_datetime
from waypost.values import (
    CancelStatus,
    CheckReport,
    Counted,
    DeadFilter,
    Drained,
    EventPage,
    ExtendStatus,
    MessageState,
    Published,
    Redriven,
    RescheduleStatus,
    StatsRecord,
    WorkerRequest,
)
from waypost.views import BulkAction, BulkActions
from waypost.wake.wakeups import Wakeups
from waypost.worker.handler import HandledQueues, Handler, is_coroutine_function
from waypost.worker.signals import is_stop_request

if TYPE_CHECKING:
    from waypost.operations.settle_target import SettleTarget
    from waypost.outbox.message_transaction import MessageTransaction
    from waypost.outbox.relay.relay import Relay
    from waypost.outbox.relay.target import Target
    from waypost.redaction import Redact
    from waypost.schedule.loop import BackgroundLoop
    from waypost.spark.jobs import SharedSession
    from waypost.store.opening import StoreOptions
    from waypost.store.port import AsyncExecutor, Call, Executor, Store
    from waypost.wake.port import Channel
    from waypost.worker.worker import Embedded, Worker

log = logging.getLogger("waypost")
T = TypeVar("T")
D = TypeVar("D")
F = TypeVar("F", bound=Callable[..., Any])

#: The page size of a listing without a limit.
LISTING_PAGE = 250
#: How often a drain checks whether publishes and workers have ended.
DRAIN_POLL_SECONDS = 0.01
#: What workers need after their time limit: to cancel, to release, to close their connections.
DRAIN_GRACE_SECONDS = 5.0
#: How long it waits for claims of `receive` in progress: longer than a release may take.
CLAIMS_END_SECONDS = 2 * receive.RELEASE_BUDGET_SECONDS
#: Messages that a relay sends in one batch.
RELAY_BATCH = 500
#: A batch that the target does not accept is held for this time before it is delayed: then a worker that stops can end,
#: or another worker whose target replies can claim the messages.
RELAY_HOLD_SECONDS = 30.0
#: The maximum number of next fires that one call lists of a schedule.
NEXT_FIRES_MAX = 1_000
#: Shared by all clients: a policy holds no state.
DEFAULT_RETRY = Exponential()
#: A cursor is refused if it was cut, changed, or is of another listing: stores do not check cursors.
CHECKSUM_BYTES = 9
CURSOR_CHARACTERS_MAX = 1_024


class BaseClient:
    """The common part of both clients: a store, an identity, handlers and schedules, and the checks before a flow."""

    #: Whether calls of this client are awaited.
    _awaited: ClassVar[bool] = False

    def __init__(
        self,
        url: str | None = None,
        *,
        client: object | None = None,
        store: Store | None = None,
        namespace: str = "wp",
        retry_budget: Duration = RETRY_BUDGET_SECONDS,
        start_timeout: Duration = START_TIMEOUT_SECONDS,
        durability: Durability = "server",
        redact: Redact | None = None,
        on_event: OnEvent | None = None,
        clock: Callable[[], int] | None = None,
        queues: Iterable[QueueName] | None = None,
        strict_queues: bool = False,
        middleware: Iterable[Middleware] = (),
        state: object = None,
        wake: str | Channel | None = None,
    ) -> None:
        self._registry = Registry(
            queues=queues, strict=strict_queues, middleware=middleware, state=state, awaited=self._awaited
        )
        if sum(given is not None for given in (url, client, store)) != 1:
            raise ConfigurationError(
                'give exactly one of a URL, client= or store=, as in Waypost("sqlite:///orders.db")'
            )
        retry_budget = check_seconds(
            "retry_budget", retry_budget, most=RETRY_BUDGET_SECONDS_MAX, error=ConfigurationError
        )
        start_timeout = check_seconds("start_timeout", start_timeout, least=0.001, most=3600, error=ConfigurationError)
        check_choice("durability", durability, ("server", "fsync"), ConfigurationError)
        check_namespace(namespace)
        check_function("redact", redact, ConfigurationError)
        check_function("clock", clock, ConfigurationError)
        if store is not None and not all(hasattr(store, name) for name in ("connect", "connect_async", "kind")):
            raise ConfigurationError(f"store= is a store of waypost, not {show(store)}; a URL is given without a name")
        if on_event is not None and (not callable(on_event) or is_coroutine_function(on_event)):
            raise ConfigurationError("on_event is a plain function of one event; it is not awaited")
        # A store must keep results longer than any of our repeats can take.
        replay_ttl_ms = int((2 * retry_budget + 60) * 1000)
        options: StoreOptions = {
            "namespace": namespace, "clock": clock, "replay_ttl_ms": replay_ttl_ms, "durability": durability,
        }  # fmt: skip
        self._store = _store_of(url, client, store, options)
        self._wakeups = _wakeups_of(self._store, wake, start_timeout)
        self._start_timeout = start_timeout
        self._session = Session()
        self._context = ClientContext(
            self._store,
            session=self._session,
            worker=_worker_name(self._session),
            retry_budget=retry_budget,
            wakeups=self._wakeups,
            redact=redact,
            on_event=observed_by(on_event, self._registry.middleware),
            name_of=self._registry.name,
            publish_middleware=PublishMiddleware(lambda: self._registry.middleware, awaited=self._awaited),
        )
        self._gate = Gate(self, self._context)
        #: Calls that threads make at the same time.
        self._shared_calls = SharedCalls(on_loop=False)
        # Weak: a program may make any number of workers. A running worker is kept alive by its run.
        self._workers: WeakSet[Stoppable] = WeakSet()
        #: The workers that a drain found, whose reports it returns.
        self._stopped: list[Stoppable] = []
        #: Queues whose messages are relayed.
        self._relays: dict[str, Relay] = {}
        #: The Spark session of the jobs, once it is open.
        self._spark_session: SharedSession | None = None
        #: Schedules that decorators declared, by queue and key.
        self._declared: dict[tuple[str, str], DeclaredSchedule] = {}
        self._backgrounds: WeakSet[BackgroundLoop] = WeakSet()
        self._closed = False
        self._connecting = threading.Lock()
        #: The blocks of `receive` and `consume` whose leases are renewed.
        self._blocks = Blocks(self._context, self._connect_blocks)

    @property
    def store(self) -> Store:
        """The store behind this client."""
        return self._store

    @property
    def state(self) -> Any:
        """The object that the application passed to its handlers with `state=`."""
        return self._registry.state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store.kind}, namespace={self._store.namespace!r})"

    @property
    def wakeups(self) -> Wakeups:
        """How this client is woken and wakes others: the kind of channel, and whether it works."""
        return self._wakeups

    # ---- handlers and workers ----------------------------------------------------------------------------

    def _extend_flow(self, message: Message[Any]) -> Flow[list[ExtendStatus]]:
        if not isinstance(message, Message):
            raise InvalidInput(f"message must be one that was received, not {show(message)}")
        return receive.extend(self._context, message.queue, [message])

    def use(self, *middleware: Middleware) -> None:
        """Add `middleware`, inside of what there is: around the publishes and for the workers made from now on.

        Raises `ConfigurationError` for what is no `Middleware`, or one whose methods do not fit this client's handlers.
        """
        self._context.on_event = observed_by(
            self._context.on_event, self._registry.use(middleware, awaited=self._awaited)
        )  # fmt: skip

    def _register_handler(
        self, queue: HandledQueues, batch: int | None, options: HandlerOptions, publish: Callable[..., Any] | None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return the decorator of a handler. `publish` is that of the client; None: the function gets none."""
        if callable(queue) and not isinstance(queue, str | Queue):
            raise _missing_arguments("handler", queue, '@post.handler("orders")')
        split_weights(queue)
        check_options("handler", options, HandlerOptions.__annotations__)
        given: HandlerOptions = {"retry": DEFAULT_RETRY, **options}

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            handlers = self._make_handlers(queue, function, batch=batch, store=self._store, **given)
            self._registry.add(*handlers)
            return self._with_publish(function, queue, handlers[0], publish)

        return register

    def _make_handlers(self, queue: HandledQueues, function: Callable[..., Any], **options: Any) -> list[Handler]:
        """Return a handler for each of the queues of a function, which share its concurrency."""
        weights = split_weights(queue)
        for one in weights:
            self._registry.check_handled(one)
        pool = object() if len(weights) > 1 else None
        return [
            Handler(
                one, function, state=self._registry.state, middleware=self._registry.middleware, pool=pool,
                weight=weight, **options,
            )
            for one, weight in weights.items()
        ]  # fmt: skip

    def _with_publish(
        self, function: Callable[..., Any], queue: HandledQueues, handler: Handler, publish: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        # With several queues it is not defined to which of them to publish.
        if publish is None or not isinstance(queue, str | Queue):
            return function
        target = queue if handler.as_type is None else Queue(handler.queue, handler.as_type)
        return with_publish(function, HandlerPublish(publish, target))

    def _register_spark_job(
        self, queue: HandledQueues, options: SparkJobOptions, publish: Callable[..., Any]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return the decorator of a Spark job."""
        from waypost.spark.jobs import SharedSession, SparkJob

        if callable(queue) and not isinstance(queue, str | Queue):
            raise _missing_arguments("spark_job", queue, '@post.spark_job("reports")')
        split_weights(queue)
        check_options("spark_job", options, SparkJobOptions.__annotations__)
        given: dict[str, Any] = {"retry": DEFAULT_RETRY, "concurrency": 1, **options}
        master, config, make = (given.pop(name, None) for name in ("master", "config", "session"))

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            opened = self._spark_session = self._spark_session or SharedSession()
            wrapped = SparkJob(function, opened)
            handlers = self._make_handlers(
                queue, wrapped, where="on Spark", check_start=wrapped.check_can_start, name=wrapped.name, **given
            )
            opened.choose(wrapped.name, master, config, make)
            self._registry.add(*handlers)
            return self._with_publish(function, queue, handlers[0], publish)

        return register

    def relay(
        self,
        queue: QueueName,
        *,
        to: str | Target,
        batch: int = RELAY_BATCH,
        key: str | Callable[[Message[Any]], str | None] | None = None,
        headers: Mapping[str, str] | Callable[[Message[Any]], Mapping[str, str]] | None = None,
        hold: Duration = RELAY_HOLD_SECONDS,
    ) -> Relay:
        """Send the messages of a `queue` on: to Kafka, RabbitMQ, NATS JetStream, a stream, another store, or the lake.

        `to` is a URL (`kafka://host:9092/topic`, `amqp://host/vhost?exchange=…`, `nats://host:4222/subject`,
        `valkey+stream://host:6379/stream`, `postgresql://host/database#queue`, `lake:///folder`) or a
        `waypost.outbox.relay.Target`. A worker sends batches of up to `batch`, one after the other, and settles a
        message when the target has confirmed it: at least once. While the target is away a batch is held for `hold`
        seconds and then put off, both at no cost to its messages; what the target refuses for good is a dead letter.
        `key` is the partition, routing or deduplication key, as the target has it; `headers` are added.

        As a decorator it takes a function of the message, which makes the body that is sent in its place.
        """
        from waypost.outbox.relay.relay import Relay
        from waypost.outbox.relay.waypost import WaypostTarget

        self._registry.check_handled(queue)
        name = queue_name(queue)
        check_count("batch", batch, 1, CHUNK_MESSAGES_MAX, ConfigurationError)
        relay = Relay(name, to, key=key, headers=headers, hold=hold, redact=self._context.redact)
        if isinstance(relay.target, WaypostTarget) and relay.target.is_queue_of(self._store, name):
            raise ConfigurationError(f"queue {name} would be sent on to itself; name another queue after a #")
        handler = Handler(
            name, relay.handler(), concurrency=1, retry=DEFAULT_RETRY, batch=batch, middleware=self._registry.middleware
        )
        self._registry.add(handler, alone=True)
        self._relays[name] = relay
        return relay

    @property
    def middleware(self) -> tuple[Middleware, ...]:
        """The middleware around publishes and handlers, outermost first."""
        return self._registry.middleware

    @property
    def handlers(self) -> list[Handler]:
        """The handlers that a worker of this client would run."""
        return list(self._registry.handlers)

    def _make_worker(
        self,
        queues: Iterable[QueueName] | None,
        health_window: Duration,
        *,
        max_handlers: int | None = None,
        scheduler: bool = True,
        promoter: bool = False,
    ) -> Worker:
        self._check_may_work()
        health_window = check_seconds("health_window", health_window, least=0.001, error=ConfigurationError)
        check_flag("scheduler", scheduler, ConfigurationError)
        check_flag("promoter", promoter, ConfigurationError)
        handlers = self.handlers
        if queues is not None:
            names = [queue_name(queue) for queue in check_items("queues", queues, ConfigurationError)]
            missing = [name for name in names if not self._registry.of(name)]
            if missing:
                raise ConfigurationError(f"no handler is registered for {', '.join(missing)}")
            handlers = [handler for name in dict.fromkeys(names) for handler in self._registry.of(name)]
        return self._worker_for(
            handlers, health_window, max_handlers=max_handlers, scheduler=scheduler, promoter=promoter
        )

    def _worker_for(
        self,
        handlers: Sequence[Handler],
        health_window: float = HEALTH_WINDOW_SECONDS,
        *,
        max_handlers: int | None = None,
        scheduler: bool = True,
        promoter: bool = False,
    ) -> Worker:
        """Return a worker for these handlers, registered or not."""
        from waypost.worker.worker import Worker

        self._check_may_work()
        session = Session()

        def prepare(context: ClientContext) -> Flow[None]:
            queues = list(dict.fromkeys(handler.queue for handler in handlers))
            yield from self._save_declared(context, queues)
            yield from manage.warn_of_cut_retries(context, _attempts_chosen(handlers))
            yield from manage.check_types_without_lease(context, _without_default(handlers))

        relays = [self._relays[handler.queue] for handler in handlers if handler.queue in self._relays]

        def embed(context: ClientContext, executor: AsyncExecutor) -> list[Embedded]:
            parts = self._embed(context, executor, scheduler=scheduler, promoter=promoter)
            return [*parts, *(relay.part() for relay in relays)]

        worker = Worker(
            self._store, handlers, owner=self, name=_worker_name(session), retry_budget=self._context.retry_budget,
            start_timeout=self._start_timeout, on_event=self._context.on_event, wakeups=self._wakeups, session=session,
            redact=self._context.redact, name_of=self._registry.name,
            publish_middleware=self._context._publish_middleware, check=self._check_may_work,
            health_window=health_window, prepare=prepare, embed=embed, max_handlers=max_handlers,
        )  # fmt: skip
        worker.health_notes += [relay.note for relay in relays]
        self._workers.add(worker)
        return worker

    def _check_may_work(self) -> None:
        self._check_usable()
        if self._gate.drained:
            raise QueueDrained("this client was drained and claims no more; make a new one")

    def _drain_pauses(self, timeout: float) -> Iterator[float]:
        """Yield the pauses between the checks of a drain."""
        if timeout <= 0:
            return
        self._gate.drain()
        deadline = time.monotonic() + timeout
        self._stopped = list({*self._stopped, *self._workers})
        for worker in self._stopped:
            worker.request_stop(timeout)
        # A claim in progress releases the message that it returns, at once unless the store does not reply.
        claims_end = min(deadline, time.monotonic() + CLAIMS_END_SECONDS)
        while time.monotonic() < claims_end and self._gate.claiming:
            yield DRAIN_POLL_SECONDS
        while time.monotonic() < deadline and (self._gate.publishing or self._gate.receiving):
            yield DRAIN_POLL_SECONDS
        # A worker whose time limit is over still cancels, releases and unregisters.
        while time.monotonic() < deadline + DRAIN_GRACE_SECONDS and any(worker.is_running for worker in self._stopped):
            yield DRAIN_POLL_SECONDS

    def _drained(self, unsettled: int = 0) -> Drained:
        report = Drained(running=self._gate.receiving, publishing=self._gate.publishing, unsettled=unsettled)
        for worker in {*self._stopped, *self._workers}:
            report += worker.report()
        return report

    def _check_usable(self) -> None:
        if self._session.pid != os.getpid():
            raise ForkedClient(
                "this client was made in the parent process; connections cannot be shared across a fork: "
                "make a new one in the child"
            )
        if self._closed:
            raise ConfigurationError("this client is closed; call open() or make a new one")

    def _connect_blocks(self) -> Executor:
        """Return the connection by which the leases of blocks are renewed; called from a thread."""
        return self._store.connect(start_timeout=self._start_timeout)

    # ---- schedules ---------------------------------------------------------------------------------------

    def cron(
        self,
        pattern: str | Sequence[str],
        *,
        tz: str = "UTC",
        name: str | None = None,
        queue: QueueName | None = None,
        handler: HandlerKeywords | None = None,
        **rule: Unpack[RuleKeywords],
    ) -> Callable[[F], F]:
        """Run a function by a cron `pattern`, or several, in zone `tz`: it is the handler of a queue of its own.

        Workers save the schedule when they start. `queue` and `name` are the function's own name unless given;
        `handler` has options of `handler`, such as `{"timeout": 30}`; the others are those of `save_schedule`:
        `exclude`, `missed`, `overlap`, `grace`, `start`, `end`, `max_fires`, `jitter`, `body`, `priority`, `group`,
        `headers` and `expires`. Unless given, `overlap` is `skip`: an instant does not fire while the last run has not
        ended. Another pattern for the same name changes the schedule. One whose function is gone stays in the store
        until it is removed; workers log it when they start.

        Raises `InvalidSchedule` for a pattern, zone or rule that makes no sense.

            @post.cron("0 9 * * *", tz="Europe/Madrid", missed="once")
            def rollup() -> None: ...
        """
        if callable(pattern):
            raise _missing_arguments("cron", pattern, '@post.cron("0 9 * * *")')
        return self._declare(name, queue, handler, {"cron": pattern, "tz": tz, **rule})

    def every(
        self,
        interval: Duration,
        *,
        name: str | None = None,
        queue: QueueName | None = None,
        handler: HandlerKeywords | None = None,
        **rule: Unpack[RuleKeywords],
    ) -> Callable[[F], F]:
        """Run a function at an `interval` of seconds, or a timedelta: it is the handler of a queue of its own.

        The rest is as for `cron`: `name`, `queue`, `handler`, and of the rule `exclude`, `missed`, `overlap`, `grace`,
        `start`, `end`, `max_fires`, `jitter`, `body`, `priority`, `group`, `headers` and `expires`.

            @post.every(timedelta(minutes=5))
            def refresh() -> None: ...
        """
        if callable(interval):
            raise _missing_arguments("every", interval, "@post.every(60)")
        return self._declare(name, queue, handler, {"every": interval, **rule})

    def _declare(
        self, name: str | None, queue: QueueName | None, handler: HandlerKeywords | None, rule: Mapping[str, Any]
    ) -> Callable[[F], F]:
        check_options("a schedule", rule, RULE_OPTIONS)
        if handler is not None and not (isinstance(handler, Mapping) and all(isinstance(one, str) for one in handler)):
            raise ConfigurationError(f"handler= has options of a handler, as {{'timeout': 30}}, not {show(handler)}")
        check_options("a handler", handler or {}, HandlerKeywords.__annotations__)
        # Invalid rules are refused at the decorator, before the function is known.
        schedules.make_spec("schedule" if name is None else name, declared=True, **rule)

        def register(function: F) -> F:
            chosen = getattr(function, "__name__", "") if name is None else name
            place = check_queue(chosen) if queue is None else queue_name(queue)
            spec = schedules.make_spec(chosen, declared=True, **rule)
            if (place, chosen) in self._declared:
                raise ConfigurationError(f"queue {place} has a schedule {chosen!r} already; give it another name=")
            # The name is the key: a pattern that changes in the program changes the schedule, and adds none.
            self._declared[place, chosen] = DeclaredSchedule(place, chosen, spec)
            options: HandlerKeywords = {**(handler or {})}
            batch = options.pop("batch", None)
            self._register_handler(place if queue is None else queue, batch, options, None)(function)
            return function

        return register

    def _save_declared(self, context: ClientContext, queues: Iterable[str]) -> Flow[None]:
        """At the start of a worker: save the declared schedules of its queues, and log obsolete ones."""
        mine = set(queues)
        for one in self._declared.values():
            if one.queue not in mine:
                continue
            try:
                # The end of one passes while its program goes on: that must not keep a worker from its work.
                saved = yield from schedules.save(context, one.queue, one.key, one.spec, may_be_over=True)
                if saved.next_fire is None and not saved.paused:
                    log.warning(
                        "schedule %r of queue %s is over, and does not fire any more", one.key, one.queue,
                        extra={"event": "schedule_over", "queue": one.queue, "schedule": one.key},
                    )  # fmt: skip
            except SchemaTooNew as error:
                # A worker of a newer release saved it, and schedulers of that release fire it. This worker can run
                # without it.
                log.warning(
                    "schedule %r of queue %s is left as it is: %s", one.key, one.queue, error,
                    extra={"event": "schedule_unreadable", "queue": one.queue, "schedule": one.key},
                )  # fmt: skip
        if not self._declared:
            return
        for queue, listing in (yield from schedules.listings(context, None)).items():
            for stored in listing.schedules:
                known = (queue, stored.key) in self._declared
                if queue in mine and not known and schedules.is_declared(stored):
                    log.warning(
                        "schedule %r of queue %s is not declared by this program any more, and still fires; if it is "
                        "over, remove it", stored.key, queue,
                        extra={"event": "schedule_left", "queue": queue, "schedule": stored.key},
                    )  # fmt: skip
                    context.emit("schedule_left", queue, "skipped", key=stored.key)

    # ---- loops -------------------------------------------------------------------------------------------

    def _embed(
        self, context: ClientContext, executor: AsyncExecutor, *, scheduler: bool, promoter: bool
    ) -> list[BackgroundLoop]:
        """Return the loops of a worker, to be started."""
        from waypost.schedule.loop import BackgroundLoop
        from waypost.schedule.promoter import Promoter
        from waypost.schedule.scheduler import Scheduler

        parts: list[BackgroundLoop] = []
        if scheduler:
            parts.append(BackgroundLoop(executor, Scheduler(context, by_polls=True)))
        if promoter:
            parts.append(BackgroundLoop(executor, Promoter(context)))
        for part in parts:
            self._backgrounds.add(part)
        return parts

    def _refresh_schedulers(self) -> None:
        for background in list(self._backgrounds):
            background.refresh()

    # ---- arguments to flows ------------------------------------------------------------------------------

    def _name(self, queue: QueueName) -> str:
        """Return the validated name of a queue that is to be changed; a strict client reads any queue."""
        return self._registry.name(queue) if self._registry.strict else queue_name(queue)

    def _published_through(
        self, queue: QueueName, bodies: Iterable[object], options: Mapping[str, Any], send: Callable[[Outgoing], Any]
    ) -> Any:
        """Publish through the middleware; `send` is the innermost call."""
        call = published_through(self._registry.middleware, send, awaited=self._awaited)
        return call(Outgoing(queue_name(queue), bodies, dict(options), queue_type(queue)))

    def _check_receive(self, queue: QueueName, wait: Duration | None, retry: RetryPolicy, renew: bool) -> None:
        """Refuse invalid arguments at once, not only when the block begins or the first message is claimed."""
        self._name(queue)
        _wait_seconds(wait)
        check_retry(retry)
        check_flag("renew", renew)

    def _receive_flow(
        self, queue: QueueName, wait: Duration | None, as_type: type[T] | None, make: receive.Make[T] = Message
    ) -> Flow[Message[T] | None]:
        return receive.receive(self._context, self._name(queue), _wait_seconds(wait), as_type, make)

    def _redrive_flow(
        self,
        queue: QueueName,
        id: str | None,
        ids: Iterable[str] | None,
        reason: str | None,
        limit: int | None,
        rate: str | None,
        after_commit: AfterCommit | None,
    ) -> tuple[str, Flow[Redriven]]:
        """Return the name of the queue, and the flow that redrives: as `_cancel_flow`."""
        name = self._name(queue)
        chosen = [] if ids is None else [check_id(one) for one in check_items("ids", ids)]
        if id is not None:
            chosen.append(check_id(id))
        elif ids is not None and not chosen:
            # An empty selection selects nothing, not everything.
            return name, _redriven_nothing()
        if limit is not None:
            check_count("limit", limit, 1, 2**40)
        if reason is not None:
            check_text("reason", reason, REASON_CHARACTERS_MAX)
        if after_commit is None:
            return name, manage.redrive(self._context, name, ids=chosen, reason=reason, limit=limit, rate=rate)
        return name, in_transaction.redrive(
            self._context, name, ids=chosen, reason=reason, limit=limit, rate=rate, after_commit=after_commit
        )

    def _many_options(self, options: PublishManyKeywords) -> PublishOptions:
        check_options("publish_many", options, OPTIONS)
        key = options.get("key")
        if isinstance(key, str):
            raise InvalidName("one key cannot be that of many messages: give a function of the body, or CONTENT")
        return PublishOptions(**options)  # type: ignore[misc]  # `transaction` is taken out before

    def _reference(self, queue: QueueName | Published, id: str | None) -> tuple[str, str]:
        """Return the queue and id of a message that is given as a `Published`, or as queue and id."""
        if isinstance(queue, Published):
            if id is not None:
                raise InvalidInput("what publish returned names its message: give that alone, or a queue and an id")
            return check_queue(queue.queue), check_id(queue.id)
        name = queue_name(queue)
        if id is None:
            raise InvalidInput(f"which message of queue {name}? Give its id, or what publish returned for it")
        return name, check_id(id)

    def _cancel_flow(
        self, queue: QueueName | Published, id: str | None, key: str | None, after_commit: AfterCommit | None
    ) -> tuple[str, Flow[CancelStatus]]:
        """Return the queue's name, and the flow that cancels, in the caller's transaction if it reports its commit."""
        if isinstance(queue, Published) or key is None:
            if key is not None:
                raise InvalidInput("say what to cancel: what publish returned, or a queue with either id= or key=")
            queue, id = self._reference(queue, id)
        name = self._name(queue)
        if after_commit is None:
            return name, manage.cancel(self._context, name, id=id, key=key)
        return name, in_transaction.cancel(self._context, name, id=id, key=key, after_commit=after_commit)

    def _reschedule_flow(
        self,
        queue: QueueName | Published,
        id: str | None,
        key: str | None,
        delay: Duration | None,
        at: datetime | None,
        after_commit: AfterCommit | None,
    ) -> tuple[str, Flow[RescheduleStatus]]:
        """Return the name of the queue, and the flow that changes the due time: as `_cancel_flow`."""
        if isinstance(queue, Published) or key is None:
            if key is not None:
                raise InvalidInput("say which timer: what publish returned, or a queue with either id= or key=")
            queue, id = self._reference(queue, id)
        name = self._name(queue)
        if after_commit is None:
            return name, manage.reschedule(self._context, name, id=id, key=key, delay=delay, at=at)
        return name, in_transaction.reschedule(
            self._context, name, id=id, key=key, delay=delay, at=at, after_commit=after_commit
        )

    def _request_worker_flow(self, name: str, request: WorkerRequest) -> Flow[bool]:
        return manage.request_worker(self._context, name, request)

    def _result_call(self, queue: QueueName | Published, id: str | None, as_type: Any) -> Call[bytes | None]:
        codec.check_type("as_type", as_type)
        return self._store.result(*self._reference(queue, id))

    def _result_value(self, data: bytes | None, default: D, as_type: type[Any] | None) -> Any | D:
        return default if data is None else codec.decode_result(data, as_type)

    def _check_flow(self, queue: QueueName, mend: bool, progress: Callable[[int], object] | None) -> Flow[CheckReport]:
        if progress is not None:
            check_function("progress", progress)
        return manage.check(self._context, self._name(queue), mend=check_flag("mend", mend), progress=progress)

    def _purge_flow(
        self, queue: QueueName, state: MessageState | None, ids: Iterable[str] | None, filters: DeadFilters
    ) -> Flow[int]:
        chosen = None if ids is None else [check_id(one) for one in check_items("ids", ids)]
        state = state if state is not None else "ready" if chosen is None else "dead"
        check_state(state, PURGED_STATES)
        filter = dead_filter("purge", filters)
        if chosen is not None:
            if state != "dead":
                raise InvalidInput(f"ids= is for dead letters; cancel messages that are {state} by their id")
            if filter != DeadFilter():
                raise InvalidInput("give ids= or filters, not both")
            return manage.purge_letters(self._context, self._name(queue), list(dict.fromkeys(chosen)))
        if filter == DeadFilter():
            return manage.purge(self._context, self._name(queue), state)
        if state == "done":
            raise InvalidInput("finished messages are purged all at once, not by a filter")
        return bulk.purge_chosen(self._context, self._name(queue), state, filter)

    def _count_flow(self, queue: QueueName, state: MessageState, limit: int, filters: DeadFilters) -> Flow[Counted]:
        check_state(state, COUNTED_STATES)
        check_count("limit", limit, 1, 2**40)
        return bulk.count(self._context, self._name(queue), state, dead_filter("count_messages", filters), limit)

    def _start_bulk_flow(
        self,
        queue: QueueName,
        verb: bulk.Verb,
        state: MessageState | None,
        when: tuple[Duration | None, datetime | None],
        priority: int | None,
        rate: str | None,
        user: str | None,
        via: str,
        filters: DeadFilters,
    ) -> Flow[BulkAction]:
        name, filter = self._name(queue), dead_filter("start_bulk", filters)
        who = check_text("user", process_user() if user is None else user, WORKER_CHARACTERS_MAX)
        delay, at = when
        if delay is not None and at is not None:
            raise InvalidTime("give delay= or at=, one of them")
        flow = bulk.start(
            self._context, name, verb, filter, state=state,
            delay_ms=None if delay is None else check_delay("delay", delay),
            at_ms=None if at is None else check_moment("at", at), priority=priority,
            rate=rate, user=who, via=check_text("via", via, WORKER_CHARACTERS_MAX),
        )  # fmt: skip
        return _bulk_view(flow)

    def _find_bulk_flow(self, id: str) -> Flow[BulkAction]:
        return _bulk_view(bulk.find(self._context, id))

    def _change_bulk_flow(self, id: str, change: bulk.Change) -> Flow[BulkAction]:
        return _bulk_view(bulk.change(self._context, id, change))

    def _run_bulk_flow(self, id: str, seconds: float) -> Flow[BulkAction]:
        check_seconds("seconds", seconds)
        return _bulk_view(bulk.carry_on(self._context, id, self._context.worker, seconds))

    def _list_bulk_flow(self, cursor: str | None, limit: int) -> Flow[BulkActions]:
        found, more = yield from bulk.list_bulk(self._context, cursor=cursor, limit=limit)
        return BulkActions([bulk_view(one) for one in found], more)

    def _stats_call(self, queue: QueueName, minutes: int = 0) -> Call[StatsRecord]:
        check_count("minutes", minutes, 0, MINUTES_KEPT)
        return self._store.stats(queue_name(queue), minutes=minutes)

    def _stats_many_flow(self, queues: Iterable[QueueName], minutes: int) -> Flow[list[StatsRecord]]:
        check_count("minutes", minutes, 0, MINUTES_KEPT)
        names = [queue_name(queue) for queue in check_items("queues", queues)]
        return manage.stats_of(self._context, names, minutes)

    def _page_flow(
        self, queue: str | Queue[T], state: MessageState, cursor: str | None, limit: int, filters: PageFilters
    ) -> Flow[MessagePage[T]]:
        check_count("limit", limit, 1, PAGE_MAX)
        check_options("page", filters, PageFilters.__annotations__)
        return _one_page(Listing(self._context, queue, state, **filters, limit=limit).from_cursor(cursor))

    def _journal_call(self, queue: QueueName, after: int, limit: int) -> Call[EventPage]:
        check_count("after", after, 0, 2**53)
        return self._store.journal(queue_name(queue), after, check_count("limit", limit, 1, PAGE_MAX))

    def _reader_call(self, queue: QueueName, name: str, read_to: int | None) -> Call[int]:
        if read_to is not None:
            check_count("read_to", read_to, 0, 2**53)
        return self._store.journal_reader(
            self._name(queue), check_text("reader name", name, KEY_CHARACTERS_MAX), read_to
        )

    def _trim_call(self, queue: QueueName, up_to: int) -> Call[int]:
        return self._store.journal_trim(self._name(queue), check_count("up_to", up_to, 0, 2**53))

    def _forget_call(self, queue: QueueName, name: str) -> Call[bool]:
        return self._store.journal_forget(self._name(queue), check_text("reader name", name, KEY_CHARACTERS_MAX))

    def _save_flow(self, name: str, queue: QueueName, key: str | None, rule: ScheduleKeywords) -> Flow[Schedule]:
        place = self._name(queue)
        check_options("save_schedule", rule, RULE_OPTIONS)
        spec = schedules.make_spec(name, as_type=queue_type(queue), **rule)
        chosen = schedules.derived_key(spec) if key is None else check_text("schedule key", key, KEY_CHARACTERS_MAX)
        return schedules.save(self._context, place, chosen, spec)

    def _edit_flow(self, name: str, queue: QueueName, key: str | None, rule: ScheduleKeywords) -> Flow[Schedule]:
        """Return a flow that saves a schedule, or changes of an existing one only what `rule` names."""
        check_options("save_schedule", rule, RULE_OPTIONS)
        return schedules.change(self._context, self._name(queue), name, key, rule)

    def _change_flow(
        self, change: Callable[[ClientContext, str, str | None], Flow[T]], name: str, queue: QueueName | None
    ) -> Flow[T]:
        """Return a flow that changes the schedule of a key or name, in a queue that this client may change."""
        check_text("schedule name or key", name, KEY_CHARACTERS_MAX)
        return change(self._context, name, None if queue is None else self._name(queue))

    def _backfill_flow(
        self,
        name: str,
        start: datetime,
        end: datetime,
        queue: QueueName | None,
        limit: int,
        dry_run: bool,
        progress: Callable[[int], object] | None,
    ) -> Flow[Backfilled]:
        check_text("schedule name or key", name, KEY_CHARACTERS_MAX)
        check_function("progress", progress)
        place = None if queue is None else self._name(queue)
        return backfill(self._context, name, place, start, end, limit=limit, dry_run=dry_run, progress=progress)

    def _schedules_flow(self, queue: QueueName | None, count: int) -> Flow[list[Schedule]]:
        check_count("count", count, 1, NEXT_FIRES_MAX)
        return schedules.schedules(self._context, None if queue is None else queue_name(queue), count)


class DeclaredSchedule:
    """A schedule that a decorator declared: saved when a worker starts."""

    __slots__ = ("key", "queue", "spec")

    def __init__(self, queue: str, key: str, spec: Spec) -> None:
        self.queue = queue
        self.key = key
        self.spec = spec


def _missing_arguments(decorator: str, function: object, usage: str) -> ConfigurationError:
    """Return the error for a decorator without its call, which would take the function as its first argument."""
    name = getattr(function, "__name__", "the function")
    return ConfigurationError(f"@post.{decorator} needs its arguments: write {usage} above {name}")


class Stoppable(Protocol):
    """A worker, as a drain uses it."""

    @property
    def is_running(self) -> bool: ...
    def request_stop(self, timeout: float | None = None) -> None: ...
    def report(self) -> Drained: ...


def begin_transaction(target: SettleTarget, messages: Sequence[Message[Any]], given: object) -> MessageTransaction:
    """Return a transaction that settles messages at its end. Its modules are imported on first use."""
    from waypost.outbox.message_transaction import MessageTransaction

    return MessageTransaction(target, messages, given)


def is_stop(error: BaseException | None) -> bool:
    """Return whether the error that ended a block is a request to stop from outside, and not its own failure."""
    if error is None or isinstance(error, Exception):
        return False
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return True  # return True  # of Ctrl-C, and of a generator that is closed
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return False
        # Raised by the program, or by an inner task that was cancelled, it is no request to this one.
        return task is not None and task.cancelling() > 0
    return is_stop_request(error)


def _attempts_chosen(handlers: Iterable[Handler]) -> dict[str, int]:
    """Return how many attempts the retry policies of each queue allow, if the application chose a limit."""
    most: dict[str, int] = {}
    for one in handlers:
        attempts = attempts_allowed(one.retry)
        if one.retry is not DEFAULT_RETRY and attempts is not None:
            most[one.queue] = max(attempts, most.get(one.queue, 0))
    return most


def _without_default(handlers: Sequence[Handler]) -> list[str]:
    """Return the queues whose handlers all handle certain types only."""
    defaults = {one.queue for one in handlers if not one.types}
    return list(dict.fromkeys(one.queue for one in handlers if one.queue not in defaults))


def _store_of(url: str | None, client: object, store: object, options: StoreOptions) -> Store:
    """Return the store of a client, from the one of the three that is given. Stores are imported here."""
    from waypost.store.opening import open_store, store_from_client

    if url is not None:
        return open_store(url, **options)
    if client is not None:
        return store_from_client(client, **options)
    return cast("Store", store)


def _wakeups_of(store: Store, wake: str | Channel | None, timeout: float) -> Wakeups:
    """Return the wake-ups of a client. Channels are imported here."""
    from waypost.wake.opening import open_wakeups

    return open_wakeups(store, wake, timeout)


def _worker_name(session: Session) -> str:
    from waypost.host import host_name

    host = host_name()[: WORKER_CHARACTERS_MAX - 32]
    return f"{host}:{session.pid}:{session.id.hex()}"


def _one_page(listing: Listing[T]) -> Flow[MessagePage[T]]:
    messages = yield from listing.flow()
    return MessagePage(messages, listing.cursor)


def dead_filter(what: str, given: DeadFilters) -> DeadFilter:
    """Return a filter of dead letters from keyword options."""
    check_options(what, given, DeadFilters.__annotations__)
    options: dict[str, Any] = dict(given)
    moments: dict[str, Any] = {
        field: None if (given_at := options.pop(name, None)) is None else check_moment(name, given_at)
        for name, field in MOMENTS.items()
    }
    for name, value in options.items():
        is_none = name in bulk.MAY_BE_NONE and isinstance(value, str) and not value
        if value is not None and not is_none:
            check_text(name, value, KEY_CHARACTERS_MAX)
    return DeadFilter(**options, **moments)


#: The times of a filter, and their fields in the record.
MOMENTS = {
    "died_before": "before_ms", "died_after": "after_ms", "published_before": "published_before_ms",
    "published_after": "published_after_ms",
}  # fmt: skip


def process_user() -> str:
    """The user of this process and the host, as `ana@shop-1`, for the log of actions."""
    from getpass import getuser

    from waypost.host import host_name

    try:
        user = getuser()
    except (OSError, KeyError):
        user = "unknown"
    return f"{user}@{host_name()}"[:WORKER_CHARACTERS_MAX]


def bulk_view(found: bulk.Bulk) -> BulkAction:
    """Return the public form of a bulk action."""
    record = found.record
    filters = bulk.plain_filter(record.filter)
    for public, name in MOMENTS.items():
        if name in filters:
            filters[public] = to_datetime(filters.pop(name))
    if record.at_ms is not None:
        filters["at"] = to_datetime(record.at_ms)
    if record.priority is not None:
        filters["priority"] = record.priority
    return BulkAction(
        found.id, record.verb, record.queue, filters, record.rate, record.user, record.via, record.state, record.total,
        record.done, record.left, record.unknown, to_datetime(record.start_ms), to_datetime(record.ended_ms),
        record.error, record.state in bulk.ACTIVE and record.lease_ms > found.now_ms, record.steps, record.source,
        record.searched,
    )  # fmt: skip


def _bulk_view(flow: Flow[bulk.Bulk]) -> Flow[BulkAction]:
    return bulk_view((yield from flow))


def _redriven_nothing() -> Flow[Redriven]:
    return Redriven([], [], False)
    yield  # a flow is a generator


def _wait_seconds(wait: Duration | None) -> float | None:
    """Return how long to wait in seconds, None without limit."""
    if wait is None:
        return None
    return check_seconds("wait", wait, hint=", or None to wait for ever")


#: The filters of a listing that are compared with each message.
COMPARED = tuple(
    name
    for name in DeadFilters.__annotations__
    if name in ListingFilters.__annotations__ and name not in PageFilters.__annotations__
)


class Listing(Generic[T]):
    """A listing of messages: its filters, checked once, and its position."""

    __slots__ = (
        "_as_type", "_before_ms", "_chosen", "_context", "_cursor", "_filters", "_left", "_queue", "_since_ms",
        "_state", "more",
    )  # fmt: skip

    def __init__(
        self, context: ClientContext, queue: str | Queue[T], state: MessageState, **filters: Unpack[ListingFilters]
    ) -> None:
        check_options("messages", filters, ListingFilters.__annotations__)
        before, limit = filters.get("before"), filters.get("limit")
        if before is not None and state != "delayed":
            raise InvalidInput(f"before= selects by due time: use it with state='delayed', not {show(state)}")
        died_after = filters.get("died_after")
        if died_after is not None and state != "dead":
            raise InvalidInput(f"died_after= selects dead letters: use it with state='dead', not {show(state)}")
        self._context = context
        self._queue = queue_name(queue)
        self._as_type = queue_type(queue)
        self._since_ms = None if died_after is None else check_moment("died_after", died_after)
        self._state = check_state(state)
        self._before_ms = None if before is None else check_moment("before", before)
        self._left = None if limit is None else check_count("limit", limit, 1, 2**40)
        self._filters = {"id": None if filters.get("id") is None else check_id(filters["id"])}
        for name in ("key", "group", "reason"):
            value: Any = filters.get(name)
            self._filters[name] = None if value is None else check_text(name, value, KEY_CHARACTERS_MAX)
        #: Filters that no store applies.
        given: Any = {name: filters[name] for name in COMPARED if filters.get(name) is not None}  # type: ignore[literal-required]
        self._chosen = dead_filter("messages", given) if given else None
        if self._chosen is not None:
            bulk.check_filter(self._chosen, self._state)
        self._cursor: str | None = None
        if self._since_ms is not None:
            self._cursor = context.store.dead_since(self._since_ms)
        self.more = True

    @property
    def cursor(self) -> str | None:
        """The start of the next page, for `from_cursor` of a listing with the same filters; None at the end."""
        return None if self._cursor is None else pack_cursor(self._cursor, self._about())

    def from_cursor(self, cursor: str | None) -> Self:
        """Begin where another listing stopped."""
        if cursor is not None:
            self._cursor = unpack_cursor(cursor, self._about())
        return self

    def _about(self) -> list[object]:
        return [self._queue, self._state, self._before_ms, self._since_ms, *self._filters.values()]

    def flow(self) -> Flow[list[StoredMessage[T]]]:
        """Read the next page."""
        size = LISTING_PAGE if self._left is None or self._chosen is not None else min(self._left, PAGE_MAX)
        page = yield from manage.page(self._context, self._queue, self._state, size, self._cursor, self._filters)
        self._cursor = page.cursor
        self.more = page.cursor is not None
        found = page.messages
        if self._before_ms is not None:
            kept = [stored for stored in found if stored.ready_ms < self._before_ms]
            # Timers are listed by their due time: all after the first that is too late are too late.
            if len(kept) < len(found):
                self.more, self._cursor = False, None
            found = kept
        if self._chosen is not None:
            chosen = self._chosen
            found = [stored for stored in found if bulk.fits(stored, chosen)][: self._left]
        if self._left is not None:
            self._left -= len(found)
            self.more = self.more and self._left > 0
        return [StoredMessage(self._queue, stored, self._as_type) for stored in found]


def pack_cursor(cursor: str, about: list[object]) -> str:
    """Return the cursor of a store with a checksum of its listing, fit for a URL."""
    return urlsafe_b64encode(_checksum(cursor, about) + cursor.encode()).decode().rstrip("=")


def unpack_cursor(cursor: str, about: list[object]) -> str:
    """Return the cursor of the store, or raise `InvalidInput` if it was changed or belongs to another listing."""
    wrong = InvalidInput("this cursor was not given by a listing of this queue, state and filters: begin without one")
    if not isinstance(cursor, str) or not cursor.isascii() or len(cursor) > CURSOR_CHARACTERS_MAX:
        raise wrong
    try:
        data = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        inner = data[CHECKSUM_BYTES:].decode()
    except ValueError:
        raise wrong from None
    if data[:CHECKSUM_BYTES] != _checksum(inner, about):
        raise wrong
    return inner


def _checksum(cursor: str, about: list[object]) -> bytes:
    from hashlib import sha256  # few programs need it

    return sha256(repr([cursor, *about]).encode()).digest()[:CHECKSUM_BYTES]


def check_stop(stop: threading.Event | None) -> None:
    """Refuse a `stop` that is not an event."""
    if not (stop is None or all(callable(getattr(stop, name, None)) for name in ("is_set", "set", "wait"))):
        raise ConfigurationError(f"stop must be a threading.Event, not {show(stop)}")


def ttl_ms(ttl: Duration) -> int:
    """Return the time to live of a leader in milliseconds."""
    return round(check_seconds("ttl", ttl, least=0.05, most=3600, error=ConfigurationError) * 1000)
