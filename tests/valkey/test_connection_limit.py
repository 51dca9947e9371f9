"""More calls at once than a client has connections: they wait for each other, and no connection is leaked."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.valkey.test_connections import QUEUE, connections_named
from tests.waiting import until
from waypost import AsyncWaypost, Waypost
from waypost.store.valkey.executor import CONNECTIONS_MAX
from waypost.testing.bench import fresh_namespace
from waypost.testing.servers import ValkeyServer


@pytest.mark.promise("STORE-5")
def test_threads_beyond_the_limit_of_connections_take_turns(server: ValkeyServer, raw: Any) -> None:
    name, threads_count = fresh_namespace(), CONNECTIONS_MAX + 8
    with Waypost(f"{server.url}?client_name={name}", namespace=name) as post:
        post.publish(QUEUE, 0)
        # The server holds all writes back until all calls are under way.
        raw.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        begun = threading.Barrier(threads_count + 1)

        def work(number: int) -> None:
            begun.wait(60)
            post.publish(f"{QUEUE}-{number}", 1)  # publishes of one queue would share calls

        with ThreadPoolExecutor(threads_count) as pool:
            publishes = [pool.submit(work, number) for number in range(threads_count)]
            begun.wait(60)
            try:
                until(lambda: connections_named(raw, name) >= CONNECTIONS_MAX, "all connections")
            finally:
                raw.execute_command("CLIENT", "UNPAUSE")
            for publish in publishes:
                publish.result(60)
        assert connections_named(raw, name) == CONNECTIONS_MAX
        assert sum(post.ledger(f"{QUEUE}-{number}").published for number in range(threads_count)) == threads_count
    until(lambda: connections_named(raw, name) == 0, "the end of the connections")


@pytest.mark.promise("STORE-5")
def test_coroutines_beyond_the_limit_of_connections_take_turns(server: ValkeyServer, raw: Any) -> None:
    name, count = fresh_namespace(), 5 * CONNECTIONS_MAX

    async def scenario() -> int:
        async with AsyncWaypost(f"{server.url}?client_name={name}", namespace=name) as post:
            await asyncio.gather(*(post.publish(QUEUE, number) for number in range(count)))
            # One that is cancelled while it waits for its turn, or has it, gives it back.
            waiting = [asyncio.create_task(post.publish(QUEUE, number)) for number in range(count)]
            await asyncio.sleep(0)
            for task in waiting[::2]:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await asyncio.gather(*(post.publish(QUEUE, number) for number in range(count)))
            assert (await post.ledger(QUEUE)).balance == 0
            return connections_named(raw, name)

    assert 1 <= asyncio.run(scenario()) <= CONNECTIONS_MAX
    until(lambda: connections_named(raw, name) == 0, "the end of the connections")
