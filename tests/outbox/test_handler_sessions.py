"""A handler with a session parameter: its writes and the settle of its messages are one transaction."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from tests.fault.proxy import Proxy
from tests.outbox.transaction_kinds import TABLE, dialect
from tests.waiting import until
from waypost import AsyncWaypost, Constant, Dead, Message, Middleware, NoRetry, Waypost
from waypost.errors import ConfigurationError, InvalidInput, LeaseLost
from waypost.outbox import transaction
from waypost.testing.postgres import PostgresServer

SALE = "INSERT INTO shop (n) VALUES (%s)"
#: A retry that a test need not wait for.
SOON = Constant(attempts=5, pause=0.01, jitter=0)
MARKED = text("INSERT INTO shop (n) VALUES (:n)")


@pytest.fixture
def shop(server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    """Return the rows of the user's table."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("TRUNCATE shop")
        yield connection


@pytest.fixture
def engine(server: PostgresServer) -> Iterator[sqlalchemy.Engine]:
    made = create_engine(dialect(server.url, "psycopg"))
    yield made
    made.dispose()


def sold(shop: psycopg.Connection[Any]) -> list[int]:
    return [row[0] for row in shop.execute("SELECT n FROM shop ORDER BY n")]


def fall_behind(shop: psycopg.Connection[Any], namespace: str, id: str) -> None:
    """Change the lease as if another worker had claimed the message."""
    shop.execute(f"UPDATE \"{namespace}_message\" SET token = token + 1, nonce = 'x' WHERE id = %s".encode(), (id,))


def work(server: PostgresServer, namespace: str, register: Callable[[AsyncWaypost], None], count: int = 20) -> Any:
    """Register a handler, let a worker empty the queue, and return the ledger."""

    async def run() -> Any:
        async with AsyncWaypost(server.url, namespace=namespace) as post:
            register(post)
            await post.publish_many("orders", range(count))
            await post.worker().run(until_empty=True, signals=False)
            return await post.ledger("orders")

    return asyncio.run(run())


@pytest.mark.promise("BOX-3")
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("source", ["engine", "maker", "connection"])
def test_an_async_session_is_committed_with_the_settle_and_rolled_back_by_an_error(
    server: PostgresServer, namespace: str, shop: psycopg.Connection[Any], driver: str, source: str
) -> None:
    # Engines belong to the loop they are used on: no connection is kept for another one.
    engine = create_async_engine(dialect(server.url, driver), poolclass=sqlalchemy.NullPool)

    def register(post: AsyncWaypost) -> None:
        if source == "connection":

            @post.handler("orders", engine=engine, retry=NoRetry())
            async def sell_on(body: int, connection: AsyncConnection) -> None:
                await connection.execute(MARKED, {"n": body})
                assert body != 7

        else:
            made: AsyncEngine | async_sessionmaker[AsyncSession] = engine
            made = async_sessionmaker(engine) if source == "maker" else made

            @post.handler("orders", engine=made, retry=NoRetry())
            async def sell(body: int, session: AsyncSession) -> None:
                await session.execute(MARKED, {"n": body})
                assert body != 7

    ledger = work(server, namespace, register)
    assert sold(shop) == [n for n in range(20) if n != 7]
    assert (ledger.done, ledger.dead, ledger.balance, ledger.unexplained) == (19, 1, 0, 0)


class Shop(Session):
    """A session with a method of the application, as SQLModel has one."""

    def sell(self, n: int) -> None:
        self.execute(MARKED, {"n": n})


class AsyncShop(AsyncSession):
    async def sell(self, n: int) -> None:
        await self.execute(MARKED, {"n": n})


@pytest.mark.promise("BOX-3")
def test_a_handler_gets_the_class_of_session_that_its_parameter_names(
    server: PostgresServer, engine: sqlalchemy.Engine, namespace: str, shop: psycopg.Connection[Any]
) -> None:
    with Waypost(client=engine, namespace=namespace) as post:

        @post.handler("orders")
        def sell(body: int, session: Shop) -> None:
            session.sell(body)

        post.publish("orders", 1)
        post.worker().run(until_empty=True)
    async_engine = create_async_engine(dialect(server.url, "asyncpg"), poolclass=sqlalchemy.NullPool)

    def register(post: AsyncWaypost) -> None:
        @post.handler("orders", engine=async_engine)
        async def sell_async(body: int, session: AsyncShop) -> None:
            await session.sell(10 + body)

    work(server, namespace, register, count=2)
    assert sold(shop) == [1, 10, 11]


@pytest.mark.promise("BOX-3")
def test_a_sync_session_is_given_to_a_sync_handler(
    engine: sqlalchemy.Engine, namespace: str, shop: psycopg.Connection[Any]
) -> None:
    with Waypost(client=engine, namespace=namespace) as post:

        @post.handler("orders")
        def sell(session: Session, body: int) -> None:
            session.execute(MARKED, {"n": body})

        @post.handler("more", engine=sessionmaker(engine))
        def sell_more(body: int, message: Message[int], session: Session) -> None:
            session.execute(MARKED, {"n": body + message.priority})

        post.publish_many("orders", range(10))
        post.publish("more", 100)
        post.worker().run(until_empty=True)
        assert sold(shop) == [*range(10), 105]
        assert (post.ledger("orders").done, post.ledger("more").done) == (10, 1)


@pytest.mark.promise("BOX-3")
def test_without_an_engine_the_session_is_a_driver_connection(
    server: PostgresServer, namespace: str, shop: psycopg.Connection[Any]
) -> None:
    def register(post: AsyncWaypost) -> None:
        @post.handler("orders")
        async def sell(body: int, connection: psycopg.AsyncConnection[Any]) -> None:
            await connection.execute(SALE, (body,))

    assert work(server, namespace, register).done == 20

    def register_blocking(post: AsyncWaypost) -> None:
        @post.handler("orders")
        def sell(body: int, connection: psycopg.Connection[Any]) -> None:
            connection.execute(SALE, (body,))

    assert work(server, namespace, register_blocking).done == 40
    assert sold(shop) == sorted([*range(20)] * 2)


@pytest.mark.promise("BOX-3")
def test_a_sqlite_store_lends_its_connection(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as file, Waypost(f"sqlite:///{path}") as post:
        file.execute(TABLE)

        @post.handler("orders", retry=NoRetry())
        def sell(body: int, connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO shop (n) VALUES (?)", (body,))
            assert body != 3

        post.publish_many("orders", range(5))
        post.worker().run(until_empty=True)
        assert file.execute("SELECT n FROM shop ORDER BY n").fetchall() == [(0,), (1,), (2,), (4,)]
        assert (post.ledger("orders").done, post.ledger("orders").dead) == (4, 1)


@pytest.mark.promise("BOX-3")
def test_a_lost_lease_rolls_the_session_back(
    server: PostgresServer, namespace: str, shop: psycopg.Connection[Any], engine: sqlalchemy.Engine
) -> None:
    with Waypost(server.url, namespace=namespace) as post:
        tries: list[int] = []

        @post.handler("orders", engine=engine)
        def sell(body: int, message: Message[int], session: Session) -> None:
            session.execute(MARKED, {"n": len(tries)})
            tries.append(body)
            if len(tries) == 1:
                fall_behind(shop, namespace, message.id)

        post.configure("orders", lease=0.5)
        post.publish("orders", 1)
        with post.worker():
            _until(lambda: post.ledger("orders").done == 1)
        assert sold(shop) == [1]
        assert len(tries) == 2


@pytest.mark.promise("BOX-3")
@pytest.mark.parametrize("source", ["engine", "client"])
def test_writes_whose_commit_was_not_confirmed_happen_once(
    server: PostgresServer, namespace: str, shop: psycopg.Connection[Any], source: str
) -> None:
    """The worker cannot know that it was committed: its settle as a failure finds that the message is done."""
    with Proxy(server.port) as proxy:
        url = server.url.replace(f":{server.port}/", f":{proxy.port}/")
        engine = create_engine(dialect(url, "psycopg"))
        with Waypost(server.url if source == "engine" else url, namespace=namespace) as post:

            def write(body: int) -> str:
                if body == 1:
                    proxy.drop_replies(1, to=b"COMMIT")
                return f"INSERT INTO shop (n) VALUES ({body:d})"

            if source == "engine":

                @post.handler("orders", engine=engine, retry=SOON)
                def sell(body: int, session: Session) -> None:
                    session.execute(text(write(body)))

            else:

                @post.handler("orders", retry=SOON)
                def sell_directly(body: int, connection: psycopg.Connection[Any]) -> None:
                    connection.execute(write(body).encode())

            post.publish_many("orders", [1, 2])
            with post.worker():
                until(lambda: post.ledger("orders").done == 2, "both")
            assert proxy.dropped == 1
            assert post.ledger("orders").retried == 0
        engine.dispose()
    assert sold(shop) == [1, 2]


@pytest.mark.promise("BOX-3", "LEASE-8")
def test_the_outcome_of_a_handler_is_a_part_of_its_transaction(
    engine: sqlalchemy.Engine, namespace: str, shop: psycopg.Connection[Any]
) -> None:
    around: list[str] = []

    class Around(Middleware):
        def handle(self, message: Any, call: Any) -> Any:
            around.append("before")
            result = call()
            around.append("after")
            return result

    with Waypost(client=engine, namespace=namespace, middleware=[Around()]) as post:

        @post.handler("orders", result_ttl=60)
        def sell(body: int, session: Session) -> Any:
            session.execute(MARKED, {"n": body})
            return Dead("fraud") if body == 2 else {"sold": body}

        first = post.publish("orders", 1)
        post.publish("orders", 2)
        post.worker().run(until_empty=True)
        assert sold(shop) == [1, 2]
        assert post.result("orders", first.id) == {"sold": 1}
        assert [letter.reason for letter in post.dead_letters("orders")] == ["fraud"]
        assert sorted(around) == ["after", "after", "before", "before"]


@pytest.mark.promise("BOX-3", "LEASE-8")
def test_a_batch_is_settled_in_one_transaction(
    engine: sqlalchemy.Engine, namespace: str, shop: psycopg.Connection[Any]
) -> None:
    calls: list[list[int]] = []
    with Waypost(client=engine, namespace=namespace) as post:

        @post.handler("orders", batch=10, concurrency=1)
        def sell(messages: list[Message[int]], session: Session) -> None:
            calls.append([message.body for message in messages])
            session.execute(MARKED, [{"n": message.body} for message in messages])
            if len(calls) == 1:
                fall_behind(shop, namespace, messages[3].id)

        post.configure("orders", lease=1)
        post.publish_many("orders", range(10))
        with post.worker():
            _until(lambda: post.ledger("orders").done == 10)
        ledger = post.ledger("orders")
    assert sold(shop) == list(range(10))
    assert calls[0] == list(range(10))
    # The failure of one used no attempt of the others.
    assert (ledger.retried, ledger.snoozed, ledger.unexplained) == (0, 9, 0)
    assert len(shop.execute("SELECT DISTINCT xmin::text FROM shop").fetchall()) == len(calls) - 1


@pytest.mark.promise("BOX-3")
def test_received_messages_can_be_settled_together(post: Waypost, shop: psycopg.Connection[Any]) -> None:
    post.publish_many("orders", range(4))
    with post.receive("orders") as one, post.receive("orders") as two:
        assert one is not None
        assert two is not None
        with transaction([one, two]) as connection:
            connection.execute(SALE, (one.body,))
            connection.execute(SALE, (two.body,))
            two.dead("fraud")
        assert (one.settled, two.settled) == ("done", "dead")
    assert sold(shop) == [0, 1]

    def be_late() -> None:
        with post.receive("orders") as late, post.receive("orders") as other:
            assert late is not None
            assert other is not None
            with transaction([late, other]) as connection:
                connection.execute(SALE, (2,))
                fall_behind(shop, post.store.namespace, late.id)

    with pytest.raises(LeaseLost):
        be_late()
    assert sold(shop) == [0, 1]
    assert post.ledger("orders").snoozed == 1


@pytest.mark.promise("BOX-3")
def test_messages_that_cannot_be_settled_together_are_refused(
    post: Waypost, server: PostgresServer, namespace: str
) -> None:
    post.publish("orders", 1)
    post.publish("more", 2)
    with (
        Waypost(server.url, namespace=namespace) as other,
        post.receive("orders") as one,
        other.receive("more") as two,
    ):
        assert one is not None
        assert two is not None
        for messages, match in (([], "at least one"), ([one, two], "claimed by one client"), ([one, one], "twice")):
            with pytest.raises(InvalidInput, match=match):
                transaction(messages)


@pytest.mark.promise("BOX-3", "LEASE-7")
def test_at_most_once_has_a_session_and_nothing_to_settle(
    server: PostgresServer, namespace: str, shop: psycopg.Connection[Any]
) -> None:
    with Waypost(server.url, namespace=namespace) as post:
        post.configure("orders", lease=None)

        @post.handler("orders")
        def sell(body: int, connection: psycopg.Connection[Any]) -> None:
            connection.execute(SALE, (body,))
            assert body != 1

        post.publish_many("orders", range(3))
        post.worker().run(until_empty=True)
        assert (post.ledger("orders").done, sold(shop)) == (3, [0, 2])


@pytest.mark.promise("BOX-3")
def test_an_impossible_session_is_refused_when_the_handler_is_registered(
    server: PostgresServer, namespace: str, engine: sqlalchemy.Engine, tmp_path: Path
) -> None:
    def blocking(body: int, session: Session) -> None: ...
    def driver(body: int, session: psycopg.Connection[Any]) -> None: ...
    def plain(body: int) -> None: ...
    async def awaited(body: int, session: AsyncSession) -> None: ...
    async def mixed(body: int, session: Session) -> None: ...

    post = Waypost(server.url, namespace=namespace)
    file = Waypost(f"sqlite:///{tmp_path / 'a.db'}")
    memory = Waypost("memory://")
    on_engine = Waypost(client=engine, namespace=namespace)
    cases: list[tuple[Waypost, Callable[..., Any], dict[str, Any], str]] = [
        (post, blocking, {}, "engine=…, or make the client with client=engine"),
        (post, awaited, {"engine": engine}, "does not make"),
        (post, mixed, {"engine": engine}, "both must be sync or both async"),
        (post, driver, {"engine": engine}, "use a Session or Connection of SQLAlchemy"),
        (on_engine, driver, {}, "use a Session or Connection of SQLAlchemy"),
        (post, blocking, {"engine": 3}, "not a int"),
        (post, plain, {"engine": engine}, "no parameter for a session"),
        (post, blocking, {"engine": engine, "manual": True}, "by hand"),
        (file, driver, {}, "which a sqlite store does not have"),
        (memory, driver, {}, "not in your database"),
    ]
    for client, function, options, match in cases:
        with pytest.raises(ConfigurationError, match=match):
            client.handler("orders", **options)(function)


def _until(condition: Callable[[], bool]) -> None:
    from tests.waiting import until

    until(condition)
