"""`TestWaypostBroker`: in memory with time that a test moves, and on a real store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from faststream import BaseMiddleware, FastStream, TestApp
from faststream.exceptions import RejectMessage

from tests.faststream.running import SOON, Place, run
from waypost import Constant, Queue
from waypost.errors import InvalidInput, InvalidName, WaitTimeout
from waypost.faststream import TestWaypostBroker, WaypostBroker, WaypostResponse
from waypost.faststream.annotations import WaypostMessage

pytestmark = pytest.mark.promise("FACE-4")


def make_broker() -> WaypostBroker:
    """Return a broker on a store that is not there."""
    return WaypostBroker("valkey://127.0.0.1:1", logger=None)


def test_a_message_is_handled_before_publish_returns() -> None:
    broker = make_broker()

    @broker.subscriber("orders")
    @broker.publisher("receipts")
    async def charge(body: dict[str, int]) -> int:
        return body["id"]

    async def test() -> None:
        async with TestWaypostBroker(broker):
            await broker.publish({"id": 7}, "orders")
            charge.mock.assert_called_once_with({"id": 7})
            (publisher,) = broker.publishers
            publisher.mock.assert_called_once_with(7)
            assert await (await broker.request({"id": 8}, "orders")).decode() == 8
            assert (await broker.client.ledger("orders")).done == 2
            assert await broker.ping()

    run(test())


def test_what_a_handler_returns_passes_through_the_middlewares_in_the_order_of_any_publish() -> None:
    passed: list[tuple[str, str]] = []

    def noting(name: str) -> type[BaseMiddleware[Any, Any]]:
        class Noted(BaseMiddleware[Any, Any]):
            async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
                passed.append((cmd.destination, name))
                return await call_next(cmd)

        return Noted

    broker = WaypostBroker("valkey://127.0.0.1:1", logger=None, middlewares=[noting("first"), noting("second")])

    @broker.subscriber("orders")
    async def charge(body: int) -> WaypostResponse:
        return WaypostResponse(body, "receipts")

    async def test() -> None:
        async with TestWaypostBroker(broker):
            await broker.publish(7, "orders")

    run(test())
    assert passed == [(queue, name) for queue in ("orders", "receipts") for name in ("first", "second")]


def test_a_handler_names_the_queue_of_what_it_returns() -> None:
    published: list[tuple[str, Any]] = []

    class Noted(BaseMiddleware):
        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            published.append((cmd.destination, cmd.body))
            return await call_next(cmd)

    broker = WaypostBroker("valkey://127.0.0.1:1", logger=None, middlewares=[Noted])
    seen: list[Any] = []

    @broker.subscriber("orders")
    @broker.publisher("audit")
    async def charge(body: int) -> WaypostResponse:
        return WaypostResponse(body, Queue("receipts", int) if body else "none", headers={"by": "charge"}, key="k")

    @broker.subscriber("receipts")
    async def send(body: int, message: WaypostMessage) -> None:
        seen.append((body, message.headers, message.correlation_id))

    @broker.subscriber("many", batch=10)
    async def sum_up(bodies: list[int]) -> WaypostResponse:
        return WaypostResponse(sum(bodies), queue="orders", delay=60)

    async def test() -> None:
        async with TestWaypostBroker(broker) as _:
            await broker.publish(7, "orders", correlation_id="c")
            assert seen == [(7, {"by": "charge"}, "c")]
            assert ("receipts", 7) in published
            (publisher,) = broker.publishers
            publisher.mock.assert_called_once_with(7)
            await broker.publish_batch(1, 2, queue="many")
            (timer,) = await broker.timers("orders")
            assert timer.body == 3
            await broker.publish(0, "orders")
            (left,) = [one async for one in broker.client.messages("none")]
            assert (left.body, left.key) == (0, "k")

    run(test())


def test_a_message_whose_answer_cannot_be_published_has_failed() -> None:
    broker = make_broker()

    @broker.subscriber("orders", retry=Constant(pause=60, attempts=2))
    async def charge(body: int) -> WaypostResponse:
        return WaypostResponse(body, queue="receipts", priority=99)

    async def test() -> None:
        async with TestWaypostBroker(broker):
            with pytest.raises(InvalidInput, match="priority"):
                await broker.publish(7, "orders")
            assert (await broker.client.ledger("orders")).retried == 1

    run(test())
    with pytest.raises(InvalidName):
        WaypostResponse(7, queue="no such name")


def test_a_block_that_fails_gives_the_broker_its_producer_back() -> None:
    broker = make_broker()
    config = broker.config.broker_config
    producer, client = config.producer, config.client

    async def test() -> None:
        async with TestWaypostBroker(broker):
            assert config.producer is not producer
            raise ValueError("no tea")

    with pytest.raises(ValueError, match="no tea"):
        run(test())
    assert config.producer is producer
    assert config.client is client


def test_an_error_of_a_handler_is_raised_in_the_test() -> None:
    broker = make_broker()

    @broker.subscriber("orders", retry=Constant(attempts=2, pause=60, jitter=0))
    async def fail(body: str) -> None:
        if body == "reject":
            raise RejectMessage(reason="bad")
        raise ValueError("no tea")

    test = TestWaypostBroker(broker)

    async def scenario() -> list[str | None]:
        async with test:
            with pytest.raises(ValueError, match="no tea"):
                await broker.publish("fail", "orders")
            await broker.publish("reject", "orders")
            with pytest.raises(ValueError, match="no tea"):
                await test.advance(60)
            await test.advance(3600)
            return [one.reason async for one in broker.client.dead_letters("orders")]

    assert sorted(map(str, run(scenario()))) == ["bad", "retries_exhausted"]


def test_timers_wait_until_the_time_is_moved() -> None:
    broker, seen = make_broker(), []

    @broker.subscriber("timers")
    async def tick(body: int, message: WaypostMessage) -> None:
        seen.append(body)
        await message.reschedule(timedelta(hours=1))

    test = TestWaypostBroker(broker)

    async def scenario() -> None:
        async with test:
            await broker.publish(1, "timers", key="tick", at=datetime.now(UTC) + timedelta(hours=1))
            assert await broker.has("timers", "tick")
            await test.advance(timedelta(minutes=59))
            assert seen == []
            await test.advance(timedelta(minutes=2))
            await test.advance(3600)
            assert seen == [1, 1]
            assert await broker.cancel("timers", key="tick") == "cancelled"
            await test.advance(timedelta(days=1))
            assert seen == [1, 1]

    run(scenario())


def test_batches_and_keys_work_in_memory() -> None:
    broker, batches = make_broker(), []

    @broker.subscriber("orders", batch=2)
    async def handle(bodies: list[str]) -> None:
        batches.append(bodies)

    async def scenario() -> Any:
        async with TestWaypostBroker(broker):
            published = await broker.publish_batch("a", "b", "c", queue="orders", key=lambda body: f"key {body}")
            again = await broker.publish("a", "orders", key="key a", delay=60)
            twice = await broker.publish("a", "orders", key="key a")
            return [one.status for one in published], again.status, twice.status

    assert run(scenario()) == (["queued"] * 3, "delayed", "duplicate")
    assert batches == [["a", "b"], ["c"]]


def test_the_real_store_can_be_used(place: Place) -> None:
    broker = place.broker()

    @broker.subscriber("orders", retry=SOON)
    @broker.publisher("receipts")
    async def charge(body: int) -> int:
        return body + 1

    async def test() -> None:
        async with TestWaypostBroker(broker, with_real=True), TestApp(FastStream(broker)):
            await broker.publish(1, "orders")
            await charge.wait_call(60)
            charge.mock.assert_called_once_with(1)

    run(test())


def test_a_request_that_no_subscriber_replies_to_fails_at_once() -> None:
    broker = WaypostBroker("memory://", logger=None)

    @broker.subscriber("sums")
    async def add(numbers: list[int]) -> int:
        return sum(numbers)

    async def test() -> None:
        async with TestWaypostBroker(broker):
            reply = await broker.request([1, 2], "sums", timeout=3600)
            assert await reply.decode() == 3
            for queue, options in (("nowhere", {}), ("sums", {"delay": 60})):
                with pytest.raises(WaitTimeout, match="no subscriber of this test replied"):
                    await broker.request([1], queue, timeout=3600, **options)

    run(test())
