"""The queue for programs that block."""

from __future__ import annotations

import inspect
import logging
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

from waypost.client import Waypost
from waypost.client.base import BaseClient
from waypost.errors import WaypostError
from waypost.message import Message
from waypost.operations import receive
from waypost.policy import NoRetry
from waypost.redis_message_queue.errors import CleanupFailedError, mapped_errors
from waypost.redis_message_queue.events import (
    EventOperation,
    EventOutcome,
    QueueEvent,
    error_fields,
    message_fields,
    translate,
)
from waypost.redis_message_queue.options import (
    UNSET,
    Payload,
    QueueArguments,
    QueueOptions,
    check_key,
    content_key,
    serialize,
)
from waypost.views import Observed

log = logging.getLogger("waypost")

#: How long `drain` waits for publishes under way, unless it is given a time.
DRAIN_SECONDS = 25.0
DRAIN_POLL_SECONDS = 0.01
#: Errors that say nothing about the message: it is given back.
STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class RedisMessageQueue:
    """A queue with the methods of redis-message-queue. Its arguments are those there; see the page on switching over.

    `client` is a client of redis-py, the URL of a store, or a `Waypost`, whose store is used.
    """

    def __init__(self, name: str, **given: Unpack[QueueArguments]) -> None:
        self._options = options = QueueOptions(name, given)
        for callback in ("on_event", "on_heartbeat_failure"):
            if inspect.iscoroutinefunction(getattr(options, callback)):
                raise TypeError(f"{callback} of a sync queue is a plain function: use the async RedisMessageQueue")
        with mapped_errors():
            #: The client of waypost: statistics, dead letters, schedules and all else is there.
            self.post: Waypost = make_client(Waypost, options, self._on_client_event)
        self._lock = threading.Lock()
        self._configured = False

    def __repr__(self) -> str:
        return f"RedisMessageQueue({self._options.name!r}, {self.post.store.kind})"

    def publish(self, message: Payload) -> bool:
        """Publish text, or a dict as JSON; False if it is a duplicate.

        Raises `QueueBackpressureError` if the queue is full, `QueueDrainedError` after `drain`.
        """
        options, text, began = self._options, serialize(message), time.perf_counter()
        key = self._key(message, text) if options.deduplication else None
        window = options.window if key is not None else None
        try:
            with mapped_errors():
                self._configure()
                published = self.post.publish(
                    options.name, text, key=key, window=window, block_timeout=options.block_timeout
                )
        except WaypostError as error:
            self._emit(EventOperation.PUBLISH, EventOutcome.FAILURE, began, **error_fields(error))
            raise
        is_new = published.status != "duplicate"
        operation = EventOperation.PUBLISH if is_new else EventOperation.PUBLISH_DEDUP_HIT
        self._emit(operation, EventOutcome.SUCCESS, began, message_id=published.id)
        return is_new

    @contextmanager
    def process_message(self) -> Iterator[str | bytes | None]:
        """Claim a message for a `with` block; None if none came in time, or the queue is drained.

        The end of the block settles it. An error removes it, or moves it to the dead letters (`enable_failed_queue`),
        and is raised.
        """
        options, began = self._options, time.perf_counter()
        reception = None
        message: Message[Any] | None = None
        try:
            with mapped_errors():
                self._configure()
                for wait in options.parts:
                    if self._is_stopped():
                        break
                    reception = self.post.receive(options.name, wait=wait, retry=NoRetry(), renew=options.renews)
                    message = reception.__enter__()
                    if message is not None:
                        break
        except WaypostError as error:
            self._emit(EventOperation.CLAIM, EventOutcome.FAILURE, began, **error_fields(error))
            raise
        if message is None or reception is None:
            self._emit(EventOperation.CLAIM_EMPTY, EventOutcome.SKIPPED, began)
            yield None
            return
        try:
            self._emit(EventOperation.CLAIM, EventOutcome.SUCCESS, began, **message_fields(message))
            began = time.perf_counter()
            yield self._content(message)
        except BaseException as error:
            try:
                self._decide(message, error, began)
            finally:
                # A signal that raises during the callback must not keep the claim.
                self._settle(reception, message, error)
            raise
        self._settle(reception, message, None)

    def drain(self, timeout: float | None = None) -> bool:
        """Publish and claim no more, wait for publishes under way, and give back what claims without a reply hold.

        Handlers that run are not waited for. Returns whether nothing is left; `timeout=0` only reports.
        """
        seconds = DRAIN_SECONDS if timeout is None else timeout
        post = self.post
        if seconds > 0:
            for pause in drain_pauses(post, seconds):
                time.sleep(pause)
            if post._context.queues_with_lost_claims():
                left: int = post._run(receive.give_back_lost_claims(post._context))
                if left:
                    return False
        return not post._gate.publishing and not post._context.queues_with_lost_claims()

    def close(self, timeout: float | None = None) -> bool:
        """`drain`. The connections are ended by `queue.post.close()`, or with the client that was given."""
        return self.drain(timeout)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _configure(self) -> None:
        """Apply the settings once, before the first use."""
        if self._configured:
            return
        with self._lock:
            if not self._configured:
                changes = self._options.changes(is_new=self._options.name not in self.post.queues())
                if changes:
                    self.post.configure(self._options.name, **changes)
                self._configured = True

    def _key(self, message: Payload, text: str) -> str:
        get_key = self._options.get_key
        if get_key is UNSET:
            return content_key(text)
        if get_key is None:
            return check_key(text)
        key = get_key(message)
        if inspect.isawaitable(key):
            if inspect.iscoroutine(key):
                key.close()
            raise TypeError("'get_deduplication_key' returned an awaitable; use the async RedisMessageQueue")
        return check_key(key)

    def _is_stopped(self) -> bool:
        interrupt = self._options.interrupt
        return self.post._gate.drained or (interrupt is not None and interrupt.is_interrupted())

    def _content(self, message: Message[Any]) -> str | bytes:
        return content_of(message, self._options)

    def _decide(self, message: Message[Any], error: BaseException, began: float) -> None:
        """Decide what becomes of a message whose handler raised."""
        if decide(message, error, self._options):
            self._emit(
                EventOperation.FAILED, EventOutcome.FAILURE, began, **message_fields(message), **error_fields(error)
            )

    def _settle(self, reception: Any, message: Message[Any], error: BaseException | None) -> None:
        began = time.perf_counter()
        given = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        try:
            reception.__exit__(*given)
        except WaypostError as failure:
            self._emit(
                EventOperation.CLEANUP_FAILED, EventOutcome.FAILURE, began, **message_fields(message),
                **error_fields(failure),
            )  # fmt: skip
            if error is None:
                raise CleanupFailedError("the message was handled, and the store could not record it") from failure
            log.warning("the end of message %s could not be recorded: %s", message.id, failure)
            return
        for operation, outcome in settled_events(message, error, self._options):
            self._emit(operation, outcome, began, **message_fields(message))

    def _on_client_event(self, event: Observed) -> None:
        if event.event == "lease_lost" and self._options.on_heartbeat_failure is not None:
            guarded(self._options.on_heartbeat_failure)
        found = translate(event, self._options.dead_letter_queue)
        if found is not None:
            operation, outcome, fields = found
            self._emit(operation, outcome, None, **fields)

    def _emit(self, operation: EventOperation, outcome: EventOutcome, began: float | None, **fields: Any) -> None:
        if self._options.on_event is not None:
            guarded(self._options.on_event, make_event(self._options, operation, outcome, began, fields))


# ---- shared with the async queue -------------------------------------------------------------------------------------


def make_client(kind: Any, options: QueueOptions, on_event: Any) -> Any:
    """Return a client for one queue object: draining it must not drain others."""
    given: dict[str, Any] = {
        "namespace": options.namespace, "retry_budget": options.retry_budget, "on_event": on_event,
    }  # fmt: skip
    client = options.client
    if isinstance(client, str):
        return kind(client, **given)
    if hasattr(client, "store") and hasattr(client, "publish_many"):
        return kind(store=client.store, **{**given, "namespace": client.store.namespace})
    return kind(client=client, **given)


def drain_pauses(post: BaseClient, seconds: float) -> Iterator[float]:
    """Publish and claim no more; yield the pauses until the publishes under way have ended."""
    post._gate.drain()
    deadline = time.monotonic() + seconds
    while post._gate.publishing and time.monotonic() < deadline:
        yield DRAIN_POLL_SECONDS


def make_event(
    options: QueueOptions, operation: EventOperation, outcome: EventOutcome, began: float | None, fields: dict[str, Any]
) -> QueueEvent:
    """Return an event for `on_event`."""
    duration = None if began is None else (time.perf_counter() - began) * 1000
    return QueueEvent(options.name, operation, outcome, duration_ms=duration, **fields)


def guarded(callback: Any, *arguments: Any) -> None:
    """Call a callback whose errors have no effect but a log line and a warning."""
    try:
        callback(*arguments)
    except Exception as error:
        report_callback(callback, error)


def report_callback(callback: Any, error: Exception) -> None:
    """Log and warn of a callback that failed."""
    name = getattr(callback, "__qualname__", repr(callback))
    log.warning("%s failed: %r", name, error, exc_info=error)
    warnings.warn(f"{name} failed: {error!r}", RuntimeWarning, stacklevel=3)


def content_of(message: Message[Any], options: QueueOptions) -> str | bytes:
    """Return the content of a message as the consumer wants it: what other programs published, as JSON."""
    body = message.body
    text = body if isinstance(body, str | bytes) else serialize(body)
    if options.decodes:
        return text if isinstance(text, str) else text.decode()
    return text.encode() if isinstance(text, str) else text


def decide(message: Message[Any], error: BaseException, options: QueueOptions) -> bool:
    """Decide what becomes of a message whose handler raised; return whether that is a failure of it."""
    if isinstance(error, STOPS):
        if not message.at_most_once:
            message.snooze(0)
        return False
    if not options.tracks_failed and not message.at_most_once:
        message.drop()
    return True


def settled_events(
    message: Message[Any], error: BaseException | None, options: QueueOptions
) -> list[tuple[EventOperation, EventOutcome]]:
    """Return the events of a settle."""
    if isinstance(error, STOPS):
        return []
    lost = message.settled == "lost" or (message.settled is None and message.lease_lost)
    outcome = EventOutcome.SKIPPED if lost else EventOutcome.SUCCESS
    if error is not None:
        found = [(EventOperation.NACK, outcome)]
        return [*found, (EventOperation.STALE_LEASE_NACK, EventOutcome.SKIPPED)] if lost else found
    found = [(EventOperation.COMPLETED, outcome)] if options.tracks_completed else []
    found.append((EventOperation.ACK, outcome))
    return [*found, (EventOperation.STALE_LEASE_ACK, EventOutcome.SKIPPED)] if lost else found
