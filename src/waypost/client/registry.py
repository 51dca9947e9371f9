"""What an application declares to its client: queues, handlers, middleware and state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from waypost.checks import check_flag, check_items
from waypost.errors import ConfigurationError, UnknownQueue
from waypost.message import Queue, queue_name
from waypost.middleware import Middleware, check_handling, check_middleware
from waypost.worker.handler import Handler


class Registry:
    """The declared queues, handlers and middleware of one client."""

    __slots__ = ("_declared", "_given", "handlers", "middleware", "state", "strict")

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
        self.handlers: dict[str, Handler] = {}
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
        """A handler for this queue is registered. With a handle it declares the queue, or where no list was given."""
        name = queue_name(queue)
        if self.strict and self._given and not isinstance(queue, Queue) and name not in self._declared:
            raise self._unknown(name)

    def add(self, handler: Handler) -> None:
        """Register a handler."""
        known = self.handlers.setdefault(handler.queue, handler)
        if known is not handler:
            raise ConfigurationError(f"queue {handler.queue} has a handler already: {known.name}")
        self._declared.add(handler.queue)

    def use(self, more: Iterable[Middleware], *, awaited: bool) -> tuple[Middleware, ...]:
        """Put more middleware inside of what there is, around handlers too that are registered already."""
        added = check_middleware(more, awaited=awaited)
        together = (*self.middleware, *added)
        # All are checked before the first is changed.
        chosen_for = {
            handler: check_handling(together, handler.name, awaited=handler.is_awaited)
            for handler in self.handlers.values()
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
