"""The figures of a queue and of a worker as the pages need them: times as datetimes, durations in seconds.

What the client returns is converted here, and nowhere else.
"""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec import Struct

from waypost.policy import Policy
from waypost.values import Event, Ledger, RegisteredWorker, Stats
from waypost.web import documents

#: How many last minutes are read of each queue, for rates and for what went wrong lately.
RECENT_MINUTES = 15


class Figures(Struct, frozen=True):
    """The state of a queue."""

    name: str
    at: datetime
    ledger: Ledger
    paused: bool
    oldest_ready: float | None
    next_due: float | None
    next_lease: float | None
    sleepers: int
    journal_last: int
    journal_readers: dict[str, int]
    minutes: list[tuple[datetime, dict[str, int]]]
    damaged: int

    def recent(self, counter: str) -> int:
        """What was counted in the minutes that were read."""
        return sum(counts.get(counter, 0) for _, counts in self.minutes)

    def rate(self, counter: str) -> float:
        """How often per second, over the last one or two minutes."""
        this_minute = self.at.replace(second=0, microsecond=0)
        counted = [counts for at, counts in self.minutes if (this_minute - at).total_seconds() <= 60]
        seconds = 60 + (self.at - this_minute).total_seconds()
        return round(sum(counts.get(counter, 0) for counts in counted) / seconds, 2)


def moment(ms: int) -> datetime:
    """Milliseconds since the epoch as a datetime in UTC."""
    return datetime.fromtimestamp(ms // 1000, UTC).replace(microsecond=ms % 1000 * 1000)


def moment_or_none(ms: int | None) -> datetime | None:
    """The same, of a time that may be missing."""
    return None if ms is None else moment(ms)


def seconds_or_none(ms: int | None) -> float | None:
    """Milliseconds as seconds."""
    return None if ms is None else ms / 1000


def figures_of(stats: Stats) -> Figures:
    """The figures in what the client returns of a queue."""
    return Figures(
        name=stats.queue,
        at=moment(stats.at_ms),
        ledger=stats.ledger,
        paused=stats.paused,
        oldest_ready=seconds_or_none(stats.oldest_ready_ms),
        next_due=seconds_or_none(stats.next_due_ms),
        next_lease=seconds_or_none(stats.next_lease_ms),
        sleepers=stats.sleepers,
        journal_last=stats.journal_last,
        journal_readers=stats.journal_readers,
        minutes=[(moment(minute.at_ms), minute.counts) for minute in stats.minutes],
        damaged=stats.damaged,
    )


def worker_document(worker: RegisteredWorker) -> documents.Worker:
    """A worker as the API shows it."""
    return documents.Worker(
        name=worker.name,
        host=worker.host,
        pid=worker.pid,
        version=worker.version,
        state=worker.state,
        status=worker.status,
        reasons=worker.reasons,
        processes=worker.processes,
        started_at=moment(worker.started_ms),
        seen_at=moment(worker.seen_ms),
        queues=[
            documents.WorkerQueue(
                name=queue.name,
                concurrency=queue.concurrency,
                in_flight=queue.in_flight,
                handled=queue.handled,
                last_claim_at=moment_or_none(queue.last_claim_ms),
            )
            for queue in worker.queues
        ],
    )


def settings_document(policy: Policy) -> documents.Settings:
    """The settings of a queue, by the names and in the units of `configure`."""
    return documents.Settings(
        lease=seconds_or_none(policy.lease_ms),
        max_deliveries=policy.max_deliveries,
        max_pending=policy.max_pending,
        overload=policy.overload,
        max_running=policy.max_running,
        rate=format_rate(policy.rate_count, policy.rate_per_ms),
        journal=policy.journal,
        journal_max=policy.journal_max,
        dead_max=policy.dead_max,
        dead_keep=seconds_or_none(policy.dead_keep_ms),
        completed=policy.completed_max,
    )


def format_rate(count: int | None, per_ms: int | None) -> str | None:
    """A rate as `configure` takes it."""
    if count is None or per_ms is None:
        return None
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if per_ms % size == 0:
            times = per_ms // size
            return f"{count}/{'' if times == 1 else times}{unit}"
    return f"{count}/{per_ms}ms"


class HistoryEvent(Struct, frozen=True):
    """One event of a message's history."""

    at: datetime
    event: str
    due: datetime | None
    cause: str | None
    reason: str | None
    error_type: str | None
    worker: str | None
    token: int | None
    deliveries: int | None


def history_events(events: list[Event]) -> list[HistoryEvent]:
    """The history that the client returns of a message."""
    return [
        HistoryEvent(
            moment(one.at_ms), one.event, moment_or_none(one.due_ms), one.cause, one.reason, one.error_type,
            one.worker, one.token, one.deliveries,
        )
        for one in events
    ]  # fmt: skip
