"""How long the holder of a lease may count on it, by the clock of its own machine.

A lease is the store's, and ends by the store's clock. Its holder cannot see that clock while it is cut off from the
store, so it counts for itself: from when it sent the call that the store answered, which is before the store acted on
it, and by a clock that also runs while the machine is suspended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

#: Not counted on: clocks differ in speed, and a handler needs a moment to stop.
MARGIN_SECONDS_MIN = 0.05
MARGIN_PER_LEASE = 20

_BOOT: int | None = getattr(time, "CLOCK_BOOTTIME", None)

#: Seconds since the machine started. Where the system has no such clock, the time of its sleep is not seen.
now: Callable[[], float] = time.monotonic if _BOOT is None else partial(time.clock_gettime, _BOOT)


def local_end(sent: float, lease_seconds: float) -> float:
    """When a lease ends for its holder, given when the call was sent by which the store made or renewed it."""
    margin = max(MARGIN_SECONDS_MIN, lease_seconds / MARGIN_PER_LEASE)
    return sent + lease_seconds - min(margin, lease_seconds / 2)
