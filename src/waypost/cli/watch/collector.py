"""Collects the figures of `waypost watch` with few commands to the store.

All queues are polled at the start. Then a queue that changed is polled every second; the others share a budget of one
and a half commands a second, the longest not polled first. So an idle store gets less than two commands a second,
however many queues it has. A queue that is open is polled within the same budget, for more minutes; its dead letters
are read again only if their number changed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from waypost.cli.commands.workers import list_unserved
from waypost.client import Waypost
from waypost.formatting import error_line
from waypost.views import Event, Minute, RegisteredWorker, Stats

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
#: Minutes in the trend of a queue, and of the queue that is open.
TREND_MINUTES = 12
OPEN_MINUTES = 60
#: The last errors of a queue that are kept.
ERRORS = 20
#: Dead letters of the open queue that are read, in one page, to count their reasons; and how often at the most.
DEAD_READ_MAX = 500
DEAD_SECONDS = 5.0


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
    done: int
    oldest_ready_age: timedelta | None
    published_per_second: float
    done_per_second: float
    #: The median of the last wait and run times in the journal; None if it has none.
    wait_time: timedelta | None
    run_time: timedelta | None
    #: Registered workers that serve it, and how many of them are red.
    workers: int
    red_workers: int
    #: Whether it has messages, and no worker and no other program handles them.
    unserved: bool
    #: Messages done in each of the last minutes, the current one last.
    trend: tuple[int, ...]
    #: Events that the slowest reader of its journal has not read; None if it has no reader.
    lag: int | None


@dataclass(frozen=True, slots=True)
class DeadReason:
    """How many dead letters have a reason and a class of error."""

    count: int
    reason: str | None
    error_type: str | None


@dataclass(frozen=True, slots=True)
class QueueDetail:
    """All that the view of one queue shows."""

    line: QueueLine
    #: The last minutes, oldest first; those in which nothing happened are left out.
    minutes: list[Minute]
    at: datetime
    #: The most frequent first, of the dead letters that were read.
    dead_reasons: list[DeadReason]
    dead_read: int
    workers: list[RegisteredWorker]
    #: Failures in the journal, the newest first.
    errors: list[Event]


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
    errors: deque[Event] = field(default_factory=lambda: deque(maxlen=ERRORS))
    done_by_minute: dict[datetime, int] = field(default_factory=dict)
    #: Of the open queue: its minutes, the reasons of its dead letters, and what was known when they were read.
    minutes: list[Minute] = field(default_factory=list)
    reasons: list[DeadReason] = field(default_factory=list)
    dead_read: int = 0
    dead_before: tuple[int, int] | None = None
    dead_at: float = float("-inf")

    def add_done(self, stats: Stats, count: int) -> None:
        """Count messages that were done since the last poll in the current minute."""
        minute = stats.at.replace(second=0, microsecond=0)
        self.done_by_minute[minute] = self.done_by_minute.get(minute, 0) + count
        oldest = minute - timedelta(minutes=TREND_MINUTES)
        self.done_by_minute = {at: done for at, done in self.done_by_minute.items() if at > oldest}

    def trend(self) -> tuple[int, ...]:
        """Return the messages done in each of the last minutes, the current one last."""
        minute = self.stats.at.replace(second=0, microsecond=0)
        return tuple(
            self.done_by_minute.get(minute - timedelta(minutes=ago), 0) for ago in range(TREND_MINUTES - 1, -1, -1)
        )


class Collector:
    """Polls a store within a budget. `now` is any monotonic clock in seconds."""

    def __init__(self, post: Waypost) -> None:
        self._post = post
        self._states: dict[str, QueueState] = {}
        self._workers: list[RegisteredWorker] = []
        self._budget = 0.0
        self._ticked_at: float | None = None
        self._listed_at = float("-inf")
        #: The queue under the cursor is polled first; of the open one more is read.
        self.selected: str | None = None
        self.opened: str | None = None

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
        first = self.opened or self.selected
        unchanged.sort(key=lambda name: (name != first, self._states[name].polled_at))
        for name in unchanged:
            if self._budget < 1:
                break
            self._budget -= 1
            self._poll(name, now)
        if self.opened in self._states:
            self._read_dead(self.opened, self._states[self.opened], now)

    def poll_now(self, queue: str, now: float) -> None:
        """Poll a queue that was just changed or opened."""
        self._poll(queue, now)
        if queue == self.opened:
            self._read_dead(queue, self._states[queue], now)

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
        state = self._states.get(name)
        minutes = TREND_MINUTES if state is None else OPEN_MINUTES if name == self.opened else 0
        stats = self._post.stats(name, minutes)
        if state is None:
            state = self._states[name] = QueueState(stats, now)
            state.published_per_second, state.done_per_second = recent_rates(stats)
            state.read_to = max(0, stats.journal_last - SAMPLES)
            state.done_by_minute = {one.at: one.counts.get("done", 0) for one in stats.minutes}
        else:
            before, state.stats, state.polled_at = state.stats, stats, now
            state.changed = has_changed(before, stats)
            passed = (stats.at - before.at).total_seconds()
            if passed > 0:
                state.published_per_second = max(0, stats.ledger.published - before.ledger.published) / passed
                state.done_per_second = max(0, stats.ledger.done - before.ledger.done) / passed
            state.add_done(stats, max(0, stats.ledger.done - before.ledger.done))
        if name == self.opened:
            state.minutes = stats.minutes
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
            if event.error_type or event.error:
                state.errors.append(event)

    def _read_dead(self, name: str, state: QueueState, now: float) -> None:
        """Count the reasons of the dead letters of the open queue, if there are other ones than before."""
        known = (state.stats.ledger.dead, state.stats.ledger.dead_kept)
        if known == state.dead_before or now - state.dead_at < DEAD_SECONDS:
            return
        state.dead_before, state.dead_at = known, now
        letters = self._post.page(name, "dead", limit=DEAD_READ_MAX).messages if known[1] else []
        counted = Counter((letter.reason, letter.error_type or error_line(letter.error)) for letter in letters)
        state.reasons = [DeadReason(count, *key) for key, count in counted.most_common()]
        state.dead_read = len(letters)

    def lines(self) -> list[QueueLine]:
        """Return the figures of all queues, by name."""
        return [self._line(name, self._states[name]) for name in sorted(self._states)]

    def _line(self, name: str, state: QueueState) -> QueueLine:
        stats, ledger = state.stats, state.stats.ledger
        readers = stats.journal_readers.values()
        serving = self._serving(name)
        # Programs that use receive or consume are not registered; they wait on the queue, or hold leases of it.
        attended = stats.sleepers or ledger.leased or not list_unserved(self._workers, [name])
        return QueueLine(
            queue=name,
            paused=stats.paused,
            ready=ledger.ready,
            delayed=ledger.delayed,
            waiting=ledger.waiting,
            leased=ledger.leased,
            dead=ledger.dead_kept,
            done=ledger.done,
            oldest_ready_age=stats.oldest_ready_age,
            published_per_second=round(state.published_per_second, 2),
            done_per_second=round(state.done_per_second, 2),
            wait_time=median(state.waits),
            run_time=median(state.runs),
            workers=len(serving),
            red_workers=sum(worker.status == "red" for worker in serving),
            unserved=bool(ledger.ready or ledger.delayed) and not attended,
            trend=state.trend(),
            lag=stats.journal_last - min(readers) if readers else None,
        )

    def detail(self, name: str) -> QueueDetail | None:
        """Return what is known of one queue, None if there is no such queue."""
        state = self._states.get(name)
        if state is None:
            return None
        return QueueDetail(
            self._line(name, state), state.minutes, state.stats.at, state.reasons, state.dead_read,
            self._serving(name), list(state.errors)[::-1],
        )  # fmt: skip

    def _serving(self, name: str) -> list[RegisteredWorker]:
        return [worker for worker in self._workers if any(queue.name == name for queue in worker.queues)]

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
