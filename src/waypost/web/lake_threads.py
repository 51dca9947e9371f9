"""The threads that read lakes: few, and apart from those of everything else.

A lake may hang: a bucket behind a broken network, a folder of a file server that is away. Such a read cannot be ended.
So no more than two threads wait for lakes, those of the event loop stay free, and the process does not wait for them
when it ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

#: Reads of lakes at the same time, and how many may wait for their turn.
THREADS_MAX, WAITING_MAX = 2, 64


Waiting = SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]]


class LakeThreads:
    """Runs functions in at most two threads, which are started when they are needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._pid, self._started = os.getpid(), 0
        self._waiting: Waiting = SimpleQueue()

    def submit(self, function: Callable[..., T], *given: Any) -> Future[T]:
        """Run a function in one of the threads. A future that is cancelled before its turn is not run.

        Where many wait already, the future has a `TimeoutError`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._pid != os.getpid():
                # A fork has none of the threads.
                self._begin()
            if self._waiting.qsize() >= WAITING_MAX:
                future.set_exception(TimeoutError())
                return future
            self._waiting.put((future, function, given))
            if self._started < THREADS_MAX:
                self._started += 1
                # A daemon: the process ends without it.
                name = f"waypost-lake-{self._started}"
                threading.Thread(target=self._run, args=(self._waiting,), name=name, daemon=True).start()
        return future

    @staticmethod
    def _run(waiting: Waiting) -> None:
        while True:
            future, function, given = waiting.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(*given)
            except BaseException as error:  # the one who waits for it gets it
                future.set_exception(error)
            else:
                future.set_result(result)
