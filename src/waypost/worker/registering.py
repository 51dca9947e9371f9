"""Heartbeats: how often a worker tells the store of itself, and what."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from waypost.policy import HEARTBEAT_SECONDS
from waypost.release import VERSION
from waypost.store.port import Heartbeat, ServedQueue
from waypost.store.register import fitting
from waypost.values import Health, WorkerState
from waypost.worker.health import Served

#: A beat may be late by half of its interval before a store that is there is taken for one that is not.
HEARTBEATS_PER_WINDOW = 1.5
INTERVAL_SECONDS_MIN = 0.05
#: So much of why a worker is not well travels with its record.
REASONS_MAX = 3
REASON_CHARACTERS_MAX = 200


def interval(window: float) -> float:
    """The time between two beats: often enough to prove within the health window that the store answers."""
    return max(INTERVAL_SECONDS_MIN, min(HEARTBEAT_SECONDS, window / HEARTBEATS_PER_WINDOW))


def heartbeat_of(
    name: str,
    consumers: Sequence[Served],
    state: WorkerState,
    health: Health,
    *,
    processes: int,
    started_ms: int | None,
) -> Heartbeat:
    """What a worker has to tell of itself now."""
    now = time.monotonic()
    queues = tuple(
        ServedQueue(
            consumer.queue, consumer.handler.concurrency, consumer.in_flight, consumer.handled,
            None if (claim := consumer.liveness.last_claim) is None else max(0, round((now - claim) * 1000)),
        )
        for consumer in consumers
    )  # fmt: skip
    reasons = tuple(reason[:REASON_CHARACTERS_MAX] for reason in health.reasons[:REASONS_MAX])
    host, pid = socket.gethostname(), os.getpid()
    return fitting(Heartbeat(name, host, pid, VERSION, state, health.status, reasons, processes, started_ms, queues))
