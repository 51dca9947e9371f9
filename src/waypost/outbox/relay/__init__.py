"""Relays: a queue sent on to Kafka, RabbitMQ, NATS JetStream, a Valkey or Redis stream, another store, or the lake.

`post.relay("orders", to="kafka://127.0.0.1:9092/orders")` registers one, and a worker runs it. Implement `Target` for
any other system.
"""

from __future__ import annotations

from waypost.outbox.relay.relay import Relay
from waypost.outbox.relay.target import Confirmation, Refused, RelayRecord, Target, Unconfirmed
from waypost.outbox.relay.target_urls import open_target

__all__ = ["Confirmation", "Refused", "Relay", "RelayRecord", "Target", "Unconfirmed", "open_target"]
