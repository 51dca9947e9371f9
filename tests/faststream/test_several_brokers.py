"""Brokers at one queue: each message once, bounded concurrency, dead letters that are sent again."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from tests.faststream.running import SOON, Place, run, running, settled
from tests.waiting import until_async
from waypost.faststream import WaypostBroker

pytestmark = pytest.mark.promise("FACE-4")


def test_two_brokers_at_one_queue_handle_each_message_once(place: Place) -> None:
    brokers, seen = [place.broker(), place.broker()], list[int]()

    async def test() -> None:
        for broker in brokers:

            @broker.subscriber("orders", concurrency=1)
            async def charge(body: int) -> None:
                seen.append(body)

        async with running(brokers[0]), running(brokers[1]):
            await brokers[0].publish_batch(*range(20), queue="orders")
            await settled(brokers[0], "orders", done=20)

    run(test())
    assert sorted(seen) == list(range(20))


def test_no_more_handlers_run_at_once_than_the_concurrency_allows() -> None:
    broker = WaypostBroker("memory://", logger=None)
    together: list[int] = []

    async def test() -> None:
        inside, both = set[int](), asyncio.Event()

        @broker.subscriber("orders", concurrency=2)
        async def charge(body: int) -> None:
            inside.add(body)
            together.append(len(inside))
            if len(inside) == 2:
                both.set()
            await asyncio.wait_for(both.wait(), 60)  # two of them do run at once
            await asyncio.sleep(0)
            inside.discard(body)

        async with running(broker):
            await broker.publish_batch(*range(10), queue="orders")
            await settled(broker, "orders", done=10)

    run(test())
    assert max(together) == 2


def test_a_client_that_decodes_answers_is_harmless(valkey_url: str) -> None:
    seen: list[bytes] = []

    async def test() -> None:
        redis = Redis.from_url(valkey_url.replace("valkey://", "redis://"), decode_responses=True)
        broker = WaypostBroker(redis, namespace="decoding", logger=None)

        @broker.subscriber("raw")
        async def read(body: bytes) -> None:
            seen.append(body)

        try:
            async with running(broker):
                await broker.publish(b"{\x00\xff not JSON", "raw")
                await until_async(lambda: seen, "the handler")
                await settled(broker, "raw", done=1)
            assert await redis.ping()  # it is the application's, and stays open
        finally:
            await redis.aclose()

    run(test())
    assert seen == [b"{\x00\xff not JSON"]


def test_a_dead_letter_is_sent_again_by_the_client_of_the_broker(place: Place) -> None:
    broker, seen = place.broker(), list[int]()

    @broker.subscriber("orders", retry=SOON)
    async def charge(body: int) -> None:
        seen.append(body)
        if len(seen) <= 3:
            raise ConnectionError("the payment service is away")

    async def test() -> None:
        async with running(broker):
            await broker.publish(7, "orders", key="order:7", headers={"tenant": "acme"})
            await settled(broker, "orders", dead=1)
            (letter,) = [one async for one in broker.client.dead_letters("orders")]
            assert (letter.body, letter.key, letter.headers["tenant"]) == (7, "order:7", "acme")
            assert (letter.reason, letter.error_type) == ("retries_exhausted", "ConnectionError")
            assert (await broker.client.redrive("orders")).moved == [letter.id]
            await settled(broker, "orders", done=1)

    run(test())
    assert seen == [7] * 4
