"""Findings: what in a history needs attention, in a sentence with its figures and the next command. Pure.

A rule needs enough messages to be sure, so a healthy history has no findings.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from waypost.charts import TimeRange, format_duration, format_moment
from waypost.charts.axes import DAY
from waypost.formatting import format_count
from waypost.spark.lake.report.gold import AdviceRow, Source, Verdict, WorkerStep
from waypost.spark.lake.report.series import ENDS, Letters, ReportData, View

Level = Literal["alarm", "warning", "note"]
#: Fewer cases than this are chance.
SAMPLE_MIN = 20
DEAD_MIN = 5
#: Shares above which a queue needs attention: of claims that expired or failed, of ended messages that died.
EXPIRED_SHARE, RETRIED_SHARE, DEAD_SHARE = 0.005, 0.05, 0.002
#: A backlog of fewer messages than this does not count as one.
BACKLOG_MIN = 100
#: A wait is long from here on, if it is so many times what is usual.
WAIT_MS, WAIT_TIMES = 5_000.0, 8.0
LATE_MS = 5_000.0
#: Messages that no worker has claimed for so long have none.
UNSERVED_MS = 300_000.0
#: A worker that does nothing for so long, and for so many steps of the timeline, is gone.
QUIET_MS, QUIET_STEPS = 60_000, 5


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that needs attention: in which queue, how much, a sentence, and the next command."""

    level: Level
    #: Larger is more urgent among those of the same level.
    weight: float
    text: str
    command: str = ""
    queue: str = ""


def find(data: ReportData, verdict: Verdict | None, advice: Sequence[AdviceRow], source: Source) -> list[Finding]:
    """Return what needs attention, the most urgent first."""
    lake = f"--lake {shlex.quote(source.lake or 'DIR')}"
    found = list(_of_audit(verdict, lake))
    for view in data.queues:
        found += _of_expired(view, data, lake)
        found += _of_retries(view, data, lake)
        found += _of_dead(view, data)
        found += _of_backlog(view, data, lake)
        found += _of_waits(view, data.queue_time, lake)
        found += _of_timers(view)
    found += _of_workers(data)
    found += _of_advice(advice, lake)
    order = {"alarm": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda one: (order[one.level], -one.weight, one.queue))


def _of_audit(verdict: Verdict | None, lake: str) -> Iterable[Finding]:
    if verdict is None:
        return
    command = f"waypost pipeline audit {lake}"
    if not verdict.clean:
        wrong = (
            verdict.unaccounted + verdict.unexplained + verdict.unrecorded + verdict.overcounted + verdict.out_of_order
        )
        yield Finding(
            "alarm", 1e12, f"The audit could not explain {'at least ' if verdict.at_least else ''}{wrong:,} of "
            f"{format_count(verdict.published, 'published message')}: they are listed below.", command,
        )  # fmt: skip
    elif not verdict.whole:
        yield Finding(
            "note", 1.0, f"{format_count(verdict.not_seen, 'event was', 'events were')} trimmed from the journal "
            "before the pipeline read them: run it more often, or register it as a reader.",
            f"waypost pipeline run {lake} --reader pipeline",
        )  # fmt: skip


def _of_expired(view: View, data: ReportData, lake: str) -> Iterable[Finding]:
    expired, claimed = view.causes.get("expired", 0), view.totals["claimed"]
    everywhere = data.all.redelivered
    if expired < SAMPLE_MIN or expired < EXPIRED_SHARE * claimed:
        return
    text = (
        f"{_share(expired, everywhere)} of redeliveries ({expired:,} of {everywhere:,}) are expired leases in "
        f"{view.name}{_peak(view.counts['expired'], data.queue_time)}: workers died, or the lease is too short."
    )
    command = f"waypost pipeline advise {lake} --queue {shlex.quote(view.name)}"
    yield Finding("warning", expired / max(1, claimed) + 0.5, text, command, view.name)


def _of_retries(view: View, data: ReportData, lake: str) -> Iterable[Finding]:
    retried, claimed = view.totals["retried"], view.totals["claimed"]
    # A queue that journals only failures has no claims to compare with.
    if not claimed or retried < SAMPLE_MIN or retried < RETRIED_SHARE * claimed:
        return
    text = (
        f"{_share(retried, claimed)} of the deliveries in {view.name} ({retried:,} of {claimed:,}) failed and were "
        f"retried{_peak(view.counts['retried'], data.queue_time)}: its handler raises errors."
    )
    command = f"waypost pipeline advise {lake} --queue {shlex.quote(view.name)}"
    yield Finding("warning", retried / claimed, text, command, view.name)


def _of_dead(view: View, data: ReportData) -> Iterable[Finding]:
    dead, ended = view.totals["dead"], sum(view.totals[end] for end in ENDS)
    # A queue that journals only failures has no other ends to compare with.
    is_share_known = view.totals["done"] > 0
    if dead < DEAD_MIN or (is_share_known and dead < DEAD_SHARE * ended):
        return
    worst = next((one for one in data.letters if one.queue == view.name), None)
    text = f"{format_count(dead, 'message')} of {view.name} died"
    text += f" ({_share(dead, ended)} of those that ended)" if is_share_known else ""
    text += _peak(view.counts["dead"], data.queue_time)
    if worst is not None:
        of_them = "all" if worst.count == dead else f"{worst.count:,} of them"
        text += f"; {of_them} {worst.reason}{f' with {worst.error_type}' if worst.error_type else ''}"
    command = f"waypost dead list {shlex.quote(view.name)}"
    command += f" --reason {shlex.quote(worst.reason)}" if worst is not None else ""
    yield Finding("alarm", dead / max(1, ended), f"{text}.", command, view.name)


def _of_backlog(view: View, data: ReportData, lake: str) -> Iterable[Finding]:
    whole, time = view.backlog[-1] if view.backlog else 0.0, data.queue_time
    # Timers that are not due are no work that is left undone.
    now = max(0.0, whole - view.not_ready)
    oldest = (view.oldest[-1] if view.oldest else None) or 0.0
    waited = oldest if data.is_ready_known else data.end_ms - time.start_ms
    # Without the publishes of a queue, which journals only failures, its claims are not known either.
    is_unserved = view.totals["published"] and not view.totals["claimed"] + view.totals["done"]
    if now and is_unserved and waited >= UNSERVED_MS:
        since = f", the oldest for {format_duration(oldest)}" if oldest else ""
        text = f"{format_count(int(now), 'message')} of {view.name} {'waits' if now == 1 else 'wait'}{since}"
        text += ", and no worker has claimed any."
        yield Finding("alarm", 0.4, text, "waypost workers", view.name)
        return
    part = max(1, time.count // 4)
    if now < BACKLOG_MIN or time.count < 4 or now < 1.3 * max(view.backlog[-part - 1], 1.0):
        return
    minutes = part * time.step_ms / 60_000
    published = sum(view.counts["published"][-part:]) / minutes
    ended = published - (whole - view.backlog[-part - 1]) / minutes
    text = (
        f"The backlog of {view.name} grows: {now:,.0f} messages at the end, {published:,.0f} published and "
        f"{max(0.0, ended):,.0f} ended per minute in the last {format_duration(part * time.step_ms)}."
    )
    command = f"waypost pipeline simulate {lake} --queue {shlex.quote(view.name)} --target 'p95 wait < 5s'"
    yield Finding("warning", 1.0 + now / max(1, view.totals["published"]), text, command, view.name)


def _of_waits(view: View, time: TimeRange, lake: str) -> Iterable[Finding]:
    lines = view.percentiles.get("wait", {}).get("p99")
    if lines is None:
        return
    known = [(value, place) for place, value in enumerate(lines) if value is not None]
    if view.samples.get("wait", 0) < SAMPLE_MIN or not known:
        return
    largest, place = max(known)
    usual = median(value for value, _ in known)
    claimed = view.counts["claimed"][place]
    if largest < WAIT_MS or largest < WAIT_TIMES * max(usual, 1.0) or claimed < SAMPLE_MIN:
        return
    text = (
        f"Messages of {view.name} waited up to {format_duration(largest)} (p99) at {_moment(time, place)}, usually "
        f"{format_duration(usual)}: there were too few workers for what was published."
    )
    command = f"waypost pipeline simulate {lake} --queue {shlex.quote(view.name)} --target 'p95 wait < 5s'"
    yield Finding("warning", largest / 1e7, text, command, view.name)


def _of_timers(view: View) -> Iterable[Finding]:
    late = view.overall.get("late", {}).get("p99", 0.0)
    if view.samples.get("late", 0) >= SAMPLE_MIN and late >= LATE_MS:
        text = f"Timers of {view.name} were claimed up to {format_duration(late)} (p99) after they were due."
        yield Finding("warning", late / 1e7, text, f"waypost timers list {shlex.quote(view.name)}", view.name)


def _of_workers(data: ReportData) -> Iterable[Finding]:
    """Workers whose last deliveries were leases that expired, long before the end."""
    last: dict[str, WorkerStep] = {}
    expired: dict[str, int] = {}
    for one in data.workers:
        last[one.worker] = one
        expired[one.worker] = expired.get(one.worker, 0) + one.expired
    silent_ms = max(QUIET_MS, QUIET_STEPS * data.worker_step_ms)
    died = [name for name, one in last.items() if one.expired and one.last_ms < data.end_ms - silent_ms]
    if not died:
        return
    died.sort(key=lambda name: (-expired[name], name))
    lost, first = sum(expired[name] for name in died), died[0]
    at = format_moment(last[first].last_ms, seconds=True, date=False)
    which = f"Worker {first}" if len(died) == 1 else f"{len(died):,} workers"
    text = f"{which} died or {'was' if len(died) == 1 else 'were'} killed, and {format_count(lost, 'lease')} expired"
    text += f": last seen at {at}." if len(died) == 1 else f"; {first} was last seen at {at}."
    yield Finding("warning", 0.45, text, "waypost workers")


def _of_advice(advice: Sequence[AdviceRow], lake: str) -> Iterable[Finding]:
    waiting = [one for one in advice if not one.is_applied]
    if waiting:
        text = f"{format_count(len(waiting), 'piece', 'pieces')} of advice {'is' if len(waiting) == 1 else 'are'} open."
        yield Finding("note", 2.0, text, f"waypost pipeline advise {lake} --apply")


def act_on(letters: Letters) -> str:
    """Return the command that sends these dead letters again, and no others: it saves a bulk action and runs it."""
    queue, reason, error_type = (
        shlex.quote(text) for text in (letters.queue, letters.reason, letters.error_type or "")
    )
    start = f"waypost bulk start {queue} redrive --reason {reason} --error-type {error_type} --rate 50/s"
    return f'waypost bulk run "$({start})"'


def _share(part: float, whole: float) -> str:
    """A share in percent with two digits that matter."""
    value = 100 * part / max(1, whole)
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"


def _peak(values: Sequence[float], time: TimeRange) -> str:
    """When most of them were, if most were at one time."""
    whole = sum(values)
    if not whole or time.count < 2:
        return ""
    place = max(range(len(values)), key=lambda number: values[number])
    if values[place] >= 0.5 * whole:
        return f" at {_moment(time, place)}"
    return f", most of them at {_moment(time, place)}" if values[place] >= 0.2 * whole else ""


def _moment(time: TimeRange, place: int) -> str:
    at_ms = time.start_ms + place * time.step_ms
    return format_moment(at_ms, seconds=time.step_ms < 60_000, date=time.step_ms * time.count > DAY)
