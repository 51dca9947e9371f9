"""Threads for handlers that block.

They are daemons, unlike those of `concurrent.futures`: a worker whose time to stop is up must be able to end its
process while a handler hangs. The message of such a handler keeps its lease, which then ends by itself.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

Work = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Threads:
    """Up to `most` threads, each started when all others are busy."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._started = 0
        self._busy = 0

    def run(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run it in a thread; called on the event loop, where the future also ends."""
        future = asyncio.get_running_loop().create_future()
        self._busy += 1
        if self._busy > self._started and self._started < self._most:
            self._started += 1
            thread = threading.Thread(target=self._loop, name=f"{self._name}-{self._started}", daemon=True)
            thread.start()
        self._work.put((work, future))
        return future

    def stop(self) -> None:
        """Let the threads end when they have nothing left to do. Nobody waits for them."""
        for _ in range(self._started):
            self._work.put(None)

    def _loop(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            result, error = None, None
            try:
                result = work()
            except BaseException as failure:
                error = failure
            try:
                future.get_loop().call_soon_threadsafe(self._end, future, result, error)
            except RuntimeError:
                return  # the loop is gone: the worker was given up
            del item, work, future, result, error

    def _end(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._busy -= 1
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):
            future.set_exception(RuntimeError("a handler raised StopIteration"))
        else:
            future.set_exception(error)
