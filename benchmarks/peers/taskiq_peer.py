"""taskiq on streams: 500 read at once, 500 at work at once, no validation of parameters, uvloop."""

from __future__ import annotations

import sys
from typing import Any

from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

from benchmarks.peers.protocol import Body, Program, Started, main, print_json

READ = 500
AT_ONCE = 500


class Taskiq(Program):
    """The stream broker, which settles after the handler."""

    uses_uvloop = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        # From the first message on: the group is made by the process that comes first.
        self._broker: Any = RedisStreamBroker(url, queue_name="bench", consumer_id="0", xread_count=READ)
        self._started: Started = lambda number: None

        async def handle(message: Body) -> None:
            self._started(message["number"])

        self._task: Any = self._broker.task(task_name="handle")(handle)

    async def open(self) -> None:
        await self._broker.startup()

    async def close(self) -> None:
        await self._broker.shutdown()

    async def send(self, message: Body) -> None:
        await self._task.kiq(message)

    def work(self, started: Started) -> None:
        self._started = started

        async def run() -> None:
            self._broker.is_worker_process = True
            await self._broker.startup()
            print_json(ready=True)
            await run_receiver_task(self._broker, validate_params=False, max_async_tasks=AT_ONCE, max_prefetch=READ)

        self.run(run)


if __name__ == "__main__":
    sys.exit(main(Taskiq))
