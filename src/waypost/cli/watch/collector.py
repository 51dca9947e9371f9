"""Collects the figures of `waypost watch` with few commands to the store.

All queues are polled at the start. Then a queue that changed is polled every second; the others share a budget of one
and a half commands a second, the longest not polled first. So an idle store gets less than two commands a second,
however many queues it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from waypost.client import Waypost
from waypost.formatting import format_count
from waypost.views import RegisteredWorker, Stats

#: How often the view is refreshed.
TICK_SECONDS = 1.0
#: The budget of all queues that do not change.
IDLE_COMMANDS_PER_SECOND = 1.5
#: The unused budget that is kept at most.
SAVED_COMMANDS_MAX = 3.0
#: How often queues and workers are listed. Workers send a heartbeat only every fifteen seconds.
LIST_SECONDS = 10.0
#: How many of the last wait and run times are kept.
SAMPLES = 200
MINUTES = 2


@dataclass(frozen=True, slots=True)
class QueueLine:
    """The figures of a queue. Rates are per second."""

    queue: str
    paused: bool
    ready: int
    delayed: int
    waiting: int
    leased: int
    dead: int
    oldest_ready_age: timedelta | None
    published_per_second: float
    done_per_second: float
    #: The median of the last wait and run times in the journal; None if it has none.
    wait_time: timedelta | None
    run_time: timedelta | None
    #: Registered workers that serve it.
    workers: int
    #: Events that the slowest reader of its journal has not read; None if it has no reader.
    lag: int | None


@dataclass(slots=True)
class QueueState:
    """What is kept of a queue between two polls."""

    stats: Stats
    polled_at: float
    changed: bool = True
    published_per_second: float = 0.0
    done_per_second: float = 0.0
    read_to: int = 0
    waits: deque[timedelta] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    runs: deque[timedelta] = field(default_factory=lambda: deque(maxlen=SAMPLES))


class Collector:
    """Polls a store within a budget. `now` is any monotonic clock in seconds."""

    def __init__(self, post: Waypost) -> None:
        self._post = post
        self._states: dict[str, QueueState] = {}
        self._workers: list[RegisteredWorker] = []
        self._budget = 0.0
        self._ticked_at: float | None = None
        self._listed_at = float("-inf")
        #: The queue under the cursor is polled first.
        self.selected: str | None = None

    def tick(self, now: float) -> None:
        """Poll the queues that are due."""
        if self._ticked_at is not None:
            saved = self._budget + IDLE_COMMANDS_PER_SECOND * (now - self._ticked_at)
            self._budget = min(SAVED_COMMANDS_MAX, saved)
        self._ticked_at = now
        if now - self._listed_at >= LIST_SECONDS:
            self._listed_at = now
            self._list_queues(now)
        changing = [
            name for name, state in self._states.items() if state.changed and now - state.polled_at >= TICK_SECONDS
        ]
        for name in changing:
            self._poll(name, now)
        unchanged = [
            name for name, state in self._states.items() if not state.changed and now - state.polled_at >= TICK_SECONDS
        ]
        unchanged.sort(key=lambda name: (name != self.selected, self._states[name].polled_at))
        for name in unchanged:
            if self._budget < 1:
                break
            self._budget -= 1
            self._poll(name, now)

    def poll_now(self, queue: str, now: float) -> None:
        """Poll a queue that was just changed."""
        self._poll(queue, now)

    def _list_queues(self, now: float) -> None:
        """List the queues and workers, and poll new queues."""
        names = self._post.queues()
        self._workers = self._post.workers()
        self._budget -= 2
        for name in names:
            if name not in self._states:
                self._poll(name, now)
        for name in set(self._states) - set(names):
            del self._states[name]

    def _poll(self, name: str, now: float) -> None:
        stats = self._post.stats(name, 0 if name in self._states else MINUTES)
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = QueueState(stats, now)
            state.published_per_second, state.done_per_second = recent_rates(stats)
            state.read_to = max(0, stats.journal_last - SAMPLES)
        else:
            before, state.stats, state.polled_at = state.stats, stats, now
            state.changed = has_changed(before, stats)
            passed = (stats.at - before.at).total_seconds()
            if passed > 0:
                state.published_per_second = max(0, stats.ledger.published - before.ledger.published) / passed
                state.done_per_second = max(0, stats.ledger.done - before.ledger.done) / passed
        if state.read_to < stats.journal_last:
            self._read_times(name, state)

    def _read_times(self, name: str, state: QueueState) -> None:
        """Read the wait and run times since the last poll from the journal."""
        last = state.stats.journal_last
        page = self._post.journal(name, max(state.read_to, last - SAMPLES), SAMPLES)
        state.read_to = max(page.last, last)
        for event in page.events:
            if event.event == "claimed" and event.wait_time is not None:
                state.waits.append(event.wait_time)
            elif event.event == "done" and event.run_time is not None:
                state.runs.append(event.run_time)

    def lines(self) -> list[QueueLine]:
        """Return the figures of all queues, by name."""
        return [self._line(name, self._states[name]) for name in sorted(self._states)]

    def _line(self, name: str, state: QueueState) -> QueueLine:
        stats, ledger = state.stats, state.stats.ledger
        readers = stats.journal_readers.values()
        return QueueLine(
            queue=name,
            paused=stats.paused,
            ready=ledger.ready,
            delayed=ledger.delayed,
            waiting=ledger.waiting,
            leased=ledger.leased,
            dead=ledger.dead_kept,
            oldest_ready_age=stats.oldest_ready_age,
            published_per_second=round(state.published_per_second, 2),
            done_per_second=round(state.done_per_second, 2),
            wait_time=median(state.waits),
            run_time=median(state.runs),
            workers=sum(any(queue.name == name for queue in worker.queues) for worker in self._workers),
            lag=stats.journal_last - min(readers) if readers else None,
        )

    @property
    def workers(self) -> Sequence[RegisteredWorker]:
        """The registered workers."""
        return self._workers


def median(values: Iterable[timedelta]) -> timedelta | None:
    """Return the median, of two the smaller; None without values."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def has_changed(before: Stats, after: Stats) -> bool:
    """Whether anything happened between two polls."""
    return before.ledger != after.ledger or before.paused != after.paused or before.journal_last != after.journal_last


def recent_rates(stats: Stats) -> tuple[float, float]:
    """Return published and done per second over the last one or two minutes, for the first poll of a queue."""
    minute = stats.at.replace(second=0, microsecond=0)
    counted = [one for one in stats.minutes if one.at >= minute - timedelta(minutes=1)]
    seconds = 60 + (stats.at - minute).total_seconds()
    published = sum(one.counts.get("published", 0) for one in counted)
    return published / seconds, sum(one.counts.get("done", 0) for one in counted) / seconds


# ---- formatting ----------------------------------------------------------------------------------------------------

#: The mark of a paused queue. It stands before the name: a narrow column would cut it off after it.
PAUSED = "‖"
HEADERS = ("queue", "ready", "timers", "leased", "dead", "oldest", "in/s", "out/s", "wait", "run", "work", "lag")


def format_cells(line: QueueLine) -> tuple[str, ...]:
    """Return the cells of a queue, a few characters for each figure."""
    return (
        f"{PAUSED} {line.queue}" if line.paused else line.queue,
        format_number(line.ready),
        format_number(line.delayed),
        format_number(line.leased),
        format_number(line.dead),
        format_duration(line.oldest_ready_age),
        format_number(line.published_per_second),
        format_number(line.done_per_second),
        format_duration(line.wait_time),
        format_duration(line.run_time),
        str(line.workers),
        "–" if line.lag is None else format_number(line.lag),
    )


def format_number(number: float) -> str:
    """Format a number in at most five characters."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            scaled = number / (1e3 if unit == "k" else size)
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.1f}{unit}"
    return f"{number:.0f}" if number == int(number) or number >= 100 else f"{number:.1f}"


def format_duration(duration: timedelta | None) -> str:
    """Format a duration in at most five characters."""
    if duration is None:
        return "–"
    seconds = duration.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    for size, unit in ((1, "s"), (60, "m"), (3600, "h")):
        if seconds / size < 100:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def format_totals(lines: Sequence[QueueLine], workers: Sequence[Any]) -> str:
    """Return the totals of the store in one line."""
    return (
        f"{format_count(len(lines), 'queue')}, {sum(line.ready for line in lines):,} ready, "
        f"{sum(line.leased for line in lines):,} leased, {sum(line.dead for line in lines):,} dead, "
        f"{format_count(len(workers), 'worker')}"
        + (f", {paused} paused ({PAUSED})" if (paused := sum(line.paused for line in lines)) else "")
    )
