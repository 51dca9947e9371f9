"""Durability `fsync`: a write is confirmed when it is on the server's disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis

from waypost import AsyncWaypost, Waypost
from waypost.errors import ConfigurationError, OutcomeUnknown, QueueFull
from waypost.store.port import Call
from waypost.store.valkey.command import ValkeyCall, command
from waypost.store.valkey.requests import Batch, Request
from waypost.testing.servers import ValkeyServer


@pytest.fixture(scope="module")
def durable() -> Iterator[ValkeyServer]:
    with ValkeyServer(appendonly=True, appendfsync="everysec") as server:
        yield server


def waits(server: ValkeyServer) -> int:
    """Return how often a client waited for the disk, counted by the server."""
    with redis.Redis.from_url(server.url.replace("valkey", "redis")) as client:
        stats: dict[str, dict[str, int]] = client.info("commandstats")
    return stats.get("cmdstat_waitaof", {}).get("calls", 0)


@pytest.mark.promise("STORE-1")
def test_only_calls_that_must_not_be_lost_wait_for_the_disk(durable: ValkeyServer) -> None:
    with Waypost(durable.url, durability="fsync", namespace="disk") as post:
        post.publish("orders", 0)  # the scripts are new to the server: the first requests are sent twice
        with post.receive("orders") as message:
            assert message is not None
        before = waits(durable)
        post.publish("orders", 1)
        assert waits(durable) == before + 1
        with post.receive("orders") as message:
            assert message is not None
            assert waits(durable) == before + 1
        assert waits(durable) == before + 2
        results = post.publish_many("orders", range(1200))
        assert [result.status for result in results] == ["queued"] * 1200
        assert waits(durable) == before + 5
        assert post.ledger("orders").ready == 1200


async def async_scenario(url: str) -> int:
    async with AsyncWaypost(url, durability="fsync", namespace="disk-async") as post:
        await post.publish("orders", 1)
        await post.publish_many("orders", [2, 3])
        return (await post.ledger("orders")).ready


@pytest.mark.promise("STORE-1")
def test_the_async_client_waits_too(durable: ValkeyServer) -> None:
    before = waits(durable)
    assert asyncio.run(async_scenario(durable.url)) == 3
    assert waits(durable) >= before + 2


@pytest.mark.promise("STORE-1")
def test_a_connection_stays_in_step_after_a_refused_publish(durable: ValkeyServer) -> None:
    with Waypost(durable.url, durability="fsync", namespace="disk-full") as post:
        post.configure("orders", max_pending=1)
        post.publish("orders", 1)
        for _ in range(3):
            with pytest.raises(QueueFull):
                post.publish("orders", 2)
        assert [message.body for message in post.peek("orders")] == [1]


@pytest.mark.promise("STORE-1")
@pytest.mark.parametrize("restart", ["script flush", "restart"])
def test_a_server_that_forgot_its_scripts_gets_them_again(durable: ValkeyServer, restart: str) -> None:
    with Waypost(durable.url, durability="fsync", namespace="disk-flush") as post:
        first = len(post.publish_many("orders", range(600)))
        if restart == "restart":
            durable.restart()
        else:
            with redis.Redis.from_url(durable.url.replace("valkey", "redis")) as client:
                client.script_flush()
        assert len(post.publish_many("orders", range(600))) + first == 1200
        post.publish("orders", "one")
        assert post.ledger("orders").balance == 0


@pytest.mark.promise("STORE-1")
def test_a_server_without_an_append_only_file_is_refused() -> None:
    with ValkeyServer() as server:
        post = Waypost(server.url, durability="fsync")
        with pytest.raises(ConfigurationError, match="append-only file"):
            post.publish("orders", 1)
        post.close()


@pytest.mark.promise("STORE-1")
def test_a_memory_store_has_no_disk_to_wait_for() -> None:
    with pytest.raises(ConfigurationError, match="no disk"):
        Waypost("memory://", durability="fsync")


def request() -> ValkeyCall[bytes]:
    return ValkeyCall("publish", "orders", b"request", lambda reply: reply, on_disk=command(b"WAITAOF"))


@pytest.mark.promise("STORE-1", "SEE-6")
def test_the_outcome_is_unknown_if_the_disk_does_not_confirm_in_time() -> None:
    sent = Request(request())
    assert sent.packed == b"request" + command(b"WAITAOF")
    sent.replies = [b"stored", [0, 0]]
    assert sent.expected == 2
    with pytest.raises(OutcomeUnknown, match="a repeat waits again"):
        sent.result()


@pytest.mark.promise("STORE-1")
def test_in_a_batch_only_the_call_that_was_not_confirmed_is_unknown() -> None:
    calls: list[Call[bytes]] = [request(), request()]
    batch = Batch(iter(calls), set())
    assert list(batch.requests()) == [b"request" + command(b"WAITAOF")] * 2
    for replies in ([b"first", [0, 0]], [b"second", [1, 0]]):
        batch.waiting[0].replies = replies
        batch.finish()
    assert isinstance(batch.results[0], OutcomeUnknown)
    assert batch.results[1] == b"second"
