"""The last minutes of a queue as a small drawing. Pure."""

from __future__ import annotations

from datetime import timedelta

from markupsafe import Markup

from waypost.charts import color_of, sparkline
from waypost.web.figures import RECENT_MINUTES, Figures

STEP = 6


def draw_sparkline(figures: Figures) -> Markup | None:
    """What was done and died as bars, what was published as a line, newest on the right; None if nothing happened."""
    this_minute = figures.at.replace(second=0, microsecond=0)
    counts = dict(figures.minutes)
    minutes = [counts.get(this_minute - timedelta(minutes=ago), {}) for ago in reversed(range(RECENT_MINUTES))]
    published, done, dead = ([minute.get(name, 0) for minute in minutes] for name in ("published", "done", "dead"))
    text = f"the last {RECENT_MINUTES} minutes: {sum(published):,} published, {sum(done):,} done, {sum(dead):,} died"
    bars = {color_of("done"): done, color_of("dead"): dead}
    drawn = sparkline(bars, text, line=published, line_color=color_of("published"), width=RECENT_MINUTES * STEP)
    return Markup(drawn) if drawn else None  # all of it is escaped
