"""celery: the solo pool, a prefetch of 500, settled after the handler, no results and no events."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

from celery import Celery

from benchmarks.peers.protocol import Body, Program, Started, main, print_json

PREFETCH = 500


class CeleryPeer(Program):
    """Its own application and worker. Timers wait in the worker's memory."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._application: Any = Celery("bench", broker=url)
        self._application.conf.update(
            task_default_queue="bench", task_ignore_result=True, task_acks_late=True,
            worker_prefetch_multiplier=PREFETCH, worker_send_task_events=False,
            broker_connection_retry_on_startup=True, worker_hijack_root_logger=False,
        )  # fmt: skip
        self._started: Started = lambda number: None

        def handle(message: Body) -> None:
            self._started(message["number"])

        self._task: Any = self._application.task(handle, name="handle")

    async def send(self, message: Body) -> None:
        self._task.apply_async((message,))

    async def send_timer(self, message: Body, due: float) -> None:
        self._task.apply_async((message,), eta=datetime.fromtimestamp(due, UTC))

    def work(self, started: Started) -> None:
        self._started = started
        print_json(ready=True)
        self._application.worker_main([
            "worker", "--pool=solo", "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=ERROR",
        ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(CeleryPeer))
