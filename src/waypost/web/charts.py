"""Charts as numbers: what a template draws as SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from msgspec import Struct

from waypost.web.documents import Minute, Timeline

#: The most points of a chart: more are not told apart.
POINTS_MAX = 72
WIDTH, HEIGHT = 720.0, 120.0
#: The least width of a span on a timeline, so that it can be seen and pointed at.
SPAN_WIDTH_MIN = 3.0


class Series(Struct, frozen=True):
    """One line of a chart, as the points of an SVG polyline, with its sum."""

    name: str
    points: str
    total: int


class Chart(Struct, frozen=True):
    """Lines over time with one scale. `start` and `end` are the ends of the time axis."""

    series: list[Series]
    largest: int
    start: datetime
    end: datetime
    minutes_per_point: int
    width: float = WIDTH
    height: float = HEIGHT


def make_chart(minutes: Sequence[Minute], names: Sequence[str], at: datetime, length: int) -> Chart:
    """The counters of the last `length` minutes before `at`. A minute in which nothing was counted is 0."""
    step = -(-length // POINTS_MAX)
    count = -(-length // step)
    end = at.replace(second=0, microsecond=0) + timedelta(minutes=1)
    start = end - timedelta(minutes=count * step)
    sums = {name: [0] * count for name in names}
    for minute in minutes:
        place = int((minute.at - start).total_seconds() // (60 * step))
        if 0 <= place < count:
            for name in names:
                sums[name][place] += minute.counts.get(name, 0)
    largest = max((value for values in sums.values() for value in values), default=0)
    series = [Series(name, polyline(values, largest), sum(values)) for name, values in sums.items()]
    return Chart(series, largest, start, end, step)


def polyline(values: Sequence[int], largest: int) -> str:
    """The points of a line, from left to right; zero is at the bottom."""
    step = WIDTH / max(1, len(values) - 1)
    scale = (HEIGHT - 6) / largest if largest else 0.0
    return " ".join(f"{at * step:.1f},{HEIGHT - 2 - value * scale:.1f}" for at, value in enumerate(values))


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
