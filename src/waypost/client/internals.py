"""The private parts of a client that other modules of waypost use: only this module uses its private names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING, TypeVar

from waypost.client.async_client import AsyncWaypost
from waypost.client.base import BaseClient
from waypost.client.options import ScheduleKeywords
from waypost.client.sync_client import Waypost
from waypost.middleware import Middleware
from waypost.operations.flow import ClientContext, Flow
from waypost.operations.schedules import make_spec
from waypost.schedule.rule import Timeline
from waypost.schedule.schedule import Schedule
from waypost.schedule.zones import zone_of
from waypost.store.port import Executor, Store
from waypost.store_time import StoreTime
from waypost.times import to_datetime, to_ms
from waypost.worker.handler import Handler

if TYPE_CHECKING:
    from waypost.worker.worker import Worker

T = TypeVar("T")


def context_of(post: Waypost) -> ClientContext:
    """Return the common state of a client's operations."""
    return post._context


def executor_of(post: Waypost) -> Executor:
    """Return the connection of a client, opened if necessary."""
    return post._connected()


def run_flow(post: Waypost, flow: Flow[T]) -> T:
    """Run an operation with the connection of a client."""
    return post._run(flow)


def edit_schedule(post: Waypost, name: str, queue: str, key: str | None, rule: ScheduleKeywords) -> Schedule:
    """Save a schedule, or change of an existing one only what `rule` names."""
    return post._run(post._edit_flow(name, queue, key, rule))


async def edit_schedule_async(
    post: AsyncWaypost, name: str, queue: str, key: str | None, rule: ScheduleKeywords
) -> Schedule:
    """Do the same through an async client."""
    schedule = await post._run(post._edit_flow(name, queue, key, rule))
    post._refresh_schedulers()
    return schedule


def preview_schedule(
    after: datetime,
    count: int,
    *,
    cron: str | None = None,
    every: float | None = None,
    tz: str = "UTC",
    start: datetime | None = None,
    end: datetime | None = None,
    exclude: Collection[date] = (),
) -> list[tuple[datetime, datetime]]:
    """Return the next fires of a rule after a time, in UTC and in its zone; raises the errors of `save_schedule`."""
    spec = make_spec("preview", cron=cron, every=every, tz=tz, exclude=exclude, start=start, end=end)
    zone = zone_of(spec.tz)
    instants = [
        to_datetime(fire.instant_ms) for fire in Timeline("preview", spec).next_fires_after(to_ms(after), count)
    ]
    return [(at, at.astimezone(zone)) for at in instants]


def worker_of(post: AsyncWaypost, handlers: Sequence[Handler]) -> Worker:
    """Return a worker for handlers that are not registered with the client."""
    return post._worker_for(handlers)


async def store_answers(post: AsyncWaypost) -> int:
    """Return the store's time in milliseconds: proof that it replies. Raises the store's errors."""
    return await post._call(post.store.time())


def store_answers_sync(post: Waypost) -> int:
    """The same for a client that blocks."""
    return post._call(post.store.time())


def check_handled(post: AsyncWaypost, queue: str) -> None:
    """Raise `UnknownQueue` if the client is strict and this queue was not declared to it."""
    post._registry.check_handled(queue)


def replace_store(post: BaseClient, store: Store, time: StoreTime) -> Callable[[], None]:
    """Let a client use another store, with its handlers, schedules and middleware; return the function that undoes it.

    The object stays the same, so that modules that have imported it use the other store too. `time` is the store's.
    """
    before = post.__dict__
    context: ClientContext = before["_context"]
    post.__dict__ = {}
    try:
        BaseClient.__init__(post, store=store, retry_budget=context.retry_budget, redact=context.redact)
    except BaseException:
        post.__dict__ = before
        raise
    post._registry, post._declared, post._relays = before["_registry"], before["_declared"], before["_relays"]
    post._context.name_of, post._context.on_event = post._registry.name, context.on_event
    post._session.time = time

    def undo() -> None:
        # Workers that still run keep their connections.
        post._wakeups.close()
        post.__dict__ = before

    return undo


def begin_test_publishes(post: BaseClient, middleware: Middleware) -> Callable[[], None]:
    """Put a middleware around all publishes of a client, outermost; return the function that undoes it."""
    registry = post._registry
    registry.middleware = (middleware, *registry.middleware)

    def undo() -> None:
        registry.middleware = tuple(one for one in registry.middleware if one is not middleware)

    return undo


def handlers_to_test(post: BaseClient) -> list[Handler]:
    """Return the handlers of a client without its relays, which would send to other systems."""
    return [handler for handler in post.handlers if handler.queue not in post._relays]


def handlers_by_queue(post: BaseClient) -> list[list[Handler]]:
    """Return the same, in one list for each queue."""
    of_queue: dict[str, list[Handler]] = {}
    for handler in handlers_to_test(post):
        of_queue.setdefault(handler.queue, []).append(handler)
    return list(of_queue.values())


def flow_context(post: BaseClient) -> ClientContext:
    """Return the common state of the operations of a client of either mode."""
    return post._context


def count_declared(post: BaseClient) -> int:
    """Return how many schedules decorators have declared so far."""
    return len(post._declared)


def save_declared(post: BaseClient) -> Flow[None]:
    """Save the schedules that decorators declared, as a worker does when it starts."""
    return post._save_declared(post._context, [one.queue for one in post._declared.values()])
