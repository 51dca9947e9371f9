"""A RabbitMQ exchange as a target: a batch is published in order, and the publisher confirms are awaited together.

Messages are persistent and `mandatory`: the server returns one that it routes to no queue, and it becomes a dead letter
here. Before that it is retried for a minute, because a queue whose node is down looks the same. At least once: RabbitMQ
does not detect duplicates; `message_id` is the id.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from waypost.errors import MissingExtra
from waypost.message import error_text, error_type
from waypost.outbox.relay.target import Confirmation, Refused, RelayRecord, Unconfirmed, host_and_port

CONNECT_SECONDS = 10.0
#: The longest wait for a confirm before the batch is sent again on a new connection.
CONFIRM_SECONDS = 30.0
#: Retries of a returned message, which take a minute: the node of its queue may be down.
UNROUTABLE_RETRIES = 6
#: Names and most properties are "short strings" in AMQP.
SHORT_BYTES_MAX = 255
#: RabbitMQ reads lists of routing keys in these headers. It closes the channel for a text, and so for the whole batch.
ROUTING_HEADERS = frozenset(("CC", "BCC"))
#: The queue for replies of RabbitMQ's own clients. As a property of other messages it closes the channel too.
DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"


class RabbitTarget:
    """An exchange; the empty name is the default exchange, whose routing keys are queue names."""

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
        #: Whether an error broke the channel or its connection.
        self._broken = False

    async def open(self) -> None:
        """Connect. A missing exchange is an error: its consumers declare it."""
        from aio_pika import Connection
        from aio_pika.connection import make_url

        self._broken = False
        # Not a robust connection: the relay opens a new one and sends the unconfirmed messages again.
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
        # Tasks start in the order they are made, and the driver's lock is fair, so messages are sent in order.
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
            return Unconfirmed("the server rejected it for now: a queue is full, or could not store it")
        except Exception as failure:
            self._broken = True
            return Unconfirmed(f"{error_type(failure)}: {error_text(failure)}")
        return None

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection, self._exchange = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(connection.close(), CONNECT_SECONDS)


def message_of(record: RelayRecord) -> Any:
    """Return the AMQP message, or raise `ValueError` if AMQP cannot transport it."""
    from aio_pika import DeliveryMode, Message

    for name in record.headers:
        if len(name.encode()) > SHORT_BYTES_MAX:
            raise ValueError(f"a header name in AMQP has at most {SHORT_BYTES_MAX} bytes, and one is longer")
        if name in ROUTING_HEADERS:
            raise ValueError(f"RabbitMQ takes no text in the header {name}, which has routing keys")
    return Message(
        record.body,
        headers=dict(record.headers),
        content_type=record.content_type,
        delivery_mode=DeliveryMode.PERSISTENT,
        priority=record.priority,
        correlation_id=_short(record.correlation_id),
        reply_to=None if record.reply_to == DIRECT_REPLY_TO else _short(record.reply_to),
        message_id=record.id,
        timestamp=record.published_at,
        type=_short(record.type_name),
    )


def _short(text: str | None) -> str | None:
    """Return a property if it fits, else None; the headers have it in any case."""
    return text if text is not None and len(text.encode()) <= SHORT_BYTES_MAX else None
