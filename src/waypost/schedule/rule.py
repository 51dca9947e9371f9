"""A schedule's rule: what is saved, and the instants that follow from it. No I/O: milliseconds in and out.

An instant is when the rule says that it fires; its due time is the instant plus its jitter, which follows from the
schedule and the instant alone. So every scheduler computes the same, and the store can compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta
from itertools import islice
from typing import Literal, NamedTuple

import msgspec
from msgspec import structs

from waypost.checks import DUE_MS_MAX, show
from waypost.codec import CONTENT_TYPES
from waypost.errors import InvalidSchedule, SchemaTooNew
from waypost.identity import encode
from waypost.policy import INTERVAL_MS_MAX, INTERVAL_MS_MIN, Overlap
from waypost.schedule.cron import split_patterns
from waypost.schedule.instants import next_of_all
from waypost.schedule.zones import zone_of

#: Instants that one step of a catch-up walks through; the next step does the rest. With more, the walk would take
#: longer than a decision is valid.
WALK_MAX = 2_000


#: Fields that the release before this one does not know: a schedule can have them when an upgrade is finished. Emptied
#: with each release.
NEW_FIELDS: frozenset[str] = frozenset()


class Spec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """All that is saved of a schedule except its state.

    Newer releases may add fields, which are not saved where they have their defaults. A schedule that has one is left
    to schedulers of that release: without the field it could fire when it should not.
    """

    name: str
    #: One pattern, or several separated by `; `.
    cron: str | None = None
    every_ms: int | None = None
    tz: str = "UTC"
    #: Where intervals are counted from.
    anchor_ms: int = 0
    start_ms: int | None = None
    end_ms: int | None = None
    max_fires: int | None = None
    jitter_ms: int = 0
    #: `skip`, `once`, or `all` with `max_catchup`.
    missed: Literal["skip", "once", "all"] = "skip"
    max_catchup: int = 0
    grace_ms: int = 60_000
    #: The message: the content type of its body, its bytes, and its other fields.
    content: int = 2
    body: bytes = b"null"
    type_name: str | None = None
    headers: dict[str, str] = {}
    correlation_id: str | None = None
    reply_to: str | None = None
    priority: int = 5
    group: str | None = None
    #: The retry policy of its messages, as their envelopes have it, and their time limit in seconds.
    retry: dict[str, str | float | None] | None = None
    timeout: float | None = None
    #: How long after its fire a message lapses; None: never.
    expires_ms: int | None = None
    #: What happens at an instant while the last run has not ended: `allow`, `skip` or `queue_one`.
    overlap: Overlap = "allow"
    #: Days in the schedule's zone on which it does not fire, as 2026-12-25.
    exclude: tuple[str, ...] = ()
    #: Whether a decorator in a program declared it, rather than a call of `save_schedule`.
    declared: bool = False

    def fires_like(self, other: Spec) -> bool:
        """Whether two rules have the same instants, so that saving one in place of the other moves nothing."""
        return self.timing == other.timing

    @property
    def timing(self) -> tuple[object, ...]:
        """The fields that determine the instants. Not the anchor: it is when the rule was first saved."""
        return (
            self.cron, self.every_ms, self.tz if self.cron else None, self.start_ms, self.end_ms, self.max_fires,
            self.jitter_ms, self.exclude,
        )  # fmt: skip


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Spec).decode


def pack_spec(spec: Spec) -> bytes:
    """Return a spec as the bytes that stores keep."""
    return _encode(spec)


def unpack_spec(data: bytes) -> Spec:
    """Read a spec from its bytes. Raises `SchemaTooNew` if a newer release wrote what this one cannot read."""
    try:
        spec = _decode(data)
        if spec.content >= len(CONTENT_TYPES):
            raise msgspec.DecodeError(f"unknown content type {spec.content}")
    except msgspec.DecodeError as error:
        raise SchemaTooNew(f"a schedule cannot be read by this release ({error}); update waypost to use it") from None
    return spec


def new_fields(spec: Spec) -> set[str]:
    """Return the fields of a spec that the release before does not know, as far as they say something."""
    default = Spec(spec.name)
    return {name for name in NEW_FIELDS if getattr(spec, name) != getattr(default, name)}


def interval_ms(every: float | timedelta) -> int:
    """Return seconds or a timedelta as milliseconds, or raise `InvalidSchedule`."""
    seconds = every.total_seconds() if isinstance(every, timedelta) else every
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise InvalidSchedule(f"every is a number of seconds or a timedelta, not {show(every)}")
    if not INTERVAL_MS_MIN / 1000 <= seconds <= INTERVAL_MS_MAX / 1000:
        raise InvalidSchedule(f"every must be from a millisecond to ten years, not {show(every)}")
    return round(seconds * 1000)


def next_multiple(anchor_ms: int, every_ms: int, after_ms: int) -> int:
    """Return the first anchor + n × interval (n from 0) after a time."""
    if after_ms < anchor_ms:
        return anchor_ms
    return anchor_ms + ((after_ms - anchor_ms) // every_ms + 1) * every_ms


def counted_from(spec: Spec, start_ms: int) -> Spec:
    """Return a rule whose interval, if it has one without a start, is counted from before a time: for the past."""
    if spec.every_ms is None or spec.start_ms is not None or spec.anchor_ms <= start_ms:
        return spec
    earlier = -(-(spec.anchor_ms - start_ms) // spec.every_ms)
    return structs.replace(spec, anchor_ms=spec.anchor_ms - earlier * spec.every_ms)


class Fire(NamedTuple):
    """An instant of the rule, and its due time: the instant plus its jitter."""

    instant_ms: int
    due_ms: int


class Timeline:
    """The instants of one schedule, in order."""

    __slots__ = ("_excluded", "_key", "_spec")

    def __init__(self, key: str, spec: Spec) -> None:
        self._key = key
        self._spec = spec
        self._excluded = frozenset(date.fromisoformat(day) for day in spec.exclude)

    def _instant_after(self, after_ms: int, upcoming: dict[int, int] | None = None) -> int | None:
        spec = self._spec
        if spec.start_ms is not None:
            after_ms = max(after_ms, spec.start_ms - 1)
        if spec.every_ms is not None:
            anchor = spec.anchor_ms if spec.start_ms is None else spec.start_ms
            found: int | None = next_multiple(anchor, spec.every_ms, after_ms)
        elif spec.cron is not None:
            patterns, zone = split_patterns(spec.cron), zone_of(spec.tz)
            seconds = next_of_all(patterns, zone, max(0, after_ms) // 1000, self._excluded, upcoming)
            found = None if seconds is None else seconds * 1000
        else:
            raise InvalidSchedule("a schedule has either cron or every; this one has neither")
        if found is None or found > DUE_MS_MAX or (spec.end_ms is not None and found > spec.end_ms):
            return None
        return found

    def walk(self, after_ms: int) -> Iterator[Fire]:
        """Yield the fires whose instants are after a time, in order. Due times are in order too."""
        upcoming: dict[int, int] = {}
        instant = self._instant_after(after_ms, upcoming)
        while instant is not None:
            following = self._instant_after(instant, upcoming)
            yield Fire(instant, instant + self._jitter(instant, following))
            instant = following

    def has(self, instant_ms: int) -> bool:
        """Whether a moment is an instant of the rule; of an interval, also before it was first saved."""
        spec = self._spec
        if spec.every_ms is None or spec.start_ms is not None:
            return self._instant_after(instant_ms - 1) == instant_ms
        in_time = spec.end_ms is None or instant_ms <= spec.end_ms
        return in_time and (instant_ms - spec.anchor_ms) % spec.every_ms == 0

    def after(self, after_ms: int) -> Fire | None:
        """Return the first fire after a time, or None."""
        return next(self.walk(after_ms), None)

    def next_fires_after(self, after_ms: int, count: int) -> list[Fire]:
        """Return the next `count` fires after a time."""
        return list(islice(self.walk(after_ms), count))

    def _jitter(self, instant: int, following: int | None) -> int:
        """Return how long after its instant a fire is due: the same in every process, before the next instant."""
        span = self._spec.jitter_ms
        if span and following is not None:
            span = min(span, following - instant)
        if span <= 1:
            return 0
        from hashlib import blake2b  # few programs need it

        digest = blake2b(f"{self._key}\0{instant}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % span


def fire_id(queue: str, key: str, version: str, instant_ms: int) -> str:
    """Return the id of the message of one instant: the same whichever scheduler fires it."""
    from hashlib import blake2b  # few programs need it

    digest = blake2b(f"{queue}\0{key}\0{version}\0{instant_ms}".encode(), digest_size=16).digest()
    return encode(instant_ms, 9) + encode(int.from_bytes(digest, "big"), 15)
