"""Messages with a retry policy and a time limit of their own, which win over those of their handlers."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost import ByException, Constant, Exponential, Message, NoRetry, StoredMessage
from waypost.errors import InvalidPolicy

SOON = Constant(pause=0.001, jitter=0)


@pytest.mark.promise("PUB-12")
def test_the_retry_policy_and_the_timeout_of_a_message_win_over_those_of_its_handler(harness: Harness) -> None:
    calls: list[str] = []

    @harness.handler("orders", retry=SOON, timeout=3600)
    async def handle(body: str) -> None:
        calls.append(body)
        if body == "slow":
            await asyncio.Event().wait()
        raise ValueError("on purpose")

    harness.publish("orders", "once", retry=NoRetry())
    harness.publish("orders", "slow", retry=NoRetry(), timeout=timedelta(milliseconds=20))
    harness.publish_many("orders", ["three"], retry=Constant(attempts=3, pause=0.001))
    harness.publish("orders", "plain")
    with harness.working():
        until(lambda: harness.ledger("orders").dead == 4)
    assert {body: calls.count(body) for body in calls} == {"once": 1, "slow": 1, "three": 3, "plain": 10}
    letters: dict[str, StoredMessage[str]] = {letter.body: letter for letter in harness.dead_letters("orders")}
    assert letters["slow"].error_type == "TimeoutError"
    assert "0.02 s" in (letters["slow"].error or "")
    assert letters["slow"].timeout == timedelta(milliseconds=20)
    assert letters["once"].retry_policy == NoRetry()
    assert (letters["plain"].retry_policy, letters["plain"].timeout) == (None, None)


@pytest.mark.promise("PUB-12")
def test_the_cap_of_the_queue_ends_a_message_that_its_own_policy_would_retry(harness: Harness) -> None:
    harness.configure("orders", max_deliveries=2)

    @harness.handler("orders", retry=NoRetry())
    async def handle(body: str) -> None:
        raise ValueError("on purpose")

    harness.publish("orders", "eager", retry=Constant(attempts=9, pause=0.001))
    with harness.working():
        until(lambda: harness.ledger("orders").dead == 1)
    (letter,) = harness.dead_letters("orders")
    assert (letter.reason, letter.deliveries) == ("max_deliveries", 2)
    assert "retry policy allowed another try" in letter.note


@pytest.mark.promise("PUB-12")
def test_a_block_of_receive_uses_the_policy_of_its_message(harness: Harness) -> None:
    harness.publish("orders", "once", retry=NoRetry())
    with pytest.raises(ValueError, match="on purpose"), harness.receive("orders", wait=20):
        raise ValueError("on purpose")
    (letter,) = harness.dead_letters("orders")
    assert letter.reason == "retries_exhausted"


@pytest.mark.promise("PUB-12")
def test_the_lease_of_a_block_is_not_renewed_past_the_timeout_of_its_message(harness: Harness) -> None:
    harness.configure("orders", lease=0.3)
    harness.publish("orders", "slow", timeout=0.001)
    with harness.receive("orders", wait=20) as message:
        until(lambda: message.lease_lost)
        with harness.receive("orders", wait=20) as again:
            assert (again.id, again.deliveries) == (message.id, 2)


@pytest.mark.promise("PUB-12")
def test_what_is_sent_on_or_rescheduled_has_its_policy(harness: Harness) -> None:
    @harness.handler("orders")
    async def handle(message: Message[str]) -> None:
        message.then("mails", message.body, retry=NoRetry(), timeout=7)
        if message.body == "again":
            message.reschedule(3600)

    harness.publish("orders", "again", key="a", retry=SOON, timeout=5)
    harness.run()
    (timer,) = harness.timers("orders")
    assert (timer.retry_policy, timer.timeout) == (SOON, timedelta(seconds=5))
    (mail,) = harness.peek("mails")
    assert (mail.retry_policy, mail.timeout) == (NoRetry(), timedelta(seconds=7))


@pytest.mark.promise("PUB-12")
def test_only_policies_of_numbers_travel_with_a_message(harness: Harness) -> None:
    class Own(Exponential, frozen=True):
        pass

    class Code:
        def delay(self, attempt: int, error: BaseException | None = None) -> float | None:
            return None

    for policy in (ByException(otherwise=NoRetry()), Own(), Code(), Exponential):
        with pytest.raises(InvalidPolicy, match="give such a policy to the handler"):
            harness.publish("orders", 1, retry=policy)
    assert harness.queues() == []
