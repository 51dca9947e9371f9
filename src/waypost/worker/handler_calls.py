"""Handler calls: on the event loop, in threads or in processes, with the client's middleware around them.

A `Slot` is a unit of a consumer's concurrency: it holds the handler call that runs in it, and can cancel that call.

Threads are daemons, unlike those of `concurrent.futures`: a worker that has reached its stop timeout must be able to
end its process while a handler hangs. The message of such a handler keeps its lease until the lease expires.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from waypost import lease_clock
from waypost.errors import Undecodable
from waypost.message import CHOICES, Message, Outcome, error_text, error_type
from waypost.operations.flow import ClientContext, drive_async
from waypost.operations.publish_middleware import pass_sent_on
from waypost.store.port import AsyncExecutor
from waypost.worker.handler import Handler
from waypost.worker.process_pool import Processes

if TYPE_CHECKING:
    from waypost.worker.consumer import Consumer

log = logging.getLogger("waypost")

#: Why a handler was cancelled: its lease is lost, a cancel was requested, it timed out, or the worker stops.
Ending = Literal["lost", "cancel", "timeout", "stopped"]


class Slot:
    """The current call of a runner: its messages, since when it runs, and why it was cancelled, if it was."""

    __slots__ = ("_overdue", "consumer", "ending", "messages", "started", "task", "waiting")

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.messages: Sequence[Message[Any]] = ()
        self.started = 0.0
        self.task: asyncio.Task[None] | None = None
        self.waiting: asyncio.Future[None] | None = None
        self.ending: Ending | None = None
        self._overdue: Sequence[Message[Any]] = ()

    def cancel(self, ending: Ending) -> None:
        """Cancel the handler. Called on the event loop, so the handler is waiting."""
        if self.messages and self.ending is None and self.task is not None:
            self.ending = ending
            self.task.cancel()

    def take_ending(
        self, error: BaseException | None, messages: Sequence[Message[Any]]
    ) -> tuple[Ending | None, BaseException | None]:
        """Return the error of a cancelled handler, by the reason for which it was cancelled."""
        ending, self.ending = self.ending, None
        if self.task is not None:
            self.task.uncancel()
        if ending == "timeout" and isinstance(error, asyncio.CancelledError):
            limit = self.consumer.handler.time_limit(messages)
            error = TimeoutError(f"the handler ran for more than {limit:g} s")
        return ending, error

    def report(
        self,
        context: ClientContext,
        messages: Sequence[Message[Any]],
        error: BaseException | None,
        ending: Ending | None,
        *,
        stopped: bool,
    ) -> None:
        """Report one event for each message of a handler call."""
        outcome: Literal["success", "failure", "skipped"] = "success"
        fields: dict[str, Any] = {}
        if error is not None:
            outcome = "skipped" if stopped or isinstance(error, CHOICES) else "failure"
            fields = {"error_type": error_type(error), "error": error_text(error)}
        run_ms = round((lease_clock.now() - self.started) * 1000, 3)
        for message in messages:
            context.emit(
                "handled", message.queue, outcome, message_id=message.id, token=message.token,
                deliveries=message.deliveries, attempts=message.attempts, _run_ms=run_ms, reason=ending, **fields,
            )  # fmt: skip

    def log_overdue(self, handler: Handler) -> None:
        """Log once that a handler has run for too long."""
        messages = self.messages
        if messages and self._overdue is not messages:
            self._overdue = messages
            log.warning(
                "handler %s has run for more than %g s on message %s of queue %s: its lease is no longer renewed",
                handler.name,
                handler.renewal_limit(messages),
                messages[0].id,
                handler.queue,
                extra={"event": "run_too_long", "queue": handler.queue, "message_id": messages[0].id},
            )


class SuspendedCoroutine:
    """Makes the rest of a coroutine that was started in its own context awaitable."""

    __slots__ = ("_context", "_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context: Context, waits_for: Any) -> None:
        self._coroutine = coroutine
        self._context = context
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        run, coroutine, waits_for = self._context.run, self._coroutine, self._waits_for
        try:
            while True:
                try:
                    sent = yield waits_for
                except GeneratorExit:
                    run(coroutine.close)
                    raise
                except BaseException as error:
                    waits_for = run(coroutine.throw, error)
                else:
                    waits_for = run(coroutine.send, sent)
        except StopIteration as stop:
            return stop.value


class Unfinished:
    """A handler call that has not ended: `rest` returns its result."""

    __slots__ = ("rest",)

    def __init__(self, rest: Coroutine[Any, Any, Any]) -> None:
        self.rest = rest


Work = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Threads:
    """Up to `most` threads, each started when all others are busy."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._started = 0
        self._busy = 0

    def run(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run it in a thread; called on the event loop, where the future also ends."""
        future = asyncio.get_running_loop().create_future()
        if self._busy >= self._started and self._started < self._most:
            thread = threading.Thread(target=self._loop, name=f"{self._name}-{self._started + 1}", daemon=True)
            thread.start()  # raises an error if the system has no more threads
            self._started += 1
        self._busy += 1
        self._work.put((work, future))
        return future

    def stop(self) -> None:
        """Let idle threads end. It does not wait for them."""
        for _ in range(self._started):
            self._work.put(None)

    def _loop(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            result, error = None, None
            try:
                result = work()
            except BaseException as failure:
                error = failure
            try:
                future.get_loop().call_soon_threadsafe(self._end, future, result, error)
            except RuntimeError:
                return  # the loop is closed: the worker was abandoned
            del item, work, future, result, error

    def _end(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._busy -= 1
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):
            future.set_exception(RuntimeError("a handler raised StopIteration"))
        else:
            future.set_exception(error)


class Caller:
    """Calls one handler. Lives on one event loop."""

    def __init__(
        self,
        handler: Handler,
        on_unreadable: Callable[[Message[Any], Undecodable], object],
        on_wait: Callable[[], object],
        context: ClientContext,
        executor: AsyncExecutor,
    ) -> None:
        self._handler = handler
        self._context = context
        self._executor = executor
        #: Whether continuations go through publish middleware, and whether a call never ends on the event loop.
        self._passes_on = context.publish_middleware is not None
        self._ends_later = self._passes_on or handler.process or not handler.is_async
        #: Called for each message of a batch that its process could not decode; it is no longer part of the call.
        self._on_unreadable = on_unreadable
        #: Called when a call has begun to wait on the event loop.
        self._on_wait = on_wait
        self._loop = asyncio.get_running_loop()
        self._threads: Threads | None = None
        self.processes: Processes | None = None
        if handler.process:
            self.processes = Processes(handler)
        elif not handler.is_async:
            self._threads = Threads(f"waypost-{handler.queue}", handler.concurrency)
        #: The handler with its middleware around it; None without middleware, to avoid the overhead.
        self._around = handler.through_middleware(self._call_function) if handler.middleware else None

    def begin(self, slot: Slot, messages: list[Message[Any]]) -> Any:
        """Call the handler for some messages; return its result, or an `Unfinished` call to wait for.

        A handler that never waits ends here: it needs neither a coroutine of ours nor an iteration of the event loop.
        """
        if self._ends_later:
            return Unfinished(self._call(slot, messages))
        coroutine, context = self._begin(messages)
        try:
            waits_for = context.run(coroutine.send, None)
        except StopIteration as stop:
            return stop.value
        return Unfinished(self._finish(slot, messages, SuspendedCoroutine(coroutine, context, waits_for)))

    async def _call(self, slot: Slot, messages: list[Message[Any]]) -> Any:
        """The same in a thread or a process, or with the publish middleware for continuations."""
        if self.processes is not None:
            returned = await self._in_process(slot, messages)
        elif self._threads is not None:
            function, arguments = self._function_for(messages)
            returned = await self._threads.run(partial(copy_context().run, function, *arguments))
        else:
            coroutine, context = self._begin(messages)
            try:
                waits_for = context.run(coroutine.send, None)
            except StopIteration as stop:
                returned = stop.value
            else:
                returned = await self._finish(slot, messages, SuspendedCoroutine(coroutine, context, waits_for))
        if self._passes_on and any(message._then for message in messages) and not isinstance(returned, Outcome):
            self._on_wait()
            for message in messages:
                if message.settled is None:
                    await drive_async(self._executor, pass_sent_on(self._context, message))
        return returned

    def _function_for(self, messages: list[Message[Any]]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function to call, and its arguments."""
        if self._around is not None:
            return self._around, (messages,)
        return self._handler.function, self._handler.arguments(messages)

    def _begin(self, messages: list[Message[Any]]) -> tuple[Coroutine[Any, Any, Any], Context]:
        """Return the coroutine of a call, and its own context: values that a handler sets must not reach the next."""
        function, arguments = self._function_for(messages)
        context = copy_context()
        return context.run(function, *arguments), context

    async def _finish(self, slot: Slot, messages: list[Message[Any]], suspended: SuspendedCoroutine) -> Any:
        """Wait for a handler that waits."""
        self._on_wait()
        if not self._handler.can_be_stopped:
            return await suspended
        alarm = self._loop.call_later(self._handler.time_limit(messages), slot.cancel, "timeout")
        try:
            return await suspended
        finally:
            alarm.cancel()

    def _call_function(self, messages: Sequence[Message[Any]]) -> Any:
        return self._handler.function(*self._handler.arguments(messages))

    async def _in_process(self, slot: Slot, messages: list[Message[Any]]) -> Any:
        handler, processes = self._handler, self.processes
        assert processes is not None

        def begun() -> asyncio.TimerHandle:
            return self._loop.call_later(handler.time_limit(messages), slot.cancel, "timeout")

        def unreadable(message: Message[Any], error: Undecodable) -> None:
            message.undecodable = error
            if handler.batch is None:
                raise error
            messages.remove(message)
            self._on_unreadable(message, error)

        def call(arguments: Sequence[Message[Any]]) -> Any:
            return processes.run(list(arguments), begun, unreadable)

        return await (handler.through_middleware(call) if handler.middleware else call)(messages)

    def kill_lost(self) -> None:
        """Kill processes whose leases are all lost, even while the event loop is blocked. Called from a thread."""
        if self.processes is not None:
            self.processes.kill_lost()

    async def stop(self) -> None:
        """Let idle threads and processes end."""
        if self._threads is not None:
            self._threads.stop()
        if self.processes is not None:
            await self.processes.stop()

    def close(self) -> None:
        """Kill the remaining processes."""
        if self.processes is not None:
            self.processes.kill()
