"""Every metric that is exported for Prometheus: its kind, its labels, and what it says. The one list of them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Kind = Literal["counter", "gauge", "histogram"]


class Metric(Struct, frozen=True):
    """One metric. A counter's name is shown with `_total` behind it."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str

    @property
    def exported_name(self) -> str:
        """The name as it is written in a query; a histogram's has `_bucket`, `_sum` or `_count` behind it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


QUEUE = ("queue",)

#: What this process did.
PROCESS = (
    Metric("waypost_published", "counter", ("queue", "result"), "Publishes, by what came of them."),
    Metric("waypost_claimed", "counter", QUEUE, "Messages claimed."),
    Metric("waypost_claims_empty", "counter", QUEUE, "Claims that found nothing."),
    Metric("waypost_claims_failed", "counter", QUEUE, "Claims that the store did not answer, or refused."),
    Metric("waypost_handled", "counter", ("queue", "outcome"), "Handler calls that ended, by how."),
    Metric("waypost_settled", "counter", ("queue", "outcome"), "Deliveries and messages that ended, by how."),
    Metric("waypost_leases_expired", "counter", QUEUE, "Leases that had ended when a claim took their messages back."),
    Metric("waypost_promoted", "counter", QUEUE, "Messages that became ready when they were due or free."),
    Metric("waypost_dead_trimmed", "counter", QUEUE, "Dead letters let go for dead_max or dead_keep."),
    Metric("waypost_leases_lost", "counter", QUEUE, "Deliveries whose lease was lost before they were settled."),
    Metric("waypost_leases_renewed", "counter", ("queue", "outcome"), "Leases renewed, by how that went."),
    Metric("waypost_run_seconds", "histogram", QUEUE, "How long handlers took."),
    Metric("waypost_wait_seconds", "histogram", QUEUE, "How long messages were ready before they were claimed."),
    Metric("waypost_schedule_fires", "counter", ("queue", "outcome"), "Messages published by schedules, by how."),
    Metric("waypost_schedule_missed", "counter", QUEUE, "Instants of schedules that were missed."),
)

#: How the workers of this process stand.
WORKER = (
    Metric("waypost_worker_health", "gauge", (), "Its health: 2 green, 1 degraded, 0 red."),
    Metric("waypost_worker_ready", "gauge", (), "1 if it claims, 0 before it does and once it was asked to stop."),
    Metric("waypost_worker_concurrency", "gauge", QUEUE, "Handler calls that may run at once."),
    Metric("waypost_worker_running", "gauge", QUEUE, "Handler calls under way."),
    Metric("waypost_worker_in_flight", "gauge", QUEUE, "Messages claimed here and not settled yet."),
    Metric("waypost_worker_claim_age_seconds", "gauge", QUEUE, "How long ago the store answered a claim."),
)

#: What the store says, the same whoever asks it.
STORE = (
    Metric("waypost_store_up", "gauge", (), "1 if the store answered when it was read for this scrape."),
    Metric("waypost_store_queues_unread", "gauge", (), "Queues left out because there are too many."),
    Metric("waypost_queue_messages", "gauge", ("queue", "state"), "Messages, by where they are."),
    Metric("waypost_queue_oldest_ready_seconds", "gauge", QUEUE, "How long the oldest ready message has waited."),
    Metric("waypost_queue_oldest_leased_seconds", "gauge", QUEUE, "How long ago the oldest lease was taken."),
    Metric("waypost_queue_timer_late_seconds", "gauge", QUEUE, "How late the oldest timer is that nobody made ready."),
    Metric("waypost_queue_damaged", "gauge", QUEUE, "Damaged records that were set aside: see `waypost doctor`."),
    Metric("waypost_queue_paused", "gauge", QUEUE, "1 if the queue is paused."),
    Metric("waypost_queue_sleepers", "gauge", QUEUE, "Workers that wait to be woken."),
    Metric("waypost_queue_workers", "gauge", QUEUE, "Workers that serve the queue."),
    Metric("waypost_queue_published", "counter", QUEUE, "Messages that the queue took in."),
    Metric("waypost_queue_duplicates", "counter", QUEUE, "Publishes that were duplicates by their key."),
    Metric(
        "waypost_queue_over_cap", "counter", QUEUE, "Messages sent on or redriven into a queue at its `max_pending`."
    ),
    Metric("waypost_queue_ended", "counter", ("queue", "end"), "Messages that ended, by how."),
    Metric("waypost_queue_redelivered", "counter", ("queue", "cause"), "Deliveries after the first, by their cause."),
    Metric("waypost_queue_imbalance", "gauge", QUEUE, "Messages and redeliveries the ledger cannot explain: 0."),
    Metric("waypost_journal_events", "gauge", QUEUE, "Events that the journal keeps."),
    Metric("waypost_journal_lag_events", "gauge", QUEUE, "Events that the slowest reader has not read."),
    Metric("waypost_workers", "gauge", ("status",), "Workers known to the store, by their health."),
)

METRICS = {metric.name: metric for metric in (*PROCESS, *WORKER, *STORE)}
