"""The events of redis-message-queue, by their names there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from waypost.message import Message
from waypost.views import Observed


class EventOperation(StrEnum):
    """What happened. Those that a waypost store has no step for are not sent: trims, and stops of a heartbeat."""

    PUBLISH = "publish"
    PUBLISH_DEDUP_HIT = "publish_dedup_hit"
    CLAIM = "claim"
    CLAIM_EMPTY = "claim_empty"
    CLAIM_RECLAIM = "claim_reclaim"
    ACK = "ack"
    NACK = "nack"
    DLQ = "dlq"
    COMPLETED = "completed"
    FAILED = "failed"
    LEASE_RENEW = "lease_renew"
    LEASE_RENEW_FAILED = "lease_renew_failed"
    HEARTBEAT_STOP_TIMEOUT = "heartbeat_stop_timeout"
    STALE_LEASE_ACK = "stale_lease_ack"
    STALE_LEASE_NACK = "stale_lease_nack"
    CLEANUP_FAILED = "cleanup_failed"
    TRIM_FAILED = "trim_failed"
    RETRY_ATTEMPT = "retry_attempt"
    RETRY_EXHAUSTED = "retry_exhausted"


class EventOutcome(StrEnum):
    """How it went."""

    SUCCESS = "success"
    FAILURE = "failure"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class QueueEvent:
    """One event for `on_event`. `message_id` is the id in the store, `lease_token_hash` stands for the lease."""

    queue: str
    operation: EventOperation
    outcome: EventOutcome
    message_id: str | None = None
    claim_id: str | None = None
    lease_token_hash: str | None = None
    destination_queue: str | None = None
    delivery_count: int | None = None
    max_delivery_count: int | None = None
    exception_type: str | None = None
    duration_ms: float | None = None
    error: BaseException | None = None


def message_fields(message: Message[Any]) -> dict[str, Any]:
    """Return the fields of an event about a message."""
    token = None if message.at_most_once else hashlib.sha256(str(message.token).encode()).hexdigest()[:16]
    return {"message_id": message.id, "lease_token_hash": token, "delivery_count": message.deliveries}


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return the fields of an event about an error."""
    return {"exception_type": type(error).__name__, "error": error}


def translate(event: Observed, dead_letter_queue: str) -> tuple[EventOperation, EventOutcome, dict[str, Any]] | None:
    """Return what an event of the client is here; None for those that the queue sends itself, or has no name for."""
    fields: dict[str, Any] = {"message_id": event.message_id, "delivery_count": event.deliveries}
    match event.event:
        case "expired":
            return EventOperation.CLAIM_RECLAIM, EventOutcome.SUCCESS, fields
        case "dead" if event.reason == "max_deliveries":
            return EventOperation.DLQ, EventOutcome.SUCCESS, {**fields, "destination_queue": dead_letter_queue}
        case "renewed" if event.outcome == "success":
            return EventOperation.LEASE_RENEW, EventOutcome.SUCCESS, fields
        case "renewed" | "lease_lost":
            return EventOperation.LEASE_RENEW_FAILED, EventOutcome.FAILURE, {
                **fields, "exception_type": event.error_type,
            }  # fmt: skip
    return None
