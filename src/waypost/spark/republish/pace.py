"""A rate that gives way to live traffic: it halves while the queue is behind, and doubles again when it is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from waypost.policy import parse_rate

#: How often the queue is looked at.
CHECK_SECONDS: Final = 1.0
#: The rate becomes at most this many times slower.
SLOWER_MAX: Final = 64
#: How long messages are sent between two pauses.
SLICE_SECONDS: Final = 0.25
SLICE_ROWS_MAX: Final = 4_096


class Pace:
    """How many messages may be sent now, and when the next ones may be."""

    def __init__(
        self,
        rate: str | None,
        max_age: float | None,
        oldest_ready: Callable[[], float | None],
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        count, per_ms = (None, 1) if rate is None else parse_rate(rate)
        #: Messages a second, None if there is no limit.
        self.rate = None if count is None else count * 1000 / per_ms
        self.slower = 1
        self._max_age, self._oldest_ready = max_age, oldest_ready
        self._wait, self._clock = wait, clock
        self._next = self._last_check = clock()
        self._last_check -= CHECK_SECONDS

    @property
    def slice_rows(self) -> int:
        """How many messages are sent at a time."""
        if self.rate is None:
            return SLICE_ROWS_MAX // self.slower
        return max(1, min(SLICE_ROWS_MAX, int(self.rate / self.slower * SLICE_SECONDS)))

    def wait(self) -> None:
        """Wait until the next messages may be sent; look at the queue first."""
        now = self._clock()
        if self._max_age is not None and now - self._last_check >= CHECK_SECONDS:
            self._last_check = now
            age = self._oldest_ready()
            is_behind = age is not None and age > self._max_age
            self.slower = min(self.slower * 2, SLOWER_MAX) if is_behind else max(1, self.slower // 2)
            if is_behind and self.rate is None:
                # Without a rate a pause is what makes it slower.
                self._next = max(self._next, now + CHECK_SECONDS * self.slower / SLOWER_MAX)
        if self._next > now:
            self._wait(self._next - now)

    def sent(self, rows: int) -> None:
        """Count messages that were sent."""
        if self.rate is not None:
            self._next = max(self._next, self._clock()) + rows * self.slower / self.rate
