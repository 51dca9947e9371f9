"""The view of one queue: its counters, its rates, its dead letters by reason, its workers, its last errors."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from rich.text import Text

from waypost.cli.output import wrap_text
from waypost.cli.watch.collector import OPEN_MINUTES, QueueDetail, QueueLine
from waypost.cli.watch.columns import format_number, sparkline
from waypost.formatting import format_age, format_count, printable
from waypost.times import format_datetime
from waypost.views import RegisteredWorker

INDENT = "  "
#: Before the second and further lines of a text.
HANGING = "      "
#: Minutes in each bar of a rate.
BAR_MINUTES = 2


def format_detail(detail: QueueDetail, width: int) -> Text:
    """Return the view of a queue as text of a width; what is wrong is in color."""
    text = Text()
    for line, style in detail_lines(detail):
        first, *rest = wrap_text(printable(line), width - len(HANGING)) or [""]
        text.append("\n".join([first, *(HANGING + part for part in rest)]) + "\n", style)
    return text


def detail_lines(detail: QueueDetail) -> Iterator[tuple[str, str]]:
    """Yield the lines of the view, each with its style."""
    line = detail.line
    yield line.queue, "bold"
    yield from state_lines(line)
    yield "", ""
    yield f"ready    {line.ready:,}, the oldest for {format_age(line.oldest_ready_age)}", ""
    yield f"delayed  {line.delayed:,}    waiting {line.waiting:,}    leased {line.leased:,}    done {line.done:,}", ""
    yield f"wait     {format_age(line.wait_time)}    run {format_age(line.run_time)}", ""
    yield "", ""
    yield f"the last {OPEN_MINUTES} minutes", "bold"
    for name, now in (("published", line.published_per_second), ("done", line.done_per_second)):
        counts = minute_counts(detail, name)
        yield f"{INDENT}{name:10} {sparkline(counts)}  {sum(counts):,}, now {format_number(now)}/s", ""
    yield "", ""
    yield from dead_lines(detail)
    yield from worker_lines(detail)
    yield from error_lines(detail)


def state_lines(line: QueueLine) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a queue."""
    if line.unserved:
        yield "no worker serves it: start one with a handler for it", "bold red"
    if line.red_workers:
        yield f"{format_count(line.red_workers, 'worker')} of {line.workers} red", "bold red"
    if line.paused:
        yield "paused: r resumes it", "bold yellow"


def minute_counts(detail: QueueDetail, name: str) -> list[int]:
    """Return a counter over the last minutes, a few minutes to a bar, the current ones last."""
    minute = detail.at.replace(second=0, microsecond=0)
    counts = {one.at: one.counts.get(name, 0) for one in detail.minutes}
    by_minute = [counts.get(minute - timedelta(minutes=ago), 0) for ago in range(OPEN_MINUTES - 1, -1, -1)]
    return [sum(by_minute[at : at + BAR_MINUTES]) for at in range(0, OPEN_MINUTES, BAR_MINUTES)]


def dead_lines(detail: QueueDetail) -> Iterator[tuple[str, str]]:
    """Yield the dead letters by reason and class of error."""
    kept = detail.line.dead
    read = f", the oldest {detail.dead_read:,} by reason" if detail.dead_read < kept and detail.dead_read else ""
    yield f"dead letters: {kept:,}{read}", "bold red" if kept else "bold"
    width = max((len(one.reason or "") for one in detail.dead_reasons), default=0)
    for one in detail.dead_reasons:
        yield f"{INDENT}{one.count:>6,}  {one.reason or '':{width}}  {one.error_type or ''}".rstrip(), ""
    yield "", ""


def worker_lines(detail: QueueDetail) -> Iterator[tuple[str, str]]:
    """Yield the workers that serve the queue, with the reasons of those that are not well."""
    yield f"workers: {len(detail.workers)}", "bold"
    width = max((len(worker.name) for worker in detail.workers), default=0)
    for worker in detail.workers:
        style = {"red": "red", "degraded": "yellow"}.get(worker.status, "")
        yield f"{INDENT}{worker.name:{width}}  {describe_worker(worker, detail.line.queue)}", style
        for reason in worker.reasons:
            yield f"{INDENT * 2}{reason}", style
    yield "", ""


def describe_worker(worker: RegisteredWorker, queue: str) -> str:
    """Return the state of a worker, and what it does for a queue."""
    served = next(one for one in worker.queues if one.name == queue)
    return (
        f"{worker.state}, {worker.status}, {served.in_flight} of {served.concurrency} in flight, "
        f"{served.handled:,} handled"
    )


def error_lines(detail: QueueDetail) -> Iterator[tuple[str, str]]:
    """Yield the last failures, the newest first."""
    yield "recent errors", "bold"
    for event in detail.errors:
        error = " ".join(": ".join(filter(None, (event.error_type, event.error))).split())
        yield f"{INDENT}{format_datetime(event.at)[11:19]}  {event.event:8} {event.message_id or ''}  {error}", ""
    if not detail.errors:
        yield f"{INDENT}none in the journal", ""
