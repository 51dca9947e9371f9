"""Pick the sleepers to wake for what a step made claimable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from waypost.policy import POLL_SOON_MESSAGES_MAX, POLL_SOON_MS_MAX, SLEEPER_TTL_MS
from waypost.store.sqlite.queue_records import QueueRecords

T = TypeVar("T")

#: Prefix of a worker that polls again soon: while such a row lives, no sleeper is woken for a few messages.
POLLS_SOON = "~"

_SLEEPERS_CLEAR = "DELETE FROM {sleeper} WHERE queue = ?"
_SLEEPERS_FIRST = """
    SELECT queue, name FROM {sleeper} INDEXED BY {sleeper:until}
    WHERE queue = ? AND until_ms > ? AND name NOT GLOB '~*' ORDER BY until_ms DESC, name DESC LIMIT ?"""
_POLLING_SOON = """
    SELECT 1 FROM {sleeper} INDEXED BY {sleeper:until}
    WHERE queue = ? AND until_ms > ? AND until_ms <= ? AND name GLOB '~*' LIMIT 1"""
_SLEEPER_OUT = "DELETE FROM {sleeper} WHERE queue = ? AND name = ?"


def waking(records: QueueRecords, work: Callable[[], T], *, also: Callable[[], int] = lambda: 0) -> tuple[T, list[str]]:
    """Do the work of a step, and pick the sleepers that what it made claimable is worth."""
    earliest = records.next_due()
    records.freshly_ready = 0
    result = work()
    soonest = records.next_due()
    earlier = soonest is not None and (earliest is None or soonest < earliest)
    return result, _wake(records, records.freshly_ready + earlier + also())


def _wake(records: QueueRecords, count: int) -> list[str]:
    """Take up to `count` sleepers out of the memory, the last to fall asleep first; `*` if the memory is gone."""
    if count == 0 or records.paused:
        return []
    if count <= POLL_SOON_MESSAGES_MAX:
        found = records.step.execute(_POLLING_SOON, (records.number, records.now, records.now + POLL_SOON_MS_MAX))
        if found.fetchone() is not None:
            return []
    if records.numbers["sleepers_known_until"] <= records.now:
        records.step.execute(_SLEEPERS_CLEAR, (records.number,))
        records.numbers["sleepers_known_until"] = records.now + SLEEPER_TTL_MS
        return ["*"]
    sleepers = records.step.execute(_SLEEPERS_FIRST, (records.number, records.now, count)).fetchall()
    records.step.execute_many(_SLEEPER_OUT, sleepers)
    return [name for _, name in sleepers]
