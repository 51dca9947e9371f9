"""The figures of a queue and of a worker as the pages need them: durations in seconds.

What the client returns is converted here, and nowhere else.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from msgspec import Struct

from waypost.formatting import format_age
from waypost.policy import format_rate
from waypost.values import Ledger
from waypost.views import Change, Event, Minute, Policy, RegisteredWorker, Stats
from waypost.web import documents

#: How many last minutes are read of each queue, for rates and for what went wrong lately.
RECENT_MINUTES = 15


#: Settings whose value is a time in milliseconds, by their names in the journal.
TIMES = {"lease_ms": "lease", "dead_keep_ms": "dead_keep"}
NAMES = {"completed_max": "completed"}


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


def seconds_or_none(duration: timedelta | None) -> float | None:
    """A duration in seconds, None if it is missing."""
    return None if duration is None else duration.total_seconds()


def figures_of(stats: Stats) -> Figures:
    """The figures in what the client returns of a queue."""
    return Figures(
        name=stats.queue,
        at=stats.at,
        ledger=stats.ledger,
        paused=stats.paused,
        oldest_ready=seconds_or_none(stats.oldest_ready_age),
        next_due=seconds_or_none(stats.next_due_in),
        next_lease=seconds_or_none(stats.next_lease_end_in),
        sleepers=stats.sleepers,
        journal_last=stats.journal_last,
        journal_readers=stats.journal_readers,
        minutes=[(minute.at, minute.counts) for minute in stats.minutes],
        damaged=stats.damaged,
    )


def minute_document(minute: Minute) -> documents.Minute:
    """The counters of a minute."""
    return documents.Minute(
        at=minute.at,
        counts=minute.counts,
        wait_mean_seconds=seconds_or_none(minute.wait_mean),
        wait_max_seconds=seconds_or_none(minute.wait_max),
        run_mean_seconds=seconds_or_none(minute.run_mean),
        run_max_seconds=seconds_or_none(minute.run_max),
    )


def describe_change(change: Change) -> str:
    """A change of settings in words: "lease 30 s, rate 100/m"."""
    if change.event != "configured":
        return change.event
    given = dict(re.findall(r"(\w+)=(\S+)", change.text))
    found = []
    if "rate_count" in given:
        count, per_ms = given.pop("rate_count"), given.pop("rate_per_ms", "None")
        found.append(f"rate {format_rate(int(count), int(per_ms)) if count.isdecimal() else 'none'}")
    for name, value in given.items():
        if value == "None":
            text = "none"
        elif name in TIMES and value.isdecimal():
            text = format_age(timedelta(milliseconds=int(value)))
        else:
            text = f"{int(value):,}" if value.isdecimal() else value
        found.append(f"{TIMES.get(name) or NAMES.get(name, name)} {text}")
    return ", ".join(found) or "configured"


def history_document(stats: Stats) -> documents.QueueHistory:
    """The counters, the backlog and the changes of a queue."""
    known = next((minute for minute in reversed(stats.minutes) if minute.change is None), None)
    return documents.QueueHistory(
        queue=stats.queue,
        at=stats.at,
        minutes=[minute_document(minute) for minute in stats.minutes],
        backlog=[documents.BacklogPoint(at=one.at, messages=one.messages) for one in stats.backlog],
        backlog_known_from=None if known is None else known.at + timedelta(minutes=1),
        changes=[
            documents.SettingsEvent(at=one.at, event=one.event, text=describe_change(one)) for one in stats.changes
        ],
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
        started_at=worker.started_at,
        seen_at=worker.seen_at,
        queues=[
            documents.WorkerQueue(
                name=queue.name,
                concurrency=queue.concurrency,
                in_flight=queue.in_flight,
                handled=queue.handled,
                last_claim_at=queue.last_claim_at,
            )
            for queue in worker.queues
        ],
        requested=worker.requested,
    )


def settings_document(policy: Policy) -> documents.Settings:
    """The settings of a queue, by the names and in the units of `configure`."""
    return documents.Settings(
        lease=seconds_or_none(policy.lease),
        max_deliveries=policy.max_deliveries,
        max_pending=policy.max_pending,
        overload=policy.overload,
        max_running=policy.max_running,
        rate=policy.rate,
        journal=policy.journal,
        journal_max=policy.journal_max,
        dead_max=policy.dead_max,
        dead_keep=seconds_or_none(policy.dead_keep),
        completed=policy.completed,
        hide_bodies=policy.hide_bodies,
        tracebacks=policy.tracebacks,
        fair=policy.fair,
        order=policy.order,
        on_failure=policy.on_failure,
        group_max_running=policy.group_max_running,
        group_rate=policy.group_rate,
        group_max_pending=policy.group_max_pending,
    )


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
    error: str | None = None
    chain: str | None = None


def history_events(events: list[Event]) -> list[HistoryEvent]:
    """The history that the client returns of a message."""
    return [
        HistoryEvent(
            one.at, one.event, one.due_at, one.cause, one.reason, one.error_type,
            one.worker, one.token, one.deliveries, one.error, one.chain_id,
        )
        for one in events
    ]  # fmt: skip
