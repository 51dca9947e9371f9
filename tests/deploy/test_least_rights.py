"""A worker runs under exactly the rights that the documentation gives it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from waypost import AsyncWaypost, Message, NoRetry, Waypost
from waypost.errors import AccessDenied
from waypost.testing.servers import ValkeyServer, write_private

pytestmark = [pytest.mark.promise("STORE-1"), pytest.mark.xdist_group("least-rights")]

ACL = Path(__file__).parents[2] / "examples" / "deploy" / "valkey.acl"
ADMIN = "user admin on >of-the-test ~* &* +@all\n"


class Limited:
    """A Valkey with the users of the file, and one more that reads what the server has refused."""

    def __init__(self, server: ValkeyServer) -> None:
        self.url = f"valkey://shop:CHANGE-ME@127.0.0.1:{server.port}"
        self.admin: Any = redis.Redis(port=server.port, username="admin", password="of-the-test", decode_responses=True)

    def refused(self) -> list[Any]:
        return list(self.admin.acl_log())


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    path = write_private(tmp_path_factory.mktemp("acl") / "users.acl", ACL.read_text() + ADMIN)
    with ValkeyServer(appendonly=True, aclfile=str(path)) as server:
        limited = Limited(server)
        yield limited
        limited.admin.close()


def test_a_worker_and_all_of_a_client_work_under_the_documented_acl(limited: Limited) -> None:
    done: list[Any] = []
    with Waypost(limited.url, durability="fsync") as post:

        @post.handler("orders", retry=NoRetry(), result_ttl=60)
        def charge(order: int, message: Message[int]) -> int:
            if order < 0:
                raise ValueError
            message.then("mails", order)
            return order

        post.handler("mails")(done.append)
        post.every(3600, name="sweep")(lambda: None)
        post.configure("orders", max_running=5, rate="1000/s", completed=True)
        first = post.publish("orders", 1, key="order:1", chain=True)
        post.publish("orders", 2, window=60, key="order:2")
        post.publish("orders", -1)
        post.publish("orders", 3, delay=3600, key="timer")
        post.publish("mails", 4, after=first)
        with post.worker(promoter=True):
            assert post.wait_result(first, timeout=60) == 1
            post.wait_chain(first, timeout=60)
        post.worker().run(until_empty=True, signals=False)
        assert sorted(done) == [1, 2, 4]
        assert post.reschedule("orders", key="timer", delay=7200) == "moved"
        assert post.cancel("orders", key="timer") == "cancelled"
        assert len(post.redrive("orders").moved) == 1
        assert post.purge("orders", state="ready") == 1
        assert post.pause("orders")
        assert post.resume("orders")
        assert [one.key for one in post.schedules()] == ["sweep"]
        assert post.stats("orders").ledger.balance == 0
        assert post.history("orders", first.id)
        assert post.journal("orders").events
        assert not list(post.dead_letters("orders"))
        assert sorted(post.queues()) == ["mails", "orders", "sweep"]
    assert limited.refused() == []


def test_an_async_worker_is_woken_under_the_documented_acl(limited: Limited) -> None:
    async def check() -> None:
        async with AsyncWaypost(limited.url) as post:
            handled = asyncio.Event()

            @post.handler("wakes")
            async def handle(body: object) -> None:
                handled.set()

            async with post.worker():
                await post.publish("wakes", 1)
                await asyncio.wait_for(handled.wait(), 60)
            assert not post.wakeups.degraded

    asyncio.run(check())
    assert limited.refused() == []


def test_that_user_may_do_nothing_else(limited: Limited) -> None:
    with redis.Redis(
        port=limited.admin.connection_pool.connection_kwargs["port"], username="shop", password="CHANGE-ME"
    ) as client:
        for refused in (
            ("CONFIG", "GET", "*"), ("FLUSHALL",), ("KEYS", "*"), ("GET", "other"), ("EVAL", "return 1", "0"),
            ("ACL", "LIST"), ("PUBLISH", "other", "x"), ("SHUTDOWN",),
        ):  # fmt: skip
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*refused)
    limited.admin.acl_log_reset()


@pytest.mark.parametrize("command", ["hlen", "zadd", "hmget"])
def test_a_user_without_a_command_is_refused_by_its_name(limited: Limited, command: str) -> None:
    rules = ACL.read_text().splitlines()[1].split()[2:]
    limited.admin.execute_command("ACL", "SETUSER", "clerk", "reset", *rules, f"-{command}")
    with Waypost(limited.url.replace("shop:", "clerk:"), retry_budget=0) as post:

        def use() -> None:
            post.publish("refused", 1)
            with post.receive("refused"):
                pass

        with pytest.raises(AccessDenied, match=f"(?i){command}"):
            use()
    limited.admin.execute_command("ACL", "DELUSER", "clerk")
    limited.admin.acl_log_reset()
