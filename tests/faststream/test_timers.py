"""Timers by key: schedule, inspect, overwrite, cancel, and reschedule in the handler."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.faststream.running import Place, run, running, settled
from waypost.faststream.annotations import WaypostMessage

pytestmark = pytest.mark.promise("FACE-4")


def test_timers_are_listed_overwritten_and_cancelled(place: Place) -> None:
    broker = place.broker()

    async def test() -> None:
        async with broker:
            first = await broker.publish("a", "timers", key="a", delay=timedelta(hours=1))
            second = await broker.publish("b", "timers", key="b", at=datetime.now(UTC) + timedelta(hours=2))
            assert (first.status, second.status) == ("delayed", "delayed")
            assert (await broker.publish("c", "timers", key="a", delay=60)).status == "duplicate"
            assert [one.body for one in await broker.timers("timers")] == ["a", "b"]
            soon = datetime.now(UTC) + timedelta(minutes=90)
            assert [one.key for one in await broker.timers("timers", before=soon)] == ["a"]
            assert await broker.has("timers", "a")
            assert not await broker.has("timers", "c")
            replaced = await broker.publish("A", "timers", key="a", delay=timedelta(hours=3), on_conflict="replace")
            assert replaced.status == "replaced"
            assert [one.body for one in await broker.timers("timers")] == ["b", "A"]
            assert await broker.cancel("timers", key="a") == "cancelled"
            assert await broker.cancel("timers", key="a") == "unknown"
            assert not await broker.has("timers", "a")
            await broker.publish("d", "timers", key="d", delay=60)
            assert await broker.cancel_all("timers") == 2
            assert await broker.timers("timers") == []

    run(test())


@pytest.mark.promise("PUB-10")
def test_a_message_that_lapsed_reaches_no_subscriber_and_a_rescheduled_one_may_lapse(place: Place) -> None:
    broker, seen = place.broker(), []

    @broker.subscriber("timers")
    async def fire(body: str, message: WaypostMessage) -> None:
        seen.append(body)
        await message.reschedule(3600, expires=7200)

    async def test() -> None:
        async with running(broker):
            await broker.publish("late", "timers", expires=datetime.now(UTC) - timedelta(days=1))
            await broker.publish("kept", "timers", expires=3600)
            await settled(broker, "timers", done=1, dropped=1)
            (timer,) = await broker.timers("timers")
            assert timer.expires_at is not None
            assert timedelta(0) < timer.expires_at - timer.ready_at <= timedelta(hours=1)

    run(test())
    assert seen == ["kept"]


def test_a_timer_fires_once_and_not_early(place: Place) -> None:
    broker, seen = place.broker(), []

    @broker.subscriber("timers")
    async def fire(body: str, message: WaypostMessage) -> None:
        raw = message.raw_message
        seen.append((body, raw.claimed_at >= raw.ready_at))

    async def test() -> None:
        async with running(broker):
            await broker.publish("now", "timers", at=datetime.now(UTC) - timedelta(days=1))
            await broker.publish("soon", "timers", key="soon", delay=0.1)
            cancelled = await broker.publish("never", "timers", delay=60)
            assert await broker.cancel(cancelled) == "cancelled"
            await settled(broker, "timers", done=2, cancelled=1)

    run(test())
    assert sorted(seen) == [("now", True), ("soon", True)]


def test_a_handler_reschedules_its_own_timer(place: Place) -> None:
    broker, seen = place.broker(), []

    @broker.subscriber("timers")
    async def tick(body: int, message: WaypostMessage) -> None:
        seen.append((body, message.raw_message.key))
        if len(seen) == 1:
            await message.reschedule(0.01)
        elif len(seen) == 2:
            # The next generation of the key: parked until this one is settled, which cannot erase it.
            await broker.publish(body + 1, "timers", key="tick", delay=0.01, on_conflict="replace")

    async def test() -> None:
        async with running(broker):
            await broker.publish(1, "timers", key="tick")
            await settled(broker, "timers", done=3)

    run(test())
    assert seen == [(1, "tick"), (1, "tick"), (2, "tick")]


def test_the_publisher_of_a_handler_takes_the_options_of_publish(place: Place) -> None:
    broker = place.broker()

    @broker.subscriber("orders")
    @broker.publisher("reminders", delay=3600, priority=9, headers={"from": "orders"})
    async def charge(body: int) -> int:
        return body

    async def test() -> Any:
        async with running(broker):
            before = time.time()
            await broker.publish(1, "orders")
            await settled(broker, "reminders", delayed=1)
            (timer,) = await broker.timers("reminders")
            assert timer.ready_at.timestamp() > before + 3000
            return timer.body, timer.priority, timer.headers

    assert run(test()) == (1, 9, {"from": "orders"})
