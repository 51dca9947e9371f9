"""The inbox: a message of any store has its effect once, whichever way the user's database is reached."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.outbox.transaction_kinds import dialect
from waypost import AsyncWaypost, Message, Waypost
from waypost.errors import ConfigurationError, InvalidInput, InvalidName
from waypost.outbox import AsyncInbox, Inbox, inbox_sql
from waypost.testing.postgres import PostgresServer


@pytest.fixture
def table(server: PostgresServer) -> str:
    name = f"inbox_{threading.get_native_id()}"
    with psycopg.connect(server.url) as connection:
        connection.execute(f"DROP TABLE IF EXISTS {name}".encode())
        connection.execute(inbox_sql(name).encode())
        connection.execute(inbox_sql(name).encode())
    return name


@pytest.fixture
def message() -> Message[Any]:
    with Waypost("memory://") as post:
        post.publish("orders", 1)
        with post.receive("orders") as got:
            pass
    assert got is not None
    return got


@pytest.mark.promise("BOX-3")
def test_a_message_is_first_once_it_committed_and_not_before(
    server: PostgresServer, table: str, message: Message[Any]
) -> None:
    inbox = Inbox(table)
    with psycopg.connect(server.url) as connection:
        assert inbox.first(message, connection)
        assert not inbox.first(message, connection)
        connection.rollback()
        assert inbox.first(message, connection)
        connection.commit()
        assert not inbox.first(message, connection)


@pytest.mark.promise("BOX-3")
def test_the_second_of_two_concurrent_deliveries_waits_for_the_first(
    server: PostgresServer, table: str, message: Message[Any]
) -> None:
    inbox, second = Inbox(table), list[bool]()

    def come_second() -> None:
        with psycopg.connect(server.url) as connection:
            second.append(inbox.first(message, connection))

    with psycopg.connect(server.url) as connection:
        assert inbox.first(message, connection)
        other = threading.Thread(target=come_second)
        other.start()
        with psycopg.connect(server.url, autocommit=True) as reader:
            while reader.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() == (0,):
                threading.Event().wait(0.01)
        assert second == []
    other.join(30)
    assert second == [False]


@pytest.mark.promise("BOX-3")
def test_the_inbox_works_with_every_driver(
    server: PostgresServer, table: str, message: Message[Any], tmp_path: Path
) -> None:
    import asyncpg
    from sqlalchemy import create_engine
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
    from sqlalchemy.orm import Session

    for driver in ("psycopg", "psycopg2"):
        engine = create_engine(dialect(server.url, driver))
        with Session(engine) as session, session.begin():
            assert Inbox(table).first(message, session)
            session.rollback()
        engine.dispose()

    async def awaited() -> None:
        inbox = AsyncInbox(table)
        for driver in ("psycopg", "asyncpg"):
            engine = create_async_engine(dialect(server.url, driver))
            async with AsyncSession(engine) as session:
                assert await inbox.first(message, session)
                await session.rollback()
            await engine.dispose()
        connection = await asyncpg.connect(server.url)
        async with connection.transaction():
            assert await inbox.first(message, connection)
        async with connection.transaction():
            assert not await inbox.first(message, connection)
            assert await inbox.forget(connection) == 0
        await connection.close()

    asyncio.run(awaited())
    with closing(sqlite3.connect(tmp_path / "mine.db")) as file:
        file.executescript(inbox_sql())
        assert Inbox().first(message, file)
        assert not Inbox().first(message, file)
        file.rollback()
        assert Inbox().first(message, file)
        assert Inbox().forget(file) == 0
        file.commit()
        file.execute("UPDATE waypost_inbox SET at_ms = at_ms - 2000")
        assert Inbox(keep=1).forget(file) == 1


@pytest.mark.promise("BOX-3")
def test_old_entries_are_forgotten_a_bounded_number_at_a_time(
    server: PostgresServer, table: str, message: Message[Any]
) -> None:
    inbox = Inbox(table, keep=3600)
    with psycopg.connect(server.url) as connection:
        # Recorded before there is anything old: `first` itself forgets now and then.
        assert inbox.first(message, connection)
        connection.execute(f"INSERT INTO {table} SELECT 'orders', n::text, n FROM generate_series(1, 1500) n".encode())
        assert [inbox.forget(connection) for _ in range(3)] == [1000, 500, 0]
        assert not inbox.first(message, connection)


@pytest.mark.promise("BOX-3")
def test_recording_forgets_old_entries_now_and_then(
    server: PostgresServer, table: str, message: Message[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waypost.outbox.inbox.FORGET_EVERY", 1)
    inbox = Inbox(table, keep=3600)
    with psycopg.connect(server.url) as connection:
        connection.execute(f"INSERT INTO {table} SELECT 'orders', n::text, n FROM generate_series(1, 1500) n".encode())
        assert inbox.first(message, connection)
        assert inbox.forget(connection) == 500
        assert not inbox.first(message, connection)


@pytest.mark.promise("BOX-3")
def test_a_handler_of_another_store_has_its_effect_once(server: PostgresServer, table: str) -> None:
    inbox, effects, deliveries = AsyncInbox(table), list[int](), list[int]()
    post = AsyncWaypost("memory://")

    @post.handler("orders")
    async def handle(body: int, message: Message[int]) -> None:
        deliveries.append(body)
        async with await psycopg.AsyncConnection.connect(server.url) as connection:
            if await inbox.first(message, connection):
                effects.append(body)
        if message.attempts == 0:
            message.retry(after=0)

    async def work() -> None:
        async with post:
            await post.publish_many("orders", range(5))
            await post.worker().run(until_empty=True, signals=False)

    asyncio.run(work())
    assert sorted(effects) == [0, 1, 2, 3, 4]
    assert len(deliveries) == 10


def entries(file: sqlite3.Connection) -> list[Any]:
    return file.execute("SELECT id FROM waypost_inbox").fetchall()


@pytest.mark.promise("BOX-3")
def test_a_file_that_commits_each_statement_is_refused_before_anything_is_written(
    tmp_path: Path, message: Message[Any]
) -> None:
    from sqlalchemy import create_engine

    path = tmp_path / "mine.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as alone:
        alone.executescript(inbox_sql())
        with pytest.raises(InvalidInput, match="commits each statement"):
            Inbox().first(message, alone)
        with pytest.raises(InvalidInput, match="commits each statement"):
            Inbox().forget(alone)
        with pytest.raises(InvalidInput, match="commits each statement"):
            asyncio.run(AsyncInbox().first(message, alone))
        engine = create_engine(f"sqlite:///{path}", isolation_level="AUTOCOMMIT")
        with engine.connect() as connection, pytest.raises(InvalidInput, match="without AUTOCOMMIT"):
            Inbox().first(message, connection)
        engine.dispose()
        if sys.version_info >= (3, 12):
            with (
                closing(sqlite3.connect(path, autocommit=True)) as bare,
                pytest.raises(InvalidInput, match="commits each statement"),
            ):
                Inbox().first(message, bare)
        assert entries(alone) == []
        alone.execute("BEGIN")
        assert Inbox().first(message, alone)
        alone.execute("COMMIT")
        assert entries(alone) == [(message.id,)]


@pytest.mark.promise("BOX-3")
def test_a_sqlalchemy_connection_to_a_file_commits_what_the_inbox_wrote(tmp_path: Path, message: Message[Any]) -> None:
    from sqlalchemy import create_engine

    path = tmp_path / "mine.db"
    with closing(sqlite3.connect(path)) as reader:
        reader.executescript(inbox_sql())
        engine = create_engine(f"sqlite:///{path}")
        with engine.connect() as connection:
            assert Inbox().first(message, connection)
            connection.rollback()
            assert Inbox().first(message, connection)
            connection.commit()
        engine.dispose()
        assert entries(reader) == [(message.id,)]


@pytest.mark.promise("BOX-3")
def test_a_server_connection_that_commits_each_statement_is_refused(
    server: PostgresServer, table: str, message: Message[Any]
) -> None:
    from sqlalchemy import create_engine
    from sqlalchemy.ext.asyncio import create_async_engine

    from tests.outbox.transaction_kinds import open_kind

    with psycopg.connect(server.url, autocommit=True) as alone:
        with pytest.raises(InvalidInput, match="commits each statement"):
            Inbox(table).first(message, alone)
        with alone.pipeline():
            alone.execute("SELECT 1")
            with pytest.raises(InvalidInput, match="commits each statement"):
                Inbox(table).first(message, alone)
            with alone.transaction(force_rollback=True):
                assert Inbox(table).first(message, alone)
    engine = create_engine(dialect(server.url, "psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(InvalidInput, match="commits each statement"):
        Inbox(table).first(message, connection)
    engine.dispose()
    with open_kind("django", server.url, "unused"):
        from django.db import connection as django_connection

        with pytest.raises(InvalidInput, match="atomic"):
            Inbox(table).first(message, django_connection)

    async def awaited() -> None:
        inbox = AsyncInbox(table)
        async with await psycopg.AsyncConnection.connect(server.url, autocommit=True) as connection:
            with pytest.raises(InvalidInput, match="commits each statement"):
                await inbox.first(message, connection)
        for driver in ("psycopg", "asyncpg"):
            engine = create_async_engine(dialect(server.url, driver), isolation_level="AUTOCOMMIT")
            async with engine.connect() as alone:
                with pytest.raises(InvalidInput, match="commits each statement"):
                    await inbox.first(message, alone)
            await engine.dispose()

    asyncio.run(awaited())
    with psycopg.connect(server.url) as reader:
        assert reader.execute(f"SELECT count(*) FROM {table}".encode()).fetchone() == (0,)


def test_invalid_names_are_refused() -> None:
    for wrong in ('a"b', "", "1a", "x" * 64):
        with pytest.raises(InvalidName):
            inbox_sql(wrong)
        with pytest.raises(InvalidName):
            Inbox(wrong)
    with pytest.raises(ConfigurationError):
        Inbox(keep=0)
