"""faststream-outbox: several workers, batches for fetch and flush, short intervals, asyncpg, uvloop."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from faststream_outbox import OutboxBroker, make_outbox_table
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.peers.protocol import Body, Program, Started, main, print_json

WORKERS = 8
FETCH = 500
FLUSH = 100
FETCH_SECONDS = 0.001
FETCH_SECONDS_MAX = 0.01
PUBLISH = 1_000


class Outbox(Program):
    """The broker, with no application around it; each publish is a transaction of its own."""

    uses_uvloop = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._metadata = MetaData()
        self._table = make_outbox_table(self._metadata, table_name="outbox")
        self._engine: Any = None
        self._broker: Any = None

    async def open(self) -> None:
        address = self.url.replace("postgresql://", "postgresql+asyncpg://")
        self._engine = create_async_engine(address, pool_size=WORKERS + 4, max_overflow=0)
        async with self._engine.begin() as connection:
            await connection.run_sync(self._metadata.create_all)
        self._broker = OutboxBroker(
            self._engine, outbox_table=self._table, logger=None, log_level=logging.ERROR, apply_types=False
        )
        await self._broker.connect()

    async def close(self) -> None:
        await self._broker.stop()
        await self._engine.dispose()

    async def send(self, message: Body) -> None:
        async with self._engine.begin() as connection:
            await self._broker.publish(message, queue="bench", session=connection)

    async def publish(self, messages: Sequence[Body]) -> None:
        for start in range(0, len(messages), PUBLISH):
            async with self._engine.begin() as connection:
                await self._broker.publish_batch(*messages[start : start + PUBLISH], queue="bench", session=connection)

    async def send_timer(self, message: Body, due: float) -> None:
        async with self._engine.begin() as connection:
            at = datetime.fromtimestamp(due, UTC)
            await self._broker.publish(message, queue="bench", session=connection, activate_at=at)

    def work(self, started: Started) -> None:
        async def handle(message: Body) -> None:
            started(message["number"])

        async def run() -> None:
            await self.open()
            subscribe = self._broker.subscriber(
                "bench", max_workers=WORKERS, fetch_batch_size=FETCH, terminal_flush_batch_size=FLUSH,
                min_fetch_interval=FETCH_SECONDS, max_fetch_interval=FETCH_SECONDS_MAX,
            )  # fmt: skip
            subscribe(handle)
            await self._broker.start()
            print_json(ready=True)
            await asyncio.Event().wait()

        self.run(run)


if __name__ == "__main__":
    sys.exit(main(Outbox))
