"""The worker's loop: what it claims ahead, when it polls again, which events it reports, which failures it survives."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from datetime import timedelta
from typing import Any
from unittest.mock import ANY

import pytest

from tests.unit.clients import ShakyStore
from tests.waiting import until
from tests.worker.harness import Harness
from waypost import AsyncWaypost, Constant, Message, Observed, Retry, Waypost
from waypost.errors import InvalidInput
from waypost.operations.flow import Sleep
from waypost.worker import consumer as consumer_module
from waypost.worker.consumer import Consumer

#: The events that end a delivery: its holder's settle, or the claim that finds its lease expired.
CLOSING = {"done", "retried", "snoozed", "dead", "dropped", "released", "cancelled", "replaced", "expired"}
#: Events that come as often as time allows.
POLLS = {"polled", "renewed"}
#: Reasons why a message ended that no worker held.
UNHELD = {"max_deliveries", "overload", "publish"}


@pytest.mark.promise("LEASE-10")
def test_a_backlog_is_handled_in_few_round_trips(harness: Harness) -> None:
    seen: list[int] = []

    @harness.handler("numbers")
    async def handle(number: int) -> None:
        seen.append(number)

    harness.publish_many("numbers", range(3000))
    harness.run()
    assert sorted(seen) == list(range(3000))
    journal = harness.journal("numbers", 3000, 1000)
    # Every step of the store has an operation of its own; one of them claims or settles many.
    assert len({event.operation_id for event in journal.events}) < 100


@pytest.mark.promise("SEE-1", "LEASE-11")
def test_each_message_that_is_unsettled_after_a_stop_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def hang(*given: Any, **options: Any) -> Any:
        calls.append(1)
        yield Sleep(3600)

    monkeypatch.setattr("waypost.operations.receive.settle", hang)
    monkeypatch.setattr("waypost.operations.receive.RELEASE_BUDGET_SECONDS", 0.02)
    seen: list[Observed] = []
    with Waypost("memory://", on_event=seen.append) as post:

        @post.handler("numbers")
        async def handle(number: int) -> None: ...

        with post.worker() as worker:
            first = post.publish("numbers", 1)
            until(lambda: calls)
            second = post.publish("numbers", 2)
            until(lambda: worker.health().queues[0].handled == 2)
            assert worker.stop(0).unsettled == 2
    unsettled = [event.message_id for event in seen if event.event == "unsettled"]
    assert sorted(map(str, unsettled)) == [first.id, second.id]


@pytest.mark.promise("LEASE-8")
def test_a_thread_that_cannot_be_started_is_the_failure_of_its_message_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(threading.Thread):
        left = 2

        def start(self) -> None:
            if self.name.startswith("waypost-numbers") and Refusing.left:
                Refusing.left -= 1
                raise RuntimeError("can't start new thread")
            super().start()

    with Waypost("memory://") as post:

        @post.handler("numbers", concurrency=1, retry=Constant(pause=0))
        def handle(number: int) -> None: ...

        monkeypatch.setattr("waypost.worker.handler_calls.threading.Thread", Refusing)
        post.publish("numbers", 1)
        assert post.worker().run(until_empty=True, signals=False).done == 1
        assert post.ledger("numbers").retried == 2


@pytest.mark.promise("LEASE-10")
def test_outcomes_of_all_kinds_travel_together(harness: Harness) -> None:
    @harness.handler("numbers", concurrency=50, retry=Constant(pause=60))
    async def handle(number: int, message: Message[int]) -> Any:
        await asyncio.sleep(0)
        match number % 4:
            case 0:
                message.then("next", number)
            case 1:
                message.keep_result(number)
            case 2:
                raise Retry
            case 3:
                message.dead()

    ids = [published.id for published in harness.publish_many("numbers", range(40))]
    harness.run()
    ledger = harness.ledger("numbers")
    assert (ledger.done, ledger.dead, ledger.retried, ledger.transferred) == (20, 10, 10, 10)
    assert harness.ledger("next").ready == 10
    assert harness.result("numbers", ids[5]) == 5


@pytest.mark.promise("TIMER-3", "WAKE-5")
def test_a_worker_that_sleeps_finds_new_work_and_due_timers(harness: Harness) -> None:
    seen: list[str] = []

    @harness.handler("orders")
    async def handle(body: str) -> None:
        seen.append(body)

    with harness.working():
        harness.publish("orders", "timer", delay=0.2)
        harness.publish("orders", "now")
        until(lambda: len(seen) == 2)
    assert seen == ["now", "timer"]


@pytest.mark.promise("WAKE-5", "LEASE-4")
def test_a_workers_own_retry_does_not_wait_for_the_next_poll(harness: Harness) -> None:
    seen: list[int] = []

    @harness.handler("orders", retry=Constant(pause=0.02, jitter=0))
    async def handle(message: Message[int]) -> None:
        seen.append(message.attempts)
        if message.attempts < 5:
            raise Retry

    harness.publish("orders", 1)
    with harness.working():
        until(lambda: harness.ledger("orders").done)
    assert seen == [0, 1, 2, 3, 4, 5]


def test_a_message_sent_on_to_another_queue_of_the_worker_is_handled_by_the_same_run(harness: Harness) -> None:
    seen: list[int] = []

    @harness.handler("first")
    async def first(number: int, message: Message[int]) -> None:
        message.then("second", number + 1)

    @harness.handler("second")
    def second(number: int) -> None:
        seen.append(number)

    harness.publish_many("first", range(10))
    harness.run()
    assert sorted(seen) == list(range(1, 11))


def test_no_more_handlers_run_at_once_than_allowed(harness: Harness) -> None:
    running: list[int] = [0, 0]

    @harness.handler("orders", concurrency=3)
    async def handle(number: int) -> None:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.001)
        running[0] -= 1

    harness.publish_many("orders", range(60))
    harness.run()
    assert running == [0, 3]


def test_a_handler_that_never_waits_handles_messages_while_the_next_claim_is_made(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_hand: list[int] = []
    claim = Consumer._claim

    async def noted(consumer: Consumer, *arguments: Any) -> Any:
        at_hand.append(len(consumer._ready))
        return await claim(consumer, *arguments)

    monkeypatch.setattr(Consumer, "_claim", noted)
    # Otherwise a runner yields after a while anyway.
    monkeypatch.setattr(consumer_module, "TURN_SECONDS", 1000.0)
    runners: set[object] = set()

    @harness.handler("numbers")
    async def handle(number: int) -> None:
        runners.add(asyncio.current_task())

    harness.publish_many("numbers", range(3000))
    harness.run()
    assert harness.ledger("numbers").done == 3000
    assert max(at_hand) > 0
    # The other runners were not woken, because they had nothing to do.
    assert len(runners) == 1


def test_a_handler_that_waits_lets_others_start(harness: Harness) -> None:
    started: list[int] = []
    all_started = asyncio.Event()

    @harness.handler("numbers", concurrency=20)
    async def handle(number: int) -> None:
        started.append(number)
        if len(started) == 20:
            all_started.set()
        await all_started.wait()

    harness.publish_many("numbers", range(60))
    harness.run()
    assert sorted(started) == list(range(60))


@pytest.mark.promise("LEASE-10")
def test_a_runner_that_fails_stops_the_worker_and_gives_its_message_back(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a filter of the log failed")

    @harness.handler("orders")
    async def handle(number: int) -> None:
        raise ValueError

    monkeypatch.setattr("waypost.worker.consumer.log_failure", fail)
    harness.publish("orders", 1)
    with pytest.raises(RuntimeError, match="a filter of the log failed"):
        harness.run()
    until(lambda: harness.ledger("orders").leased == 0)


@pytest.mark.promise("QUEUE-3")
def test_a_worker_goes_on_as_soon_as_the_rate_allows_it(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    @harness.handler("orders")
    async def handle(number: int) -> None:
        seen.append(number)

    # A poll that only is to be safe would help too, much later.
    monkeypatch.setattr("waypost.operations.receive.safety_poll_seconds", lambda *_, **__: 3600.0)
    harness.configure("orders", rate="5/s")
    harness.publish_many("orders", range(15))
    with harness.working():
        until(lambda: len(seen) == 15)
    assert sorted(seen) == list(range(15))
    harness.check("orders")


@pytest.mark.promise("QUEUE-3")
def test_a_rate_and_a_limit_of_running_messages_hold_for_workers(harness: Harness) -> None:
    harness.configure("orders", max_running=2, rate="30/s")
    running: list[int] = [0, 0]

    @harness.handler("orders", concurrency=20)
    async def handle(number: int) -> None:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.001)
        running[0] -= 1

    harness.publish_many("orders", range(40))
    with harness.working():
        until(lambda: harness.ledger("orders").done == 40)
    assert running[1] <= 2


@pytest.mark.promise("QUEUE-3")
def test_a_fast_worker_does_not_hold_slots_of_max_running_that_others_could_use(
    harness: Harness, url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages claimed ahead count as running: a worker that did so would hold slots that it does not use."""
    monkeypatch.setattr("waypost.worker.consumer.LIMITS_SECONDS", 0.0)
    harness.configure("orders", max_running=8)
    leased: list[int] = []
    running = [0]

    @harness.handler("orders", concurrency=2)
    async def handle(number: int) -> None:
        running[0] += 1
        # So fast that many more than two would be claimed ahead.
        await asyncio.sleep(0.0005)
        running[0] -= 1

    from waypost.worker.consumer import Consumer

    accept = Consumer._accept

    def watch(self: Consumer, claimed: Any) -> None:
        accept(self, claimed)
        if self.handled > 100:
            leased.append(len(self._ready) + self._busy)

    monkeypatch.setattr(Consumer, "_accept", watch)
    harness.publish_many("orders", range(400))
    harness.run()
    assert harness.ledger("orders").done == 400
    assert max(leased) <= 2


def test_a_message_published_during_a_claim_does_not_wait_for_the_next_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wake-up at that moment must not be lost: the claim may have run before the message was there."""
    monkeypatch.setattr("waypost.operations.receive.POLL_FIRST_SECONDS", 3600.0)
    seen: list[int] = []
    with Waypost("memory://poke") as post:

        @post.handler("orders")
        async def handle(number: int) -> None:
            seen.append(number)

        worker = post.worker()
        inner = worker._worker
        from waypost.worker.consumer import Consumer

        claim = Consumer._claim

        async def claim_and_publish(self: Consumer, *given: Any) -> Any:
            claimed = await claim(self, *given)
            if not seen and not claimed.leases:  # type: ignore[union-attr]
                post.publish("orders", 7)
                inner._notify("orders")
            return claimed

        monkeypatch.setattr(Consumer, "_claim", claim_and_publish)
        with worker:
            until(lambda: seen)
    assert seen == [7]


def test_a_client_does_not_keep_every_worker_it_ever_made() -> None:
    with Waypost("memory://workers") as post:

        @post.handler("orders")
        async def handle(number: int) -> None: ...

        for number in range(20):
            post.publish("orders", number)
            assert post.worker().run(until_empty=True, signals=False).handled == 1

        def left() -> int:
            gc.collect()
            return len(post._workers)

        # The thread that renewed for the last one may still be on its way out.
        until(lambda: left() == 0)
        running = post.worker()
        with running:
            assert left() == 1
            assert post.drain(timeout=5).complete
            assert not running.is_running


# ---- consume -------------------------------------------------------------------------------------------------


@pytest.mark.promise("FACE-1", "LEASE-8")
def test_consume_gives_one_message_after_the_other(url: str, namespace: str) -> None:
    with Waypost(url, namespace=namespace) as post:
        post.publish_many("orders", range(6))
        seen: list[int] = []
        for message in post.consume("orders", wait=0, retry=Constant(pause=60)):
            seen.append(message.body)
            if message.body == 4:
                continue  # neither a block nor an outcome: retried
            if message.body == 5:
                message.done()
                continue
            with message:
                if message.body == 2:
                    raise Retry(60)
                if message.body == 3:
                    message.drop()
        ledger = post.ledger("orders")
        assert seen == list(range(6))
        assert (ledger.done, ledger.retried, ledger.dropped) == (3, 2, 1)


@pytest.mark.promise("FACE-1", "LEASE-8")
def test_consume_is_the_same_for_an_event_loop(url: str, namespace: str) -> None:
    with Harness("async", url, namespace=namespace) as harness:

        async def scenario() -> list[int]:
            seen: list[int] = []
            async for message in harness.post.consume("orders", wait=0):
                seen.append(message.body)
                if message.body == 1:
                    continue
                async with message:
                    if message.body == 2:
                        raise Retry(60)
            return seen

        harness.publish_many("orders", range(4))
        assert harness.done(scenario()) == [0, 1, 2, 3]
        ledger = harness.ledger("orders")
        assert (ledger.done, ledger.retried) == (2, 2)


def test_a_message_left_by_a_break_is_released() -> None:
    with Waypost("memory://") as post:
        post.publish("orders", 1)
        messages = post.consume("orders", wait=0)
        next(messages)
        messages.close()  # type: ignore[attr-defined]
        assert post.ledger("orders").released == 1
        assert post.drain(timeout=0).running == 0


# ---- events --------------------------------------------------------------------------------------------------


def abandon(harness: Harness, queue: str) -> Any:
    """Claim a message and neither renew nor settle it, like a process that died; return its block, to be ended late."""
    block = harness.post.receive(queue, wait=0, renew=False)
    assert harness.done(block.__enter__() if harness.mode == "sync" else block.__aenter__()) is not None
    return block


def end_block(harness: Harness, block: Any) -> None:
    """End such a block, which settles its message."""
    harness.done(block.__exit__(None, None, None) if harness.mode == "sync" else block.__aexit__(None, None, None))


def receive_one(harness: Harness, queue: str) -> Any:
    """Handle a message if there is one, and return its body."""
    with harness.receive(queue, wait=0) as message:
        return None if message is None else message.body


def closed_once(seen: list[Observed], queue: str) -> Counter[tuple[str | None, int | None]]:
    """Return the claims of a queue after checking that exactly one event closed each of them."""
    events = [event for event in seen if event.queue == queue]
    claimed = Counter((event.message_id, event.token) for event in events if event.event == "claimed")
    closed = Counter(
        (event.message_id, event.token) for event in events if event.event in CLOSING and event.reason not in UNHELD
    )
    assert claimed == closed
    assert set(claimed.values()) == {1}
    return claimed


@pytest.mark.promise("SEE-1")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_claim_is_closed_by_exactly_one_event(mode: str, url: str, namespace: str) -> None:
    seen: list[Observed] = []
    with Harness(mode, url, namespace=namespace, on_event=seen.append) as harness:

        @harness.handler("orders", retry=Constant(pause=0, jitter=0, attempts=2))
        async def handle(number: int, message: Message[int]) -> Any:
            match number % 5:
                case 0:
                    raise ValueError("no")
                case 1:
                    message.drop()
                case 2:
                    message.dead("bad")
                case 3:
                    message.then("next", number)

        harness.publish_many("orders", range(20))
        with harness.working():
            until(lambda: harness.ended("orders") == 20)
        ledger = harness.ledger("orders")
    assert len(closed_once(seen, "orders")) == ledger.claims
    assert Counter(event.event for event in seen if event.event == "published")["published"] == 20
    failed = [event for event in seen if event.event == "handled" and event.outcome == "failure"]
    assert len(failed) == 8
    assert {event.error_type for event in failed} == {"ValueError"}
    assert all(event.outcome == "success" for event in seen if event.event in CLOSING)


@pytest.mark.promise("SEE-1", "LEASE-4", "LEASE-5")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_claims_whose_holders_die_or_come_too_late_are_closed_once(mode: str, url: str, namespace: str) -> None:
    seen: list[Observed] = []
    with Harness(mode, url, namespace=namespace, on_event=seen.append) as harness:
        harness.configure("orders", lease=0.4, max_deliveries=2)
        dies = harness.publish("orders", "dies")
        for _ in range(2):
            until(
                lambda: (
                    harness.stats("orders").ledger.leased == 0
                    or harness.stats("orders").next_lease_end_in == timedelta(0)
                )
            )
            abandon(harness, "orders")
        until(lambda: receive_one(harness, "orders") is None and harness.ledger("orders").dead == 1)
        late = harness.publish("orders", "late")
        block = abandon(harness, "orders")
        until(lambda: receive_one(harness, "orders") == "late")
        end_block(harness, block)
        ledger = harness.ledger("orders")
    assert len(closed_once(seen, "orders")) == ledger.claims == 4
    ends = [(event.event, event.message_id, event.token, event.reason) for event in seen if event.event not in POLLS]
    tokens = [event.token for event in seen if event.event == "claimed"]
    assert ends == [
        ("configured", None, None, "lease max_deliveries"),
        ("published", dies.id, None, None),
        ("claimed", dies.id, tokens[0], None),
        ("expired", dies.id, tokens[0], None),
        ("claimed", dies.id, tokens[1], None),
        ("expired", dies.id, tokens[1], None),
        ("dead", dies.id, tokens[1], "max_deliveries"),
        ("published", late.id, None, None),
        ("claimed", late.id, tokens[2], None),
        ("expired", late.id, tokens[2], None),
        ("claimed", late.id, tokens[3], None),
        ("done", late.id, tokens[3], None),
        ("lost", late.id, tokens[2], None),
    ]


@pytest.mark.promise("SEE-1", "PUB-7", "DEAD-1", "TIMER-4")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_drops_trims_and_promotions_are_reported_as_events(mode: str, url: str, namespace: str) -> None:
    seen: list[Observed] = []
    with Harness(mode, url, namespace=namespace, on_event=seen.append) as harness:
        harness.configure("orders", max_pending=2, overload="drop_oldest", dead_max=1)
        dropped = [harness.publish("orders", 1), *harness.publish_many("orders", [2, 3])]
        timer = harness.publish("orders", 4, delay=0.01)
        until(lambda: harness.stats("orders").next_due_in == timedelta(0))
        trimmed = []
        for _ in range(2):
            with harness.receive("orders", wait=0) as message:
                message.dead()
                trimmed.append(message.id)
    besides = Counter(
        (event.event, event.message_id, event.reason)
        for event in seen
        if event.event in ("dropped", "promoted", "dead_trimmed")
    )
    assert besides == Counter([
        ("dropped", dropped[0].id, "overload"),
        ("dropped", dropped[1].id, "overload"),
        ("promoted", timer.id, "due"),
        ("dead_trimmed", trimmed[0], "dead_max"),
    ])  # fmt: skip


@pytest.mark.promise("SEE-1", "LEASE-12", "PUB-6", "CHAIN-2")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_cancel_and_a_purge_end_besides_is_reported(mode: str, url: str, namespace: str) -> None:
    seen: list[Observed] = []
    with Harness(mode, url, namespace=namespace, on_event=seen.append) as harness:
        harness.publish("orders", 1, key="a")
        with harness.receive("orders", wait=0):
            parked = harness.publish("orders", 2, key="a", on_conflict="replace")
            assert harness.cancel("orders", key="a") == "requested"
        waiting = []
        for remove in ("cancel", "purge"):
            first = harness.publish("orders", 3, chain=True)
            waiting.append(harness.publish("orders", 4, after=first))
            harness.cancel("orders", id=first.id) if remove == "cancel" else harness.purge("orders")
        assert harness.ledger("orders").balance == 0
    besides = [(event.event, event.message_id, event.reason) for event in seen if event.event in ("cancelled", "dead")]
    assert besides == [
        ("cancelled", parked.id, "parked"),
        ("cancelled", ANY, "cancelled"),
        ("dead", waiting[0].id, "blocker_failed"),
        ("dead", waiting[1].id, "blocker_failed"),
    ]


@pytest.mark.promise("SEE-1")
def test_an_event_hook_that_fails_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def hook(event: Observed) -> None:
        raise RuntimeError("the hook is broken")

    with Harness("sync", "memory://hook", on_event=hook) as harness:

        @harness.handler("orders")
        async def handle(number: int) -> None: ...

        harness.publish_many("orders", range(10))
        assert harness.run().handled == 10
        assert harness.ledger("orders").done == 10
    assert [vars(record)["event"] for record in caplog.records] == ["on_event_failed"] * 2  # the client's, the worker's

    async def awaited(event: Observed) -> None: ...

    with pytest.raises(ValueError, match="not awaited"):
        Waypost("memory://", on_event=awaited)


@pytest.mark.promise("SEE-1")
def test_both_clients_report_their_changes_as_events() -> None:
    seen: list[tuple[str, str]] = []
    with Waypost("memory://", on_event=lambda event: seen.append((event.event, event.outcome))) as post:
        post.configure("orders", max_pending=2)
        post.publish("orders", 1, key="a")
        post.publish("orders", 1, key="a")
        post.publish("orders", 2, key="a", on_conflict="replace")
        post.pause("orders")
        post.pause("orders")
        post.resume("orders")
        with post.receive("orders") as message:
            assert message is not None
            message.dead()
        with post.receive("orders"):
            pass
        post.redrive("orders")
        assert post.cancel("orders", key="a") == "cancelled"
        post.publish_many("orders", [1, 2])
        with pytest.raises(Exception, match="max_pending"):
            post.publish("orders", 3)
        post.purge("orders")
        with pytest.raises(InvalidInput):
            post.purge("orders", "leased")
    assert seen == [
        ("configured", "success"),
        ("published", "success"),
        ("duplicate", "skipped"),
        ("replaced", "success"),
        ("published", "success"),
        ("paused", "success"),
        ("paused", "skipped"),
        ("resumed", "success"),
        ("claimed", "success"),
        ("dead", "success"),
        ("polled", "skipped"),
        ("redriven", "success"),
        ("cancelled", "success"),
        ("published", "success"),
        ("published", "success"),
        ("published", "failure"),
        ("purged", "success"),
    ]


# ---- failures ------------------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-14", "LEASE-6")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("retry_budget", [0, 5])
def test_a_worker_goes_on_after_every_kind_of_lost_connection(
    mode: str, retry_budget: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("waypost.worker.consumer.FAILED_CLAIM_SECONDS", 0.01)
    store = ShakyStore()
    with Harness(mode, None, store=store, retry_budget=retry_budget) as harness:
        seen: Counter[int] = Counter()
        harness.configure("orders", lease=0.2)

        @harness.handler("orders")
        async def handle(number: int) -> None:
            seen[number] += 1

        harness.publish_many("orders", range(200))
        with harness.working():
            store.faults += ["cut", "refuse", None, "cut", "cut", "refuse", None, None, "cut", "refuse"]
            # Read from outside, past the connection that fails.
            observer = Waypost(store=store.inner)
            until(lambda: observer.ledger("orders").done == 200)
            store.faults.clear()
        assert set(seen) == set(range(200))
        ledger = harness.ledger("orders")
        assert ledger.unexplained == 0
        # What a claim brought after its leases had ended was not started.
        runs = sum(seen.values())
        assert runs <= ledger.claims <= runs + ledger.expired + ledger.released


def test_a_worker_that_cannot_connect_fails_at_once() -> None:
    post = Waypost("valkey://127.0.0.1:1", start_timeout=0.2)

    @post.handler("orders")
    async def handle(number: int) -> None: ...

    worker = post.worker()
    with pytest.raises(ConnectionError):
        worker.run(signals=False)
    with pytest.raises(ConnectionError):
        worker.start()
    assert not worker.is_running


def test_a_worker_may_be_stopped_from_any_thread() -> None:
    with Waypost("memory://") as post:

        @post.handler("orders")
        async def handle(number: int) -> None: ...

        worker = post.worker()

        def stop_it() -> None:
            until(lambda: worker.is_running)
            worker.request_stop()

        stopper = threading.Thread(target=stop_it)
        stopper.start()
        assert worker.run(signals=False).complete
        stopper.join()


@pytest.mark.promise("STORE-5", "LEASE-3")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_runs_on_the_callers_own_client(mode: str, valkey_url: str, namespace: str) -> None:
    redis = pytest.importorskip("redis", reason="needs redis-py")
    kind = redis.Redis if mode == "sync" else redis.asyncio.Redis
    client = kind.from_url(valkey_url.replace("valkey://", "redis://"))
    with Harness(mode, None, client=client, namespace=namespace) as harness:
        harness.configure("orders", lease=0.6)
        seen: list[int] = []

        @harness.handler("orders")
        async def handle(number: int) -> None:
            await asyncio.sleep(1)
            seen.append(number)

        harness.publish_many("orders", range(3))
        with harness.working():
            until(lambda: harness.ledger("orders").done == 3)
        assert sorted(seen) == [0, 1, 2]
        assert harness.ledger("orders").expired == 0
        harness.done(client.close() if mode == "sync" else client.aclose())


@pytest.mark.promise("LEASE-7")
def test_a_worker_runs_until_empty_where_nothing_is_settled(harness: Harness) -> None:
    harness.configure("orders", lease=None)
    handled: list[int] = []

    @harness.handler("orders")
    def handle(number: int) -> None:
        # By now the worker has claimed everything and sleeps. Only the end of this call can wake it.
        until(lambda: harness.stats("orders").sleepers, "the worker's sleep")
        handled.append(number)

    harness.publish_many("orders", range(3))
    run = threading.Thread(target=harness.run, daemon=True)
    run.start()
    until(lambda: not run.is_alive(), "the end of the run")
    assert sorted(handled) == [0, 1, 2]
    assert harness.ledger("orders").done == 3


@pytest.mark.promise("LEASE-11")
def test_a_worker_that_is_stopped_while_it_connects_starts_nothing_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []

    async def stop_while_it_connects() -> None:
        async with AsyncWaypost("memory://") as post:

            @post.handler("numbers")
            async def handle(number: int) -> None:
                handled.append(number)

            await post.publish("numbers", 1)
            worker = post.worker()
            connect, connecting, go_on = worker.store.connect_async, asyncio.Event(), asyncio.Event()

            async def connect_slowly(**options: Any) -> Any:
                connecting.set()
                await go_on.wait()
                return await connect(**options)

            monkeypatch.setattr(worker.store, "connect_async", connect_slowly)
            starting = asyncio.create_task(worker.start())
            await asyncio.wait_for(connecting.wait(), 20)
            stopping = asyncio.create_task(worker.stop())
            await asyncio.wait([stopping], timeout=0)
            go_on.set()
            await asyncio.wait_for(asyncio.gather(starting, stopping), 20)
            assert not worker.is_running
            assert (await post.ledger("numbers")).ready == 1

    asyncio.run(stop_while_it_connects())
    assert handled == []
