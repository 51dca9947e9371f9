"""The templates of the pages, and how values are written in them. Everything is escaped."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from waypost.formatting import format_age, format_bytes, printable
from waypost.release import VERSION

#: Longer ids and keys are cut in tables; the whole text is in the title.
SHORT_CHARACTERS = 28


def duration(seconds: float | None) -> str:
    """A duration in a few characters."""
    return "–" if seconds is None else format_age(timedelta(seconds=seconds))


def number(value: float) -> str:
    """A number with separators, and without needless digits."""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:,.1f}"


def moment(at: datetime | None, *, precise: bool = False) -> Markup:
    """A time, which a script may show in local time."""
    if at is None:
        return Markup("–")
    text = at.isoformat(sep=" ", timespec="milliseconds" if precise else "seconds").replace("+00:00", " UTC")
    return Markup('<time datetime="{}">{}</time>').format(at.isoformat(), text)


def short(text: str | None) -> Markup:
    """A text that may be long: its beginning, and all of it in the title."""
    if text is None:
        return Markup('<span class="none">–</span>')
    safe = printable(text)
    if len(safe) <= SHORT_CHARACTERS:
        return escape(safe)
    return Markup('<span title="{}">{}…</span>').format(safe, safe[: SHORT_CHARACTERS - 1])


def setting(value: Any, name: str) -> str:
    """The value of a setting."""
    if value is None:
        return "–"
    if name in ("lease", "dead_keep"):
        return duration(value)
    return number(value) if isinstance(value, int | float) else str(value)


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
    "bytes": format_bytes, "duration": duration, "error_name": error_name, "moment": moment, "number": number,
    "pretty": pretty, "printable": printable, "setting": setting, "short": short,
}  # fmt: skip
environment.globals["version"] = VERSION


def render(template: str, **context: Any) -> str:
    """The HTML of a page."""
    return environment.get_template(template).render(**context)
