"""How a delivery ends: by a method call, an outcome, an error, an interrupt, or too late."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.clients import MODES, ShakyStore, open_client
from waypost import AsyncWaypost, Constant, Dead, Drop, NoRetry, Queue, Retry, Snooze, Waypost, codec, errors
from waypost.identity import Session
from waypost.policy import ERROR_CHARACTERS_MAX
from waypost.store.memory import MemoryStore
from waypost.store.port import Draft
from waypost.testing.clock import ClockTime, ManualClock
from waypost.times import to_datetime


def the_only(post: Any, state: str) -> Any:
    (stored,) = post.messages("orders", state)
    return stored


# ---- outcomes ------------------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-8")
@pytest.mark.parametrize("how", ["called", "raised"])
@pytest.mark.parametrize(
    ("name", "given", "outcome", "state"),
    [
        ("retry", (5,), Retry(5), "delayed"),
        ("snooze", (timedelta(seconds=5),), Snooze(5), "delayed"),
        ("dead", ("bad address",), Dead("bad address"), "dead"),
        ("drop", (), Drop(), None),
    ],
)
def test_an_outcome_may_be_called_or_raised(
    post: Any, clock: ManualClock, how: str, name: str, given: tuple[Any, ...], outcome: Exception, state: str | None
) -> None:
    post.publish("orders", 1)
    with post.receive("orders") as message:
        if how == "raised":
            raise outcome
        getattr(message, name)(*given)
    ledger = post.ledger("orders")
    if state is None:
        assert ledger.dropped == 1
        return
    stored = the_only(post, state)
    assert stored.attempts == (1 if name == "retry" else 0)
    assert stored.deliveries == (0 if name == "snooze" else 1)
    if state == "delayed":
        assert stored.ready_at == to_datetime(clock() + 5_000)
    else:
        assert stored.reason == "bad address"


def test_done_may_be_decided_before_the_block_fails(post: Any) -> None:
    post.publish("orders", 1)

    def block() -> None:
        with post.receive("orders") as message:
            message.done()
            raise ValueError("afterwards")

    with pytest.raises(ValueError, match="afterwards"):
        block()
    assert post.ledger("orders").done == 1


def test_an_outcome_is_decided_once(post: Any) -> None:
    post.publish("orders", 1)
    with post.receive("orders") as message:
        message.done()
        with pytest.raises(errors.InvalidInput, match="already has its outcome"):
            message.retry()
    assert message.settled == "done"


@pytest.mark.promise("LEASE-8", "LEASE-9")
def test_an_error_is_retried_and_reaches_the_caller(post: Any, clock: ManualClock) -> None:
    post.publish("orders", 1)
    retry = Constant(pause=7, jitter=0, attempts=2)
    with pytest.raises(KeyError), post.receive("orders", retry=retry):
        raise KeyError("x" * 10_000)
    stored = the_only(post, "delayed")
    assert stored.attempts == 1
    assert stored.ready_at == to_datetime(clock() + 7_000)
    clock.advance(7)
    with pytest.raises(KeyError), post.receive("orders", retry=retry) as message:
        raise KeyError("x" * 10_000)
    assert (message.deliveries, message.attempts, message.token) == (2, 1, 2)
    letter = the_only(post, "dead")
    assert (letter.reason, letter.error_type) == ("retries_exhausted", "KeyError")
    assert len(letter.error) == ERROR_CHARACTERS_MAX


@pytest.mark.promise("LEASE-9")
def test_retries_by_hand_end_with_the_attempts(post: Any) -> None:
    post.publish("orders", 1)
    with post.receive("orders", retry=NoRetry()) as message:
        message.retry(5, "once more")
    letter = the_only(post, "dead")
    assert (letter.reason, letter.error) == ("retries_exhausted", "once more")


@pytest.mark.promise("LEASE-9")
def test_a_retry_policy_that_fails_buries_the_message(post: Any) -> None:
    class Broken:
        def delay(self, attempt: int, error: BaseException | None = None) -> float | None:
            raise ZeroDivisionError("no policy")

    post.publish("orders", 1)
    with pytest.raises(ValueError, match="mine"), post.receive("orders", retry=Broken()):
        raise ValueError("mine")
    letter = the_only(post, "dead")
    assert (letter.reason, letter.error_type, letter.error) == ("retry_policy_failed", "ZeroDivisionError", "no policy")


def test_an_error_without_a_text_is_still_recorded(post: Any) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    post.publish_many("orders", [1, 2])
    with pytest.raises(Silent), post.receive("orders", retry=NoRetry()):
        raise Silent
    with pytest.raises(ValueError, match="odd"), post.receive("orders", retry=NoRetry()):
        raise ValueError("odd \0 \ud800")
    assert [letter.error for letter in post.dead_letters("orders")] == ["(the error has no text)", "odd \\0 \\ud800"]


@pytest.mark.promise("LEASE-8", "LEASE-5")
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupt_releases_the_message(interrupt: type[BaseException]) -> None:
    with Waypost("memory://") as post:
        post.publish("orders", 1)
        with pytest.raises(interrupt), post.receive("orders"):
            raise interrupt
        (stored,) = post.peek("orders")
        assert (stored.deliveries, stored.attempts) == (0, 0)
        assert post.ledger("orders").released == 1


@pytest.mark.promise("LEASE-8", "LEASE-9")
@pytest.mark.parametrize("poison", [SystemExit, asyncio.CancelledError, type("Strange", (BaseException,), {})])
def test_an_exit_inside_a_block_is_a_failure_and_goes_on_to_the_caller(post: Any, poison: type[BaseException]) -> None:
    published = post.publish("orders", 1)
    for attempt in range(2):
        (waiting,) = post.peek("orders")
        assert waiting.attempts == attempt
        with pytest.raises(poison), post.receive("orders", retry=Constant(pause=0, jitter=0, attempts=2)):
            raise poison
    letter = the_only(post, "dead")
    assert (letter.id, letter.reason, letter.attempts) == (published.id, "retries_exhausted", 2)


@pytest.mark.promise("LEASE-8")
def test_an_exit_by_a_signal_handler_of_the_program_releases_the_message() -> None:
    def unregister(number: int, frame: object) -> None:
        sys.exit(3)

    before = signal.signal(signal.SIGTERM, unregister)
    try:
        with Waypost("memory://") as post:
            post.publish("orders", 1)
            with pytest.raises(SystemExit), post.receive("orders"):
                signal.raise_signal(signal.SIGTERM)
            assert post.ledger("orders").released == 1
    finally:
        signal.signal(signal.SIGTERM, before)


async def cancelled_in_the_block(post: AsyncWaypost) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with post.receive("orders"):
            inside.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(work())
    await inside.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.promise("LEASE-8")
def test_a_cancelled_block_releases_the_message() -> None:
    async def scenario() -> None:
        async with AsyncWaypost("memory://") as post:
            await post.publish("orders", 1)
            await cancelled_in_the_block(post)
            (stored,) = await post.peek("orders")
            assert stored.deliveries == 0

    asyncio.run(scenario())


# ---- leases --------------------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-2")
def test_a_settle_after_the_lease_changes_nothing_and_is_logged_once(
    post: Any, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    post.configure("orders", lease=10)
    published = post.publish("orders", 1)
    with caplog.at_level(logging.WARNING, "waypost"), post.receive("orders") as late:
        clock.advance(11)
        with post.receive("orders") as second:
            assert (second.id, second.token) == (late.id, late.token + 1)
            assert late.lease_lost is False
            assert post.extend(late) == "lost"
    assert (late.settled, late.lease_lost) == ("lost", True)
    assert second.settled == "done"
    (record,) = caplog.records
    assert {name: vars(record)[name] for name in ("event", "phase", "queue", "message_id", "deliveries")} == {
        "event": "lease_lost", "phase": "extend", "queue": "orders", "message_id": published.id, "deliveries": 1,
    }  # fmt: skip


@pytest.mark.promise("LEASE-7")
def test_at_most_once_needs_no_settle_and_allows_no_return(post: Any, caplog: pytest.LogCaptureFixture) -> None:
    post.configure("orders", lease=None)
    post.publish_many("orders", [1, 2, 3])
    with post.receive("orders") as message:
        assert message.at_most_once
        for refused in (message.retry, message.dead, message.drop, lambda: message.snooze(5)):
            with pytest.raises(errors.InvalidInput, match="lease=None"):
                refused()
        with pytest.raises(errors.InvalidInput, match="lease=None"):
            message.then("next", 1)
    with post.receive("orders"):
        raise Retry
    assert [vars(record)["event"] for record in caplog.records] == ["outcome_ignored"]
    with pytest.raises(ValueError, match="lost"), post.receive("orders"):
        raise ValueError("lost")
    assert post.ledger("orders").done == 3


def test_waiting_ends_with_a_message_published_meanwhile() -> None:
    with Waypost("memory://") as post:
        publisher = threading.Timer(0.02, post.publish, ("orders", 7))
        publisher.start()
        with post.receive("orders", wait=None) as message:
            assert message is not None
            assert message.body == 7
        publisher.join()


@pytest.mark.promise("TIMER-2")
@pytest.mark.parametrize("mode", MODES)
def test_waiting_ends_with_a_timer_that_comes_due(mode: str) -> None:
    with open_client(mode, "memory://") as post:
        post.publish("orders", 7, delay=0.02)
        with post.receive("orders", wait=30) as message:
            assert message.body == 7
        assert post.history("orders", message.id)[2].wait_time >= timedelta(0)


# ---- envelopes and bodies that cannot be read ------------------------------------------------------------------------


def plant(store: Any, envelope: bytes) -> str:
    """Put an envelope into a store that no publish of this release would write."""
    session = Session(ClockTime(store.clock))
    (message_id,) = session.message_ids(1)
    call = store.publish("orders", [Draft(message_id, envelope)], session.operation("orders"))
    store.connect(start_timeout=1).run(call)
    return message_id


@pytest.mark.promise("PUB-1", "LEASE-5")
@pytest.mark.parametrize("mode", MODES)
def test_a_newer_envelope_is_left_for_newer_workers(mode: str, clock: ManualClock) -> None:
    store = MemoryStore(clock=clock)
    message_id = plant(store, bytes([codec.VERSION + 1]) + b"whatever comes next")
    with open_client(mode, store=store) as post:
        post.publish("orders", "readable")
        with post.receive("orders") as message:
            assert message.body == "readable"
        stored = the_only(post, "delayed")
        assert (stored.id, stored.deliveries, stored.attempts) == (message_id, 0, 0)
        assert stored.ready_at == to_datetime(clock() + 5_000)


@pytest.mark.promise("DEAD-1")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("envelope", [b"\1too short", b"\0", b""])
def test_a_damaged_envelope_is_buried(mode: str, envelope: bytes) -> None:
    store = MemoryStore()
    plant(store, envelope)
    with open_client(mode, store=store) as post:
        with post.receive("orders") as message:
            assert message is None
        letter = the_only(post, "dead")
        assert (letter.reason, letter.error_type) == ("undecodable", "waypost.errors.Undecodable")


def test_a_damaged_envelope_at_most_once_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    with Waypost(store=store) as post:
        post.configure("orders", lease=None)
        plant(store, b"\1too short")
        with post.receive("orders") as message:
            assert message is None
    assert [vars(record)["event"] for record in caplog.records] == ["unreadable"]


@pytest.mark.promise("FACE-1")
def test_a_body_of_another_type_is_buried_and_the_next_is_handed_out(post: Any) -> None:
    post.publish("orders", {"a": "text"})
    post.publish("orders", {"a": 1})
    with post.receive(Queue("orders", dict[str, int])) as message:
        assert message.body == {"a": 1}
    assert the_only(post, "dead").reason == "undecodable"


def test_a_body_that_the_block_cannot_decode_is_buried_without_retries(post: Any) -> None:
    post.publish("orders", {"a": "text"})
    with pytest.raises(errors.Undecodable), post.receive("orders") as message:
        message.decode(dict[str, int])
    assert the_only(post, "dead").reason == "undecodable"


# ---- results and continuations -------------------------------------------------------------------------------


def test_a_result_is_kept_for_its_time(post: Any, clock: ManualClock) -> None:
    published = post.publish("orders", 1)
    assert post.result("orders", published.id, default="none yet") == "none yet"
    with post.receive("orders") as message:
        message.keep_result({"total": 5}, ttl=10)
    assert post.result("orders", published.id) == {"total": 5}
    assert post.result("orders", published.id, as_type=dict[str, int]) == {"total": 5}
    assert post.cancel("orders", id=published.id) == "finished"
    clock.advance(11)
    assert post.result("orders", published.id) is None


def test_a_message_sends_others_on_when_it_is_done(post: Any) -> None:
    post.publish("orders", 1, correlation_id="c")
    with post.receive("orders") as message:
        first = message.then("invoices", {"n": 1}, key="k", delay=5, priority=7, group="g", headers={"a": "b"})
        second = message.then(Queue("parcels", dict), {"n": 2})
        assert first != second
    invoice = the_only_of(post, "invoices", "delayed")
    assert (invoice.id, invoice.body, invoice.key, invoice.priority, invoice.group) == (first, {"n": 1}, "k", 7, "g")
    assert (invoice.headers, invoice.correlation_id) == ({"a": "b"}, "c")
    assert the_only_of(post, "parcels", "ready").id == second
    assert post.ledger("orders").transferred == 2


def test_a_message_that_fails_sends_nothing_on(post: Any) -> None:
    post.publish("orders", 1)
    with post.receive("orders") as message:
        message.then("invoices", 1)
        message.retry(0)
    assert list(post.messages("invoices")) == []


def test_continuations_are_validated_and_limited_in_number(post: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypost.message.THEN_MAX", 1)
    post.publish("orders", 1)
    with post.receive("orders") as message:
        with pytest.raises(errors.InvalidName):
            message.then("no spaces", 1)
        with pytest.raises(errors.InvalidBody):
            message.then("invoices", object())
        message.then("invoices", 1)
        with pytest.raises(errors.InvalidInput, match="at most 1 messages"):
            message.then("invoices", 2)
    assert [stored.body for stored in post.messages("invoices")] == [1]


def the_only_of(post: Any, queue: str, state: str) -> Any:
    (stored,) = post.messages(queue, state)
    return stored


# ---- lost replies --------------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-6", "LEASE-14")
@pytest.mark.parametrize("mode", MODES)
def test_a_lost_reply_to_a_claim_is_requested_again(mode: str) -> None:
    store = ShakyStore()
    with open_client(mode, store=store) as post:
        post.publish("orders", 1)
        store.faults = ["cut", "refuse", "cut"]
        with post.receive("orders") as message:
            assert (message.body, message.deliveries) == (1, 1)
        assert (post.ledger("orders").claims, post.ledger("orders").done) == (1, 1)


@pytest.mark.promise("LEASE-6")
@pytest.mark.parametrize("mode", MODES)
def test_after_the_wait_a_lost_claim_takes_no_fresh_work(mode: str) -> None:
    store = ShakyStore()
    with open_client(mode, store=store) as post:
        post.publish("orders", 1)
        # The request never arrived: the repeat, after the wait is over, finds nothing and leases nothing.
        store.faults = ["refuse"]
        with post.receive("orders", wait=0) as message:
            assert message is None
        assert post.ledger("orders").claims == 0


@pytest.mark.promise("LEASE-6")
@pytest.mark.parametrize("mode", MODES)
def test_a_claim_lost_for_longer_than_the_budget_is_found_by_the_next_receive(mode: str) -> None:
    store = ShakyStore()
    with open_client(mode, store=store, retry_budget=0) as post:
        post.publish_many("orders", [1, 2])
        store.faults = ["cut"]
        with pytest.raises(errors.OutcomeUnknown, match="claim: the request was sent"), post.receive("orders"):
            pass
        store.faults = ["refuse"]
        with pytest.raises(errors.StoreUnavailable), post.receive("orders"):
            pass
        with post.receive("orders") as message:
            assert (message.body, message.deliveries) == (1, 1)
        with post.receive("orders") as message:
            assert message.body == 2
        assert post.ledger("orders").claims == 2


@pytest.mark.promise("LEASE-6")
@pytest.mark.parametrize("mode", MODES)
def test_a_lost_reply_to_a_settle_settles_once(mode: str) -> None:
    store = ShakyStore()
    with open_client(mode, store=store) as post:
        post.publish("orders", 1)
        with post.receive("orders") as message:
            store.faults = ["cut"]
        assert message.settled == "done"
        assert store.ran.count("settle") == 2
        assert post.ledger("orders").done == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_settle_that_fails_does_not_hide_the_blocks_own_error(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    store = ShakyStore()
    with open_client(mode, store=store, retry_budget=0) as post:
        post.publish("orders", 1)

        def block() -> None:
            with post.receive("orders"):
                store.faults = ["refuse"]
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            block()
        assert [vars(record)["event"] for record in caplog.records] == ["settle_failed"]
        assert post.ledger("orders").leased == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_done_that_cannot_be_sent_is_an_error(mode: str) -> None:
    store = ShakyStore()
    with open_client(mode, store=store, retry_budget=0) as post:
        post.publish("orders", 1)
        with pytest.raises(errors.StoreUnavailable, match="settle"), post.receive("orders"):
            store.faults = ["refuse"]
        assert post.ledger("orders").leased == 1
