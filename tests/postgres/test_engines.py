"""The caller's own SQLAlchemy engine: used, never disposed of, and refused where it could not work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import AssertionPool, NullPool, SingletonThreadPool, StaticPool

from waypost import AsyncWaypost, Waypost, errors
from waypost.store.postgres import PostgresStore, migrate
from waypost.testing.postgres import PostgresServer

SideBySide = Callable[[list[Callable[[], object]]], list[object]]


def engine_url(server: PostgresServer, driver: str = "psycopg") -> str:
    return server.url.replace("postgresql://", f"postgresql+{driver}://")


@pytest.fixture
def engine(server: PostgresServer) -> Iterator[Engine]:
    made = create_engine(engine_url(server), pool_size=2, max_overflow=0, pool_timeout=30)
    yield made
    made.dispose()


@pytest.mark.promise("STORE-5")
def test_an_engine_lends_a_connection_for_each_call_and_stays_open(engine: Engine, namespace: str) -> None:
    with Waypost(client=engine, namespace=namespace) as post:
        post.publish("orders", 1)
        with engine.connect() as one, engine.connect() as other:
            # Nothing is kept between calls: the caller may have all connections.
            assert one.scalar(text("SELECT 1")) == other.scalar(text("SELECT 1")) == 1
        with post.receive("orders", wait=5) as message:
            assert message is not None
            assert message.body == 1
        assert post.ledger("orders").done == 1
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.mark.promise("STORE-5")
def test_more_threads_than_the_engine_has_connections_take_turns(
    engine: Engine, namespace: str, side_by_side: SideBySide
) -> None:
    with Waypost(client=engine, namespace=namespace) as post:

        def work() -> int:
            for number in range(10):
                post.publish("orders", number)
            return 10

        assert side_by_side([work] * 8) == [10] * 8
        assert post.ledger("orders").published == 80
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.mark.promise("STORE-5")
def test_calls_do_not_join_the_callers_open_transaction(engine: Engine, namespace: str) -> None:
    """Calls use another connection, also while the caller has a transaction open in the same thread."""
    with Waypost(client=engine, namespace=namespace) as post, Session(engine) as session:
        session.execute(text("SELECT 1"))
        post.publish("orders", 1)
        session.rollback()
        assert post.ledger("orders").published == 1


@pytest.mark.promise("STORE-5")
@pytest.mark.parametrize(
    "options",
    [
        {"poolclass": NullPool},
        {"isolation_level": "AUTOCOMMIT"},
        {"isolation_level": "SERIALIZABLE"},
        {"pool_pre_ping": True},
    ],
)
def test_engines_of_other_settings_work_too(server: PostgresServer, namespace: str, options: dict[str, Any]) -> None:
    made = create_engine(engine_url(server), **options)
    with Waypost(client=made, namespace=namespace) as post:
        post.publish_many("orders", range(600))
        assert post.ledger("orders").ready == 600
    made.dispose()


@pytest.mark.promise("STORE-5")
def test_an_async_engine_works_for_the_async_client(server: PostgresServer, namespace: str) -> None:
    async def live() -> tuple[int, int]:
        made = create_async_engine(engine_url(server), pool_size=2, max_overflow=0)
        async with AsyncWaypost(client=made, namespace=namespace) as post:
            await asyncio.gather(*(post.publish("orders", number) for number in range(20)))
            for _ in range(20):
                async with post.receive("orders", wait=5) as message:
                    assert message is not None
            done = (await post.ledger("orders")).done
        async with AsyncSession(made) as session:
            alive = await session.scalar(text("SELECT 7"))
        await made.dispose()
        return done, int(alive or 0)

    assert asyncio.run(live()) == (20, 7)


@pytest.mark.promise("STORE-5", "LEASE-14")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_connections_closed_by_a_restart_are_discarded(mode: str) -> None:
    with PostgresServer(durable=True) as own:
        migrate(own.url)

        def live() -> int:
            made = create_engine(engine_url(own), pool_size=3)
            with Waypost(client=made) as post:
                threads = [threading.Thread(target=post.publish, args=("orders", number)) for number in range(6)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                own.restart()
                post.publish("orders", 6)
            own.restart()
            with Waypost(client=made) as post:
                published = post.ledger("orders").published
            made.dispose()
            return published

        async def live_async() -> int:
            made = create_async_engine(engine_url(own), pool_size=3)
            async with AsyncWaypost(client=made) as post:
                await asyncio.gather(*(post.publish("orders", number) for number in range(6)))
                await asyncio.to_thread(own.restart)
                await post.publish("orders", 6)
            await asyncio.to_thread(own.restart)
            async with AsyncWaypost(client=made) as post:
                published = (await post.ledger("orders")).published
            await made.dispose()
            return published

        assert (live() if mode == "sync" else asyncio.run(live_async())) == 7


@pytest.mark.promise("STORE-5", "LEASE-3")
def test_a_worker_of_either_client_runs_on_an_engine(server: PostgresServer, namespace: str) -> None:
    """It claims on its event loop and renews from a thread, with a sync or an async engine."""
    made = create_engine(engine_url(server))
    seen: list[int] = []
    with Waypost(client=made, namespace=namespace) as post:
        post.publish_many("orders", range(20))
        post.handler("orders", concurrency=4)(seen.append)
        post.worker().run(until_empty=True)
    made.dispose()

    async def live() -> None:
        made_async: AsyncEngine = create_async_engine(engine_url(server))
        async with AsyncWaypost(client=made_async, namespace=namespace) as post:
            await post.publish_many("orders", range(20, 40))

            @post.handler("orders", concurrency=4)
            async def note(body: int) -> None:
                seen.append(body)

            await post.worker().run(until_empty=True)
        await made_async.dispose()

    asyncio.run(live())
    assert sorted(seen) == list(range(40))


@pytest.mark.promise("STORE-5")
def test_an_engine_without_a_free_connection_is_an_error(server: PostgresServer, namespace: str) -> None:
    made = create_engine(engine_url(server), pool_size=1, max_overflow=0, pool_timeout=0.05)
    with Waypost(client=made, namespace=namespace, retry_budget=0) as post:
        with made.connect(), pytest.raises(errors.StoreUnavailable, match="no connection to the caller's Engine"):
            post.publish("orders", 1)
        assert post.publish("orders", 2).status == "queued"
    made.dispose()


@pytest.mark.promise("STORE-5")
def test_an_engine_of_the_wrong_mode_is_refused(server: PostgresServer, engine: Engine, namespace: str) -> None:
    with pytest.raises(errors.UnusableClient, match="pass an AsyncEngine to AsyncWaypost"):
        asyncio.run(PostgresStore.from_client(engine, namespace=namespace).connect_async(start_timeout=1))
    with pytest.raises(errors.UnusableClient, match="an AsyncEngine needs AsyncWaypost"):
        PostgresStore.from_client(create_async_engine(engine_url(server)), namespace=namespace).connect(start_timeout=1)


@pytest.mark.promise("STORE-5", "SEE-6")
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg2"])
def test_an_engine_with_another_driver_is_an_error_that_names_the_right_one(engine: Engine, driver: str) -> None:
    class Dialect:
        name = "postgresql"

    # SQLAlchemy's name of the driver decides; the driver itself need not be installed to be refused.
    dialect: Any = Dialect()
    dialect.driver = driver
    made: Any = Engine(engine.pool, dialect, engine.url)
    with pytest.raises(errors.UnusableClient, match=rf"driver {driver} cannot be used.*postgresql\+psycopg"):
        Waypost(client=made)


@pytest.mark.promise("STORE-5", "SEE-6")
def test_engines_of_other_databases_and_single_connections_are_refused(engine: Engine) -> None:
    with pytest.raises(errors.UnusableClient, match="an engine for sqlite cannot be used"):
        Waypost(client=create_engine("sqlite://"))
    with engine.connect() as connection, pytest.raises(errors.UnusableClient, match="pass the engine it came from"):
        Waypost(client=connection)
    with Session(engine) as session, pytest.raises(errors.UnusableClient, match="pass the engine it came from"):
        Waypost(client=session)


@pytest.mark.promise("STORE-5", "SEE-6")
@pytest.mark.parametrize("pool", [StaticPool, SingletonThreadPool, AssertionPool])
def test_engines_with_one_shared_connection_are_refused(server: PostgresServer, pool: type[Any]) -> None:
    with pytest.raises(errors.UnusableClient, match=f"{pool.__name__} has one connection for everybody"):
        Waypost(client=create_engine(engine_url(server), poolclass=pool))


@pytest.mark.promise("STORE-5")
def test_listeners_on_the_callers_engine_still_receive_events(engine: Engine, namespace: str) -> None:
    received: list[object] = []
    event.listen(engine, "checkout", lambda *arguments: received.append(arguments))
    with Waypost(client=engine, namespace=namespace) as post:
        post.publish("orders", 1)
    assert received
