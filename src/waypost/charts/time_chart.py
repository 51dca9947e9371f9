"""Charts over time: lines, steps, bars and stacked bars, percentile bands, and marks of moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from typing import Literal

from waypost.charts.axes import (
    DAY,
    MINUTE,
    TIME_TICKS_MAX,
    Axis,
    count_axis,
    duration_axis,
    format_duration,
    format_moment,
    format_short,
    time_ticks,
)

#: The width of the drawing in its own units; it is stretched to the width of the page.
WIDTH = 1000
TOP, BOTTOM, HEIGHT = 10, 20, 150
#: The room for the texts of the values, beside the drawing.
LEFT = 54
#: The most times on the axis of a chart that is less tall than others.
SMALL_TICKS_MAX = 4
#: The most points with a text of their own; if there are more, a text is for several of them.
AREAS_MAX = 48
#: Up to so many points are bars, and up to so many are steps; more are lines.
BARS_MAX, STEPS_MAX = 36, 160
#: A text of the axis nearer to an edge than this begins or ends there.
EDGE = 0.045

#: The values of a line, from left to right; None where nothing is known.
Values = Sequence[float | None]
Kind = Literal["auto", "lines", "steps", "bars", "stacked", "band"]
Unit = Literal["messages", "rate", "duration"]


@dataclass(frozen=True, slots=True)
class TimeRange:
    """The time axis: `count` points of `step_ms` each, from `start_ms` on."""

    start_ms: int
    step_ms: int
    count: int

    @property
    def end_ms(self) -> int:
        """The end of the last point."""
        return self.start_ms + self.step_ms * self.count

    def place(self, at_ms: float) -> float:
        """Return where a time is, from 0 to 1."""
        return (at_ms - self.start_ms) / (self.step_ms * self.count)

    def describe_point(self, number: int) -> str:
        """Return the time of a point as a text."""
        at = self.start_ms + number * self.step_ms
        return f"{format_moment(at, seconds=self.step_ms < MINUTE, date=self.step_ms * self.count > DAY)} UTC"


@dataclass(frozen=True, slots=True)
class Series:
    """One line or stack of a chart: its name, its color as a class, its values, and a figure for the legend."""

    name: str
    color: str
    values: Values
    text: str = ""
    #: With a soft area below its line.
    is_filled: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment on the time axis, with what happened."""

    at_ms: int
    text: str


@dataclass(frozen=True, slots=True)
class TimeChart:
    """Series over time with one scale. `smallest` and `largest` are values of other charts with the same scale."""

    title: str
    time: TimeRange
    series: Sequence[Series]
    unit: Unit = "messages"
    kind: Kind = "auto"
    #: What the values are, in a few words.
    note: str = ""
    smallest: float = 0.0
    largest: float = 0.0
    marks: Sequence[Mark] = ()
    height: int = HEIGHT
    #: With the values of each point as a text that appears when it is pointed at.
    is_detailed: bool = True
    #: With the times of the axis for a script, which may write them in another time zone.
    has_times: bool = False

    @property
    def drawn_as(self) -> Kind:
        """The form of the drawing: what fits the number of points."""
        if self.kind != "auto":
            return self.kind
        if self.time.count <= BARS_MAX and self.unit != "duration":
            return "bars"
        return "steps" if self.time.count <= STEPS_MAX else "lines"

    @property
    def show(self) -> Callable[[float], str]:
        """Return how a value is written."""
        if self.unit == "duration":
            return format_duration
        return format_short if self.unit == "rate" else lambda value: f"{value:,.0f}"

    @property
    def most(self) -> float:
        """The largest value, of stacks the largest sum."""
        known = [[value or 0.0 for value in one.values] for one in self.series]
        if self.drawn_as == "stacked":
            return max((sum(column) for column in zip(*known, strict=True)), default=0.0)
        return max((value for values in known for value in values), default=0.0)

    @property
    def least(self) -> float:
        """The smallest value above 0; 0 if there is none."""
        return min((value for one in self.series for value in one.values if value), default=0.0)

    def axis(self) -> Axis:
        """Return the axis of the values."""
        largest = max(self.most, self.largest)
        if self.unit != "duration":
            return count_axis(largest, whole=self.unit == "messages")
        smallest = min((value for value in (self.least, self.smallest) if value), default=largest)
        return duration_axis(max(1.0, smallest), largest)


def with_one_scale(charts: Sequence[TimeChart]) -> list[TimeChart]:
    """Return the same charts with one scale, so that they can be compared."""
    largest = max((chart.most for chart in charts), default=0.0)
    smallest = min((chart.least for chart in charts if chart.least), default=0.0)
    return [replace(chart, smallest=smallest, largest=largest) for chart in charts]


def figure(chart: TimeChart, *, heading: str = "", extra: str = "", kind: str = "chart") -> str:
    """Return a chart with its title and legend as HTML; `extra` is HTML below it, `kind` the classes of the whole."""
    keys = "".join(
        f'<span class="key {one.color}">{escape(one.name)}{f" <b>{escape(one.text)}</b>" if one.text else ""}</span>'
        for one in chart.series
        if len(chart.series) > 1 or one.text
    )
    after = f' <span class="muted">{escape(heading)}</span>' if heading else ""
    note = f'<span class="scale">{escape(chart.note)}</span>' if chart.note else ""
    return (
        f'<figure class="{kind}"><figcaption><span class="title">{escape(chart.title)}{after}</span>{note}'
        f'<span class="keys-of">{keys}</span></figcaption>{draw(chart, heading)}{extra}</figure>'
    )


def draw(chart: TimeChart, heading: str = "") -> str:
    """Return the drawing of a chart as HTML, as wide as the page lets it be."""
    axis, height = chart.axis(), chart.height - TOP - BOTTOM
    label = f"{chart.title}{f' of {heading}' if heading else ''}: " + ", ".join(
        f"{one.name} {one.text}".strip() for one in chart.series
    )
    grid, texts = [], []
    for value, text in axis.ticks:
        y = TOP + height * (1 - axis.place(value))
        grid.append(f'<line class="grid" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        texts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(text)}</text>')
    inner = [_plot(chart, axis, height)]
    for mark in chart.marks:
        x = _number(chart.time.place(mark.at_ms) * WIDTH)
        inner.append(f'<path class="mark" d="M{x} 0v{height}"/>')
    if chart.is_detailed:
        inner += _areas(chart, height)
    return (
        f'<div class="drawing"><svg width="{LEFT}" height="{chart.height}" aria-hidden="true">{"".join(texts)}</svg>'
        f'<svg class="plot" width="100%" height="{chart.height}" role="img"><title>{escape(label)}</title>'
        f'{"".join(grid)}<line class="axis" x2="100%" y1="{TOP + height}" y2="{TOP + height}"/>'
        f'<svg y="{TOP}" width="100%" height="{height}" viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none">'
        f"{''.join(inner)}</svg>{_time_axis(chart, TOP + height)}</svg></div>"
    )


def _plot(chart: TimeChart, axis: Axis, height: int) -> str:
    match chart.drawn_as:
        case "stacked":
            return _stacked(chart, axis, height)
        case "bars":
            return _bars(chart, axis, height)
        case "steps":
            return _paths(chart, axis, height, steps)
        case "band":
            return _band(chart, axis, height)
        case _:
            return _paths(chart, axis, height, lines)


def _paths(chart: TimeChart, axis: Axis, height: int, draw_line: Callable[[Values, Axis, float], str]) -> str:
    """Lines, the first on top; those that are filled are visible also where they are the same."""
    found = []
    for one in reversed(chart.series):
        if one.is_filled:
            nothing = [None if value is None else 0.0 for value in one.values]
            found.append(_soft(one, nothing, axis, height, stepped=draw_line is steps))
        found.append(_path(one, draw_line(one.values, axis, height)))
    return "".join(found)


def _path(one: Series, drawn: str) -> str:
    return f'<path class="line {one.color}" d="{drawn}"/>' if drawn else ""


def lines(values: Values, axis: Axis, height: float) -> str:
    """Return values as a path through the middle of each point; a single one between gaps is a short line."""
    step, parts, before = WIDTH / max(1, len(values)), list[str](), (0, 0.0)
    last = len(values) - 1
    for number, value in enumerate(values):
        if value is None:
            continue
        at = round((number + 0.5) * step), round(height * (1 - axis.place(value)), 1)
        joined = number > 0 and values[number - 1] is not None
        if joined:
            parts.append(f"l{_number(at[0] - before[0])} {_number(at[1] - before[1])}")
        elif number == last or values[number + 1] is None:
            parts.append(f"M{_number(number * step)} {_number(at[1])}h{_number(step)}")
        else:
            parts.append(f"M{at[0]} {_number(at[1])}")
        before = at
    return "".join(parts)


def steps(values: Values, axis: Axis, height: float) -> str:
    """Return values as a path of steps."""
    edges = [round(number * WIDTH / max(1, len(values))) for number in range(len(values) + 1)]
    parts, before = list[str](), 0.0
    for number, value in enumerate(values):
        if value is None:
            continue
        y = round(height * (1 - axis.place(value)), 1)
        if number > 0 and values[number - 1] is not None:
            parts.append(f"v{_number(y - before)}" if y != before else "")
        else:
            parts.append(f"M{edges[number]} {_number(y)}")
        parts.append(f"h{edges[number + 1] - edges[number]}")
        before = y
    return "".join(parts)


def _bars(chart: TimeChart, axis: Axis, height: int) -> str:
    """Series side by side within each point."""
    step = WIDTH / max(1, chart.time.count)
    room = step * 0.84 / max(1, len(chart.series))
    drawn = []
    for order, one in enumerate(chart.series):
        parts = [
            _bar(number * step + step * 0.08 + order * room, room, axis.place(value) * height, 0.0, height)
            for number, value in enumerate(one.values)
            if value
        ]
        if parts:
            drawn.append(f'<path class="fill {one.color}" d="{"".join(parts)}"/>')
    return "".join(drawn)


def _bar(x: float, width: float, tall: float, below: float, height: float) -> str:
    tall = max(tall, 1.5)
    return f"M{_number(x)} {_number(height - below)}v{_number(-tall)}h{_number(width)}v{_number(tall)}z"


def _stacked(chart: TimeChart, axis: Axis, height: int) -> str:
    step = WIDTH / max(1, chart.time.count)
    margin = 0.08 * step if chart.time.count <= STEPS_MAX else 0.0
    below, drawn = [0.0] * chart.time.count, []
    for one in chart.series:
        parts = []
        for number, value in enumerate(one.values):
            if value:
                tall = max(1.5, axis.place(value) * height)
                parts.append(_bar(number * step + margin, step - 2 * margin, tall, below[number], height))
                below[number] += tall
        if parts:
            drawn.append(f'<path class="fill {one.color}" d="{"".join(parts)}"/>')
    return "".join(drawn)


def _band(chart: TimeChart, axis: Axis, height: int) -> str:
    """Percentiles, smallest first: a soft area from the first to the last, and a line for each."""
    draw_line = steps if chart.time.count <= STEPS_MAX else lines
    soft = _soft(chart.series[-1], chart.series[0].values, axis, height, stepped=draw_line is steps)
    return soft + "".join(_path(one, draw_line(one.values, axis, height)) for one in chart.series)


def _soft(one: Series, low: Values, axis: Axis, height: int, *, stepped: bool) -> str:
    """The area between a series and lower values."""
    step, areas, start = WIDTH / max(1, len(low)), list[str](), 0
    for number in range(len(low) + 1):
        if number < len(low) and low[number] is not None and one.values[number] is not None:
            continue
        if number > start:
            areas.append(_area(low, one.values, start, number, step, axis, height, stepped=stepped))
        start = number + 1
    return f'<path class="soft {one.color}" d="{"".join(areas)}"/>' if areas else ""


def _area(
    low: Values, high: Values, start: int, end: int, step: float, axis: Axis, height: int, *, stepped: bool
) -> str:
    """The area between two lines without gaps: along the upper one, and back along the lower one."""
    tops, bottoms = (
        [round(height * (1 - axis.place(value or 0.0)), 1) for value in values[start:end]] for values in (high, low)
    )
    if stepped:
        xs = [round(number * step) for number in range(start, end + 1)]
        there = "".join(f"V{_number(y)}h{right - left}" for y, left, right in zip(tops, xs, xs[1:], strict=False))
        back = "".join(
            f"V{_number(y)}h{left - right}" for y, left, right in reversed(list(zip(bottoms, xs, xs[1:], strict=False)))
        )
        return f"M{xs[0]} {_number(tops[0])}{there}{back}z"
    xs = [round((number + 0.5) * step) for number in range(start, end)]
    points = [f"{x} {_number(y)}" for x, y in zip(xs, tops, strict=True)]
    points += [f"{x} {_number(y)}" for x, y in zip(reversed(xs), reversed(bottoms), strict=True)]
    return f"M{'L'.join(points)}z"


def _areas(chart: TimeChart, height: int) -> list[str]:
    """The part of the chart that belongs to one point or a few, with values as a text; a mark has its own."""
    step, found = WIDTH / max(1, chart.time.count), []
    several = -(-chart.time.count // AREAS_MAX)
    for number in range(0, chart.time.count, several):
        known = [(one, [value for value in one.values[number : number + several] if value is not None])
                 for one in chart.series]  # fmt: skip
        if not any(any(values) for _, values in known):
            continue
        texts = ", ".join(f"{one.name} {chart.show(max(values))}" for one, values in known if values)
        most = "at most " if several > 1 else ""
        text = escape(f"{chart.time.describe_point(number)}: {most}{texts}")
        width = min(several, chart.time.count - number) * step
        found.append(
            f'<rect class="area" x="{_number(number * step)}" width="{_number(width)}" height="{height}">'
            f"<title>{text}</title></rect>"
        )
    for mark in chart.marks:
        x = _number(chart.time.place(mark.at_ms) * WIDTH - 5)
        found.append(
            f'<rect class="area" x="{x}" width="10" height="{height}"><title>{escape(mark.text)}</title></rect>'
        )
    return found


def _time_axis(chart: TimeChart, y: int) -> str:
    """The texts of the time axis; on a narrow screen every second one is left out."""
    time = chart.time
    ticks = time_ticks(time.start_ms, time.end_ms, TIME_TICKS_MAX if chart.height >= HEIGHT else SMALL_TICKS_MAX)
    found = []
    for number, (at_ms, text) in enumerate(ticks):
        place = time.place(at_ms)
        anchor = ' text-anchor="start"' if place < EDGE else ' text-anchor="end"' if place > 1 - EDGE else ""
        wide = " wide-only" if len(ticks) > 4 and number % 2 else ""
        at = f' data-at="{datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()}"' if chart.has_times else ""
        found.append(f'<text class="time{wide}" x="{_number(100 * place)}%" y="{y + 15}"{anchor}{at}>{text}</text>')
    return "".join(found)


def _number(value: float) -> str:
    """Return a coordinate in as few characters as it needs."""
    if math.isnan(value):
        raise ValueError("a coordinate is not a number")
    return f"{round(value, 1):g}"
