"""Objects that cannot carry a message are refused by name before anything is sent; and when wake-ups are sent."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from tests.outbox.transaction_kinds import dialect
from waypost import AsyncWaypost, Middleware, Published, Waypost
from waypost.errors import ConfigurationError, InvalidInput, WaypostError
from waypost.middleware import Outgoing
from waypost.store.postgres import migrate
from waypost.store.postgres.schema import VERSION
from waypost.testing.postgres import PostgresServer


class Base(DeclarativeBase):
    pass


class Sale(Base):
    __tablename__ = "shop"
    n: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def other_database(server: PostgresServer, namespace: str) -> Iterator[str]:
    """Another database of the same server, with tables of the same names."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS other_shop")
        connection.execute("CREATE DATABASE other_shop")
    url = server.url.rpartition("/")[0] + "/other_shop"
    migrate(url, namespace=namespace)
    yield url
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP DATABASE other_shop WITH (FORCE)")


@pytest.mark.promise("BOX-1")
def test_another_database_is_refused_and_the_transaction_is_not_aborted(
    post: Waypost, other_database: str, namespace: str
) -> None:
    with psycopg.connect(other_database) as elsewhere:
        elsewhere.execute("CREATE TABLE mine (n int)")
        with pytest.raises(ConfigurationError, match="another database"):
            post.publish("orders", 1, transaction=elsewhere)
        elsewhere.execute("INSERT INTO mine VALUES (1)")
    with Waypost(other_database, namespace=namespace) as other:
        assert other.ledger("orders").published == 0


@pytest.mark.promise("BOX-1")
def test_a_connection_that_commits_each_statement_is_refused(post: Waypost, server: PostgresServer) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        with pytest.raises(InvalidInput, match="commits each statement"):
            post.publish("orders", 1, transaction=connection)
        with connection.transaction():
            assert post.publish("orders", 2, transaction=connection).status == "queued"
    for driver in ("psycopg", "psycopg2"):
        engine = create_engine(dialect(server.url, driver), isolation_level="AUTOCOMMIT")
        with engine.connect() as alone, pytest.raises(InvalidInput, match="commits each statement"):
            post.publish("orders", 3, transaction=alone)
        engine.dispose()
    assert post.ledger("orders").published == 1


@pytest.mark.promise("BOX-1")
def test_an_async_connection_that_commits_each_statement_is_refused(server: PostgresServer, namespace: str) -> None:
    import asyncpg

    async def refuse() -> int:
        async with AsyncWaypost(server.url, namespace=namespace) as post:
            connection = await asyncpg.connect(server.url)
            with pytest.raises(InvalidInput, match="transaction"):
                await post.publish("orders", 1, transaction=connection)
            await connection.close()
            for driver in ("psycopg", "asyncpg"):
                engine = create_async_engine(dialect(server.url, driver), isolation_level="AUTOCOMMIT")
                async with engine.connect() as alone:
                    with pytest.raises(InvalidInput, match="commits each statement"):
                        await post.publish("orders", 1, transaction=alone)
                await engine.dispose()
            return (await post.ledger("orders")).published

    assert asyncio.run(refuse()) == 0


@pytest.mark.promise("BOX-1")
def test_django_outside_of_atomic_is_refused(post: Waypost, server: PostgresServer) -> None:
    from tests.outbox.transaction_kinds import open_kind

    with open_kind("django", server.url, post.store.namespace):
        from django.db import connection, transaction

        with pytest.raises(InvalidInput, match="atomic"):
            post.publish("orders", 1, transaction=connection)
        with transaction.atomic():
            post.publish("orders", 2, transaction=connection)
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                post.publish("orders", 1 // 0, transaction=connection)
    assert post.ledger("orders").published == 1


@pytest.mark.promise("BOX-1")
def test_a_savepoint_that_is_rolled_back_publishes_nothing(post: Waypost, server: PostgresServer) -> None:
    with psycopg.connect(server.url) as connection:
        post.publish("orders", 1, transaction=connection)
        with connection.transaction(force_rollback=True):
            post.publish("orders", 2, transaction=connection)
        post.publish("orders", 3, transaction=connection)
    assert [message.body for message in post.messages("orders")] == [1, 3]


@pytest.mark.promise("BOX-1")
@pytest.mark.parametrize("wrong", [3, "session", None])
def test_an_object_that_is_no_transaction_is_refused_by_name(
    post: Waypost, server: PostgresServer, wrong: object
) -> None:
    if wrong is None:
        engine = create_engine(dialect(server.url, "psycopg"))
        with pytest.raises(InvalidInput, match="engine"):
            post.publish("orders", 1, transaction=engine)
        engine.dispose()
    else:
        with pytest.raises(InvalidInput, match=type(wrong).__name__):
            post.publish("orders", 1, transaction=wrong)
    assert post.ledger("orders").published == 0


@pytest.mark.promise("BOX-1")
def test_the_sync_client_refuses_async_transactions_and_the_reverse(
    post: Waypost, server: PostgresServer, namespace: str
) -> None:
    async def mix() -> None:
        async with AsyncWaypost(server.url, namespace=namespace) as awaited:
            with psycopg.connect(server.url) as blocking, pytest.raises(InvalidInput, match="block the event loop"):
                await awaited.publish("orders", 1, transaction=blocking)
            async with await psycopg.AsyncConnection.connect(server.url) as connection:
                with pytest.raises(InvalidInput, match="is async"):
                    post.publish("orders", 1, transaction=connection)

    asyncio.run(mix())


@pytest.mark.promise("BOX-1")
def test_nothing_of_a_session_is_flushed(post: Waypost, server: PostgresServer) -> None:
    engine = create_engine(dialect(server.url, "psycopg"))
    sessions = scoped_session(sessionmaker(engine))
    with Session(engine) as session, session.begin():
        session.add(Sale(n=77))
        post.publish("orders", 1, transaction=session)
        assert [type(one) for one in session.new] == [Sale]
        session.expunge_all()
    sessions.execute(text("SELECT 1"))
    post.publish("orders", 2, transaction=sessions)
    sessions.commit()
    sessions.remove()
    engine.dispose()
    assert post.ledger("orders").published == 2


@pytest.mark.promise("BOX-1")
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_async_scoped_session_carries_messages(server: PostgresServer, namespace: str, driver: str) -> None:
    async def publish() -> list[Any]:
        engine = create_async_engine(dialect(server.url, driver))
        sessions = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
        async with AsyncWaypost(server.url, namespace=namespace) as post:
            for body in (1, 2):
                await post.publish("orders", body, transaction=sessions)
                await sessions.commit()
            await post.publish("orders", 3, transaction=sessions)
            await sessions.remove()
            bodies = [message.body async for message in post.messages("orders")]
        await engine.dispose()
        return bodies

    assert asyncio.run(publish()) == [1, 2]


@pytest.mark.promise("BOX-1")
def test_a_connection_of_aiosqlite_is_refused_by_a_store_on_a_server(
    server: PostgresServer, namespace: str, tmp_path: Path
) -> None:
    import aiosqlite

    async def refuse() -> int:
        async with AsyncWaypost(server.url, namespace=namespace) as post:
            async with aiosqlite.connect(tmp_path / "shop.db") as file:
                with pytest.raises(ConfigurationError, match="another database"):
                    await post.publish("orders", 1, transaction=file)
            engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
            async with AsyncSession(engine) as session:
                with pytest.raises(ConfigurationError, match="another database"):
                    await post.publish("orders", 1, transaction=session)
            await engine.dispose()
            return (await post.ledger("orders")).published

    assert asyncio.run(refuse()) == 0


@pytest.mark.promise("BOX-1")
def test_a_connection_without_an_encoding_carries_messages(post: Waypost, server: PostgresServer) -> None:
    with psycopg.connect(server.url, client_encoding="SQL_ASCII") as connection:
        assert post.publish("orders", "é", key="é", transaction=connection).status == "queued"
    assert [(message.body, message.key) for message in post.messages("orders")] == [("é", "é")]


@pytest.mark.promise("BOX-1")
def test_the_row_factory_of_the_caller_does_not_matter(post: Waypost, server: PostgresServer) -> None:
    with psycopg.connect(server.url, row_factory=dict_row) as connection:
        connection.cursor_factory = psycopg.ClientCursor
        assert post.publish("orders", 1, key="k", transaction=connection).status == "queued"
        assert post.publish("orders", 1, key="k", transaction=connection).status == "duplicate"


@pytest.mark.promise("BOX-1")
def test_a_capped_queue_refuses_a_snapshot_that_cannot_count(post: Waypost, server: PostgresServer) -> None:
    post.configure("orders", max_pending=5)
    post.configure("free", max_deliveries=5)
    with psycopg.connect(server.url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(ConfigurationError, match="read committed"):
            post.publish("orders", 1, transaction=connection)
        assert post.publish("free", 1, transaction=connection).status == "queued"


@pytest.mark.promise("BOX-1")
def test_a_long_transaction_on_a_new_queue_blocks_no_other_publisher(post: Waypost, server: PostgresServer) -> None:
    with psycopg.connect(server.url) as connection:
        post.publish("fresh", 1, transaction=connection)
        assert post.publish("fresh", 2).status == "queued"
        with post.receive("fresh") as message:
            assert message is not None
            assert message.body == 2


@pytest.mark.promise("BOX-1")
def test_another_file_attached_databases_and_autocommit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with Waypost(f"sqlite:///{path}") as post:
        post.ledger("orders")
        with closing(sqlite3.connect(tmp_path / "other.db")) as other, pytest.raises(ConfigurationError, match="file"):
            post.publish("orders", 1, transaction=other)
        with closing(sqlite3.connect(path, isolation_level=None)) as alone:
            with pytest.raises(InvalidInput, match="commits each statement"):
                post.publish("orders", 1, transaction=alone)
            alone.execute("BEGIN IMMEDIATE")
            assert post.publish("orders", 1, transaction=alone).status == "queued"
            alone.execute("COMMIT")
        with closing(sqlite3.connect(path)) as both:
            both.execute("ATTACH ? AS more", (str(tmp_path / "other.db"),))
            with pytest.raises(ConfigurationError, match="attached"):
                post.publish("orders", 1, transaction=both)
        assert post.ledger("orders").published == 1


@pytest.mark.promise("BOX-1")
def test_a_sqlalchemy_session_on_the_file_carries_messages(tmp_path: Path) -> None:
    with Waypost(f"sqlite:///{tmp_path / 'shop.db'}") as post:
        post.ledger("orders")
        engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
        with Session(engine) as session:
            post.publish("orders", 1, transaction=session)
            session.rollback()
            post.publish("orders", 2, transaction=session)
            session.commit()
        engine.dispose()
        assert [message.body for message in post.messages("orders")] == [2]


@pytest.mark.promise("BOX-1")
def test_a_file_is_used_on_an_event_loop_too(tmp_path: Path) -> None:
    async def use() -> list[Any]:
        async with AsyncWaypost(f"sqlite:///{tmp_path / 'shop.db'}") as post:
            await post.ledger("orders")
            with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
                connection.row_factory = sqlite3.Row
                connection.text_factory = bytes
                await post.publish_many("orders", [1, 2], transaction=connection)
                connection.commit()
            return [message.body async for message in post.messages("orders")]

    assert asyncio.run(use()) == [1, 2]


@pytest.mark.promise("BOX-2")
def test_middleware_sees_what_is_published_in_a_transaction(server: PostgresServer, namespace: str) -> None:
    class Tagged(Middleware):
        def publish(self, outgoing: Outgoing, call_next: Any) -> list[Published]:
            return call_next(outgoing.with_headers({"tag": "1"}))  # type: ignore[no-any-return]

    with Waypost(server.url, namespace=namespace, middleware=[Tagged()]) as post:
        with psycopg.connect(server.url) as connection:
            post.publish("orders", 1, transaction=connection)
        assert [message.headers for message in post.messages("orders")] == [{"tag": "1"}]


@pytest.mark.promise("BOX-2")
def test_a_wake_up_comes_with_the_commit_once_for_each_transaction(
    post: Waypost, server: PostgresServer, namespace: str
) -> None:
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(_received(server.url, namespace)))
    with psycopg.connect(server.url, autocommit=True) as listener, psycopg.connect(server.url) as connection:
        channel = listener.execute(f'SELECT "{namespace}_channel_{VERSION}"(%s)'.encode(), ("orders",)).fetchone()
        assert channel is not None
        listener.execute(f'LISTEN "{channel[0]}"'.encode())
        waiting.start()
        _until_asleep(listener, namespace)
        for number in range(10):
            post.publish("orders", number, transaction=connection)
        assert list(listener.notifies(timeout=0.2)) == []
        assert got == []
        connection.commit()
        notifications = list(listener.notifies(timeout=1, stop_after=1)) + list(listener.notifies(timeout=0.2))
        waiting.join(30)
    assert len(notifications) == 1
    assert got == [0]


def _received(url: str, namespace: str) -> Any:
    with Waypost(url, namespace=namespace) as worker, worker.receive("orders", wait=30) as message:
        return None if message is None else message.body


def _until_asleep(reader: psycopg.Connection[Any], namespace: str) -> None:
    query = f'SELECT count(*) FROM "{namespace}_sleeper" WHERE NOT awake'.encode()
    while reader.execute(query).fetchone() == (0,):
        threading.Event().wait(0.01)


@pytest.mark.promise("BOX-2")
def test_no_notification_is_sent_before_the_commit(server: PostgresServer, namespace: str) -> None:
    events: list[Any] = []
    with Waypost(server.url, namespace=namespace, on_event=events.append) as post:
        with psycopg.connect(server.url) as connection:
            post.publish("orders", 1, transaction=connection)
            connection.rollback()
        assert [event.event for event in events] == []


@pytest.mark.promise("BOX-1")
def test_an_error_of_the_callers_own_transaction_stays_a_driver_error(post: Waypost, server: PostgresServer) -> None:
    with psycopg.connect(server.url) as connection:
        post.publish("orders", 0, transaction=connection)
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction) as raised:
            post.publish("orders", 1, transaction=connection)
        assert not isinstance(raised.value, WaypostError)
        connection.rollback()
    assert post.ledger("orders").published == 0


def test_a_connection_of_tortoise_is_refused_with_the_way_out() -> None:
    kind = type("BaseDBAsyncClient", (), {"__module__": "tortoise.backends.base.client"})
    with Waypost("memory://") as post, pytest.raises(InvalidInput, match=r"async with in_transaction\(\)"):
        post.publish("orders", 1, transaction=kind())
