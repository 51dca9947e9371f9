"""Counts events of this process by queue, and how long waits and handlers took.

The only labels are queue names and fixed values, never an id, a key, a group or the text of an error, so the number of
series is bounded by the number of queues.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence

from waypost.errors import ConfigurationError
from waypost.views import Observed

#: Upper bounds in seconds. Handlers take milliseconds to an hour; messages of a stopped queue wait for days.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
#: Queues with a label of their own; events of any further queue count for `OTHERS`. Otherwise a program that generates
#: queue names would fill the memory of the collector.
QUEUES_MAX = 200
#: Not a valid queue name.
OTHERS = "(others)"
#: The events that end a delivery, or a message that a claim buries or a publish drops.
SETTLED = frozenset(
    ("done", "retried", "snoozed", "dead", "dropped", "released", "cancelled", "replaced", "lost", "unsettled")
)
#: Side effects of steps: the event, and the counter.
SIDE_EFFECTS = {"expired": "leases_expired", "promoted": "promoted", "dead_trimmed": "dead_trimmed"}
#: The result of a publish, by the `reason` of its event.
_RESULTS = {None: "queued", "delayed": "delayed", "replaced": "replaced", "triggered": "triggered"}


def is_settled(event: Observed) -> bool:
    """Whether the event ends a delivery or is a side effect: a cancel of a message without a lease is neither."""
    return event.token is not None or event.count is not None


class QueueLabels:
    """The label of each queue: its name for the first `most` queues, then `OTHERS`."""

    __slots__ = ("_known", "_most")

    def __init__(self, most: int = QUEUES_MAX) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, queue: str) -> str:
        """Return the label of a queue."""
        known = self._known
        if queue in known:
            return queue
        if len(known) >= self._most:
            return OTHERS
        known.add(queue)
        return queue


class Histogram:
    """Durations counted by bucket."""

    __slots__ = ("counts", "total")

    def __init__(self, counts: list[int], total: float = 0.0) -> None:
        #: One count per bucket, and the last for longer durations.
        self.counts = counts
        self.total = total

    def cumulative(self) -> list[int]:
        """Return how many durations are at most each bound, and the total."""
        running, sums = 0, []
        for count in self.counts:
            running += count
            sums.append(running)
        return sums


class QueueCounters:
    """The counts of one queue."""

    __slots__ = ("counts", "run", "wait")

    def __init__(self, buckets: int) -> None:
        #: By counter and outcome: `("settled", "done")`.
        self.counts: dict[tuple[str, str], int] = {}
        self.run = Histogram([0] * (buckets + 1))
        self.wait = Histogram([0] * (buckets + 1))

    def copy(self) -> QueueCounters:
        """Return a copy that no thread changes."""
        other = QueueCounters(0)
        other.counts = dict(self.counts)
        other.run = Histogram(list(self.run.counts), self.run.total)
        other.wait = Histogram(list(self.wait.counts), self.wait.total)
        return other


def check_buckets(buckets: Sequence[float]) -> tuple[float, ...]:
    """Return the bounds of buckets as floats, or raise `ConfigurationError`."""
    bounds = tuple(float(bound) for bound in buckets)
    if not bounds or list(bounds) != sorted(set(bounds)) or bounds[0] <= 0:
        raise ConfigurationError(f"buckets are seconds in ascending order, all above 0, not {buckets!r}")
    return bounds


class Counters:
    """Counts the events of all queues. Thread-safe."""

    def __init__(self, buckets: Sequence[float] = BUCKETS, queues_max: int = QUEUES_MAX) -> None:
        self.buckets = check_buckets(buckets)
        self._names = QueueLabels(queues_max)
        self._queues: dict[str, QueueCounters] = {}
        self._lock = threading.Lock()

    def on_event(self, event: Observed) -> None:
        """Count one event."""
        with self._lock:
            counters = self._queues.get(event.queue)
            if counters is None:
                counters = self._of(event.queue)
            name = event.event
            # The three events of every message come first.
            if name == "claimed":
                self._add(counters, "claimed", "")
                if event._wait_ms is not None:
                    self._observe(counters.wait, event._wait_ms / 1000)
            elif name == "handled":
                self._add(counters, "handled", event.outcome)
                if event._run_ms is not None:
                    self._observe(counters.run, event._run_ms / 1000)
            elif name in SETTLED:
                if is_settled(event):
                    self._add(counters, "settled", name, event.count or 1)
            else:
                self._count_others(counters, event)

    def _count_others(self, counters: QueueCounters, event: Observed) -> None:
        match event.event:
            case "published" if event.outcome == "success":
                self._add(counters, "published", _RESULTS.get(event.reason, "queued"))
            case "published":
                self._add(counters, "published", event.outcome, event.count or 1)
            case "duplicate" | "postponed":
                self._add(counters, "published", "duplicate" if event.event == "duplicate" else "extended")
            case "polled":
                self._add(counters, "polled", "")
            case "expired" | "promoted" | "dead_trimmed":
                self._add(counters, SIDE_EFFECTS[event.event], "", event.count or 1)
            case "claim":
                self._add(counters, "claim_failed", "")
            case "renewed":
                self._add(counters, "renewed", event.outcome, event.count or 0)
            case "fired":
                self._add(counters, "fired", event.outcome, event.count or (0 if event.outcome == "success" else 1))
                self._add(counters, "missed", "", event.missed or 0)

    @staticmethod
    def _add(counters: QueueCounters, what: str, how: str, count: int = 1) -> None:
        counts, name = counters.counts, (what, how)
        counts[name] = counts.get(name, 0) + count

    def _observe(self, histogram: Histogram, seconds: float) -> None:
        histogram.counts[bisect_left(self.buckets, seconds)] += 1
        histogram.total += seconds

    def _of(self, queue: str) -> QueueCounters:
        name = self._names.label(queue)
        counters = self._queues.get(name)
        if counters is None:
            counters = self._queues[name] = QueueCounters(len(self.buckets))
        return counters

    def read(self) -> dict[str, QueueCounters]:
        """Return a copy of the counts, by queue."""
        with self._lock:
            # Ticks of schedulers and promoters belong to no queue.
            return {queue: counters.copy() for queue, counters in self._queues.items() if queue}
