"""Messages that lapse, through clients and workers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.waiting import until
from tests.worker.harness import Harness
from waypost import CatchUp, Message, Middleware
from waypost.errors import InvalidInput, InvalidSchedule, InvalidTime, MessageRemoved


@pytest.mark.promise("PUB-10", "CHAIN-1")
def test_a_message_that_lapsed_reaches_no_handler_and_ends_the_wait_for_its_result(harness: Harness) -> None:
    handled: list[str] = []
    past = datetime.now(UTC) - timedelta(days=1)

    @harness.handler("orders")
    async def handle(body: str) -> None:
        handled.append(body)

    late = harness.publish("orders", "late", key="a", expires=past)
    many = harness.publish_many("orders", ["late", "late"], expires=past)
    harness.publish("orders", "kept", expires=timedelta(days=1))
    with harness.working():
        with pytest.raises(MessageRemoved):
            harness.wait_result(late, timeout=20)
        until(lambda: harness.ended("orders") == 4)
    assert handled == ["kept"]
    assert harness.ledger("orders").dropped == 3
    causes = [harness.history("orders", one.id)[-1].cause for one in (late, *many)]
    assert causes == ["lapsed"] * 3


@pytest.mark.promise("PUB-10", "WAKE-5")
def test_an_idle_worker_ends_what_lapses_while_it_waits_for_a_chain(harness: Harness) -> None:
    first = harness.publish("mails", "first", chain=True)

    @harness.handler("orders")
    async def handle(body: str) -> None:
        raise AssertionError("its chain has not ended")

    harness.publish("orders", "second", after=first, expires=0.5)
    with harness.working():
        until(lambda: harness.ledger("orders").dropped == 1)
    assert harness.ledger("mails").ready == 1


@pytest.mark.promise("PUB-10", "QUEUE-1")
def test_an_idle_worker_ends_what_lapses_in_a_paused_queue(harness: Harness) -> None:
    @harness.handler("orders")
    async def handle(body: str) -> None:
        raise AssertionError("the queue is paused")

    harness.configure("orders", lease=1)  # a worker polls once in a lease
    harness.pause("orders")
    with harness.working():
        harness.publish("orders", "late", expires=0.5)
        until(lambda: harness.ledger("orders").dropped == 1)
    assert harness.ledger("orders").ready == 0


@pytest.mark.promise("PUB-10", "PUB-8")
def test_an_expiry_before_the_due_time_is_refused_before_anything_is_written(harness: Harness) -> None:
    now = datetime.now(UTC)
    wrong = (
        {"expires": 5, "delay": 5}, {"expires": now, "at": now + timedelta(seconds=1)},
        {"expires": 60, "at": now + timedelta(hours=1)}, {"expires": now, "delay": 60},
    )  # fmt: skip
    for options in wrong:
        with pytest.raises(InvalidInput, match="lies before the message is due"):
            harness.publish("orders", 1, **options)
    for expires in (0, -1, float("nan"), True, "5", datetime.now()):  # noqa: DTZ005
        with pytest.raises(InvalidTime):
            harness.publish("orders", 1, expires=expires)
    assert harness.queues() == []


class Counting(Middleware):
    """Counts what is published; so messages of settles and schedules take the way through middleware."""

    def __init__(self) -> None:
        self.options: list[Any] = []

    def publish(self, outgoing: Any, call_next: Any) -> Any:
        self.options.append(outgoing.options.get("expires"))
        return call_next(outgoing)

    async def publish_async(self, outgoing: Any, call_next: Any) -> Any:
        self.options.append(outgoing.options.get("expires"))
        return await call_next(outgoing)


def span(message: Any) -> Any:
    """Return how long after its publish a stored message lapses."""
    return None if message.expires_at is None else message.expires_at - message.published_at


@pytest.mark.promise("PUB-10", "CHAIN-2")
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_is_sent_on_or_rescheduled_may_lapse(harness: Harness, wrapped: bool) -> None:
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    counting = Counting()
    harness.publish("orders", "first", key="a", expires=3600)
    if wrapped:
        harness.use(counting)
    with harness.receive("orders", wait=20) as message:
        message.then("mails", "plain")
        message.then("mails", "span", delay=5, expires=timedelta(minutes=1))
        message.then("mails", "moment", expires=at)
        message.reschedule(60, expires=90)
    assert counting.options == ([None, 60, at] if wrapped else [])
    mails = {mail.body: mail for mail in (*harness.peek("mails"), *harness.timers("mails"))}
    assert (span(mails["plain"]), mails["moment"].expires_at) == (None, at)
    # Where a settle cannot span queues it arrives later than it was made.
    made = mails["span"].published_at
    assert timedelta(0) < mails["span"].expires_at - made <= timedelta(minutes=1)
    (timer,) = harness.timers("orders")
    assert timedelta(seconds=60) < span(timer) <= timedelta(seconds=90)


@pytest.mark.promise("PUB-10", "CHAIN-2", "PUB-8")
def test_what_would_lapse_before_it_is_due_is_not_sent_on(harness: Harness) -> None:
    harness.publish("orders", "first")
    with harness.receive("orders", wait=20) as message:
        for send in (message.then, lambda queue, body, **options: message.reschedule(**options)):
            with pytest.raises(InvalidInput, match="lies before the message is due"):
                send("mails", "late", delay=60, expires=60)
        with pytest.raises(InvalidTime):
            message.then("mails", "never", expires=0)
    assert harness.queues() == ["orders"]
    assert harness.ledger("orders").done == 1


@pytest.mark.promise("PUB-10", "CHAIN-2")
def test_a_message_that_is_rescheduled_does_not_keep_its_expiry(harness: Harness) -> None:
    @harness.handler("orders")
    async def handle(message: Message[str]) -> None:
        message.reschedule(3600)

    harness.publish("orders", "first", key="a", expires=3600)
    harness.run()
    (timer,) = harness.timers("orders")
    assert timer.expires_at is None


@pytest.mark.promise("PUB-10", "CRON-7", "CRON-8")
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_messages_of_a_schedule_lapse_so_long_after_they_were_made(harness: Harness, wrapped: bool) -> None:
    counting = Counting()
    if wrapped:
        harness.use(counting)
    saved = harness.save_schedule("rollup", queue="reports", every=0.05, missed=CatchUp(5), max_fires=1, expires=90)
    assert saved.expires == timedelta(seconds=90)
    harness.trigger_schedule("rollup")
    end = datetime.now(UTC) - timedelta(days=1)
    harness.backfill("rollup", end - timedelta(seconds=0.1), end)
    harness.handler("other")(lambda body: None)
    with harness.working():
        until(lambda: harness.ledger("reports").published == 4)
    assert [span(one) for one in harness.peek("reports")] == [timedelta(seconds=90)] * 4
    assert counting.options == ([90] * 4 if wrapped else [])
    # What is not named stays as it is, and another expiry does not move the next fire.
    again = harness.save_schedule("rollup", queue="reports", every=3600, key="hourly", expires=timedelta(hours=1))
    longer = harness.save_schedule("rollup", queue="reports", every=3600, key="hourly", expires=None)
    assert (again.expires, longer.expires) == (timedelta(hours=1), None)
    assert longer.next_fire == again.next_fire


@pytest.mark.promise("PUB-10", "PUB-8")
def test_the_expiry_of_a_schedule_is_a_time_after_its_fires(harness: Harness) -> None:
    for expires in (0, -1, float("nan"), True, "5", datetime.now(UTC)):
        with pytest.raises(InvalidSchedule):
            harness.save_schedule("rollup", queue="reports", every=60, expires=expires)
        with pytest.raises(InvalidSchedule):
            harness.post.every(60, expires=expires)
    assert harness.queues() == []
