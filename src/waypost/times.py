"""Times: integer milliseconds inside waypost, datetimes in UTC and timedeltas in what clients return."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import overload

#: How durations are given: seconds or a timedelta.
Duration = float | timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


@overload
def to_datetime(ms: int) -> datetime: ...
@overload
def to_datetime(ms: int | None) -> datetime | None: ...
def to_datetime(ms: int | None) -> datetime | None:
    """Return milliseconds since 1970 as a datetime in UTC; None for None."""
    return None if ms is None else EPOCH + timedelta(milliseconds=ms)


@overload
def to_timedelta(ms: float) -> timedelta: ...
@overload
def to_timedelta(ms: float | None) -> timedelta | None: ...
def to_timedelta(ms: float | None) -> timedelta | None:
    """Return milliseconds as a timedelta; None for None."""
    return None if ms is None else timedelta(milliseconds=ms)


def to_ms(value: datetime | timedelta) -> int:
    """Return a datetime as milliseconds since 1970, or a timedelta as milliseconds."""
    return round((value - EPOCH if isinstance(value, datetime) else value) / _MILLISECOND)


def format_datetime(at: datetime) -> str:
    """Format a datetime in UTC: 2026-03-06T07:00:00Z, with milliseconds if there are any."""
    text = at.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z").replace(".000Z", "Z")
