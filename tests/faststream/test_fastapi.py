"""`waypost.faststream.fastapi.WaypostRouter`: subscribers with FastAPI's dependencies, in its application."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI
from httpx import ASGITransport, AsyncClient
from pydantic import BaseModel

from tests.faststream.running import Place, run, settled
from waypost.faststream import TestWaypostBroker
from waypost.faststream.fastapi import WaypostRouter

pytestmark = pytest.mark.promise("FACE-4")


class Order(BaseModel):
    id: int


def shop_name() -> str:
    return "corner shop"


def make_application(store: str, **options: Any) -> tuple[FastAPI, WaypostRouter, list[Any]]:
    """Return an application that publishes what is posted to it and handles it."""
    router = WaypostRouter(store, logger=None, **options)
    seen: list[Any] = []

    @router.subscriber("orders")  # type: ignore[untyped-decorator]
    @router.publisher("receipts")
    async def charge(order: Order, name: Annotated[str, Depends(shop_name)]) -> dict[str, Any]:
        seen.append((order.id, name))
        return {"paid": order.id}

    @router.post("/orders")  # type: ignore[untyped-decorator]
    async def create(order: Order) -> str:
        return (await router.broker.publish(order, "orders")).status

    app = FastAPI()
    app.include_router(router)
    return app, router, seen


def test_subscribers_start_and_stop_with_the_application(place: Place) -> None:
    app, router, seen = make_application(place.url, namespace=place.namespace)

    async def test() -> None:
        transport = ASGITransport(app=app)
        async with app.router.lifespan_context(app), AsyncClient(transport=transport, base_url="http://shop") as client:
            assert (await client.post("/orders", json={"id": 7})).json() == "queued"
            await settled(router.broker, "receipts", ready=1)
            assert '"orders' in (await client.get("/asyncapi.json")).text
        async with router.broker:
            assert await router.broker.client.workers() == []

    run(test())
    assert seen == [(7, "corner shop")]


def test_a_route_is_tested_in_memory() -> None:
    _, router, seen = make_application("valkey://127.0.0.1:1")

    async def test() -> None:
        async with TestWaypostBroker(router.broker):
            await router.broker.publish(Order(id=1), "orders")

    run(test())
    assert seen == [(1, "corner shop")]
