"""dramatiq: one process with two threads and a prefetch of 500."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from benchmarks.peers.protocol import Body, Program, Started, main, print_json

# Read when dramatiq is imported.
os.environ["dramatiq_queue_prefetch"] = "500"  # noqa: SIM112  its name is in small letters

import dramatiq
from dramatiq.brokers.redis import RedisBroker

THREADS = 2


class Dramatiq(Program):
    """Its own broker and worker, without results."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._broker: Any = RedisBroker(url=url)
        dramatiq.set_broker(self._broker)
        self._started: Started = lambda number: None

        def handle(message: Body) -> None:
            self._started(message["number"])

        self._actor: Any = dramatiq.actor(handle, queue_name="bench")

    async def send(self, message: Body) -> None:
        self._actor.send(message)

    def send_blocking(self, message: Body) -> None:
        self._actor.send(message)

    async def send_timer(self, message: Body, due: float) -> None:
        self._actor.send_with_options(args=(message,), delay=max(0, round((due - time.time()) * 1000)))

    def work(self, started: Started) -> None:
        self._started = started
        worker = dramatiq.Worker(self._broker, worker_threads=THREADS)
        worker.start()
        print_json(ready=True)
        signal.pause()


if __name__ == "__main__":
    sys.exit(main(Dramatiq))
