"""Numbers, sizes and durations as people read them."""

from __future__ import annotations


def format_age(milliseconds: float | None) -> str:
    """A duration in a few characters."""
    if milliseconds is None:
        return "–"
    seconds = milliseconds / 1000
    if seconds < 1:
        return f"{milliseconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    for size, unit in ((60, "min"), (3600, "h"), (86_400, "d")):
        if seconds / size < 100:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def format_bytes(number: float) -> str:
    """A size in a few characters."""
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"


def format_count(number: int, one: str, many: str | None = None) -> str:
    """`1 message`, `3 messages`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
