"""Publishing in a session of the application, and settling in one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from tests.faststream.running import Place, run, running, settled
from waypost.errors import ConfigurationError
from waypost.faststream import TestWaypostBroker, WaypostBroker
from waypost.faststream.annotations import WaypostMessage

pytestmark = pytest.mark.promise("FACE-4")


@asynccontextmanager
async def shop(place: Place) -> AsyncIterator[tuple[AsyncEngine, Table]]:
    """A table of the application beside the queues."""
    engine = create_async_engine(place.url.replace("postgresql://", "postgresql+asyncpg://"))
    table = Table(f"sale_{place.namespace.replace('-', '_')}", MetaData(), Column("id", Integer, primary_key=True))
    try:
        async with engine.begin() as connection:
            await connection.run_sync(table.metadata.create_all)
        yield engine, table
    finally:
        await engine.dispose()


def test_a_message_exists_if_and_only_if_the_session_commits(database: Place) -> None:
    broker, seen = database.broker(), []

    @broker.subscriber("orders")
    async def charge(body: int) -> None:
        seen.append(body)

    async def test() -> None:
        async with shop(database) as (engine, sale), running(broker):
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(insert(sale).values(id=1))
                await broker.publish(1, "orders", key="order:1", transaction=session)
                batch = await broker.publish_batch(2, 3, queue="orders", transaction=session)
                assert len(batch) == 2
                later = await broker.publish(4, "orders", key="order:4", delay=3600, transaction=session)
                assert later.status == "delayed"
            await settled(broker, "orders", done=3, delayed=1)
            async with AsyncSession(engine) as session, session.begin():
                again = await broker.publish(5, "orders", key="order:4", transaction=session)
                assert again.status == "duplicate"
                await broker.publish_batch(6, 7, queue="orders", transaction=session)
                await session.rollback()
            ledger = await broker.client.ledger("orders")
            assert (ledger.published, ledger.balance) == (4, 0)

    run(test())
    assert sorted(seen) == [1, 2, 3]


@pytest.mark.promise("BOX-6")
def test_a_timer_is_cancelled_if_and_only_if_the_session_commits(database: Place) -> None:
    broker = database.broker()

    async def test() -> None:
        async with shop(database) as (engine, _), broker:
            await broker.publish(1, "timers", key="a", delay=3600)
            async with AsyncSession(engine) as session, session.begin():
                assert await broker.cancel("timers", key="a", transaction=session) == "cancelled"
                await session.rollback()
            assert await broker.has("timers", "a")
            async with AsyncSession(engine) as session, session.begin():
                assert await broker.cancel("timers", key="a", transaction=session) == "cancelled"
                # The key is free in the same transaction.
                assert (await broker.publish(2, "timers", key="a", delay=60, transaction=session)).status == "delayed"
            assert [timer.body for timer in await broker.timers("timers")] == [2]

    run(test())


def test_a_handler_settles_with_its_own_writes(database: Place) -> None:
    broker = database.broker()

    async def test() -> list[int]:
        async with shop(database) as (engine, sale):

            @broker.subscriber("orders")
            async def charge(body: int, message: WaypostMessage) -> None:
                transaction = message.raw_message.transaction
                async with AsyncSession(engine) as session, session.begin(), transaction(session):
                    await session.execute(insert(sale).values(id=body))

            async with running(broker):
                await broker.publish(7, "orders")
                await settled(broker, "orders", done=1)
            async with AsyncSession(engine) as session:
                return list((await session.execute(select(sale.c.id))).scalars())

    assert run(test()) == [7]


def test_the_schema_is_validated(database: Place) -> None:
    broker = database.broker()

    async def test() -> None:
        async with broker:
            await broker.validate_schema()
        missing = WaypostBroker(database.url, namespace="not-migrated", logger=None)
        with pytest.raises(ConfigurationError, match="waypost migrate"):
            await missing.validate_schema()

    run(test())


def test_a_store_without_a_schema_has_nothing_to_validate() -> None:
    assert run(WaypostBroker("memory://", logger=None).validate_schema()) is None


def test_a_session_is_not_used_in_memory() -> None:
    broker = WaypostBroker("postgresql://nowhere.invalid/shop", logger=None)

    @broker.subscriber("orders")
    async def charge(body: int) -> None: ...

    async def test() -> Any:
        async with TestWaypostBroker(broker):
            await broker.publish(1, "orders", transaction=object())
            await broker.publish_batch(2, 3, queue="orders", transaction=object())
            await broker.publish(4, "orders", key="later", delay=60)
            assert await broker.cancel("orders", key="later", transaction=object()) == "cancelled"
            return charge.mock.call_count

    assert run(test()) == 3
