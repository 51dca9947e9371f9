"""The last minutes of a queue as a small drawing: bars as SVG paths. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from msgspec import Struct

from waypost.web.figures import RECENT_MINUTES, Figures

STEP, BAR, HEIGHT = 6, 5, 22
WIDTH = RECENT_MINUTES * STEP
#: The least height of a bar, so that one message can be seen.
BAR_MIN = 2.0


class Sparkline(Struct, frozen=True):
    """Bars of the last minutes, the newest on the right: what was published, done and died, to one scale."""

    published: str
    done: str
    dead: str
    #: The same in words.
    text: str
    width: int = WIDTH
    height: int = HEIGHT


def make_sparkline(figures: Figures) -> Sparkline | None:
    """The drawing of a queue; None if nothing happened in these minutes."""
    this_minute = figures.at.replace(second=0, microsecond=0)
    counts = dict(figures.minutes)
    minutes = [counts.get(this_minute - timedelta(minutes=ago), {}) for ago in reversed(range(RECENT_MINUTES))]
    published, done, dead = ([minute.get(name, 0) for minute in minutes] for name in ("published", "done", "dead"))
    largest = max(*published, *done, *dead)
    if largest == 0:
        return None
    text = f"the last {RECENT_MINUTES} minutes: {sum(published):,} published, {sum(done):,} done, {sum(dead):,} died"
    return Sparkline(bars(published, largest), bars(done, largest), bars(dead, largest), text)


def bars(values: Sequence[int], largest: int) -> str:
    """One path for all bars; a minute without any has none."""
    parts = []
    for place, value in enumerate(values):
        if value:
            height = max(BAR_MIN, value / largest * HEIGHT)
            parts.append(f"M{place * STEP} {HEIGHT}v-{height:.1f}h{BAR}v{height:.1f}z")
    return "".join(parts)
