"""What is counted, what is read from the store, and what never becomes a label."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from tests.see.service import Figures, figures, value
from tests.waiting import until
from waypost import Middleware, Observed, Retry, Waypost
from waypost.errors import ConfigurationError, QueueFull
from waypost.see import Prometheus
from waypost.see.counters import OTHERS, SETTLED, Counters, Histogram
from waypost.see.prometheus import WatchedWorker
from waypost.see.store_reader import StoreReader
from waypost.store.memory import MemoryStore
from waypost.testing.clock import ManualClock
from waypost.values import Health, QueueHealth

pytestmark = pytest.mark.promise("SEE-2")


def scraped(prometheus: Prometheus) -> Figures:
    return figures(prometheus.exposition()[0].decode())


def event(name: str, queue: str = "orders", **fields: Any) -> Observed:
    return Observed(name, fields.pop("outcome", "success"), queue, 0, "worker", **fields)


def test_every_result_of_a_publish_is_counted_separately() -> None:
    prometheus = Prometheus()
    with Waypost("memory://ways", middleware=[prometheus]) as post:
        post.publish("orders", 1, key="a")
        post.publish("orders", 1, key="a")
        post.publish("orders", 2, key="a", on_conflict="replace")
        post.publish("orders", 3, key="a", on_conflict="extend", delay=60)
        post.publish_many("orders", range(7), delay=60)
        post.configure("orders", max_pending=1, overload="raise")
        with pytest.raises(QueueFull):
            post.publish("orders", 5)
    found = scraped(prometheus)
    results = {
        dict(labels)["result"]: count for (name, labels), count in found.items() if name == "waypost_published_total"
    }
    assert results == {"queued": 1, "duplicate": 1, "replaced": 1, "extended": 1, "delayed": 7, "failure": 1}


def test_a_timer_that_is_not_due_is_never_late() -> None:
    """The timer that was due may have become ready after the queue was read."""
    with Waypost("memory://not-due") as post:
        post.publish("orders", 1, delay=3600)
        reader = StoreReader(post.store)
        executor = reader._connected()
        assert reader._late_ms(executor, executor.run(post.store.stats("orders"))) == 0
        reader.close()


def test_an_accept_header_without_a_readable_version_gets_the_plain_format() -> None:
    for kind in ("text/plain", "application/openmetrics-text"):
        assert Prometheus().exposition(f"{kind}; version=abc")[1].startswith("text/plain; version=0.0.4")


def test_a_cancel_of_a_message_without_a_lease_is_no_settle() -> None:
    prometheus = Prometheus()
    with Waypost("memory://cancels", middleware=[prometheus]) as post:
        published = post.publish("orders", 1)
        assert post.cancel("orders", id=published.id) == "cancelled"
        post.publish("orders", 2)
        with post.receive("orders", wait=0) as message:
            assert message is not None
    found = scraped(prometheus)
    assert value(found, "waypost_settled_total", queue="orders", outcome="done") == 1
    assert value(found, "waypost_settled_total", queue="orders", outcome="cancelled") is None


def test_side_effects_of_claims_and_publishes_are_counted() -> None:
    clock, prometheus = ManualClock(), Prometheus()
    with Waypost("memory://besides", middleware=[prometheus], clock=clock) as post:
        post.configure("orders", lease=1, max_deliveries=1, dead_max=1)
        post.publish_many("orders", range(3))
        for _ in range(3):
            assert post.receive("orders", wait=0, renew=False).__enter__() is not None
        post.publish_many("orders", range(300), delay=2)
        clock.advance(2)
        with post.receive("orders", wait=0) as message:
            assert message is not None
        post.configure("full", max_pending=2, overload="drop_oldest")
        for number in range(5):
            post.publish("full", number)
    found = scraped(prometheus)
    assert value(found, "waypost_settled_total", queue="orders", outcome="dead") == 3
    assert value(found, "waypost_settled_total", queue="orders", outcome="done") == 1
    assert value(found, "waypost_settled_total", queue="full", outcome="dropped") == 3
    assert value(found, "waypost_leases_expired_total", queue="orders") == 3
    # More than an answer names: the rest of them is counted.
    assert value(found, "waypost_promoted_total", queue="orders") == 300
    assert value(found, "waypost_dead_trimmed_total", queue="orders") == 2


def test_leases_that_are_lost_are_counted_where_they_were_lost() -> None:
    clock = ManualClock()
    prometheus = Prometheus()
    with Waypost("memory://losses", middleware=[prometheus], clock=clock) as post:
        prometheus.watch(post.store)
        post.configure("orders", lease=1)
        post.publish("orders", 1)
        with post.receive("orders", wait=0) as first:
            assert first is not None
            clock.advance(2)
            with post.receive("orders", wait=0) as second:
                assert second is not None
    found = scraped(prometheus)
    assert value(found, "waypost_leases_lost_total", queue="orders") == 1
    assert value(found, "waypost_settled_total", queue="orders", outcome="lost") == 1
    assert value(found, "waypost_queue_redelivered_total", queue="orders", cause="expired") == 1
    assert value(found, "waypost_queue_ended_total", queue="orders", end="done") == 1


def test_the_age_of_a_queue_is_exported_beside_its_length() -> None:
    clock = ManualClock()
    prometheus = Prometheus()
    with Waypost("memory://ages", clock=clock) as post:
        prometheus.watch(post.store)
        post.publish_many("orders", range(3))
        post.publish("timers", 1, delay=10)
        with post.receive("orders", wait=0) as message:
            assert message is not None
            clock.advance(40)
            post.pause("orders")
            found = scraped(prometheus)
        prometheus.close()
    assert value(found, "waypost_queue_messages", queue="orders", state="ready") == 2
    assert value(found, "waypost_queue_oldest_ready_seconds", queue="orders") == 40
    assert value(found, "waypost_queue_oldest_leased_seconds", queue="orders") == 40
    assert value(found, "waypost_queue_paused", queue="orders") == 1
    # No worker claims there, so the timer is not promoted.
    assert value(found, "waypost_queue_timer_late_seconds", queue="timers") == 30
    assert value(found, "waypost_queue_timer_late_seconds", queue="orders") == 0
    assert value(found, "waypost_queue_workers", queue="orders") == 0


def test_the_lag_of_a_journal_is_that_of_its_slowest_reader() -> None:
    prometheus = Prometheus()
    with Waypost("memory://lags") as post:
        prometheus.watch(post.store, ["orders"])
        post.publish_many("orders", range(10))
        post.journal_reader("orders", "lake", read_to=4)
        post.journal_reader("orders", "audit", read_to=9)
        post.publish("mails", 1)
        found = scraped(prometheus)
    assert value(found, "waypost_journal_lag_events", queue="orders") == 6
    assert value(found, "waypost_journal_events", queue="orders") == 10
    assert value(found, "waypost_journal_lag_events", queue="mails") is None


def test_the_number_of_queue_labels_is_bounded() -> None:
    prometheus = Prometheus(queues_max=3)
    with Waypost("memory://many", middleware=[prometheus]) as post:
        for number in range(10):
            post.publish(f"tenant-{number}", 1)
    found = scraped(prometheus)
    queues = {dict(labels)["queue"]: count for (name, labels), count in found.items() if "published" in name}
    assert queues == {"tenant-0": 1, "tenant-1": 1, "tenant-2": 1, OTHERS: 7}


def test_no_id_no_key_and_no_text_becomes_a_label() -> None:
    prometheus = Prometheus()
    with Waypost("memory://texts", middleware=[prometheus]) as post:

        @post.handler("orders")
        def charge(body: str) -> None:
            raise Retry(0, reason="a-reason-of-mine")

        published = post.publish("orders", "a-body", key="a-key", group="a-group", headers={"a-header": "x"})
        with post.worker():
            until(
                lambda: (
                    (value(scraped(prometheus), "waypost_handled_total", queue="orders", outcome="skipped") or 0) > 1
                )
            )
    text = prometheus.exposition()[0].decode()
    assert not [
        text_part
        for text_part in ("a-reason", "a-body", "a-key", "a-group", "a-header", published.id)
        if text_part in text
    ]


def test_its_metrics_can_be_in_the_callers_registry() -> None:
    registry = CollectorRegistry()
    Counter("mine", "Of my own.", registry=registry).inc()
    prometheus = Prometheus(registry=registry)
    with Waypost("memory://registry") as post:
        post.use(prometheus)
        post.publish("orders", 1)
    found = figures(generate_latest(registry).decode())
    assert value(found, "mine_total") == 1
    assert value(found, "waypost_published_total", queue="orders", result="queued") == 1


def test_two_workers_of_a_process_are_summed() -> None:
    class Standing(WatchedWorker):
        def __init__(self, status: Any, age: float | None) -> None:
            claimed = None if age is None else timedelta(seconds=age)
            self._health = Health(status, [], [QueueHealth("orders", 4, 1, 2, 9, claimed)])

        @property
        def is_ready(self) -> bool:
            return self._health.status == "green"

        def health(self) -> Health:
            return self._health

    prometheus = Prometheus()
    workers = [Standing("green", 1.5), Standing("degraded", None)]
    for worker in workers:
        prometheus.watch_worker(worker)
    found = scraped(prometheus)
    assert value(found, "waypost_worker_health") == 1
    assert value(found, "waypost_worker_ready") == 0
    assert value(found, "waypost_worker_concurrency", queue="orders") == 8
    assert value(found, "waypost_worker_in_flight", queue="orders") == 4
    assert value(found, "waypost_worker_claim_age_seconds", queue="orders") == 1.5


def test_fires_and_misses_of_schedules_are_counted() -> None:
    counters = Counters()
    counters.on_event(event("fired", count=2, missed=3))
    counters.on_event(event("fired", outcome="failure"))
    counters.on_event(event("scheduler_tick", "", count=2))
    counters.on_event(event("renewed", count=5))
    counters.on_event(event("claim", outcome="unknown"))
    counters.on_event(event("polled", outcome="skipped"))
    read = counters.read()
    assert list(read) == ["orders"]
    assert read["orders"].counts == {
        ("fired", "success"): 2, ("missed", ""): 3, ("fired", "failure"): 1, ("renewed", "success"): 5,
        ("claim_failed", ""): 1, ("polled", ""): 1,
    }  # fmt: skip


def test_durations_fall_into_the_bucket_that_they_do_not_exceed() -> None:
    counters = Counters(buckets=(0.1, 1, 10))
    for wait_ms in (100, 101, 1000, 999_999):
        counters.on_event(event("claimed", _wait_ms=wait_ms))
    wait = counters.read()["orders"].wait
    assert wait.counts == [1, 2, 0, 1]
    assert wait.cumulative() == [1, 3, 3, 4]
    assert Histogram([]).cumulative() == []
    for wrong in ((), (1, 1), (2, 1), (0, 1)):
        with pytest.raises(ConfigurationError, match="buckets are seconds"):
            Prometheus(buckets=wrong)


def test_every_end_reported_with_a_token_is_a_settle() -> None:
    prometheus = Prometheus()
    for name in SETTLED:
        prometheus.on_event(event(name, token=1))
    found = scraped(prometheus)
    assert {dict(labels)["outcome"] for name, labels in found if name == "waypost_settled_total"} == SETTLED


def test_a_store_that_hangs_delays_scrapes_briefly_and_is_read_once() -> None:
    store = MemoryStore()
    requested: list[int] = []
    release = threading.Event()

    class Hanging(StoreReader):
        def _read(self) -> Any:
            requested.append(1)
            release.wait(60)
            return super()._read()

    reader = Hanging(store, wait_seconds=0.05)
    assert reader.read() is None
    assert reader.read() is None
    assert len(requested) == 1
    release.set()
    assert until(reader.read).queues == []
    reader.close()


def test_middleware_receives_events_beside_the_clients_own_hook_and_a_failing_one_harms_no_other() -> None:
    seen: list[tuple[str, str]] = []

    class Broken(Middleware):
        def on_event(self, event: Observed) -> None:
            raise RuntimeError("of its own")

    class Recording(Middleware):
        def on_event(self, event: Observed) -> None:
            seen.append(("middleware", event.event))

    with Waypost(
        "memory://seen", on_event=lambda event: seen.append(("hook", event.event)), middleware=[Broken(), Recording()]
    ) as post:
        post.publish("orders", 1)
    assert seen == [("hook", "published"), ("middleware", "published")]


def test_middleware_that_is_added_later_wraps_existing_handlers() -> None:
    order: list[str] = []

    class Around(Middleware):
        def __init__(self, name: str) -> None:
            self.name = name

        def handle(self, messages: Any, call_next: Any) -> Any:
            order.append(self.name)
            return call_next()

    with Waypost("memory://later", middleware=[Around("first")]) as post:

        @post.handler("orders")
        def charge(body: int) -> None:
            order.append("handler")

        post.use(Around("second"))
        assert [getattr(one, "name", None) for one in post.middleware] == ["first", "second"]
        post.publish("orders", 1)
        post.worker().run(until_empty=True, signals=False)

        class Awaited(Middleware):
            async def handle_async(self, messages: Any, call_next: Any) -> Any:
                return await call_next()

        with pytest.raises(ConfigurationError, match="it would be skipped"):
            post.use(Awaited())
        assert len(post.middleware) == 2
    assert order == ["first", "second", "handler"]
