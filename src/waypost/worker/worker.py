"""The worker: starts the consumers and the renewals, waits for a reason to stop, and stops them in order.

run      until it is stopped; `until_empty=True` until there is nothing left to claim
quiet    stop claiming, continue with claimed messages
stop     quiet; release messages that have not started; wait for handlers until the deadline; then cancel and release
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Self, cast

from waypost.checks import check_count, check_flag, check_seconds
from waypost.errors import ConfigurationError, ForkedClient, UnusableClient
from waypost.formatting import format_count
from waypost.identity import Session
from waypost.message import Queue, queue_name
from waypost.operations.flow import ClientContext, Flow, OnEvent, drive_async
from waypost.operations.publish_middleware import PublishMiddleware
from waypost.policy import CONCURRENCY_MAX, HEALTH_WINDOW_SECONDS
from waypost.redaction import Redact
from waypost.store.port import AsyncExecutor, Executor, Heartbeat, Store
from waypost.times import Duration
from waypost.values import Drained, Health, WorkerRequest, WorkerState
from waypost.wake.wakeups import NO_WAKEUPS, Wakeups
from waypost.worker.consumer import Consumer
from waypost.worker.executor_adapters import LoopExecutor, ThreadedExecutor
from waypost.worker.handler import Handler
from waypost.worker.health import NOT_RUNNING, check_window, judge, make_heartbeat
from waypost.worker.poller import Electable, Poller
from waypost.worker.renewer import Renewer
from waypost.worker.sharing import C, make_consumers, served_queues
from waypost.worker.signals import StopSignals

log = logging.getLogger("waypost")

#: How long handlers may run after a request to stop: less than the 30 s after which most supervisors kill.
STOP_SECONDS = 25.0
#: The time limit for the end of the renewing thread, which may hang in a call to a store that does not reply.
RENEWER_STOP_SECONDS = 0.5


class Embedded(Protocol):
    """A part that runs beside the handlers: started before the first claim, stopped after the last handler."""

    def start(self) -> None: ...
    async def stop(self) -> None: ...


class Worker:
    """Runs handlers on the event loop that awaits `run`. One run at a time; it may run again."""

    def __init__(
        self,
        store: Store,
        handlers: Sequence[Handler],
        *,
        owner: object,
        name: str,
        retry_budget: float,
        start_timeout: float,
        on_event: OnEvent | None = None,
        redact: Redact | None = None,
        wakeups: Wakeups = NO_WAKEUPS,
        session: Session | None = None,
        name_of: Callable[[str | Queue[Any]], str] = queue_name,
        publish_middleware: PublishMiddleware | None = None,
        check: Callable[[], None] = lambda: None,
        health_window: float = HEALTH_WINDOW_SECONDS,
        prepare: Callable[[ClientContext], Flow[None]] | None = None,
        embed: Callable[[ClientContext, AsyncExecutor], list[Embedded]] = lambda context, executor: [],
        max_handlers: int | None = None,
    ) -> None:
        if not handlers:
            raise ConfigurationError("there is nothing to run: register a function with @post.handler(queue)")
        for handler in handlers:
            handler.check_can_start()
        self.handlers = list(handlers)
        #: How many handler calls run at the same time over all queues; None: as many as each handler allows.
        self.max_handlers = max_handlers
        if max_handlers is not None:
            check_count("max_handlers", max_handlers, 1, CONCURRENCY_MAX, ConfigurationError)
        self.name = name
        self._store = store
        self._owner = owner
        #: Raises if the client of this worker can no longer be used: forked, closed or drained.
        self._check = check
        #: Schedules to save before the first claim, and parts that run beside the handlers: scheduler, promoter.
        self._prepare = prepare
        self._embed = embed
        # A separate session: a `receive` of the same client must not return messages that a worker's claim holds.
        self._session = session or Session()
        self._options: dict[str, Any] = {
            "session": self._session, "worker": name, "retry_budget": retry_budget, "wakeups": wakeups,
            "on_event": on_event, "name_of": name_of, "redact": redact, "publish_middleware": publish_middleware,
        }  # fmt: skip
        self._start_timeout = start_timeout
        self._consumers: list[Consumer] = []
        #: The consumers that were stopped or are being stopped.
        self._ending: dict[Consumer, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested: asyncio.Event | None = None
        self._stop_seconds = STOP_SECONDS
        self._stopping: asyncio.Task[Drained] | None = None
        self._running: asyncio.Task[Drained] | None = None
        self._error: BaseException | None = None
        self._until_empty = False
        self._work = 0
        self._last = Drained()
        self.health_window = check_window(health_window)
        #: Checks for problems that do not stop a worker: each returns a description, or None.
        self.health_notes: list[Callable[[], str | None]] = []
        #: How many processes run the handlers.
        self.processes = 1
        self._poller: Poller | None = None
        self._state: WorkerState = "running"

    # ---- the public methods ------------------------------------------------------------------------------------

    async def run(
        self,
        *,
        until_empty: bool = False,
        signals: bool = True,
        timeout: Duration = STOP_SECONDS,
        on_started: Callable[[], None] = lambda: None,
    ) -> Drained:
        """Run until `stop`, a signal, or with `until_empty` until nothing is ready. Returns a report.

        SIGINT, SIGTERM and SIGHUP stop it, giving handlers `timeout` seconds; a second one has its default effect. They
        are handled only in the main thread, and only if the program has no handler for them.
        """
        if self._session.pid != os.getpid():
            raise ForkedClient("this worker was created in the parent process; create client and worker in the child")
        self._check()
        if self._loop is not None:
            raise ConfigurationError("this worker is already running")
        check_flag("until_empty", until_empty, ConfigurationError)
        check_flag("signals", signals, ConfigurationError)
        timeout = check_seconds("timeout", timeout)
        self._loop = asyncio.get_running_loop()
        self._stop_requested = asyncio.Event()
        self._stopping, self._error, self._work, self._until_empty = None, None, 0, until_empty
        self._stop_seconds = timeout
        # Nothing of an earlier run: while this one connects it may be asked to be quiet, or to stop.
        self._consumers, self._ending, self._last, self._state = [], {}, Drained(), "running"
        try:
            async with _Parts(self) as parts:
                self._consumers, self._poller = parts.consumers, parts.poller
                parts.poller.start()
                if signals:
                    with StopSignals(self._on_signal):
                        return await self._until_stopped(on_started)
                return await self._until_stopped(on_started)
        finally:
            self._loop = self._stop_requested = self._poller = None

    async def start(self) -> Self:
        """Run as a task of this event loop; returns once it claims, or raises the error that prevents it."""
        if self._loop is not None:
            raise ConfigurationError("this worker is already running")
        started = asyncio.get_running_loop().create_future()

        def on_started() -> None:
            started.set_result(None)

        # A stop may come while it starts, and takes `_running`.
        running = asyncio.get_running_loop().create_task(self.run(signals=False, on_started=on_started))
        self._running = running
        await asyncio.wait([running, started], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            started.cancel()
            await running
        return self

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *ended: object) -> None:
        await self.stop()

    def quiet(self) -> None:
        """Stop claiming, and continue with claimed messages. Safe from any thread."""
        self._call_soon(self._quiet_all)

    def request_stop(self, timeout: Duration | None = None) -> None:
        """Request a stop without waiting for it. Safe from any thread and from a signal handler."""
        self._call_soon(self._request_stop, None if timeout is None else check_seconds("timeout", timeout))

    async def stop(self, timeout: Duration = STOP_SECONDS) -> Drained:
        """Stop, giving handlers this time to end, and return a report. On the worker's own event loop."""
        timeout = check_seconds("timeout", timeout)
        if self._loop is None:
            return self._last
        self._request_stop(timeout)
        report = await asyncio.shield(self._begin_stop())
        running, self._running = self._running, None
        if running is not None:
            await running
        return report

    async def stop_queues(self, queues: Iterable[str], timeout: Duration = STOP_SECONDS) -> None:
        """Stop some of its queues, giving their handlers this time to end; the others continue."""
        deadline = time.monotonic() + check_seconds("timeout", timeout)
        names = set(queues)
        chosen = [consumer for consumer in self._consumers if consumer.queue in names]
        # If the caller stops waiting, a consumer is still stopped completely.
        await asyncio.gather(*(asyncio.shield(self._stop_consumer(consumer, deadline)) for consumer in chosen))

    def _stop_consumer(self, consumer: Consumer, deadline: float) -> asyncio.Task[None]:
        """Stop a consumer, once."""
        task = self._ending.get(consumer)
        if task is None:
            consumer.liveness.owes_none_for(float("inf"))
            task = asyncio.get_running_loop().create_task(consumer.stop(deadline), name="waypost stops a queue")
            self._ending[consumer] = task
        return task

    def report(self) -> Drained:
        """Return the current state of the worker."""
        if not self._consumers:
            return self._last
        return sum((consumer.report() for consumer in self._consumers), Drained())

    def reports(self) -> dict[str, Drained]:
        """Return the current state of each of its queues."""
        reports: dict[str, Drained] = {}
        for consumer in self._consumers:
            reports[consumer.queue] = reports.get(consumer.queue, Drained()) + consumer.report()
        return reports

    def health(self) -> Health:
        """Whether this worker consumes: it claimed, or could have, within its window. Cheap; safe from any thread."""
        poller = self._poller
        if poller is None or self._loop is None:
            return NOT_RUNNING
        error = poller.error
        return self._judge_health(poller.answered, [] if error is None else [f"the last poll failed: {error}"])

    def heartbeat(self, started_ms: int | None) -> Heartbeat:
        """Return the current heartbeat. Called from the polling thread."""
        # Without the store's own state: a client that can read the report knows that the store replies.
        health = self._judge_health(time.monotonic(), [])
        return make_heartbeat(
            self.name, served_queues(self._consumers), self._state, health, processes=self.processes,
            started_ms=started_ms,
        )  # fmt: skip

    def _judge_health(self, answered: float, notes: list[str]) -> Health:
        own_notes = [note for check in self.health_notes if (note := check()) is not None]
        return judge(
            served_queues(self._consumers), self._state, window=self.health_window, answered=answered,
            notes=own_notes + notes,
        )  # fmt: skip

    @property
    def is_running(self) -> bool:
        """Whether it is running."""
        return self._loop is not None

    @property
    def is_ready(self) -> bool:
        """Whether it claims: it is connected, and neither quiet nor stopping."""
        return self._loop is not None and self._poller is not None and self._state == "running"

    @property
    def store(self) -> Store:
        """The store that it claims from."""
        return self._store

    def poll_now(self, queue: str) -> None:
        """Poll a queue now, because there may be work in it. Safe from any thread."""
        self._call_soon(self._notify, queue)

    # ---- the run -----------------------------------------------------------------------------------------

    async def _until_stopped(self, on_started: Callable[[], None]) -> Drained:
        assert self._stop_requested is not None
        if self._stop_requested.is_set():
            return await self._begin_stop()  # requested while it connected: nothing has started
        for consumer in self._consumers:
            consumer.start()
        if self._state == "quiet":
            self._quiet_all()
        log.info(
            "worker %s started: %s",
            self.name,
            ", ".join(dict.fromkeys(handler.queue for handler in self.handlers)),
            extra={"event": "worker_started", "worker": self.name},
        )
        on_started()
        try:
            await self._stop_requested.wait()
        except asyncio.CancelledError:
            # The task of the worker was cancelled: stop soon, in order as far as possible.
            self._request_stop(0.0)
            await self._begin_stop()
            raise
        report = await self._begin_stop()
        if self._error is not None:
            raise self._error
        return report

    def _begin_stop(self) -> asyncio.Task[Drained]:
        if self._stopping is None:
            self._set_state("stopping")
            self._stopping = asyncio.get_running_loop().create_task(self._stop_all(), name="waypost stops")
        return self._stopping

    async def _stop_all(self) -> Drained:
        deadline = time.monotonic() + self._stop_seconds
        await asyncio.gather(*(self._stop_consumer(consumer, deadline) for consumer in self._consumers))
        self._last = self.report()
        log.info(
            "worker %s stopped: %s",
            self.name,
            self._last,
            extra={"event": "worker_stopped", "worker": self.name},
        )
        return self._last

    def _on_signal(self, name: str) -> None:
        # First: to log may fail, as of a stream that the signal has interrupted in the middle of a line.
        self.request_stop()
        running, seconds = self.report().running, f"{self._stop_seconds:g}"
        wait = f"waiting up to {seconds} s for {format_count(running, 'handler')}; " if running else ""
        again = "Ctrl-C" if name == "SIGINT" else name
        log.info(
            "%s: stopping, %s%s again to quit now", name, wait, again,
            extra={"event": "signal", "signal": name, "worker": self.name, "running": running},
        )  # fmt: skip

    def _call_soon(self, call: Callable[..., None], *given: Any) -> None:
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(call, *given)
            except RuntimeError:
                return  # it ended meanwhile

    def _set_state(self, state: WorkerState) -> None:
        self._state = state
        if self._poller is not None:
            self._poller.heartbeat_now()

    def _quiet_all(self) -> None:
        self._set_state("quiet")
        for consumer in self._consumers:
            consumer.stop_claiming()

    def _request_stop(self, timeout: float | None = None) -> None:
        if timeout is not None:
            self._stop_seconds = timeout
        if self._stop_requested is not None:
            self._stop_requested.set()

    def _notify(self, queue: str) -> None:
        for consumer in self._consumers:
            if consumer.queue == queue:
                consumer.notify()

    def _on_request(self, request: WorkerRequest) -> None:
        """Do what an operator requested through the store. Called from the polling thread."""
        if request == "stop":
            self.request_stop()
        elif request == "quiet":
            self.quiet()

    # ---- calls of consumers -----------------------------------------------------------------------------

    def on_abort(self, error: BaseException) -> None:
        """A signal interrupted a handler, or a part of the worker failed: stop, then raise it."""
        self._error = self._error or error
        self._request_stop(None if isinstance(error, Exception) else 0.0)

    def on_work(self, sent_to: set[str] | None) -> None:
        """Messages were settled, with continuations to these queues; None: a queue was found empty."""
        if sent_to is not None:
            self._work += 1
        for other in self._consumers:
            # A continuation to another queue of this worker need not wait for the next poll of that queue.
            if (sent_to and other.queue in sent_to) or (self._until_empty and other.empty_at < self._work):
                other.notify()
        # All queues are empty if each was found empty by a claim that began after the last settle in any of them.
        if self._until_empty and all(c.empty_at == self._work and not c.in_flight for c in self._consumers):
            self._request_stop()


class _Parts:
    """The connections and moving parts of one run, for the length of an `async with` block."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._context = ClientContext(worker._store, **worker._options)
        self._executor: AsyncExecutor | None = None
        self._renewer: Renewer | None = None
        self._sync_executor: Executor | None = None
        self.poller = Poller(
            self._context, self._connected, worker.heartbeat, window=worker.health_window, on_request=worker._on_request
        )  # fmt: skip
        self._background: list[Embedded] = []
        self.consumers: list[Consumer] = []

    def _connected(self) -> Executor:
        assert self._sync_executor is not None
        return self._sync_executor

    async def __aenter__(self) -> Self:
        worker = self._worker
        store, timeout = worker._store, worker._start_timeout
        try:
            executor: AsyncExecutor = await store.connect_async(start_timeout=timeout)
        except UnusableClient:
            executor = ThreadedExecutor(await asyncio.to_thread(store.connect, start_timeout=timeout))
        self._executor = executor
        loop = asyncio.get_running_loop()

        def connect() -> Executor:
            # Renewals and heartbeats share it: both come from threads, rarely at the same time.
            self._sync_executor = _sync_executor(store, timeout, executor, loop)
            return self._sync_executor

        self._renewer = renewer = Renewer(self._context, connect)

        def make(kind: type[C], handler: Handler) -> C:
            return kind(
                handler, self._context, executor, renewer, self.poller, owner=worker._owner,
                on_work=worker.on_work, on_abort=worker.on_abort, work_count=lambda: worker._work,
            )  # fmt: skip

        self.consumers += make_consumers(worker.handlers, worker.max_handlers, make)
        try:
            if worker._prepare is not None:
                await drive_async(executor, worker._prepare(self._context))
            await asyncio.to_thread(renewer.start, list(self.consumers))
            self._background = worker._embed(self._context, executor)
            for part in self._background:
                candidate = getattr(part, "candidate", None)
                if candidate is not None and candidate.by_polls:
                    self.poller.electable = cast("Electable", part)
            for part in self._background:
                part.start()
        except BaseException:
            await asyncio.to_thread(renewer.stop, RENEWER_STOP_SECONDS)
            await executor.close()
            raise
        return self

    async def __aexit__(self, *ended: object) -> None:
        # Heartbeats continue while handlers end; one that wins the election again would revert the resignation.
        self.poller.electable = None
        await asyncio.gather(*(part.stop() for part in self._background))
        left = [runner for consumer in self.consumers for runner in consumer.runners()]
        if left:
            # Handlers that still run in threads keep their leases, and are settled if they end before the loop is
            # closed.
            task = asyncio.get_running_loop().create_task(self._finish_later(left), name="waypost finishes")
            _unfinished.add(task)
            task.add_done_callback(_unfinished.discard)
        else:
            await self._close()

    async def _finish_later(self, left: list[asyncio.Task[None]]) -> None:
        for consumer in self.consumers:
            consumer.settler.start_again()
        try:
            await asyncio.wait(left)
            for consumer in self.consumers:
                await consumer.settler.stop(RENEWER_STOP_SECONDS)
        finally:
            await self._close()

    async def _close(self) -> None:
        assert self._renewer is not None
        assert self._executor is not None
        self._context.draining = True
        await asyncio.to_thread(self.poller.stop, RENEWER_STOP_SECONDS)
        for consumer in self.consumers:
            consumer.close()
        await asyncio.to_thread(self._renewer.stop, RENEWER_STOP_SECONDS)
        await self._executor.close()


#: The event loop keeps only weak references to tasks.
_unfinished: set[asyncio.Task[None]] = set()


async def await_unfinished() -> None:
    """Wait for the handlers that still run after a stop on this event loop."""
    loop = asyncio.get_running_loop()
    mine = [task for task in _unfinished if task.get_loop() is loop]
    if mine:
        await asyncio.wait(mine)


def _sync_executor(store: Store, timeout: float, executor: AsyncExecutor, loop: asyncio.AbstractEventLoop) -> Executor:
    """Return the connection of the renewing thread."""
    try:
        return store.connect(start_timeout=timeout)
    except UnusableClient:
        log.warning(
            "the caller's asyncio client cannot be used from a thread: a handler that blocks the event loop for longer "
            "than the lease loses it; give a URL instead",
            extra={"event": "renewals_on_the_loop"},
        )
        return LoopExecutor(executor, loop)
