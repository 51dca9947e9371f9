"""pgqueuer: batches of 200, a dequeue timeout of 0.1 s, asyncpg, uvloop."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import asyncpg
from pgqueuer import QueueManager
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.queries import Queries

from benchmarks.peers.protocol import TIMERS_AT_ONCE, Body, Program, Started, main, print_json

BATCH = 200
DEQUEUE_SECONDS = 0.1
#: Messages in one statement of a bulk publish.
PUBLISH = 1_000


class PgQueuer(Program):
    """Its own queries and queue manager."""

    uses_uvloop = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._pool: Any = None
        self._queries: Any = None

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(self.url, min_size=1, max_size=TIMERS_AT_ONCE // 5)
        self._queries = Queries(AsyncpgPoolDriver(self._pool))
        await install(self.url)

    async def close(self) -> None:
        await self._pool.close()

    async def send(self, message: Body) -> None:
        await self._queries.enqueue("bench", json.dumps(message).encode())

    async def publish(self, messages: Sequence[Body]) -> None:
        for start in range(0, len(messages), PUBLISH):
            payloads = [json.dumps(message).encode() for message in messages[start : start + PUBLISH]]
            await self._queries.enqueue(["bench"] * len(payloads), payloads, [0] * len(payloads))

    async def send_timer(self, message: Body, due: float) -> None:
        delay = timedelta(seconds=max(0.0, due - time.time()))
        await self._queries.enqueue("bench", json.dumps(message).encode(), execute_after=delay)

    def work(self, started: Started) -> None:
        async def handle(message: Any) -> None:
            started(json.loads(message.payload)["number"])

        async def run() -> None:
            await install(self.url)
            manager = QueueManager(Queries(AsyncpgDriver(await asyncpg.connect(self.url))))
            manager.entrypoint("bench")(handle)
            print_json(ready=True)
            await manager.run(dequeue_timeout=timedelta(seconds=DEQUEUE_SECONDS), batch_size=BATCH)

        self.run(run)


async def install(url: str) -> None:
    """Its tables, unless they are there."""
    connection = await asyncpg.connect(url)
    if await connection.fetchval("SELECT to_regclass('pgqueuer')") is None:
        await Queries(AsyncpgDriver(connection)).install()
    await connection.close()


if __name__ == "__main__":
    sys.exit(main(PgQueuer))
