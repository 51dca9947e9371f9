"""What an error of Spark's is about, in a sentence."""

from __future__ import annotations

from waypost.errors import StoreError, WaypostError


def told(error: Exception) -> WaypostError:
    """The error of ours that lies at the bottom of it, or its first line: without the pages of Java around them."""
    if isinstance(error, WaypostError):
        return error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        name, _, rest = line.partition(": ")
        if name.rpartition(" ")[2].startswith("waypost.errors.") and rest:
            return StoreError(rest)
    first = lines[0] if lines else type(error).__name__
    return StoreError(f"Spark could not go on: {first}")
