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
FILE_WIDTH, ROW, LEFT, RIGHT, HEAD, BAR = 760, 34, 260, 150, 56, 16
LABEL_MAX = 36
FILE_COLORS = "svg{background:var(--panel);--panel:#ffffff;--text:#1b2026;--muted:#56606b;--line:#d9dee4}"
FILE_DARK = "svg{--panel:#171d24;--text:#e5eaf0;--muted:#9ca8b5;--line:#2c3540}"


def draw_ranges(title: str, note: str, ranges: Sequence[Range], limit: float | None = None) -> str:
    """Return an SVG document of durations as bars. A dashed line is the limit, thin lines are intervals."""
    whole = max([one.high for one in ranges] + [one.value for one in ranges] + [limit or 0.0, 1.0])
    axis = duration_axis(whole, whole)
    room, bottom = FILE_WIDTH - LEFT - RIGHT, HEAD + ROW * len(ranges)

    def x(value: float) -> str:
        return f"{LEFT + room * axis.place(value):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {FILE_WIDTH} {bottom + 30}" width="{FILE_WIDTH}" '
        f'height="{bottom + 30}" role="img"><title>{escape(title)}</title><style>{FILE_COLORS}'
        f"text{{font:13px system-ui,sans-serif}}{styles().replace(':root', 'svg')}"
        f"@media(prefers-color-scheme:dark){{{FILE_DARK}{styles(dark=True).replace(':root', 'svg')}}}</style>",
        f'<text class="value" x="12" y="22" font-weight="600">{escape(title)}</text>'
        f'<text class="note" x="12" y="42">{escape(note)}</text>',
    ]
    for value, text in ((0.0, "0"), *axis.ticks):
        parts.append(f'<line class="grid" x1="{x(value)}" x2="{x(value)}" y1="{HEAD}" y2="{bottom}"/>')
        parts.append(f'<text class="note" x="{x(value)}" y="{bottom + 18}" text-anchor="middle">{text}</text>')
    for number, one in enumerate(ranges):
        y = HEAD + ROW * number + (ROW - BAR) / 2
        middle, label = y + BAR / 2, escape(_cut(one.label))
        values = f"{format_duration(one.value)}, {format_duration(one.low)} to {format_duration(one.high)}"
        parts += [
            f'<text class="value" x="{LEFT - 10}" y="{middle + 4}" text-anchor="end">{label}</text>',
            f'<rect class="fill {one.color}" x="{LEFT}" y="{y}" width="{max(1.0, room * axis.place(one.value)):.1f}" '
            f'height="{BAR}" rx="2"><title>{escape(one.label)}: {values}</title></rect>',
            f'<line class="interval" x1="{x(one.low)}" x2="{x(one.high)}" y1="{middle}" y2="{middle}"/>',
            f'<text class="value" x="{FILE_WIDTH - RIGHT + 12}" y="{middle + 4}">{format_duration(one.value)}</text>',
        ]
    if limit is not None and math.isfinite(limit):
        parts.append(f'<line class="limit" x1="{x(limit)}" x2="{x(limit)}" y1="{HEAD}" y2="{bottom}"/>')
    return "".join([*parts, "</svg>\n"])


def _cut(label: str) -> str:
    return label if len(label) <= LABEL_MAX else label[: LABEL_MAX - 1] + "…"
