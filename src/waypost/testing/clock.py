"""A manual clock: pass a `ManualClock` as `clock=` to any store, and time moves only when a test advances it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from waypost.store_time import StoreTime

#: The start of a minute in January 2027: minute counters then begin with the first event.
START_MS = 1_800_000_000_000


class ClockTime(StoreTime):
    """The store's time as a client knows it: exactly the store's `clock`, or this machine's if the store runs here."""

    __slots__ = ("_clock",)

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._clock = clock or (lambda: time.time_ns() // 1_000_000)

    def now_ms(self) -> int:
        """Return the time of that clock."""
        return self._clock()

    @property
    def is_stale(self) -> bool:
        """Always False: the time is never read from the store."""
        return False


class ManualClock:
    """Milliseconds that stand still. Call it for the time; `advance` it by seconds. Safe to share between threads."""

    def __init__(self, start_ms: int = START_MS) -> None:
        self._now_ms = start_ms
        self._lock = threading.Lock()

    def __call__(self) -> int:
        """Return the time in milliseconds."""
        with self._lock:
            return self._now_ms

    def advance(self, duration: float | timedelta) -> int:
        """Move forward by seconds or a timedelta; return the new time in milliseconds."""
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
        return self.advance_ms(round(seconds * 1000))

    def advance_ms(self, milliseconds: int) -> int:
        """Move forward by milliseconds; return the new time."""
        if milliseconds < 0:
            raise ValueError(
                f"a store's clock does not go back by {-milliseconds} milliseconds by itself; `step` sets it"
            )
        with self._lock:
            self._now_ms += milliseconds
            return self._now_ms

    def step(self, duration: float | timedelta) -> int:
        """Set the clock by seconds or a timedelta, forward or back, as NTP or a person sets that of a server."""
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
        with self._lock:
            self._now_ms += round(seconds * 1000)
            return self._now_ms

    def __repr__(self) -> str:
        return f"ManualClock({self()})"
