"""What `waypost doctor` finds in a store: findings, and the contract of what each store adds to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import Struct

from waypost.values import Stats

#: `ok`; `note`: worth to know, nothing has to be done; `wrong`: something has to be done.
Level = Literal["ok", "note", "wrong"]


class Finding(Struct, frozen=True):
    """One check: what was found, what to do if it is not well, and figures for scripts."""

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


class Checkup:
    """The checks of one store alone, beside the records, clocks, workers and readers that all stores have."""

    def check_list(self, listed: Sequence[str], *, mend: bool) -> tuple[list[str], list[Finding]]:
        """The queues that there are. Differs from those `listed` where the list is kept apart and can be damaged."""
        return list(listed), []

    def check_server(self, found: Sequence[Stats]) -> Findings:
        """The server or file: durability, permissions, room, bytes in use. `found` are the queues."""
        raise NotImplementedError
