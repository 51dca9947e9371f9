"""What schedulers remember of a schedule beside its rule: which instants have fired, and its last run. No I/O.

The store keeps it packed and does not read it. A schedule that fires without a miss fires every instant from `since_ms`
to its last one, so a fire in time writes nothing here. A miss ends that range and begins another.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import structs

from waypost.errors import SchemaTooNew
from waypost.schedule.rule import Spec, Timeline, pack_spec, unpack_spec
from waypost.values import StoredSchedule

#: Ranges that are remembered. Of more, the two oldest become one: what was missed between them counts as fired.
RANGES_MAX = 200
#: Rules that a schedule had before, and of which it is remembered what fired. Of more, the oldest is forgotten: all up
#: to its last fire counts as fired.
RULES_MAX = 8

#: All instants of a rule from the first millisecond to the last have fired.
Range = tuple[int, int]


class PastRule(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rule that the schedule had before, packed, and what fired by it."""

    spec: bytes
    fired: list[Range]


class State(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is remembered of a schedule.

    Newer releases may add fields. Where one is used the schedule is left to schedulers of that release: to write the
    state without it would forget what it says.
    """

    #: Every instant from here to the last one that fired has fired, and so have those of the ranges before.
    since_ms: int | None = None
    fired: list[Range] = []
    past: list[PastRule] = []
    #: All up to here counts as fired, by whichever rule: an older one is forgotten.
    fired_until_ms: int | None = None
    #: Messages published by `backfill`.
    backfilled: int = 0
    #: With an overlap rule: the message of the last run, the instant that waits for its end, and how many were skipped.
    run_id: str | None = None
    waiting_ms: int | None = None
    skipped: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(State).decode


def read_state(stored: StoredSchedule) -> State:
    """Return what is remembered of a schedule.

    Of one that an older release has fired nothing is known: all its instants up to the last one count as fired. Raises
    `SchemaTooNew` if a newer release wrote what this one cannot read.
    """
    if not stored.state:
        return State() if stored.last_ms is None else State(since_ms=0)
    try:
        return _decode(stored.state)
    except msgspec.DecodeError as error:
        raise SchemaTooNew(
            f"the state of schedule {stored.key!r} cannot be read by this release ({error}); update waypost to use it"
        ) from None


def pack_state(state: State) -> bytes:
    """Return a state as the bytes that stores keep."""
    return _encode(state)


def add_range(ranges: Iterable[Range], first_ms: int, last_ms: int) -> list[Range]:
    """Return the ranges with one more: in order, those that touch joined, at most `RANGES_MAX`."""
    joined: list[Range] = []
    for first, last in sorted([*ranges, (first_ms, last_ms)]):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    while len(joined) > RANGES_MAX:
        joined[:2] = [(joined[0][0], joined[1][1])]
    return joined


def fired_ranges(state: State, last_ms: int | None) -> list[Range]:
    """Return what has fired by the rule that the schedule has now."""
    if state.since_ms is None or last_ms is None or last_ms < state.since_ms:
        return list(state.fired)
    return add_range(state.fired, state.since_ms, last_ms)


def after_fires(state: State, last_ms: int | None, first_ms: int | None, missed: bool) -> State:
    """Return the state after fires from `first_ms` on, or none, before which instants were missed or not."""
    if not missed and (first_ms is None or state.since_ms is not None):
        return state
    return structs.replace(after_gap(state, last_ms), since_ms=first_ms)


def after_gap(state: State, last_ms: int | None) -> State:
    """Return the state before instants that do not fire, as those of a pause."""
    return structs.replace(state, since_ms=None, fired=fired_ranges(state, last_ms))


def after_change(state: State, last_ms: int | None, old: Spec) -> State:
    """Return the state after the rule of a schedule was changed: what fired by the old one is kept with it."""
    fired = fired_ranges(state, last_ms)
    if not fired:
        return structs.replace(state, since_ms=None)
    timing = pack_spec(Spec("", **{field: getattr(old, field) for field in TIMING}))
    past: list[PastRule] = []
    for rule in state.past:
        if rule.spec != timing:
            past.append(rule)
            continue
        for first_ms, until_ms in rule.fired:
            fired = add_range(fired, first_ms, until_ms)
    past.append(PastRule(timing, fired))
    forgotten = [rule.fired[-1][1] for rule in past[:-RULES_MAX]]
    if state.fired_until_ms is not None:
        forgotten.append(state.fired_until_ms)
    return structs.replace(
        state, since_ms=None, fired=[], past=past[-RULES_MAX:], fired_until_ms=max(forgotten, default=None)
    )


#: The fields of a spec that say whether a moment is one of its instants.
TIMING = ("cron", "every_ms", "tz", "anchor_ms", "start_ms", "end_ms", "exclude")


class FiredInstants:
    """Answers whether an instant has fired, by the rule that the schedule has now or by one that it had before."""

    def __init__(self, state: State, stored: StoredSchedule) -> None:
        self._ranges = fired_ranges(state, stored.last_ms)
        if state.fired_until_ms is not None:
            self._ranges = add_range(self._ranges, 0, state.fired_until_ms)
        self._past = [(Timeline(stored.key, unpack_spec(past.spec)), past.fired) for past in state.past]

    def __contains__(self, instant_ms: int) -> bool:
        if _is_within(self._ranges, instant_ms):
            return True
        return any(_is_within(ranges, instant_ms) and timeline.has(instant_ms) for timeline, ranges in self._past)


def _is_within(ranges: list[Range], instant_ms: int) -> bool:
    return any(first <= instant_ms <= last for first, last in ranges)
