"""Publishing in the transaction of a request: a dependency beside the application's own session."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable
from typing import Annotated, Any, TypeVar, Unpack, cast, get_origin, overload

from fastapi import Depends, params

from waypost.checks import show
from waypost.client import AsyncWaypost, Waypost
from waypost.client.options import PublishKeywords, PublishManyKeywords, QueueName
from waypost.errors import ConfigurationError, InvalidInput
from waypost.fastapi.background import task_of
from waypost.message import Queue
from waypost.values import CancelStatus, Published

T = TypeVar("T")
P = TypeVar("P", bound="Publisher | AsyncPublisher")


class Publisher:
    """Publishes in the transaction of one request, with a `Waypost`: for endpoints without `async`."""

    def __init__(self, post: Waypost, options: PublishKeywords) -> None:
        self._post = post
        self._options = options

    @overload
    def __call__(self, queue: Queue[T], body: T, **options: Unpack[PublishKeywords]) -> Published: ...
    @overload
    def __call__(self, queue: str, body: object, **options: Unpack[PublishKeywords]) -> Published: ...
    def __call__(self, queue: QueueName, body: Any, **options: Unpack[PublishKeywords]) -> Published:
        """Publish a message; the options are those of `Waypost.publish`."""
        return self._post.publish(queue, body, **cast("PublishKeywords", {**self._options, **options}))

    def many(self, queue: QueueName, bodies: Iterable[Any], **options: Unpack[PublishManyKeywords]) -> list[Published]:
        """Publish a batch; the options are those of `Waypost.publish_many`."""
        return self._post.publish_many(queue, bodies, **cast("PublishManyKeywords", {**self._options, **options}))

    def cancel(self, queue: QueueName | Published, id: str | None = None, *, key: str | None = None) -> CancelStatus:
        """Cancel a message by its id or key, in the same transaction."""
        return self._post.cancel(queue, id, key=key, transaction=self._options.get("transaction"))

    def add_task(self, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> Published:
        """Publish a call of a function that `background_task` decorates."""
        task = task_of(function)
        return self(task.queue, task.encode(args, kwargs))

    def with_options(self, **options: Unpack[PublishKeywords]) -> Publisher:
        """Return a publisher with these options for all that it publishes: `delay`, `key`, `priority` and others."""
        return Publisher(self._post, cast("PublishKeywords", {**self._options, **options}))


class AsyncPublisher:
    """Publishes in the transaction of one request, with an `AsyncWaypost`."""

    def __init__(self, post: AsyncWaypost, options: PublishKeywords) -> None:
        self._post = post
        self._options = options

    @overload
    async def __call__(self, queue: Queue[T], body: T, **options: Unpack[PublishKeywords]) -> Published: ...
    @overload
    async def __call__(self, queue: str, body: object, **options: Unpack[PublishKeywords]) -> Published: ...
    async def __call__(self, queue: QueueName, body: Any, **options: Unpack[PublishKeywords]) -> Published:
        """Publish a message; the options are those of `AsyncWaypost.publish`."""
        return await self._post.publish(queue, body, **cast("PublishKeywords", {**self._options, **options}))

    async def many(
        self, queue: QueueName, bodies: Iterable[Any], **options: Unpack[PublishManyKeywords]
    ) -> list[Published]:
        """Publish a batch; the options are those of `AsyncWaypost.publish_many`."""
        return await self._post.publish_many(queue, bodies, **cast("PublishManyKeywords", {**self._options, **options}))

    async def cancel(
        self, queue: QueueName | Published, id: str | None = None, *, key: str | None = None
    ) -> CancelStatus:
        """Cancel a message by its id or key, in the same transaction."""
        return await self._post.cancel(queue, id, key=key, transaction=self._options.get("transaction"))

    async def add_task(self, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> Published:
        """Publish a call of a function that `background_task` decorates."""
        task = task_of(function)
        return await self(task.queue, task.encode(args, kwargs))

    def with_options(self, **options: Unpack[PublishKeywords]) -> AsyncPublisher:
        """Return a publisher with these options for all that it publishes: `delay`, `key`, `priority` and others."""
        return AsyncPublisher(self._post, cast("PublishKeywords", {**self._options, **options}))


@overload
def publisher(post: AsyncWaypost, session: Any = None) -> Callable[..., Coroutine[Any, Any, AsyncPublisher]]: ...
@overload
def publisher(post: Waypost, session: Any = None) -> Callable[..., Coroutine[Any, Any, Publisher]]: ...
def publisher(post: AsyncWaypost | Waypost, session: Any = None) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a dependency that publishes in the transaction of the request.

    `session` is the dependency that gives the endpoint its session or connection: the function itself, `Depends(…)`, or
    `Annotated[AsyncSession, Depends(…)]`. FastAPI calls it once for a request, so that both are given the same one.
    What is published exists if and only if that transaction commits. Without `session` it is published at once.

        RequestSession = Annotated[AsyncSession, Depends(open_session, scope="function")]
        Publish = Annotated[AsyncPublisher, Depends(publisher(post, RequestSession))]

        @app.post("/orders")
        async def create(order: Order, session: RequestSession, publish: Publish) -> None:
            session.add(order)
            await publish("orders", order.id)

    An `AsyncWaypost` takes what is awaited (`AsyncSession`, `AsyncConnection`), a `Waypost` what blocks (`Session`,
    `Connection`).
    """
    if not isinstance(post, AsyncWaypost | Waypost):
        raise ConfigurationError(f"post= is an AsyncWaypost or a Waypost, not {show(post)}")
    made: Any = AsyncPublisher if isinstance(post, AsyncWaypost) else Publisher
    if session is None:

        async def plain() -> Any:
            return made(post, {})

        return plain

    async def in_transaction(**given: Any) -> Any:
        transaction = given["transaction"]
        if transaction is None:
            raise InvalidInput("the dependency that gives the session gave None, so there is no transaction to join")
        return made(post, {"transaction": transaction})

    parameter = inspect.Parameter("transaction", inspect.Parameter.KEYWORD_ONLY, annotation=_annotation_of(session))
    in_transaction.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    return in_transaction


def _annotation_of(session: Any) -> Any:
    """Return the annotation by which FastAPI fills a parameter with the application's session."""
    if get_origin(session) is Annotated:
        return session
    if isinstance(session, params.Depends):
        return Annotated[Any, session]
    if not callable(session):
        raise ConfigurationError(
            f"session= is a dependency, as open_session or Depends(open_session), not {show(session)}"
        )
    return Annotated[Any, Depends(session)]
