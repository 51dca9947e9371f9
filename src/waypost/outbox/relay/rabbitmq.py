"""To an exchange of RabbitMQ: a batch is published in order, and the publisher confirms are awaited together.

Messages are persistent and `mandatory`: one that no queue would get is returned by the server, and becomes a dead
letter here rather than vanishing there. Before that it is retried for a minute, since a queue whose node is away looks
the same. At least once: RabbitMQ does not know what it has already; `message_id` is the id.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from waypost.errors import MissingExtra
from waypost.message import error_text, error_type
from waypost.outbox.relay.target import Confirmation, Refused, RelayRecord, Unconfirmed, host_and_port

CONNECT_SECONDS = 10.0
#: A server that has not confirmed by then is asked again on a new connection.
CONFIRM_SECONDS = 30.0
#: A message that is returned is retried so often, which takes a minute: the node of its queue may be away.
UNROUTABLE_RETRIES = 6
#: Names and most properties are "short strings" in AMQP.
SHORT_BYTES_MAX = 255


class RabbitTarget:
    """An exchange; the empty name is the default one, whose routing keys are names of queues."""

    def __init__(
        self,
        url: str,
        *,
        exchange: str = "",
        routing_key: str = "",
        unroutable_retries: int = UNROUTABLE_RETRIES,
    ) -> None:
        try:
            import aio_pika  # noqa: F401
        except ImportError:
            raise MissingExtra(
                'a relay to RabbitMQ needs its driver, which is not installed: pip install "waypost[relay-rabbitmq]"'
            ) from None
        place = f"exchange {exchange}" if exchange else f"queue {routing_key}"
        self.description = f"{place} at {host_and_port(url, 5672)}"
        self._url = url
        self._exchange_name = exchange
        self._routing_key = routing_key
        self._unroutable_retries = unroutable_retries
        self._connection: Any = None
        self._exchange: Any = None
        #: Something failed that a channel, or its connection, does not survive.
        self._broken = False

    async def open(self) -> None:
        """Connect. An exchange that does not exist is an error: it is the business of whoever reads from it."""
        from aio_pika import Connection
        from aio_pika.connection import make_url

        self._broken = False
        # Not a robust connection: the relay opens a new one, and knows what it has to send again.
        self._connection = Connection(make_url(self._url))
        await self._connection.connect(timeout=CONNECT_SECONDS)
        channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
        if self._exchange_name:
            self._exchange = await channel.get_exchange(self._exchange_name, ensure=True)
        else:
            self._exchange = channel.default_exchange

    async def send(self, records: Sequence[RelayRecord]) -> list[Confirmation]:
        """Publish a batch and wait for the confirms."""
        if self._connection is None:
            await self.open()
        # Tasks begin in the order they are made, and the driver's own lock is fair: so the order on the wire is ours.
        confirmations = await asyncio.gather(*(self._publish(record) for record in records))
        if self._broken:
            await self.close()
        return confirmations

    async def _publish(self, record: RelayRecord) -> Confirmation:
        from aio_pika.exceptions import DeliveryError, PublishError

        routing_key = self._routing_key if record.key is None else record.key
        try:
            message = message_of(record)
            if len(routing_key.encode()) > SHORT_BYTES_MAX:
                raise ValueError(f"a routing key has at most {SHORT_BYTES_MAX} bytes")
        except ValueError as invalid:
            return Refused("rejected", error_text(invalid))
        try:
            await self._exchange.publish(message, routing_key, mandatory=True, timeout=CONFIRM_SECONDS)
        except PublishError:
            where = self._exchange_name or "the default exchange"
            error = f"no queue is bound to {where} for the routing key {routing_key!r}"
            return Refused("unroutable", error, self._unroutable_retries)
        except DeliveryError:
            return Unconfirmed("the server refused it for now: a queue is full, or could not store it")
        except Exception as failure:
            self._broken = True
            return Unconfirmed(f"{error_type(failure)}: {error_text(failure)}")
        return None

    async def close(self) -> None:
        """End the connection."""
        connection, self._connection, self._exchange = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(connection.close(), CONNECT_SECONDS)


def message_of(record: RelayRecord) -> Any:
    """The message as AMQP carries it; `ValueError` if it cannot."""
    from aio_pika import DeliveryMode, Message

    for name in record.headers:
        if len(name.encode()) > SHORT_BYTES_MAX:
            raise ValueError(f"AMQP carries header names of up to {SHORT_BYTES_MAX} bytes, and one is longer")
    return Message(
        record.body,
        headers=dict(record.headers),
        content_type=record.content_type,
        delivery_mode=DeliveryMode.PERSISTENT,
        priority=record.priority,
        correlation_id=_short(record.correlation_id),
        reply_to=_short(record.reply_to),
        message_id=record.id,
        timestamp=datetime.fromtimestamp(record.published_ms / 1000, UTC),
        type=_short(record.type_name),
    )


def _short(text: str | None) -> str | None:
    """A property, if it fits; in any case the same stands in the headers."""
    return text if text is not None and len(text.encode()) <= SHORT_BYTES_MAX else None
