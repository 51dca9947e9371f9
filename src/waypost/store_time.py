"""What a client knows of the store's time: a lower bound. From it a store decides whether it still remembers a call."""

from __future__ import annotations

import time
from collections.abc import Callable

#: The bound of the store's time advances slightly slower than the monotonic clock, which may be too fast.
TIME_PACE = 0.99
#: After this time the bound is six seconds behind: the store's time is queried before the next operation.
TIME_STALE_SECONDS = 600.0


class StoreTime:
    """A lower bound of the store's time, from its replies and the monotonic clock. Never from the client's clock.

    A suspended machine or a frozen process makes the bound older than necessary, never newer.
    """

    __slots__ = ("_monotonic", "_seen")

    def __init__(self, monotonic: Callable[[], float] | None = None) -> None:
        self._monotonic = time.monotonic if monotonic is None else monotonic
        #: The store's time in a reply, and when that came by the monotonic clock.
        self._seen: tuple[int, float] | None = None

    def now_ms(self) -> int:
        """Return the bound; 0 before the first reply, which every store refuses as too old."""
        if self._seen is None:
            return 0
        store_ms, at = self._seen
        return store_ms + int((self._monotonic() - at) * 1000 * TIME_PACE)

    @property
    def is_stale(self) -> bool:
        """Whether the bound may be so far behind that repeats would be refused too early."""
        return self._seen is None or self._monotonic() - self._seen[1] > TIME_STALE_SECONDS

    def learn(self, store_ms: int) -> None:
        """Use the time of a reply, if it is later than the current bound."""
        if store_ms > self.now_ms():
            self._seen = (store_ms, self._monotonic())

    def correct(self, store_ms: int) -> None:
        """Use the time with which a store refused ours, even if its clock was set back."""
        self._seen = (store_ms, self._monotonic())
