"""Handlers and schedules of a Django project, kept until a worker registers them with its client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, Unpack

from waypost.client import Waypost
from waypost.client.handler_types import HandlerPublish, with_publish
from waypost.client.options import HandlerKeywords, HandlerOptions, QueueName, RuleKeywords
from waypost.client.registry import split_weights
from waypost.django.publishing import publish
from waypost.message import Queue
from waypost.times import Duration
from waypost.worker.handler import HandledQueues

F = TypeVar("F", bound=Callable[..., Any])

#: Each registers one handler or schedule with a client.
_declared: list[Callable[[Waypost], object]] = []


def handler(
    queue: HandledQueues, *, batch: int | None = None, **options: Unpack[HandlerOptions]
) -> Callable[[Callable[..., Any]], Any]:
    """Declare the handler of a `queue`, or of several, with the options of `Waypost.handler`.

    `manage.py waypost_worker` runs it.

    Put it into the module `waypost_handlers` of an application. The function gets a method `publish`, which joins the
    open transaction as `waypost.django.publish` does.

        @handler("orders", concurrency=4)
        def ship(order: dict, message: Message) -> None: ...
    """
    split_weights(queue)

    def declare(function: Callable[..., Any]) -> Any:
        _declared.append(lambda post: post._register_handler(queue, batch, options, None)(function))
        return with_publish(function, HandlerPublish(publish, queue)) if isinstance(queue, str | Queue) else function

    return declare


def cron(
    pattern: str,
    *,
    tz: str = "UTC",
    name: str | None = None,
    queue: QueueName | None = None,
    handler: HandlerKeywords | None = None,
    **rule: Unpack[RuleKeywords],
) -> Callable[[F], F]:
    """Declare a function that runs by a cron `pattern`, with the options of `Waypost.cron`."""

    def declare(function: F) -> F:
        _declared.append(
            lambda post: post.cron(pattern, tz=tz, name=name, queue=queue, handler=handler, **rule)(function)
        )
        return function

    return declare


def every(
    interval: Duration,
    *,
    name: str | None = None,
    queue: QueueName | None = None,
    handler: HandlerKeywords | None = None,
    **rule: Unpack[RuleKeywords],
) -> Callable[[F], F]:
    """Declare a function that runs at an `interval`, with the options of `Waypost.every`."""

    def declare(function: F) -> F:
        _declared.append(lambda post: post.every(interval, name=name, queue=queue, handler=handler, **rule)(function))
        return function

    return declare


def register_declared(post: Waypost) -> None:
    """Register all that was declared with a client."""
    for register in _declared:
        register(post)
