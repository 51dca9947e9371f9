"""Text for output: numbers, sizes and durations, and untrusted text made safe for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta


def format_age(age: timedelta | None) -> str:
    """Return a duration in a few characters."""
    if age is None:
        return "–"
    seconds = age.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    for size, unit in ((60, "min"), (3600, "h"), (86_400, "d")):
        if seconds / size < 100:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def format_bytes(number: float) -> str:
    """Return a size in a few characters."""
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"


def format_count(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: `1 message`, `3 messages`; give `many` where an s does not make the plural."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def format_call(method: str, *given: object, **options: object) -> str:
    """Return a call of a client's method as Python text."""
    arguments = [repr(one) for one in given] + [f"{name}={value!r}" for name, value in options.items()]
    return f"post.{method}({', '.join(arguments)})"


class Placeholder:
    """A variable in a call that stands for a value which must not be written out."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def hide_header(filters: Mapping[str, object]) -> dict[str, object]:
    """Return filters of messages as a log may have them: not all who read it may see headers."""
    return {name: Placeholder(name) if name == "header" else value for name, value in filters.items()}


def printable(text: str) -> str:
    """Return a text in which characters that control a terminal, or the direction of text, are escaped."""
    if text.isprintable():
        return text
    from unicodedata import category  # a large table

    return "".join(one if one.isprintable() or category(one) == "Zs" else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    short = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}.get(character)
    code = ord(character)
    if short is not None:
        return short
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def error_line(error: str | None) -> str | None:
    """The line of an error that says most: the last one of a traceback, otherwise the first."""
    lines = [line for line in (error or "").splitlines() if line.strip()]
    if not lines:
        return None
    return (lines[-1] if lines[0].startswith("Traceback") else lines[0]).strip()[:300]
