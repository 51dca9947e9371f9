"""Health and heartbeats: whether a worker consumes, judged by its claim loops, not by its process.

A claim loop owes a claim whenever it has free capacity. It owes none without free capacity, and none while it sleeps
after a claim or poll with a reply. A worker is red if its loop has owed a claim for longer than the window, or if its
store has not replied for that long; the next reply makes it green. All values here are read without a lock by threads
other than the one that writes them: single numbers that are replaced as a whole.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol

from waypost.checks import check_seconds
from waypost.errors import ConfigurationError
from waypost.release import VERSION
from waypost.store.port import Heartbeat, ServedQueue
from waypost.store.register import fitting
from waypost.values import Health, HealthStatus, QueueHealth, WorkerState
from waypost.worker.poller import Liveness


class Served(Protocol):
    """The values of a consumer, or of all consumers of a queue, that the health check needs."""

    queue: str
    liveness: Liveness

    @property
    def handled(self) -> int: ...
    @property
    def concurrency(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def in_flight(self) -> int: ...


def check_window(seconds: float) -> float:
    """Return a health window unchanged, or raise `ConfigurationError`."""
    return check_seconds("health_window", seconds, least=0.001, error=ConfigurationError)


def judge(
    consumers: Sequence[Served], state: WorkerState, *, window: float, answered: float, notes: Iterable[str] = ()
) -> Health:
    """Return the health of a running worker. `answered` is the time of the store's last reply to anything but a claim.

    `notes` are problems that do not prevent it from consuming.
    """
    now = time.monotonic()
    claims = [consumer.liveness.last_claim for consumer in consumers]
    silent = now - max([answered, *(claim for claim in claims if claim is not None)])
    reasons: list[str] = []
    if silent > window:
        reasons.append(f"the store has not answered for {silent:.0f} s")
    elif state == "running":
        for consumer in consumers:
            late = consumer.liveness.late_seconds(now)
            if late > window:
                reasons.append(
                    f"queue {consumer.queue}: there was free capacity, but no claim succeeded for {late:.0f} s"
                )
    status: HealthStatus = "red" if reasons else "green"
    noted = list(notes)
    if noted and not reasons:
        status = "degraded"
    queues = [
        QueueHealth(
            consumer.queue, consumer.concurrency, consumer.running, consumer.in_flight, consumer.handled,
            None if claim is None else timedelta(seconds=max(0.0, now - claim)),
        )
        for consumer, claim in zip(consumers, claims, strict=True)
    ]  # fmt: skip
    return Health(status, reasons + noted, queues)


#: The health of a worker that has not connected yet, or has ended.
NOT_RUNNING = Health("red", ["the worker is not running"], [])


#: The maximum length of the reasons in a worker's report.
REASONS_MAX = 3
REASON_CHARACTERS_MAX = 200


def make_heartbeat(
    name: str,
    consumers: Sequence[Served],
    state: WorkerState,
    health: Health,
    *,
    processes: int,
    started_ms: int | None,
) -> Heartbeat:
    """Return the heartbeat of a worker."""
    now = time.monotonic()
    queues = tuple(
        ServedQueue(
            consumer.queue, consumer.concurrency, consumer.in_flight, consumer.handled,
            None if (claim := consumer.liveness.last_claim) is None else max(0, round((now - claim) * 1000)),
        )
        for consumer in consumers
    )  # fmt: skip
    reasons = tuple(reason[:REASON_CHARACTERS_MAX] for reason in health.reasons[:REASONS_MAX])
    host, pid = socket.gethostname(), os.getpid()
    return fitting(Heartbeat(name, host, pid, VERSION, state, health.status, reasons, processes, started_ms, queues))
