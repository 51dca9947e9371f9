"""Blocks of `receive` and `consume`: their leases are renewed while they run, from the threads of a `Renewer`.

The threads start with the first block and end when there has been none for a while, or with the client. A connection is
made when a lease is first renewed: a block that is shorter than a third of its lease costs none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from waypost.message import Message

if TYPE_CHECKING:
    from waypost.operations.flow import ClientContext
    from waypost.store.port import Executor
    from waypost.worker.renewing import Renewer

#: A client that is closed waits so long for a renewal under way.
STOP_SECONDS = 0.5


class _QueueBlocks:
    """The messages of one queue in blocks. A block is not stopped: it looks at `message.lease_lost` itself."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.lease_seconds: float | None = None
        self.messages: set[Message[Any]] = set()

    def to_renew(self) -> list[Message[Any]]:
        return list(self.messages)

    def held(self) -> list[Message[Any]]:
        return list(self.messages)

    def runs(self, message: Message[Any]) -> bool:
        return message in self.messages

    def still_concerns(self, message: Message[Any]) -> bool:
        return message in self.messages

    def on_lost(self, message: Message[Any]) -> None:
        """The renewer has marked and logged it."""

    def on_cancel(self, message: Message[Any]) -> None:
        """The renewer has marked it."""


class Blocks:
    """The blocks of one client whose leases are renewed."""

    def __init__(self, context: ClientContext, connect: Callable[[], Executor]) -> None:
        self._context = context
        self._connect = connect
        self._queues: dict[str, _QueueBlocks] = {}
        self._renewer: Renewer | None = None
        self._lock = threading.Lock()

    def add(self, message: Message[Any]) -> None:
        """Renew the lease of this message until `discard`."""
        if message.at_most_once:
            return
        with self._lock:
            renewer = self._renewer
            if renewer is None:
                from waypost.worker.renewing import Renewer

                renewer = self._renewer = Renewer(self._context, self._connect, on_demand=True)
            blocks = self._queues.get(message.queue)
            if blocks is None:
                blocks = self._queues[message.queue] = _QueueBlocks(message.queue)
        blocks.messages.add(message)
        renewer.keep(blocks, message)

    def discard(self, message: Message[Any]) -> None:
        """Its block has ended, or its settle is under way."""
        blocks = self._queues.get(message.queue)
        if blocks is not None:
            blocks.messages.discard(message)

    @property
    def renews(self) -> bool:
        """Whether there is something to close."""
        return self._renewer is not None

    def close(self) -> None:
        """Renew nothing any more; the next block begins anew."""
        with self._lock:
            renewer, self._renewer = self._renewer, None
            self._queues = {}
        if renewer is not None:
            renewer.stop(STOP_SECONDS)
