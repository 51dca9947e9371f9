"""Charts as SVG, drawn by the server: for the web page, the report of a lake and the answers of simulations.

No dependency and no script. Drawings fill the width that they are given; their texts keep their size. Colors are CSS
variables of `static/charts.css` and `static/charts-dark.css`, one for each cause, the same on every page.
"""

from waypost.charts.axes import (
    Axis,
    count_axis,
    duration_axis,
    format_duration,
    format_moment,
    format_short,
    time_ticks,
)
from waypost.charts.bars import Range, draw_ranges, histogram
from waypost.charts.colors import ColorNames, color_of, styles
from waypost.charts.small import Span, spans, sparkline
from waypost.charts.time_chart import Mark, Series, TimeChart, TimeRange, draw, figure, with_one_scale

__all__ = [
    "Axis", "ColorNames", "Mark", "Range", "Series", "Span", "TimeChart", "TimeRange", "color_of", "count_axis", "draw",
    "draw_ranges", "duration_axis", "figure", "format_duration", "format_moment", "format_short", "histogram", "spans",
    "sparkline", "styles", "time_ticks", "with_one_scale",
]  # fmt: skip
