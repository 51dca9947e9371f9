"""Publish middleware for messages that are not sent by a call of `publish`: those of `message.then` and of schedules.

These messages are part of another step, the settle or the fire. So the middleware is called before that step: its
changes are published, a message that it does not pass on is not published, and its exception is a failure of the
handler or of the fire. The innermost call returns the id that the message will have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Literal

from msgspec import structs

from waypost import codec
from waypost.message import Message
from waypost.middleware import Middleware, Outgoing, overrides, published_through
from waypost.operations import receive
from waypost.operations.flow import ClientContext, Flow, UserCall
from waypost.operations.publish import PublishOptions, validate_options
from waypost.policy import RetryPolicy, check_priority
from waypost.times import to_datetime
from waypost.values import Continuation, Published

Via = Literal["then", "schedule"]


class PublishMiddleware:
    """The publish middleware of a client, for messages of its settles and schedules."""

    def __init__(self, middleware: Callable[[], Sequence[Middleware]], *, awaited: bool) -> None:
        self._middleware = middleware
        self.awaited = awaited

    @property
    def is_empty(self) -> bool:
        """Whether no middleware overrides a publish method."""
        method = "publish_async" if self.awaited else "publish"
        return not any(overrides(one, method) for one in self._middleware())

    def call(self, outgoing: Outgoing, send: Callable[[Outgoing], list[Published]]) -> Any:
        """Pass a message through the middleware; the result must be awaited if `awaited` is set."""
        if not self.awaited:
            return published_through(self._middleware(), send, awaited=False)(outgoing)

        async def sent(last: Outgoing) -> list[Published]:
            return send(last)

        return published_through(self._middleware(), sent, awaited=True)(outgoing)


class _Passed:
    """One message in the middleware, and its result."""

    def __init__(self, context: ClientContext, message_id: str, outgoing: Outgoing, encoded: codec.Encoded) -> None:
        self._context = context
        self._id = message_id
        self.outgoing = outgoing
        (self._body,) = outgoing.bodies
        self._encoded = encoded
        self.body = self._body
        #: The message to publish, if every middleware passed it on.
        self.is_passed_on = False
        self.queue = outgoing.queue
        self.envelope = b""
        self.options = validate_options({})

    def send(self, last: Outgoing) -> list[Published]:
        """Return the result, as the innermost call."""
        (body,) = last.bodies
        self.options = validate_options({name: value for name, value in last.options.items() if value is not None})
        self.queue = self._context.name_of(last.queue)
        encoded = self._encoded if body is self._body else codec.encode_body(body, last.type)
        self.envelope = codec.make_envelope(self._id, encoded, self.options.heads.of(encoded.type_name))
        self.body = body
        self.is_passed_on = True
        return [Published(self._id, "queued", self.queue)]

    def pass_through(self) -> Flow[None]:
        """Call the middleware."""
        middleware = self._context.publish_middleware
        assert middleware is not None
        yield UserCall(partial(middleware.call, self.outgoing, self.send), awaited=middleware.awaited)


def outgoing_of(queue: str, envelope: codec.Envelope, via: Via, options: Mapping[str, Any]) -> Outgoing:
    """Return an encoded message as an `Outgoing`, with its body decoded without a type."""
    known: dict[str, Any] = {
        "headers": envelope.headers, "trace": envelope.trace, "correlation_id": envelope.correlation_id,
        "reply_to": envelope.reply_to, "retry": envelope.retry, "timeout": envelope.timeout, **options,
    }  # fmt: skip
    body = codec.decode_body(envelope.content_type, envelope.data)
    return Outgoing(queue, [body], {name: value for name, value in known.items() if value}, via=via)


def encoded_of(envelope: codec.Envelope) -> codec.Encoded:
    """Return the encoded body of an envelope."""
    return codec.Encoded(codec.CONTENT_TYPES.index(envelope.content_type), envelope.data, envelope.type_name)


def given_expiry(expires_ms: int) -> float | datetime | None:
    """Return the expiry of a draft in the form of a keyword of `publish`: seconds, a moment, or None."""
    if not expires_ms:
        return None
    return -expires_ms / 1000 if expires_ms < 0 else to_datetime(expires_ms)


def pass_draft(
    context: ClientContext, queue: str, message_id: str, envelope: bytes, options: Mapping[str, Any]
) -> Flow[tuple[bytes, PublishOptions] | None]:
    """Return the envelope and options of a schedule's message after the middleware; None if it was not passed on."""
    opened = codec.open_envelope(envelope)
    passed = _Passed(context, message_id, outgoing_of(queue, opened, "schedule", options), encoded_of(opened))
    yield from passed.pass_through()
    return (passed.envelope, passed.options) if passed.is_passed_on else None


def finish(
    context: ClientContext,
    message: Message[Any],
    error: BaseException | None,
    retry: RetryPolicy,
    *,
    stopped: bool = False,
    lines: receive.SettleLines | None = None,
) -> Flow[bool]:
    """Settle a message at the end of its block, after its continuations have passed the middleware."""
    if error is None and message.settled is None:
        try:
            yield from pass_sent_on(context, message)
        except Exception as failure:
            yield from receive.finish(context, message, failure, retry)
            raise
    return (yield from receive.finish(context, message, error, retry, stopped=stopped, lines=lines))


def pass_sent_on(context: ClientContext, message: Message[Any]) -> Flow[None]:
    """Pass the continuations of a handler through the middleware, once."""
    if context.publish_middleware is None or not message._then:
        return
    kept: list[Continuation] = []
    for next_one in message._then:
        if next_one.again:
            kept.append(next_one)
            continue
        opened = codec.open_envelope(next_one.envelope)
        outgoing = outgoing_of(next_one.queue, opened, "then", {
            "key": next_one.key, "delay": next_one.delay_ms / 1000, "priority": next_one.priority,
            "group": next_one.group, "expires": given_expiry(next_one.expires_ms),
        })  # fmt: skip
        passed = _Passed(context, next_one.id, outgoing, encoded_of(opened))
        yield from passed.pass_through()
        if passed.is_passed_on:
            options = passed.options
            kept.append(structs.replace(
                next_one, queue=passed.queue, envelope=passed.envelope, key=options.key_of(passed.body),
                delay_ms=options.delay_ms, priority=check_priority(options.priority),
                group=options.group_of(passed.body), expires_ms=options.expires_ms,
            ))  # fmt: skip
    message._then = tuple(kept)
