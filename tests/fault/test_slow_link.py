"""A slow link: long requests and replies are waited for while bytes pass, and leases are kept meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg_pool
import pytest
import redis
import redis.asyncio

from tests.fault.proxy import Proxy
from tests.unit.clients import begin_operation
from waypost import AsyncWaypost, Message, Waypost
from waypost.errors import OutcomeUnknown
from waypost.policy import CLAIM_BYTES_FIRST, CLAIM_BYTES_MAX
from waypost.store.postgres import executor as postgres_executor
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import EmbeddedServer, ValkeyServer

LARGE = b"x" * 1_000_000
#: Shorter than a large message takes over the link.
SILENCE_SECONDS = 1.0
BYTES_PER_SECOND = 400_000


@pytest.fixture(scope="module", params=["valkey", "postgres"])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    with ValkeyServer() if request.param == "valkey" else PostgresServer() as running:
        yield running


@pytest.fixture
def namespace(server: EmbeddedServer) -> str:
    name = fresh_namespace()
    if isinstance(server, PostgresServer):
        migrate(server.url, namespace=name)
    return name


@pytest.fixture
def link(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(postgres_executor, "REPLY_TIMEOUT_SECONDS", SILENCE_SECONDS)
    with Proxy(server.port, bytes_per_second=BYTES_PER_SECOND) as proxy:
        yield proxy


def over(link: Proxy, server: EmbeddedServer) -> str:
    url = server.url.replace(f":{server.port}", f":{link.port}")
    return url if isinstance(server, PostgresServer) else f"{url}?socket_timeout={SILENCE_SECONDS}"


@pytest.mark.promise("LEASE-17")
def test_a_long_request_and_a_long_reply_are_waited_for(server: EmbeddedServer, namespace: str, link: Proxy) -> None:
    with Waypost(over(link, server), namespace=namespace, retry_budget=0) as post:
        post.publish("orders", LARGE)
        assert [message.body for message in post.messages("orders")] == [LARGE]
        with post.receive("orders") as message:
            assert message is not None
            assert message.body == LARGE
        assert post.ledger("orders").done == 1


@pytest.mark.promise("LEASE-17")
def test_the_same_on_an_event_loop(server: EmbeddedServer, namespace: str, link: Proxy) -> None:
    async def use() -> int:
        async with AsyncWaypost(over(link, server), namespace=namespace, retry_budget=0) as post:
            await post.publish("orders", LARGE)
            assert [message.body async for message in post.messages("orders")] == [LARGE]
            async with post.receive("orders") as message:
                assert message is not None
                assert message.body == LARGE
            return (await post.ledger("orders")).done

    assert asyncio.run(use()) == 1


@pytest.mark.promise("LEASE-17", "STORE-5")
def test_the_same_with_the_callers_own_client(server: EmbeddedServer, namespace: str, link: Proxy) -> None:
    if isinstance(server, PostgresServer):
        with (
            psycopg_pool.ConnectionPool(over(link, server), kwargs={"autocommit": True}) as pool,
            Waypost(client=pool, namespace=namespace, retry_budget=0) as post,
        ):
            check_large(post)
        return
    with (
        redis.Redis(port=link.port, password=server.password, socket_timeout=SILENCE_SECONDS) as client,
        Waypost(client=client, namespace=namespace, retry_budget=0) as post,
    ):
        check_large(post)

    async def use() -> None:
        async with (
            redis.asyncio.Redis(port=link.port, password=server.password, socket_timeout=SILENCE_SECONDS) as client,
            AsyncWaypost(client=client, namespace=namespace, retry_budget=0) as post,
        ):
            await post.publish("orders", LARGE)
            async with post.receive("orders") as message:
                assert message is not None
                assert message.body == LARGE

    asyncio.run(use())


def check_large(post: Waypost) -> None:
    post.publish("orders", LARGE)
    with post.receive("orders") as message:
        assert message is not None
        assert message.body == LARGE


@pytest.mark.promise("LEASE-17", "LEASE-14")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("direction", ["request", "reply"])
def test_a_link_that_falls_silent_in_the_middle_is_given_up(
    server: EmbeddedServer, namespace: str, link: Proxy, direction: str, is_async: bool
) -> None:
    if direction == "reply":
        with Waypost(server.url, namespace=namespace) as post:
            post.publish("orders", LARGE)
    failed: list[BaseException] = []

    def use() -> None:
        with Waypost(over(link, server), namespace=namespace, retry_budget=0) as post:
            post.ledger("orders")
            started.set()
            if direction == "reply":
                list(post.messages("orders"))
            else:
                post.publish("orders", LARGE)

    async def use_async() -> None:
        async with AsyncWaypost(over(link, server), namespace=namespace, retry_budget=0) as post:
            await post.ledger("orders")
            started.set()
            if direction == "reply":
                _ = [message async for message in post.messages("orders")]
            else:
                await post.publish("orders", LARGE)

    def run() -> None:
        try:
            asyncio.run(use_async()) if is_async else use()
        except OutcomeUnknown as error:
            failed.append(error)

    started = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    way = link.downlink if direction == "reply" else link.uplink
    before = way.carried
    while way.carried < before + 200_000:
        threading.Event().wait(0.001)
    link.silence()
    thread.join(30)
    assert not thread.is_alive()
    assert len(failed) == 1


@pytest.mark.promise("LEASE-17")
def test_a_worker_on_a_slow_link_handles_all_and_loses_no_lease(server: EmbeddedServer, namespace: str) -> None:
    """All messages together take twice as long as a lease."""
    count, body = 24, b"x" * 350_000
    with Waypost(server.url, namespace=namespace) as post, Proxy(server.port, bytes_per_second=2_000_000) as link:
        post.configure("orders", lease=2)
        post.publish_many("orders", [body] * count)
        handled: list[str] = []
        url = server.url.replace(f":{server.port}", f":{link.port}")
        worker_post = AsyncWaypost(url, namespace=namespace)

        @worker_post.handler("orders", concurrency=count)
        async def handle(body: bytes, message: Message[bytes]) -> None:
            handled.append(message.id)

        async def work() -> None:
            async with worker_post:
                await worker_post.worker().run(until_empty=True, signals=False)

        asyncio.run(work())
        ledger = post.ledger("orders")
    assert len(handled) == len(set(handled)) == count
    assert (ledger.done, ledger.expired, ledger.balance) == (count, 0, 0)


class Answered:
    """What a client learns from the replies to claims."""

    def __init__(self) -> None:
        self.post = Waypost("memory://")
        self.post.open()
        self.context = self.post._context

    def learn(self, *, size: int, seconds: float, lease_ms: int, more: bool = True) -> int:
        self.post.publish("orders", b"x" * 10)
        operation = begin_operation(self.context, "orders")
        claimed: Any = self.post._call(self.context.store.claim("orders", 1, operation, worker="w"))
        from msgspec import structs

        lease = structs.replace(claimed.leases[0], envelope=b"x" * size)
        self.context.learn_throughput(
            "orders", structs.replace(claimed, leases=[lease], lease_ms=lease_ms, more=more), seconds
        )
        return self.context.claim_bytes("orders")


@pytest.fixture
def answered() -> Iterator[Answered]:
    one = Answered()
    yield one
    one.post.close()


@pytest.mark.promise("LEASE-17")
def test_a_client_claims_as_many_bytes_as_arrive_in_a_quarter_of_a_lease(answered: Answered) -> None:
    learn: Callable[..., int] = answered.learn
    assert answered.context.claim_bytes("orders") == CLAIM_BYTES_FIRST
    assert learn(size=250_000, seconds=0.05, lease_ms=2_000) == 1_000_000
    assert learn(size=1_000_000, seconds=0.2, lease_ms=2_000) == 2_500_000
    assert learn(size=2_000_000, seconds=1.0, lease_ms=2_000) == 1_000_000
    # One that is not full and came soon changes nothing, nor does a small one before a large message.
    assert learn(size=500, seconds=0.1, lease_ms=2_000, more=False) == 1_000_000
    assert learn(size=500, seconds=0.1, lease_ms=2_000) == 1_000_000
    assert learn(size=1_000_000, seconds=0.01, lease_ms=60_000) == 4_000_000
    assert learn(size=4_000_000, seconds=0.01, lease_ms=60_000) == CLAIM_BYTES_MAX
