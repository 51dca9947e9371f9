"""waypost itself, by the same protocol: `waypost worker` with its defaults, and a handler that records its start.

Variants: `batch` has a handler of batches, `turn` one that waits for a turn of the event loop, `thread` one that
blocks, and `once` a queue without leases: at most once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.peers.protocol import Body, Program, Started, main, print_json
from waypost import AsyncWaypost, Waypost
from waypost.cli.main import main as command
from waypost.store.postgres import migrate

QUEUE = "bench"
BATCH = 500


class Bench:
    """The client that `waypost worker` runs, and its handlers."""

    def __init__(self, url: str, started: Started) -> None:
        if url.startswith("postgresql"):
            migrate(url)
        self.post = AsyncWaypost(url)
        self._started = started

    async def one(self, body: dict[str, Any]) -> None:
        self._started(body["number"])

    async def many(self, bodies: list[Any]) -> None:
        started = self._started
        for body in bodies:
            started(body["number"])

    async def turning(self, body: dict[str, Any]) -> None:
        self._started(body["number"])
        await asyncio.sleep(0)

    def blocking(self, body: dict[str, Any]) -> None:
        self._started(body["number"])

    def register(self, variant: str) -> None:
        """Register the handler of a variant."""
        match variant:
            case "batch":
                self.post.handler(QUEUE, batch=BATCH)(self.many)
            case "turn":
                self.post.handler(QUEUE)(self.turning)
            case "thread":
                self.post.handler(QUEUE)(self.blocking)
            case _:
                self.post.handler(QUEUE)(self.one)


class OurProgram(Program):
    """The async client with its defaults."""

    bench: Bench
    _blocking: Waypost

    async def open(self) -> None:
        self.bench = Bench(self.url, lambda number: None)
        self._blocking = Waypost(self.url)
        if self.variant == "once":
            await self.bench.post.configure(QUEUE, lease=None)

    async def close(self) -> None:
        await self.bench.post.close()
        self._blocking.close()

    async def send(self, message: Body) -> None:
        await self.bench.post.publish(QUEUE, message)

    def send_blocking(self, message: Body) -> None:
        self._blocking.publish(QUEUE, message)

    async def publish(self, messages: Sequence[Body]) -> None:
        await self.bench.post.publish_many(QUEUE, messages)

    async def send_timer(self, message: Body, due: float) -> None:
        await self.bench.post.publish(QUEUE, message, at=datetime.fromtimestamp(due, UTC))

    def work(self, started: Started) -> None:
        # The command imports a client by the name of its module: this class attribute is where it finds this one.
        OurProgram.bench = Bench(self.url, started)
        OurProgram.bench.register(self.variant)
        print_json(ready=True)
        sys.exit(command(["worker", f"{__name__}:OurProgram.bench.post", "--log-level", "error"]))


if __name__ == "__main__":
    sys.exit(main(OurProgram))
