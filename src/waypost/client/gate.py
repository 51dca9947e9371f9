"""What a drain has to know of a client: publishes and blocks under way, and whether it is drained."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from waypost.errors import QueueDrained
from waypost.worker.handler import handling

if TYPE_CHECKING:
    from waypost.operations.flow import ClientContext


class Gate:
    """Counts what is under way and refuses publishes once drained, but for those of handlers that still run."""

    def __init__(self, owner: object, context: ClientContext) -> None:
        self._owner = owner
        self._context = context
        self._lock = threading.Lock()
        self.publishing = 0
        #: Blocks of `receive` that have a message.
        self.receiving = 0

    @property
    def drained(self) -> bool:
        """Whether a drain has begun."""
        return self._context.draining

    def drain(self) -> None:
        """From here on nothing new begins."""
        with self._lock:
            self._context.drain()

    @contextmanager
    def publish(self) -> Iterator[None]:
        """The length of one publish."""
        with self._lock:
            if self._context.draining and not self._in_handler():
                raise QueueDrained("this client was drained and publishes no more; use another one, or make a new one")
            self.publishing += 1
        try:
            yield
        finally:
            with self._lock:
                self.publishing -= 1

    def received(self, change: int) -> None:
        """A block of `receive` got a message, or ended."""
        with self._lock:
            self.receiving += change

    def _in_handler(self) -> bool:
        slot = handling.get()
        return slot is not None and slot.consumer.owner is self._owner and bool(slot.messages)
