"""Subscribers, publishers, replies and routers of `WaypostBroker` on real servers."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import aclosing
from typing import Annotated, Any

import pytest
from faststream import Context, Depends, FastStream
from faststream.exceptions import RejectMessage, SetupError, StopConsume
from faststream.message import StreamMessage
from faststream.middlewares import BaseMiddleware
from pydantic import BaseModel

from tests.faststream.running import SOON, Place, run, running, settled
from tests.waiting import until_async
from waypost import AsyncWaypost, Queue, Waypost
from waypost.errors import ConfigurationError, InvalidInput, MessageDead, ResultNotKept, WaitTimeout
from waypost.faststream import WaypostBroker, WaypostResponse, WaypostRoute, WaypostRoutePublisher, WaypostRouter
from waypost.faststream.annotations import Client, WaypostMessage
from waypost.worker.worker import await_unfinished

pytestmark = pytest.mark.promise("FACE-4")


class Order(BaseModel):
    id: int
    name: str = "tea"


def test_a_message_is_handled_as_the_annotated_type_and_settled(place: Place) -> None:
    broker, seen = place.broker(), []

    @broker.subscriber("orders")
    async def charge(order: Order, message: WaypostMessage, client: Client) -> None:
        seen.append((order, message.queue, message.headers, message.correlation_id, client is broker.client))

    async def test() -> None:
        async with running(broker):
            published = await broker.publish(Order(id=7), "orders", headers={"who": "Ann"}, correlation_id="c")
            assert published.status == "queued"
            await settled(broker, "orders", done=1)
            assert await broker.ping()

    run(test())
    assert seen == [(Order(id=7), "orders", {"who": "Ann"}, "c", True)]


@pytest.mark.parametrize("body", [{"id": 1}, "text", b"\x00\xff", 7, [1, 2], None], ids=repr)
def test_bodies_arrive_as_faststream_users_expect(place: Place, body: Any) -> None:
    broker, seen = place.broker(), []

    @broker.subscriber("bodies")
    async def receive(body: Any) -> None:
        seen.append(body)

    async def test() -> None:
        async with running(broker):
            await broker.publish(body, "bodies")
            await settled(broker, "bodies", done=1)

    run(test())
    assert seen == [b"" if body is None else body]


def test_a_plain_client_and_a_broker_understand_each_other(place: Place) -> None:
    broker, seen = place.broker(), []

    @broker.subscriber(Queue("orders", dict))
    @broker.publisher("receipts")
    async def charge(order: Order) -> dict[str, int]:
        seen.append(order.id)
        return {"paid": order.id}

    async def test() -> Any:
        async with running(broker), AsyncWaypost(place.url, namespace=place.namespace) as post:
            await post.publish("orders", {"id": 1})
            async with post.receive("receipts", wait=60) as message:
                assert message is not None
                return message.body

    assert run(test()) == {"paid": 1}
    assert seen == [1]


def test_one_subscriber_serves_several_queues_and_batches(place: Place) -> None:
    broker, single, batches = place.broker(), [], []

    @broker.subscriber("a", "b", concurrency=2)
    async def each(body: int, message: WaypostMessage) -> None:
        single.append((message.queue, body))

    @broker.subscriber("many", batch=50)
    async def together(bodies: list[Order]) -> None:
        batches.append([order.id for order in bodies])

    async def test() -> None:
        await broker.connect()
        await broker.publish_batch(*(Order(id=number) for number in range(20)), queue="many")
        async with running(broker):
            await broker.publish(1, "a")
            await broker.publish(2, "b")
            await settled(broker, "a", done=1)
            await settled(broker, "b", done=1)
            await settled(broker, "many", done=20)

    run(test())
    assert sorted(single) == [("a", 1), ("b", 2)]
    assert sorted(number for batch in batches for number in batch) == list(range(20))
    assert len(batches) < 20


def test_a_request_returns_the_reply_and_learns_of_a_failure_at_once(place: Place) -> None:
    broker = place.broker()

    @broker.subscriber("sums")
    async def add(numbers: list[int]) -> Any:
        if not numbers:
            raise RejectMessage(reason="nothing to add")
        return WaypostResponse(sum(numbers), headers={"count": str(len(numbers))})

    @broker.subscriber("silent", no_reply=True)
    async def ignore(body: Any) -> None: ...

    async def test() -> None:
        async with running(broker):
            reply = await broker.request([1, 2, 3], "sums", correlation_id="mine")
            assert await reply.decode() == 6
            assert (reply.headers, reply.correlation_id) == ({"count": "3"}, "mine")
            with pytest.raises(MessageDead, match="nothing to add"):
                await broker.request([], "sums", timeout=60)
            with pytest.raises(ResultNotKept, match="no_reply"):
                await broker.request([], "silent", timeout=60)
            with pytest.raises(WaitTimeout):
                await broker.request([1], "nowhere", timeout=0.05)
            publisher = broker.publisher("sums")
            assert await (await publisher.request([4, 5])).decode() == 9

    run(test())


def test_a_reply_goes_to_the_queue_that_reply_to_names(place: Place) -> None:
    broker, replies = place.broker(), []

    @broker.subscriber("questions")
    async def answer(question: str) -> str:
        return question.upper()

    @broker.subscriber("answers")
    async def receive(text: str) -> None:
        replies.append(text)

    async def test() -> None:
        async with running(broker):
            await broker.publish("why", "questions", reply_to="answers")
            await settled(broker, "answers", done=1)

    run(test())
    assert replies == ["WHY"]


def test_routers_put_their_prefixes_before_the_names_of_queues(place: Place) -> None:
    seen = []

    async def first(body: int) -> int:
        seen.append(body)
        return body + 1

    inner = WaypostRouter("inner-", handlers=[WaypostRoute(first, "a", publishers=[WaypostRoutePublisher("b")])])
    outer = WaypostRouter("outer-", routers=[inner])

    @outer.subscriber("inner-b")
    async def second(body: int) -> None:
        seen.append(body)

    broker = place.broker()
    broker.include_router(outer, prefix="top-")

    async def test() -> None:
        async with running(broker):
            await broker.publish(1, "top-outer-inner-a")
            await settled(broker, "top-outer-inner-b", done=1)

    run(test())
    assert seen == [1, 2]


def test_filters_choose_the_handler_of_a_message(place: Place) -> None:
    broker, seen = place.broker(), []
    subscriber = broker.subscriber("mixed", retry=SOON)

    @subscriber(filter=lambda message: message.headers.get("kind") == "order")
    async def order(body: dict[str, int]) -> None:
        seen.append(("order", body))

    @subscriber
    async def other(body: dict[str, int]) -> None:
        seen.append(("other", body))

    async def test() -> None:
        async with running(broker):
            await broker.publish({"n": 1}, "mixed", headers={"kind": "order"})
            await settled(broker, "mixed", done=1)
            await broker.publish({"n": 2}, "mixed")
            await settled(broker, "mixed", done=2)

    run(test())
    assert seen == [("order", {"n": 1}), ("other", {"n": 2})]


class Reversed:
    """A codec with a content type of its own."""

    async def encode(self, message: Any, serializer: Any = None) -> tuple[bytes, str | None]:
        return str(message).encode()[::-1], "application/reversed"

    async def decode(self, message: StreamMessage[Any]) -> Any:
        assert message.content_type == "application/reversed"
        assert "content-type" not in message.headers
        return message.body[::-1].decode()


def test_codecs_parsers_and_decoders_of_the_application_are_used(place: Place) -> None:
    coded, plain = place.broker(codec=Reversed()), place.broker()
    seen: list[Any] = []

    @coded.subscriber("coded")
    async def receive(body: str) -> None:
        seen.append(body)

    async def parse(message: Any, original: Any) -> Any:
        parsed = await original(message)
        parsed.headers["parsed"] = "yes"
        return parsed

    async def decode(message: Any, original: Any) -> Any:
        return [await original(message), message.headers["parsed"]]

    @plain.subscriber("parsed", parser=parse, decoder=decode)
    async def receive_list(body: list[Any]) -> None:
        seen.append(body)

    async def test() -> None:
        async with running(coded), running(plain):
            await coded.publish("abc", "coded")
            await settled(coded, "coded", done=1)
            await plain.publish(7, "parsed")
            await settled(plain, "parsed", done=1)

    run(test())
    assert seen == ["abc", [7, "yes"]]


def test_dependencies_context_and_middlewares_work(place: Place) -> None:
    seen: list[Any] = []

    class Recorder(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            seen.append(("consume", msg.headers["from"]))
            return await call_next(msg)

        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            cmd.add_headers({"from": "middleware"})
            return await call_next(cmd)

    broker = place.broker(middlewares=[Recorder])

    def double(number: int) -> int:
        return 2 * number

    @broker.subscriber("numbers")
    def handle(number: int, twice: Annotated[int, Depends(double)], name: str = Context("message.queue")) -> None:
        seen.append((number, twice, name))

    async def test() -> None:
        async with running(broker):
            await broker.publish(4, "numbers")
            await settled(broker, "numbers", done=1)

    run(test())
    assert seen == [("consume", "middleware"), (4, 8, "numbers")]


def test_a_subscriber_stops_alone_and_starts_again(place: Place) -> None:
    broker, seen = place.broker(), []

    @broker.subscriber("one")
    async def stops(body: int) -> None:
        seen.append(("one", body))
        if body == 2:
            raise StopConsume

    @broker.subscriber("two")
    async def goes_on(body: int) -> None:
        seen.append(("two", body))

    (subscriber,) = (one for one in broker.subscribers if one.queues == ["one"])  # type: ignore[attr-defined]

    async def test() -> None:
        async with running(broker):
            await broker.publish(1, "one")
            await settled(broker, "one", done=1)
            await broker.publish(2, "one")
            await until_async(lambda: not subscriber.running, "the stop of the subscriber")
            await settled(broker, "one", ready=1, leased=0)
            await broker.publish(3, "two")
            await settled(broker, "two", done=1)
            assert await broker.ping()
            assert seen == [("one", 1), ("one", 2), ("two", 3)]
            assert await broker.client.purge("one") == 1
            await subscriber.stop()
            await subscriber.start()
            await broker.publish(4, "one")
            await settled(broker, "one", done=2)

    run(test())


def test_messages_can_be_received_without_a_handler(place: Place) -> None:
    broker = place.broker()

    async def test() -> list[Any]:
        subscriber = broker.subscriber("orders", persistent=False)
        async with broker:
            await broker.publish_batch(1, 2, 3, queue="orders")
            first = await subscriber.get_one()
            assert first is not None
            found = [await first.decode()]
            async with aclosing(aiter(subscriber)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    found.append(await message.decode())
                    if len(found) == 3:
                        break
            last = await subscriber.get_one(timeout=60)  # it was not done: the loop did not go on
            assert last is not None
            assert await last.decode() == 3
            assert await subscriber.get_one(timeout=0.01) is None
        return found

    assert run(test()) == [1, 2, 3]


@pytest.mark.parametrize(("decision", "state"), [("none", "ready"), ("ack", "done"), ("reject", "dead")])
def test_a_message_that_a_break_abandons_is_given_back_unless_it_was_decided_about(decision: str, state: str) -> None:
    broker = WaypostBroker("memory://", logger=None)

    async def test() -> None:
        subscriber = broker.subscriber("orders", persistent=False)
        async with broker:
            await broker.publish_batch(1, 2, queue="orders")
            async with aclosing(aiter(subscriber)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    if await message.decode() == 2:
                        if decision != "none":
                            await getattr(message, decision)()
                        break
            ledger = await broker.client.ledger("orders")
            # The first one was done when the loop went on.
            expected = Counter({"done": 1}) + Counter({state: 1})
            assert {name: getattr(ledger, name) for name in ("ready", "done", "dead")} == {
                name: expected[name] for name in ("ready", "done", "dead")
            }
            assert ledger.leased == 0
            assert [one.deliveries for one in await broker.client.peek("orders")] == [0] * expected["ready"]

    run(test())


def test_a_client_of_the_application_is_used_and_stays_open(place: Place) -> None:
    async def test() -> None:
        async with AsyncWaypost(place.url, namespace=place.namespace) as post:
            broker, seen = WaypostBroker(post, logger=None), []

            @broker.subscriber("orders")
            async def charge(body: int) -> None:
                seen.append(body)

            for number in (1, 2):  # a broker can be started again
                async with running(broker):
                    await broker.publish(number, "orders")
                    await settled(broker, "orders", done=number)
            assert seen == [1, 2]
            assert (await post.ledger("orders")).done == 2

    run(test())


def test_a_lease_is_configured_when_the_subscriber_starts(place: Place) -> None:
    broker = place.broker()

    @broker.subscriber("orders", lease=90, max_deliveries=3)
    async def charge(body: int) -> None: ...

    async def test() -> Any:
        async with running(broker):
            policy = await broker.client.policy("orders")
            return policy.lease, policy.max_deliveries

    lease, deliveries = run(test())
    assert (lease.total_seconds(), deliveries) == (90, 3)


def test_what_cannot_work_is_refused_with_a_reason() -> None:
    broker = WaypostBroker("memory://", logger=None)
    with pytest.raises(ConfigurationError, match="name a queue"):
        broker.subscriber()
    with pytest.raises(ConfigurationError, match="concurrency"):
        broker.subscriber("orders", concurrency=0)
    with pytest.raises(ConfigurationError, match="no option polling"):
        broker.subscriber("orders", polling=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="event loop"):
        WaypostBroker(Waypost("memory://"))
    with pytest.raises(SetupError, match="WaypostRouter"):
        broker.include_router(object())  # type: ignore[arg-type]
    for _ in range(2):

        @broker.subscriber("twice")
        async def handle(body: int) -> None: ...

    async def test() -> None:
        with pytest.raises(ConfigurationError, match="queue twice has two subscribers"):
            await broker.start()
        await broker.stop()

    run(test())


def test_a_ping_fails_where_no_server_answers() -> None:
    broker = WaypostBroker("valkey://127.0.0.1:1", logger=None)
    assert run(broker.ping(0.5)) is False


def test_the_asyncapi_document_has_the_queues_and_no_credentials() -> None:
    broker = WaypostBroker("postgresql://zelda:secret@db.example:5432/shop?sslmode=require", logger=None)

    @broker.subscriber("orders", "more-orders")
    @broker.publisher("receipts")
    async def charge(order: Order) -> Order:
        return order

    document = FastStream(broker).schema.to_specification().to_json()
    assert "secret" not in document
    assert "zelda" not in document
    assert "sslmode" not in document
    for name in ("orders", "more-orders", "receipts", "Order", "db.example:5432"):
        assert f'"{name}"' in document, name


def test_a_stop_releases_what_runs_too_long(place: Place) -> None:
    broker = place.broker(graceful_timeout=0.05)

    async def test() -> None:
        started = asyncio.Event()

        @broker.subscriber("slow")
        async def hang(body: int) -> None:
            started.set()
            await asyncio.sleep(600)

        async with running(broker):
            await broker.publish(1, "slow")
            await asyncio.wait_for(started.wait(), 60)
        async with broker:
            ledger = await broker.client.ledger("slow")
            assert (ledger.ready, ledger.released, ledger.retried) == (1, 1, 0)

    run(test())


def test_a_blocking_handler_keeps_its_lease_when_the_broker_stops(place: Place) -> None:
    broker = place.broker(graceful_timeout=0.05)
    started, ended = threading.Event(), threading.Event()

    @broker.subscriber("slow")
    def hang(body: int) -> None:
        started.set()
        ended.wait(60)

    async def test() -> None:
        async with AsyncWaypost(place.url, namespace=place.namespace) as post:
            try:
                async with running(broker):
                    await broker.publish(1, "slow")
                    await until_async(started.is_set, "the start of the handler")
                ledger = await post.ledger("slow")
                assert (ledger.leased, ledger.ready, ledger.released) == (1, 0, 0)
            finally:
                ended.set()

            async def is_done() -> bool:
                return (await post.ledger("slow")).done == 1

            await until_async(is_done, "the settle")
            await await_unfinished()

    run(test())


def test_a_subscriber_with_a_blocking_function_has_no_timeout() -> None:
    broker = WaypostBroker("memory://", logger=None)

    def block(body: int) -> None: ...

    async def wait(body: int) -> None: ...

    mixed = broker.subscriber("mixed")
    mixed(wait, filter=lambda message: bool(message.headers))
    assert [handler.can_be_stopped for handler in mixed.handlers()] == [True]
    mixed(block)
    assert [handler.can_be_stopped for handler in mixed.handlers()] == [False]

    timed = broker.subscriber("timed", timeout=5)
    timed(wait, filter=lambda message: bool(message.headers))
    with pytest.raises(ConfigurationError, match="nothing can stop a thread"):
        timed(block)
    assert [handler.timeout for handler in timed.handlers()] == [5]


def test_a_batch_that_begins_with_none_is_published_whole() -> None:
    class Empty(BaseMiddleware):
        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            if cmd.destination == "removed":
                cmd.batch_bodies = ()
            else:
                cmd.batch_bodies = cmd.batch_bodies  # as a middleware that changes bodies does
            return await call_next(cmd)

    broker = WaypostBroker("memory://", logger=None, middlewares=[Empty])

    async def test() -> None:
        async with broker:
            published = await broker.publish_batch(None, 1, None, queue="orders")
            assert len(published) == 3
            assert (await broker.client.ledger("orders")).ready == 3
            assert len(await broker.publish_batch(None, queue="orders")) == 1
            assert await broker.publish_batch(1, 2, queue="removed") == []

    run(test())


def test_a_request_to_a_queue_without_leases_still_reaches_the_publishers_of_its_handler() -> None:
    broker, seen = WaypostBroker("memory://", logger=None), []

    @broker.subscriber("sums", lease=None)
    @broker.publisher("totals")
    async def add(numbers: list[int]) -> int:
        return sum(numbers)

    @broker.subscriber("totals")
    async def receive(total: int) -> None:
        seen.append(total)

    async def test() -> None:
        async with running(broker):
            with pytest.raises(ResultNotKept):
                await broker.request([1, 2], "sums", timeout=60)
            await settled(broker, "totals", done=1)

    run(test())
    assert seen == [3]


def test_a_broker_that_was_not_started_publishes_with_its_codec_and_decodes_replies_with_it() -> None:
    broker = WaypostBroker("memory://", logger=None, codec=Reversed())

    @broker.subscriber("coded")
    async def repeat(body: str) -> str:
        return body

    async def test() -> None:
        try:
            await broker.publish("abc", "other")
            async with broker.client.receive("other") as message:
                assert message is not None
                assert message.body == b"cba"
            await broker.start()
            assert await (await broker.request("abc", "coded", timeout=60)).decode() == "abc"
        finally:
            await broker.stop()

    run(test())


def test_a_request_in_a_transaction_is_refused() -> None:
    broker = WaypostBroker("memory://", logger=None)

    async def test() -> None:
        async with broker:
            with pytest.raises(InvalidInput, match="a request has no transaction="):
                await broker.request(1, "orders", transaction=object())

    run(test())


def test_a_start_that_is_cancelled_stops_its_worker() -> None:
    async def test() -> None:
        cancelled = 0
        for turns in range(12):
            broker = WaypostBroker("memory://", logger=None)

            @broker.subscriber("orders")
            async def charge(body: int) -> None: ...

            before = asyncio.all_tasks()
            start = asyncio.create_task(broker.start())
            for _ in range(turns):
                await asyncio.sleep(0)
            cancelled += start.cancel()
            await asyncio.wait([start])
            await broker.stop()
            if left := asyncio.all_tasks() - before - {start}:
                _, running_on = await asyncio.wait(left, timeout=20)
                assert not running_on
        assert cancelled > 0

    run(test())


def test_a_stop_that_fails_closes_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, closed = WaypostBroker("memory://", logger=None), []

    async def fail(timeout: float) -> None:
        raise ValueError("no tea")

    async def close() -> None:
        closed.append(broker)

    async def test() -> None:
        await broker.start()
        with monkeypatch.context() as patch:
            patch.setattr(broker.config.broker_config.workers, "stop_all", fail)
            patch.setattr(broker.client, "close", close)
            with pytest.raises(ValueError, match="no tea"):
                await broker.stop()
        await broker.stop()

    run(test())
    assert closed == [broker]


def test_an_exit_ends_the_application_although_the_subscriber_stops_already() -> None:
    broker = WaypostBroker("memory://", logger=None)
    exits: list[object] = []
    started: set[int] = set()

    class Application:
        def exit(self) -> None:
            exits.append(self)

    @broker.subscriber("orders", concurrency=2)
    async def end(body: int) -> None:
        started.add(body)
        await until_async(lambda: len(started) == 2, "the start of both handlers")
        if body == 1:
            raise StopConsume
        await until_async(lambda: not subscriber.running, "the stop of the subscriber")
        raise SystemExit(3)

    (subscriber,) = broker.subscribers

    async def test() -> None:
        broker.context.set_global("app", Application())
        async with running(broker):
            await broker.publish_batch(1, 2, queue="orders")
            await until_async(lambda: exits, "the exit of the application")

    run(test())
    assert len(exits) == 1


def test_a_parser_may_change_headers_of_its_own() -> None:
    broker, seen = WaypostBroker("memory://", logger=None), []

    async def parse(message: Any, original: Any) -> Any:
        parsed = await original(message)
        parsed.headers["parsed"] = "yes"
        return parsed

    @broker.subscriber("orders", parser=parse)
    async def charge(body: int, message: WaypostMessage) -> None:
        seen.append((message.headers, message.raw_message.headers))

    async def test() -> None:
        async with running(broker):
            await broker.publish(1, "orders", headers={"who": "Ann"})
            await settled(broker, "orders", done=1)

    run(test())
    assert seen == [({"who": "Ann", "parsed": "yes"}, {"who": "Ann"})]


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_the_schema_of_a_store_is_validated_by_either_name(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypost.store.postgres.drift", lambda url, namespace: ["a column is missing"])
    broker = WaypostBroker(f"{scheme}://127.0.0.1:1/shop", logger=None)
    with pytest.raises(ConfigurationError, match="a column is missing"):
        run(broker.validate_schema())
