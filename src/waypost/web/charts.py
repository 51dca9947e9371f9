"""Charts as numbers: what a template draws as SVG. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from msgspec import Struct

from waypost.formatting import format_age
from waypost.web.documents import BacklogPoint, Minute, Percentiles, SettingsEvent, Timeline

#: The most points of a chart: more are not told apart.
POINTS_MAX = 72
WIDTH, HEIGHT = 720.0, 120.0
#: The least width of a span on a timeline, so that it can be seen and pointed at.
SPAN_WIDTH_MIN = 3.0

#: The values of one line, from left to right; None where nothing is known.
Values = Sequence[float | None]


class Axis(Struct, frozen=True):
    """The time axis of a chart: `count` points of `step` minutes each."""

    start: datetime
    end: datetime
    step: int
    count: int

    @classmethod
    def until(cls, at: datetime, length: int) -> Axis:
        """The last `length` minutes before `at`, to the end of the minute in progress."""
        step = -(-length // POINTS_MAX)
        count = -(-length // step)
        end = at.replace(second=0, microsecond=0) + timedelta(minutes=1)
        return cls(end - timedelta(minutes=count * step), end, step, count)

    def place(self, at: datetime) -> int:
        """The point that a time belongs to; below 0 or `count` and above if it is outside."""
        return int((at - self.start).total_seconds() // (60 * self.step))

    def begin(self, place: int) -> datetime:
        """When a point begins."""
        return self.start + timedelta(minutes=place * self.step)


class Series(Struct, frozen=True):
    """One line of a chart: its name, what it sums up to, and its parts as the points of SVG polylines."""

    name: str
    #: All points of a line without gaps.
    points: str
    total: float
    text: str
    lines: list[str]
    values: list[float | None]


class Mark(Struct, frozen=True):
    """A change of settings on the time axis."""

    x: float
    text: str
    at: datetime


class Area(Struct, frozen=True):
    """The part of a chart that belongs to one point, with its values in words."""

    x: float
    width: float
    text: str


class Chart(Struct, frozen=True):
    """Lines over time with one scale. `start` and `end` are the ends of the time axis."""

    title: str
    series: list[Series]
    largest: float
    scale: str
    start: datetime
    end: datetime
    minutes_per_point: int
    marks: list[Mark] = []
    areas: list[Area] = []
    width: float = WIDTH
    height: float = HEIGHT


def draw(
    axis: Axis,
    title: str,
    values: dict[str, Values],
    totals: dict[str, float],
    *,
    show: Callable[[float], str],
    scale: str,
    largest: float | None = None,
    changes: Sequence[SettingsEvent] = (),
) -> Chart:
    """A chart of these lines. `largest` is the top of the scale, if it is not that of the largest value."""
    most = max((value for line in values.values() for value in line if value is not None), default=0)
    top = max(most, largest or 0)
    series = [make_series(name, line, totals[name], show, top) for name, line in values.items()]
    areas = [
        Area(
            round((place - 0.5) * WIDTH / max(1, axis.count - 1), 1),
            round(WIDTH / max(1, axis.count - 1), 1),
            f"{axis.begin(place):%H:%M} UTC: "
            + ", ".join(f"{one.name} {show(value)}" for one in series if (value := one.values[place]) is not None),
        )
        for place in range(axis.count)
        if any(one.values[place] for one in series)
    ]
    marks = [
        Mark(round((change.at - axis.start) / (axis.end - axis.start) * WIDTH, 1), change.text, change.at)
        for change in changes
        if axis.start <= change.at <= axis.end
    ]
    return Chart(title, series, most, scale.format(show(most)), axis.start, axis.end, axis.step, marks, areas)


def make_series(name: str, values: Values, total: float, show: Callable[[float], str], top: float) -> Series:
    """One line, in parts where values are missing; zero is at the bottom."""
    step, scale = WIDTH / max(1, len(values) - 1), (HEIGHT - 6) / top if top else 0.0
    lines, part = list[str](), list[str]()
    for place, value in enumerate([*values, None]):
        if value is not None:
            part.append(f"{place * step:.1f},{HEIGHT - 2 - value * scale:.1f}")
        elif part:
            # A single point is drawn as a line without length, whose round ends are visible.
            lines.append(" ".join(part if len(part) > 1 else part * 2))
            part = []
    return Series(name, lines[0] if lines else "", total, show(total), lines, list(values))


def show_count(value: float) -> str:
    """A number of messages."""
    return f"{value:,.0f}"


def show_seconds(value: float) -> str:
    """A duration."""
    return format_age(timedelta(seconds=value))


def make_chart(
    minutes: Sequence[Minute],
    names: Sequence[str],
    at: datetime,
    length: int,
    *,
    title: str = "",
    largest: float | None = None,
    changes: Sequence[SettingsEvent] = (),
) -> Chart:
    """The counters of the last `length` minutes before `at`. A minute in which nothing was counted is 0."""
    axis = Axis.until(at, length)
    sums = {name: [0.0] * axis.count for name in names}
    for minute in minutes:
        place = axis.place(minute.at)
        if 0 <= place < axis.count:
            for name in names:
                sums[name][place] += minute.counts.get(name, 0)
    totals = {name: sum(values) for name, values in sums.items()}
    scale = f"most in {axis.step} min: {{}}"
    return draw(axis, title, dict(sums), totals, show=show_count, scale=scale, largest=largest, changes=changes)


def make_backlog_chart(
    backlog: Sequence[BacklogPoint],
    at: datetime,
    length: int,
    *,
    title: str = "",
    largest: float | None = None,
    changes: Sequence[SettingsEvent] = (),
    known_from: datetime | None = None,
) -> Chart:
    """The backlog at the end of each point. `known_from`: what was before that was not counted."""
    axis = Axis.until(at, length)
    values: list[float | None] = []
    place = 0
    for point in range(axis.count):
        end = axis.begin(point + 1)
        # Between two entries nothing happened but in the minute of the first: the next one has the value from then on.
        while place < len(backlog) - 1 and backlog[place].at < end:
            place += 1
        known = bool(backlog) and (known_from is None or end > known_from)
        values.append(backlog[place].messages if known else None)
    now = backlog[-1].messages if backlog else 0
    return draw(axis, title, {"backlog": values}, {"backlog": now}, show=show_count, scale="most: {}",
                largest=largest, changes=changes)  # fmt: skip


def make_times_chart(
    minutes: Sequence[Minute],
    what: str,
    at: datetime,
    length: int,
    *,
    title: str = "",
    largest: float | None = None,
    changes: Sequence[SettingsEvent] = (),
) -> Chart:
    """Mean and longest waits (`wait`) or run times (`run`), in seconds; nothing where there was none."""
    axis = Axis.until(at, length)
    sums, numbers = [0.0] * axis.count, [0] * axis.count
    longest: list[float | None] = [None] * axis.count
    for minute in minutes:
        place = axis.place(minute.at)
        mean = minute.wait_mean_seconds if what == "wait" else minute.run_mean_seconds
        most = minute.wait_max_seconds if what == "wait" else minute.run_max_seconds
        if 0 <= place < axis.count and mean is not None and most is not None:
            number = minute.counts.get("claims" if what == "wait" else "runs", 0)
            sums[place] += mean * number
            numbers[place] += number
            longest[place] = max(longest[place] or 0.0, most)
    means = [total / number if number else None for total, number in zip(sums, numbers, strict=True)]
    totals = {
        "mean": sum(sums) / sum(numbers) if sum(numbers) else 0.0,
        "longest": max((one for one in longest if one is not None), default=0.0),
    }
    return draw(axis, title, {"mean": means, "longest": longest}, totals, show=show_seconds, scale="longest: {}",
                largest=largest, changes=changes)  # fmt: skip


def make_spread_chart(
    percentiles: Sequence[Percentiles],
    what: str,
    at: datetime,
    length: int,
    *,
    title: str = "",
    largest: float | None = None,
    changes: Sequence[SettingsEvent] = (),
) -> Chart:
    """Percentiles of waits (`wait`) or run times (`run`) in seconds, of the same spans as the other charts."""
    axis = Axis.until(at, length)
    values: dict[str, list[float | None]] = {name: [None] * axis.count for name in ("p50", "p95", "p99")}
    for one in percentiles:
        spread, place = one.wait if what == "wait" else one.run, axis.place(one.at)
        if spread is not None and 0 <= place < axis.count:
            for name, line in values.items():
                line[place] = getattr(spread, f"{name}_seconds")
    largest_of = {name: max((one for one in line if one is not None), default=0.0) for name, line in values.items()}
    return draw(axis, title, dict(values), largest_of, show=show_seconds, scale="largest: {}", largest=largest,
                changes=changes)  # fmt: skip


class Bar(Struct, frozen=True):
    """A span of a timeline, to scale."""

    kind: str
    text: str
    x: float
    width: float


def timeline_bars(timeline: Timeline) -> list[Bar]:
    """The spans of a message's timeline in one row, to scale but for very short ones, which stay visible."""
    total = sum(span.seconds for span in timeline.spans)
    widths = [
        max(SPAN_WIDTH_MIN, span.seconds / total * WIDTH) if total else WIDTH / len(timeline.spans)
        for span in timeline.spans
    ]
    scale = WIDTH / sum(widths) if widths else 1.0
    bars, x = [], 0.0
    for span, width in zip(timeline.spans, widths, strict=True):
        bars.append(Bar(span.kind, span.text, round(x, 2), round(width * scale, 2)))
        x += width * scale
    return bars
