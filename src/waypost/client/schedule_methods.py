"""The faces of schedules: saved by hand or declared by a decorator, listed, paused, triggered; and their loops."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack
from weakref import WeakSet

from waypost.checks import check_count, check_function, check_options, check_queue, check_seconds, check_text, show
from waypost.errors import ConfigurationError
from waypost.message import Duration, queue_name, queue_type
from waypost.operations import schedules as operations
from waypost.operations.flow import ClientContext, Flow
from waypost.policy import KEY_CHARACTERS_MAX, LEADER_TTL_MS, Missed
from waypost.schedule.promoter import Promoter, PromoterTick
from waypost.schedule.rule import Spec, unpack_spec
from waypost.schedule.schedule import Schedule
from waypost.schedule.scheduler import Scheduler, Tick, log
from waypost.values import Published
from waypost.worker.handler import Handler

if TYPE_CHECKING:
    from waypost.client.base import QueueName
    from waypost.schedule.loop import Background
    from waypost.store.port import AsyncExecutor, Executor

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
NEXT_FIRES_MAX = 1_000


class RuleKeywords(TypedDict, total=False):
    """What decorators and `save_schedule` have in common."""

    missed: Missed
    grace: Duration
    start: datetime | None
    end: datetime | None
    max_fires: int | None
    jitter: Duration
    body: object
    priority: int
    group: str | None
    headers: Mapping[str, str] | None


class ScheduleKeywords(RuleKeywords, total=False):
    """The options of `save_schedule`."""

    cron: str | None
    every: Duration | None
    tz: str
    correlation_id: str | None
    reply_to: str | None


class Declared:
    """A schedule that a decorator declared: saved when a worker starts."""

    __slots__ = ("key", "queue", "spec")

    def __init__(self, queue: str, key: str, spec: Spec) -> None:
        self.queue = queue
        self.key = key
        self.spec = spec


class ScheduleMethods:
    """What both faces share."""

    _context: ClientContext
    _declared: dict[tuple[str, str], Declared]
    _backgrounds: WeakSet[Background]

    def _register(self, queue: QueueName, function: F, options: Mapping[str, Any]) -> F:
        raise NotImplementedError

    def _name(self, queue: QueueName) -> str:
        raise NotImplementedError

    def _start_declaring(self) -> None:
        self._declared = {}
        self._backgrounds = WeakSet()

    # ---- decorators --------------------------------------------------------------------------------------

    def cron(
        self,
        pattern: str,
        *,
        tz: str = "UTC",
        name: str | None = None,
        queue: QueueName | None = None,
        handler: Mapping[str, Any] | None = None,
        **rule: Unpack[RuleKeywords],
    ) -> Callable[[F], F]:
        """Run a function by a cron pattern: the handler of its own queue. Workers save the schedule as they start.

        `queue` and `name` are the function's own name unless given; `handler` has options of `handler`, such as
        `{"timeout": 30}`. Another pattern for the same name changes the schedule. One whose function is gone stays in
        the store until it is removed; workers say so when they start.
        """
        if callable(pattern):
            raise _bare("cron", pattern, '@post.cron("0 9 * * *")')
        return self._declare(name, queue, handler, {"cron": pattern, "tz": tz, **rule})

    def every(
        self,
        interval: Duration,
        *,
        name: str | None = None,
        queue: QueueName | None = None,
        handler: Mapping[str, Any] | None = None,
        **rule: Unpack[RuleKeywords],
    ) -> Callable[[F], F]:
        """Run a function every so many seconds, parts of a second included. The rest is as for `cron`."""
        if callable(interval):
            raise _bare("every", interval, "@post.every(60)")
        return self._declare(name, queue, handler, {"every": interval, **rule})

    def _declare(
        self, name: str | None, queue: QueueName | None, handler: Mapping[str, Any] | None, rule: Mapping[str, Any]
    ) -> Callable[[F], F]:
        check_options("a schedule", rule, RULE_OPTIONS)
        if handler is not None and not (isinstance(handler, Mapping) and all(isinstance(one, str) for one in handler)):
            raise ConfigurationError(f"handler= has options of a handler, as {{'timeout': 30}}, not {show(handler)}")
        check_options("a handler", handler or {}, HANDLER_OPTIONS)
        # What is wrong is said where it is written, before there is a function.
        operations.make_spec("schedule" if name is None else name, declared=True, **rule)

        def register(function: F) -> F:
            chosen = getattr(function, "__name__", "") if name is None else name
            place = check_queue(chosen) if queue is None else queue_name(queue)
            spec = operations.make_spec(chosen, declared=True, **rule)
            if (place, chosen) in self._declared:
                raise ConfigurationError(f"queue {place} has a schedule {chosen!r} already; give it another name=")
            # The name is the key: a pattern that changes in the program changes the schedule, and adds none.
            self._declared[place, chosen] = Declared(place, chosen, spec)
            return self._register(place if queue is None else queue, function, handler or {})

        return register

    def _save_declared(self, context: ClientContext, queues: Iterable[str]) -> Flow[None]:
        """At the start of a worker: save what is declared for its queues, and name what is declared no more."""
        mine = set(queues)
        for one in self._declared.values():
            if one.queue in mine:
                yield from operations.save(context, one.queue, one.key, one.spec)
        if not self._declared:
            return
        for queue, listing in (yield from operations.listings(context, None)).items():
            for stored in listing.schedules:
                known = (queue, stored.key) in self._declared
                if queue in mine and not known and unpack_spec(stored.spec).declared:
                    log.warning(
                        "schedule %r of queue %s is not declared by this program any more, and still fires; if it is "
                        "over, remove it", stored.key, queue,
                        extra={"event": "schedule_left", "queue": queue, "schedule": stored.key},
                    )  # fmt: skip
                    context.tell("schedule_left", queue, "skipped", key=stored.key)

    # ---- loops -------------------------------------------------------------------------------------------

    def _embed(
        self, context: ClientContext, executor: AsyncExecutor, *, scheduler: bool, promoter: bool
    ) -> list[Background]:
        """The loops of a worker, to be started."""
        from waypost.schedule.loop import Background

        parts: list[Background] = []
        if scheduler:
            parts.append(Background(executor, Scheduler(context, by_polls=True)))
        if promoter:
            parts.append(Background(executor, Promoter(context)))
        for part in parts:
            self._backgrounds.add(part)
        return parts

    def _poke_schedulers(self) -> None:
        for background in list(self._backgrounds):
            background.poke()

    # ---- arguments to flows ------------------------------------------------------------------------------

    def _save_flow(self, name: str, queue: QueueName, key: str | None, rule: ScheduleKeywords) -> Flow[Schedule]:
        place = self._name(queue)
        check_options("save_schedule", rule, RULE_OPTIONS)
        spec = operations.make_spec(name, as_type=queue_type(queue), **rule)
        chosen = operations.derived_key(spec) if key is None else check_text("schedule key", key, KEY_CHARACTERS_MAX)
        return operations.save(self._context, place, chosen, spec)

    def _edit_flow(self, name: str, queue: QueueName, key: str | None, rule: ScheduleKeywords) -> Flow[Schedule]:
        """A flow that saves a schedule, or changes of one that is there only what `rule` names."""
        check_options("save_schedule", rule, RULE_OPTIONS)
        return operations.change(self._context, self._name(queue), name, key, rule)

    def _change_flow(
        self, change: Callable[[ClientContext, str, str | None], Flow[T]], name: str, queue: QueueName | None
    ) -> Flow[T]:
        """A flow that changes the schedule of a key or name, in a queue that this client may change."""
        check_text("schedule name or key", name, KEY_CHARACTERS_MAX)
        return change(self._context, name, None if queue is None else self._name(queue))

    def _schedules_flow(self, queue: QueueName | None, count: int) -> Flow[list[Schedule]]:
        check_count("count", count, 1, NEXT_FIRES_MAX)
        return operations.schedules(self._context, _name_or_none(queue), count)


def _bare(decorator: str, function: object, usage: str) -> ConfigurationError:
    name = getattr(function, "__name__", "the function")
    return ConfigurationError(f"@post.{decorator} needs its arguments: write {usage} above {name}")


#: The options of a handler that a schedule's function may have.
HANDLER_OPTIONS = frozenset(inspect.signature(Handler).parameters) - {
    "function", "middleware", "queue", "state", "store",
}  # fmt: skip
#: The options of a rule, as decorators and `save_schedule` take them.
RULE_OPTIONS = frozenset(ScheduleKeywords.__annotations__)


def _name_or_none(queue: QueueName | None) -> str | None:
    return None if queue is None else queue_name(queue)


class BlockingSchedules(ScheduleMethods):
    """Schedules for programs that block."""

    def _run(self, flow: Flow[T]) -> T:
        raise NotImplementedError

    def _connected(self) -> Executor:
        raise NotImplementedError

    def save_schedule(
        self, name: str, *, queue: QueueName, key: str | None = None, **rule: Unpack[ScheduleKeywords]
    ) -> Schedule:
        """Save a schedule: it publishes `body` to `queue` by a `cron` pattern in zone `tz`, or `every` n seconds.

        `missed` says what becomes of instants that nobody fired in time (`grace`, 60 s): `skip` them (the default),
        fire `once` for all, or `CatchUp(n)`. `start`, `end` and `max_fires` bound it; `jitter` spreads its fires over
        so many seconds. `priority`, `group`, `headers`, `correlation_id` and `reply_to` are those of its messages.

        It is known by queue and `key`, which is made of name and rule unless given. To save it again changes nothing;
        with another rule under the same key it fires next when that says so.
        """
        schedule = self._run(self._save_flow(name, queue, key, rule))
        self._poke_schedulers()
        return schedule

    def remove_schedule(self, name: str, *, queue: QueueName | None = None) -> bool:
        """Remove a schedule by key or name; whether there was one. What it has published stays."""
        return self._run(self._change_flow(operations.remove, name, queue))

    def pause_schedule(self, name: str, *, queue: QueueName | None = None) -> bool:
        """Fire no more until it is resumed; whether that changed anything."""
        return self._run(self._change_flow(operations.pause, name, queue))

    def resume_schedule(self, name: str, *, queue: QueueName | None = None) -> bool:
        """Fire again from the next instant on; whether that changed anything. The pause makes no missed fires."""
        changed = self._run(self._change_flow(operations.resume, name, queue))
        self._poke_schedulers()
        return changed

    def trigger_schedule(self, name: str, *, queue: QueueName | None = None) -> Published:
        """Publish a schedule's message now. Its next fire stays where it is."""
        return self._run(self._change_flow(operations.trigger, name, queue))

    def schedules(self, queue: QueueName | None = None, *, count: int = 1) -> list[Schedule]:
        """All schedules, or those of a queue, each with its next `count` fires."""
        return self._run(self._schedules_flow(queue, count))

    def run_scheduler(
        self,
        stop: threading.Event | None = None,
        *,
        ttl: float = LEADER_TTL_MS / 1000,
        on_tick: Callable[[Tick], object] | None = None,
    ) -> None:
        """Fire schedules in this thread until `stop` is set. Workers do this too; of all of them one leads at a time.

        A leader that is not heard of for `ttl` seconds is replaced. `on_tick` is told what each tick did.
        """
        from waypost.schedule.loop import run_blocking

        _check_stop(stop)
        scheduler = Scheduler(self._context, ttl_ms=_ttl_ms(ttl), on_tick=check_function("on_tick", on_tick))
        run_blocking(self._connected(), scheduler, stop or threading.Event())

    def run_promoter(
        self,
        stop: threading.Event | None = None,
        *,
        ttl: float = LEADER_TTL_MS / 1000,
        on_tick: Callable[[PromoterTick], object] | None = None,
    ) -> None:
        """Make timers ready when they are due and wake workers for them until `stop` is set. Nothing depends on it."""
        from waypost.schedule.loop import run_blocking

        _check_stop(stop)
        promoter = Promoter(self._context, ttl_ms=_ttl_ms(ttl), on_tick=check_function("on_tick", on_tick))
        run_blocking(self._connected(), promoter, stop or threading.Event())


def _check_stop(stop: threading.Event | None) -> None:
    if not (stop is None or all(callable(getattr(stop, name, None)) for name in ("is_set", "set", "wait"))):
        raise ConfigurationError(f"stop must be a threading.Event, not {show(stop)}")


def _ttl_ms(ttl: float) -> int:
    return round(check_seconds("ttl", ttl, least=0.05, most=3600, error=ConfigurationError) * 1000)


class AwaitedSchedules(ScheduleMethods):
    """Schedules for an event loop."""

    async def _run(self, flow: Flow[T]) -> T:
        raise NotImplementedError

    async def _connected(self) -> AsyncExecutor:
        raise NotImplementedError

    async def save_schedule(
        self, name: str, *, queue: QueueName, key: str | None = None, **rule: Unpack[ScheduleKeywords]
    ) -> Schedule:
        schedule = await self._run(self._save_flow(name, queue, key, rule))
        self._poke_schedulers()
        return schedule

    async def remove_schedule(self, name: str, *, queue: QueueName | None = None) -> bool:
        return await self._run(self._change_flow(operations.remove, name, queue))

    async def pause_schedule(self, name: str, *, queue: QueueName | None = None) -> bool:
        return await self._run(self._change_flow(operations.pause, name, queue))

    async def resume_schedule(self, name: str, *, queue: QueueName | None = None) -> bool:
        changed = await self._run(self._change_flow(operations.resume, name, queue))
        self._poke_schedulers()
        return changed

    async def trigger_schedule(self, name: str, *, queue: QueueName | None = None) -> Published:
        return await self._run(self._change_flow(operations.trigger, name, queue))

    async def schedules(self, queue: QueueName | None = None, *, count: int = 1) -> list[Schedule]:
        return await self._run(self._schedules_flow(queue, count))

    async def run_scheduler(
        self, *, ttl: float = LEADER_TTL_MS / 1000, on_tick: Callable[[Tick], object] | None = None
    ) -> None:
        """Fire schedules until this is cancelled. Workers do this too; of all of them one leads at a time."""
        from waypost.schedule.loop import Background

        scheduler = Scheduler(self._context, ttl_ms=_ttl_ms(ttl), on_tick=check_function("on_tick", on_tick))
        background = Background(await self._connected(), scheduler)
        self._backgrounds.add(background)
        await background.run()

    async def run_promoter(
        self, *, ttl: float = LEADER_TTL_MS / 1000, on_tick: Callable[[PromoterTick], object] | None = None
    ) -> None:
        """Make timers ready when they are due, and wake workers for them, until this is cancelled."""
        from waypost.schedule.loop import Background

        promoter = Promoter(self._context, ttl_ms=_ttl_ms(ttl), on_tick=check_function("on_tick", on_tick))
        await Background(await self._connected(), promoter).run()


# One text for both faces: what a method means does not depend on how it is called.
for _name, _method in vars(AwaitedSchedules).items():
    if callable(_method) and not _method.__doc__:
        _method.__doc__ = getattr(getattr(BlockingSchedules, _name, None), "__doc__", None)
