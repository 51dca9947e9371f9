"""The contract of a transport, which is the connection of a channel, and what transports with a socket share."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence
from typing import Protocol

from waypost.wake.port import Topic


class ChannelUnusable(Exception):
    """Raised by a transport that connects but carries no notifications; it is retried later."""


class Transport(Protocol):
    """A connection. All methods but `interrupt` are called by the thread of its hub only. Every failure is raised."""

    def open(self) -> None: ...
    def listen(self, topics: Sequence[Topic]) -> None:
        """Subscribe; when it returns, every notification that is sent will arrive."""
        ...

    def unlisten(self, topics: Sequence[Topic]) -> None: ...
    def send(self, topic: Topic, notifications: Sequence[str]) -> None: ...
    def wait(self, seconds: float) -> list[tuple[Topic, list[str]]]:
        """Return notifications as soon as there are any; nothing at the timeout or after an interrupt."""
        ...

    def probe(self) -> None:
        """Make sure that the other side still answers."""
        ...

    def interrupt(self) -> None:
        """End a `wait`. From any thread."""
        ...

    def close(self) -> None: ...


class InterruptibleTransport:
    """Waits for a socket; another thread can end the wait."""

    def __init__(self) -> None:
        self._inner, self._outer = socket.socketpair()
        self._inner.setblocking(False)
        self._outer.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._inner, select.POLLIN)
        self._watched: int | None = None
        #: Whether another thread ended the last wait.
        self.was_interrupted = False

    def interrupt(self) -> None:
        """End the current wait, or the next one. From any thread."""
        # Full: it is already interrupted. Closed: no thread waits any more.
        with contextlib.suppress(OSError):
            self._outer.send(b"\0")

    def wait_readable(self, descriptor: int, seconds: float) -> bool:
        """Wait until there is something to read; return whether there is."""
        if descriptor != self._watched:
            if self._watched is not None:
                self._poll.unregister(self._watched)
            self._poll.register(descriptor, select.POLLIN)
            self._watched = descriptor
        found = [number for number, _ in self._poll.poll(max(0.0, seconds) * 1000)]
        self.was_interrupted = self._inner.fileno() in found
        if self.was_interrupted:
            with contextlib.suppress(OSError):
                self._inner.recv(4096)
        return descriptor in found

    def close_pipe(self) -> None:
        """Close it."""
        self._inner.close()
        self._outer.close()


def join_notifications(notifications: Sequence[str]) -> str:
    """Return notifications as one text."""
    return "\n".join(notifications)


def split_notifications(text: str) -> list[str]:
    """Return the notifications of such a text."""
    return text.split("\n")
