"""Handlers that settle in their own transaction: the writes of exactly one delivery are kept."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.outbox.transaction_kinds import TABLE, dialect
from waypost import AsyncWaypost, Message, Observed, Waypost
from waypost.errors import ConfigurationError, InvalidInput, LeaseLost
from waypost.testing.postgres import PostgresServer

SALE = "INSERT INTO shop (n) VALUES (%s)"


@pytest.fixture
def shop(server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    """Return the rows of the user's table."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("TRUNCATE shop")
        yield connection


def sold(shop: psycopg.Connection[Any]) -> list[int]:
    return [row[0] for row in shop.execute("SELECT n FROM shop ORDER BY n")]


@pytest.mark.promise("BOX-3")
def test_writes_of_the_block_and_the_settle_are_committed_together(
    post: Waypost, shop: psycopg.Connection[Any]
) -> None:
    post.publish("orders", 7)
    with post.receive("orders") as message:
        assert message is not None
        with message.transaction() as connection:
            connection.execute(SALE, (message.body,))
            assert sold(shop) == []
            assert post.ledger("orders").leased == 1
        assert sold(shop) == [7]
        assert post.ledger("orders").done == 1
        assert message.settled == "done"
    assert post.ledger("orders").done == 1
    assert post.ledger("orders").balance == 0


@pytest.mark.promise("BOX-3", "SEE-1")
def test_a_settle_in_a_transaction_is_reported_once(server: PostgresServer, namespace: str) -> None:
    seen: list[Observed] = []
    with Waypost(server.url, namespace=namespace, on_event=seen.append) as post:
        published = post.publish("orders", 7)
        with post.receive("orders") as message:
            assert message is not None
            with message.transaction():
                pass
    assert [(event.message_id, event.outcome) for event in seen if event.event == "done"] == [(published.id, "success")]


@pytest.mark.promise("BOX-3")
def test_an_error_in_the_block_rolls_back_and_the_message_is_retried(
    post: Waypost, shop: psycopg.Connection[Any]
) -> None:
    post.publish("orders", 7)

    def fail() -> None:
        with post.receive("orders") as message:
            assert message is not None
            with message.transaction() as connection:
                connection.execute(SALE, (1,))
                raise RuntimeError("no stock")

    with pytest.raises(RuntimeError, match="no stock"):
        fail()
    assert sold(shop) == []
    assert (post.ledger("orders").retried, post.ledger("orders").done) == (1, 0)


@pytest.mark.promise("BOX-3")
def test_a_lost_lease_forces_the_rollback(post: Waypost, shop: psycopg.Connection[Any]) -> None:
    post.configure("orders", lease=0.05)
    post.publish("orders", 7)
    seen: list[Message[Any]] = []

    def be_late() -> None:
        with post.receive("orders", renew=False) as late:
            assert late is not None
            seen.append(late)
            with late.transaction() as connection:
                connection.execute(SALE, (1,))
                with post.receive("orders", wait=10) as received:
                    assert received is not None
                    assert received.id == late.id
                    with received.transaction() as other:
                        other.execute(SALE, (2,))

    with pytest.raises(LeaseLost, match=r"the lease of message \w+ of queue orders was lost before"):
        be_late()
    assert sold(shop) == [2]
    assert seen[0].lease_lost
    assert (post.ledger("orders").done, post.ledger("orders").unexplained) == (1, 0)


@pytest.mark.promise("BOX-3")
def test_continuations_and_results_are_a_part_of_the_transaction(post: Waypost, shop: psycopg.Connection[Any]) -> None:
    post.publish("orders", 7)
    with post.receive("orders") as message:
        assert message is not None
        message.then("receipts", "for 7")
        message.keep_result("sold")
        with message.transaction():
            pass
        with pytest.raises(InvalidInput):
            message.then("receipts", "too late")
        with pytest.raises(InvalidInput):
            message.retry()
        with pytest.raises(InvalidInput):
            message.transaction()
        assert post.result("orders", message.id) == "sold"
    assert [one.body for one in post.messages("receipts")] == ["for 7"]


@pytest.mark.promise("BOX-3")
def test_another_outcome_can_be_committed_with_the_writes(post: Waypost, shop: psycopg.Connection[Any]) -> None:
    post.publish("orders", 7)
    with post.receive("orders") as message:
        assert message is not None
        with message.transaction() as connection:
            connection.execute(SALE, (3,))
            message.dead("fraud")
    assert sold(shop) == [3]
    assert [letter.reason for letter in post.dead_letters("orders")] == ["fraud"]


@pytest.mark.promise("BOX-3")
def test_a_settle_in_the_callers_transaction_does_not_commit_it(
    post: Waypost, server: PostgresServer, shop: psycopg.Connection[Any]
) -> None:
    post.publish_many("orders", [1, 2])
    with psycopg.connect(server.url) as mine:
        for keep in (True, False):
            with post.receive("orders") as message:
                assert message is not None
                with message.transaction(mine) as given:
                    assert given is mine
                    given.execute(SALE, (message.body,))
                assert post.ledger("orders").done == (0 if keep else 1)
                if keep:
                    mine.commit()
                else:
                    mine.rollback()
    assert sold(shop) == [1]
    assert (post.ledger("orders").done, post.ledger("orders").leased) == (1, 1)


@pytest.mark.promise("BOX-3")
@pytest.mark.parametrize("blocking", [True, False])
def test_a_worker_does_not_settle_a_message_that_its_handler_settled(
    server: PostgresServer, namespace: str, shop: psycopg.Connection[Any], blocking: bool
) -> None:
    post = AsyncWaypost(server.url, namespace=namespace)
    lost: list[str] = []

    def sell(body: int, message: Message[int]) -> None:
        with message.transaction() as connection:
            connection.execute(SALE, (body,))

    async def sell_async(body: int, message: Message[int]) -> None:
        async with message.transaction() as connection:
            await connection.execute(SALE, (body,))

    post.handler("orders", concurrency=8, on_lease_lost=lambda message: lost.append(message.id))(
        sell if blocking else sell_async
    )

    async def work() -> Any:
        async with post:
            await post.configure("orders", lease=1)
            await post.publish_many("orders", range(100))
            await post.worker().run(until_empty=True, signals=False)
            return await post.ledger("orders")

    ledger = asyncio.run(work())
    assert sold(shop) == list(range(100))
    assert (ledger.done, ledger.balance, ledger.unexplained) == (100, 0, 0)
    assert lost == []


@pytest.mark.promise("BOX-3")
def test_a_client_on_an_engine_gives_sessions(
    server: PostgresServer, namespace: str, shop: psycopg.Connection[Any]
) -> None:
    from sqlalchemy import create_engine, text
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
    from sqlalchemy.orm import Session

    engine = create_engine(dialect(server.url, "psycopg"))
    with Waypost(client=engine, namespace=namespace) as post:
        post.publish_many("orders", [1, 2])
        with post.receive("orders") as message:
            assert message is not None
            with message.transaction() as session:
                assert isinstance(session, Session)
                session.execute(text("INSERT INTO shop (n) VALUES (1)"))
    engine.dispose()

    async def awaited() -> None:
        engine = create_async_engine(dialect(server.url, "psycopg"))
        async with AsyncWaypost(client=engine, namespace=namespace) as post:
            async with post.receive("orders") as message:
                assert message is not None
                async with message.transaction() as session:
                    assert isinstance(session, AsyncSession)
                    await session.execute(text("INSERT INTO shop (n) VALUES (2)"))
            assert (await post.ledger("orders")).done == 2
        await engine.dispose()

    asyncio.run(awaited())
    assert sold(shop) == [1, 2]


@pytest.mark.promise("BOX-3")
def test_a_connection_that_commits_each_statement_is_refused_before_the_handler_writes(
    post: Waypost, server: PostgresServer, tmp_path: Path
) -> None:
    """At the settle it would be too late: the writes of the block would be committed by then."""
    ran: list[str] = []
    with psycopg.connect(server.url, autocommit=True) as connection:
        post.publish("orders", 7)
        with post.receive("orders") as message:
            assert message is not None
            with pytest.raises(InvalidInput, match="commits each statement"), message.transaction(connection):
                ran.append("postgres")
    path = tmp_path / "shop.db"
    with (
        Waypost(f"sqlite:///{path}") as filed,
        closing(sqlite3.connect(path, isolation_level=None)) as alone,
    ):
        filed.publish("orders", 7)
        with filed.receive("orders") as message:
            assert message is not None
            with pytest.raises(InvalidInput, match="commits each statement"), message.transaction(alone):
                ran.append("sqlite")

        async def awaited() -> None:
            async with AsyncWaypost(f"sqlite:///{path}") as awaited_post:
                await awaited_post.publish("orders", 8)
                async with awaited_post.receive("orders") as given:
                    assert given is not None
                    with pytest.raises(InvalidInput, match="commits each statement"):
                        async with given.transaction(alone):
                            ran.append("sqlite, awaited")

        asyncio.run(awaited())
    assert ran == []


@pytest.mark.promise("BOX-3")
def test_a_file_holds_the_users_table_and_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as file, Waypost(f"sqlite:///{path}") as post:
        file.execute(TABLE)
        post.publish_many("orders", [1, 2])
        with post.receive("orders") as message:
            assert message is not None
            with message.transaction() as connection:
                connection.execute("INSERT INTO shop (n) VALUES (?)", (message.body,))

        def fail() -> None:
            with post.receive("orders") as message:
                assert message is not None
                with message.transaction() as connection:
                    connection.execute("INSERT INTO shop (n) VALUES (?)", (message.body,))
                    raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            fail()
        assert file.execute("SELECT n FROM shop").fetchall() == [(1,)]
        assert (post.ledger("orders").done, post.ledger("orders").retried) == (1, 1)


@pytest.mark.promise("BOX-3")
def test_a_store_outside_of_a_database_is_refused() -> None:
    with Waypost("memory://") as post:
        post.publish("orders", 1)
        with post.receive("orders") as message:
            assert message is not None
            with pytest.raises(ConfigurationError, match="Inbox"):
                message.transaction().__enter__()
        with closing(sqlite3.connect(":memory:")) as other, pytest.raises(ConfigurationError, match="memory"):
            post.publish("orders", 1, transaction=other)


@pytest.mark.promise("BOX-3")
def test_a_message_of_a_sync_client_is_refused_by_async_with(post: Waypost) -> None:
    post.publish("orders", 1)

    async def use(message: Message[Any]) -> None:
        async with message.transaction():
            pass

    with post.receive("orders") as message:
        assert message is not None
        with pytest.raises(InvalidInput, match="async with"):
            asyncio.run(use(message))
