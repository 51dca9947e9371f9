"""One handler for several queues, several handlers for one queue, and a bound on all handlers of a worker."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost import Message, Queue, Waypost
from waypost.errors import ConfigurationError
from waypost.operations import receive
from waypost.testing import TestPost
from waypost.worker.consumer import Consumer
from waypost.worker.sharing import SharingConsumer

pytestmark = pytest.mark.promise("QUEUE-9")
#: For what only the worker decides, whatever the store.
ON_MEMORY = pytest.mark.parametrize("url", ["memory://sharing"])


@dataclass
class Placed:
    id: int


@dataclass
class Cancelled:
    id: int


@dataclass
class Other:
    id: int


class Overlap:
    """Counts calls that run at the same time, and lets each wait for others to begin."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)

    def __exit__(self, *ended: object) -> None:
        with self.lock:
            self.running -= 1


def kept_messages(harness: Harness, queue: str) -> dict[str, Any]:
    """Return the messages that can still be claimed."""
    return {one.id: one for state in ("ready", "delayed") for one in harness.messages(queue, state)}


def seen_so_many(seen: list[str], number: int) -> bool:
    """Return whether so many messages were handled."""
    return len(seen) == number


# ---- several queues --------------------------------------------------------------------------------------


def test_queues_of_one_handler_share_its_concurrency(harness: Harness) -> None:
    overlap, seen = Overlap(), Counter[str]()

    @harness.handler(["a", "b", "c"], concurrency=2)
    async def handle(message: Message[int]) -> None:
        with overlap:
            await asyncio.sleep(0.002)
            seen[message.queue] += 1

    for queue in ("a", "b", "c"):
        harness.publish_many(queue, range(8))
    assert harness.run().handled == 24
    assert seen == {"a": 8, "b": 8, "c": 8}
    assert overlap.most == 2


def test_claims_follow_the_weights_of_the_queues(harness: Harness) -> None:
    order: list[str] = []

    @harness.handler({"often": 3, "seldom": 1}, concurrency=1)
    def handle(message: Message[int]) -> None:
        order.append(message.queue)

    harness.publish_many("often", range(40))
    harness.publish_many("seldom", range(40))
    harness.run()
    assert Counter(order) == {"often": 40, "seldom": 40}
    # While both had work: one of four, but for the first claims, which begin before the other queue waits.
    assert 8 <= order[:40].count("seldom") <= 12


@ON_MEMORY
def test_batches_of_several_queues_stay_within_the_concurrency(harness: Harness) -> None:
    overlap, seen = Overlap(), Counter[int]()

    @harness.handler(["a", "b"], batch=5, concurrency=2)
    async def handle(numbers: list[int]) -> None:
        with overlap:
            await asyncio.sleep(0.002)
            seen.update(numbers)

    harness.publish_many("a", range(17))
    harness.publish_many("b", range(100, 117))
    harness.run()
    assert sum(seen.values()) == len(seen) == 34
    assert overlap.most <= 2


def test_a_worker_bounds_its_handlers_over_all_queues(harness: Harness) -> None:
    overlap, seen = Overlap(), Counter[str]()
    begun = threading.Semaphore(0)
    go_on = threading.Event()

    def handle(message: Message[int]) -> None:
        with overlap:
            seen[message.queue] += 1
            begun.release()
            go_on.wait(60)

    for queue in ("a", "b", "c"):
        harness.handler(queue)(handle)
        harness.publish_many(queue, range(6))
    with harness.working(max_handlers=2) as worker:
        assert begun.acquire(timeout=60)
        assert begun.acquire(timeout=60)
        go_on.set()
        until(lambda: sum(seen.values()) == 18 and not worker.report().running)
    assert seen == {"a": 6, "b": 6, "c": 6}
    assert overlap.most == 2


@ON_MEMORY
def test_work_that_comes_later_gets_its_turn(harness: Harness) -> None:
    seen: list[str] = []

    @harness.handler(["first", "second"], concurrency=1)
    async def handle(message: Message[int]) -> None:
        seen.append(message.queue)

    with harness.working():
        for number, queue in enumerate(("first", "second", "first"), 1):
            harness.publish(queue, 1)
            until(partial(seen_so_many, seen, number))
    assert seen == ["first", "second", "first"]


# ---- several handlers ------------------------------------------------------------------------------------


def test_the_type_of_a_message_chooses_its_handler(harness: Harness) -> None:
    seen: list[Any] = []

    @harness.handler("events", types=Placed)
    async def placed(event: Placed) -> None:
        seen.append(("placed", event))

    @harness.handler("events", types=[Cancelled, "shop.Refunded"], batch=3)
    def cancelled(events: list[Cancelled]) -> None:
        seen.extend(("cancelled", event) for event in events)

    @harness.handler("events")
    async def rest(body: Any) -> None:
        seen.append(("rest", body))

    for body in (Placed(1), Cancelled(2), Placed(3), {"id": 4}, Other(5), "six"):
        harness.publish("events", body)
    report = harness.run()
    assert (report.done, report.dead) == (6, 0)
    assert sorted(seen, key=str) == sorted(
        [
            ("placed", Placed(1)), ("cancelled", Cancelled(2)), ("placed", Placed(3)), ("rest", {"id": 4}),
            ("rest", {"id": 5}), ("rest", "six"),
        ],
        key=str,
    )  # fmt: skip


def test_a_type_that_no_handler_takes_is_left_for_other_workers(
    harness: Harness, url: str, namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "OTHER_WORKER_SNOOZE_MS", 20)
    seen: list[Any] = []

    @harness.handler("events", types=Placed)
    async def placed(event: Placed) -> None:
        seen.append(event)

    left = [harness.publish("events", Cancelled(number)).id for number in (1, 2)]
    harness.publish("events", Placed(3))
    with caplog.at_level(logging.WARNING, logger="waypost"), harness.working():
        until(lambda: seen == [Placed(3)])
        # Several times, so that a delivery that it cost would be seen.
        until(lambda: harness.ledger("events").claims > 6)
    warnings = [record for record in caplog.records if getattr(record, "event", None) == "type_not_handled"]
    assert len(warnings) == 1
    assert "takes messages of type " in warnings[0].getMessage()
    kept = kept_messages(harness, "events")
    assert [(kept[one].deliveries, kept[one].attempts) for one in left] == [(0, 0), (0, 0)]

    other = Waypost(url, namespace=namespace)

    @other.handler("events", types=["tests.worker.test_sharing.Cancelled"])
    def cancelled(event: Cancelled, message: Message[Cancelled]) -> None:
        seen.append((event, message.deliveries))

    with other, other.worker():
        until(lambda: len(seen) == 3)
    assert {event.id for event, deliveries in seen[1:] if deliveries == 1} == {1, 2}


@ON_MEMORY
def test_a_handler_without_room_does_not_stop_those_of_other_types(harness: Harness) -> None:
    go_on, seen = threading.Event(), Counter[str]()

    @harness.handler("events", types=Placed, concurrency=1)
    def slow(event: Placed) -> None:
        seen["slow"] += 1
        go_on.wait(60)

    @harness.handler("events", types=Cancelled, concurrency=3)
    async def fast(event: Cancelled) -> None:
        seen["fast"] += 1

    for number in range(3):
        harness.publish("events", Placed(number))
    for number in range(20):
        harness.publish("events", Cancelled(number))
    with harness.working(timeout=60) as worker:
        until(lambda: seen == {"slow": 1, "fast": 20})
        (queue,) = worker.health().queues
        assert (queue.name, queue.concurrency, queue.running) == ("events", 4, 1)
        go_on.set()
        until(lambda: seen["slow"] == 3)
    assert harness.ledger("events").done == 23


def test_a_stop_releases_what_waits_for_a_handler_of_its_type(harness: Harness) -> None:
    begun, go_on = threading.Event(), threading.Event()

    @harness.handler("events", types=Placed, concurrency=1)
    def slow(event: Placed) -> None:
        begun.set()
        go_on.wait(60)

    @harness.handler("events", types=Cancelled, concurrency=5)
    async def fast(event: Cancelled) -> None: ...

    first = harness.publish("events", Placed(0)).id
    harness.publish_many("events", [Placed(number) for number in range(1, 4)])
    worker = harness.post.worker()
    harness.done(worker.start())
    assert begun.wait(60)
    until(lambda: worker.health().queues[0].in_flight == 4)
    worker.quiet()
    until(lambda: not worker.is_ready)
    go_on.set()
    harness.done(worker.stop(60))
    kept = kept_messages(harness, "events")
    assert first not in kept
    assert {one.deliveries for one in kept.values()} <= {0}
    assert harness.ledger("events").done + len(kept) == 4


@ON_MEMORY
def test_types_and_several_queues_go_together(harness: Harness) -> None:
    overlap, seen = Overlap(), Counter[tuple[str, str]]()

    @harness.handler({"a": 2, "b": 1}, types=Placed, concurrency=2)
    async def placed(event: Placed, message: Message[Placed]) -> None:
        with overlap:
            await asyncio.sleep(0.001)
            seen["placed", message.queue] += 1

    @harness.handler(["a", "b"])
    def rest(message: Message[Any]) -> None:
        seen["rest", message.queue] += 1

    for queue in ("a", "b"):
        harness.publish_many(queue, [Placed(number) for number in range(6)])
        harness.publish_many(queue, range(6))
    harness.run()
    assert seen == {("placed", "a"): 6, ("placed", "b"): 6, ("rest", "a"): 6, ("rest", "b"): 6}
    assert overlap.most <= 2


# ---- one store -------------------------------------------------------------------------------------------


def test_a_queue_that_shares_nothing_has_a_plain_consumer() -> None:
    post = Waypost("memory://")

    @post.handler("alone")
    def alone(body: object) -> None: ...

    @post.handler(["a", "b"])
    def both(body: object) -> None: ...

    with post, post.worker() as worker:
        kinds = {consumer.queue: type(consumer) for consumer in worker._worker._consumers}
    assert kinds == {"alone": Consumer, "a": SharingConsumer, "b": SharingConsumer}
    with post, post.worker(["alone", "a"]) as worker:
        assert {type(consumer) for consumer in worker._worker._consumers} == {Consumer}


def test_a_queue_without_leases_needs_a_handler_for_all_other_types() -> None:
    with Waypost("memory://") as post:
        post.configure("events", lease=None)

        @post.handler("events", types=Placed)
        def placed(event: Placed) -> None: ...

        with pytest.raises(ConfigurationError, match=r"would be lost\. Register a handler without types="):
            post.worker().run(until_empty=True)


@pytest.mark.parametrize(
    ("queue", "options", "error"),
    [
        ([], {}, "needs one queue or more"),
        (["a", "a"], {}, "is listed twice"),
        ({"a": 0}, {}, "the weight of a queue"),
        ({"a": 1.5}, {}, "the weight of a queue"),
        ([Queue("a", int), "a"], {}, "each once"),
        ("a", {"types": dict}, "other bodies have no type name"),
        ("a", {"types": []}, "types= is empty"),
        ("a", {"types": 7}, "types must be a list"),
        ("a", {"types": [""]}, "types= takes"),
    ],
)
def test_wrong_queues_and_types_are_refused(queue: Any, options: Any, error: str) -> None:
    post = Waypost("memory://")
    with pytest.raises(ConfigurationError, match=error):
        post.handler(queue, **options)(lambda body: None)
    assert not post.handlers


def test_handlers_that_would_take_the_same_message_are_refused() -> None:
    post = Waypost("memory://")

    @post.handler("a", types=Placed)
    def placed(event: Placed) -> None: ...

    @post.handler("a")
    def rest(body: object) -> None: ...

    with pytest.raises(ConfigurationError, match=r"both take messages of type .*Placed"):
        post.handler(["b", "a"], types=[Placed, Cancelled])(placed)
    with pytest.raises(ConfigurationError, match=r"has a handler already: .*rest"):
        post.handler("a")(rest)
    with pytest.raises(ConfigurationError, match="has a handler already"):
        post.relay("a", to="kafka://127.0.0.1:9/topic")
    assert [handler.queue for handler in post.handlers] == ["a", "a"]


def test_a_bound_that_is_no_number_is_refused() -> None:
    post = Waypost("memory://")
    post.handler("a")(lambda body: None)
    with pytest.raises(ConfigurationError, match="max_handlers"):
        post.worker(max_handlers=0)


def test_a_test_client_chooses_by_type_too() -> None:
    with TestPost() as post:
        seen: list[Any] = []

        @post.handler("events", types=Placed)
        def placed(event: Placed) -> None:
            seen.append(event)

        @post.handler("events", types=Cancelled)
        def cancelled(event: Cancelled) -> None:
            seen.append(event)

        for body in (Other(1), Placed(2), Cancelled(3)):
            post.publish("events", body)
        assert [one.handler.split(".")[-1] for one in post.run_all()] == ["placed", "cancelled"]
        assert seen == [Placed(2), Cancelled(3)]
        assert [one.body for one in post.published("events")] == [{"id": 1}, Placed(2), Cancelled(3)]
