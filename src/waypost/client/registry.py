"""The declarations of an application: queues, handlers, middleware and state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from waypost.checks import check_flag, check_items, show
from waypost.errors import ConfigurationError, UnknownQueue
from waypost.message import Queue, queue_name
from waypost.middleware import Middleware, check_handling, check_middleware
from waypost.worker.handler import HandledQueues, Handler


class Registry:
    """The declared queues, handlers and middleware of one client."""

    __slots__ = ("_alone", "_declared", "_given", "handlers", "middleware", "state", "strict")

    def __init__(
        self,
        *,
        queues: Iterable[str | Queue[Any]] | None,
        strict: bool,
        middleware: Iterable[Middleware],
        state: object,
        awaited: bool,
    ) -> None:
        self.strict = check_flag("strict_queues", strict, ConfigurationError)
        self.state = state
        self.middleware = check_middleware(middleware, awaited=awaited)
        #: In the order of registration. A queue has several if they handle messages of different types.
        self.handlers: list[Handler] = []
        #: Queues whose handler handles all messages, and which can have no other handler.
        self._alone: set[str] = set()
        self._given = queues is not None
        given = () if queues is None else check_items("queues", queues, ConfigurationError)
        self._declared = {queue_name(queue) for queue in given}

    def name(self, queue: str | Queue[Any]) -> str:
        """Return the validated name of a queue. Raises `UnknownQueue` if it is not declared to a strict client."""
        name = queue_name(queue)
        if self.strict and name not in self._declared:
            raise self._unknown(name)
        return name

    def check_handled(self, queue: str | Queue[Any]) -> None:
        """Raise `UnknownQueue` for a handler's queue that is neither a `Queue` nor in a strict client's list."""
        name = queue_name(queue)
        if self.strict and self._given and not isinstance(queue, Queue) and name not in self._declared:
            raise self._unknown(name)

    def of(self, queue: str) -> list[Handler]:
        """Return the handlers of a queue."""
        return [handler for handler in self.handlers if handler.queue == queue]

    def add(self, *handlers: Handler, alone: bool = False) -> None:
        """Register a handler, or those of one function for several queues. `alone`: its queue can have no other."""
        for handler in handlers:
            for known in self.of(handler.queue):
                _check_together(handler, known, alone=alone or handler.queue in self._alone)
        for handler in handlers:
            self.handlers.append(handler)
            self._declared.add(handler.queue)
            if alone:
                self._alone.add(handler.queue)

    def use(self, more: Iterable[Middleware], *, awaited: bool) -> tuple[Middleware, ...]:
        """Add middleware inside of the existing ones, also around handlers that are already registered."""
        added = check_middleware(more, awaited=awaited)
        together = (*self.middleware, *added)
        # All are checked before the first is changed.
        chosen_for = {
            handler: check_handling(together, handler.name, awaited=handler.is_awaited) for handler in self.handlers
        }
        for handler, chosen in chosen_for.items():
            handler.middleware = chosen
        self.middleware = together
        return added

    def _unknown(self, name: str) -> UnknownQueue:
        from difflib import get_close_matches

        close = get_close_matches(name, self._declared)
        hint = f"Did you mean {' or '.join(close)}? If not, declare" if close else "Declare"
        return UnknownQueue(
            f"queue {name} was not declared, and this client is strict. {hint} it with queues=[…] or a handler"
        )


def split_weights(queues: HandledQueues) -> dict[str | Queue[Any], int]:
    """Return the queues of a handler with their weights: one name or handle, a list of them, or a mapping."""
    if isinstance(queues, str | Queue):
        queue_name(queues)
        return {queues: 1}
    several: dict[Any, Any] = dict(queues) if isinstance(queues, Mapping) else {}
    listed: Iterable[Any] = () if isinstance(queues, Mapping) else check_items("queue", queues, ConfigurationError)
    for one in listed:
        queue_name(one)
        if one in several:
            raise ConfigurationError(f"queue {queue_name(one)} is listed twice; for a larger share give it a weight")
        several[one] = 1
    if len({queue_name(one) for one in several}) < max(1, len(several)):
        raise ConfigurationError(f"a handler needs one queue or more, each once, not {show(queues)}")
    return several


def _check_together(handler: Handler, known: Handler, *, alone: bool) -> None:
    """Raise `ConfigurationError` if both handlers of a queue would handle a message, so that none can be chosen."""
    if alone or not (handler.types or known.types):
        more = "" if alone else "; several handlers of a queue take messages of different types: give types="
        raise ConfigurationError(f"queue {handler.queue} has a handler already: {known.name}{more}")
    both = sorted(handler.types & known.types)
    if both:
        raise ConfigurationError(
            f"handlers {known.name} and {handler.name} of queue {handler.queue} both take messages of type {both[0]}"
        )
