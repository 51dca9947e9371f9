"""What other parts of waypost need of a client besides its public methods: only this module uses its private names."""

from __future__ import annotations

from datetime import datetime
from typing import TypeVar

from waypost.client.options import ScheduleKeywords
from waypost.client.sync_client import Waypost
from waypost.operations.flow import ClientContext, Flow
from waypost.operations.schedules import make_spec
from waypost.schedule.rule import Timeline
from waypost.schedule.schedule import Schedule
from waypost.schedule.zones import zone_of
from waypost.store.port import Executor
from waypost.times import to_datetime, to_ms

T = TypeVar("T")


def context_of(post: Waypost) -> ClientContext:
    """What the operations of a client share."""
    return post._context


def executor_of(post: Waypost) -> Executor:
    """The connection of a client, opened if it was not."""
    return post._connected()


def run_flow(post: Waypost, flow: Flow[T]) -> T:
    """Run an operation with the connection of a client."""
    return post._run(flow)


def edit_schedule(post: Waypost, name: str, queue: str, key: str | None, rule: ScheduleKeywords) -> Schedule:
    """Save a schedule, or change of one that exists only what `rule` names."""
    return post._run(post._edit_flow(name, queue, key, rule))


def preview_schedule(
    after: datetime,
    count: int,
    *,
    cron: str | None = None,
    every: float | None = None,
    tz: str = "UTC",
    start: datetime | None = None,
    end: datetime | None = None,
) -> list[tuple[datetime, datetime]]:
    """Return the next fires of a rule after a time, in UTC and in its zone; raises what `save_schedule` would."""
    spec = make_spec("preview", cron=cron, every=every, tz=tz, start=start, end=end)
    zone = zone_of(spec.tz)
    instants = [
        to_datetime(fire.instant_ms) for fire in Timeline("preview", spec).next_fires_after(to_ms(after), count)
    ]
    return [(at, at.astimezone(zone)) for at in instants]
