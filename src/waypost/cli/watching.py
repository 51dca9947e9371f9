"""What `waypost watch` knows of a store, and how little it asks to know it.

All queues are looked at once at the start. Then one that moved is looked at again every second; the others share a
budget of one and a half commands a second, those not seen for longest first. So an idle store is asked less than
twice a second, however many queues it has, and a busy one in proportion to what there is to see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from waypost.client import Waypost
from waypost.formatting import format_count
from waypost.values import RegisteredWorker, Stats

#: How often the view is refreshed.
TICK_SECONDS = 1.0
#: What queues that do not move cost the store together.
IDLE_COMMANDS_PER_SECOND = 1.5
#: A pause in which nothing was asked does not save up more than this.
SAVED_COMMANDS_MAX = 3.0
#: Workers tell of themselves every fifteen seconds: to ask much more often would show nothing new.
DIRECTORY_SECONDS = 10.0
#: So many of the last waits and run times are looked at.
SAMPLES = 200
MINUTES = 2


@dataclass(frozen=True, slots=True)
class Line:
    """A queue as the view shows it. Rates are per second, times in milliseconds."""

    queue: str
    paused: bool
    ready: int
    delayed: int
    waiting: int
    leased: int
    dead: int
    oldest_ready_ms: int | None
    published_per_second: float
    done_per_second: float
    #: The median of the last waits and run times that the journal tells; None if it tells none.
    wait_ms: float | None
    run_ms: float | None
    #: Workers that serve it, as far as they are registered.
    workers: int
    #: Events that the slowest reader of its journal has not read; None if it has no reader.
    lag: int | None


@dataclass(slots=True)
class Seen:
    """What is remembered of a queue between two looks."""

    stats: Stats
    looked: float
    moved: bool = True
    published_per_second: float = 0.0
    done_per_second: float = 0.0
    read_to: int = 0
    waits: deque[int] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    runs: deque[int] = field(default_factory=lambda: deque(maxlen=SAMPLES))


class Watcher:
    """Looks at a store, a little at a time. `now` is any clock that grows, in seconds."""

    def __init__(self, post: Waypost) -> None:
        self._post = post
        self._seen: dict[str, Seen] = {}
        self._workers: list[RegisteredWorker] = []
        self._budget = 0.0
        self._ticked: float | None = None
        self._directory = float("-inf")
        #: The queue that somebody looks at goes first.
        self.selected: str | None = None

    def tick(self, now: float) -> None:
        """Look at what is due."""
        if self._ticked is not None:
            saved = self._budget + IDLE_COMMANDS_PER_SECOND * (now - self._ticked)
            self._budget = min(SAVED_COMMANDS_MAX, saved)
        self._ticked = now
        if now - self._directory >= DIRECTORY_SECONDS:
            self._directory = now
            self._look_around(now)
        moving = [name for name, seen in self._seen.items() if seen.moved and now - seen.looked >= TICK_SECONDS]
        for name in moving:
            self._look(name, now)
        resting = [name for name, seen in self._seen.items() if not seen.moved and now - seen.looked >= TICK_SECONDS]
        resting.sort(key=lambda name: (name != self.selected, self._seen[name].looked))
        for name in resting:
            if self._budget < 1:
                break
            self._budget -= 1
            self._look(name, now)

    def look_now(self, queue: str, now: float) -> None:
        """Look at a queue that was just acted on."""
        self._look(queue, now)

    def _look_around(self, now: float) -> None:
        """Which queues and workers there are. Queues that are new are looked at."""
        names = self._post.queues()
        self._workers = self._post.workers()
        self._budget -= 2
        for name in names:
            if name not in self._seen:
                self._look(name, now)
        for name in set(self._seen) - set(names):
            del self._seen[name]

    def _look(self, name: str, now: float) -> None:
        stats = self._post.stats(name, 0 if name in self._seen else MINUTES)
        seen = self._seen.get(name)
        if seen is None:
            seen = self._seen[name] = Seen(stats, now)
            seen.published_per_second, seen.done_per_second = lately(stats)
            seen.read_to = max(0, stats.journal_last - SAMPLES)
        else:
            before, seen.stats, seen.looked = seen.stats, stats, now
            seen.moved = moved(before, stats)
            passed = (stats.at_ms - before.at_ms) / 1000
            if passed > 0:
                seen.published_per_second = max(0, stats.ledger.published - before.ledger.published) / passed
                seen.done_per_second = max(0, stats.ledger.done - before.ledger.done) / passed
        if seen.read_to < stats.journal_last:
            self._sample(name, seen)

    def _sample(self, name: str, seen: Seen) -> None:
        """Waits and run times since the last look, from the journal."""
        last = seen.stats.journal_last
        page = self._post.journal(name, max(seen.read_to, last - SAMPLES), SAMPLES)
        seen.read_to = max(page.last, last)
        for event in page.events:
            if event.event == "claimed" and event.wait_ms is not None:
                seen.waits.append(event.wait_ms)
            elif event.event == "done" and event.run_ms is not None:
                seen.runs.append(event.run_ms)

    def lines(self) -> list[Line]:
        """What is known now, by the names of the queues."""
        return [self._line(name, self._seen[name]) for name in sorted(self._seen)]

    def _line(self, name: str, seen: Seen) -> Line:
        stats, ledger = seen.stats, seen.stats.ledger
        readers = stats.journal_readers.values()
        return Line(
            queue=name,
            paused=stats.paused,
            ready=ledger.ready,
            delayed=ledger.delayed,
            waiting=ledger.waiting,
            leased=ledger.leased,
            dead=ledger.dead_kept,
            oldest_ready_ms=stats.oldest_ready_ms,
            published_per_second=round(seen.published_per_second, 2),
            done_per_second=round(seen.done_per_second, 2),
            wait_ms=middle(seen.waits),
            run_ms=middle(seen.runs),
            workers=sum(any(queue.name == name for queue in worker.queues) for worker in self._workers),
            lag=stats.journal_last - min(readers) if readers else None,
        )

    @property
    def workers(self) -> Sequence[RegisteredWorker]:
        """The workers that are registered."""
        return self._workers


def middle(values: Iterable[int]) -> int | None:
    """The one in the middle, of two the smaller; None of nothing."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def moved(before: Stats, after: Stats) -> bool:
    """Whether anything happened between two looks."""
    return before.ledger != after.ledger or before.paused != after.paused or before.journal_last != after.journal_last


def lately(stats: Stats) -> tuple[float, float]:
    """Published and done per second over the last minute or two, for a first look that has nothing to compare with."""
    minute = stats.at_ms // 60_000
    counted = [one for one in stats.minutes if one.at_ms // 60_000 in (minute, minute - 1)]
    seconds = 60 + stats.at_ms % 60_000 / 1000
    published = sum(one.counts.get("published", 0) for one in counted)
    return published / seconds, sum(one.counts.get("done", 0) for one in counted) / seconds


# ---- for people ----------------------------------------------------------------------------------------------------

#: Stands before the name of a queue that is paused: behind it, a narrow column would cut it off.
PAUSED = "‖"
HEADERS = ("queue", "ready", "timers", "leased", "dead", "oldest", "in/s", "out/s", "wait", "run", "work", "lag")


def cells(line: Line) -> tuple[str, ...]:
    """A line as the view shows it: a few characters for each figure."""
    return (
        f"{PAUSED} {line.queue}" if line.paused else line.queue,
        short(line.ready),
        short(line.delayed),
        short(line.leased),
        short(line.dead),
        span(line.oldest_ready_ms),
        short(line.published_per_second),
        short(line.done_per_second),
        span(line.wait_ms),
        span(line.run_ms),
        str(line.workers),
        "–" if line.lag is None else short(line.lag),
    )


def short(number: float) -> str:
    """A number in at most five characters."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            scaled = number / (1e3 if unit == "k" else size)
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.1f}{unit}"
    return f"{number:.0f}" if number == int(number) or number >= 100 else f"{number:.1f}"


def span(milliseconds: float | None) -> str:
    """A duration in at most five characters."""
    if milliseconds is None:
        return "–"
    if milliseconds < 1000:
        return f"{milliseconds:.0f}ms"
    for size, unit, most in ((1e3, "s", 100), (60e3, "m", 100), (3600e3, "h", 100)):
        if milliseconds / size < most:
            return f"{milliseconds / size:.1f}{unit}"
    return f"{milliseconds / 86_400e3:.0f}d"


def totals(lines: Sequence[Line], workers: Sequence[Any]) -> str:
    """The store in one line."""
    return (
        f"{format_count(len(lines), 'queue')}, {sum(line.ready for line in lines):,} ready, "
        f"{sum(line.leased for line in lines):,} leased, {sum(line.dead for line in lines):,} dead, "
        f"{format_count(len(workers), 'worker')}"
        + (f", {paused} paused ({PAUSED})" if (paused := sum(line.paused for line in lines)) else "")
    )
