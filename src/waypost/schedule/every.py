"""Intervals: every so many milliseconds from an anchor, computed and never walked through."""

from __future__ import annotations

from datetime import timedelta

from waypost.checks import show
from waypost.errors import InvalidSchedule
from waypost.policy import INTERVAL_MS_MAX, INTERVAL_MS_MIN


def interval_ms(every: float | timedelta) -> int:
    """Seconds or a timedelta as milliseconds, or raise `InvalidSchedule`."""
    seconds = every.total_seconds() if isinstance(every, timedelta) else every
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise InvalidSchedule(f"every is a number of seconds or a timedelta, not {show(every)}")
    if not INTERVAL_MS_MIN / 1000 <= seconds <= INTERVAL_MS_MAX / 1000:
        raise InvalidSchedule(f"every must be from a millisecond to ten years, not {show(every)}")
    return round(seconds * 1000)


def next_multiple(anchor_ms: int, every_ms: int, after_ms: int) -> int:
    """The first anchor + n × interval (n from 0) behind a moment."""
    if after_ms < anchor_ms:
        return anchor_ms
    return anchor_ms + ((after_ms - anchor_ms) // every_ms + 1) * every_ms
