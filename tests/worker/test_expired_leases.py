"""Leases end by the worker's own clock too: when the store does not answer, and when it answers too late."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost import Message, Waypost, lease_clock
from waypost.errors import StoreUnavailable
from waypost.values import Claimed
from waypost.worker.consumer import Consumer
from waypost.worker.renewer import Renewer

LEASE = 0.6


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Renewals hang, as in a connection that went silent, until the event is set."""
    healed = threading.Event()
    extend = Renewer._extend

    def hang(self: Renewer, *given: Any) -> Any:
        if not healed.is_set():
            healed.wait(60)
            raise StoreUnavailable("cut off")
        return extend(self, *given)

    monkeypatch.setattr(Renewer, "_extend", hang)
    yield healed
    healed.set()


def renewed(harness: Harness) -> None:
    harness.configure("orders", lease=LEASE)


@pytest.mark.promise("LEASE-3")
@pytest.mark.parametrize("kind", ["async", "batch"])
def test_an_async_handler_is_stopped_when_its_lease_ends_though_the_store_is_silent(
    harness: Harness, kind: str, cut_off: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    renewed(harness)
    ends: list[tuple[bool, bool]] = []
    called: list[str] = []
    reports: list[Any] = []
    options: dict[str, Any] = {"on_lease_lost": lambda message: called.append(message.id)}

    async def wait(message: Message[Any]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            # Before another worker can claim it, by the store's own clock.
            ends.append((message.lease_lost, lease_clock.now() < message._lease_until + LEASE / 20 + 20))
            raise

    if kind == "async":

        @harness.handler("orders", **options)
        async def one(message: Message[int]) -> None:
            await wait(message)
    else:

        @harness.handler("orders", batch=2, **options)
        async def many(messages: list[Message[int]]) -> None:
            await wait(messages[0])

    published = harness.publish("orders", 1)
    with harness.working() as worker:
        until(lambda: harness.ledger("orders").leased)
        worker.quiet()
        until(lambda: ends and called)
        reports.append(worker.report())
    assert ends == [(True, True)]
    assert called == [published.id]
    assert reports[0].past_lease == 0
    lost = [vars(record) for record in caplog.records if vars(record).get("event") == "lease_lost"]
    assert [(one["phase"], one["message_id"]) for one in lost] == [("deadline", published.id)]
    # Nothing was settled: the message comes back because its lease has ended, and that delivery counts.
    with harness.receive("orders", wait=20) as again:
        assert (again.id, again.deliveries) == (published.id, 2)
    assert harness.ledger("orders").expired == 1


@pytest.mark.promise("LEASE-3")
def test_a_thread_past_its_lease_sees_lease_lost_and_is_counted_separately(
    harness: Harness, cut_off: threading.Event
) -> None:
    renewed(harness)
    noticed, go_on = threading.Event(), threading.Event()
    called: list[str] = []

    @harness.handler("orders", on_lease_lost=lambda message: called.append(message.id))
    def handle(message: Message[int]) -> None:
        until(lambda: message.lease_lost)
        noticed.set()
        assert go_on.wait(20)

    published = harness.publish("orders", 1)
    with harness.working() as worker:
        until(lambda: harness.ledger("orders").leased)
        worker.quiet()
        assert noticed.wait(20)
        until(lambda: worker.report().past_lease == 1 and called)
        go_on.set()
        # No other worker has claimed it, so its settle is still that of the holder.
        until(lambda: harness.ledger("orders").done)
    assert called == [published.id]
    assert worker.report().past_lease == 0
    assert harness.ledger("orders").expired == 0


@pytest.mark.promise("LEASE-3", "LEASE-2")
def test_the_settle_of_a_thread_that_ends_too_late_is_refused_by_the_store(
    harness: Harness, cut_off: threading.Event
) -> None:
    renewed(harness)
    go_on = threading.Event()

    @harness.handler("orders")
    def handle(message: Message[int]) -> None:
        assert go_on.wait(20)

    published = harness.publish("orders", 1)
    with harness.working() as worker:
        until(lambda: harness.ledger("orders").leased)
        worker.quiet()
        with harness.receive("orders", wait=20, renew=False) as message:
            assert message.id == published.id
            message.dead("mine")
        go_on.set()
        until(lambda: worker.report().handled)
    ledger = harness.ledger("orders")
    assert (ledger.done, ledger.dead, ledger.expired) == (0, 1, 1)


@pytest.mark.promise("LEASE-3")
def test_a_message_that_waits_for_a_free_slot_does_not_start_after_its_lease(
    harness: Harness, cut_off: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed(harness)
    monkeypatch.setattr(Consumer, "_room", lambda self: 5 - self.in_flight)
    first, go_on = threading.Event(), threading.Event()
    starts: list[tuple[int, bool]] = []

    @harness.handler("orders", concurrency=1)
    def handle(message: Message[int]) -> None:
        starts.append((message.body, lease_clock.now() < message._lease_until))
        if not first.is_set():
            first.set()
            until(lambda: message.lease_lost)
            assert go_on.wait(20)

    harness.publish_many("orders", range(5))
    with harness.working() as worker:
        assert first.wait(20)
        until(lambda: worker.report().past_lease)
        go_on.set()
        until(lambda: harness.ledger("orders").done == 5)
    assert all(within for _, within in starts)
    ledger = harness.ledger("orders")
    assert ledger.released + ledger.expired >= 4


@pytest.mark.promise("LEASE-3", "LEASE-5")
@pytest.mark.parametrize("late_at", ["the store", "the worker"])
def test_a_claim_that_is_answered_after_its_leases_starts_no_handler(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, late_at: str
) -> None:
    """The reply is slow on the wire, so that only the time of the request matters, or it is delayed in the worker."""
    renewed(harness)
    answered, late = Consumer._run_claim, list[int]()

    async def be_late(claimed: Any) -> None:
        if isinstance(claimed, Claimed) and claimed.leases and not late:
            late.append(len(claimed.leases))
            await asyncio.sleep(LEASE)

    class Slow:
        def __init__(self, executor: Any) -> None:
            self._executor = executor

        def __getattr__(self, name: str) -> Any:
            return getattr(self._executor, name)

        async def run(self, call: Any) -> Any:
            claimed = await self._executor.run(call)
            await be_late(claimed)
            return claimed

    async def answer_late(self: Consumer, flow: Any) -> Any:
        if late_at == "the store" and not isinstance(self._executor, Slow):
            monkeypatch.setattr(self, "_executor", Slow(self._executor))
        claimed = await answered(self, flow)
        await be_late(claimed)
        return claimed

    monkeypatch.setattr(Consumer, "_run_claim", answer_late)
    starts: list[bool] = []

    @harness.handler("orders")
    async def handle(message: Message[int]) -> None:
        starts.append(lease_clock.now() < message._lease_until)

    harness.publish_many("orders", range(10))
    with harness.working():
        until(lambda: harness.ledger("orders").done == 10)
    assert starts == [True] * 10
    logged = [vars(record) for record in caplog.records if vars(record).get("event") == "claim_late"]
    assert [record["count"] for record in logged] == late


@pytest.mark.promise("LEASE-3")
def test_a_block_does_not_begin_with_a_lease_that_has_ended(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    local_end: Callable[[float, float], float] = lease_clock.local_end
    ends: list[float] = []

    def first_is_over(sent: float, seconds: float) -> float:
        ends.append(sent - 1 if not ends else local_end(sent, seconds))
        return ends[-1]

    monkeypatch.setattr(lease_clock, "local_end", first_is_over)
    harness.publish("orders", 1)
    with harness.receive("orders", wait=20) as message:
        assert (message.deliveries, message.lease_lost) == (1, False)
        assert message._lease_until > lease_clock.now()
    ledger = harness.ledger("orders")
    assert (ledger.done, ledger.released) == (1, 1)


@pytest.mark.promise("LEASE-3")
def test_a_lease_ends_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a suspended machine goes on, and no wait of a thread notices."""
    clock, slept = lease_clock.now, [0.0]
    monkeypatch.setattr(lease_clock, "now", lambda: clock() + slept[0])
    begun = threading.Event()
    ends: list[bool] = []
    with Harness("sync", "memory://sleeps") as harness:

        @harness.handler("orders")
        async def handle(message: Message[int]) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ends.append(message.lease_lost)

        harness.publish("orders", 1)
        with harness.working() as worker:
            assert begun.wait(20)
            worker.quiet()
            slept[0] = 3600.0
            until(lambda: ends)
    assert ends == [True]


@pytest.mark.promise("LEASE-3", "WAKE-1")
def test_the_holder_of_a_lost_lease_is_woken_by_the_client_that_claims_the_message(url: str, namespace: str) -> None:
    """The store's clock is set forward by two leases, which no clock of the holder shows."""
    forward = [0]
    options: dict[str, Any] = {
        "namespace": namespace, "clock": lambda: time.time_ns() // 1_000_000 + forward[0],
    }  # fmt: skip
    noticed: list[bool] = []
    begun = threading.Event()
    with Harness("sync", url, **options) as harness, Waypost(url, **options) as other:
        # Renewals come every two hundred seconds: too late for this test.
        harness.configure("orders", lease=600)

        @harness.handler("orders")
        async def handle(message: Message[int]) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                noticed.append(message.lease_lost)

        published = harness.publish("orders", 1)
        with harness.working() as worker:
            assert begun.wait(20)
            # It has room for more, and sleeps by name only once its channel works.
            until(lambda: other.stats("orders").sleepers, "a worker that can be woken")
            # Otherwise it may claim the message again itself.
            worker.quiet()
            until(lambda: not worker.is_ready, "a quiet worker")
            forward[0] = 1_200_000
            with other.receive("orders", wait=20) as message:
                assert message is not None
                assert message.id == published.id
                until(lambda: noticed)
    assert noticed == [True]


@pytest.mark.promise("LEASE-3")
def test_renewals_go_on_beside_one_that_hangs(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypost.worker.renewer.STUCK_SECONDS_MIN", 0.05)
    harness.configure("orders", lease=3)
    extend, stuck, calls = Renewer._extend, threading.Event(), list[int]()

    def hang_once(self: Renewer, *given: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return extend(self, *given)
        self._calling = (lease_clock.now(), 0.05)
        stuck.wait(60)
        raise StoreUnavailable("cut off")

    monkeypatch.setattr(Renewer, "_extend", hang_once)
    go_on = threading.Event()

    @harness.handler("orders")
    def handle(message: Message[int]) -> None:
        assert go_on.wait(20)
        assert not message.lease_lost

    harness.publish("orders", 1)
    with harness.working():
        until(lambda: len(calls) >= 4)
        go_on.set()
        until(lambda: harness.ledger("orders").done)
        stuck.set()
    assert harness.ledger("orders").expired == 0


@pytest.mark.parametrize(("seconds", "counted"), [(60.0, 57.0), (1.0, 0.95), (0.5, 0.45), (0.06, 0.03)])
def test_a_lease_is_counted_from_the_request_less_a_margin(seconds: float, counted: float) -> None:
    assert lease_clock.local_end(100.0, seconds) == pytest.approx(100.0 + counted)


@pytest.mark.promise("LEASE-3")
@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="the system has no clock that runs while it sleeps")
def test_leases_are_counted_by_the_clock_that_runs_while_the_machine_sleeps() -> None:
    assert isinstance(lease_clock.now, partial)
    assert (lease_clock.now.func, lease_clock.now.args) == (time.clock_gettime, (time.CLOCK_BOOTTIME,))
