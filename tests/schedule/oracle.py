"""The daylight-saving rules implemented naively: every minute of a window, one after the other, with zoneinfo.

It is independent of the code under test: fields are compared one by one, gaps and repeated times are found by reading
the minutes themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

MINUTE = 60
LIMITS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def values(text: str, least: int, most: int) -> set[int]:
    """One field, numbers only."""
    found: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition("/")
        if span == "*":
            low, high = least, most
        else:
            first, dash, last = span.partition("-")
            low = int(first)
            high = int(last) if dash else (most if step else low)
        found.update(range(low, high + 1, int(step or 1)))
    return found


@cache
def fields(pattern: str) -> list[set[int]]:
    return [values(text, *limits) for text, limits in zip(pattern.split(), LIMITS, strict=True)]


def fits(pattern: str, local: datetime) -> bool:
    """Whether a local time fits a pattern of five fields."""
    minutes, hours, days, months, weekdays = fields(pattern)
    texts = pattern.split()
    if local.minute not in minutes or local.hour not in hours or local.month not in months:
        return False
    day = local.day in days
    weekday = local.isoweekday() in weekdays or (local.isoweekday() == 7 and 0 in weekdays)
    if texts[2][0] != "*" and texts[4][0] != "*":
        return day or weekday
    return day and weekday


def minutes_of(zone: ZoneInfo, start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Every minute of UTC in a window, and its local time."""
    moment = start
    while moment < end:
        yield moment, moment.astimezone(zone).replace(tzinfo=None)
        moment += timedelta(minutes=1)


class Window:
    """The minutes of a window, walked through once for all patterns."""

    def __init__(self, zone: ZoneInfo, start: datetime, end: datetime) -> None:
        self.start, self.end = start, end
        self.minutes = list(minutes_of(zone, start, end))
        #: Local minutes that were there before: the second pass.
        self.again: set[datetime] = set()
        #: By the first minute after a gap: the local minutes that were skipped.
        self.skipped: dict[datetime, list[datetime]] = {}
        seen: set[datetime] = set()
        newest = self.minutes[0][1] - timedelta(minutes=1)
        for moment, local in self.minutes:
            if local in seen:
                self.again.add(moment)
            seen.add(local)
            if local > newest + timedelta(minutes=1):
                missing = newest + timedelta(minutes=1)
                gap = self.skipped.setdefault(moment, [])
                while missing < local:
                    gap.append(missing)
                    missing += timedelta(minutes=1)
            newest = max(newest, local)

    def instants(self, pattern: str) -> list[datetime]:
        """Return when a pattern fires in this window, by the rules as documented."""
        real_time = pattern.split()[1].startswith("*")
        found = []
        for moment, local in self.minutes:
            fires = fits(pattern, local) and (real_time or moment not in self.again)
            if not real_time and not fires:
                fires = any(fits(pattern, missing) for missing in self.skipped.get(moment, ()))
            if fires:
                found.append(moment)
        return found


def changes(zone: ZoneInfo, first: datetime, last: datetime) -> list[datetime]:
    """Return the times, to two hours, at which the offset of a zone changes."""
    found = []
    moment, before = first, first.astimezone(zone).utcoffset()
    while moment < last:
        moment += timedelta(hours=2)
        offset = moment.astimezone(zone).utcoffset()
        if offset != before:
            found.append(moment)
        before = offset
    return found


def utc(year: int, month: int = 1, day: int = 1) -> datetime:
    return datetime(year, month, day, tzinfo=UTC)
