"""`waypost doctor`."""

from typing import Any


def add(commands: Any) -> None:
    """Later."""
