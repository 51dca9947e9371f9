"""Bars that are not over time: distributions on a logarithmic axis, and values with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from waypost.charts.axes import LOG_DURATIONS, duration_axis, format_duration
from waypost.charts.colors import styles

WIDTH, HEIGHT, FOOT = 1000, 120, 20
TICKS_MAX = 6


def histogram(edges: Sequence[float], shares: Sequence[float], color: str, title: str) -> str:
    """Return the SVG of a distribution of durations: where each bar begins (0 for the first), and its share."""
    known = [number for number, share in enumerate(shares) if share]
    if not known:
        return ""
    low, high = known[0], known[-1] + 1
    step, height, largest = WIDTH / (high - low), HEIGHT - FOOT, max(shares)
    ends = [*edges[1:], edges[-1] * (edges[-1] / edges[-2] if len(edges) > 2 and edges[-2] else 10)]
    bars, texts = [], []
    for number in range(low, high):
        if shares[number]:
            tall = max(1.5, shares[number] / largest * height)
            x = (number - low) * step
            text = f"{format_duration(edges[number])} to {format_duration(ends[number])}: {shares[number]:.1%}"
            bars.append(
                f'<rect class="fill {color}" x="{round(x + step * 0.06, 1):g}" y="{round(height - tall, 1):g}" '
                f'width="{round(step * 0.88, 1):g}" height="{round(tall, 1):g}"><title>{escape(text)}</title></rect>'
            )
    ticks = [tick for tick in LOG_DURATIONS if edges[low] <= tick <= ends[high - 1]]
    while len(ticks) > TICKS_MAX:
        ticks = ticks[::2]
    for tick in ticks:
        place = next((number for number in range(low, high) if edges[number] >= tick * 0.999), high)
        part = (place - low) / (high - low)
        anchor = "start" if part < 0.05 else "end" if part > 0.92 else "middle"
        texts.append(
            f'<text class="time" x="{round(100 * part, 1):g}%" y="{HEIGHT - 4}" text-anchor="{anchor}">'
            f"{format_duration(tick)}</text>"
        )
    return (
        f'<svg class="plot" width="100%" height="{HEIGHT}" role="img"><title>{escape(title)}</title>'
        f'<svg width="100%" height="{height}" viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none">'
        f'{"".join(bars)}</svg><line class="axis" x2="100%" y1="{height}" y2="{height}"/>{"".join(texts)}</svg>'
    )


@dataclass(frozen=True, slots=True)
class Range:
    """One bar: a label, its value in milliseconds, between which values it is, and its color as a class."""

    label: str
    value: float
    low: float
    high: float
    color: str


#: Sizes of a drawing of ranges, which is a file of its own: labels on the left, values on the right.
FILE_WIDTH, ROW, LEFT, RIGHT, LINE, BAR = 880, 42, 290, 190, 18, 16
LABEL_LINES, LABEL_LINE = 3, 14
LABEL_MAX = 40
NOTE_MAX = 130
FILE_COLORS = "svg{background:var(--panel);--panel:#ffffff;--text:#1b2026;--muted:#56606b;--line:#d9dee4}"
FILE_DARK = "svg{--panel:#171d24;--text:#e5eaf0;--muted:#9ca8b5;--line:#2c3540}"
#: An interval is drawn twice, so that it is seen on its bar too.
FILE_LINES = (
    "svg{width:100%;height:auto}text{font:13px system-ui,sans-serif}.head{font-size:16px;font-weight:600}"
    ".under{stroke:var(--panel);stroke-width:5}"
)


def draw_ranges(title: str, note: str, ranges: Sequence[Range], limit: float | None = None) -> str:
    """Return an SVG document of durations as bars. A dashed line is the limit, thin lines are intervals."""
    whole = max([one.high for one in ranges] + [one.value for one in ranges] + [limit or 0.0, 1.0])
    axis = duration_axis(whole, whole)
    notes = _wrap(note, NOTE_MAX, " · ")
    head = 40 + LINE * len(notes)
    room, bottom = FILE_WIDTH - LEFT - RIGHT, head + ROW * len(ranges)
    height = bottom + 30 + 2 * LINE

    def x(value: float) -> str:
        return f"{LEFT + room * axis.place(value):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {FILE_WIDTH} {height}" style="max-width:{FILE_WIDTH}px" '
        f'role="img"><title>{escape(title)}</title><style>{FILE_COLORS}{FILE_LINES}'
        f"{styles().replace(':root', 'svg')}"
        f"@media(prefers-color-scheme:dark){{{FILE_DARK}{styles(dark=True).replace(':root', 'svg')}}}</style>",
        f'<text class="value head" x="12" y="26">{escape(title)}</text>',
    ]
    parts += [
        f'<text class="note" x="12" y="{46 + LINE * number}">{escape(line)}</text>' for number, line in enumerate(notes)
    ]
    for value, text in ((0.0, "0"), *axis.ticks):
        parts.append(f'<line class="grid" x1="{x(value)}" x2="{x(value)}" y1="{head}" y2="{bottom}"/>')
        parts.append(f'<text class="note" x="{x(value)}" y="{bottom + 18}" text-anchor="middle">{text}</text>')
    for number, one in enumerate(ranges):
        parts += _draw_range(one, head + ROW * number, room * axis.place(one.value), x(one.low), x(one.high))
    legend = "thin lines: p95 in nine of ten histories of such days"
    if limit is not None and math.isfinite(limit):
        parts.append(f'<line class="limit" x1="{x(limit)}" x2="{x(limit)}" y1="{head}" y2="{bottom}"/>')
        legend += f" · dashed: the target, {format_duration(limit)}"
    parts.append(f'<text class="note" x="12" y="{height - 12}">{escape(legend)}</text>')
    return "".join([*parts, "</svg>\n"])


def _draw_range(one: Range, top: float, width: float, low: str, high: str) -> list[str]:
    """Return a row: the label in a few lines, the bar with its interval, and the figures."""
    middle, lines = top + ROW / 2, _wrap(one.label, LABEL_MAX, ", ")[:LABEL_LINES]
    first = middle + 4 - LABEL_LINE / 2 * (len(lines) - 1)
    values = f"{format_duration(one.value)}, {format_duration(one.low)} to {format_duration(one.high)}"
    is_interval = one.low < one.high
    found = [
        f'<text class="value" x="{LEFT - 10}" y="{first + LABEL_LINE * number:g}" text-anchor="end">'
        f"{escape(line)}</text>"
        for number, line in enumerate(lines)
    ]
    found.append(
        f'<rect class="fill {one.color}" x="{LEFT}" y="{middle - BAR / 2:g}" width="{max(1.0, width):.1f}" '
        f'height="{BAR}" rx="2"><title>{escape(one.label)}: {values}</title></rect>'
    )
    if is_interval:
        found += [
            f'<line class="{kind}" x1="{low}" x2="{high}" y1="{middle:g}" y2="{middle:g}"/>'
            for kind in ("under", "interval")
        ]
    interval = f'<tspan class="note" dx="8">{format_duration(one.low)} to {format_duration(one.high)}</tspan>'
    found.append(
        f'<text class="value" x="{FILE_WIDTH - RIGHT + 12}" y="{middle + 4:g}">{format_duration(one.value)}'
        f"{interval if is_interval else ''}</text>"
    )
    return found


def _wrap(text: str, most: int, between: str) -> list[str]:
    """Return a text as lines, broken where `between` is; a longer part is cut."""
    lines = [""]
    for part in text.split(between):
        joined = between.join(filter(None, (lines[-1], part)))
        if len(joined) <= most or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(part)
    return [line if len(line) <= most else line[: most - 1] + "…" for line in lines]
