"""The calls in progress of a client: publishes, shared calls, and received messages whose leases are renewed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from waypost import lease_clock
from waypost.errors import QueueDrained
from waypost.message import Message
from waypost.operations.gathering import Lines
from waypost.operations.publish import PublishLines, SharedPublish
from waypost.operations.receive import SettleLines, SharedSettle
from waypost.operations.settle_target import HeldMessages
from waypost.worker.handler import current_slot

if TYPE_CHECKING:
    from waypost.operations.flow import ClientContext
    from waypost.store.port import Executor
    from waypost.worker.renewer import Renewer

#: How long the close of a client waits for a renewal in progress.
STOP_SECONDS = 0.5


class Gate:
    """Counts calls in progress and refuses publishes once drained, except those of handlers that still run."""

    def __init__(self, owner: object, context: ClientContext) -> None:
        self._owner = owner
        self._context = context
        self._lock = threading.Lock()
        self.publishing = 0
        #: Calls of `receive` that may get a message, and their blocks that have one.
        self.claiming = 0
        self.receiving = 0

    @property
    def drained(self) -> bool:
        """Whether a drain has begun."""
        return self._context.draining

    def drain(self) -> None:
        """Begin the drain: from now on nothing new begins."""
        with self._lock:
            self._context.drain()

    def publish(self) -> Self:
        """Return the context of one publish, for a `with` statement."""
        return self

    def __enter__(self) -> None:
        with self._lock:
            if self._context.draining and not self._in_handler():
                raise QueueDrained("this client was drained and publishes no more; use another one, or make a new one")
            self.publishing += 1

    def __exit__(self, *ended: object) -> None:
        with self._lock:
            self.publishing -= 1

    def begin_claim(self) -> None:
        """Count a call of `receive` that begins."""
        with self._lock:
            self.claiming += 1

    def end_claim(self, *, found: bool) -> None:
        """Count the end of that call; with a message a block begins, which a drain waits for instead."""
        with self._lock:
            self.claiming -= 1
            self.receiving += found

    def end_block(self) -> None:
        """Count the end of a block that had a message."""
        with self._lock:
            self.receiving -= 1

    def _in_handler(self) -> bool:
        slot = current_slot.get()
        return slot is not None and slot.consumer.owner is self._owner and bool(slot.messages)


class SharedCalls:
    """Shared calls of publishes and settles made at the same time, by the threads of a client or on an event loop."""

    __slots__ = ("publishes", "settles")

    def __init__(self, *, on_loop: bool) -> None:
        self.publishes: PublishLines = Lines(SharedPublish(), on_loop=on_loop)
        self.settles: SettleLines = Lines(SharedSettle(), on_loop=on_loop)


class _QueueBlocks:
    """The messages of one queue in blocks. A block is not stopped: it can check `message.lease_lost` itself."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.lease_seconds: float | None = None
        self.messages = HeldMessages()
        #: Until when the leases of messages with a time limit of their own are renewed, by `lease_clock`.
        self.limits: dict[Message[Any], float] = {}

    def to_renew(self) -> list[Message[Any]]:
        if not self.limits:
            return list(self.messages)
        now = lease_clock.now()
        return [message for message in list(self.messages) if self.limits.get(message, now) >= now]

    def held(self) -> list[Message[Any]]:
        return list(self.messages)

    def runs(self, message: Message[Any]) -> bool:
        return message in self.messages

    def still_concerns(self, message: Message[Any]) -> bool:
        return message in self.messages

    def on_lost(self, message: Message[Any]) -> None:
        """Do nothing: the renewer has marked and logged it."""

    def on_cancel(self, message: Message[Any]) -> None:
        """Do nothing: the renewer has marked it."""


class Blocks:
    """The received messages of one client whose leases are renewed."""

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
                from waypost.worker.renewer import Renewer

                renewer = self._renewer = Renewer(self._context, self._connect, on_demand=True)
            blocks = self._queues.get(message.queue)
            if blocks is None:
                blocks = self._queues[message.queue] = _QueueBlocks(message.queue)
        timeout = message.own_timeout()
        if timeout is not None:
            blocks.limits[message] = lease_clock.now() + timeout
        blocks.messages.add(message)
        renewer.keep(blocks, message)

    def discard(self, message: Message[Any]) -> None:
        """Stop renewing: its block has ended, or its settle is in progress."""
        blocks = self._queues.get(message.queue)
        if blocks is not None:
            blocks.messages.discard(message)
            blocks.limits.pop(message, None)

    @property
    def renews(self) -> bool:
        """Whether there is a renewer to close."""
        return self._renewer is not None

    def close(self) -> None:
        """Stop renewing all messages; the next block starts again."""
        with self._lock:
            renewer, self._renewer = self._renewer, None
            self._queues = {}
        if renewer is not None:
            renewer.stop(STOP_SECONDS)
