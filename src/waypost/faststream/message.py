"""A message as FastStream's handlers, filters and middlewares see it, and how it is made of ours."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from faststream.message import StreamMessage

from waypost.codec import Envelope
from waypost.faststream.internals import decode_message
from waypost.faststream.outcomes import make_dead, make_retry
from waypost.message import Message, Outcome
from waypost.times import Duration

#: A content type that an envelope does not have a code for travels in this header.
CONTENT_TYPE = "content-type"


class WaypostMessage(StreamMessage[Any]):
    """What `message: WaypostMessage` in a handler is given. `raw_message` is the `waypost.Message`, or their list.

    `ack`, `nack` and `reject` decide how it ends, once; the worker settles it when the handler has ended.
    """

    raw_message: Any

    @property
    def messages(self) -> Sequence[Message[Any]]:
        """The messages of waypost in it: one, or those of a batch."""
        return self.raw_message if isinstance(self.raw_message, list) else (self.raw_message,)

    @property
    def queue(self) -> str:
        """The queue that it came from."""
        return self.messages[0].queue

    async def ack(self) -> None:
        """It is done."""
        self._decide("done")
        await super().ack()

    async def nack(self, delay: Duration | None = None, reason: str | None = None) -> None:
        """It failed: try again after `delay`, or when the retry policy decides."""
        self._decide(make_retry(delay, reason))
        await super().nack()

    async def reject(self, reason: str = "rejected", error: str | None = None) -> None:
        """Hopeless: to the dead letters."""
        self._decide(make_dead(reason, error))
        await super().reject()

    async def reschedule(self, delay: Duration, *, expires: Duration | datetime | None = None) -> None:
        """It is done, and is published again after `delay` under the same key, both in one step.

        The new message has no expiry unless `expires` gives it one.
        """
        if self.committed is None:
            for message in self.messages:
                if message.outcome == "done" and not any(one.again for one in message._then):
                    message.outcome = None  # `ACK_FIRST` decided so before the handler began
                message.reschedule(delay, expires=expires)
        await super().ack()

    def _decide(self, outcome: Outcome | Any) -> None:
        if self.committed is not None:
            return
        for message in self.messages:
            if message.outcome is None and message.settled is None:
                message._decide(outcome)


async def parse_message(message: Message[Any]) -> WaypostMessage:
    """Return a message of waypost as FastStream's."""
    envelope = message.open()
    content_type, headers = _content_of(envelope)
    return WaypostMessage(
        message,
        envelope.data,
        headers=headers,
        reply_to=envelope.reply_to or "",
        content_type=content_type,
        correlation_id=envelope.correlation_id or message.id,
        message_id=message.id,
    )


async def parse_batch(messages: list[Message[Any]]) -> WaypostMessage:
    """Return a batch of messages as one of FastStream's: its body is the list of theirs, without a reply."""
    envelopes = [message.open() for message in messages]
    contents = [_content_of(envelope) for envelope in envelopes]
    return WaypostMessage(
        messages,
        [envelope.data for envelope in envelopes],
        headers=contents[0][1],
        batch_headers=[headers for _, headers in contents],
        correlation_id=envelopes[0].correlation_id or messages[0].id,
        message_id=messages[0].id,
    )


async def decode_one(message: StreamMessage[Any]) -> Any:
    """Return the body of a message."""
    return decode_message(message)


async def decode_batch(message: StreamMessage[Any]) -> list[Any]:
    """Return the bodies of a batch. FastStream knows a batch subscriber by the name of this function."""
    return [decode_message(await parse_message(one)) for one in message.raw_message]


def _content_of(envelope: Envelope) -> tuple[str | None, dict[str, Any]]:
    """Return the content type and the headers, without the one that carries it."""
    headers: dict[str, Any] = dict(envelope.headers)  # parsers and middlewares may change them
    if CONTENT_TYPE in headers:
        return headers.pop(CONTENT_TYPE), headers
    # Without a content type FastStream reads bytes as JSON if they are JSON, as with its other brokers.
    return None if envelope.content_type == "application/octet-stream" else envelope.content_type, headers
