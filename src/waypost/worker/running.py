"""One handler call: the place in which it runs, how it goes on after a wait, and how it is ended from outside."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Generator, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any, Literal

from waypost import lease_clock
from waypost.message import Message, Outcome, error_text, error_type
from waypost.operations.flow import ClientContext
from waypost.worker.handler import Handler

if TYPE_CHECKING:
    from waypost.worker.consumer import Consumer

log = logging.getLogger("waypost")

#: Why a handler was cancelled: its lease is lost, somebody asked for it, its time is up, or the worker stops.
Ending = Literal["lost", "cancel", "timeout", "stopped"]


class Slot:
    """A runner's place: what it is handling now, since when, and why it was cancelled if it was."""

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
        """Cancel the handler that waits in here; called on the event loop, so that it does wait."""
        if self.messages and self.ending is None and self.task is not None:
            self.ending = ending
            self.task.cancel()

    def ended(self, error: BaseException | None) -> tuple[Ending | None, BaseException | None]:
        """After a handler that was cancelled: why, and what that makes of its error."""
        ending, self.ending = self.ending, None
        if self.task is not None:
            self.task.uncancel()
        if ending == "timeout" and isinstance(error, asyncio.CancelledError):
            error = TimeoutError(f"the handler ran for more than {self.consumer.handler.time_limit:g} s")
        return ending, error

    def tell(
        self,
        context: ClientContext,
        messages: Sequence[Message[Any]],
        error: BaseException | None,
        ending: Ending | None,
        *,
        stopped: bool,
    ) -> None:
        """One event for the handler call of each message."""
        outcome: Literal["success", "failure", "skipped"] = "success"
        told: dict[str, Any] = {}
        if error is not None:
            outcome = "skipped" if stopped or isinstance(error, Outcome) else "failure"
            told = {"error_type": error_type(error), "error": error_text(error)}
        run_ms = round((lease_clock.now() - self.started) * 1000, 3)
        for message in messages:
            context.tell(
                "handled", message.queue, outcome, message_id=message.id, token=message.token,
                deliveries=message.deliveries, attempts=message.attempts, run_ms=run_ms, reason=ending, **told,
            )  # fmt: skip

    def log_overdue(self, handler: Handler) -> None:
        """Say once that a handler has run for too long."""
        messages = self.messages
        if messages and self._overdue is not messages:
            self._overdue = messages
            log.warning(
                "handler %s has run for more than %g s on message %s of queue %s: its lease is not renewed any more",
                handler.name,
                handler.max_run,
                messages[0].id,
                handler.queue,
                extra={"event": "run_too_long", "queue": handler.queue, "message_id": messages[0].id},
            )


class _Suspended:
    """The rest of a coroutine that was begun in a context of its own, to be awaited."""

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


def suspended(coroutine: Coroutine[Any, Any, Any], context: Context, waits_for: Any) -> _Suspended:
    """Await the rest of a coroutine whose first wait is `waits_for`."""
    return _Suspended(coroutine, context, waits_for)


def log_failure(handler: Handler, messages: Sequence[Message[Any]], error: BaseException) -> None:
    """Say that a handler failed, with its traceback."""
    message = messages[0]
    log.warning(
        "handler %s failed on message %s of queue %s (delivery %d, attempt %d): %s",
        handler.name,
        message.id,
        handler.queue,
        message.deliveries,
        message.attempts + 1,
        error_type(error),
        exc_info=error,
        extra={
            "event": "handler_failed",
            "queue": handler.queue,
            "message_id": message.id,
            "deliveries": message.deliveries,
            "attempts": message.attempts + 1,
            "error_type": error_type(error),
        },
    )
