"""Metrics for Prometheus: events of this process, state of its workers, and figures of the store at each scrape.

    prometheus = Prometheus()
    post = Waypost(url, middleware=[prometheus])        # counts events from now on
    prometheus.watch(post.store)                        # and reads the store at each scrape

Events are counted by `on_event` of a middleware, a few additions for each, and rendered at a scrape. The labels are
queue names and fixed values, never an id, a key or a text, so the number of series is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol
from weakref import WeakSet

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from waypost.middleware import Middleware
from waypost.see.counters import BUCKETS, QUEUES_MAX, Counters, Histogram, QueueCounters
from waypost.see.metrics import METRICS
from waypost.see.store_reader import Reading, StoreReader, journal_lag
from waypost.store.port import Store
from waypost.values import Health, HealthStatus, QueueHealth, StatsRecord, WorkerRecord
from waypost.views import Observed

STATES = ("ready", "delayed", "waiting", "leased")
ENDS = ("done", "dead", "dropped", "cancelled", "replaced")
HEALTH: dict[HealthStatus, int] = {"red": 0, "degraded": 1, "green": 2}
#: Metrics with one counter per queue: the name of the counter in `Counters`.
BY_QUEUE = {
    "waypost_claimed": "claimed",
    "waypost_claims_empty": "polled",
    "waypost_claims_failed": "claim_failed",
    "waypost_schedule_missed": "missed",
    "waypost_leases_expired": "leases_expired",
    "waypost_promoted": "promoted",
    "waypost_dead_trimmed": "dead_trimmed",
}
#: Metrics with one counter per queue and outcome.
BY_OUTCOME = {
    "waypost_published": "published",
    "waypost_handled": "handled",
    "waypost_settled": "settled",
    "waypost_leases_renewed": "renewed",
    "waypost_schedule_fires": "fired",
}


class WatchedWorker(Protocol):
    """The part of a worker that its metrics need."""

    @property
    def is_ready(self) -> bool: ...
    def health(self) -> Health: ...


class Prometheus(Middleware, Collector):
    """A middleware that counts, and a collector for a registry of prometheus_client.

    Without `registry` it makes its own; with `prometheus_client.REGISTRY` its metrics are exported with yours.
    `buckets` are the bounds of both histograms in seconds.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry | None = None,
        buckets: Sequence[float] = BUCKETS,
        queues_max: int = QUEUES_MAX,
    ) -> None:
        self._counters = Counters(buckets, queues_max)
        self._reader: StoreReader | None = None
        self._workers: WeakSet[WatchedWorker] = WeakSet()
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(self)

    def on_event(self, event: Observed) -> None:
        """Count one event."""
        self._counters.on_event(event)

    def watch(self, store: Store, queues: Iterable[str] | None = None) -> None:
        """Read this store at each scrape: these queues, or all of them."""
        self.close()
        self._reader = StoreReader(store, queues)

    def watch_worker(self, worker: WatchedWorker) -> None:
        """Export the state of this worker, too."""
        self._workers.add(worker)

    def forget_worker(self, worker: WatchedWorker) -> None:
        """Stop exporting the state of this worker."""
        self._workers.discard(worker)

    @property
    def watches(self) -> bool:
        """Whether a store is read at each scrape."""
        return self._reader is not None

    def close(self) -> None:
        """Close the connection that reads the store."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics of the registry as text in the format of an `Accept` header, and its content type."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is none
            encode, content_type = choose_encoder("")
        return encode(self.registry), content_type

    # ---- called by prometheus_client ---------------------------------------------------------------------

    def describe(self) -> Iterator[Family]:
        """Return the metrics without values; called at registration, so it does not read the store."""
        return iter(_Families().made())

    def collect(self) -> Iterator[Family]:
        """Return all metrics with their current values."""
        families = _Families()
        for queue, counters in self._counters.read().items():
            _add_counters(families, queue, counters, self._counters.buckets)
        _add_workers(families, list(self._workers))
        if self._reader is not None:
            reading = self._reader.read()
            families.add("waypost_store_up", (), 0 if reading is None else 1)
            if reading is not None:
                _add_reading(families, reading)
        return iter(families.made())


class _Families:
    """The metrics of one scrape, in the order of `METRICS`."""

    def __init__(self) -> None:
        self._made: dict[str, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily] = {}
        for metric in METRICS.values():
            match metric.kind:
                case "counter":
                    self._made[metric.name] = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
                case "gauge":
                    self._made[metric.name] = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
                case "histogram":
                    self._made[metric.name] = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)

    def add(self, name: str, labels: Sequence[str], value: float) -> None:
        family = self._made[name]
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, value)

    def add_histogram(self, name: str, queue: str, histogram: Histogram, bounds: Sequence[float]) -> None:
        family = self._made[name]
        assert isinstance(family, HistogramMetricFamily)
        bounds_text = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        buckets = [(bound, float(count)) for bound, count in zip(bounds_text, histogram.cumulative(), strict=True)]
        family.add_metric([queue], buckets, histogram.total)

    def made(self) -> list[Family]:
        return list(self._made.values())


def _add_counters(families: _Families, queue: str, counters: QueueCounters, bounds: Sequence[float]) -> None:
    counts = counters.counts
    for name, what in BY_QUEUE.items():
        if (what, "") in counts:
            families.add(name, (queue,), counts[what, ""])
    for name, what in BY_OUTCOME.items():
        for (counted, how), count in counts.items():
            if counted == what:
                families.add(name, (queue, how), count)
    if ("claimed", "") in counts:
        families.add("waypost_leases_lost", (queue,), counts.get(("settled", "lost"), 0))
        families.add_histogram("waypost_run_seconds", queue, counters.run, bounds)
        families.add_histogram("waypost_wait_seconds", queue, counters.wait, bounds)


def _add_workers(families: _Families, workers: Sequence[WatchedWorker]) -> None:
    """Add the workers of this process together: a series must not occur twice."""
    if not workers:
        return
    healths = [worker.health() for worker in workers]
    families.add("waypost_worker_health", (), min(HEALTH[health.status] for health in healths))
    families.add("waypost_worker_ready", (), int(all(worker.is_ready for worker in workers)))
    served: dict[str, list[QueueHealth]] = {}
    for health in healths:
        for queue in health.queues:
            served.setdefault(queue.name, []).append(queue)
    for name, queues in served.items():
        families.add("waypost_worker_concurrency", (name,), sum(queue.concurrency for queue in queues))
        families.add("waypost_worker_running", (name,), sum(queue.running for queue in queues))
        families.add("waypost_worker_in_flight", (name,), sum(queue.in_flight for queue in queues))
        ages = [queue.last_claim_age.total_seconds() for queue in queues if queue.last_claim_age is not None]
        if ages:
            families.add("waypost_worker_claim_age_seconds", (name,), max(ages))


def _add_reading(families: _Families, reading: Reading) -> None:
    families.add("waypost_store_queues_unread", (), reading.unread)
    for stats in reading.queues:
        _add_queue(families, stats, reading)
    for status in HEALTH:
        families.add("waypost_workers", (status,), sum(worker.status == status for worker in reading.workers))


def _add_queue(families: _Families, stats: StatsRecord, reading: Reading) -> None:
    ledger, queue = stats.ledger, (stats.queue,)
    for state in STATES:
        families.add("waypost_queue_messages", (stats.queue, state), getattr(ledger, state))
    families.add("waypost_queue_messages", (stats.queue, "dead"), ledger.dead_kept)
    # 0 for an empty queue, so that an alert can end.
    families.add("waypost_queue_oldest_ready_seconds", queue, (stats.oldest_ready_ms or 0) / 1000)
    families.add("waypost_queue_oldest_leased_seconds", queue, (stats.oldest_leased_ms or 0) / 1000)
    families.add("waypost_queue_timer_late_seconds", queue, reading.late_ms.get(stats.queue, 0) / 1000)
    families.add("waypost_queue_damaged", queue, stats.damaged)
    families.add("waypost_queue_paused", queue, int(stats.paused))
    families.add("waypost_queue_sleepers", queue, stats.sleepers)
    families.add("waypost_queue_workers", queue, sum(_serves(worker, stats.queue) for worker in reading.workers))
    families.add("waypost_queue_published", queue, ledger.published)
    families.add("waypost_queue_duplicates", queue, ledger.duplicates)
    families.add("waypost_queue_over_cap", queue, ledger.over_cap)
    for end in ENDS:
        families.add("waypost_queue_ended", (stats.queue, end), getattr(ledger, end))
    for cause, count in ledger.redelivered.items():
        families.add("waypost_queue_redelivered", (stats.queue, cause), count)
    families.add("waypost_queue_imbalance", queue, abs(ledger.balance) + abs(ledger.unexplained))
    families.add("waypost_journal_events", queue, max(0, stats.journal_last - stats.journal_first + 1))
    families.add("waypost_journal_lag_events", queue, journal_lag(stats))


def _serves(worker: WorkerRecord, queue: str) -> bool:
    return any(served.name == queue for served in worker.queues)
