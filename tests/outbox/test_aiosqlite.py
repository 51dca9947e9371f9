"""SQLite on an event loop: sessions and connections of SQLAlchemy on aiosqlite, and connections of aiosqlite itself."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from tests.outbox.transaction_kinds import TABLE
from waypost import AsyncWaypost, NoRetry, Waypost
from waypost.errors import ConfigurationError, InvalidInput
from waypost.outbox import AsyncInbox, inbox_sql
from waypost.store import aiosqlite_internals
from waypost.store.sqlite.transactions import begins_transactions

SALE = text("INSERT INTO shop (n) VALUES (:n)")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as file:
        file.executescript(f"{TABLE}; {inbox_sql()}")
    return path


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[tuple[AsyncWaypost, AsyncEngine]]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", **options)
    try:
        async with AsyncWaypost(f"sqlite:///{path}") as post:
            await post.ledger("orders")
            yield post, engine
    finally:
        await engine.dispose()


def sold(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as file:
        return [row[0] for row in file.execute("SELECT n FROM shop ORDER BY n")]


@pytest.mark.promise("BOX-6", "BOX-3")
def test_a_handler_settles_in_its_async_session(path: Path) -> None:
    async def work() -> Any:
        async with opened(path) as (post, engine):

            @post.handler("orders", engine=engine, retry=NoRetry(), concurrency=1)
            async def sell(body: int, session: AsyncSession) -> None:
                await session.execute(SALE, {"n": body})
                await post.publish("receipts", body, transaction=session)
                assert body != 3

            @post.handler("more", engine=engine, concurrency=1)
            async def sell_more(body: int, connection: AsyncConnection) -> None:
                await connection.execute(SALE, {"n": body})

            await post.publish_many("orders", range(5))
            await post.publish("more", 100)
            await post.worker().run(until_empty=True, signals=False)
            return await post.ledger("orders"), [one.body async for one in post.messages("receipts")]

    ledger, receipts = asyncio.run(work())
    assert sold(path) == [0, 1, 2, 4, 100]
    assert sorted(receipts) == [0, 1, 2, 4]
    assert (ledger.done, ledger.dead) == (4, 1)


@pytest.mark.promise("BOX-6")
def test_a_message_is_settled_in_a_session_that_is_given(path: Path) -> None:
    async def work() -> None:
        async with opened(path) as (post, engine):
            await post.publish("orders", 1)
            async with post.receive("orders") as message, AsyncSession(engine) as session:
                assert message is not None
                async with message.transaction(session):
                    await session.execute(SALE, {"n": 7})
                assert (await post.ledger("orders")).done == 0, "nothing is committed yet"
                await session.commit()
                assert message.settled == "done"
            assert (await post.ledger("orders")).done == 1

    asyncio.run(work())
    assert sold(path) == [7]


@pytest.mark.promise("BOX-3")
def test_an_inbox_records_in_an_async_transaction_of_a_file(path: Path) -> None:
    async def work() -> None:
        inbox = AsyncInbox()
        async with opened(path) as (post, engine):
            await post.publish("orders", 1)
            async with post.receive("orders") as message:
                assert message is not None
                async with AsyncSession(engine) as session:
                    assert await inbox.first(message, session)
                    assert not await inbox.first(message, session)
                    await session.rollback()
                async with engine.connect() as connection:
                    assert await inbox.first(message, connection)
                    await connection.commit()
                async with aiosqlite.connect(path) as file:
                    assert not await inbox.first(message, file)
                    assert await inbox.forget(file) == 0
                    await file.execute("UPDATE waypost_inbox SET at_ms = at_ms - 2000")
                    assert await AsyncInbox(keep=1).forget(file) == 1

    asyncio.run(work())


class Autocommit(sqlite3.Connection):
    """A connection with `autocommit=True`, which Python has from 3.12 on: it is known in its own thread only."""

    @property
    def autocommit(self) -> bool:
        self.cursor().close()  # raises in another thread
        return True


@pytest.mark.promise("BOX-3")
def test_an_inbox_refuses_a_connection_of_aiosqlite_that_commits_each_statement(path: Path) -> None:
    async def work() -> None:
        async with opened(path) as (post, _), aiosqlite.connect(path, factory=Autocommit) as file:
            await post.publish("orders", 1)
            async with post.receive("orders") as message:
                assert message is not None
                with pytest.raises(InvalidInput, match="commits each statement"):
                    await AsyncInbox().first(message, file)

    asyncio.run(work())


@pytest.mark.promise("BOX-1", "BOX-6")
def test_connections_of_aiosqlite_that_cannot_carry_messages_are_refused(path: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(path, isolation_level="AUTOCOMMIT") as (post, engine):
            async with AsyncSession(engine) as session:
                with pytest.raises(InvalidInput, match="without AUTOCOMMIT"):
                    await post.publish("orders", 1, transaction=session)
            async with aiosqlite.connect(path, isolation_level=None) as alone:
                with pytest.raises(InvalidInput, match="commits each statement"):
                    await post.publish("orders", 1, transaction=alone)
                await alone.execute("BEGIN")
                assert (await post.publish("orders", 1, transaction=alone)).status == "queued"
                await alone.execute("COMMIT")
            with pytest.raises(ConfigurationError, match="not open"):
                await post.publish("orders", 1, transaction=alone)
            async with aiosqlite.connect(tmp_path / "other.db") as other:
                with pytest.raises(ConfigurationError, match="another file"):
                    await post.publish("orders", 1, transaction=other)
            assert (await post.ledger("orders")).published == 1

    asyncio.run(work())


@pytest.mark.promise("BOX-1")
def test_the_rows_of_a_connection_of_aiosqlite_stay_as_its_owner_wants_them(path: Path) -> None:
    async def work() -> tuple[Any, list[int]]:
        async with opened(path) as (post, _), aiosqlite.connect(path) as file:
            file.row_factory = sqlite3.Row
            await post.publish_many("orders", [1, 2], transaction=file)
            async with file.execute("SELECT 7 AS n") as cursor:
                row = await cursor.fetchone()
            await file.commit()
            return row, [one.body async for one in post.messages("orders")]

    row, bodies = asyncio.run(work())
    assert row["n"] == 7
    assert bodies == [1, 2]


def test_an_unknown_release_of_aiosqlite_is_named() -> None:
    class Other:
        """A connection of a release that has other private names."""

    with pytest.raises(ConfigurationError, match=r"aiosqlite>=0\.20"):
        aiosqlite_internals.connection_of(Other())
    with pytest.raises(ConfigurationError, match=r"aiosqlite>=0\.20"):
        asyncio.run(aiosqlite_internals.run_in_thread(Other(), int))


def test_how_a_connection_of_another_thread_begins_transactions_is_known_by_its_isolation_level() -> None:
    class OfAnotherThread:
        isolation_level = "DEFERRED"

        @property
        def autocommit(self) -> int:
            raise sqlite3.ProgrammingError("objects created in a thread can only be used in that same thread")

    assert begins_transactions(OfAnotherThread())  # type: ignore[arg-type]


def test_a_file_without_the_tables_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    post = Waypost(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as file, pytest.raises(ConfigurationError, match="Open the client first"):
        post.publish("orders", 1, transaction=file)
    with post, closing(sqlite3.connect(path)) as file, file:
        assert post.publish("orders", 1, transaction=file).status == "queued"
