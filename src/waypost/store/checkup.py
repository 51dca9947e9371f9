"""Findings of `waypost doctor`, and the contract of the checks that each store adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import Struct

from waypost.views import Stats

#: `ok`; `note`: for information; `wrong`: an action is required.
Level = Literal["ok", "note", "wrong"]


class Finding(Struct, frozen=True):
    """The result of one check: a description, what to do if something is wrong, and figures for scripts."""

    check: str
    level: Level
    found: str
    advice: str | None = None
    figures: dict[str, Any] = {}


Findings = Iterator[Finding]


def ok(check: str, found: str, **figures: Any) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, "ok", found, None, figures)


def note(check: str, found: str, advice: str | None = None, **figures: Any) -> Finding:
    """Return a finding for information."""
    return Finding(check, "note", found, advice, figures)


def wrong(check: str, found: str, advice: str, **figures: Any) -> Finding:
    """Return a finding that requires an action."""
    return Finding(check, "wrong", found, advice, figures)


class Checkup:
    """The checks that only one store has, besides records, clocks, workers and readers, which all stores have."""

    def check_list(self, listed: Sequence[str], *, mend: bool) -> tuple[list[str], list[Finding]]:
        """Return the existing queues. Differs from `listed` if the list is kept separately and can be damaged."""
        return list(listed), []

    def check_server(self, found: Sequence[Stats]) -> Findings:
        """Check the server or file: durability, permissions, free space, bytes in use. `found` are the queues."""
        raise NotImplementedError
