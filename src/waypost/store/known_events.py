"""Events of the journal that this release knows: with another one a reader stops, since a guess could be wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from waypost.errors import SchemaTooNew
from waypost.values import EventName

KNOWN: frozenset[str] = frozenset(get_args(EventName))


def check_events(queue: str, last: int, events: Iterable[str]) -> None:
    """Raise `SchemaTooNew` if an entry, whose last event has number `last`, has an event that is not known here."""
    if not KNOWN.issuperset(events):
        raise unknown_event(queue, last)


def unknown_event(queue: str, last: int) -> SchemaTooNew:
    """Return the error of a journal entry with an event that this release does not know: none of it is read."""
    return SchemaTooNew(
        f"the journal of queue {queue} has an event that this release does not know, up to number {last}: a newer "
        "release wrote it; update waypost here, readers then go on from where they are"
    )
