"""How many calls of a client run at the same time."""

from __future__ import annotations

from queue import SimpleQueue


class Places:
    """A number of places for threads, in the order in which they ask for one.

    Like a `threading.Semaphore`, which is written in Python; this one is a queue written in C.
    """

    __slots__ = ("_free",)

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def acquire(self) -> None:
        """Take a place, when there is a free one."""
        self._free.get()

    def release(self) -> None:
        """Give it back."""
        self._free.put(None)

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(self, *ended: object) -> None:
        self._free.put(None)
