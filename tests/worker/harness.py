"""A sync or async client and its worker behind one set of names, so that each test is written once."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from tests.waiting import WAIT_SECONDS_MAX
from waypost import AsyncWaypost, Drained, Waypost

F = TypeVar("F", bound=Callable[..., Any])


class Harness:
    """A client whose calls block in both modes; async ones run on a loop in a thread of their own."""

    def __init__(self, mode: str, url: str | None, **options: Any) -> None:
        self.mode = mode
        self.loop = asyncio.new_event_loop()
        self.post: Any = Waypost(url, **options) if mode == "sync" else AsyncWaypost(url, **options)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        self.done(self.post.open())
        return self

    def __exit__(self, *ended: object) -> None:
        self.done(self.post.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def done(self, answer: Any) -> Any:
        """Return the result of a call, awaited in async mode."""
        if inspect.iscoroutine(answer):
            return asyncio.run_coroutine_threadsafe(answer, self.loop).result(WAIT_SECONDS_MAX * 2)
        return answer

    def handler(self, queue: Any, **options: Any) -> Callable[[F], F]:
        """Register a handler."""
        register: Callable[[F], F] = self.post.handler(queue, **options)
        return register

    @contextmanager
    def receive(self, queue: Any, **options: Any) -> Iterator[Any]:
        """A block with a message, sync or async."""
        reception = self.post.receive(queue, **options)
        enter = reception.__enter__ if self.mode == "sync" else reception.__aenter__
        exit_block = reception.__exit__ if self.mode == "sync" else reception.__aexit__
        message = self.done(enter())
        try:
            yield message
        except BaseException as error:
            if not self.done(exit_block(type(error), error, error.__traceback__)):
                raise
        else:
            self.done(exit_block(None, None, None))

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.post, name)

        def call(*given: Any, **options: Any) -> Any:
            answer = member(*given, **options)
            if inspect.isasyncgen(answer):
                return self._listed(answer)
            return self.done(answer)

        return call if callable(member) else member

    def _listed(self, found: Any) -> Iterator[Any]:
        async def step() -> Any:
            return await anext(found)

        while True:
            try:
                one = self.done(step())
            except StopAsyncIteration:
                return
            yield one

    @contextmanager
    def working(self, *, timeout: float = 5.0, **options: Any) -> Iterator[Any]:
        """Run a worker in the background, and stop it at the end."""
        worker = self.post.worker(**options)
        self.done(worker.start())
        try:
            yield worker
        finally:
            self.done(worker.stop(timeout))

    def run(self) -> Drained:
        """Run a worker until nothing is ready."""
        report: Drained = self.done(self.post.worker().run(until_empty=True, signals=False))
        return report

    def ended(self, queue: str) -> int:
        """Return how many messages have ended."""
        ledger = self.ledger(queue)
        return int(ledger.done + ledger.dead + ledger.dropped + ledger.cancelled + ledger.replaced)

    def check(self, queue: str) -> None:
        """Check what holds for every queue at any moment."""
        ledger = self.ledger(queue)
        assert ledger.balance == 0
        assert ledger.unexplained == 0
