"""Missed fires: which of the due instants to fire, and how many to count as missed.

An instant is missed if it is more than the grace late, or if a newer one is due already. `skip` fires the newest if it
is within the grace; `once` fires the newest however late; `all` fires the newest `max_catchup`. The fires and the next
instant are one step of the store, which refuses a decision after its `valid_until_ms`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from waypost.checks import DUE_MS_MAX
from waypost.policy import CHUNK_MESSAGES_MAX
from waypost.schedule.rule import WALK_MAX, Fire, Spec, Timeline

#: A decision is valid for at least this long, so that intervals of a few milliseconds can be fired at all.
DECISION_MS = 250


class Decision(NamedTuple):
    """One step: fires to publish in order, how many instants were missed, and the next fire."""

    fires: tuple[Fire, ...]
    missed: int
    #: The due time of the newest instant in this step: it must have passed by the store's clock.
    last_due_ms: int
    valid_until_ms: int
    following: Fire | None

    def first(self, count: int) -> Decision:
        """The step of its oldest `count` fires alone: the others stay due."""
        if len(self.fires) <= count:
            return self
        last = self.fires[count - 1]
        return self._replace(fires=self.fires[:count], last_due_ms=last.due_ms, following=self.fires[count])


def decide(spec: Spec, key: str, expected: Fire, fired: int, now_ms: int) -> Decision | None:
    """Return the step for a schedule whose next fire is `expected` at store time `now_ms`; None if it is not due."""
    if expected.due_ms > now_ms:
        return None
    timeline = Timeline(key, spec)
    passed, expected = _pass_over(spec, timeline, expected, now_ms)
    due: deque[Fire] = deque(maxlen=CHUNK_MESSAGES_MAX)
    count, following = 0, None
    for fire in timeline.walk(expected.instant_ms - 1):
        if fire.due_ms > now_ms or count == WALK_MAX:
            following = fire
            break
        due.append(fire)
        count += 1
    if not due:
        # The rule does not have this instant any more: the rules of its zone have changed since it was computed, or a
        # machine with other rules computed it. (If the same instant follows, only its jitter has changed.)
        is_gone = following is None or following.instant_ms != expected.instant_ms
        return Decision((), int(is_gone), expected.due_ms, DUE_MS_MAX, following)
    if following is not None and following.due_ms <= now_ms:
        # More is due than one step walks through: the oldest are missed, however long the walk took.
        return Decision((), passed + count - len(due), due[0].due_ms, DUE_MS_MAX, due[0])
    chosen = _choose(spec, due, now_ms)
    missed = passed + count - len(chosen)
    if spec.max_fires is not None:
        # As if they had fired in time: the oldest use up the remaining fires.
        chosen = chosen[: max(0, spec.max_fires - fired)]
        # A fire that may be skipped does not use one up: whether it was the last is decided at the next instant.
        if fired + len(chosen) >= spec.max_fires and not (chosen and spec.overlap == "skip"):
            following = None
    newest = due[-1]
    valid_until = now_ms + DECISION_MS
    if following is not None:
        valid_until = max(valid_until, following.due_ms - 1)
    late = now_ms - newest.due_ms
    if late <= spec.grace_ms:
        valid_until = min(valid_until, newest.due_ms + spec.grace_ms)
    return Decision(tuple(chosen), missed, newest.due_ms, valid_until, following)


def _choose(spec: Spec, due: deque[Fire], now_ms: int) -> list[Fire]:
    if spec.missed == "once":
        return [due[-1]]
    if spec.missed == "all":
        return list(due)[-spec.max_catchup :]
    return [due[-1]] if now_ms - due[-1].due_ms <= spec.grace_ms else []


def _pass_over(spec: Spec, timeline: Timeline, expected: Fire, now_ms: int) -> tuple[int, Fire]:
    """Skip intervals too old to fire: an outage of a day has millions of short ones."""
    if spec.every_ms is None:
        return 0, expected
    until_ms = now_ms if spec.end_ms is None else min(now_ms, spec.end_ms)
    skipped = (until_ms - expected.instant_ms) // spec.every_ms - 2 * CHUNK_MESSAGES_MAX
    if skipped <= 0:
        return 0, expected
    later = timeline.after(expected.instant_ms + skipped * spec.every_ms - 1)
    return (0, expected) if later is None else (skipped, later)
