"""Both clients behind one interface, so that a test is written once, and a store whose connection fails on command."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from waypost import AsyncWaypost, Waypost
from waypost.errors import OutcomeUnknown, StoreUnavailable
from waypost.identity import Operation
from waypost.operations.flow import ClientContext
from waypost.store.memory import MemoryStore
from waypost.store.port import Call

T = TypeVar("T")
MODES = ("sync", "async")


def begin_operation(context: ClientContext, queue: str) -> Operation:
    """Begin an operation of a client on a local store, whose time need not be requested first."""
    context.session.time.correct(time.time_ns() // 1_000_000)
    return context.replay_windows.begin(queue)


class Awaited:
    """An `AsyncWaypost` that is called like a `Waypost`: each call runs to its end on one event loop."""

    def __init__(self, post: AsyncWaypost, runner: asyncio.Runner) -> None:
        self.post = post
        self.runner = runner

    def run(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        return self.runner.run(wait())

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.post, name)
        if name == "receive":
            return lambda *given, **options: self._received(member(*given, **options))
        if not callable(member):
            return member

        def call(*given: Any, **options: Any) -> Any:
            answer = member(*given, **options)
            if inspect.isasyncgen(answer):
                return self._listed(answer)
            return self.run(answer) if inspect.isawaitable(answer) else answer

        return call

    def _listed(self, found: Any) -> Iterator[Any]:
        while True:
            try:
                one = self.run(anext(found))
            except StopAsyncIteration:
                return
            yield one

    @contextmanager
    def _received(self, reception: Any) -> Iterator[Any]:
        message = self.run(reception.__aenter__())
        try:
            yield message
        except BaseException as error:
            if not self.run(reception.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self.run(reception.__aexit__(None, None, None))


@contextmanager
def open_client(mode: str, url: str | None = None, **options: Any) -> Iterator[Any]:
    """Return a client of this mode."""
    if mode == "sync":
        with Waypost(url, **options) as post:
            yield post
        return
    with asyncio.Runner() as runner:
        wrapped = Awaited(AsyncWaypost(url, **options), runner)
        wrapped.open()
        try:
            yield wrapped
        finally:
            wrapped.close()


Fault = Literal["refuse", "cut"]


class ShakyStore:
    """A memory store behind a connection that fails on command.

    `faults` are used up one per call: `refuse` sends nothing, `cut` does the work and loses the reply, None is calm.
    """

    def __init__(self, *, faults: Iterable[Fault | Exception | None] = (), **options: Any) -> None:
        self.inner = MemoryStore(**options)
        self.faults = list(faults)
        #: The verbs that reached the store, in order.
        self.ran: list[str] = []
        self.connections = 0
        self.closed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def connect(self, *, start_timeout: float) -> ShakyExecutor:
        self.connections += 1
        return ShakyExecutor(self)

    async def connect_async(self, *, start_timeout: float) -> AsyncShakyExecutor:
        self.connections += 1
        return AsyncShakyExecutor(self)


class ShakyExecutor:
    def __init__(self, store: ShakyStore) -> None:
        self.store = store
        self.inner = store.inner.connect(start_timeout=1)

    def run(self, call: Call[T]) -> T:
        if call.name == "time":
            return self.inner.run(call)
        fault = self.store.faults.pop(0) if self.store.faults else None
        if fault == "refuse":
            raise StoreUnavailable("connection refused")
        if isinstance(fault, Exception):
            raise fault
        self.store.ran.append(call.name)
        result = self.inner.run(call)
        if fault == "cut":
            raise OutcomeUnknown("connection lost")
        return result

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        results: list[T | Exception] = []
        for call in calls:
            try:
                results.append(self.run(call))
            except Exception as error:
                results.append(error)
        return results

    def close(self) -> None:
        self.store.closed += 1


class AsyncShakyExecutor:
    def __init__(self, store: ShakyStore) -> None:
        self.inner = ShakyExecutor(store)

    async def run(self, call: Call[T]) -> T:
        return self.inner.run(call)

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return self.inner.run_many(calls)

    async def close(self) -> None:
        self.inner.close()
