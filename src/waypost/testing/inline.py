"""Handlers that run in the test itself: each message is claimed, handled and settled, one after the other.

No thread, process or event loop is started for it: the steps are a generator, and `TestPost` and `AsyncTestPost` run
them. What becomes of a message is decided by the same code as in a worker.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct

from waypost import lease_clock
from waypost.client.base import BaseClient
from waypost.client.internals import count_declared, flow_context, handlers_by_queue, handlers_to_test, save_declared
from waypost.errors import EnvelopeTooNew, Undecodable
from waypost.formatting import format_count
from waypost.message import Message, Outcome, Retry, check_returned, error_text, error_type
from waypost.operations import receive
from waypost.operations.flow import ClientContext, Flow
from waypost.operations.publish_middleware import pass_sent_on
from waypost.operations.settle_target import SettleTarget
from waypost.outbox.message_transaction import MessageTransaction
from waypost.schedule.scheduler import Scheduler
from waypost.store.memory.store import AsyncMemoryExecutor, MemoryExecutor
from waypost.testing.store import TestStore
from waypost.values import Settlement
from waypost.worker.handler import Handler, choose_handler
from waypost.worker.handler_log import log_chosen, log_failure

#: With so many calls at one time of the clock something publishes without end, and the test would never end either.
CALLS_MAX = 10_000
#: Ticks of the scheduler at one time of the clock: each fires what is due, or sets it aside until later.
TICKS_MAX = 100
#: The pause after a fire that failed, for example because its queue is full: it doubles with each failure.
RETRY_MS, RETRY_MS_MAX = 1_000, 60_000


class Handled(Struct, frozen=True):
    """One call of a handler in a test, and what became of its messages."""

    queue: str
    handler: str
    #: One, unless the handler takes batches.
    messages: list[Message[Any]]
    #: `done`, `retry`, `snooze`, `dead`, `drop` or `release`, for each message.
    outcomes: list[str]
    result: Any = None
    error: BaseException | None = None

    @property
    def message(self) -> Message[Any]:
        """The message, or the first of a batch."""
        return self.messages[0]

    @property
    def outcome(self) -> str:
        """What became of the message, or of the first of a batch."""
        return self.outcomes[0]


class FlowStep(NamedTuple):
    """An operation of a client, to be run on its connection."""

    post: BaseClient
    flow: Flow[Any]


class CallStep(NamedTuple):
    """A call of a handler with its middleware."""

    handler: Handler
    call: Callable[[], Any]


Steps = Generator[FlowStep | CallStep, Any, Any]


class InlineWorker:
    """Runs the handlers and schedules of some clients on a `TestStore`."""

    def __init__(self, store: TestStore) -> None:
        self.store = store
        self.clients: list[BaseClient] = []
        #: Whether handlers run at this moment: what they publish is handled by the same run.
        self.runs = False
        self._schedulers: dict[int, Scheduler] = {}
        #: The last failure of a schedule by queue and key: its instant, and the pause after it.
        self._failed: dict[tuple[str, str], tuple[int, int]] = {}
        self._declared: dict[int, int] = {}

    # ---- runs --------------------------------------------------------------------------------------------

    def run_due(self, *, raises: bool, handled: list[Handled] | None = None) -> Steps:
        """Fire schedules and run handlers until nothing is due; return the calls."""
        handled = [] if handled is None else handled
        if self.runs:
            return handled
        self.runs = True
        before = len(handled)
        try:
            ran = True
            while ran:
                # Again after handlers: what waits for the end of a run, or for room in a queue, can fire now.
                yield from self.fire_due()
                ran = False
                while (yield from self._run_round(handled, raises)):
                    ran = True
                    if len(handled) - before >= CALLS_MAX:
                        raise AssertionError(self._describe_endless(handled[before:]))
        finally:
            self.runs = False
        return handled

    def run_until(self, target_ms: int, *, raises: bool, handlers: bool) -> Steps:
        """Move the clock to `target_ms`, and stop where a schedule or, with `handlers`, a message is due."""
        handled: list[Handled] = []
        clock = self.store.clock
        yield from self._save_declared()
        while True:
            if handlers:
                yield from self.run_due(raises=raises, handled=handled)
            else:
                yield from self.fire_due()
            due = self._next_due(messages=handlers)
            if due is None or due > target_ms:
                break
            # A millisecond at least: what is due and cannot run, as in a queue that is paused, must not hold the clock.
            self._set_clock(max(due, clock() + 1))
        self._set_clock(max(target_ms, clock()))
        if handlers:
            yield from self.run_due(raises=raises, handled=handled)
        else:
            yield from self.fire_due()
        return handled

    def _set_clock(self, at_ms: int) -> None:
        clock: Any = self.store.clock
        clock.advance_ms(at_ms - clock())

    def _next_due(self, *, messages: bool) -> int | None:
        """Return when the next schedule fires; with `messages` also when one of a handler can run or its lease ends."""
        now, moments = self.store.clock(), []
        served = {handler.queue for post in self.clients for handler in handlers_to_test(post)}
        with self.store.lock:
            for model in self.store.models.values():
                moments += [
                    one.due_ms if one.due_ms > now else self._retry_at(model.name, one.key, one.due_ms)
                    for one in model.schedules.values()
                    if one.due_ms is not None and not one.paused
                ]
                if messages and model.name in served and not model.paused:
                    rate = model.next_rate(now) if model.count("ready") else None
                    lefts = (model.next_due(now), model.next_lease(now), rate)
                    moments += [now + left for left in lefts if left is not None]
        return min(moments, default=None)

    def _retry_at(self, queue: str, key: str, due_ms: int) -> int:
        """Return when to try a fire again that was just tried and failed."""
        failed_ms, pause_ms = self._failed.get((queue, key), (0, 0))
        pause_ms = min(2 * pause_ms, RETRY_MS_MAX) if failed_ms == due_ms else RETRY_MS
        self._failed[queue, key] = (due_ms, pause_ms)
        return self.store.clock() + pause_ms

    # ---- schedules ---------------------------------------------------------------------------------------

    def fire_due(self) -> Steps:
        """Fire the schedules that are due."""
        yield from self._save_declared()
        if not any(model.schedules for model in self.store.models.values()):
            return
        post = self.clients[-1]
        scheduler = self._schedulers.get(id(post))
        if scheduler is None:
            context = copy.copy(flow_context(post))
            context.monotonic = lambda: self.store.clock() / 1000
            scheduler = self._schedulers[id(post)] = Scheduler(context)
        scheduler.retry()
        for _ in range(TICKS_MAX):
            scheduler.refresh()
            tick = yield FlowStep(post, scheduler.tick())
            if tick.election == "following" or tick.sleep > timedelta(milliseconds=1):
                break

    def _save_declared(self) -> Steps:
        for post in self.clients:
            declared = count_declared(post)
            if declared != self._declared.get(id(post), 0):
                self._declared[id(post)] = declared
                yield FlowStep(post, save_declared(post))

    # ---- handlers ----------------------------------------------------------------------------------------

    def _run_round(self, handled: list[Handled], raises: bool) -> Generator[FlowStep | CallStep, Any, bool]:
        """Call each handler once that has something to do; return whether one had."""
        found = False
        for post in self.clients:
            for handlers in handlers_by_queue(post):
                handler, messages = yield from self._claim(post, handlers)
                found = found or bool(messages)
                calls = _calls(handler, messages)
                before = len(handled)
                while calls:
                    try:
                        handled.append((yield from self._handle(post, handler, calls.pop(0))))
                    except GeneratorExit:
                        raise
                    except BaseException:
                        for call in calls:
                            yield FlowStep(post, self._settle(flow_context(post), handler, call, None, stopped=True))
                        raise
                # After all that was claimed: no lease is left of a batch without what could not be decoded.
                errors = [one.error for one in handled[before:] if one.error is not None]
                if errors and raises:
                    raise errors[0]
        return found

    def _claim(
        self, post: BaseClient, handlers: Sequence[Handler]
    ) -> Generator[FlowStep | CallStep, Any, tuple[Handler, list[Message[Any]]]]:
        """Claim for the handlers of a queue; return messages, and the handler that takes their type."""
        context, handler = flow_context(post), handlers[0]
        alone = len(handlers) == 1 and not handler.types
        while True:
            claimed = yield FlowStep(post, receive.claim(context, handler.queue, (handler.batch or 1) if alone else 1))
            if not claimed.leases:
                return handler, []
            chosen = handler if alone else choose_handler(handlers, claimed.leases[0])
            if chosen is not None:
                handler = chosen
                break
            left = Message[Any](handler.queue, claimed.leases[0])
            yield FlowStep(post, receive.settle(context, left.queue, [left], [receive.put_off(left._lease)]))
        sync, awaited = MemoryExecutor(self.store), AsyncMemoryExecutor(self.store)

        async def connected() -> AsyncMemoryExecutor:
            return awaited

        target = SettleTarget(
            context, handler.retry, MessageTransaction, executor=lambda: sync, async_executor=connected
        )
        seconds, until = receive.local_lease(claimed)
        return handler, [Message(handler.queue, one, handler.as_type, target, seconds, until) for one in claimed.leases]

    def _handle(
        self, post: BaseClient, handler: Handler, messages: list[Message[Any]]
    ) -> Generator[FlowStep | CallStep, Any, Handled]:
        context = flow_context(post)
        result, error = None, None
        started = lease_clock.now()
        try:
            result = check_returned((yield CallStep(handler, partial(_call, handler, messages))))
            if not isinstance(result, Outcome):
                for message in messages:
                    yield FlowStep(post, pass_sent_on(context, message))
        except GeneratorExit:
            raise
        except BaseException as failure:
            if _ends_test(failure):
                yield FlowStep(post, self._settle(context, handler, messages, None, stopped=True))
                raise
            error = failure
        ending = error
        if error is None and isinstance(result, Outcome):
            ending = result
        elif error is None:
            handler.keep_result(messages[0], result)
        settlements = yield FlowStep(post, self._settle(context, handler, messages, ending))
        if ending is None:
            log_chosen(handler, messages, settlements)
        elif ending is not messages[0].undecodable:
            log_failure(handler, messages, ending, settlements)
        if isinstance(error, Outcome):
            error = None  # what the handler wanted, not a failure
        _emit_handled(context, messages, ending, lease_clock.now() - started)
        if error is not None:
            error.add_note(_describe_failure(handler, messages, settlements))
        return Handled(handler.queue, handler.name, messages, [one.outcome for one in settlements], result, error)

    def _settle(
        self,
        context: ClientContext,
        handler: Handler,
        messages: Sequence[Message[Any]],
        error: BaseException | None,
        *,
        stopped: bool = False,
    ) -> Flow[list[Settlement]]:
        settlements: list[Settlement] = []
        for message in messages:
            ending = error
            if handler.manual and error is None and message.outcome is None and not stopped:
                ending = Retry(reason="left unsettled")
            settlement = message.settlement(ending, handler.retry, stopped=stopped)
            if message.undecodable is not None and ending is message.undecodable:
                if isinstance(ending, EnvelopeTooNew):
                    settlement = receive.too_new(message._lease)
                receive.log_unreadable(message, settlement, message.undecodable)
            settlements.append(settlement)
            if message.settled is None and not message.at_most_once:
                yield from receive.settle(context, message.queue, [message], [settlement])
        return settlements

    def _describe_endless(self, handled: Sequence[Handled]) -> str:
        queues = sorted({one.queue for one in handled[-100:]})
        return (
            f"{format_count(len(handled), 'handler call')} in one run, and there still are messages: does a handler of "
            f"{', '.join(queues)} publish to its own queue?"
        )


def _ends_test(error: BaseException) -> bool:
    """Return whether this is not a failure of a handler: an interrupt, the end of the test's task, `pytest.fail()`."""
    if isinstance(error, asyncio.CancelledError):
        # A handler may cancel itself; then the task of the test goes on.
        task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
        return task is not None and task.cancelling() > 0
    return not isinstance(error, Exception | SystemExit)


def _calls(handler: Handler, messages: list[Message[Any]]) -> list[list[Message[Any]]]:
    """Return the messages of each call: a batch goes without those that cannot be decoded."""
    if handler.batch is None:
        return [[message] for message in messages]
    readable, calls = [], []
    for message in messages:
        try:
            if "body" in handler.parameter_kinds or handler.as_type is not None:
                _ = message.body
            readable.append(message)
        except Undecodable:
            calls.append([message])
    return [*calls, readable] if readable else calls


def _call(handler: Handler, messages: list[Message[Any]]) -> Any:
    """Call a handler with its middleware; a coroutine if it is awaited."""

    def function(chosen: Sequence[Message[Any]]) -> Any:
        return handler.function(*handler.arguments(chosen))

    async def in_process(chosen: Sequence[Message[Any]]) -> Any:
        return function(chosen)

    call = handler.through_middleware(in_process if handler.process else function)
    return _limit_time(handler, call, messages) if handler.is_awaited else call(messages)


async def _limit_time(handler: Handler, call: Callable[..., Any], messages: list[Message[Any]]) -> Any:
    async with asyncio.timeout(handler.time_limit(messages) if handler.can_be_stopped else None):
        return await call(messages)


def _emit_handled(
    context: ClientContext, messages: Sequence[Message[Any]], error: BaseException | None, seconds: float
) -> None:
    if context.on_event is None:
        return
    outcome = "success" if error is None else "skipped" if isinstance(error, Outcome) else "failure"
    fields = {} if error is None else {"error_type": error_type(error), "error": error_text(error)}
    for message in messages:
        context.emit(
            "handled", message.queue, outcome, message_id=message.id, token=message.token,  # type: ignore[arg-type]
            deliveries=message.deliveries, attempts=message.attempts, _run_ms=round(seconds * 1000, 3), **fields,
        )  # fmt: skip


def _describe_failure(handler: Handler, messages: Sequence[Message[Any]], settlements: Sequence[Settlement]) -> str:
    """Return which message a handler failed on, and what becomes of it: the note of its exception."""
    message, settlement = messages[0], settlements[0]
    what = f"message {message.id}" if len(messages) == 1 else f"{len(messages)} messages, the first {message.id},"
    key = "" if message.key is None else f" with key {message.key!r}"
    after = f" in {settlement.after_ms / 1000:g} s" if settlement.outcome in ("retry", "snooze") else ""
    reason = f" ({settlement.reason})" if settlement.reason else ""
    return (
        f"raised by handler {handler.name} on {what}{key} of queue {handler.queue}, attempt {message.attempts + 1}; "
        f"outcome: {settlement.outcome}{after}{reason}"
    )
