"""The result of `@post.handler(…)`: the function itself, with an added `publish`.

The types are for type checkers. A handler must accept the declared type of its queue (`Queue("orders", Order)`); if the
queue is a plain name, the first parameter of the handler gives the type of its bodies. `S` is the result of `publish`
of the client: a `Published`, or a coroutine of one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, overload

from waypost.client.options import PublishKeywords, QueueName
from waypost.message import Message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B")
T = TypeVar("T")
Other = TypeVar("Other")
R_co = TypeVar("R_co", covariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
S_co = TypeVar("S_co", covariant=True)


class HandlerFunction(Protocol[P, R_co, B_contra, S_co]):
    """A registered handler: it can be called like the function itself, and publishes to its queue."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function."""
        ...

    def publish(self, body: B_contra, **options: Unpack[PublishKeywords]) -> S_co:
        """Publish a message to the handler's queue, with the options of the client's `publish`."""
        ...


class TypedDecorator(Protocol[T, S_co]):
    """Takes a handler for a queue of `T`: the body or the message is its first parameter, or the body its second."""

    @overload
    def __call__(self, function: Callable[Concatenate[T, P], R]) -> HandlerFunction[Concatenate[T, P], R, T, S_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Message[T], P], R]
    ) -> HandlerFunction[Concatenate[Message[T], P], R, T, S_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Other, T, P], R]
    ) -> HandlerFunction[Concatenate[Other, T, P], R, T, S_co]: ...
    @overload
    def __call__(self, function: Callable[[], R]) -> HandlerFunction[[], R, T, S_co]: ...


class TypedBatchDecorator(Protocol[T, S_co]):
    """Takes a handler for batches from a queue of `T`."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[list[T], P], R]
    ) -> HandlerFunction[Concatenate[list[T], P], R, T, S_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[list[Message[T]], P], R]
    ) -> HandlerFunction[Concatenate[list[Message[T]], P], R, T, S_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Other, list[T], P], R]
    ) -> HandlerFunction[Concatenate[Other, list[T], P], R, T, S_co]: ...


class PlainDecorator(Protocol[S_co]):
    """Takes a handler for a queue that is given by its name alone."""

    # A first parameter that accepts anything does not give the type of the bodies.
    @overload
    def __call__(
        self, function: Callable[Concatenate[object, P], R]
    ) -> HandlerFunction[Concatenate[Any, P], R, Any, S_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Message[B], P], R]
    ) -> HandlerFunction[Concatenate[Message[B], P], R, B, S_co]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[B, P], R]) -> HandlerFunction[Concatenate[B, P], R, B, S_co]: ...
    @overload
    def __call__(self, function: Callable[[], R]) -> HandlerFunction[[], R, Any, S_co]: ...


class PlainBatchDecorator(Protocol[S_co]):
    """Takes a handler for batches from a queue that is given by its name alone."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[object, P], R]
    ) -> HandlerFunction[Concatenate[Any, P], R, Any, S_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[list[Message[B]], P], R]
    ) -> HandlerFunction[Concatenate[list[Message[B]], P], R, B, S_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[list[B], P], R]
    ) -> HandlerFunction[Concatenate[list[B], P], R, B, S_co]: ...


class TypedJobDecorator(Protocol[T, S_co]):
    """Takes a Spark job for a queue of `T`: the body or the message comes first, or the session and then the body."""

    # No queue has sessions as bodies, for which the first signature and the last would overlap.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[T, P], R]
    ) -> HandlerFunction[Concatenate[T, P], R, T, S_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Message[T], P], R]
    ) -> HandlerFunction[Concatenate[Message[T], P], R, T, S_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[SparkSession, T, P], R]
    ) -> HandlerFunction[Concatenate[SparkSession, T, P], R, T, S_co]: ...
    @overload
    def __call__(self, function: Callable[[SparkSession], R]) -> HandlerFunction[[SparkSession], R, T, S_co]: ...


class PlainJobDecorator(Protocol[S_co]):
    """Takes a Spark job for a queue that is given by its name alone."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[object, P], R]
    ) -> HandlerFunction[Concatenate[Any, P], R, Any, S_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[SparkSession, B, P], R]
    ) -> HandlerFunction[Concatenate[SparkSession, B, P], R, B, S_co]: ...
    @overload
    def __call__(self, function: Callable[[SparkSession], R]) -> HandlerFunction[[SparkSession], R, Any, S_co]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Message[B], P], R]
    ) -> HandlerFunction[Concatenate[Message[B], P], R, B, S_co]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[B, P], R]) -> HandlerFunction[Concatenate[B, P], R, B, S_co]: ...


class HandlerPublish:
    """`publish` of a handler: the client's `publish`, with the handler's queue."""

    __slots__ = ("_publish", "queue")

    def __init__(self, publish: Callable[..., Any], queue: QueueName) -> None:
        self._publish = publish
        self.queue = queue

    def __call__(self, body: object, **options: Unpack[PublishKeywords]) -> Any:
        """Publish a message to the handler's queue, with the options of the client's `publish`."""
        return self._publish(self.queue, body, **options)


def with_publish(function: Callable[..., R], publish: HandlerPublish) -> Callable[..., R]:
    """Return the function with its `publish`; a wrapper if it cannot have an attribute, like a method."""
    if isinstance(getattr(function, "publish", publish), HandlerPublish):
        try:
            function.publish = publish  # type: ignore[attr-defined]
            return function
        except AttributeError:
            pass
    wrapper = partial(function)
    wrapper.publish = publish  # type: ignore[attr-defined]
    return wrapper
