"""A subscriber: FastStream's processing of a message as a handler of a waypost worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

from faststream import AckPolicy
from faststream.exceptions import StopConsume
from faststream.message import StreamMessage

from waypost.client import AsyncWaypost
from waypost.errors import ConfigurationError, EnvelopeTooNew, Undecodable
from waypost.faststream.internals import (
    EMPTY,
    CallsCollection,
    HandlerItem,
    PublisherProto,
    SubscriberSpecification,
    SubscriberUsecase,
    SubscriberUsecaseConfig,
    is_blocking,
)
from waypost.faststream.message import WaypostMessage, decode_batch, decode_one, parse_batch, parse_message
from waypost.faststream.outcomes import SKIP_SECONDS, outcome_of
from waypost.faststream.publishing import WaypostResponse, reply_publisher
from waypost.faststream.workers import SubscriberWorkers
from waypost.message import Message, Outcome, error_text
from waypost.policy import Exponential
from waypost.worker.handler import Handler

DEFAULT_RETRY = Exponential()


@dataclass(kw_only=True)
class WaypostSubscriberConfig(SubscriberUsecaseConfig):
    """What a subscriber is made of."""

    queues: tuple[str, ...]
    batch: int | None = None
    #: Options of `waypost.worker.handler.Handler`.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Settings of its queues that are configured when it starts.
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parser = parse_message if self.batch is None else parse_batch
        self.decoder = decode_one if self.batch is None else decode_batch

    @property
    def ack_policy(self) -> AckPolicy:
        """That of the subscriber, of its router or broker, or `NACK_ON_ERROR`: the retry policy decides."""
        for policy in (self._ack_policy, self._outer_config.ack_policy):
            if policy is not EMPTY:
                return policy
        return AckPolicy.NACK_ON_ERROR

    @property
    def auto_ack_disabled(self) -> bool:
        """FastStream's own middleware would hide the error from the retry policy: `outcomes` does its part."""
        return True


class SubscriberCalls(CallsCollection[Any]):
    """The functions of a subscriber: more than one if they have filters."""

    def __init__(self) -> None:
        super().__init__()
        #: Called when a function was added: raises `ConfigurationError` if the subscriber's options do not suit it.
        self.check: Callable[[], object] = bool

    def add_call(self, call: HandlerItem[Any]) -> None:
        """Add a function, unless the subscriber's options do not suit it."""
        super().add_call(call)
        try:
            self.check()
        except ConfigurationError:
            self.data.remove(call)
            raise


class HasWorkers(Protocol):
    """What a subscriber needs of its broker."""

    client: AsyncWaypost
    workers: SubscriberWorkers


class WaypostSubscriber(SubscriberUsecase[Any]):
    """Handles the messages of one or more queues."""

    def __init__(
        self,
        config: WaypostSubscriberConfig,
        specification: SubscriberSpecification[Any, Any],
        calls: SubscriberCalls,
    ) -> None:
        super().__init__(config, specification, calls)
        calls.check = self.handlers
        self.config = config
        self._stopping: asyncio.Task[None] | None = None
        #: The ack policy, which a router can still change until the start.
        self._policy = config.ack_policy

    @property
    def queues(self) -> list[str]:
        """Its queues, with the prefixes of its routers."""
        return [f"{self._outer_config.prefix}{queue}" for queue in self.config.queues]

    @property
    def client(self) -> AsyncWaypost:
        """The client of its broker."""
        return self._broker_config.client

    @property
    def _broker_config(self) -> HasWorkers:
        """The configuration of its broker, which it sees through those of its routers."""
        return cast("HasWorkers", self._outer_config)

    # ---- start and stop ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start to handle messages; with its broker, in the one worker that the broker starts."""
        await super().start()
        self.lock = nullcontext()  # the worker waits for the handlers that run; a lock would cost each message time
        self._post_start()
        if self.calls:
            await self._broker_config.workers.add(self, self.client)

    async def stop(self) -> None:
        """Stop to handle messages. Handlers that run have the broker's `graceful_timeout` to end."""
        self.running = False
        await self._broker_config.workers.stop(self, self._outer_config.graceful_timeout or 0.0)
        await super().stop()

    def handlers(self) -> list[Handler]:
        """Return its handlers, one for each queue."""
        options: dict[str, Any] = {"retry": DEFAULT_RETRY, **self.config.options}
        self._policy = self.config.ack_policy
        options["manual"] = self._policy is AckPolicy.MANUAL
        # FastStream calls a function that is no coroutine function in a thread, which continues after a cancel.
        options["blocking"] = any(map(is_blocking, self.calls))
        options["name"] = self.specification.call_name
        function: Any = self._handle_one if self.config.batch is None else self._handle_batch
        return [Handler(queue, function, batch=self.config.batch, **options) for queue in self.queues]

    # ---- messages ------------------------------------------------------------------------------------------

    async def _handle_one(self, message: Message[Any]) -> Outcome | None:
        if self._policy is AckPolicy.ACK_FIRST:
            message.done()
        try:
            response = await self.process_message(message)
            if isinstance(response, WaypostResponse) and response.queue is not None:
                await self._publish_response(response, response.queue)
        except BaseException as error:
            return self._failed(error, [message])
        return None

    async def _handle_batch(self, messages: list[Message[Any]]) -> Outcome | None:
        readable = [message for message in messages if _is_readable(message)]
        if self._policy is AckPolicy.ACK_FIRST:
            for message in readable:
                message.done()
        if not readable:
            return None
        try:
            response = await self.process_message(readable)
            if isinstance(response, WaypostResponse) and response.queue is not None:
                await self._publish_response(response, response.queue)
        except BaseException as error:
            return self._failed(error, readable)
        return None

    async def _publish_response(self, response: WaypostResponse, queue: str) -> None:
        """Publish what a handler returned to the queue that it named, through the middlewares of the broker."""
        command = response.as_publish_command()
        command.destination = queue
        publish: Any = self._outer_config.producer.publish
        for middleware in reversed(self._broker_middlewares):  # the first is the outermost
            publish = partial(middleware(None, context=self._outer_config.context).publish_scope, publish)
        await publish(command)

    def _failed(self, error: BaseException, messages: list[Message[Any]]) -> Outcome | None:
        """Return the outcome after an error, or raise it again for the worker."""
        if isinstance(error, asyncio.CancelledError):
            raise error
        if isinstance(error, StopConsume | SystemExit):
            self._stop_soon(error)
        if error is messages[0].undecodable:
            raise error
        ending = outcome_of(error, self._policy)
        if ending is None:
            _end_as_done(messages)
            return None
        if isinstance(ending, Outcome):
            return ending
        if ending is error:
            raise error
        raise ending from error

    def _stop_soon(self, error: BaseException) -> None:
        """Stop this subscriber because its handler requested it, and with `SystemExit` the application."""
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.get_running_loop().create_task(self.stop(), name="waypost stops a subscriber")
        app = self._outer_config.context.get("app")
        if isinstance(error, SystemExit) and app:
            # Also if another call stopped the subscriber already, or its stop fails.
            self._stopping.add_done_callback(lambda _: app.exit())

    def _make_response_publisher(self, message: StreamMessage[Any]) -> Sequence[PublisherProto[Any]]:
        publisher = reply_publisher(self._outer_config.producer, message.reply_to, message.raw_message)
        return () if publisher is None else (publisher,)

    def get_log_context(self, message: StreamMessage[Any] | None) -> dict[str, str]:
        """Return what log lines about a message have in common."""
        queue = ",".join(self.queues) if message is None else _queue_of(message)
        return {"queue": queue, "message_id": "" if message is None else str(message.message_id)}

    # ---- without a handler ---------------------------------------------------------------------------------

    async def get_one(self, *, timeout: float = 5.0) -> WaypostMessage | None:
        """Return one message of its first queue, which is done then, or None if there is none in time."""
        parsed: WaypostMessage | None = None
        async with self.client.receive(self.queues[0], wait=timeout) as message:
            if message is not None:
                parsed = await self._parse(message)
        return parsed

    async def __aiter__(self) -> AsyncIterator[WaypostMessage]:
        """Yield the messages of its first queue. Each is done with the next one, unless it was decided otherwise."""
        async with aclosing(self.client.consume(self.queues[0])) as messages:  # type: ignore[type-var]
            async for message in messages:
                async with message:
                    yield await self._parse(message)

    async def _parse(self, message: Message[Any]) -> WaypostMessage:
        parser, decoder = self._get_parser_and_decoder()
        parsed: WaypostMessage = await parser(message)
        parsed.set_decoder(decoder)
        return parsed


def _end_as_done(messages: list[Message[Any]]) -> None:
    """Decide that messages without an outcome are done: with `AckPolicy.MANUAL` they would be retried."""
    for message in messages:
        if message.outcome is None and message.settled is None:
            message.done()


def _is_readable(message: Message[Any]) -> bool:
    """Whether the envelope of a message of a batch can be read; if not, that decides its outcome."""
    try:
        message.open()
    except Undecodable as error:
        with contextlib.suppress(ValueError):  # a message that left the store with its claim ends anyway
            if isinstance(error, EnvelopeTooNew):
                message.snooze(SKIP_SECONDS)
            else:
                message.dead("undecodable", error_text(error))
        return False
    return True


def _queue_of(message: StreamMessage[Any]) -> str:
    return message.queue if isinstance(message, WaypostMessage) else ""
