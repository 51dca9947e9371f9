"""Metrics for OpenTelemetry: the same events and store figures as for Prometheus, as instruments.

post = Waypost(url, middleware=[metrics := OpenTelemetryMetrics()])
metrics.watch(post.store)                       # gauges of the queues, read at each collection
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from waypost.middleware import Middleware
from waypost.release import VERSION
from waypost.see.counters import BUCKETS, QUEUES_MAX, SETTLED, SIDE_EFFECTS, QueueLabels, is_settled
from waypost.see.store_reader import Reading, StoreReader, journal_lag
from waypost.store.port import Store
from waypost.views import Observed

if TYPE_CHECKING:
    from waypost.values import StatsRecord

STATES = ("ready", "delayed", "waiting", "leased")
QUEUE = "messaging.destination.name"


class OpenTelemetryMetrics(Middleware):
    """A middleware that records with `meter_provider`, by default the global one."""

    def __init__(self, meter_provider: MeterProvider | None = None, *, queues_max: int = QUEUES_MAX) -> None:
        self._meter = meter = metrics.get_meter("waypost", VERSION, meter_provider)
        self._names = QueueLabels(queues_max)
        self._readers: list[StoreReader] = []
        self._published = meter.create_counter("waypost.published", "{message}", "Messages published.")
        self._claimed = meter.create_counter("waypost.claimed", "{message}", "Messages claimed.")
        self._settled = meter.create_counter(
            "waypost.settled", "{message}", "Deliveries and messages that ended, by outcome."
        )
        self._side_effects = {
            name: meter.create_counter(f"waypost.{counted.replace('_', '.', 1)}", "{message}", help_text)
            for name, counted, help_text in (
                ("expired", SIDE_EFFECTS["expired"], "Expired leases whose messages a claim made ready again."),
                (
                    "promoted",
                    SIDE_EFFECTS["promoted"],
                    "Messages that became ready: due, or no longer held back.",
                ),
                ("dead_trimmed", SIDE_EFFECTS["dead_trimmed"], "Dead letters trimmed by dead_max or dead_keep."),
            )
        }
        self._failed = meter.create_counter("waypost.claims.failed", "{claim}", "Claims that failed.")
        self._run = meter.create_histogram(
            "messaging.process.duration", "s", "How long handlers took.", explicit_bucket_boundaries_advisory=BUCKETS
        )
        self._wait = meter.create_histogram(
            "waypost.wait.duration", "s", "How long messages were ready before they were claimed.",
            explicit_bucket_boundaries_advisory=BUCKETS,
        )  # fmt: skip

    def on_event(self, event: Observed) -> None:
        """Record one event."""
        name = event.event
        if name == "claimed":
            where = {QUEUE: self._names.label(event.queue)}
            self._claimed.add(1, where)
            if event._wait_ms is not None:
                self._wait.record(event._wait_ms / 1000, where)
        elif name == "handled":
            if event._run_ms is not None:
                where = {QUEUE: self._names.label(event.queue)}
                self._run.record(event._run_ms / 1000, where)
        elif name in SETTLED:
            if is_settled(event):
                self._settled.add(event.count or 1, {QUEUE: self._names.label(event.queue), "waypost.outcome": name})
        elif name in self._side_effects:
            self._side_effects[name].add(event.count or 1, {QUEUE: self._names.label(event.queue)})
        elif name == "published" and event.outcome == "success":
            self._published.add(1, {QUEUE: self._names.label(event.queue)})
        elif name == "claim":
            self._failed.add(1, {QUEUE: self._names.label(event.queue)})

    def watch(self, store: Store, queues: Iterable[str] | None = None) -> None:
        """Read this store whenever gauges are collected: these queues, or all of them."""
        reader = StoreReader(store, queues)
        self._readers.append(reader)
        meter = self._meter
        for name, unit, help_text, observe in _GAUGES:
            meter.create_observable_gauge(name, [_Collect(reader, observe)], unit, help_text)

    def close(self) -> None:
        """Close the connections that read the stores."""
        for reader in self._readers:
            reader.close()


def _messages(reading: Reading) -> list[Observation]:
    found = []
    for stats in reading.queues:
        for state in STATES:
            found.append(Observation(getattr(stats.ledger, state), {QUEUE: stats.queue, "waypost.state": state}))
        found.append(Observation(stats.ledger.dead_kept, {QUEUE: stats.queue, "waypost.state": "dead"}))
    return found


def _per_queue(figure: Callable[[StatsRecord], float]) -> Callable[[Reading], list[Observation]]:
    return lambda reading: [Observation(figure(stats), {QUEUE: stats.queue}) for stats in reading.queues]


_GAUGES: tuple[tuple[str, str, str, Callable[[Reading], list[Observation]]], ...] = (
    ("waypost.queue.messages", "{message}", "Messages, by state.", _messages),
    ("waypost.queue.oldest_ready", "s", "How long the oldest ready message has waited.",
     _per_queue(lambda stats: (stats.oldest_ready_ms or 0) / 1000)),
    ("waypost.journal.lag", "{event}", "Events that the slowest reader has not read.", _per_queue(journal_lag)),
)  # fmt: skip


class _Collect:
    """The callback of one gauge. The SDK calls all of them within moments, so they share one reading."""

    def __init__(self, reader: StoreReader, observe: Callable[[Reading], list[Observation]]) -> None:
        self._reader = reader
        self._observe = observe

    def __call__(self, options: CallbackOptions) -> list[Observation]:
        reading = self._reader.read()
        return [] if reading is None else self._observe(reading)
