"""Middleware: code around every publish of a client and every handler call of its workers.

    class Timed(Middleware):
        async def handle_async(self, messages, call_next):
            began = time.monotonic()
            try:
                return await call_next()
            finally:
                took.observe(time.monotonic() - began)

    post = AsyncWaypost(url, middleware=[Traced(), Timed()])      # Traced is outermost

Each kind of call has a sync and an async method; override those that you need. A middleware that has only the method
of the other mode is refused when it is given, because it would never be called. `on_event` gets every event after it
happened, and costs nothing where no middleware has it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from msgspec import Struct, structs

from waypost.checks import check_items, show
from waypost.errors import ConfigurationError
from waypost.message import Message
from waypost.values import Published
from waypost.views import Observed

OnEvent = Callable[[Observed], object]


class Outgoing(Struct, frozen=True):
    """A publish: one body, or those of a batch, with the options of the call."""

    queue: str
    #: One for `publish`. For `publish_many` the caller's iterable, which may be a generator: map it, do not consume it.
    bodies: Iterable[Any]
    #: The keywords of the call: `key`, `delay`, `headers`, …
    options: Mapping[str, Any]
    #: The declared type of the queue's bodies, as `Queue("orders", Order)` has it; None if there is none. A middleware
    #: that changes the type of the bodies sets the new type here.
    type: Any = None
    #: The source: a call of `publish` or `publish_many`, the settle of a message (`message.then`), or a
    #: schedule. In the last two cases it is published with the settle or the fire, after the middleware.
    via: Literal["publish", "then", "schedule"] = "publish"

    def with_headers(self, headers: Mapping[str, str]) -> Outgoing:
        """Return the same publish with additional headers."""
        merged = {**(self.options.get("headers") or {}), **headers}
        return structs.replace(self, options={**self.options, "headers": merged})

    def with_trace(self, trace: Mapping[str, str]) -> Outgoing:
        """Return the same publish with this W3C trace context, which is stored in the envelope."""
        return structs.replace(self, options={**self.options, "trace": dict(trace)})


class Middleware:
    """The base class of middleware. A method that is not overridden only calls the next one.

    `call_next` calls the next middleware, and finally the store or the handler. A method may run code before and after
    it, pass a changed `Outgoing`, return another outcome (`Retry`, `Dead`, …) than the handler, or raise: its error is
    handled like an error of the handler or of the publish.
    """

    def publish(self, outgoing: Outgoing, call_next: Callable[[Outgoing], list[Published]]) -> list[Published]:
        """Wrap `publish` and `publish_many` of a `Waypost`, continuations, and fires of its schedules."""
        return call_next(outgoing)

    async def publish_async(
        self, outgoing: Outgoing, call_next: Callable[[Outgoing], Awaitable[list[Published]]]
    ) -> list[Published]:
        """The same for an `AsyncWaypost`."""
        return await call_next(outgoing)

    def handle(self, messages: Sequence[Message[Any]], call_next: Callable[[], Any]) -> Any:
        """Wrap a blocking handler, in its thread. `messages` is one message unless the handler takes batches."""
        return call_next()

    async def handle_async(self, messages: Sequence[Message[Any]], call_next: Callable[[], Awaitable[Any]]) -> Any:
        """Wrap an async handler, or the wait for a handler that runs in a process."""
        return await call_next()

    def on_event(self, event: Observed) -> None:
        """Receive each event that the client's `on_event` receives; never awaited. An exception is logged once."""


def overrides(middleware: Middleware, method: str) -> bool:
    """Return whether it overrides this method."""
    return getattr(type(middleware), method) is not getattr(Middleware, method)


def observed_by(on_event: OnEvent | None, middleware: Iterable[Middleware]) -> OnEvent | None:
    """Return one function that passes events to the client's hook, then to the middleware; None if there is none."""
    hooks: list[OnEvent] = [] if on_event is None else [on_event]
    hooks += [one.on_event for one in middleware if overrides(one, "on_event")]
    if len(hooks) < 2:
        return hooks[0] if hooks else None

    def call_hooks(event: Observed) -> None:
        failed: Exception | None = None
        for hook in hooks:
            try:
                hook(event)
            except Exception as error:
                # The other hooks still run; the caller logs the first failure.
                failed = failed or error
        if failed is not None:
            raise failed

    return call_hooks


def check_middleware(given: Iterable[Middleware], *, awaited: bool) -> tuple[Middleware, ...]:
    """Return the middleware of a client; refuse one without the publish method of this mode."""
    chosen = tuple(check_items("middleware", given, ConfigurationError))
    for one in chosen:
        if not isinstance(one, Middleware):
            raise ConfigurationError(f"a middleware is an instance of waypost.Middleware, not {show(one)}")
        method, other = ("publish_async", "publish") if awaited else ("publish", "publish_async")
        if overrides(one, other) and not overrides(one, method):
            raise ConfigurationError(
                f"{type(one).__name__} has {other} but not {method}, so this client's publishes would never call it"
            )
    return chosen


def check_handling(given: Iterable[Middleware], handler: str, *, awaited: bool) -> tuple[Middleware, ...]:
    """Return the middleware that wraps handlers of this mode; refuse one that only has the method of the other."""
    method, other = ("handle_async", "handle") if awaited else ("handle", "handle_async")
    chosen = []
    for one in given:
        if overrides(one, method):
            chosen.append(one)
        elif overrides(one, other):
            kind = "is awaited (async, or in a process)" if awaited else "blocks"
            raise ConfigurationError(
                f"{type(one).__name__} has {other} but not {method}, and handler {handler} {kind}: it would be skipped"
            )
    return tuple(chosen)


def handled_through(
    middleware: Sequence[Middleware], call: Callable[[Sequence[Message[Any]]], Any], *, awaited: bool
) -> Callable[[Sequence[Message[Any]]], Any]:
    """Return a handler call with the middleware around it."""
    for one in reversed(middleware):
        call = partial(_handle, one.handle_async if awaited else one.handle, call)
    return call


def _handle(
    around: Callable[..., Any], inner: Callable[[Sequence[Message[Any]]], Any], messages: Sequence[Message[Any]]
) -> Any:
    return around(messages, partial(inner, messages))


def published_through(
    middleware: Sequence[Middleware], send: Callable[[Outgoing], Any], *, awaited: bool
) -> Callable[[Outgoing], Any]:
    """Return a publish with the middleware around it."""
    for one in reversed(middleware):
        if awaited and overrides(one, "publish_async"):
            send = partial(_publish, one.publish_async, send)
        elif not awaited and overrides(one, "publish"):
            send = partial(_publish, one.publish, send)
    return send


def _publish(around: Callable[..., Any], inner: Callable[[Outgoing], Any], outgoing: Outgoing) -> Any:
    return around(outgoing, inner)
