"""A handler publishes to its own queue: `charge.publish(order)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.unit.clients import MODES
from tests.worker import process_handlers
from tests.worker.harness import Harness
from waypost import AsyncWaypost, Message, Published, Queue, Waypost
from waypost.errors import InvalidBody, KeyInUse, UnknownOption, UnknownQueue

pytestmark = pytest.mark.promise("FACE-1")


@dataclass
class Order:
    id: int


def publish_of(function: Any) -> Callable[..., Any]:
    publish: Callable[..., Any] = function.publish
    return publish


def test_what_a_handler_publishes_comes_to_itself_with_the_type_of_its_body(harness: Harness) -> None:
    seen: list[Any] = []

    def charge(order: Order, message: Message[Order]) -> None:
        seen.append((order, message.key, message.headers))

    publish = publish_of(harness.handler(Queue("orders", Order))(charge))
    published = harness.done(publish(Order(7), key="order:7", headers={"from": "shop"}))
    assert isinstance(published, Published)
    assert (published.queue, published.status) == ("orders", "queued")
    with pytest.raises(KeyInUse):
        harness.done(publish(Order(8), key="order:7", on_conflict="error"))
    harness.run()
    assert seen == [(Order(7), "order:7", {"from": "shop"})]


@pytest.mark.parametrize("mode", MODES)
def test_the_annotation_of_a_handler_is_the_type_of_what_it_publishes_to_a_plain_name(mode: str) -> None:
    with Harness(mode, "memory://") as harness:

        async def charge(order: Order) -> None: ...
        async def add(numbers: list[int]) -> None: ...
        async def take(body: Any) -> None: ...

        to_orders = publish_of(harness.handler("orders")(charge))
        to_numbers = publish_of(harness.handler("numbers", batch=10)(add))
        to_anything = publish_of(harness.handler("anything")(take))
        for publish, right, wrong in ((to_orders, Order(7), {"id": "x"}), (to_numbers, 1, "one")):
            harness.done(publish(right))
            with pytest.raises(InvalidBody):
                harness.done(publish(wrong))
        harness.done(to_anything({"a": 1}))
        with pytest.raises(UnknownOption, match="priority"):
            harness.done(to_anything(1, priorty=3))
        ledgers = {queue: harness.ledger(queue).published for queue in ("orders", "numbers", "anything")}
        assert ledgers == {"orders": 1, "numbers": 1, "anything": 1}


def test_a_handler_stays_the_function_that_it_was() -> None:
    post = Waypost("memory://")

    async def awaits(body: int) -> int:
        return body

    registered: Any = post.handler("awaits")(awaits)
    assert registered is awaits
    assert inspect.iscoroutinefunction(registered)
    registered = post.handler("processes", process=True)(process_handlers.square)
    assert registered is process_handlers.square


def test_a_function_that_can_have_no_attributes_is_wrapped() -> None:
    seen: list[Any] = []

    class Registrar:
        def publish(self) -> str:
            return "its own"

        def __call__(self, body: int) -> None:
            seen.append(body)

    own = Registrar()
    with Waypost("memory://") as post:
        of_a_list: Any = post.handler("a")(seen.append)
        of_an_object: Any = post.handler("b")(own)
        of_a_list.publish(1)
        of_an_object.publish(2)
        of_a_list(3)
        post.worker().run(until_empty=True)
    assert sorted(seen) == [1, 2, 3]
    assert own.publish() == "its own"


def test_of_two_clients_the_outermost_publishes() -> None:
    inner, outer = AsyncWaypost("memory://"), Waypost("memory://")

    @outer.handler("orders")
    @inner.handler("orders")
    def charge(order: int) -> None: ...

    assert charge.publish(7).status == "queued"
    assert outer.ledger("orders").ready == 1
    assert [one.queue for one in inner.handlers] == ["orders"]


def test_a_strict_client_publishes_to_the_queues_of_its_handlers() -> None:
    post = Waypost("memory://", strict_queues=True)

    @post.handler("orders")
    def charge(order: int) -> None:
        charge.publish(order - 1)

    assert charge.publish(1).status == "queued"
    with pytest.raises(UnknownQueue):
        post.publish("mails", 1)


def test_the_function_of_a_schedule_has_no_publish() -> None:
    post = Waypost("memory://")

    @post.every(60)
    def rollup() -> None: ...

    assert not hasattr(rollup, "publish")
