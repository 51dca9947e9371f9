"""Every metric that is exported to Prometheus, with its kind, labels and help text."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Kind = Literal["counter", "gauge", "histogram"]


class Metric(Struct, frozen=True):
    """One metric. The exported name of a counter ends in `_total`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str

    @property
    def exported_name(self) -> str:
        """The name used in queries; for a histogram, append `_bucket`, `_sum` or `_count`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


QUEUE = ("queue",)

#: Events of this process.
PROCESS = (
    Metric("waypost_published", "counter", ("queue", "result"), "Publishes, by result."),
    Metric("waypost_claimed", "counter", QUEUE, "Messages claimed."),
    Metric("waypost_claims_empty", "counter", QUEUE, "Claims that found nothing."),
    Metric("waypost_claims_failed", "counter", QUEUE, "Claims that failed: the store did not reply, or refused."),
    Metric("waypost_handled", "counter", ("queue", "outcome"), "Handler calls that ended, by outcome."),
    Metric("waypost_settled", "counter", ("queue", "outcome"), "Deliveries and messages that ended, by outcome."),
    Metric("waypost_leases_expired", "counter", QUEUE, "Expired leases whose messages a claim made ready again."),
    Metric("waypost_promoted", "counter", QUEUE, "Messages that became ready: due, or no longer held back."),
    Metric("waypost_dead_trimmed", "counter", QUEUE, "Dead letters trimmed by dead_max or dead_keep."),
    Metric("waypost_leases_lost", "counter", QUEUE, "Deliveries whose lease was lost before they were settled."),
    Metric("waypost_leases_renewed", "counter", ("queue", "outcome"), "Leases renewed, by outcome."),
    Metric("waypost_run_seconds", "histogram", QUEUE, "How long handlers took."),
    Metric("waypost_wait_seconds", "histogram", QUEUE, "How long messages were ready before they were claimed."),
    Metric("waypost_schedule_fires", "counter", ("queue", "outcome"), "Messages published by schedules, by outcome."),
    Metric("waypost_schedule_missed", "counter", QUEUE, "Instants of schedules that were missed."),
)

#: State of the workers of this process.
WORKER = (
    Metric("waypost_worker_health", "gauge", (), "Its health: 2 green, 1 degraded, 0 red."),
    Metric("waypost_worker_ready", "gauge", (), "1 while it claims, 0 before that and after a request to stop."),
    Metric("waypost_worker_concurrency", "gauge", QUEUE, "Handler calls that may run at the same time."),
    Metric("waypost_worker_running", "gauge", QUEUE, "Handler calls that run now."),
    Metric("waypost_worker_in_flight", "gauge", QUEUE, "Messages claimed by this process and not settled yet."),
    Metric("waypost_worker_claim_age_seconds", "gauge", QUEUE, "Time since the store last replied to a claim."),
)

#: Figures of the store, the same from every process.
STORE = (
    Metric("waypost_store_up", "gauge", (), "1 if the store replied for this scrape."),
    Metric("waypost_store_queues_unread", "gauge", (), "Queues that were not read because there are too many."),
    Metric("waypost_queue_messages", "gauge", ("queue", "state"), "Messages, by state."),
    Metric("waypost_queue_oldest_ready_seconds", "gauge", QUEUE, "How long the oldest ready message has waited."),
    Metric("waypost_queue_oldest_leased_seconds", "gauge", QUEUE, "Age of the oldest lease."),
    Metric(
        "waypost_queue_timer_late_seconds", "gauge", QUEUE, "How late the oldest due timer is that is not ready yet."
    ),
    Metric("waypost_queue_damaged", "gauge", QUEUE, "Damaged records that were set aside: see `waypost doctor`."),
    Metric("waypost_queue_paused", "gauge", QUEUE, "1 if the queue is paused."),
    Metric("waypost_queue_sleepers", "gauge", QUEUE, "Sleeping workers that wait for a notification."),
    Metric("waypost_queue_workers", "gauge", QUEUE, "Workers that serve the queue."),
    Metric("waypost_queue_published", "counter", QUEUE, "Messages published to the queue."),
    Metric("waypost_queue_duplicates", "counter", QUEUE, "Publishes that were duplicates by their key."),
    Metric(
        "waypost_queue_over_cap", "counter", QUEUE, "Continuations and redriven messages accepted above `max_pending`."
    ),
    Metric("waypost_queue_ended", "counter", ("queue", "end"), "Messages that ended, by outcome."),
    Metric("waypost_queue_redelivered", "counter", ("queue", "cause"), "Deliveries after the first, by their cause."),
    Metric(
        "waypost_queue_imbalance",
        "gauge",
        QUEUE,
        "Messages and redeliveries that the ledger cannot explain; must be 0.",
    ),
    Metric("waypost_journal_events", "gauge", QUEUE, "Events that the journal keeps."),
    Metric("waypost_journal_lag_events", "gauge", QUEUE, "Events that the slowest reader has not read."),
    Metric("waypost_workers", "gauge", ("status",), "Workers known to the store, by their health."),
)

METRICS = {metric.name: metric for metric in (*PROCESS, *WORKER, *STORE)}
