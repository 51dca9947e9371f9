"""The templates of the pages, and how values are written in them. Everything is escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from waypost.formatting import error_line, format_age, format_bytes, printable
from waypost.release import VERSION
from waypost.schedule.zones import zone_of
from waypost.web.charts import draw_counts, draw_figure, draw_timeline

#: Longer ids and keys are cut in tables; the whole text is in the title.
SHORT_CHARACTERS = 28
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
#: Closer than this counts as now.
NOW_SECONDS = 3
#: The units of ages: seconds of each, and up to how many of it.
AGE_UNITS = ((1, 100, "s"), (60, 100, "min"), (3600, 48, "h"), (86_400, float("inf"), "d"))


def duration(seconds: float | None) -> str:
    """A duration in a few characters."""
    return "–" if seconds is None else format_age(timedelta(seconds=seconds))


def number(value: float) -> str:
    """A number with separators, and without needless digits."""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:,.1f}"


def cell(value: float) -> Markup:
    """A number of a table: a zero is less conspicuous than what is there."""
    return Markup("{}").format(number(value)) if value else Markup('<span class="zero">0</span>')


def whole_time(at: datetime, *, precise: bool = False) -> str:
    """A time with everything that belongs to it."""
    return at.isoformat(sep=" ", timespec="milliseconds" if precise else "seconds").replace("+00:00", " UTC")


def moment(at: datetime | None, *, precise: bool = False) -> Markup:
    """A time in UTC, which a script may show in local time; the year only if it is another one."""
    if at is None:
        return Markup("–")
    year = "" if at.year == datetime.now(UTC).year else f" {at.year}"
    clock = at.time().isoformat("milliseconds" if precise else "seconds")
    text = f"{at.day} {MONTHS[at.month - 1]}{year} {clock}"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(at.isoformat(), whole_time(at, precise=True), text)


def utc_input(at: datetime) -> str:
    """A time as a field of a form has it, in UTC."""
    return at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds")


def ago(at: datetime | None) -> Markup:
    """How long ago a time was, or when it comes; the time itself is in the title."""
    if at is None:
        return Markup("–")
    return Markup('<time datetime="{}" title="{}" data-relative>{}</time>').format(
        at.isoformat(), whole_time(at), relative((datetime.now(UTC) - at).total_seconds())
    )


def relative(seconds: float) -> str:
    """A time by its distance from now; what is past is positive. static/times.js has the same rule."""
    distance = abs(seconds)
    if distance < NOW_SECONDS:
        return "now"
    size, unit = next((size, unit) for size, most, unit in AGE_UNITS if distance / size < most)
    text = f"{distance / size:,.0f} {unit}"
    return f"{text} ago" if seconds > 0 else f"in {text}"


def in_zone(at: datetime, tz: str) -> str:
    """A time on the clocks of a zone."""
    return at.astimezone(zone_of(tz)).strftime("%H:%M %Z").strip()


def short(text: str | None, most: int = SHORT_CHARACTERS) -> Markup:
    """A text that may be long: its beginning, and all of it in the title."""
    if text is None:
        return Markup('<span class="none">–</span>')
    safe = printable(text)
    if len(safe) <= most:
        return escape(safe)
    return Markup('<span title="{}">{}…</span>').format(safe, safe[: most - 1])


def filled(rows: Iterable[Any]) -> set[str]:
    """The fields that any of these rows has a value for: a column without one is left out."""
    return {name for row in rows for name in row.__struct_fields__ if getattr(row, name) is not None}


def setting(value: Any, name: str) -> str:
    """The value of a setting."""
    if value is None:
        return {"lease": "none: done when claimed", "dead_keep": "until purged"}.get(name, "no limit")
    if name in ("lease", "dead_keep"):
        return duration(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) else str(value)


def first_upper(text: str) -> str:
    """A text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def step_urls(url: Callable[..., str], queue: str) -> dict[str, str]:
    """The page on which the next step of each kind of alert of a queue is taken."""
    here = (".", "queues", queue)
    return {
        "dead": url(*here, "dead"), "unserved": url(".", "workers"), "expired": url(".", "workers"),
        "worker": url(".", "workers"), "old": url(*here), "paused": url(*here),
    }  # fmt: skip


def error_name(error_type: str | None) -> str:
    """The name of an error; none for what a handler decided without one."""
    return "" if error_type is None or error_type.startswith("waypost.message.") else error_type


def pretty(text: str | None) -> str:
    """A JSON text with indents if it is one, and as it is otherwise."""
    try:
        return json.dumps(json.loads(text or ""), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text or ""


environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
environment.filters |= {
    "ago": ago, "bytes": format_bytes, "cell": cell, "counts": draw_counts, "duration": duration,
    "error_line": error_line, "error_name": error_name, "figure": draw_figure, "filled": filled,
    "first_upper": first_upper, "in_zone": in_zone, "moment": moment, "number": number, "pretty": pretty,
    "printable": printable, "setting": setting, "short": short, "timeline": draw_timeline, "utc_input": utc_input,
}  # fmt: skip
environment.globals |= {"version": VERSION, "step_urls": step_urls}


def render(template: str, **context: Any) -> str:
    """The HTML of a page."""
    return environment.get_template(template).render(**context)
