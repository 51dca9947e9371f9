"""Whether a connection is silent: a reply is waited for as long as bytes come or go, however long that takes.

What was handed to the system is not sent yet: over a slow link it leaves bit by bit, while nothing can be read.
"""

from __future__ import annotations

import sys
from contextlib import suppress

try:
    import fcntl
    import termios
except ImportError:  # pragma: no cover - not on this system
    fcntl = termios = None  # type: ignore[assignment]


def unsent_bytes(descriptor: int) -> int:
    """How many bytes the system holds that the other side has not received; 0 where that cannot be asked."""
    if fcntl is not None and descriptor >= 0:
        with suppress(OSError, AttributeError):
            return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0


class Sending:
    """Whether what was written is still on its way, asked each time that a connection has been silent for too long."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: int | None = None

    def goes_on(self, left: int) -> bool:
        """Whether less is left to send than the last time; the first time, whether anything is."""
        before, self._left = self._left, left
        return left > 0 and (before is None or left < before)
