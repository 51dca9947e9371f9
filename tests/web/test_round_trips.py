"""What open pages cost a real store: the round trips of a minute of the loop, with one page and with twenty."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from waypost import AsyncWaypost
from waypost.store.postgres import migrate
from waypost.store.postgres.store import PostgresStore
from waypost.store.sqlite import SqliteStore
from waypost.store.valkey.requests import READS_TOGETHER
from waypost.store.valkey.store import ValkeyStore
from waypost.testing.bench import fresh_namespace
from waypost.web.watching import READ_TOGETHER, StoreWatch

pytestmark = pytest.mark.promise("FACE-3")
QUEUES = 200
SECONDS = 60


class CountingStore:
    """A store that counts the round trips to it: what its executor waits for one after the other."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.round_trips = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def connect_async(self, *, start_timeout: float) -> Any:
        return CountingExecutor(self, await self.inner.connect_async(start_timeout=start_timeout))

    def count(self, calls: int) -> None:
        # Valkey's calls are written together; PostgreSQL's and SQLite's run one after the other.
        self.round_trips += math.ceil(calls / READS_TOGETHER) if self.inner.kind == "valkey" else calls


class CountingExecutor:
    def __init__(self, store: CountingStore, inner: Any) -> None:
        self.store = store
        self.inner = inner

    async def run(self, call: Any) -> Any:
        self.store.count(1)
        return await self.inner.run(call)

    async def run_many(self, calls: Iterable[Any]) -> Any:
        listed = list(calls)
        self.store.count(len(listed))
        return await self.inner.run_many(listed)

    async def close(self) -> None:
        await self.inner.close()


@pytest.fixture(params=["sqlite", "valkey", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    namespace = fresh_namespace()
    if request.param == "sqlite":
        return CountingStore(SqliteStore(tmp_path / "web.db"))
    url = request.getfixturevalue(f"{request.param}_url")
    if request.param == "valkey":
        return CountingStore(ValkeyStore.from_url(url, namespace=namespace))
    migrate(url, namespace=namespace)
    return CountingStore(PostgresStore.from_url(url, namespace=namespace))


def pass_a_second(watch: StoreWatch) -> None:
    """Make everything that was read a second older."""
    watch._listed_at -= 1.0
    watch._schedules_at -= 1.0
    watch._refreshed_at -= 1.0
    for reading in watch.readings.values():
        reading.read_at -= 1.0


async def watch_for_a_minute(store: Any, pages: int) -> tuple[int, StoreWatch]:
    """Open pages that are read again every few seconds, on a store where nothing happens; count the round trips."""
    async with AsyncWaypost(store=store) as post:
        for number in range(QUEUES):
            await post.publish(f"q{number:03}", 1)
        watch = StoreWatch(post)
        for _ in range(math.ceil(QUEUES / READ_TOGETHER) + 1):
            await watch._tick()
        # The loop is driven here, second by second.
        watch._loop_task = asyncio.get_running_loop().create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        store.round_trips = 0
        for second in range(SECONDS):
            pass_a_second(watch)
            await watch._tick()
            for _ in range(pages if second % 5 == 0 else 0):
                await watch.refresh()
        counted = store.round_trips
        await watch.close()
        return counted, watch


def test_an_open_page_costs_an_idle_store_at_most_two_round_trips_a_second(store: Any) -> None:
    counted, watch = asyncio.run(watch_for_a_minute(store, 1))
    assert counted <= 2 * SECONDS
    assert (len(watch.readings), watch.unread) == (QUEUES, 0)


def test_twenty_open_pages_cost_an_idle_store_what_one_costs(store: Any) -> None:
    counted, _ = asyncio.run(watch_for_a_minute(store, 20))
    assert counted <= 2 * SECONDS
