"""A schedule as clients return it: its rule, its state, and when it fires next."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Any

from msgspec import Struct

from waypost import codec
from waypost.errors import InvalidSchedule
from waypost.policy import CatchUp, Missed, Overlap, RetryPolicy, unpack_retry
from waypost.schedule.rule import Fire, Spec, Timeline, unpack_spec
from waypost.schedule.state import read_state
from waypost.schedule.zones import zone_of
from waypost.times import to_datetime, to_timedelta
from waypost.values import StoredSchedule


class Schedule(Struct, frozen=True):
    """A schedule: the rule as it was saved, and its state. Times are in UTC."""

    queue: str
    key: str
    name: str
    #: One pattern, or several separated by `; `.
    cron: str | None
    every: timedelta | None
    tz: str
    #: Days in its zone on which it does not fire.
    exclude: list[date]
    missed: Missed
    grace: timedelta
    overlap: Overlap
    start: datetime | None
    end: datetime | None
    max_fires: int | None
    jitter: timedelta
    paused: bool
    #: When it fires next, jitter included; empty if it is paused or has ended.
    next_fires: list[datetime]
    #: Messages published, instants missed, and the newest instant that fired.
    fires: int
    missed_fires: int
    last_fire: datetime | None
    #: Messages published by `backfill`, for instants of the past.
    backfilled: int
    #: Instants skipped because the run before had not ended, and the one that waits for its end.
    skipped_fires: int
    waiting_fire: datetime | None
    #: Whether `@post.cron` or `@post.every` of a program declared it.
    declared: bool
    priority: int
    group: str | None
    headers: dict[str, str]
    body: Any
    #: How long after its fire a message lapses; None: never.
    expires: timedelta | None = None
    #: The retry policy and the time limit of its messages, which win over those of their handler.
    retry: RetryPolicy | None = None
    timeout: timedelta | None = None

    @property
    def next_fire(self) -> datetime | None:
        """When it fires next; None if it is paused or has ended."""
        return self.next_fires[0] if self.next_fires else None

    def local(self, at: datetime) -> datetime:
        """Return a time in the schedule's own zone."""
        return at.astimezone(zone_of(self.tz))


def missed_policy(spec: Spec) -> Missed:
    """Return the policy for missed fires as the caller gave it."""
    if spec.missed == "all":
        return CatchUp(spec.max_catchup)
    return "once" if spec.missed == "once" else "skip"


def retry_policy(spec: Spec) -> RetryPolicy | None:
    """Return the retry policy of its messages; None also for one of a newer release, which is not known here."""
    if spec.retry is None:
        return None
    try:
        return unpack_retry(spec.retry)
    except (LookupError, TypeError):
        return None


def describe(queue: str, stored: StoredSchedule, count: int = 1) -> Schedule:
    """Return a stored schedule with its next `count` fires."""
    spec, state = unpack_spec(stored.spec), read_state(stored)
    fires = []
    if stored.next_ms is not None and not stored.paused:
        left = count if spec.max_fires is None else min(count, spec.max_fires - stored.fires)
        try:
            fires = Timeline(stored.key, spec).next_fires_after(stored.next_ms - 1, left)
        except InvalidSchedule:  # this machine does not know the zone; the store has the next fire
            fires = [Fire(stored.next_ms, stored.due_ms or stored.next_ms)]
    return Schedule(
        queue=queue,
        key=stored.key,
        name=spec.name,
        cron=spec.cron,
        every=to_timedelta(spec.every_ms),
        tz=spec.tz,
        exclude=[date.fromisoformat(day) for day in spec.exclude],
        missed=missed_policy(spec),
        grace=to_timedelta(spec.grace_ms),
        overlap=spec.overlap,
        start=to_datetime(spec.start_ms),
        end=to_datetime(spec.end_ms),
        max_fires=spec.max_fires,
        jitter=to_timedelta(spec.jitter_ms),
        paused=stored.paused,
        next_fires=[to_datetime(fire.due_ms) for fire in fires],
        fires=stored.fires,
        missed_fires=stored.missed,
        last_fire=to_datetime(stored.last_ms),
        backfilled=state.backfilled,
        skipped_fires=state.skipped,
        waiting_fire=to_datetime(state.waiting_ms),
        declared=spec.declared,
        priority=spec.priority,
        group=spec.group,
        headers=dict(spec.headers),
        body=codec.decode_body(codec.CONTENT_TYPES[spec.content], spec.body),
        expires=to_timedelta(spec.expires_ms),
        retry=retry_policy(spec),
        timeout=None if spec.timeout is None else timedelta(seconds=spec.timeout),
    )
