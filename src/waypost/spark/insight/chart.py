"""Charts of outcomes: bars with intervals as an SVG file, and bars of characters for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from waypost.charts import Range, draw_ranges
from waypost.spark.insight.whatif import format_ms

BLOCK = "█"
PARTS = " ▏▎▍▌▋▊▉"


class Bar(Struct, frozen=True):
    """One bar: a label, its value, between which values it is, and whether it is what was recorded."""

    label: str
    value: float
    low: float
    high: float
    is_present: bool = False


def draw_svg(title: str, note: str, bars: Sequence[Bar], limit_ms: float | None = None) -> str:
    """Return a chart of waits as an SVG document. A dashed line is the target, thin lines are intervals."""
    ranges = [Range(bar.label, bar.value, bar.low, bar.high, "c-other" if bar.is_present else "c-wait") for bar in bars]
    return draw_ranges(title, note, ranges, limit_ms)


def draw_text(bars: Sequence[Bar], width: int = 80) -> list[str]:
    """Return a chart of waits as lines of text."""
    if not bars:
        return []
    whole = max(*(bar.value for bar in bars), 1.0)
    values = [f"{format_ms(bar.value)} ({format_ms(bar.low)} to {format_ms(bar.high)})" for bar in bars]
    label = min(max(len(bar.label) for bar in bars), max(10, width // 2))
    room = max(8, width - label - max(map(len, values)) - 4)
    lines = []
    for bar, text in zip(bars, values, strict=True):
        eighths = round(8 * room * bar.value / whole)
        drawn = BLOCK * (eighths // 8) + (PARTS[eighths % 8] if eighths % 8 else "")
        name = bar.label if len(bar.label) <= label else bar.label[: label - 1] + "…"
        lines.append(f"{name:{label}}  {drawn or PARTS[1]:{room}}  {text}".rstrip())
    return lines
