"""What type checkers must find in the two clients. Nothing here runs.

A line with an ignore for both checkers is an error that they must find; all other lines are right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, assert_type

from pyspark.sql import SparkSession

from waypost import (
    AsyncWaypost,
    Constant,
    Dead,
    Drained,
    Event,
    Ledger,
    Message,
    Middleware,
    Outgoing,
    Policy,
    Published,
    Queue,
    Retry,
    StoredMessage,
    Waypost,
)
from waypost.client.async_client import AsyncConsumed
from waypost.client.sync_client import Consumed
from waypost.worker.sync_worker import SyncWorker
from waypost.worker.worker import Worker


@dataclass
class Order:
    id: int


@dataclass
class Mail:
    to: str


orders = Queue("orders", Order)
post = Waypost("memory://", queues=[orders, "mails"], strict_queues=True, state=Order(1))
async_post = AsyncWaypost("memory://", queues=[orders, "mails"])

# ---- publish -------------------------------------------------------------------------------------------------


def publishes() -> None:
    assert_type(post.publish(orders, Order(7)), Published)
    assert_type(post.publish("orders", {"id": 7}, key="order:7", delay=timedelta(minutes=1)), Published)
    assert_type(post.publish_many(orders, [Order(7)]), list[Published])
    assert_type(post.publish_many("orders", (number for number in range(3))), list[Published])

    post.publish(orders, Mail("you"))  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.publish(orders, {"id": 7})  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.publish_many(orders, [Mail("you")])  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.publish("orders", 1, priority="high")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.publish("orders", 1, mode="red")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    post.publish_many("orders", [1], key="one for all")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    Queue("orders", 7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def publishes_async() -> None:
    assert_type(await async_post.publish(orders, Order(7)), Published)
    assert_type(await async_post.publish_many("orders", [1, 2]), list[Published])
    under_way: Coroutine[Any, Any, Published] = async_post.publish(orders, Order(7))
    await under_way

    await async_post.publish(orders, Mail("you"))  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await post.publish(orders, Order(7))  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]
    async_post.publish(orders, Order(7)).status  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


# ---- receive and consume -------------------------------------------------------------------------------------


def receives() -> None:
    with post.receive(orders, wait=5) as message:
        assert_type(message, Message[Order] | None)
        message.body  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
        if message is not None:
            assert_type(message.body, Order)
            assert_type(message.headers, dict[str, str])
            assert_type(message.decode(Mail), Mail)
            message.body.item  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            message.retry("soon")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with post.receive("orders") as anything:
        assert_type(anything, Message[Any] | None)
    assert_type(post.consume(orders), Iterator[Consumed[Order]])
    for consumed in post.consume(orders):
        with consumed:
            assert_type(consumed.body, Order)
    assert_type(post.peek(orders), list[StoredMessage[Order]])
    assert_type(post.ledger("orders"), Ledger)
    assert_type(post.messages(orders, "dead", reason="rejected"), Iterator[StoredMessage[Order]])
    post.messages(orders, reasons="rejected")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    assert_type(post.configure("orders", lease=5), Policy)
    assert_type(post.configure("orders", lease=timedelta(seconds=5)).lease, timedelta | None)
    assert_type(post.stats("orders").at, datetime)
    post.policy("orders").lease_ms  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    post.wait_result("orders", "id", timeout=timedelta(seconds=5))
    Constant(pause=timedelta(seconds=5), total_cap=60)
    post.configure("orders", leases=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    post.configure("orders", overload="wait")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(post.history(post.publish(orders, Order(1))), list[Event])


async def receives_async() -> None:
    async with async_post.receive(orders, wait=5) as message:
        assert_type(message, Message[Order] | None)
    assert_type(async_post.consume(orders), AsyncIterator[AsyncConsumed[Order]])
    async for consumed in async_post.consume(orders):
        async with consumed:
            assert_type(consumed.body, Order)
    assert_type(await async_post.peek(orders), list[StoredMessage[Order]])
    assert_type(await async_post.ledger("orders"), Ledger)

    with async_post.receive(orders):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    async with post.receive(orders):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    for _ in async_post.consume(orders):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
        pass


# ---- handlers and workers ------------------------------------------------------------------------------------


@post.handler(orders, concurrency=50, retry=Constant(pause=5), timeout=30)
@async_post.handler(orders)
async def charge(order: Order, message: Message[Order], headers: Mapping[str, str]) -> Dead | Retry | None:
    assert_type(message.body, Order)
    message.then("mails", Mail(headers["to"]), delay=5)
    return Dead("negative") if order.id < 0 else None


@post.handler("numbers", batch=100, process=True)
def add(numbers: list[int], messages: list[Message[int]]) -> None:
    assert_type(messages[0].body, int)


@post.handler(["orders", "returns"], types=Order)
@async_post.handler({"orders": 3, "returns": 1}, types=["shop.Order"], batch=None)
def serve_both(order: Order) -> str:
    return str(order)


def handlers_of_several_queues() -> None:
    assert_type(serve_both(Order(1)), str)
    # Of several queues none is the one to publish to.
    serve_both.publish(Order(1))  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
    post.handler({"orders": "much"})  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.handler([orders])(first)
    post.worker(max_handlers=5)
    async_post.worker(["orders"], max_handlers=5)


def handlers() -> None:
    # A handler stays a function: it can be called, also wrongly.
    begun: Coroutine[Any, Any, Dead | Retry | None] = charge(Order(7), _message(), {})
    begun.close()
    charge(Mail("you"), _message(), {}).close()  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    as_it_was: Callable[[list[int], list[Message[int]]], None] = add
    add(["one"], [])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    post.handler("orders")(7)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.handler("orders", retry=5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.handler("orders", process="yes")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.handler("orders", concurency=5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    post.cron("@daily", handler={"concurency": 5})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    post.cron("@daily", handler={"batch": 5, "timeout": timedelta(seconds=5)})
    as_it_was([1], [])


class Session:
    """Stands for a session of a database."""


def first(order: Order) -> None: ...
def message_alone(message: Message[Order]) -> None: ...
def message_first(message: Message[Order], order: Order) -> None: ...
def session_first(session: Session, order: Order, headers: Mapping[str, str]) -> None: ...
def wider(order: Order | Mail) -> None: ...
def widest(order: object) -> None: ...
def nothing() -> None: ...
def mail(mail: Mail) -> None: ...
def mail_message(message: Message[Mail]) -> None: ...
def mail_behind_session(session: Session, mail: Mail) -> None: ...
def batch(orders: list[Order], messages: list[Message[Order]]) -> None: ...
def batch_of_messages(messages: list[Message[Order]]) -> None: ...
def batch_of_mails(mails: list[Mail]) -> None: ...
async def awaited(order: Order) -> str:
    return str(order.id)


def handlers_of_a_typed_queue() -> None:
    post.handler(orders)(first)
    post.handler(orders)(message_alone)
    post.handler(orders)(message_first)
    post.handler(orders)(session_first)
    post.handler(orders)(wider)
    post.handler(orders)(widest)
    post.handler(orders)(nothing)
    post.handler(orders)(awaited)
    post.handler(orders)(lambda order: order.id)
    post.handler(orders, batch=10)(batch)
    post.handler(orders, batch=10, process=True)(batch_of_messages)

    post.handler(orders)(mail)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.handler(orders)(mail_message)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.handler(orders)(mail_behind_session)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.handler(orders)(batch)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.handler(orders, batch=10)(first)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.handler(orders, batch=10)(batch_of_mails)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    async_post.handler(orders)(mail)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    async_post.handler(orders, batch=10)(batch_of_mails)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]


def job(order: Order, spark: SparkSession, message: Message[Order]) -> None: ...
def job_of_a_message(message: Message[Order], spark: SparkSession) -> None: ...
def job_session_first(spark: SparkSession, order: Order) -> None: ...
def job_alone(spark: SparkSession) -> None: ...
def job_of_mails(mail: Mail, spark: SparkSession) -> None: ...


def spark_jobs() -> None:
    assert_type(post.spark_job(orders, timeout=60)(job).publish(Order(7), key="order:7"), Published)
    post.spark_job(orders, master="sc://127.0.0.1", config={"spark.x": "1"})(job_of_a_message)
    post.spark_job(orders)(job_session_first).publish(Order(7))
    post.spark_job(orders)(job_alone).publish(Order(7))
    post.spark_job("orders")(job).publish(Order(7))
    post.spark_job("orders")(job_session_first).publish(Order(7))
    post.spark_job("orders")(job_alone).publish({"id": 7})
    of_several: Callable[[SparkSession], None] = post.spark_job({"a": 2, "b": 1}, types="Order")(job_alone)
    del of_several
    under_way: Coroutine[Any, Any, Published] = async_post.spark_job(orders)(job).publish(Order(7))
    del under_way

    post.spark_job(orders)(job_of_mails)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    post.spark_job(orders)(job).publish(Mail("you"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    post.spark_job("orders")(job_session_first).publish(Mail("you"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    post.spark_job(orders, process=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    post.spark_job(orders, concurrency="two")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


async def handlers_publish() -> None:
    assert_type(charge.publish(Order(7), key="order:7", delay=timedelta(minutes=1)), Published)
    charge.publish(Mail("you"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    charge.publish(Order(7), priority="high")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    add.publish(1)
    add.publish([1])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    for typed in (post.handler(orders)(message_alone), post.handler(orders)(message_first)):
        typed.publish(Order(7))
        typed.publish(Mail("you"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    post.handler(orders)(session_first).publish(Order(7))
    post.handler(orders)(wider).publish(Mail("you"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    post.handler(orders, batch=10)(batch).publish([Order(7)])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    post.handler("orders")(first).publish(Order(7))
    post.handler("orders")(first).publish(Mail("you"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    post.handler("orders")(message_alone).publish(Mail("you"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    post.handler("orders", batch=5)(batch_of_messages).publish(Mail("you"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    post.handler("orders")(widest).publish(Mail("you"))
    post.handler("orders")(nothing).publish(Mail("you"))

    waiting = async_post.handler(orders)(awaited)
    assert_type(await waiting.publish(Order(7)), Published)
    assert_type(await waiting(Order(7)), str)
    await waiting.publish(Mail("you"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    waiting.publish(Order(7)).status  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def _message() -> Message[Order]:
    raise NotImplementedError


async def workers() -> None:
    assert_type(post.worker(), SyncWorker)
    assert_type(post.worker([orders]).run(until_empty=True), Drained)
    assert_type(async_post.worker(), Worker)
    assert_type(await async_post.worker().run(until_empty=True), Drained)
    assert_type(post.drain(), Drained)
    assert_type(await async_post.drain(), Drained)
    with async_post.worker():  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass


# ---- middleware ----------------------------------------------------------------------------------------------


class Passing(Middleware):
    """Overrides with the types of the base."""

    def publish(self, outgoing: Outgoing, call_next: Callable[[Outgoing], list[Published]]) -> list[Published]:
        assert_type(outgoing.with_headers({"a": "b"}), Outgoing)
        return call_next(outgoing)


class Mistaken(Middleware):
    """An async method in place of a sync one."""

    async def handle(self, messages: Any, call_next: Any) -> str:
        return "handled"

    async def publish(self, outgoing: Any, call_next: Any) -> list[Published]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return []


Waypost("memory://", middleware=[Passing()])
Waypost("memory://", middleware=[Passing])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
