"""How a FastStream handler ends, and what becomes of the message: on real servers."""

from __future__ import annotations

from typing import Any

import pytest
from faststream import AckPolicy
from faststream.exceptions import AckMessage, NackMessage, RejectMessage, SkipMessage

from tests.faststream.running import SOON, Place, run, running, settled
from tests.waiting import until_async
from waypost import ByException, Constant, Exponential, Linear, NoRetry
from waypost.faststream import TestWaypostBroker, WaypostBroker, WaypostRouter
from waypost.faststream.annotations import WaypostMessage
from waypost.faststream.outcomes import outcome_of
from waypost.message import Dead, Outcome, Retry, Snooze

pytestmark = pytest.mark.promise("FACE-4")

FAILURE = ValueError("no tea")


@pytest.mark.parametrize(
    ("error", "policy", "expected"),
    [
        (FAILURE, AckPolicy.NACK_ON_ERROR, FAILURE),
        (FAILURE, AckPolicy.MANUAL, FAILURE),
        (FAILURE, AckPolicy.REJECT_ON_ERROR, "dead"),
        (FAILURE, AckPolicy.ACK, None),
        (FAILURE, AckPolicy.ACK_FIRST, None),
        (AckMessage(), AckPolicy.REJECT_ON_ERROR, None),
        (NackMessage(delay=5), AckPolicy.REJECT_ON_ERROR, "retry"),
        (RejectMessage(), AckPolicy.NACK_ON_ERROR, "dead"),
        (SkipMessage(), AckPolicy.NACK_ON_ERROR, "snooze"),
    ],
)
def test_an_end_becomes_an_outcome(error: Exception, policy: AckPolicy, expected: Any) -> None:
    ending = outcome_of(error, policy)
    if isinstance(ending, Outcome):
        kinds = {"dead": Dead, "retry": Retry, "snooze": Snooze}
        assert type(ending) is kinds[expected]
    else:
        assert ending is expected


def test_wrong_options_of_a_nack_are_a_failure_that_names_them() -> None:
    assert "delay= and reason=, not pause=" in str(outcome_of(NackMessage(pause=1), AckPolicy.ACK))


def test_handlers_end_by_the_exceptions_of_faststream(place: Place) -> None:
    broker, seen = place.broker(), []

    @broker.subscriber("orders", retry=SOON)
    async def charge(body: str, message: WaypostMessage) -> None:
        seen.append(body)
        attempts = message.raw_message.attempts
        if body == "ack":
            raise AckMessage
        if body == "nack" and attempts == 0:
            raise NackMessage(delay=0.01, reason="not yet")
        if body == "reject":
            raise RejectMessage(reason="bad", error="it is bad")
        if body == "fail" and attempts == 0:
            raise ValueError("once")

    async def test() -> Any:
        async with running(broker):
            await broker.publish_batch("ack", "nack", "reject", "fail", queue="orders")
            ledger = await settled(broker, "orders", done=3, dead=1)
            letters = [(one.reason, one.error) async for one in broker.client.dead_letters("orders")]
            return ledger.retried, letters

    assert run(test()) == (2, [("bad", "it is bad")])
    assert sorted(seen) == ["ack", "fail", "fail", "nack", "nack", "reject"]


def test_a_handler_decides_by_hand(place: Place) -> None:
    broker, seen = place.broker(), []

    @broker.subscriber("orders", ack_policy=AckPolicy.MANUAL, retry=SOON)
    async def charge(body: str, message: WaypostMessage) -> None:
        seen.append(body)
        if body == "ack":
            await message.ack()
            await message.nack()  # the first decision counts
            raise ValueError("too late to matter")
        if body == "reject":
            await message.reject(reason="bad")
        elif message.raw_message.attempts > 0:
            await message.ack()
        elif body == "nack":
            await message.nack(delay=0.01)

    async def test() -> Any:
        async with running(broker):
            await broker.publish_batch("ack", "nack", "left", "reject", queue="orders")
            await settled(broker, "orders", done=3, dead=1, retried=2)

    run(test())
    assert sorted(seen) == ["ack", "left", "left", "nack", "nack", "reject"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (AckPolicy.ACK, {"done": 1}),
        (AckPolicy.ACK_FIRST, {"done": 1}),
        (AckPolicy.REJECT_ON_ERROR, {"dead": 1}),
        (AckPolicy.NACK_ON_ERROR, {"retried": 2, "dead": 1}),
    ],
)
def test_the_policy_of_the_broker_decides_about_errors(
    place: Place, policy: AckPolicy, expected: dict[str, int]
) -> None:
    broker = place.broker(ack_policy=policy)

    @broker.subscriber("orders", retry=SOON)
    async def fail(body: int) -> None:
        raise ValueError("no tea")

    async def test() -> list[str | None]:
        async with running(broker):
            await broker.publish(1, "orders")
            await settled(broker, "orders", **expected)
            return [one.error async for one in broker.client.dead_letters("orders")]

    assert all("no tea" in str(error) for error in run(test()))


@pytest.mark.parametrize("policy", [AckPolicy.MANUAL, AckPolicy.ACK, AckPolicy.NACK_ON_ERROR])
def test_the_policy_of_the_broker_reaches_the_subscribers_of_its_routers(policy: AckPolicy) -> None:
    inner, outer = WaypostRouter(), WaypostRouter()

    @inner.subscriber("orders", retry=NoRetry())
    async def handle(body: str) -> None:
        if body == "fail":
            raise ValueError("no tea")

    outer.include_router(inner)
    broker = WaypostBroker("memory://", logger=None, ack_policy=policy)
    broker.include_router(outer)
    expected = {
        AckPolicy.MANUAL: {"done": 0, "dead": 2},
        AckPolicy.ACK: {"done": 2, "dead": 0},
        AckPolicy.NACK_ON_ERROR: {"done": 1, "dead": 1},
    }

    async def test() -> None:
        async with running(broker):
            await broker.publish_batch("end", "fail", queue="orders")
            ledger = await settled(broker, "orders", **expected[policy])
            assert ledger.retried == 0

    run(test())


def test_an_ack_that_is_raised_is_a_decision_by_hand(place: Place) -> None:
    broker, batches = place.broker(ack_policy=AckPolicy.MANUAL), []

    @broker.subscriber("orders", retry=SOON)
    async def charge(body: int) -> None:
        raise AckMessage

    @broker.subscriber("many", batch=10, retry=SOON)
    async def charge_all(bodies: list[int], message: WaypostMessage) -> None:
        batches.append(bodies)
        message.messages[0].dead("bad")
        raise AckMessage

    async def test() -> None:
        await broker.publish(1, "orders")
        await broker.publish_batch(1, 2, queue="many")
        async with running(broker):
            await settled(broker, "orders", done=1, retried=0)
            await settled(broker, "many", done=1, dead=1, retried=0)

    run(test())
    assert batches == [[1, 2]]


def test_a_message_that_is_done_first_can_be_rescheduled() -> None:
    broker, seen = WaypostBroker("memory://", logger=None), []

    @broker.subscriber("ticks", ack_policy=AckPolicy.ACK_FIRST)
    async def tick(body: int, message: WaypostMessage) -> None:
        seen.append(body)
        if len(seen) < 3:
            await message.reschedule(60)

    test = TestWaypostBroker(broker)

    async def scenario() -> None:
        async with test:
            await broker.publish(1, "ticks", key="tick")
            for _ in range(3):
                await test.advance(60)
            assert (await broker.client.ledger("ticks")).done == 3

    run(scenario())
    assert seen == [1, 1, 1]


def test_an_ack_that_is_raised_is_a_decision_by_hand_in_a_test_broker() -> None:
    broker = WaypostBroker("memory://", logger=None, ack_policy=AckPolicy.MANUAL)

    @broker.subscriber("orders")
    async def charge(body: int) -> None:
        raise AckMessage

    async def test() -> None:
        async with TestWaypostBroker(broker):
            await broker.publish(1, "orders")
            ledger = await broker.client.ledger("orders")
            assert (ledger.done, ledger.retried) == (1, 0)

    run(test())


@pytest.mark.parametrize(
    ("retry", "attempts"),
    [
        (NoRetry(), 1),
        (Constant(attempts=2, pause=0.001, jitter=0), 2),
        (Linear(attempts=3, step=0.001, jitter=0), 3),
        (Exponential(attempts=4, first=0.001, jitter=0), 4),
        (ByException((KeyError, NoRetry()), otherwise=Constant(attempts=2, pause=0.001, jitter=0)), 1),
        (ByException((OSError, NoRetry()), otherwise=Constant(attempts=2, pause=0.001, jitter=0)), 2),
    ],
    ids=["none", "constant", "linear", "exponential", "of its class", "of others"],
)
def test_a_retry_policy_sees_the_error_and_decides(place: Place, retry: Any, attempts: int) -> None:
    broker, seen = place.broker(), []

    @broker.subscriber("orders", retry=retry)
    async def fail(body: int) -> None:
        seen.append(body)
        raise KeyError("no tea")

    async def test() -> list[str | None]:
        async with running(broker):
            await broker.publish(1, "orders")
            await settled(broker, "orders", dead=1)
            return [one.reason async for one in broker.client.dead_letters("orders")]

    assert run(test()) == ["retries_exhausted"]
    assert len(seen) == attempts


def test_a_skipped_message_comes_back_at_no_cost(place: Place) -> None:
    broker, seen = place.broker(), []

    @broker.subscriber("orders")
    async def skip(body: int, message: WaypostMessage) -> None:
        raw = message.raw_message
        seen.append((raw.deliveries, raw.attempts))
        if len(seen) == 1:
            raise SkipMessage

    async def test() -> None:
        async with running(broker):
            await broker.publish(1, "orders")
            await settled(broker, "orders", done=1)

    run(test())
    assert seen == [(1, 0), (1, 0)]


def test_a_failed_batch_is_retried_and_a_decided_message_of_it_is_not(place: Place) -> None:
    broker, batches = place.broker(), []

    @broker.subscriber("orders", batch=10, retry=SOON)
    async def handle(bodies: list[int], message: WaypostMessage) -> None:
        batches.append(bodies)
        if len(batches) == 1:
            message.messages[0].done()
            raise ValueError("again")

    async def test() -> None:
        await broker.connect()
        await broker.publish_batch(1, 2, queue="orders")
        async with running(broker):
            await settled(broker, "orders", done=2)

    run(test())
    assert batches[0] == [1, 2]
    assert batches[1:] == [[2]]


def test_an_exit_in_a_handler_is_a_failure_and_stops_the_subscriber(place: Place) -> None:
    broker = place.broker()

    @broker.subscriber("orders")
    async def end_application(body: int) -> None:
        raise SystemExit(3)

    async def test() -> None:
        async with running(broker):
            await broker.publish(1, "orders")
            (subscriber,) = broker.subscribers
            await until_async(lambda: not subscriber.running, "the stop of the subscriber")
            ledger = await settled(broker, "orders", retried=1)
            assert ledger.done == 0

    run(test())
