"""A client for tests of programs: a memory store, a clock that stands still, and handlers that run in the test.

def test_an_order_is_charged():
    with TestPost.replacing(shop.post) as test:
        shop.place_order(7)
        test.assert_published("orders", {"id": 7}, key="order:7")
        test.run_all()                      # raises what a handler raises
        test.advance(hours=24)              # timers, retries, leases and schedules follow
        test.run_all()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from msgspec import Struct

from waypost import codec
from waypost.checks import check_count, check_flag, check_moment, check_seconds
from waypost.client import AsyncWaypost, Waypost
from waypost.client.base import BaseClient
from waypost.client.internals import begin_test_publishes, handlers_to_test, replace_store
from waypost.errors import ConfigurationError, InvalidInput, Undecodable
from waypost.formatting import format_count
from waypost.message import Queue, queue_name, queue_type
from waypost.middleware import Middleware, Outgoing
from waypost.operations.flow import drive, drive_async
from waypost.store.memory.store import AsyncMemoryExecutor, MemoryExecutor
from waypost.testing.clock import ClockTime, ManualClock
from waypost.testing.inline import CallStep, FlowStep, Handled, InlineWorker, Steps
from waypost.testing.store import TestStore
from waypost.times import Duration, to_datetime, to_ms, to_timedelta
from waypost.values import EventRecord, Published

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from waypost.redaction import Redact
    from waypost.views import Observed

T = TypeVar("T")
QueueName = str | Queue[Any]

#: Stands for any value.
ANY: Any = type("Any", (), {"__repr__": lambda self: "ANY"})()
#: Of a body in an error text.
BODY_CHARACTERS_MAX = 200
#: Messages in an error text.
LISTED_MAX = 20


class PublishedMessage(Struct, frozen=True):
    """A message that was published in a test, whatever became of it."""

    id: str
    queue: str
    #: As the handler of its queue gets it: decoded to the type of the handler, if that has one.
    body: Any
    key: str | None
    group: str | None
    priority: int
    headers: Mapping[str, str]
    #: When it was published, and how long after that it is due.
    at: datetime
    delay: timedelta
    type_name: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    #: The key of the schedule that published it.
    schedule: str | None = None


class _Eager(Middleware):
    """Runs handlers after each publish."""

    def __init__(self, run: Callable[[], object], run_async: Callable[[], Awaitable[object]]) -> None:
        self._run = run
        self._run_async = run_async

    def publish(self, outgoing: Outgoing, call_next: Callable[[Outgoing], list[Published]]) -> list[Published]:
        """Run them in the publishing thread."""
        published = call_next(outgoing)
        if _is_visible(outgoing):
            self._run()
        return published

    async def publish_async(
        self, outgoing: Outgoing, call_next: Callable[[Outgoing], Awaitable[list[Published]]]
    ) -> list[Published]:
        """Run them in the publishing task."""
        published = await call_next(outgoing)
        if _is_visible(outgoing):
            await self._run_async()
        return published


def _is_visible(outgoing: Outgoing) -> bool:
    # What is published with a settle or a fire, or in an open transaction, is not there yet.
    return outgoing.via == "publish" and outgoing.options.get("transaction") is None


class _TestPost(BaseClient):
    """What both clients for tests share."""

    __test__ = False

    _worker: InlineWorker
    _clock: ManualClock
    _undo: list[Callable[[], None]]
    _eager: bool

    def _prepare(self, start: datetime | None, eager: bool, options: dict[str, Any]) -> None:
        """Make the clock and the store, before the client itself is made."""
        eager = check_flag("eager", eager, ConfigurationError)
        self._clock = ManualClock(time.time_ns() // 1_000_000 if start is None else check_moment("start", start))
        store = TestStore(self._clock)
        BaseClient.__init__(self, store=store, **options)
        self._session.time = ClockTime(self._clock)
        self._worker = InlineWorker(store)
        self._undo = []
        self._eager = eager
        if eager:
            store.transactions.after_commit = self._run_eagerly
            store.transactions.after_commit_async = self._run_eagerly_async
        self._add(self)

    def _add(self, post: BaseClient) -> None:
        """Run the handlers of this client too."""
        self._worker.clients.append(post)
        if self._eager:
            self._undo.append(begin_test_publishes(post, _Eager(self._run_eagerly, self._run_eagerly_async)))

    def _replace(self, post: BaseClient) -> None:
        if not isinstance(post, BaseClient):
            raise InvalidInput(f"what a TestPost replaces is a Waypost or AsyncWaypost, not a {type(post).__name__}")
        if isinstance(post, _TestPost) or isinstance(post.store, TestStore):
            raise InvalidInput("this client is that of a test already")
        self._worker.store.original = post.store
        self._undo.append(replace_store(post, self._worker.store, ClockTime(self._clock)))
        self._add(post)

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _run_eagerly(self) -> object:
        loop = _Loop()
        try:
            return _run_sync(self._worker.run_due(raises=True), self._worker.store, loop)
        finally:
            loop.close()

    async def _run_eagerly_async(self) -> object:
        return await _run_async(self._worker.run_due(raises=True), self._worker.store)

    @property
    def now(self) -> datetime:
        """The time of this test, in UTC."""
        return to_datetime(self._clock())

    def _target(self, duration: Duration | None, parts: dict[str, float]) -> int:
        if (duration is None) == (not parts):
            raise InvalidInput("say how far: seconds, a timedelta, or keywords as in advance(hours=1)")
        if duration is None:
            try:
                duration = timedelta(**parts)
            except TypeError:
                raise InvalidInput(
                    f"advance takes days, hours, minutes and seconds, not {', '.join(sorted(parts))}"
                ) from None
        return self._clock() + round(check_seconds("duration", duration) * 1000)

    # ---- what was published ------------------------------------------------------------------------------

    def published(self, queue: QueueName | None = None) -> list[PublishedMessage]:
        """Return what was published to a `queue`, or to all, in order: also what is done, dead or cancelled by now.

        What a transaction publishes is there after its commit. Not awaited in either client.
        """
        name = None if queue is None else queue_name(queue)
        types: dict[tuple[str, str | None], Any] = {}
        for handler in (one for post in self._worker.clients for one in handlers_to_test(post)):
            for type_name in handler.types or (None,):
                types[handler.queue, type_name] = handler.as_type
        if queue is not None and queue_type(queue) is not None:
            types = {(queue_name(queue), None): queue_type(queue)}
        store = self._worker.store
        with store.lock:
            events = [event for event in store.log.events if name in (None, event.queue)]
        return [_published_message(event, types) for event in events]

    def assert_published(
        self,
        queue: QueueName,
        body: Any = ANY,
        *,
        count: int | None = None,
        key: str | None = ANY,
        group: str | None = ANY,
        priority: int = ANY,
        delay: Duration = ANY,
        headers: Mapping[str, str] = ANY,
    ) -> list[PublishedMessage]:
        """Fail unless a message like this was published to a `queue`, or exactly `count`; return those that match.

        What is not given matches all. `body` is compared with what was published and with its JSON form; a function of
        the body decides itself. `headers` are those that it has at least. `count=0`: none may match. Not awaited.

            test.assert_published("orders", {"id": 7}, key="order:7", count=1)
        """
        if count is not None:
            check_count("count", count, 0, 2**40)
        wanted = {
            name: value
            for name, value in (
                ("body", body), ("key", key), ("group", group), ("priority", priority), ("delay", delay),
                ("headers", headers),
            )
            if value is not ANY
        }  # fmt: skip
        everything = self.published(queue)
        matching = [message for message in everything if _matches(message, wanted)]
        if (not matching) if count is None else len(matching) != count:
            raise AssertionError(_describe_difference(queue_name(queue), wanted, count, matching, everything))
        return matching


def _published_message(event: EventRecord, types: Mapping[tuple[str, str | None], Any]) -> PublishedMessage:
    """Return what was published, decoded as the handler of its type or of its queue gets it."""
    envelope = codec.open_envelope(event.body or b"")
    as_type = types.get((event.queue, envelope.type_name), types.get((event.queue, None)))
    try:
        body = codec.decode_body(envelope.content_type, envelope.data, as_type)
    except Undecodable:
        body = codec.decode_body(envelope.content_type, envelope.data)
    delay = to_timedelta(max(0, (event.due_ms or event.at_ms) - event.at_ms))
    return PublishedMessage(
        event.message_id or "", event.queue, body, event.key, event.group, event.priority or 0, envelope.headers,
        to_datetime(event.at_ms), delay, envelope.type_name, envelope.correlation_id, envelope.reply_to, event.schedule,
    )  # fmt: skip


def _matches(message: PublishedMessage, wanted: Mapping[str, Any]) -> bool:
    for name, value in wanted.items():
        found = getattr(message, name)
        if name == "body":
            if callable(value) and not isinstance(value, type):
                if not value(found):
                    return False
            elif found != value and _plain(found) != _plain(value):
                return False
        elif name == "headers":
            if any(found.get(header) != text for header, text in value.items()):
                return False
        elif name == "delay":
            seconds = value if isinstance(value, timedelta) else timedelta(seconds=value)
            if found != timedelta(milliseconds=to_ms(seconds)):
                return False
        elif found != value:
            return False
    return True


def _plain(body: Any) -> Any:
    """Return a body as JSON has it, for comparisons of a typed one with a dict."""
    try:
        encoded = codec.encode_body(body, faithful=False)
    except InvalidInput:
        return body  # it could not have been published
    return codec.decode_body(codec.CONTENT_TYPES[encoded.content], encoded.data)


def _describe_difference(
    queue: str,
    wanted: Mapping[str, Any],
    count: int | None,
    matching: list[PublishedMessage],
    everything: list[PublishedMessage],
) -> str:
    condition = ", ".join(f"{name}={value!r}" for name, value in wanted.items()) or "anything"
    expected = "at least one message" if count is None else format_count(count, "message")
    lines = [f"expected {expected} in queue {queue} with {condition}, and {len(matching)} of {len(everything)} match"]
    for number, message in enumerate(everything[:LISTED_MAX], 1):
        mark = "=" if message in matching else " "
        lines.append(f"  {mark} {number}. {_describe_message(message)}")
    if len(everything) > LISTED_MAX:
        lines.append(f"    … and {len(everything) - LISTED_MAX} more")
    return "\n".join(lines)


def _describe_message(message: PublishedMessage) -> str:
    body = repr(message.body)
    text = body if len(body) <= BODY_CHARACTERS_MAX else f"{body[:BODY_CHARACTERS_MAX]}…"
    for name in ("key", "group", "headers"):
        if getattr(message, name):
            text += f" {name}={getattr(message, name)!r}"
    if message.delay:
        text += f" delay={message.delay.total_seconds():g}"
    return text


# ---- the clients ---------------------------------------------------------------------------------------------


class TestPost(_TestPost, Waypost):
    """A `Waypost` for tests: a memory store with a clock of its own, and methods that run handlers in the test.

    The clock begins at `start` (now) and moves by `advance` only. With `eager=True` handlers run at each publish, or at
    the commit of its transaction, and their errors are raised there. `queues`, `strict_queues`, `middleware`, `state`,
    `on_event` and `redact` are those of `Waypost`. `replacing` gives the client of a program this store for the length
    of a test.

    Handlers that block run in the calling thread; async ones on an event loop of this object. Inside a running event
    loop use `AsyncTestPost`.
    """

    __test__ = False

    def __init__(
        self,
        *,
        start: datetime | None = None,
        eager: bool = False,
        queues: Iterable[QueueName] | None = None,
        strict_queues: bool = False,
        middleware: Iterable[Middleware] = (),
        state: object = None,
        on_event: Callable[[Observed], object] | None = None,
        redact: Redact | None = None,
    ) -> None:
        self._loop = _Loop()
        self._prepare(start, eager, {
            "queues": queues, "strict_queues": strict_queues, "middleware": middleware, "state": state,
            "on_event": on_event, "redact": redact,
        })  # fmt: skip

    @classmethod
    @contextmanager
    def replacing(cls, post: BaseClient, *, start: datetime | None = None, eager: bool = False) -> Iterator[Self]:
        """Give a client, sync or async, the store of a new `TestPost` for the length of a `with` block.

        The client stays the same object, with its handlers, schedules, middleware and state: modules that have imported
        it publish to the test. Handlers of relays are not run. Transactions of SQLAlchemy sessions and Django publish
        at their commit. Nothing is sent to the client's own store.

            with TestPost.replacing(shop.post) as test:
                shop.place_order(7)
                test.run_all()
        """
        test = cls(start=start, eager=eager)
        try:
            test._replace(post)
            yield test
        finally:
            test.close()

    def close(self) -> None:
        """Give replaced clients their own stores back, and end the event loop of async handlers."""
        self._restore()
        self._loop.close()
        super().close()

    def run_all(self, *, raises: bool = True) -> list[Handled]:
        """Fire the schedules and run the handlers of all that is due, until nothing is; return the calls.

        The clock stands still: what is due later, also a retry, is left to `advance`. An exception of a handler is
        raised when its message is settled, with a note that names the message; later ones stay in their queues. With
        `raises=False` the run goes on, and the calls have the errors.

            test.run_all()
            [call.error for call in test.run_all(raises=False)]
        """
        check_flag("raises", raises)
        return cast("list[Handled]", self._steps(self._worker.run_due(raises=raises)))

    def advance(self, duration: Duration | None = None, **parts: float) -> None:
        """Move the clock by seconds or a timedelta, or keywords: `advance(hours=1)`. Schedules fire on the way.

        Timers and retries that come due and leases that end are there for the next `run_all`. With `eager=True` the
        handlers run too, each at its time. Without it no run ends on the way, so a `cron` or `every` whose `overlap` is
        `skip` (its default) fires once and skips the later instants: `run_for` fires each.
        """
        target = self._target(duration, parts)
        self._steps(self._worker.run_until(target, raises=True, handlers=self._eager))

    def run_for(self, duration: Duration | None = None, *, raises: bool = True, **parts: float) -> list[Handled]:
        """Move the clock as `advance` does, and run handlers when each message comes due, as a worker would.

        test.run_for(hours=24)      # all timers, retries and schedules of a day
        """
        check_flag("raises", raises)
        target = self._target(duration, parts)
        return cast("list[Handled]", self._steps(self._worker.run_until(target, raises=raises, handlers=True)))

    def _run_eagerly(self) -> object:
        return self._steps(self._worker.run_due(raises=True))

    def _steps(self, steps: Steps) -> Any:
        self._check_usable()
        return _run_sync(steps, self._worker.store, self._loop)


class AsyncTestPost(_TestPost, AsyncWaypost):
    """An `AsyncWaypost` for tests in an event loop: as `TestPost`, with the methods that run handlers awaited.

    Async handlers run in the task of the test, handlers that block in threads. `published` and `assert_published` are
    plain methods: an `await` that is forgotten would make a test pass.
    """

    __test__ = False

    def __init__(
        self,
        *,
        start: datetime | None = None,
        eager: bool = False,
        queues: Iterable[QueueName] | None = None,
        strict_queues: bool = False,
        middleware: Iterable[Middleware] = (),
        state: object = None,
        on_event: Callable[[Observed], object] | None = None,
        redact: Redact | None = None,
    ) -> None:
        self._prepare(start, eager, {
            "queues": queues, "strict_queues": strict_queues, "middleware": middleware, "state": state,
            "on_event": on_event, "redact": redact,
        })  # fmt: skip

    @classmethod
    @asynccontextmanager
    async def replacing(
        cls, post: BaseClient, *, start: datetime | None = None, eager: bool = False
    ) -> AsyncIterator[Self]:
        """Give a client, sync or async, the store of a new `AsyncTestPost` for the length of an `async with` block.

        As `TestPost.replacing`.
        """
        test = cls(start=start, eager=eager)
        try:
            test._replace(post)
            yield test
        finally:
            await test.close()

    async def close(self) -> None:
        """Give replaced clients their own stores back."""
        self._restore()
        await super().close()

    async def run_all(self, *, raises: bool = True) -> list[Handled]:
        """Fire the schedules and run the handlers of all that is due, until nothing is; return the calls.

        As `TestPost.run_all`.
        """
        check_flag("raises", raises)
        return cast("list[Handled]", await self._steps(self._worker.run_due(raises=raises)))

    async def advance(self, duration: Duration | None = None, **parts: float) -> None:
        """Move the clock by seconds or a timedelta, or keywords: `advance(hours=1)`. Schedules fire on the way.

        As `TestPost.advance`.
        """
        target = self._target(duration, parts)
        await self._steps(self._worker.run_until(target, raises=True, handlers=self._eager))

    async def run_for(self, duration: Duration | None = None, *, raises: bool = True, **parts: float) -> list[Handled]:
        """Move the clock as `advance` does, and run handlers when each message comes due, as a worker would."""
        check_flag("raises", raises)
        target = self._target(duration, parts)
        return cast("list[Handled]", await self._steps(self._worker.run_until(target, raises=raises, handlers=True)))

    async def _steps(self, steps: Steps) -> Any:
        self._check_usable()
        return await _run_async(steps, self._worker.store)


# ---- running steps -------------------------------------------------------------------------------------------


class _Loop:
    """The event loop for async handlers of a `TestPost`, made at its first use."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, awaited: Any) -> Any:
        """Run a coroutine to its end."""
        if asyncio._get_running_loop() is not None:
            awaited.close()
            raise ConfigurationError(
                "a TestPost cannot run async handlers inside a running event loop: use AsyncTestPost, as in "
                "`async with AsyncTestPost.replacing(post) as test: await test.run_all()`"
            )
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(awaited)

    def close(self) -> None:
        """Close it, if it was made."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def _run_sync(steps: Generator[Any, Any, T], store: TestStore, loop: _Loop) -> T:
    """Run steps in the calling thread."""

    def run(step: FlowStep | CallStep) -> Any:
        if isinstance(step, CallStep):
            return loop.run(step.call()) if step.handler.is_awaited else step.call()
        if isinstance(step.post, AsyncWaypost):
            # Its publish middleware is awaited.
            return loop.run(drive_async(AsyncMemoryExecutor(store), step.flow))
        return drive(MemoryExecutor(store), step.flow)

    try:
        step = next(steps)
        while True:
            try:
                result = run(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        return cast(T, stop.value)


async def _run_async(steps: Generator[Any, Any, T], store: TestStore) -> T:
    """Run steps in the calling task."""

    async def run(step: FlowStep | CallStep) -> Any:
        if isinstance(step, CallStep):
            return await (step.call() if step.handler.is_awaited else asyncio.to_thread(step.call))
        return await drive_async(AsyncMemoryExecutor(store), step.flow)

    try:
        step = next(steps)
        while True:
            try:
                result = await run(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        return cast(T, stop.value)
