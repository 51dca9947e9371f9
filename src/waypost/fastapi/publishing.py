"""Publishing in the transaction of a request: a dependency beside the application's own session."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Annotated, Any, TypeVar, Unpack, cast, get_origin, overload

from fastapi import Depends, params
from fastapi.requests import HTTPConnection

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
    `Annotated[AsyncSession, Depends(…)]`. FastAPI calls it once for a request and scope, so give both the same one: a
    request whose endpoint has another session of it is refused with `ConfigurationError`. What is published exists if
    and only if that transaction commits. Without `session` it is published at once.

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

    async def in_transaction(*, transaction: Any, request: HTTPConnection | None = None) -> Any:
        if request is not None:
            _check_shared(in_transaction, getattr(request.scope.get("route"), "dependant", None))
        if transaction is None:
            raise InvalidInput("the dependency that gives the session gave None, so there is no transaction to join")
        return made(post, {"transaction": transaction})

    annotations = {"transaction": _annotation_of(session), "request": HTTPConnection}
    in_transaction.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=one) for name, one in annotations.items()]
    )
    in_transaction.__waypost_publisher__ = True  # type: ignore[attr-defined]
    return in_transaction


def _check_shared(publish: Callable[..., Any], route: Any) -> None:
    """Raise `ConfigurationError` if the endpoint's session is not the publisher's, which would be a second transaction.

    FastAPI calls a dependency once for each scope that it is given with.
    """
    found = [] if route is None else list(_list_dependencies(route))
    joined = next((one.dependencies[0] for one in found if one.call is publish), None)
    if joined is None:
        return  # the application has replaced the publisher, as tests do
    others = [one for one in found if one.call is joined.call]
    # Others on the way, as one that looks up the user, may have a session of their own; the endpoint's decides.
    others = [one for one in others if any(one is own for own in route.dependencies)] or others
    if others and not any(_share(one, joined) for one in others):
        name = getattr(joined.call, "__qualname__", repr(joined.call))
        raise ConfigurationError(
            f"publisher(post, session) opens a second session: its {name} has {_describe(joined)}, and that of the "
            f"endpoint {_describe(others[0])}. Give both the same Annotated[..., Depends({name}, ...)]"
        )


def _list_dependencies(dependant: Any) -> Iterator[Any]:
    """Yield all dependencies of a route, but not the sessions of publishers."""
    for one in dependant.dependencies:
        yield one
        if not hasattr(one.call, "__waypost_publisher__"):
            yield from _list_dependencies(one)


def _share(one: Any, other: Any) -> bool:
    return one.use_cache and other.use_cache and _scope_of(one) == _scope_of(other)


def _scope_of(dependant: Any) -> str:
    return dependant.scope or "request"


def _describe(dependant: Any) -> str:
    return f'scope="{_scope_of(dependant)}"' + ("" if dependant.use_cache else ", use_cache=False")


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
