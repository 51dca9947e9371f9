"""Brokers that run for the length of a block, and waits for what they do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.waiting import WAIT_SECONDS_MAX, until_async
from tests.waiting import until as until_ended
from waypost import Constant
from waypost.faststream import WaypostBroker
from waypost.values import Ledger

T = TypeVar("T")
#: A retry that a test need not wait for.
SOON = Constant(attempts=3, pause=0.01, jitter=0)


@dataclass(frozen=True, slots=True)
class Place:
    """A store, and a namespace in it."""

    url: str
    namespace: str

    def broker(self, **options: Any) -> WaypostBroker:
        """Return a broker on this store, which logs nothing."""
        return WaypostBroker(self.url, namespace=self.namespace, logger=None, **options)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a test on an event loop. No worker is left behind: its threads end with it."""
    before = set(threading.enumerate())
    try:
        return asyncio.run(asyncio.wait_for(coroutine, WAIT_SECONDS_MAX * 2))
    finally:
        until_ended(lambda: not _started_since(before), "the end of the worker's threads")


def _started_since(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread not in before and "waypost" in thread.name]


@asynccontextmanager
async def running(broker: WaypostBroker) -> AsyncIterator[WaypostBroker]:
    """Start a broker, and stop it at the end of the block."""
    try:
        await broker.start()
        yield broker
    finally:
        await broker.stop()


async def settled(broker: WaypostBroker, queue: str, **expected: int) -> Ledger:
    """Wait until the ledger of a queue has these counts, and return it."""

    async def reached() -> Ledger | None:
        ledger = await broker.client.ledger(queue)
        return ledger if all(getattr(ledger, name) == count for name, count in expected.items()) else None

    ledger: Ledger = await until_async(reached, f"{expected} in queue {queue}")
    return ledger
