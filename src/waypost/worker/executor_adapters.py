"""Executors of the other mode (sync or async), for stores on the caller's own client, which has one mode.

A worker claims and settles on its event loop and renews in a thread. A store made from a URL can connect in both modes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from waypost.store.port import AsyncExecutor, Call, Executor

T = TypeVar("T")
#: Claims and settles of several queues may run at the same time.
THREADS = 4


class ThreadedExecutor:
    """Makes a blocking executor usable on an event loop: its calls wait in threads."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="waypost-store")

    async def run(self, call: Call[T]) -> T:
        return await self._in_thread(lambda: self._executor.run(call))

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        chosen = list(calls)
        return await self._in_thread(lambda: self._executor.run_many(chosen))

    async def close(self) -> None:
        await self._in_thread(self._executor.close)
        self._threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class LoopExecutor:
    """Makes an async executor usable in a thread: its calls run on the event loop, so a blocked loop delays them."""

    def __init__(self, executor: AsyncExecutor, loop: asyncio.AbstractEventLoop) -> None:
        self._executor = executor
        self._loop = loop

    def run(self, call: Call[T]) -> T:
        return asyncio.run_coroutine_threadsafe(self._executor.run(call), self._loop).result()

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return asyncio.run_coroutine_threadsafe(self._executor.run_many(calls), self._loop).result()

    def close(self) -> None:
        """Do nothing: the executor belongs to the event loop."""
