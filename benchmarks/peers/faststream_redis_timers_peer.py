"""faststream-redis-timers: polls every 1 to 10 ms, 500 at once, uvloop."""

from __future__ import annotations

import asyncio
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from faststream_redis_timers import TimersBroker
from redis.asyncio import Redis

from benchmarks.peers.protocol import Body, Program, Started, main, print_json

POLL_SECONDS = 0.001
POLL_SECONDS_MAX = 0.01
AT_ONCE = 500


class RedisTimers(Program):
    """The broker, with no application around it."""

    uses_uvloop = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._client: Any = None
        self._broker: Any = None

    async def open(self) -> None:
        self._client = Redis.from_url(self.url)
        self._broker = TimersBroker(self._client, logger=None, log_level=logging.ERROR, apply_types=False)
        await self._broker.connect()

    async def close(self) -> None:
        await self._broker.stop()
        await self._client.aclose()

    async def send(self, message: Body) -> None:
        await self._broker.publish(message, topic="bench")

    async def send_timer(self, message: Body, due: float) -> None:
        await self._broker.publish(message, topic="bench", activate_at=datetime.fromtimestamp(due, UTC))

    def work(self, started: Started) -> None:
        async def handle(message: Body) -> None:
            started(message["number"])

        async def run() -> None:
            await self.open()
            subscribe = self._broker.subscriber(
                "bench", polling_interval=POLL_SECONDS, max_polling_interval=POLL_SECONDS_MAX, max_concurrent=AT_ONCE
            )
            subscribe(handle)
            await self._broker.start()
            print_json(ready=True)
            await asyncio.Event().wait()

        self.run(run)


if __name__ == "__main__":
    sys.exit(main(RedisTimers))
