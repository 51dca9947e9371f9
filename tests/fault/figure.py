"""One figure of the report that `make faults` prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A name, what was measured, the limit, and whether the figure keeps it. Its text is one line of the report."""

    name: str
    figure: str
    limit: str
    ok: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.figure} ({self.limit}) {'ok' if self.ok else 'SHORT'}"

    def on(self, store: str) -> Figure:
        """Return the same figure with the name of its store."""
        return Figure(f"{store} {self.name}", self.figure, self.limit, self.ok)
