"""Both queues behind one sync interface, so that each behaviour is tested once for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from waypost.redis_message_queue import RedisMessageQueue
from waypost.redis_message_queue.asyncio import RedisMessageQueue as AsyncRedisMessageQueue

MODES = ("sync", "async")


class Queues:
    """Makes queues of one mode on one store, and closes what they opened."""

    def __init__(self, mode: str, url: str, namespace: str) -> None:
        self.mode = mode
        self.url = url
        self.namespace = namespace
        self._made: list[Any] = []
        self._loop = asyncio.new_event_loop() if mode == "async" else None

    def make(self, name: str = "q", *, client: object = None, **given: Any) -> Queue:
        """Return a queue of the adapter."""
        kind: Any = AsyncRedisMessageQueue if self._loop is not None else RedisMessageQueue
        if "gateway" not in given:
            given["client"] = self.url if client is None else client
        queue = kind(name, namespace=self.namespace, **given)
        self._made.append(queue)
        return Queue(self, queue)

    def run(self, value: Any) -> Any:
        """Return what a call returns, awaited where it has to be."""
        return value if self._loop is None else self._loop.run_until_complete(_awaited(value))

    def close(self) -> None:
        for queue in self._made:
            self.run(queue.post.close())
        if self._loop is not None:
            self._loop.close()


async def _awaited(value: Any) -> Any:
    return await value if hasattr(value, "__await__") else value


class Queue:
    """One queue of either mode."""

    def __init__(self, queues: Queues, queue: Any) -> None:
        self._queues = queues
        self.queue = queue

    def publish(self, message: Any) -> bool:
        return bool(self._queues.run(self.queue.publish(message)))

    def drain(self, timeout: float | None = None) -> bool:
        return bool(self._queues.run(self.queue.drain(timeout)))

    def close(self, timeout: float | None = None) -> bool:
        end = self.queue.close if self._queues.mode == "sync" else self.queue.aclose
        return bool(self._queues.run(end(timeout)))

    def post(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the client below."""
        return self._queues.run(getattr(self.queue.post, method)(*arguments, **options))

    def dead(self) -> list[Any]:
        """Return the dead letters."""
        return list(self.post("page", self.queue._options.name, "dead").messages)

    def process(self, handle: Callable[[Any], object] = lambda message: None) -> Any:
        """Process one message with a function, and return it."""
        with self.block() as message:
            if message is not None:
                handle(message)
            return message

    @contextmanager
    def block(self) -> Iterator[Any]:
        """`process_message` as a sync block, in both modes."""
        if self._queues.mode == "sync":
            with self.queue.process_message() as message:
                yield message
            return
        block = self.queue.process_message()
        message = self._queues.run(block.__aenter__())
        try:
            yield message
        except BaseException as error:
            if not self._queues.run(block.__aexit__(type(error), error, error.__traceback__)):
                raise
            return
        self._queues.run(block.__aexit__(None, None, None))
