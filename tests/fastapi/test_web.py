"""`web_routes`: the web page behind the authentication of the application."""

import re
from typing import Annotated

import pytest
from fastapi import Depends, FastAPI, HTTPException
from fastapi.security import HTTPBasic, HTTPBasicCredentials

from tests.fastapi.running import run, serving
from waypost import AsyncWaypost
from waypost.errors import ConfigurationError
from waypost.fastapi import WaypostLifespan, web_routes
from waypost.web import User

pytestmark = pytest.mark.promise("FACE-4", "FACE-3")
ANN, BOB = ("ann", "secret"), ("bob", "secret")


def operator(given: Annotated[HTTPBasicCredentials, Depends(HTTPBasic())]) -> User:
    """The application's own authentication: Ann is an administrator, Bob reads, no other is let in."""
    scopes = {"ann": ["admin", "bodies"], "bob": ["read"]}.get(given.username)
    if scopes is None or given.password != "secret":
        raise HTTPException(403, "not you")
    return User(given.username, frozenset(scopes))


def make_app(post: AsyncWaypost) -> FastAPI:
    app = FastAPI(lifespan=WaypostLifespan(post, worker=False))

    @app.get("/waypostal")
    async def other() -> str:
        return "not the page"

    app.include_router(web_routes(post, user=operator), prefix="/tools/queues")
    return app


@pytest.mark.parametrize("root", ["", "/api"])
def test_the_page_is_served_to_those_whom_the_application_knows(root: str) -> None:
    post = AsyncWaypost("memory://")

    async def test() -> None:
        async with serving(make_app(post), root) as web:
            await post.publish("orders", {"id": 7})
            assert (await web.get("/tools/queues/")).status_code == 401
            assert (await web.get("/tools/queues/", auth=("eve", "secret"))).status_code == 403
            assert (await web.get("/waypostal")).json() == "not the page"
            start = (await web.get("/tools/queues/", auth=ANN)).headers["location"]
            assert start.startswith(f"{root}/tools/queues/")
            page = await web.get(start.removeprefix(root), auth=ANN)
            assert page.status_code == 200
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert "orders" in page.text
            links = set(re.findall(r'(?:href|src|action)="(/[^"]*)"', page.text))
            assert links
            assert {link for link in links if not link.startswith(f"{root}/tools/queues/")} == set()
            style = next(link for link in links if ".css" in link)
            assert (await web.get(style.removeprefix(root), auth=BOB)).status_code == 200

    run(test())


def test_writes_are_made_in_the_name_of_the_users_of_the_application() -> None:
    post = AsyncWaypost("memory://")
    pause = "/tools/queues/api/v1/stores/main/queues/orders/pause"

    async def test() -> None:
        async with serving(make_app(post)) as web:
            await post.publish("orders", 1)
            for user, status in ((BOB, 403), (ANN, 200)):
                session = await web.get("/tools/queues/api/v1/session", auth=user)
                sent = {"x-csrf-token": session.json()["csrf_token"]}
                assert (await web.post(pause, auth=user, headers=sent)).status_code == status
            assert (await web.post(pause, auth=ANN)).status_code == 403, "it has no CSRF token"
            assert (await post.stats("orders")).paused
            assert [one.user for one in (await post.actions()).actions] == ["ann"]

    run(test())


def test_what_is_no_user_is_refused_with_a_reason() -> None:
    post = AsyncWaypost("memory://")
    with pytest.raises(ConfigurationError, match="user= is a dependency"):
        web_routes(post, user="ann")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="user= decides about all requests"):
        web_routes(post, user=operator, secret="0123456789abcdef")
    app = FastAPI()
    app.include_router(web_routes(post, user=lambda: "ann"), prefix="/waypost")

    async def test() -> None:
        async with serving(app) as web:
            with pytest.raises(ConfigurationError, match=r"must return a waypost\.web\.User"):
                await web.get("/waypost/")

    run(test())
