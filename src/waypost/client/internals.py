"""What other parts of waypost need of a client besides its public methods: only this module uses its private names."""

from __future__ import annotations

from typing import TypeVar

from waypost.client.options import ScheduleKeywords
from waypost.client.sync_client import Waypost
from waypost.operations.flow import ClientContext, Flow
from waypost.schedule.schedule import Schedule
from waypost.store.port import Executor

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
