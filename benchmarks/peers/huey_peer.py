"""huey: one thread that blocks on the queue, no results. At most once: a message is gone when it is dequeued."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

from huey import RedisHuey
from huey.consumer import Consumer
from huey.serializer import Serializer

from benchmarks.peers.protocol import Body, Program, Started, main, print_json


class Huey(Program):
    """Its own consumer, started in this process."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._huey: Any = RedisHuey("bench", url=url, results=False, utc=True, serializer=Serializer())
        self._started: Started = lambda number: None

        def handle(message: Body) -> None:
            self._started(message["number"])

        self._task: Any = self._huey.task()(handle)

    async def send(self, message: Body) -> None:
        self._task(message)

    def send_blocking(self, message: Body) -> None:
        self._task(message)

    async def send_timer(self, message: Body, due: float) -> None:
        self._task.schedule((message,), eta=datetime.fromtimestamp(due, UTC))

    def work(self, started: Started) -> None:
        self._started = started
        consumer = Consumer(self._huey, workers=1, periodic=False, scheduler_interval=1)
        print_json(ready=True)
        consumer.run()


if __name__ == "__main__":
    sys.exit(main(Huey))
