"""The local end of a lease, by the clock of the holder's own machine.

A lease ends by the store's clock. Its holder cannot read that clock while it is cut off from the
store, so it measures itself: from the time at which it sent the answered call, which is before the store ran
it, and by a clock that also runs while the machine is suspended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

#: The safety margin: clocks differ in speed, and a handler needs some time to stop.
MARGIN_SECONDS_MIN = 0.05
MARGIN_PER_LEASE = 20

_BOOT: int | None = getattr(time, "CLOCK_BOOTTIME", None)

#: Seconds since the machine started. Without such a clock, the time in which it was suspended is not counted.
now: Callable[[], float] = time.monotonic if _BOOT is None else partial(time.clock_gettime, _BOOT)


def local_end(sent: float, lease_seconds: float) -> float:
    """Return the local end of a lease, from the time at which the claim or renewal was sent."""
    margin = max(MARGIN_SECONDS_MIN, lease_seconds / MARGIN_PER_LEASE)
    return sent + lease_seconds - min(margin, lease_seconds / 2)
