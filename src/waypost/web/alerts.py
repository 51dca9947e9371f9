"""What is wrong with a store, in words, with the next step. Pure: figures in, sentences out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from waypost.formatting import format_age, format_count
from waypost.schedule.schedule import Schedule
from waypost.views import RegisteredWorker
from waypost.web.documents import Alert, Level
from waypost.web.figures import RECENT_MINUTES, Figures

LEVELS: tuple[Level, ...] = ("calm", "note", "warning", "alarm")
#: A message that has been ready for so long is worth a warning, and an alarm.
OLD_SECONDS, VERY_OLD_SECONDS = 60.0, 600.0
#: The same in a queue without a worker: one may be about to start, or come now and then.
UNSERVED_SECONDS = (10.0, 30.0)
#: So many new dead letters in the last minutes are an alarm.
DEAD_ALARM = 10
#: A schedule that is so late was not fired by any scheduler.
LATE_SECONDS = 60.0
#: The most schedules or workers that are named one by one.
NAMED_MAX = 5


def age(seconds: float) -> str:
    """A duration in a few characters."""
    return format_age(timedelta(seconds=seconds))


def queue_alerts(figures: Figures, workers: Sequence[RegisteredWorker], *, is_unserved: bool) -> list[Alert]:
    """What is wrong with one queue, the worst first."""
    ledger, found = figures.ledger, list[Alert]()

    def add(level: Level, kind: str, text: str, next_step: str) -> None:
        found.append(Alert(level=level, kind=kind, text=text, next_step=next_step))

    if ledger.balance or ledger.unexplained:
        add("alarm", "unbalanced", "its ledger does not balance: a message is not accounted for",
            "run `waypost doctor`; if no record is damaged, report it as a defect")  # fmt: skip
    if figures.damaged:
        add("alarm", "damaged", f"{format_count(figures.damaged, 'damaged record')} set aside",
            "run `waypost doctor --mend`")  # fmt: skip
    oldest = figures.oldest_ready
    unattended = is_unserved and not figures.sleepers and not ledger.leased
    if figures.paused:
        waiting = f", {format_count(ledger.ready, 'message')} ready" if ledger.ready else ""
        add("warning" if ledger.ready else "note", "paused", f"paused{waiting}", "resume it when it may go on")
    elif unattended and (ledger.ready or figures.next_due == 0):
        since = f", the oldest for {age(oldest)}" if oldest is not None else ""
        age_seconds = UNSERVED_SECONDS[1] if oldest is None else oldest
        level = LEVELS[1 + sum(age_seconds >= limit for limit in UNSERVED_SECONDS)]
        are_ready = format_count(ledger.ready, "message is", "messages are")
        add(level, "unserved", f"no worker serves it and {are_ready} ready{since}",
            "start a worker that has a handler for it")  # fmt: skip
    elif oldest is not None and oldest >= OLD_SECONDS:
        add("alarm" if oldest >= VERY_OLD_SECONDS else "warning", "old",
            f"the oldest message has been ready for {age(oldest)} ({ledger.ready:,} ready)",
            "add workers or concurrency, or see what limits it")  # fmt: skip
    elif unattended and ledger.delayed:
        add("note", "unserved", f"no worker serves it; {format_count(ledger.delayed, 'timer')} will come due",
            "start a worker before then")  # fmt: skip
    died = figures.recent("dead")
    if died:
        add("alarm" if died >= DEAD_ALARM else "warning", "dead",
            f"{format_count(died, 'message')} died in the last {RECENT_MINUTES} minutes",
            "see the dead letters, grouped by error")  # fmt: skip
    elif ledger.dead_kept:
        add("note", "dead", f"{format_count(ledger.dead_kept, 'dead letter')}", "redrive or purge them")
    expired = figures.recent("expired")
    if expired:
        add("warning", "expired", f"{format_count(expired, 'lease')} expired in the last {RECENT_MINUTES} minutes",
            "a worker crashed or hangs, or the lease is too short: see workers")  # fmt: skip
    for worker in [one for one in workers if one.status == "red"][:1]:
        add("warning", "worker", f"worker {worker.name} is red: {'; '.join(worker.reasons)}", "see its log; restart it")
    found.sort(key=lambda alert: -LEVELS.index(alert.level))
    return found


def level_of(alerts: Sequence[Alert]) -> Level:
    """The worst level."""
    if not alerts:
        return "calm"
    return alerts[0].level if len(alerts) == 1 else max((alert.level for alert in alerts), key=LEVELS.index)


def store_alerts(
    workers: Sequence[RegisteredWorker], schedules: Sequence[Schedule], at: datetime | None, error: str | None
) -> list[Alert]:
    """What is wrong apart from single queues: the store, workers, schedules."""
    found: list[Alert] = []
    if error is not None:
        found.append(Alert(level="alarm", kind="store", text=error, next_step="check the store; this page retries"))
    red = [worker for worker in workers if worker.status == "red"]
    for worker in red[:NAMED_MAX]:
        text = f"worker {worker.name} is red: {'; '.join(worker.reasons)}"
        found.append(Alert(level="alarm", kind="worker", text=text, next_step="see its log; restart it"))
    late = [one for one in schedules if at is not None and is_late(one, at)]
    for schedule in late[:NAMED_MAX]:
        assert schedule.next_fire is not None
        assert at is not None
        text = f"schedule {schedule.name} is {age((at - schedule.next_fire).total_seconds())} late"
        found.append(Alert(level="alarm", kind="late_schedule", text=text,
                             next_step="start a worker or `waypost scheduler`"))  # fmt: skip
    for kind, left in (("workers are red", len(red)), ("schedules are late", len(late))):
        if left > NAMED_MAX:
            text = f"{left - NAMED_MAX:,} more {kind}"
            found.append(Alert(level="alarm", kind="more", text=text, next_step="see their page"))
    return found


def is_late(schedule: Schedule, at: datetime) -> bool:
    """Whether a schedule should have fired some time ago."""
    due = schedule.next_fire
    return due is not None and not schedule.paused and (at - due).total_seconds() > LATE_SECONDS


def sentence(
    queues: Mapping[str, Sequence[Alert]], others: Sequence[Alert], *, unread: int, handled: int
) -> tuple[Level, str]:
    """Whether anything is wrong, in one sentence. Of queues that are equally bad the first one is named."""
    ranks = {name: LEVELS.index(level_of(found)) for name, found in queues.items()}
    other = LEVELS.index(level_of(others))
    worst = LEVELS[max(other, *ranks.values(), 0)]
    if worst in ("calm", "note"):
        if not queues and not unread:
            return worst, "All is well: the store is empty."
        done = f"{format_count(handled, 'message')} handled in the last {RECENT_MINUTES} minutes"
        rest = f"; {unread:,} not read yet" if unread else ""
        return worst, f"All is well: {format_count(len(queues), 'queue')}, {done}{rest}."
    concerned = [name for name, rank in ranks.items() if rank >= 2]
    if other >= 2:
        first = next(alert for alert in others if LEVELS.index(alert.level) >= 2)
        more = f", and {format_count(len(concerned), 'queue needs', 'queues need')} attention" if concerned else ""
        return worst, f"{first.text[:1].upper()}{first.text[1:]}{more}."
    name = max(concerned, key=ranks.__getitem__)
    text = queues[name][0].text
    if len(concerned) == 1:
        return worst, f"Queue {name} needs attention: {text}."
    need = f"{len(concerned):,} of {format_count(len(queues), 'queue')} need attention"
    return worst, f"{need}, first {name}: {text}."
