"""A Kafka topic as a target, with an idempotent producer: acks from all in-sync replicas, in order within a partition.

The producer itself repeats lost requests without duplicates. Only after it has given up on a message, or when a worker
died before its settle, a message that is there may be sent again: at least once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from waypost.errors import ConfigurationError, MissingExtra
from waypost.message import error_text
from waypost.outbox.relay.target import Confirmation, Refused, RelayRecord, Unconfirmed
from waypost.urls import SECRET_NAME, redact_text

log = logging.getLogger("waypost")

#: How long the producer itself tries: longer than the election of a new broker takes.
DELIVERY_SECONDS = 60.0
#: The longest poll for confirmations, and so the delay of a stop.
POLL_SECONDS = 0.05
CLOSE_SECONDS = 5.0

#: Settings that the guarantees of the relay need.
FIXED = {"enable.idempotence": True, "acks": "all"}


class KafkaTarget:
    """A topic. `config` has settings of librdkafka, such as TLS, SASL and compression."""

    def __init__(self, servers: str, topic: str, *, config: Mapping[str, Any] | None = None) -> None:
        try:
            import confluent_kafka
        except ImportError:
            raise MissingExtra(
                'a relay to Kafka needs its driver, which is not installed: pip install "waypost[relay-kafka]"'
            ) from None
        if not topic or not servers:
            raise ConfigurationError("name the servers and the topic, as in kafka://127.0.0.1:9092/orders")
        for name, value in FIXED.items():
            if name in (config or {}) and str((config or {})[name]).lower() not in (str(value).lower(), "-1"):
                raise ConfigurationError(
                    f"a relay to Kafka needs {name}={value}, so that confirmed messages are not lost"
                )
        self.topic = topic
        self.description = f"topic {topic} at {servers}"
        self._settings: dict[str, Any] = {
            "message.timeout.ms": int(DELIVERY_SECONDS * 1000),
            "linger.ms": 5,
            "partitioner": "murmur2_random",  # the partition that Java clients choose for a key
            **(config or {}),
            "bootstrap.servers": servers,
            **FIXED,
        }
        self._producer: Any = None
        # Make a producer now, so that an unknown setting is an error here and not in the first batch.
        try:
            confluent_kafka.Producer(self._settings, logger=log)
        except (confluent_kafka.KafkaException, TypeError, ValueError) as error:
            secrets = [str(value) for name, value in (config or {}).items() if SECRET_NAME.search(name)]
            text = redact_text(_error_message(error), values=secrets)
            raise ConfigurationError(f"this Kafka producer cannot be made: {text}") from None

    async def open(self) -> None:
        """Make the producer; it connects by itself."""
        from confluent_kafka import Producer

        self._producer = Producer(self._settings, logger=log)

    async def send(self, records: Sequence[RelayRecord]) -> list[Confirmation]:
        """Give a batch to the producer and wait for the confirmation of each message."""
        if self._producer is None:
            await self.open()
        batch = _Batch(len(records))
        try:
            for index, record in enumerate(records):
                await self._produce(batch, index, record)
            while batch.waiting:
                await asyncio.to_thread(self._producer.poll, POLL_SECONDS)
        except BaseException:
            # Also at a stop: purge what is not sent yet, so that it is not sent after its message was released.
            self._producer.purge()
            self._producer.poll(0)
            raise
        if batch.fatal:
            await self.close()
        return batch.confirmations

    async def _produce(self, batch: _Batch, index: int, record: RelayRecord) -> None:
        from confluent_kafka import KafkaException

        key = next((one for one in (record.key, record.own_key, record.group) if one is not None), None)
        while True:
            try:
                self._producer.produce(
                    self.topic,
                    record.body,
                    key=None if key is None else key.encode(),
                    headers=[(name, value.encode()) for name, value in record.headers.items()],
                    timestamp=record._published_ms,
                    on_delivery=lambda error, _: batch.record_delivery(index, error),
                )
                return
            except BufferError:
                # The queue of the producer is full: let it send.
                await asyncio.to_thread(self._producer.poll, POLL_SECONDS)
            except KafkaException as error:
                batch.record_delivery(index, error.args[0])
                return

    async def close(self) -> None:
        """Close the producer; nothing waits in it any more."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            await asyncio.to_thread(producer.flush, CLOSE_SECONDS)


class _Batch:
    """The confirmations of one call of `send`."""

    def __init__(self, size: int) -> None:
        self.waiting = size
        self.fatal = False
        self.confirmations: list[Confirmation] = [Unconfirmed("no confirmation came")] * size

    def record_delivery(self, index: int, error: Any) -> None:
        """Record the producer's result for one message."""
        self.waiting -= 1
        if error is None:
            self.confirmations[index] = None
            return
        self.fatal = self.fatal or error.fatal()
        reason = refusals().get(error.code())
        text = str(error.str())
        self.confirmations[index] = Unconfirmed(text) if reason is None else Refused(reason, text)


def refusals() -> dict[int, str]:
    """Return the error codes with which Kafka refuses a message permanently, and our reasons."""
    from confluent_kafka import KafkaError

    return {
        KafkaError.MSG_SIZE_TOO_LARGE: "too_large",
        KafkaError.INVALID_MSG: "rejected",
        KafkaError.INVALID_RECORD: "rejected",
        # Published too long ago for the topic. The driver has this code for one such message of a batch, for several it
        # has the one before; the others of the batch have a code that only means to send them again.
        KafkaError.INVALID_TIMESTAMP: "rejected",
    }


def _error_message(error: Exception) -> str:
    reason = error.args[0] if error.args else error
    return str(reason.str()) if hasattr(reason, "str") else error_text(error)
