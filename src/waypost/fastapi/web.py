"""The web page as routes of an application, behind its own authentication."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from waypost.checks import show
from waypost.client import AsyncWaypost
from waypost.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from waypost.web import User

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
#: Where a forwarded request has its user.
USER = "waypost.user"


class _Forwarded(Response):
    """Answers a request by another ASGI app, which is mounted at the path that the route begins with."""

    def __init__(self, app: ASGIApp, user: object, rest: str) -> None:
        super().__init__()
        self._app = app
        self._user = user
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "").rstrip("/")
        path = scope["path"].removesuffix(self._rest).rstrip("/")
        # Some servers put the root path before the path, others do not.
        mounted = path if f"{path}/".startswith(f"{root}/") else root + path
        inner = {**scope, "root_path": mounted, "path": f"{mounted}/{self._rest}", "path_params": {}, USER: self._user}
        await self._app(inner, receive, send)


def web_routes(
    post: AsyncWaypost | str | Mapping[str, AsyncWaypost | str], *, user: Callable[..., Any], **options: Any
) -> APIRouter:
    """Return the web page and its HTTP API as a router, to be included with a prefix.

    `post` is an `AsyncWaypost`, a URL, or several of them by name. `user` is a dependency of the application that
    decides about each request: it returns a `waypost.web.User` with a name and scopes, or raises an `HTTPException`.
    The other options are those of `waypost.web.create_app`: `hosts` (the names by which the application is reached,
    besides those of this machine), `read_only`, `hide_bodies` and others.

        async def operator(account: Annotated[Account, Depends(current_account)]) -> User:
            if not account.is_admin:
                raise HTTPException(403)
            return User(account.name, frozenset(["admin", "bodies"]))

        app.include_router(web_routes(post, user=operator, hosts=["shop.example.com"]), prefix="/waypost")

    It needs the extra `web` too.
    """
    from waypost.web import User, create_app

    if not callable(user):
        raise ConfigurationError(f"user= is a dependency that returns a waypost.web.User, not {show(user)}")
    if "auth" in options or "secret" in options or "tokens" in options:
        raise ConfigurationError("web_routes() has no auth=, secret= and tokens=: user= decides about all requests")

    async def known_user(request: Request) -> User | None:
        return request.scope.get(USER)

    app = create_app(post, auth=known_user, **options)

    @asynccontextmanager
    async def lifespan(outer: FastAPI) -> AsyncIterator[None]:
        async with app.router.lifespan_context(app):
            yield

    router = APIRouter(lifespan=lifespan, include_in_schema=False)

    # In scope `function` a session of that dependency is not held while a page streams its changes.
    async def serve(request: Request, path: str, found: Annotated[Any, Depends(user, scope="function")]) -> Response:
        if not isinstance(found, User):
            raise ConfigurationError(f"the dependency {user!r} must return a waypost.web.User, not {show(found)}")
        return _Forwarded(app, found, path)

    # The annotations are names of this function, which FastAPI cannot look up.
    serve.__annotations__ = {"request": Request, "path": str, "found": Annotated[Any, Depends(user, scope="function")]}
    router.add_api_route("/{path:path}", serve, methods=METHODS)
    return router
