"""Relays: a queue sent on to Kafka, RabbitMQ, NATS JetStream, a stream of Valkey or Redis, another store, or the lake.

`post.relay("orders", to="kafka://127.0.0.1:9092/orders")` is the whole of it; a worker does the rest. `Target` is what
to write for a system that is not here.
"""

from __future__ import annotations

from waypost.outbox.relay.relay import Relay
from waypost.outbox.relay.target import Confirmation, Refused, RelayRecord, Target, Unconfirmed
from waypost.outbox.relay.target_urls import open_target

__all__ = ["Confirmation", "Refused", "Relay", "RelayRecord", "Target", "Unconfirmed", "open_target"]
