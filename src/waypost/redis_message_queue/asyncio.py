"""The queue for an event loop: the same names, awaited."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Unpack

from waypost.client import AsyncWaypost
from waypost.errors import WaypostError
from waypost.message import Message
from waypost.operations import receive
from waypost.policy import NoRetry
from waypost.redis_message_queue.errors import CleanupFailedError, mapped_errors
from waypost.redis_message_queue.events import (
    EventOperation,
    EventOutcome,
    error_fields,
    message_fields,
    translate,
)
from waypost.redis_message_queue.options import (
    UNSET,
    Payload,
    QueueArguments,
    QueueOptions,
    RedisGateway,
    check_key,
    content_key,
    serialize,
)
from waypost.redis_message_queue.sync_queue import (
    DRAIN_SECONDS,
    content_of,
    decide,
    drain_pauses,
    log,
    make_client,
    make_event,
    report_callback,
    settled_events,
)
from waypost.views import Observed

__all__ = ["RedisGateway", "RedisMessageQueue"]


class RedisMessageQueue:
    """A queue with the methods of `redis_message_queue.asyncio`. Its arguments are those of the sync one.

    `client` is an asyncio client of redis-py, the URL of a store, or an `AsyncWaypost`. `on_event`,
    `on_heartbeat_failure` and `get_deduplication_key` may be async functions.
    """

    def __init__(self, name: str, **given: Unpack[QueueArguments]) -> None:
        self._options = options = QueueOptions(name, given)
        with mapped_errors():
            #: The client of waypost: statistics, dead letters, schedules and all else is there.
            self.post: AsyncWaypost = make_client(AsyncWaypost, options, self._on_client_event)
        self._lock = asyncio.Lock()
        self._configured = False
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Callbacks that renewals have started.
        self._callbacks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"RedisMessageQueue({self._options.name!r}, {self.post.store.kind})"

    async def publish(self, message: Payload) -> bool:
        """Publish text, or a dict as JSON; False if it is a duplicate.

        Raises `QueueBackpressureError` if the queue is full, `QueueDrainedError` after `drain`.
        """
        options, text, began = self._options, serialize(message), time.perf_counter()
        key = await self._key(message, text) if options.deduplication else None
        window = options.window if key is not None else None
        try:
            with mapped_errors():
                await self._configure()
                published = await self.post.publish(
                    options.name, text, key=key, window=window, block_timeout=options.block_timeout
                )
        except WaypostError as error:
            await self._emit(EventOperation.PUBLISH, EventOutcome.FAILURE, began, **error_fields(error))
            raise
        is_new = published.status != "duplicate"
        operation = EventOperation.PUBLISH if is_new else EventOperation.PUBLISH_DEDUP_HIT
        await self._emit(operation, EventOutcome.SUCCESS, began, message_id=published.id)
        return is_new

    @asynccontextmanager
    async def process_message(self) -> AsyncIterator[str | bytes | None]:
        """Claim a message for an `async with` block; None if none came in time, or the queue is drained.

        The end of the block settles it. An error removes it, or moves it to the dead letters (`enable_failed_queue`),
        and is raised. A task that is cancelled gives it back.
        """
        options, began = self._options, time.perf_counter()
        reception = None
        message: Message[Any] | None = None
        try:
            with mapped_errors():
                await self._configure()
                for wait in options.parts:
                    if self._is_stopped():
                        break
                    reception = self.post.receive(options.name, wait=wait, retry=NoRetry(), renew=options.renews)
                    message = await reception.__aenter__()
                    if message is not None:
                        break
        except WaypostError as error:
            await self._emit(EventOperation.CLAIM, EventOutcome.FAILURE, began, **error_fields(error))
            raise
        if message is None or reception is None:
            await self._emit(EventOperation.CLAIM_EMPTY, EventOutcome.SKIPPED, began)
            yield None
            return
        try:
            await self._emit(EventOperation.CLAIM, EventOutcome.SUCCESS, began, **message_fields(message))
            began = time.perf_counter()
            yield content_of(message, options)
        except asyncio.CancelledError as error:
            if not message.at_most_once:
                message.snooze(0)
            await self._settle(reception, message, error)
            raise
        except BaseException as error:
            try:
                if decide(message, error, options):
                    fields = {**message_fields(message), **error_fields(error)}
                    await self._emit(EventOperation.FAILED, EventOutcome.FAILURE, began, **fields)
            finally:
                # A task that is cancelled during the callback must not keep the claim.
                await self._settle(reception, message, error)
            raise
        await self._settle(reception, message, None)

    async def drain(self, timeout: float | None = None) -> bool:
        """Publish and claim no more, wait for publishes under way, and give back what claims without a reply hold.

        Handlers that run are not waited for. Returns whether nothing is left; `timeout=0` only reports.
        """
        seconds = DRAIN_SECONDS if timeout is None else timeout
        post = self.post
        if seconds > 0:
            for pause in drain_pauses(post, seconds):
                await asyncio.sleep(pause)
            if post._context.queues_with_lost_claims():
                left: int = await post._run(receive.give_back_lost_claims(post._context))
                if left:
                    return False
        return not post._gate.publishing and not post._context.queues_with_lost_claims()

    async def aclose(self, timeout: float | None = None) -> bool:
        """`drain`. The connections are ended by `await queue.post.close()`, or with the client that was given."""
        return await self.drain(timeout)

    # ---- inside ------------------------------------------------------------------------------------------------

    async def _configure(self) -> None:
        if self._configured:
            return
        async with self._lock:
            if not self._configured:
                self._loop = asyncio.get_running_loop()
                changes = self._options.changes(is_new=self._options.name not in await self.post.queues())
                if changes:
                    await self.post.configure(self._options.name, **changes)
                self._configured = True

    async def _key(self, message: Payload, text: str) -> str:
        get_key = self._options.get_key
        if get_key is UNSET:
            return content_key(text)
        if get_key is None:
            return check_key(text)
        key = get_key(message)
        return check_key(await key if inspect.isawaitable(key) else key)

    def _is_stopped(self) -> bool:
        interrupt = self._options.interrupt
        return self.post._gate.drained or (interrupt is not None and interrupt.is_interrupted())

    async def _settle(self, reception: Any, message: Message[Any], error: BaseException | None) -> None:
        began = time.perf_counter()
        given = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        try:
            await reception.__aexit__(*given)
        except WaypostError as failure:
            fields = {**message_fields(message), **error_fields(failure)}
            await self._emit(EventOperation.CLEANUP_FAILED, EventOutcome.FAILURE, began, **fields)
            if error is None:
                raise CleanupFailedError("the message was handled, and the store could not record it") from failure
            log.warning("the end of message %s could not be recorded: %s", message.id, failure)
            return
        if isinstance(error, asyncio.CancelledError):
            return
        for operation, outcome in settled_events(message, error, self._options):
            await self._emit(operation, outcome, began, **message_fields(message))

    def _on_client_event(self, event: Observed) -> None:
        """Called on the loop, and for renewals from a thread."""
        found = translate(event, self._options.dead_letter_queue)
        is_lost = event.event == "lease_lost" and self._options.on_heartbeat_failure is not None
        if self._loop is None or self._loop.is_closed() or not (found or is_lost):
            return

        async def call() -> None:
            if is_lost:
                await guarded(self._options.on_heartbeat_failure)
            if found is not None:
                operation, outcome, fields = found
                await self._emit(operation, outcome, None, **fields)

        def start() -> None:
            task = asyncio.ensure_future(call())
            self._callbacks.add(task)
            task.add_done_callback(self._callbacks.discard)

        self._loop.call_soon_threadsafe(start)

    async def _emit(self, operation: EventOperation, outcome: EventOutcome, began: float | None, **fields: Any) -> None:
        if self._options.on_event is not None:
            await guarded(self._options.on_event, make_event(self._options, operation, outcome, began, fields))


async def guarded(callback: Any, *arguments: Any) -> None:
    """Call a callback, sync or async, whose errors have no effect but a log line and a warning."""
    try:
        found = callback(*arguments)
        if inspect.isawaitable(found):
            await found
    except Exception as error:
        report_callback(callback, error)
