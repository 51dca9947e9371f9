"""`publisher`: messages of a request exist if and only if its transaction commits."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psycopg
import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.fastapi.running import run, serving
from waypost import AsyncWaypost, Waypost
from waypost.errors import ConfigurationError, InvalidInput
from waypost.fastapi import AsyncPublisher, Publisher, WaypostLifespan, publisher
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace

pytestmark = pytest.mark.promise("FACE-4", "BOX-1")


@dataclass
class Shop:
    """A store, and the dependency by which requests get their transaction in the same database."""

    post: AsyncWaypost | Waypost
    reader: Waypost
    open_session: Callable[..., Any]
    close: Callable[[], Any]


def dialect(url: str, driver: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}+{driver}://{rest}"


def make_async_session(url: str, driver: str) -> tuple[Callable[..., Any], Callable[[], Any]]:
    engine = create_async_engine(dialect(url, driver))

    async def open_session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session, session.begin():
            yield session

    return open_session, engine.dispose


def make_session(url: str) -> tuple[Callable[..., Any], Callable[[], Any]]:
    engine = create_engine(dialect(url, "pysqlite" if url.startswith("sqlite") else "psycopg"))

    def open_session() -> Iterator[Session]:
        with Session(engine) as session, session.begin():
            yield session

    return open_session, engine.dispose


def make_psycopg(url: str) -> tuple[Callable[..., Any], Callable[[], Any]]:
    def open_session() -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(url) as connection:
            yield connection

    return open_session, lambda: None


def make_async_psycopg(url: str) -> tuple[Callable[..., Any], Callable[[], Any]]:
    async def open_session() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            yield connection

    return open_session, lambda: None


def make_sqlite3(url: str) -> tuple[Callable[..., Any], Callable[[], Any]]:
    def open_session() -> Iterator[sqlite3.Connection]:
        path = url.removeprefix("sqlite:///")
        with closing(sqlite3.connect(path, timeout=30, check_same_thread=False)) as connection, connection:
            yield connection

    return open_session, lambda: None


KINDS = {
    "async_session_asyncpg": lambda url: make_async_session(url, "asyncpg"),
    "async_session_psycopg": lambda url: make_async_session(url, "psycopg"),
    "async_session_aiosqlite": lambda url: make_async_session(url, "aiosqlite"),
    "async_psycopg": make_async_psycopg,
    "session": make_session,
    "psycopg": make_psycopg,
    "sqlite_session": make_session,
    "sqlite3": make_sqlite3,
}


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    kind: str = request.param
    if "sqlite" in kind:
        url, namespace = f"sqlite:///{tmp_path / 'shop.db'}", "wp"
    else:
        url, namespace = request.getfixturevalue("postgres_url"), fresh_namespace()
        migrate(url, namespace=namespace)
    open_session, close = KINDS[kind](url)
    made = AsyncWaypost if kind.startswith("async") else Waypost
    with Waypost(url, namespace=namespace) as reader:
        reader.ledger("orders")
        yield Shop(made(url, namespace=namespace), reader, open_session, close)


def make_app(shop: Shop) -> FastAPI:
    app = FastAPI(lifespan=WaypostLifespan(shop.post, worker=False))
    session = Annotated[Any, Depends(shop.open_session, scope="function")]
    if isinstance(shop.post, AsyncWaypost):
        give_async = Annotated[AsyncPublisher, Depends(publisher(shop.post, session))]

        @app.post("/orders/{number}")
        async def create_async(number: int, transaction: session, publish: give_async) -> list[str]:
            first = await publish("orders", number, key=f"order:{number}")
            later = await publish.with_options(delay=60).many("orders", [number, number])
            again = await publish.cancel("orders", key=f"order:{number}")
            last = await publish("orders", number)
            if number < 0:
                raise HTTPException(422)
            return [first.status, *(one.status for one in later), again, last.status]

    else:
        give = Annotated[Publisher, Depends(publisher(shop.post, session))]

        @app.post("/orders/{number}")
        def create(number: int, transaction: session, publish: give) -> list[str]:
            first = publish("orders", number, key=f"order:{number}")
            later = publish.with_options(delay=60).many("orders", [number, number])
            again = publish.cancel("orders", key=f"order:{number}")
            last = publish("orders", number)
            if number < 0:
                raise HTTPException(422)
            return [first.status, *(one.status for one in later), again, last.status]

    return app


def test_messages_of_a_request_exist_if_and_only_if_its_transaction_commits(shop: Shop) -> None:
    async def test() -> None:
        async with serving(make_app(shop)) as web:
            assert (await web.post("/orders/-1")).status_code == 422
            answer = await web.post("/orders/7")
            # In scope `function` the commit came before this answer.
            assert answer.json() == ["queued", "delayed", "delayed", "cancelled", "queued"]
        closed = shop.close()
        if closed is not None:
            await closed

    run(test())
    assert [message.body for message in shop.reader.messages("orders")] == [7]
    ledger = shop.reader.ledger("orders")
    assert (ledger.published, ledger.cancelled, ledger.delayed, ledger.balance) == (4, 1, 2, 0)


def test_without_a_session_a_message_is_published_at_once() -> None:
    post = AsyncWaypost("memory://")
    app = FastAPI(lifespan=WaypostLifespan(post, worker=False))

    @app.post("/")
    async def create(publish: Annotated[AsyncPublisher, Depends(publisher(post))]) -> int:
        await publish("orders", 1)
        return (await post.ledger("orders")).ready

    async def test() -> Any:
        async with serving(app) as web:
            return (await web.post("/")).json()

    assert run(test()) == 1


def test_what_is_no_session_is_refused_with_a_reason() -> None:
    post = AsyncWaypost("memory://")
    with pytest.raises(ConfigurationError, match="post= is"):
        publisher(object())  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="session= is a dependency"):
        publisher(post, "session")
    dependency: Any = publisher(post, Depends(lambda: None))

    async def test() -> None:
        with pytest.raises(InvalidInput, match="no transaction to join"):
            await dependency(transaction=None)
        given = await dependency(transaction=object())
        with pytest.raises(InvalidInput, match="transaction= is"):
            await given("orders", 1)

    run(test())
    assert asyncio.iscoroutinefunction(dependency)


def make_counted_app(given: Any, own_session: Any, seen: list[Any], dependencies: Sequence[Any] = ()) -> FastAPI:
    """An application whose endpoint takes a session in one way, and whose publisher is given it in another."""
    post = AsyncWaypost("memory://")
    app, router = FastAPI(lifespan=WaypostLifespan(post, worker=False)), APIRouter()
    dependency: Any = publisher(post, given)

    @router.post("/", dependencies=dependencies)
    async def create(session: own_session, publish: Annotated[AsyncPublisher, Depends(dependency)]) -> None:
        seen.append((session, publish._options["transaction"]))

    app.include_router(router)
    return app


@pytest.mark.parametrize(
    ("scope", "publisher_scope", "shared"),
    [
        ("function", "function", True),
        ("request", "request", True),
        (None, "request", True),
        (None, None, True),
        ("function", None, False),
        ("function", "request", False),
        (None, "function", False),
    ],
)
def test_a_publisher_joins_the_session_of_the_endpoint_or_the_request_is_refused(
    scope: Any, publisher_scope: Any, shared: bool
) -> None:
    opened, seen = list[Any](), list[Any]()

    async def open_session() -> AsyncIterator[object]:
        opened.append(object())
        yield opened[-1]

    own_session = Annotated[Any, Depends(open_session, scope=scope)]
    given = open_session if publisher_scope is None else Depends(open_session, scope=publisher_scope)

    async def test() -> None:
        async with serving(make_counted_app(given, own_session, seen)) as web:
            if shared:
                assert (await web.post("/")).status_code == 200
            else:
                with pytest.raises(ConfigurationError, match=r"opens a second session: .*open_session has scope="):
                    await web.post("/")

    run(test())
    assert seen == ([(opened[0], opened[0])] if shared else [])
    assert len(opened) == (1 if shared else 2)


def test_sessions_of_other_dependencies_do_not_decide_about_the_publisher() -> None:
    opened, seen = list[Any](), list[Any]()

    async def open_session() -> AsyncIterator[object]:
        opened.append(object())
        yield opened[-1]

    async def find_user(session: Annotated[Any, Depends(open_session)]) -> object:
        return session

    own_session = Annotated[Any, Depends(open_session, scope="function")]
    app = make_counted_app(own_session, own_session, seen, [Depends(find_user)])

    async def test() -> None:
        async with serving(app) as web:
            assert (await web.post("/")).status_code == 200

    run(test())
    assert len(opened) == 2
    assert seen == [(opened[1], opened[1])]
