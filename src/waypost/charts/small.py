"""Small drawings in a line of text or a row of a table: sparklines, and spans of time to scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

#: A span is at least so wide, of 1,000, so that it can be seen and pointed at.
SPAN_MIN = 4.0
WIDTH = 1000
#: The least height of a bar, so that one message can be seen.
BAR_MIN = 2.0


def sparkline(
    series: Mapping[str, Sequence[float]],
    text: str,
    *,
    line: Sequence[float] = (),
    line_color: str = "",
    width: int = 120,
    height: int = 22,
) -> str:
    """Return the SVG of series to one scale, by their colors, the first at the back; `line` is drawn above them.

    Empty if all is zero.
    """  # fmt: skip
    largest = max((value for values in (*series.values(), line) for value in values), default=0)
    count = max((len(values) for values in (*series.values(), line)), default=0)
    if largest <= 0:
        return ""
    paths = [
        f'<path class="fill {color}" d="{drawn}"/>'
        for color, values in series.items()
        if (drawn := _runs(values, width / count, height, largest))
    ]
    if line:
        ys = [round(height - 1 - (height - 2) * value / largest) for value in line]
        step = width / count
        parts, x = [f"M0 {ys[0]}"], 0
        for number, y in enumerate(ys):
            right = round((number + 1) * step)
            parts.append(f"{f'V{y}' if number and y != ys[number - 1] else ''}h{right - x}")
            x = right
        paths.append(f'<path class="line thin {line_color}" d="{"".join(parts)}"/>')
    return (
        f'<svg class="sparkline" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
        f"<title>{escape(text)}</title>{''.join(paths)}</svg>"
    )


def _runs(values: Sequence[float], step: float, height: int, largest: float) -> str:
    """Neighbouring bars as one outline; a point without any has none."""
    parts, run = list[str](), list[str]()
    x = 0
    for number, value in enumerate([*values, 0]):
        right = round((number + 1) * step)
        if value:
            y = round(height - max(BAR_MIN, value / largest * height))
            run += [f"M{x} {height}V{y}" if not run else f"V{y}", f"h{right - x}"]
        elif run:
            parts += [*run, f"V{height}z"]
            run = []
        x = right
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a timeline: from and to where, both from 0 to 1, its color as a class, and a text."""

    start: float
    end: float
    color: str
    text: str


def spans(found: Sequence[Span], text: str, *, height: int = 28) -> str:
    """Return the SVG of a row of spans, as wide as the page lets it be."""
    drawn = []
    for one in found:
        x = min(one.start * WIDTH, WIDTH - SPAN_MIN)
        width = max(SPAN_MIN, (one.end - one.start) * WIDTH)
        drawn.append(
            f'<rect class="fill {one.color}" x="{round(x, 1):g}" width="{round(width, 1):g}" height="{height}">'
            f"<title>{escape(one.text)}</title></rect>"
        )
    return (
        f'<svg class="spans-of" viewBox="0 0 {WIDTH} {height}" width="100%" height="{height}" '
        f'preserveAspectRatio="none" role="img"><title>{escape(text)}</title>{"".join(drawn)}</svg>'
    )
