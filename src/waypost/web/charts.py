"""The charts of the pages: counters, backlogs, waits and run times as series over time. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime, timedelta

from markupsafe import Markup
from msgspec import Struct

from waypost.charts import Mark, Series, Span, TimeChart, TimeRange, color_of, figure, format_duration, spans, sparkline
from waypost.charts.time_chart import Kind, Unit, Values
from waypost.formatting import printable
from waypost.web.documents import BacklogPoint, Minute, Percentiles, SettingsEvent, Timeline

#: The most points of a chart: more cannot be distinguished by eye.
POINTS_MAX = 72
#: The least part of a timeline that a span has, so that it can be seen and pointed at.
SPAN_MIN = 0.004


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

    @property
    def time(self) -> TimeRange:
        """The same as a chart has it."""
        return TimeRange(to_milliseconds(self.start), self.step * 60_000, self.count)


def draw(
    axis: Axis,
    title: str,
    values: dict[str, Values],
    totals: dict[str, float],
    *,
    scale: str,
    unit: Unit = "messages",
    kind: Kind = "auto",
    changes: Sequence[SettingsEvent] = (),
) -> TimeChart:
    """A chart of these lines."""
    show = format_duration if unit == "duration" else show_count
    chart = TimeChart(
        title=title,
        time=axis.time,
        series=[
            Series(name, color_of(name), line, show(totals[name]), is_filled=name in ("done", "backlog"))
            for name, line in values.items()
        ],
        unit=unit,
        kind=kind,
        marks=[
            Mark(to_milliseconds(change.at), printable(change.text))
            for change in changes
            if axis.start <= change.at <= axis.end
        ],
    )
    return dataclasses.replace(chart, note=scale.format(show(chart.most)))


def draw_figure(chart: TimeChart, queue: str = "", *, detailed: bool = False) -> Markup:
    """A chart as HTML. With `detailed` each point has its values when it is pointed at."""
    return Markup(
        figure(dataclasses.replace(chart, is_detailed=detailed, has_times=True), heading=queue)
    )  # all of it is escaped


def show_count(value: float) -> str:
    """A number of messages."""
    return f"{value:,.0f}"


def to_milliseconds(at: datetime) -> int:
    """A time as a chart has it."""
    return round(at.timestamp() * 1000)


def make_chart(
    minutes: Sequence[Minute],
    names: Sequence[str],
    at: datetime,
    length: int,
    *,
    title: str = "",
    changes: Sequence[SettingsEvent] = (),
) -> TimeChart:
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
    # What failed adds up; what was published and what was done do not.
    kind: Kind = "stacked" if "retried" in names else "auto"
    return draw(axis, title, dict(sums), totals, scale=scale, kind=kind, changes=changes)


def make_backlog_chart(
    backlog: Sequence[BacklogPoint],
    at: datetime,
    length: int,
    *,
    title: str = "",
    changes: Sequence[SettingsEvent] = (),
    known_from: datetime | None = None,
) -> TimeChart:
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
    return draw(axis, title, {"backlog": values}, {"backlog": now}, scale="most: {}", kind="steps",
                changes=changes)  # fmt: skip


def make_times_chart(
    minutes: Sequence[Minute],
    what: str,
    at: datetime,
    length: int,
    *,
    title: str = "",
    changes: Sequence[SettingsEvent] = (),
) -> TimeChart:
    """Mean and longest waits (`wait`) or run times (`run`); nothing where there was none."""
    axis = Axis.until(at, length)
    sums, numbers = [0.0] * axis.count, [0] * axis.count
    longest: list[float | None] = [None] * axis.count
    for minute in minutes:
        place = axis.place(minute.at)
        mean = minute.wait_mean_seconds if what == "wait" else minute.run_mean_seconds
        most = minute.wait_max_seconds if what == "wait" else minute.run_max_seconds
        if 0 <= place < axis.count and mean is not None and most is not None:
            number = minute.counts.get("claims" if what == "wait" else "runs", 0)
            sums[place] += 1000 * mean * number
            numbers[place] += number
            longest[place] = max(longest[place] or 0.0, 1000 * most)
    means = [total / number if number else None for total, number in zip(sums, numbers, strict=True)]
    totals = {
        "mean": sum(sums) / sum(numbers) if sum(numbers) else 0.0,
        "longest": max((one for one in longest if one is not None), default=0.0),
    }
    return draw(axis, title, {"mean": means, "longest": longest}, totals, scale="longest: {}", unit="duration",
                changes=changes)  # fmt: skip


def make_spread_chart(
    percentiles: Sequence[Percentiles],
    what: str,
    at: datetime,
    length: int,
    *,
    title: str = "",
    changes: Sequence[SettingsEvent] = (),
) -> TimeChart:
    """Percentiles of waits (`wait`) or run times (`run`), of the same spans as the other charts."""
    axis = Axis.until(at, length)
    values: dict[str, list[float | None]] = {name: [None] * axis.count for name in ("p50", "p95", "p99")}
    for one in percentiles:
        spread, place = one.wait if what == "wait" else one.run, axis.place(one.at)
        if spread is not None and 0 <= place < axis.count:
            for name, line in values.items():
                line[place] = 1000 * getattr(spread, f"{name}_seconds")
    largest_of = {name: max((one for one in line if one is not None), default=0.0) for name, line in values.items()}
    return draw(axis, title, dict(values), largest_of, scale="largest: {}", unit="duration", kind="band",
                changes=changes)  # fmt: skip


def timeline_spans(timeline: Timeline) -> list[Span]:
    """The spans of a message's timeline in one row, to scale but for very short ones, which stay visible."""
    total = sum(span.seconds for span in timeline.spans)
    widths = [max(SPAN_MIN, span.seconds / total) if total else 1 / len(timeline.spans) for span in timeline.spans]
    scale, found, start = 1 / sum(widths) if widths else 1.0, list[Span](), 0.0
    for span, width in zip(timeline.spans, widths, strict=True):
        end = start + width * scale
        found.append(Span(start, end, color_of(span.kind), span.text))
        start = end
    return found


def draw_timeline(found: Sequence[Span]) -> Markup:
    """Spans as a drawing."""
    return Markup(spans(found, ", ".join(one.text for one in found)))  # all of it is escaped


def draw_counts(counts: Sequence[int], text: str) -> Markup:
    """Dead letters over time as a small drawing."""
    return Markup(sparkline({color_of("dead"): counts}, text, width=320, height=28))  # all of it is escaped
