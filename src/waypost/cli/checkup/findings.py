"""What a look at a store found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct

#: `ok`; `note`: worth to know, nothing has to be done; `wrong`: something has to be done.
Level = Literal["ok", "note", "wrong"]


class Finding(Struct, frozen=True):
    """One thing that was looked at: what was found, what to do if it is not well, and figures for scripts."""

    check: str
    level: Level
    found: str
    advice: str | None = None
    figures: dict[str, Any] = {}


Findings = Iterator[Finding]


def ok(check: str, found: str, **figures: Any) -> Finding:
    """All is well."""
    return Finding(check, "ok", found, None, figures)


def note(check: str, found: str, advice: str | None = None, **figures: Any) -> Finding:
    """Worth to know."""
    return Finding(check, "note", found, advice, figures)


def wrong(check: str, found: str, advice: str, **figures: Any) -> Finding:
    """Something has to be done."""
    return Finding(check, "wrong", found, advice, figures)


def shown_bytes(number: float) -> str:
    """A size in a few characters."""
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"
