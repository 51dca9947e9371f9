"""Charts of outcomes: bars with intervals as an SVG file, and bars of characters for a terminal."""

from __future__ import annotations

import html
from collections.abc import Sequence

from msgspec import Struct

from waypost.spark.insight.whatif import format_ms

WIDTH, ROW, LEFT, RIGHT, TOP = 760, 34, 260, 150, 56
BAR, BLOCK = 16, "█"
PARTS = " ▏▎▍▌▋▊▉"
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2328}.q{fill:#59636e}.b{fill:#3b6fb6}.p{fill:#9aa7b5}"
    ".i{stroke:#1f2328;stroke-width:1.5}.g{stroke:#d1d9e0}.t{stroke:#b3261e;stroke-dasharray:4 3}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.q{fill:#9da7b3}.b{fill:#6ea0e8}.p{fill:#5b6875}"
    ".i{stroke:#e6edf3}.g{stroke:#3d444d}.t{stroke:#ff8f85}}"
)


class Bar(Struct, frozen=True):
    """One bar: a label, its value, between which values it is, and whether it is what was recorded."""

    label: str
    value: float
    low: float
    high: float
    is_present: bool = False


def draw_svg(title: str, note: str, bars: Sequence[Bar], limit_ms: float | None = None) -> str:
    """Return a chart of waits as an SVG document. A dashed line is the target, thin lines are intervals."""
    whole = max([bar.high for bar in bars] + [bar.value for bar in bars] + [limit_ms or 0.0, 1.0])
    room, height = WIDTH - LEFT - RIGHT, TOP + ROW * len(bars) + 30

    def x(value: float) -> str:
        return f"{LEFT + room * value / whole:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{html.escape(title, quote=True)}"><style>{STYLE}</style>',
        f'<text x="12" y="22" font-weight="600">{html.escape(title)}</text>',
        f'<text x="12" y="42" class="q">{html.escape(note)}</text>',
    ]
    bottom = TOP + ROW * len(bars)
    for part in range(5):
        at = whole * part / 4
        parts.append(f'<line class="g" x1="{x(at)}" x2="{x(at)}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="q" x="{x(at)}" y="{bottom + 18}" text-anchor="middle">{format_ms(at)}</text>')
    for number, bar in enumerate(bars):
        y = TOP + ROW * number + (ROW - BAR) / 2
        middle, label = y + BAR / 2, html.escape(bar.label)
        length = f"{max(1.0, room * bar.value / whole):.1f}"
        kind = "p" if bar.is_present else "b"
        parts += [
            f'<text x="{LEFT - 10}" y="{middle + 4}" text-anchor="end">{label}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length}" height="{BAR}" rx="2">'
            f"<title>{label}: {format_ms(bar.value)}, {format_ms(bar.low)} to {format_ms(bar.high)}</title></rect>",
            f'<line class="i" x1="{x(bar.low)}" x2="{x(bar.high)}" y1="{middle}" y2="{middle}"/>',
            f'<text x="{WIDTH - RIGHT + 12}" y="{middle + 4}">{format_ms(bar.value)}</text>',
        ]
    if limit_ms is not None:
        parts.append(f'<line class="t" x1="{x(limit_ms)}" x2="{x(limit_ms)}" y1="{TOP}" y2="{bottom}"/>')
    return "".join([*parts, "</svg>\n"])


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
