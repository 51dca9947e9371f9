"""Pick the sleepers to wake for the messages that a step made claimable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from waypost.policy import POLL_SOON_MESSAGES_MAX, POLL_SOON_MS_MAX, SLEEPER_TTL_MS
from waypost.store.sqlite.queue_records import QueueRecords

T = TypeVar("T")

#: Prefix of a worker that polls again soon: while such a row has not expired, few messages wake no sleeper.
POLLS_SOON = "~"

_SLEEPERS_CLEAR = "DELETE FROM {sleeper} WHERE queue = ?"
_SLEEPERS_FIRST = """
    SELECT queue, name FROM {sleeper} INDEXED BY {sleeper:until}
    WHERE queue = ? AND until_ms > ? AND name NOT GLOB '~*' ORDER BY until_ms DESC, name DESC LIMIT ?"""
_POLLING_SOON = """
    SELECT 1 FROM {sleeper} INDEXED BY {sleeper:until}
    WHERE queue = ? AND until_ms > ? AND until_ms <= ? AND name GLOB '~*' LIMIT 1"""
_SLEEPER_OUT = "DELETE FROM {sleeper} WHERE queue = ? AND name = ?"


def waking(
    records: QueueRecords, work: Callable[[], T], *, also: Callable[[], int] = lambda: 0, next_claim: int = 0
) -> tuple[T, list[str]]:
    """Run a step, and pick sleepers for the messages that it made claimable, less the caller's own claim."""
    earliest = records.next_due()
    records.freshly_ready = 0
    _begin(records)
    result = work()
    soonest = records.next_due()
    earlier = soonest is not None and (earliest is None or soonest < earliest)
    claimable = records.freshly_ready + _worth_of_groups(records) + also()
    return result, pick_sleepers(records, max(0, claimable - next_claim) + earlier)


def waking_groups(records: QueueRecords, work: Callable[[], T]) -> tuple[T, list[str]]:
    """Run a step that makes no message claimable, but can end a hold of a group; pick the sleepers to wake."""
    _begin(records)
    result = work()
    return result, pick_sleepers(records, _worth_of_groups(records))


def _begin(records: QueueRecords) -> None:
    if records.groups is not None:
        records.groups.fresh.clear()
        records.groups.freed.clear()


def _worth_of_groups(records: QueueRecords) -> int:
    """Return how many sleepers to wake for groups that can continue, if there may be a sleeper at all."""
    groups = records.groups
    if groups is None or not groups.freed:
        return 0
    is_known = records.numbers["sleepers_known_until"] > records.now
    if is_known and not records.may_have_sleepers:
        return 0
    if is_known and records.step.execute(_SLEEPERS_FIRST, (records.number, records.now, 1)).fetchone() is None:
        return 0
    return groups.worth_waking()


def pick_sleepers(records: QueueRecords, count: int) -> list[str]:
    """Remove up to `count` sleepers from the list, the last to fall asleep first; `*` if the list is lost."""
    if count == 0 or records.paused:
        return []
    is_known = records.numbers["sleepers_known_until"] > records.now
    if is_known and not records.may_have_sleepers:
        return []
    if count <= POLL_SOON_MESSAGES_MAX:
        found = records.step.execute(_POLLING_SOON, (records.number, records.now, records.now + POLL_SOON_MS_MAX))
        if found.fetchone() is not None:
            return []
    if not is_known:
        records.step.execute(_SLEEPERS_CLEAR, (records.number,))
        records.numbers["sleepers_known_until"] = records.now + SLEEPER_TTL_MS
        return ["*"]
    sleepers = records.step.execute(_SLEEPERS_FIRST, (records.number, records.now, count)).fetchall()
    if sleepers:
        records.step.execute_many(_SLEEPER_OUT, sleepers)
    return [name for _, name in sleepers]
