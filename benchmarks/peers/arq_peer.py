"""arq: 100 at once, a poll every 10 ms, uvloop."""

from __future__ import annotations

import sys
from typing import Any

from arq.connections import ArqRedis, RedisSettings, create_pool
from arq.worker import Worker, func

from benchmarks.peers.protocol import Body, Program, Started, main, print_json

AT_ONCE = 100
POLL_SECONDS = 0.01


class Arq(Program):
    """Its own pool and worker, without results."""

    uses_uvloop = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._settings: Any = RedisSettings.from_dsn(url)
        self._pool: ArqRedis | Any = None

    async def open(self) -> None:
        self._pool = await create_pool(self._settings)

    async def close(self) -> None:
        await self._pool.aclose()

    async def send(self, message: Body) -> None:
        await self._pool.enqueue_job("handle", message)

    def work(self, started: Started) -> None:
        async def handle(context: object, message: Body) -> None:
            started(message["number"])

        async def run() -> None:
            worker = Worker(
                [func(handle, name="handle")], redis_settings=self._settings, max_jobs=AT_ONCE,
                poll_delay=POLL_SECONDS, keep_result=0, handle_signals=False,
            )  # fmt: skip
            print_json(ready=True)
            await worker.async_run()

        self.run(run)


if __name__ == "__main__":
    sys.exit(main(Arq))
