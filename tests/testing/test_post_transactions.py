"""What a program publishes in its own transaction is in the store of a `TestPost` after the commit."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from waypost import NoRetry, Waypost
from waypost.errors import ConfigurationError
from waypost.testing import TestPost

pytestmark = pytest.mark.promise("FACE-7")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY)"))
    yield engine
    engine.dispose()


@pytest.fixture
def post(tmp_path: Path) -> Waypost:
    return Waypost(f"sqlite:///{tmp_path / 'shop.db'}")


def count_orders(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM orders")).scalar_one())


def test_a_message_is_there_after_the_commit(engine: Engine, post: Waypost) -> None:
    with TestPost.replacing(post) as test, Session(engine) as session:
        session.execute(text("INSERT INTO orders VALUES (7)"))
        published = post.publish("orders", {"id": 7}, key="order:7", transaction=session)
        assert published.status == "queued"
        assert post.publish("orders", {"id": 8}, key="order:7", transaction=session).status == "duplicate"
        test.assert_published("orders", count=0)
        session.commit()
        (message,) = test.assert_published("orders", {"id": 7}, count=1)
        assert message.id == published.id
        post.publish("orders", {"id": 9}, transaction=session)
        session.commit()
        test.assert_published("orders", count=2)


def test_nothing_is_there_after_a_rollback(engine: Engine, post: Waypost) -> None:
    with TestPost.replacing(post) as test:
        with Session(engine) as session:
            post.publish("orders", {"id": 7}, transaction=session)
            session.rollback()
        assert test.published() == []
        assert test.ledger("orders").published == 0


def test_a_publish_in_a_transaction_works_after_a_day(engine: Engine, post: Waypost) -> None:
    with TestPost.replacing(post) as test:
        post.publish("orders", {"id": 1})
        test.advance(days=1)
        with Session(engine) as session, session.begin():
            post.publish("orders", {"id": 2}, transaction=session)
        test.assert_published("orders", count=2)


def test_eager_handlers_wait_for_the_commit(engine: Engine, post: Waypost) -> None:
    done: list[Any] = []
    post.handler("orders")(done.append)
    with TestPost.replacing(post, eager=True) as test, Session(engine) as session:
        post.publish("orders", 1, transaction=session)
        assert done == []
        session.commit()
        assert done == [1]
        assert test.run_all() == []


def test_an_error_of_an_eager_handler_is_raised_after_the_commit(engine: Engine, post: Waypost) -> None:
    @post.handler("orders", retry=NoRetry())
    def charge(order: int) -> None:
        raise ValueError("no money")

    with TestPost.replacing(post, eager=True) as test, Session(engine) as session:
        session.execute(text("INSERT INTO orders VALUES (7)"))
        post.publish("orders", 7, transaction=session)
        with pytest.raises(ValueError, match="no money"):
            session.commit()
        assert session.execute(text("SELECT count(*) FROM orders")).scalar() == 1
        assert test.ledger("orders").dead == 1


def test_nothing_is_there_of_a_session_that_is_closed(engine: Engine, post: Waypost) -> None:
    with TestPost.replacing(post) as test, Session(engine) as session:
        session.execute(text("SELECT 1"))
        post.publish("orders", 1, transaction=session)
        session.close()
        post.publish("orders", 2, transaction=session)
        session.commit()
        assert [message.body for message in test.published("orders")] == [2]


def test_nothing_is_there_of_a_savepoint_that_is_rolled_back(engine: Engine, post: Waypost) -> None:
    def insert(session: Session, id: int) -> None:
        session.execute(text("INSERT INTO orders VALUES (:id)"), {"id": id})

    with TestPost.replacing(post) as test, Session(engine) as session:
        insert(session, 1)
        outer = session.begin_nested()
        post.publish("orders", 1, key="order:1", transaction=session)  # the first of the session, in a savepoint
        outer.rollback()
        assert post.publish("orders", 2, key="order:1", transaction=session).status == "queued"
        with session.begin_nested():
            post.publish("orders", 3, transaction=session)
            inner = session.begin_nested()
            post.publish("orders", 4, transaction=session)
            inner.rollback()
        session.commit()
        assert [message.body for message in test.published("orders")] == [2, 3]
        insert(session, 2)
        with session.begin_nested() as outer:
            post.publish("orders", 5, transaction=session)
            session.begin_nested()
            post.publish("orders", 6, transaction=session)
            outer.rollback()
        post.publish("orders", 7, transaction=session)
        session.commit()
        assert [message.body for message in test.published("orders")] == [2, 3, 7]


def test_a_handler_with_a_session_settles_at_its_commit(engine: Engine, post: Waypost) -> None:
    @post.handler("orders", engine=sessionmaker(engine), retry=NoRetry())
    def store(order: int, session: Session) -> None:
        session.execute(text("INSERT INTO orders VALUES (:id)"), {"id": order})

    with TestPost.replacing(post) as test:
        post.publish("orders", 7)
        assert [call.outcome for call in test.run_all()] == ["done"]
        assert test.ledger("orders").done == 1
        post.publish("orders", 7)  # the same primary key
        assert [call.outcome for call in test.run_all(raises=False)] == ["dead"]
    assert count_orders(engine) == 1


def test_a_store_outside_of_the_database_is_refused_as_in_production(engine: Engine) -> None:
    post = Waypost("valkey://db.example.com")
    with (
        TestPost.replacing(post),
        Session(engine) as session,
        pytest.raises(ConfigurationError, match="a valkey store is not in your database"),
    ):
        post.publish("orders", 1, transaction=session)


def test_a_connection_that_does_not_report_its_commit_is_refused(tmp_path: Path, post: Waypost) -> None:
    connection = sqlite3.connect(tmp_path / "shop.db")
    with TestPost.replacing(post), pytest.raises(ConfigurationError, match="does not report its commit"):
        post.publish("orders", 1, transaction=connection)
    connection.close()


def test_an_async_session_of_sqlite_publishes_at_its_commit(tmp_path: Path) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    from waypost import AsyncWaypost
    from waypost.testing import AsyncTestPost

    post = AsyncWaypost(f"sqlite:///{tmp_path / 'shop.db'}")

    async def check() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
        async with AsyncTestPost.replacing(post) as test, AsyncSession(engine) as session:
            await post.publish("orders", {"id": 7}, transaction=session)
            assert test.published() == []
            await session.commit()
            test.assert_published("orders", {"id": 7}, count=1)
        await engine.dispose()

    asyncio.run(check())


def test_eager_handlers_run_in_the_task_of_an_async_commit(tmp_path: Path) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    from waypost import AsyncWaypost
    from waypost.testing import AsyncTestPost

    post = AsyncWaypost(f"sqlite:///{tmp_path / 'shop.db'}")
    done: list[Any] = []

    @post.handler("orders")
    async def charge(order: int) -> None:
        done.append((order, asyncio.get_running_loop()))

    async def check() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
        async with AsyncTestPost.replacing(post, eager=True), AsyncSession(engine) as session:
            await post.publish("orders", 7, transaction=session)
            assert done == []
            await session.commit()
            assert done == [(7, asyncio.get_running_loop())]
        await engine.dispose()

    asyncio.run(check())


def test_an_async_session_of_postgresql_publishes_at_its_commit(waypost_postgres_url: str) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    from waypost import AsyncWaypost
    from waypost.testing import AsyncTestPost

    post = AsyncWaypost(waypost_postgres_url)

    async def check() -> None:
        engine = create_async_engine(waypost_postgres_url.replace("postgresql://", "postgresql+psycopg://", 1))
        async with AsyncTestPost.replacing(post) as test:
            async with AsyncSession(engine) as session:
                await post.publish("orders", {"id": 7}, transaction=session)
                assert test.published() == []
                await session.commit()
                await post.publish("orders", {"id": 8}, transaction=session)
                await session.rollback()
            test.assert_published("orders", {"id": 7}, count=1)
            assert len(test.published()) == 1
        await engine.dispose()

    asyncio.run(check())
