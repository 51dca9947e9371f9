"""The web app: `create_app` makes an ASGI app that serves the API and the pages, alone or mounted in another one."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from waypost import AsyncWaypost
from waypost.checks import show
from waypost.errors import ConfigurationError
from waypost.web import api, pages
from waypost.web.access import Access, Auth, Token
from waypost.web.bulk import BulkRunner
from waypost.web.guard import LOOPBACK_HOSTS, Guard, parse_networks
from waypost.web.lake import check_lake
from waypost.web.problems import PROBLEM_TYPE, Problem
from waypost.web.reading import Place
from waypost.web.service import Service
from waypost.web.sharing import Sharing
from waypost.web.watching import StoreWatch

#: How long a client that the app made itself retries a store that is away: a page says so instead of waiting.
RETRY_BUDGET_SECONDS = 2.0
STORE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,31}")
DEFAULT_NAME = "main"

Store = AsyncWaypost | str


def create_app(
    stores: Store | Mapping[str, Store],
    *,
    secret: str | None = None,
    tokens: Sequence[Token] = (),
    auth: Auth | None = None,
    hosts: Iterable[str] = (),
    trusted_proxies: Iterable[str] = (),
    read_only: bool = False,
    hide_bodies: Iterable[str] = (),
    lake: str | Mapping[str, str] | None = None,
) -> Starlette:
    """Make the web app for one store, or for several by name; each is a URL or an `AsyncWaypost` of yours.

    `secret` is what people and scripts sign in with, for all scopes; `tokens` are further secrets with a name and
    scopes of their own. `auth` recognises users by your own means: `async (request) -> User(name, scopes) | None`.
    Without any of them only clients of this machine are served. `hosts` are the names by which the app is reached,
    besides those of this machine; it answers no other. Headers of proxies (`X-Forwarded-*`) count only from
    `trusted_proxies`, addresses or networks. `read_only` refuses every write. Bodies and headers of queues that match a
    pattern of `hide_bodies` are shown to no one. `lake` is what `waypost pipeline run` fills, a folder or a URI, by the
    name of its store if there are several: it has percentiles for the charts, the last audit and report, and messages
    that a store has forgotten, by their ids.

    The app runs by itself, or mounted below a path in any ASGI app. It closes the clients that it made itself when its
    lifespan ends; yours stay open.
    """
    hosts, trusted_proxies = tuple(hosts), tuple(trusted_proxies)
    named = {DEFAULT_NAME: stores} if isinstance(stores, str | AsyncWaypost) else dict(stores)
    if not named:
        raise ConfigurationError("no store was given: create_app(post), or create_app({'orders': post, …})")
    for name in named:
        if not isinstance(name, str) or STORE_NAME.fullmatch(name) is None:
            raise ConfigurationError(f"the name of a store is a short name as in a URL, not {show(name)}")
    given = [Token("operator", secret)] if secret is not None else []
    foreign = {host.lower().strip("[]") for host in hosts} - LOOPBACK_HOSTS
    is_local_only = not given and not tokens and auth is None
    if is_local_only and (foreign or trusted_proxies):
        raise ConfigurationError(
            f"the app would be open to all clients that reach {', '.join(sorted(foreign)) or 'its proxy'}: give it a "
            "secret, tokens or auth"
        )
    parse_networks(trusted_proxies)
    hidden = tuple(hide_bodies)
    lakes = lakes_of(lake, named)
    places, own, runner = {}, list[AsyncWaypost](), BulkRunner(read_only=read_only)
    for name, store in named.items():
        post = AsyncWaypost(store, retry_budget=RETRY_BUDGET_SECONDS) if isinstance(store, str) else store
        if not isinstance(post, AsyncWaypost):
            raise ConfigurationError(f"a store is a URL or an AsyncWaypost, not {show(post)}")
        if isinstance(store, str):
            own.append(post)
        places[name] = Place(name, post, StoreWatch(post), hidden, lakes.get(name), runner)
        runner.serve(places[name])
    # A read-only server writes nothing, so no other server has to know its CSRF tokens.
    sharing = Sharing([] if read_only and not given and not tokens else [place.post for place in places.values()])
    service = Service(places, Access([*given, *tokens], auth, sharing=sharing), read_only=read_only)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        runner.start(forever=True)
        for place in places.values():
            place.watch.read_in_background()
        yield
        await runner.close()
        for place in places.values():
            await place.watch.close()
        for post in own:
            await post.close()

    app = Starlette(
        routes=[*api.routes(service), *pages.routes(service)],
        middleware=[Middleware(Guard, hosts=hosts, trusted_proxies=trusted_proxies)],
        exception_handlers={HTTPException: answer_http_error},
        lifespan=lifespan,
    )
    app.state.service, app.state.bulk = service, runner
    return app


def lakes_of(lake: str | Mapping[str, str] | None, stores: Mapping[str, Store]) -> dict[str, str]:
    """The lakes by the names of their stores, or a `ConfigurationError`."""
    if lake is None:
        return {}
    if isinstance(lake, str) and len(stores) > 1:
        raise ConfigurationError(f"name the store of the lake {show(lake)}: lake={{{show(next(iter(stores)))}: …}}")
    lakes = dict.fromkeys(stores, lake) if isinstance(lake, str) else dict(lake)
    for name, place in lakes.items():
        if name not in stores:
            raise ConfigurationError(f"there is no store {show(name)} for the lake {show(place)}")
        check_lake(place)
    return lakes


async def answer_http_error(request: Request, error: Exception) -> Response:
    """A path or a method that there is not: a problem document, or a page for a browser."""
    assert isinstance(error, HTTPException)
    text, headers = f"there is no {request.method} {request.url.path}", dict(error.headers or {})
    problem = Problem(error.status_code, "no-such-operation", text, headers=headers)
    if "text/html" in request.headers.get("accept", "") and "/api/" not in request.url.path:
        return pages.draw_problem(request.app.state.service, request, problem)
    return Response(problem.encode(), problem.status, problem.headers, PROBLEM_TYPE)
