"""A publisher of another broker, stacked on a subscriber, forwards a queue to that broker."""

from __future__ import annotations

from typing import Any

import pytest
from faststream.redis import RedisBroker

from tests.faststream.running import SOON, Place, run, running, settled
from tests.waiting import until_async
from waypost.testing.bench import fresh_namespace

pytestmark = pytest.mark.promise("FACE-4")


def test_a_queue_is_forwarded_to_another_broker(place: Place, valkey_url: str) -> None:
    broker, stream, seen = place.broker(), fresh_namespace(), []
    other = RedisBroker(valkey_url.replace("valkey://", "redis://"), logger=None)  # type: ignore[arg-type]

    @other.publisher(list=stream)
    @broker.subscriber("orders", retry=SOON)
    async def forward(body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "forwarded": True}

    @other.subscriber(list=stream)
    async def receive(body: dict[str, Any]) -> None:
        seen.append(body)

    async def test() -> None:
        async with running(broker):
            # The other broker is not connected yet: nothing is lost.
            await broker.publish({"id": 1}, "orders")
            await settled(broker, "orders", dead=1)
            await other.start()
            try:
                await broker.client.redrive("orders")
                await until_async(lambda: seen, "the arrival")
                await settled(broker, "orders", done=1)
            finally:
                await other.stop()

    run(test())
    assert seen == [{"id": 1, "forwarded": True}]
