"""Connections and schema: lost calls are repeated, and errors name the way out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import psycopg_pool
import pytest

from tests.fault.proxy import Proxy
from waypost import AsyncWaypost, Waypost, errors
from waypost.policy import CHUNK_MESSAGES_MAX
from waypost.store.postgres import PostgresStore, migrate, sql
from waypost.store.postgres.schema import VERSION
from waypost.testing.bench import Bench, fresh_namespace
from waypost.testing.postgres import PostgresServer


@pytest.fixture
def proxy(server: PostgresServer) -> Iterator[Proxy]:
    with Proxy(server.port) as running:
        yield running


def through(proxy: Proxy, server: PostgresServer) -> str:
    return server.url.replace(f":{server.port}/", f":{proxy.port}/")


@pytest.mark.promise("PUB-3", "LEASE-6")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_reply_lost_after_the_commit_is_requested_again_and_is_the_first_result(
    proxy: Proxy, server: PostgresServer, namespace: str, mode: Any
) -> None:
    url = through(proxy, server)
    with Bench(lambda clock, _: PostgresStore.from_url(url, namespace=namespace), mode) as bench:
        operation, draft = bench.operation(), bench.draft()
        proxy.drop_replies(1, to=b"publish")
        with pytest.raises(errors.OutcomeUnknown):
            bench.publish_drafts([draft], operation=operation)
        assert [one.status for one in bench.publish_drafts([draft], operation=operation)] == ["queued"]
        operation = bench.operation()
        proxy.drop_replies(1, to=b"claim")
        with pytest.raises(errors.OutcomeUnknown):
            bench.claim_one(operation=operation)
        lease = bench.claim_one(operation=operation)
        assert (lease.id, lease.deliveries) == (draft.id, 1)
        operation = bench.operation()
        proxy.drop_replies(1, to=b"settle")
        with pytest.raises(errors.OutcomeUnknown):
            bench.settle(lease, operation=operation)
        assert bench.settle(lease, operation=operation) == "done"
        ledger = bench.ledger()
        assert (ledger.published, ledger.claims, ledger.done) == (1, 1, 1)


@pytest.mark.promise("PUB-3", "LEASE-14")
def test_the_client_repeats_calls_whose_replies_are_lost(proxy: Proxy, server: PostgresServer, namespace: str) -> None:
    with Waypost(through(proxy, server), namespace=namespace) as post:
        proxy.drop_replies(2, to=b"publish")
        assert post.publish("orders", {"id": 7}).status == "queued"
        assert proxy.dropped == 2
        with post.receive("orders", wait=5) as message:
            assert message is not None
            assert message.body == {"id": 7}
        assert post.ledger("orders").published == post.ledger("orders").done == 1


@pytest.mark.promise("LEASE-14")
def test_work_goes_on_after_the_server_was_killed_and_came_back() -> None:
    with PostgresServer(durable=True) as own:
        migrate(own.url)
        with Waypost(own.url) as post:
            ids = [post.publish("orders", number).id for number in range(3)]
            own.kill()
            back = threading.Thread(target=own.restart)
            back.start()
            ids.append(post.publish("orders", 3).id)
            back.join(30)
            found = []
            for _ in ids:
                with post.receive("orders", wait=5) as message:
                    assert message is not None
                    found.append(message.id)
            assert found == ids


def test_a_missing_server_is_reported_within_the_start_timeout() -> None:
    with pytest.raises(errors.StoreUnavailable, match=r"no connection to postgresql://127\.0\.0\.1:1/nothing"):
        PostgresStore.from_url("postgresql://u:hunter2@127.0.0.1:1/nothing").connect(start_timeout=2)


def test_a_url_that_cannot_be_read_is_refused_without_its_secret() -> None:
    with pytest.raises(errors.InvalidUrl) as refusal:
        PostgresStore.from_url("postgresql://u:hunter2@host/db?nonsense=1")
    assert "hunter2" not in str(refusal.value)


@pytest.mark.promise("STORE-2", "SEE-6")
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_role_whose_transactions_see_an_old_state_is_refused(
    server: PostgresServer, namespace: str, database: Any, level: str
) -> None:
    """A limit is counted after its lock was acquired, so it must see what was committed meanwhile."""
    database.execute("DROP ROLE IF EXISTS careful; CREATE ROLE careful LOGIN SUPERUSER")
    database.execute(f"ALTER ROLE careful SET default_transaction_isolation = '{level}'")
    store = PostgresStore.from_url(server.socket_url.replace("postgres@", "careful@"), namespace=namespace)
    with pytest.raises(errors.ConfigurationError, match="default_transaction_isolation = 'read committed'"):
        store.connect(start_timeout=5)
    with pytest.raises(errors.ConfigurationError, match="default_transaction_isolation = 'read committed'"):
        asyncio.run(store.connect_async(start_timeout=5))


class TestSchema:
    """Tables of this release, of another one, or none."""

    @pytest.mark.promise("STORE-2", "SEE-6")
    def test_a_database_without_tables_names_the_way_to_make_them(self, server: PostgresServer) -> None:
        store = PostgresStore.from_url(server.url, namespace=fresh_namespace())
        with pytest.raises(errors.SchemaTooOld, match="migrate"):
            store.connect(start_timeout=5)
        with pytest.raises(errors.SchemaTooOld, match="migrate"):
            asyncio.run(store.connect_async(start_timeout=5))

    @pytest.mark.promise("STORE-2", "SEE-6")
    @pytest.mark.parametrize(("version", "error"), [(VERSION + 1, errors.SchemaTooNew), (0, errors.SchemaTooOld)])
    def test_tables_of_another_release_are_not_touched(
        self, server: PostgresServer, namespace: str, database: Any, version: int, error: type[Exception]
    ) -> None:
        database.execute(f'UPDATE "{namespace}_schema" SET version = {version}')
        database.execute(f'UPDATE "{namespace}_interface" SET version = {version}')
        with pytest.raises(error):
            PostgresStore.from_url(server.url, namespace=namespace).connect(start_timeout=5)

    def test_a_newer_schema_is_not_migrated_back(self, server: PostgresServer, namespace: str, database: Any) -> None:
        database.execute(f'UPDATE "{namespace}_schema" SET version = {VERSION + 1}')
        with pytest.raises(errors.SchemaTooNew):
            migrate(server.url, namespace=namespace)

    def test_migrating_twice_and_at_once_is_harmless(
        self, server: PostgresServer, side_by_side: Callable[[list[Callable[[], object]]], list[object]]
    ) -> None:
        name = fresh_namespace()
        versions = side_by_side([lambda: migrate(server.url, namespace=name)] * 4)
        assert sorted(map(str, versions)) == sorted(map(str, [0, *[VERSION] * 3]))
        assert migrate(server.url, namespace=name) == VERSION

    def test_the_text_of_the_migration_can_be_applied_by_hand_in_another_schema(
        self, server: PostgresServer, database: Any
    ) -> None:
        name = fresh_namespace()
        database.execute('CREATE SCHEMA IF NOT EXISTS "Side_1"')
        with database.transaction():
            database.execute(sql(schema="Side_1", namespace=name))
        executor = PostgresStore.from_url(server.url, schema="Side_1", namespace=name).connect(start_timeout=5)
        executor.close()
        tables = database.execute(
            "SELECT count(*) FROM pg_tables WHERE schemaname = 'Side_1' AND tablename LIKE %s", (f"{name}%",)
        ).fetchone()[0]
        assert tables > 15
        assert database.execute("SELECT to_regclass(%s)", (f'public."{name}_queue"',)).fetchone() == (None,)

    @pytest.mark.parametrize("schema", ['a"b', "", "1a", "a;b", "x" * 64])
    def test_an_unsafe_schema_name_is_refused(self, schema: str) -> None:
        with pytest.raises(errors.InvalidName):
            sql(schema=schema)

    def test_a_user_without_rights_gets_an_error(self, server: PostgresServer, namespace: str, database: Any) -> None:
        database.execute("DROP ROLE IF EXISTS guest")
        database.execute("CREATE ROLE guest LOGIN")
        url = server.socket_url.replace("postgres@", "guest@")
        with pytest.raises(PermissionError, match="grant"):
            PostgresStore.from_url(url, namespace=namespace).connect(start_timeout=5)


@pytest.mark.promise("STORE-5")
def test_a_call_that_ends_after_the_close_keeps_no_connection(server: PostgresServer, namespace: str) -> None:
    store = PostgresStore.from_url(server.url, namespace=namespace)
    executor: Any = store.connect(start_timeout=5)
    executor.close()
    assert executor.run(store.queues()) == []
    assert not executor._idle

    async def live() -> int:
        executor: Any = await store.connect_async(start_timeout=5)
        await executor.close()
        assert await executor.run(store.queues()) == []
        return len(executor._idle)

    assert asyncio.run(live()) == 0


class Interrupted(BaseException):
    """What a signal handler raises."""


def interrupted_bodies() -> Iterator[int]:
    """Yield bodies for more than one part of a batch, and be interrupted while the first part is on its way."""
    yield from range(CHUNK_MESSAGES_MAX)
    raise Interrupted


class TestPools:
    """The caller's own pool."""

    @pytest.mark.promise("STORE-5")
    def test_a_pool_of_the_caller_is_used_and_not_closed(self, server: PostgresServer, namespace: str) -> None:
        with psycopg_pool.ConnectionPool(server.url, min_size=1, max_size=2, open=True) as pool:
            with Waypost(client=pool, namespace=namespace) as post:
                post.publish("orders", b"x")
                assert post.stats("orders").ledger.ready == 1
            assert not pool.closed
            with pool.connection() as connection:
                assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE

    @pytest.mark.promise("STORE-5")
    def test_an_asyncio_pool_works_for_the_async_client(self, server: PostgresServer, namespace: str) -> None:
        async def live() -> int:
            async with (
                psycopg_pool.AsyncConnectionPool(server.url, min_size=1, max_size=2, open=False) as pool,
                AsyncWaypost(client=pool, namespace=namespace) as post,
            ):
                await post.publish("orders", b"x")
                return (await post.stats("orders")).ledger.ready

        assert asyncio.run(live()) == 1

    @pytest.mark.promise("STORE-5", "PUB-2")
    def test_a_batch_that_is_interrupted_while_it_is_encoded_returns_its_connection(
        self, server: PostgresServer, namespace: str
    ) -> None:
        # The server may store the first part or not; the only connection of the pool must be free for the next call.
        options: dict[str, Any] = {"min_size": 1, "max_size": 1, "timeout": 10}
        with (
            psycopg_pool.ConnectionPool(server.url, open=True, **options) as pool,
            Waypost(client=pool, namespace=namespace, start_timeout=10, retry_budget=0) as post,
        ):
            with pytest.raises(Interrupted):
                post.publish_many("orders", interrupted_bodies())
            assert post.publish("orders", "next").status == "queued"
            assert post.ledger("orders").balance == 0

        async def live() -> str:
            async with (
                psycopg_pool.AsyncConnectionPool(server.url, open=False, **options) as pool,
                AsyncWaypost(client=pool, namespace=namespace, start_timeout=10, retry_budget=0) as post,
            ):
                with pytest.raises(Interrupted):
                    await post.publish_many("orders", interrupted_bodies())
                return (await post.publish("orders", "next")).status

        assert asyncio.run(live()) == "queued"

    @pytest.mark.promise("STORE-5", "LEASE-14")
    def test_connections_closed_by_a_restart_are_discarded(self) -> None:
        with PostgresServer(durable=True) as own, psycopg_pool.ConnectionPool(own.url, min_size=3, open=True) as pool:
            pool.wait()
            migrate(own.url)
            own.restart()
            # Even the first call of a client, which is not repeated, gets a working connection.
            with Waypost(client=pool) as post:
                assert post.publish("orders", 1).status == "queued"

            async def live() -> int:
                async with psycopg_pool.AsyncConnectionPool(own.url, min_size=3, open=False) as awaited:
                    await awaited.wait()
                    await asyncio.to_thread(own.restart)
                    async with AsyncWaypost(client=awaited) as post:
                        return (await post.ledger("orders")).published

            assert asyncio.run(live()) == 1

    @pytest.mark.promise("LEASE-14")
    def test_a_server_that_refuses_the_connection_is_quoted(self, server: PostgresServer, database: Any) -> None:
        database.execute("CREATE DATABASE closed ALLOW_CONNECTIONS false")
        try:
            url = server.url.rpartition("/")[0] + "/closed"
            with pytest.raises(errors.StoreUnavailable, match="is not currently accepting connections"), Waypost(url):
                pass
        finally:
            database.execute("DROP DATABASE closed")

    @pytest.mark.promise("STORE-5")
    def test_a_single_connection_is_refused(self, database: Any) -> None:
        with pytest.raises(errors.UnusableClient, match="ConnectionPool"):
            Waypost(client=database)

    @pytest.mark.promise("STORE-5")
    def test_a_pool_of_the_wrong_mode_is_refused(self, server: PostgresServer, namespace: str) -> None:
        with psycopg_pool.ConnectionPool(server.url, min_size=1, open=True) as pool:
            store = PostgresStore.from_client(pool, namespace=namespace)
            with pytest.raises(errors.UnusableClient):
                asyncio.run(store.connect_async(start_timeout=1))


def prepared(post: Waypost) -> set[str]:
    """Return what the one connection of a client has prepared."""
    executor: Any = post._connected()
    connection = executor.lend()
    try:
        found = connection.execute("SELECT name FROM pg_prepared_statements").fetchall()
    finally:
        executor.take_back(connection)
    return {str(name).split("_")[1] for (name,) in found if str(name).startswith("waypost_")}


@pytest.mark.promise("STORE-2")
def test_verbs_that_a_connection_runs_often_are_prepared_there(server: PostgresServer, namespace: str) -> None:
    with Waypost(server.url, namespace=namespace) as post:
        post.publish("orders", 1)
        post.stats("orders")
        assert prepared(post) == set()
        for _ in range(10):
            post.publish("orders", 1)
            with post.receive("orders", wait=0) as message:
                assert message is not None
            post.stats("orders")
        assert prepared(post) == {"publish", "claim", "settle"}


@pytest.mark.promise("STORE-2", "STORE-5")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_process_that_does_not_know_a_prepared_statement_gets_all_of_it(
    server: PostgresServer, namespace: str, mode: Any
) -> None:
    """As behind a pooler that leads each call to another process."""
    with Bench(lambda clock, _: PostgresStore.from_url(server.url, namespace=namespace), mode) as bench:
        bench.publish_count(10)
        for _ in range(10):
            bench.publish()
        executor: Any = bench.runner._sync or bench.runner._async
        for connection, _ in executor._idle:
            connection.pgconn.exec_(b"DEALLOCATE ALL")
        for _ in range(10):
            bench.publish()
        assert executor._prepared.refused
        assert bench.ledger().published == 30


@pytest.mark.promise("STORE-5")
def test_nothing_is_prepared_on_connections_whose_owner_does_not_want_it(
    server: PostgresServer, namespace: str
) -> None:
    options: dict[str, Any] = {"autocommit": True, "prepare_threshold": None}
    with psycopg_pool.ConnectionPool(server.url, min_size=1, max_size=1, kwargs=options) as pool:
        with Waypost(client=pool, namespace=namespace) as post:
            for _ in range(10):
                post.publish("orders", 1)
        with pool.connection() as connection:
            assert connection.execute("SELECT name FROM pg_prepared_statements").fetchall() == []
