"""Cron patterns: parsed once, refused with the name of the invalid field, and searched field by field.

Five fields (minute hour day-of-month month day-of-week) or six (seconds first). `*`, numbers, ranges, steps, lists,
names of months and days, and the `@daily` family. All times here are local times without a zone; `instants` applies
daylight saving.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from functools import lru_cache

from waypost.checks import show
from waypost.errors import InvalidSchedule

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
#: The names that errors use, with the least and the greatest value. Day 7 is Sunday, like day 0.
FIELDS = (
    ("seconds", 0, 59),
    ("minutes", 0, 59),
    ("hours", 0, 23),
    ("day of month", 1, 31),
    ("month", 1, 12),
    ("day of week", 0, 7),
)
NAMED = {
    "month": {name: place for place, name in enumerate(MONTHS, 1)},
    "day of week": dict(zip(DAYS, range(7), strict=True)),
}
PATTERN_CHARACTERS_MAX = 256
#: Patterns of one schedule: each of them is searched for the next instant.
PATTERNS_MAX = 16
#: 29 February is at most eight years away, so a pattern without a match in this time never occurs.
HORIZON_YEARS = 9
PART = re.compile(r"(\*|[A-Za-z]+|\d{1,4})(?:-([A-Za-z]+|\d{1,4}))?(?:/(\d{1,4}))?")


class Cron:
    """A parsed pattern: the local times at which it occurs."""

    __slots__ = ("_either", "days", "follows_real_time", "hours", "minutes", "months", "pattern", "seconds", "weekdays")

    def __init__(self, pattern: str) -> None:
        if len(pattern) > PATTERN_CHARACTERS_MAX:
            raise InvalidSchedule(f"a cron pattern has at most {PATTERN_CHARACTERS_MAX} characters")
        #: As it was given, with single spaces: part of the schedule's key.
        self.pattern = " ".join(pattern.split())
        texts = _texts(self.pattern)
        sets = [_values(text, *field) for text, field in zip(texts, FIELDS, strict=True)]
        self.seconds, self.minutes, self.hours, self.days, self.months = (tuple(sorted(values)) for values in sets[:5])
        self.weekdays = frozenset(day % 7 for day in sets[5])
        # crontab(5): when both are restricted, either may match; otherwise both must, and one of them always does.
        self._either = not texts[3].startswith("*") and not texts[5].startswith("*")
        #: Whether it follows elapsed time rather than the wall clock: every hour, or every n hours.
        self.follows_real_time = texts[2].startswith("*")
        if self.after(datetime(2024, 1, 1)) is None:  # noqa: DTZ001  (a local time)
            raise InvalidSchedule(
                f"cron pattern {self.pattern!r} never occurs: day of month {texts[3]!r} is in no month {texts[4]!r}"
            )

    def on(self, day: date) -> bool:
        """Whether it occurs on a day."""
        if day.month not in self.months:
            return False
        by_month, by_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (by_month or by_week) if self._either else (by_month and by_week)

    def after(self, moment: datetime) -> datetime | None:
        """Return the first local time after another at which it occurs, or None if there is none within the horizon."""
        start = moment.replace(microsecond=0) + timedelta(seconds=1)
        day: date | None = start.date()
        time = self._time_from(start.hour, start.minute, start.second) if self.on(start.date()) else None
        if time is None:
            day, time = self._day_after(start.date()), (self.hours[0], self.minutes[0], self.seconds[0])
        return None if day is None else datetime(day.year, day.month, day.day, *time)  # noqa: DTZ001  (a local time)

    def _time_from(self, hour: int, minute: int, second: int) -> tuple[int, int, int] | None:
        """Return the first matching time of day from this one on, or None."""
        at = bisect_left(self.hours, hour)
        if at == len(self.hours):
            return None
        if self.hours[at] > hour:
            return self.hours[at], self.minutes[0], self.seconds[0]
        place = bisect_left(self.minutes, minute)
        if place < len(self.minutes) and self.minutes[place] == minute:
            second_place = bisect_left(self.seconds, second)
            if second_place < len(self.seconds):
                return hour, minute, self.seconds[second_place]
            place += 1
        if place < len(self.minutes):
            return hour, self.minutes[place], self.seconds[0]
        return None if at + 1 == len(self.hours) else (self.hours[at + 1], self.minutes[0], self.seconds[0])

    def _day_after(self, day: date) -> date | None:
        """Return the first matching day after another, or None. Searches month by month."""
        year, month, first = day.year, day.month, day.day + 1
        for _ in range(12 * HORIZON_YEARS):
            if year > 9999:
                return None
            if month in self.months:
                for number in range(first, _days_in(year, month) + 1):
                    if self.on(date(year, month, number)):
                        return date(year, month, number)
            year, month, first = (year, month + 1, 1) if month < 12 else (year + 1, 1, 1)
        return None


def _days_in(year: int, month: int) -> int:
    # Not `calendar.monthrange`: importing that module, with `locale`, takes longer than importing all schedules.
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 if month in (4, 6, 9, 11) else 31


def read_cron(pattern: str) -> Cron:
    """Parse a pattern, or return it from the cache."""
    if not isinstance(pattern, str):
        raise InvalidSchedule(f"cron must be a pattern as text, or a list of patterns, not {show(pattern)}")
    return _read_cron(pattern)


def join_patterns(patterns: str | Sequence[str]) -> str:
    """Return one or several patterns as the text that is saved: parsed, with single spaces, separated by `; `."""
    texts = patterns
    if isinstance(patterns, str):
        texts = [part for part in patterns.split(";") if part.strip()] or [patterns]
    elif not isinstance(patterns, list | tuple) or not patterns:
        raise InvalidSchedule(f"cron must be a pattern as text, or a list of patterns, not {show(patterns)}")
    if len(texts) > PATTERNS_MAX:
        raise InvalidSchedule(f"a schedule has at most {PATTERNS_MAX} cron patterns, not {len(texts)}")
    # In the order given, each once.
    return "; ".join(dict.fromkeys(read_cron(text).pattern for text in texts))


@lru_cache(maxsize=1024)
def split_patterns(text: str) -> tuple[Cron, ...]:
    """Return the patterns of a saved text."""
    return tuple(read_cron(part.strip()) for part in text.split(";"))


@lru_cache(maxsize=1024)
def _read_cron(pattern: str) -> Cron:
    return Cron(pattern)


def _texts(pattern: str) -> list[str]:
    """Return the six fields as text."""
    if pattern.startswith("@"):
        known = ALIASES.get(pattern.lower())
        if known is None:
            raise InvalidSchedule(
                f"cron alias {pattern!r} is not supported; known are {', '.join(ALIASES)}, and every= for an interval"
            )
        pattern = known
    texts = pattern.split()
    if len(texts) not in (5, 6):
        raise InvalidSchedule(
            f"cron pattern {pattern!r} has {len(texts)} fields; it needs 5 (minutes, hours, day of month, month, "
            "day of week), or 6 with seconds first"
        )
    return texts if len(texts) == 6 else ["0", *texts]


def _values(text: str, field: str, least: int, most: int) -> set[int]:
    values: set[int] = set()
    for part in text.split(","):
        match = PART.fullmatch(part)
        if match is None:
            raise InvalidSchedule(
                f"cron field {field}: {part!r} is not supported; use *, a number{_or_name(field)}, a range a-b, a "
                "step */n or a-b/n, or a list of these"
            )
        first, last, step_text = match.groups()
        step = 1 if step_text is None else int(step_text)
        if first == "*":
            if last is not None:
                raise InvalidSchedule(f"cron field {field}: {part!r} is no range; a range is a-b")
            low, high = least, 6 if field == "day of week" else most
        else:
            low = _number(first, field, least, most, part)
            high = low if step_text is None else most
            if last is not None:
                high = _number(last, field, least, most, part)
                if field == "day of week" and high == 0 and low > 0:
                    high = 7  # fri-sun: the week may end with Sunday
            if high < low:
                raise InvalidSchedule(f"cron field {field}: range {part!r} runs backwards; list its two parts instead")
        if step < 1 or step > max(1, high - low):
            raise InvalidSchedule(f"cron field {field}: the step of {part!r} must be from 1 to {max(1, high - low)}")
        values.update(range(low, high + 1, step))
    return values


def _number(text: str, field: str, least: int, most: int, part: str) -> int:
    if text.isdecimal():
        number = int(text)
    else:
        known = NAMED.get(field, {}).get(text.lower())
        if known is None:
            raise InvalidSchedule(f"cron field {field}: {text!r} in {part!r} is no number{_or_name(field)}")
        number = known
    if not least <= number <= most:
        raise InvalidSchedule(f"cron field {field}: {text} is out of range, which is {least} to {most}")
    return number


def _or_name(field: str) -> str:
    return f" or name ({', '.join(list(NAMED[field])[:3])}, …)" if field in NAMED else ""
