"""Publishing: the command that passes through FastStream's middlewares, the producer that ends it, publishers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

from faststream.response import PublishCommand, PublishType, Response
from faststream.response.response import BatchPublishCommand

from waypost import codec
from waypost.checks import check_seconds
from waypost.client import AsyncWaypost
from waypost.client.options import PublishKeywords, QueueName
from waypost.errors import InvalidInput, ResultNotKept
from waypost.faststream.internals import (
    CodecProto,
    ContentTypes,
    CustomCallable,
    DefaultCodec,
    FakePublisher,
    ParserComposition,
    ProducerProto,
    PublisherMiddleware,
    PublisherSpecification,
    PublisherUsecase,
    PublisherUsecaseConfig,
    SendableMessage,
    SerializerProto,
)
from waypost.faststream.message import CONTENT_TYPE, decode_one, parse_message
from waypost.message import Message, queue_name
from waypost.times import Duration
from waypost.values import Lease, Published

#: The `reply_to` of a request: the reply is kept as the result of the message, for so many seconds.
RESULT_REPLY = "waypost-result:"
#: A reply is kept for this much longer than its requester waits, by whatever clock.
REPLY_KEPT_SECONDS = 60.0
REQUEST_SECONDS = 30.0

_CONTENTS = {ContentTypes.TEXT.value: codec.TEXT, ContentTypes.JSON.value: codec.JSON, None: codec.BYTES}


class WaypostPublishCommand(BatchPublishCommand):
    """What is to be published: bodies, the queue as `destination`, and the options of `AsyncWaypost.publish`."""

    def __init__(
        self,
        message: Any,
        /,
        *messages: Any,
        queue: str = "",
        options: Mapping[str, Any] | None = None,
        _publish_type: PublishType,
        reply_to: str = "",
        correlation_id: str | None = None,
        headers: dict[str, Any] | None = None,
        timeout: Duration = REQUEST_SECONDS,
    ) -> None:
        super().__init__(
            message, *messages, _publish_type=_publish_type, reply_to=reply_to, destination=queue,
            correlation_id=correlation_id, headers=headers,
        )  # fmt: skip
        self.options = dict(options or {})
        #: How long a request waits for its reply.
        self.timeout = timeout
        self._has_bodies = True

    @property
    def batch_bodies(self) -> tuple[Any, ...]:
        """All bodies. `None` is one, also if it is the first."""
        return (self.body, *self.extra_bodies) if self._has_bodies else ()

    @batch_bodies.setter
    def batch_bodies(self, bodies: Sequence[Any]) -> None:
        self._has_bodies = bool(bodies)
        self.body, self.extra_bodies = (bodies[0], tuple(bodies[1:])) if bodies else (None, ())

    @classmethod
    def from_cmd(cls, cmd: PublishCommand, *, batch: bool = False) -> WaypostPublishCommand:
        """Return the command of another broker, or of a handler's return value, as one of ours."""
        if isinstance(cmd, WaypostPublishCommand):
            return cmd
        body, more = cls._parse_bodies(cmd.body, batch=batch)
        return cls(
            body, *more, queue=cmd.destination, _publish_type=cmd.publish_type, reply_to=cmd.reply_to,
            correlation_id=cmd.correlation_id, headers=cmd.headers,
        )  # fmt: skip


class WaypostResponse(Response):
    """What a handler can return: a body with options of `publish` for the publishers around it.

    With `queue` it is published there too, with or without publishers; if that fails, the message has failed.
    """

    def __init__(self, body: Any = None, queue: QueueName | None = None, **options: Unpack[PublishKeywords]) -> None:
        own, self.options = split_options(options)
        super().__init__(body, headers=own["headers"], correlation_id=own["correlation_id"])
        self.reply_to = own["reply_to"]
        self.queue = None if queue is None else queue_name(queue)

    def as_publish_command(self) -> WaypostPublishCommand:
        """Return the command for the publishers around the handler."""
        return WaypostPublishCommand(
            self.body, options=self.options, _publish_type=PublishType.PUBLISH, reply_to=self.reply_to,
            correlation_id=self.correlation_id, headers=self.headers,
        )  # fmt: skip


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those options of a publish that a command has fields for, and the others."""
    rest = dict(options)
    headers = rest.pop("headers", None)
    own = {
        "headers": None if headers is None else dict(headers),
        "correlation_id": rest.pop("correlation_id", None),
        "reply_to": rest.pop("reply_to", None) or "",
    }
    return own, rest


class EncodedBody:
    """A body in bytes, as FastStream's codec made it, and the header for a content type that envelopes do not know."""

    __slots__ = ("body", "content_type")

    def __init__(self, data: bytes, content_type: str | None, given: Any) -> None:
        content = _CONTENTS.get(content_type, codec.BYTES)
        name = codec.type_name_of(given) if content == codec.JSON else None
        self.body = codec.Encoded(content, data, name)
        self.content_type = content_type

    def headers(self, headers: dict[str, Any]) -> dict[str, Any]:
        """Return the headers of a message with this body."""
        return headers if self.content_type in _CONTENTS else {**headers, CONTENT_TYPE: self.content_type}


class WaypostProducer(ProducerProto[WaypostPublishCommand]):
    """Encodes bodies as FastStream does and publishes them with a client."""

    #: Whether `transaction=` counts. In a test in memory there is no database that it could belong to.
    uses_transactions = True

    def __init__(self, client: AsyncWaypost, parser: CustomCallable | None, decoder: CustomCallable | None) -> None:
        self.client = client
        self.codec: CodecProto = DefaultCodec()
        self.serializer: SerializerProto | None = None
        self._parser = ParserComposition(parser, parse_message)
        self._own_decoder = ParserComposition(decoder, decode_one)
        #: Decodes the replies to requests.
        self._decoder: Any = self._own_decoder

    def connect(self, serializer: SerializerProto | None, codec: CodecProto | None) -> None:
        """Encode with these from now on, and decode replies with the codec."""
        self.serializer = serializer
        self.codec = codec or DefaultCodec()
        self._decoder = self._own_decoder if codec is None else codec.decode

    async def encode(self, body: Any) -> EncodedBody:
        """Return a body in bytes."""
        data, content_type = await self.codec.encode(body, self.serializer)
        return EncodedBody(data, content_type, body)

    async def publish(self, cmd: WaypostPublishCommand) -> Published:
        """Publish one message."""
        encoded = await self.encode(cmd.body)
        options = make_options(cmd, encoded)
        for name in ("key", "group"):
            # A function of the body is given what was published, not its bytes.
            if callable(options.get(name)):
                options[name] = options[name](cmd.body)
        return await self.client.publish(cmd.destination, encoded.body, **options)

    async def publish_batch(self, cmd: WaypostPublishCommand) -> list[Published]:
        """Publish many messages, in one flush."""
        bodies = cmd.batch_bodies
        encoded = [await self.encode(body) for body in bodies]
        kinds = {one.content_type for one in encoded if one.content_type not in _CONTENTS}
        if not encoded:
            return []
        if kinds and len({one.content_type for one in encoded}) > 1:
            raise InvalidInput("the bodies of one batch have different content types: publish them one by one")
        options = make_options(cmd, encoded[0])
        given = {id(one.body): body for one, body in zip(encoded, bodies, strict=True)}
        for name in ("key", "group"):
            if callable(options.get(name)):
                options[name] = _of_given(options[name], given)
        return await self.client.publish_many(cmd.destination, [one.body for one in encoded], **options)

    async def request(self, cmd: WaypostPublishCommand) -> Message[Any]:
        """Publish a message and return the reply to it. Raises `WaitTimeout` when there is none in time."""
        return await self.await_reply(await self.send_request(cmd), cmd)

    async def send_request(self, cmd: WaypostPublishCommand) -> Published:
        """Publish a message whose handler is to reply."""
        if cmd.options.get("transaction") is not None:
            raise InvalidInput(
                "a request has no transaction=: its message exists when that is committed, and no reply can come before"
            )
        seconds = check_seconds("timeout", cmd.timeout)
        cmd.reply_to = f"{RESULT_REPLY}{seconds + REPLY_KEPT_SECONDS:.0f}"
        return await self.publish(cmd)

    async def await_reply(self, published: Published, cmd: WaypostPublishCommand) -> Message[Any]:
        """Wait until the handler has replied. Raises `MessageDead` or the like if it never will."""
        envelope = await self.client.wait_result(published, timeout=cmd.timeout)
        if not isinstance(envelope, bytes):
            raise ResultNotKept(
                f"message {published.id} of queue {published.queue} is done, and its handler sent no reply: it handles "
                "batches, has no_reply=True, is no FastStream subscriber, or its queue has lease=None"
            )
        return Message(published.queue, Lease(published.id, 0, b"", 1, 0, 5, None, None, 0, 0, 0, None, envelope))


def make_options(cmd: WaypostPublishCommand, encoded: EncodedBody) -> dict[str, Any]:
    """Return the keywords of `AsyncWaypost.publish` for a command."""
    options: dict[str, Any] = dict(cmd.options)
    headers = encoded.headers(cmd.headers)
    if headers:
        options["headers"] = headers
    if cmd.correlation_id:
        options["correlation_id"] = cmd.correlation_id
    if cmd.reply_to:
        options["reply_to"] = cmd.reply_to
    return options


def _of_given(function: Callable[[Any], str], given: Mapping[int, Any]) -> Callable[[Any], str]:
    """Return a function of an encoded body that calls one of the body that was given."""
    return lambda encoded: function(given[id(encoded)])


class WaypostPublisherConfig(PublisherUsecaseConfig):
    """What a publisher is made of."""

    def __init__(self, outer: Any, queue: str, options: Mapping[str, Any]) -> None:
        super().__init__(_outer_config=outer)
        self.queue = queue
        self.own, self.options = split_options(options)


class WaypostPublisher(PublisherUsecase):
    """Publishes what the function that it decorates returns, or what `publish` is given."""

    def __init__(self, config: WaypostPublisherConfig, specification: PublisherSpecification[Any, Any]) -> None:
        super().__init__(config, specification)
        self.config = config

    @property
    def queue(self) -> str:
        """The queue, with the prefixes of its routers."""
        return f"{self._outer_config.prefix}{self.config.queue}"

    async def publish(
        self, message: SendableMessage = None, /, queue: str | None = None, **options: Unpack[PublishKeywords]
    ) -> Published:
        """Publish a message to this publisher's queue, or to another."""
        cmd = self._command([message], queue, options, PublishType.PUBLISH)
        published: Published = await self._basic_publish(cmd, producer=self._producer, _extra_middlewares=())
        return published

    async def request(
        self,
        message: SendableMessage = None,
        /,
        queue: str | None = None,
        *,
        timeout: Duration = REQUEST_SECONDS,
        **options: Any,
    ) -> Any:
        """Publish a message and return the reply to it, a `WaypostMessage`. Raises `WaitTimeout`."""
        cmd = self._command([message], queue, options, PublishType.REQUEST)
        cmd.timeout = timeout
        return await self._basic_request(cmd, producer=self._producer)

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[PublisherMiddleware]) -> None:
        own = WaypostPublishCommand.from_cmd(cmd)
        own.destination = self.queue
        own.options = {**self.config.options, **own.options}
        own.add_headers(self.config.own["headers"] or {}, override=False)
        own.reply_to = own.reply_to or self.config.own["reply_to"]
        await self._basic_publish(own, producer=self._producer, _extra_middlewares=_extra_middlewares)

    @property
    def _producer(self) -> Any:
        return self._outer_config.producer

    def _command(
        self, messages: list[Any], queue: str | None, options: Mapping[str, Any], kind: PublishType
    ) -> WaypostPublishCommand:
        own, rest = split_options(options)
        return WaypostPublishCommand(
            *messages, queue=queue or self.queue, options={**self.config.options, **rest}, _publish_type=kind,
            reply_to=own["reply_to"] or self.config.own["reply_to"],
            correlation_id=own["correlation_id"] or self._outer_config.id_generator(),
            headers={**(self.config.own["headers"] or {}), **(own["headers"] or {})},
        )  # fmt: skip


class ReplyPublisher(FakePublisher):
    """Publishes what a handler returns to the queue that `reply_to` names."""

    def __init__(self, producer: ProducerProto[Any], queue: str) -> None:
        super().__init__(producer=producer)
        self.queue = queue

    def patch_command(self, cmd: PublishCommand) -> WaypostPublishCommand:
        """Return the command that sends the reply."""
        own = WaypostPublishCommand.from_cmd(super().patch_command(cmd))
        own.destination = self.queue
        return own


class ResultProducer:
    """Keeps what a handler returns as the result of its message, for the client that waits in `request`."""

    def __init__(self, producer: WaypostProducer, message: Message[Any], seconds: float) -> None:
        self._producer = producer
        self._message = message
        self._seconds = seconds

    async def publish(self, cmd: WaypostPublishCommand) -> None:
        """Keep the reply: it arrives with the settle, in one step."""
        encoded = await self._producer.encode(cmd.body)
        head = codec.encode_head(
            type_name=encoded.body.type_name, correlation_id=cmd.correlation_id, headers=encoded.headers(cmd.headers)
        )
        self._message.keep_result(codec.make_envelope(self._message.id, encoded.body, head), self._seconds)


def reply_publisher(producer: Any, reply_to: str, message: Any) -> ReplyPublisher | None:
    """Return what sends the reply to a message: to the client that waits for it, or to a queue.

    A message of a queue with `lease=None` has no settle that could keep the reply to a request: then it is None.
    """
    if reply_to.startswith(RESULT_REPLY) and isinstance(message, Message):
        if message.at_most_once:
            return None
        seconds = float(reply_to.removeprefix(RESULT_REPLY))
        return ReplyPublisher(ResultProducer(producer, message, seconds), reply_to)  # type: ignore[arg-type]
    return ReplyPublisher(producer, reply_to)
