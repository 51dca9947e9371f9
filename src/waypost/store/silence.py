"""Detects a silent connection: a reply may take any time, as long as bytes are received or sent.

Written bytes may still be in the system's buffer: over a slow link they are sent slowly, while nothing can be read.
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
    """Return how many sent bytes the other side has not received; 0 if the system cannot report it."""
    if fcntl is not None and descriptor >= 0:
        with suppress(OSError, AttributeError):
            return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0


class Sending:
    """Tracks whether written bytes are still being sent; checked when a connection has been silent for too long."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: int | None = None

    def goes_on(self, left: int) -> bool:
        """Return whether fewer bytes are unsent than at the last check; at the first check, whether there are any."""
        before, self._left = self._left, left
        return left > 0 and (before is None or left < before)
