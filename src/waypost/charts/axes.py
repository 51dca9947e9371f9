"""Axes: the largest value, values with a line and a text, and where a value is. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
#: Durations that people read easily, in milliseconds.
DURATIONS = (
    *(part * size for size in (1, 10, 100) for part in (1, 2, 5)),
    *(part * SECOND for part in (1, 2, 5, 10, 15, 30)),
    *(part * MINUTE for part in (1, 2, 5, 10, 15, 30)),
    *(part * HOUR for part in (1, 2, 3, 6, 12)),
    *(part * DAY for part in (1, 2, 7, 14, 21, 28, 56, 91, 182, 365, 730, 1825, 3650, 7300, 18250, 36500)),
)
#: The same for a logarithmic axis, where each is several times the one before.
LOG_DURATIONS = (
    1, 10, 100, SECOND, 10 * SECOND, MINUTE, 10 * MINUTE, HOUR, 6 * HOUR, DAY, 7 * DAY, 30 * DAY, 365 * DAY, 3650 * DAY,
)  # fmt: skip
#: From this spread on, small and large values are both visible only on a logarithmic axis.
LOG_SPREAD = 60.0
#: With steps of 1, 2 and 5 there are at least two lines if up to five are allowed.
TICKS_MAX = 5
TIME_TICKS_MAX = 6
#: Between these lengths times are read by months.
MONTHS_FROM, MONTHS_TO = 45 * DAY, 1_000 * DAY
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def format_short(value: float) -> str:
    """Return a number for an axis: 12k instead of 12,000."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def format_duration(milliseconds: float | None) -> str:
    """Return a duration as people read it."""
    if milliseconds is None:
        return "–"
    if milliseconds <= 0:
        return "0"
    if milliseconds < 1:
        return "< 1 ms"
    for below, unit, name in (
        (SECOND, 1, "ms"), (100 * SECOND, SECOND, "s"), (100 * MINUTE, MINUTE, "min"), (48 * HOUR, HOUR, "h"),
    ):  # fmt: skip
        if milliseconds < below and not _is_whole(milliseconds, unit):
            value = milliseconds / unit
            return f"{value:.0f} {name}" if value >= 10 else f"{float(f'{value:.2g}'):g} {name}"
    days = milliseconds / DAY
    return f"{days:.0f} d" if days >= 10 else f"{float(f'{days:.2g}'):g} d"


def _is_whole(milliseconds: float, unit: int) -> bool:
    """Return whether a duration is better written in the next unit: 1 min, not 60 s."""
    larger = {SECOND: MINUTE, MINUTE: HOUR}.get(unit)
    return larger is not None and milliseconds % larger == 0


def format_moment(at_ms: float, *, seconds: bool = False, date: bool = True) -> str:
    """Return a time in UTC as people read it."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    day = f"{at.day} {MONTHS[at.month - 1]} {at.year} " if date else ""
    return day + at.strftime("%H:%M:%S" if seconds else "%H:%M")


@dataclass(frozen=True, slots=True)
class Axis:
    """The values of a chart from bottom to top, and the lines in it."""

    top: float
    ticks: tuple[tuple[float, str], ...]
    #: The value at the bottom; above 0 on a logarithmic axis.
    bottom: float = 0.0

    @property
    def is_log(self) -> bool:
        """Whether each step is a multiple of the one before."""
        return self.bottom > 0

    def place(self, value: float) -> float:
        """Return where a value is, from 0 at the bottom to 1 at the top."""
        if self.is_log:
            return max(
                0.0, min(1.0, math.log(max(value, self.bottom) / self.bottom) / math.log(self.top / self.bottom))
            )
        return max(0.0, min(1.0, value / self.top)) if self.top else 0.0


def count_axis(largest: float, *, whole: bool = True) -> Axis:
    """Return the axis of numbers up to the largest; with `whole` no line is between two whole numbers."""
    if largest <= 0:
        return Axis(1.0, ())
    step = 10 ** math.floor(math.log10(largest / TICKS_MAX))
    step = next(step * part for part in (1, 2, 5, 10, 20) if largest / (step * part) <= TICKS_MAX)
    step = max(step, 1.0) if whole else step
    count = int(largest / step + 1e-9)
    return Axis(largest * 1.04, tuple((step * part, format_short(step * part)) for part in range(1, count + 1)))


def duration_axis(smallest: float, largest: float) -> Axis:
    """Return the axis of durations in milliseconds, logarithmic where the spread needs it."""
    if largest <= 0:
        return Axis(1.0, ())
    if smallest > 0 and largest / smallest >= LOG_SPREAD:
        inside = [tick for tick in LOG_DURATIONS if smallest <= tick <= largest]
        bottom = max((tick for tick in LOG_DURATIONS if tick <= smallest), default=smallest)
        while len(inside) > TICKS_MAX:
            inside = inside[len(inside) % 2 == 0 :: 2]
        return Axis(largest * 1.15, tuple((tick, format_duration(tick)) for tick in inside), float(bottom) * 0.8)
    step = next((step for step in DURATIONS if largest / step <= TICKS_MAX), DURATIONS[-1])
    count = int(largest / step)
    ticks = tuple((float(step * part), format_duration(step * part)) for part in range(1, count + 1))
    return Axis(largest * 1.04, ticks or ((largest, format_duration(largest)),))


def time_ticks(start_ms: int, end_ms: int, most: int = TIME_TICKS_MAX) -> list[tuple[int, str]]:
    """Return readable times between two times with their texts, down to seconds."""
    length = max(1, end_ms - start_ms)
    if MONTHS_FROM <= length < MONTHS_TO:
        return _month_ticks(start_ms, end_ms, most)
    step = next(step for step in DURATIONS if step >= SECOND and (length / step <= most or step == DURATIONS[-1]))
    # Days from Monday on, as weeks are read.
    origin = 4 * DAY if step % (7 * DAY) == 0 else 0
    first = origin + -(-(start_ms - origin) // step) * step
    return [(at, _tick_text(at, step)) for at in range(first, end_ms + 1, step)]


def _month_ticks(start_ms: int, end_ms: int, most: int) -> list[tuple[int, str]]:
    """Return first days of months, and the days in their middle if there is room; or of fewer months."""
    first, last = (datetime.fromtimestamp(at / 1000, UTC) for at in (start_ms, end_ms))
    months = range(first.year * 12 + first.month - 1, last.year * 12 + last.month)
    days = [datetime(one // 12, one % 12 + 1, day, tzinfo=UTC) for one in months for day in (1, 15)]
    inside = [day for day in days if start_ms <= day.timestamp() * 1000 <= end_ms]
    if len(inside) > most:
        inside = [day for day in inside if day.day == 1]
        every = next((every for every in (1, 2, 3, 6) if len(inside) / every <= most), 12)
        inside = [day for day in inside if (day.month - 1) % every == 0]
    return [(int(day.timestamp() * 1000), _day_text(day)) for day in inside]


def _day_text(day: datetime) -> str:
    return str(day.year) if (day.month, day.day) == (1, 1) else f"{day.day} {MONTHS[day.month - 1]}"


def _tick_text(at_ms: int, step: int) -> str:
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    if step >= 365 * DAY:
        return str(at.year)
    if step >= DAY or at_ms % DAY == 0:
        return f"{at.day} {MONTHS[at.month - 1]}"
    return at.strftime("%H:%M:%S" if step < MINUTE else "%H:%M")
