"""Behind pgbouncer in transaction mode: few connections serve many clients, and its restart is survived."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.servers.pgbouncer import PgBouncer
from tests.waiting import until
from waypost import AsyncWaypost, Waypost
from waypost.store.postgres import PostgresStore, migrate, migrating
from waypost.store.postgres.schema import Names, take_lock
from waypost.testing.bench import Bench, fresh_namespace
from waypost.testing.postgres import PostgresServer

pytestmark = pytest.mark.needs("pgbouncer")
SideBySide = Callable[[list[Callable[[], object]]], list[object]]


@pytest.mark.promise("STORE-2", "STORE-5")
def test_thirty_clients_share_four_server_connections(
    bouncer: PgBouncer, namespace: str, side_by_side: SideBySide, database: Any
) -> None:
    def connections() -> int:
        found = database.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'waypost' AND backend_type = "
            "'client backend'"
        ).fetchone()
        return int(found[0])

    # Connections of clients that have just been closed are none of this test.
    assert until(lambda: connections() <= 4, "an end of other connections")
    clients = [Waypost(bouncer.url, namespace=namespace) for _ in range(30)]
    at_work = len(clients)
    most = 0
    lock = threading.Lock()

    def live(post: Waypost) -> Callable[[], object]:
        def work() -> int:
            nonlocal at_work
            try:
                for number in range(5):
                    post.publish("orders", number, key=f"key {number}", on_conflict="replace")
                    with post.receive("orders", wait=0) as message:
                        if message is not None:
                            post.extend(message)
            finally:
                with lock:
                    at_work -= 1
            return 5

        return work

    def count() -> int:
        nonlocal most
        while at_work:
            most = max(most, connections())
        return 5

    try:
        assert side_by_side([*(live(post) for post in clients), count]) == [5] * 31
        ledger = clients[0].ledger("orders")
        assert (ledger.balance, ledger.unexplained, ledger.published) == (0, 0, 150 - ledger.duplicates)
    finally:
        for post in clients:
            post.close()
    # In session mode the fifth client would have waited for the first to disconnect.
    assert 0 < most <= 4


@pytest.mark.promise("STORE-7", "BOX-5")
def test_a_migration_through_pgbouncer_keeps_no_lock(bouncer: PgBouncer, database: Any) -> None:
    name = fresh_namespace()
    assert migrate(bouncer.url, namespace=name) == 0
    # The connection of the pooler to the server is still open.
    lock = take_lock("pg_try_advisory_lock", Names("public", name))
    assert database.execute(f"SELECT {lock}").fetchone() == (True,)
    database.execute("SELECT pg_advisory_unlock_all()")
    assert migrate(bouncer.url, namespace=name) == migrate(bouncer.url, namespace=name)


@pytest.mark.promise("STORE-7", "BOX-5")
def test_a_migration_through_pgbouncer_keeps_no_setting(bouncer: PgBouncer) -> None:
    with psycopg.connect(bouncer.url, autocommit=True) as connection, connection.transaction():
        connection.execute("SET LOCAL statement_timeout = '77s'")
        migrating._lift_timeouts(connection)
        assert connection.execute("SHOW statement_timeout").fetchone() == ("77s",)


@pytest.mark.promise("STORE-2", "LEASE-14")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_nothing_is_lost_when_pgbouncer_is_replaced(server: PostgresServer, namespace: str, mode: str) -> None:
    ids: list[str] = []
    with PgBouncer(server) as own:

        def replace() -> None:
            own.kill()
            own.start()

        def publish_and_receive() -> int:
            with Waypost(own.url, namespace=namespace) as post:
                ids.extend(post.publish("orders", number).id for number in range(20))
                replaced = threading.Thread(target=replace)
                replaced.start()
                ids.extend(post.publish("orders", number).id for number in range(20))
                replaced.join(30)
                # With no time to wait, a claim whose connection is found dead returns nothing, and claims nothing new.
                while (done := post.ledger("orders").done) < 40:
                    with post.receive("orders", wait=20):
                        pass
                return done

        async def publish_and_receive_async() -> int:
            async with AsyncWaypost(own.url, namespace=namespace) as post:
                ids.extend([(await post.publish("orders", number)).id for number in range(20)])
                replaced = asyncio.create_task(asyncio.to_thread(replace))
                ids.extend([(await post.publish("orders", number)).id for number in range(20)])
                await replaced
                while (done := (await post.ledger("orders")).done) < 40:
                    async with post.receive("orders", wait=20):
                        pass
                return done

        done = publish_and_receive() if mode == "sync" else asyncio.run(publish_and_receive_async())
    assert (done, len(set(ids))) == (40, 40)


@pytest.mark.promise("STORE-2", "LEASE-3")
def test_a_worker_renews_its_leases_through_pgbouncer(bouncer: PgBouncer, namespace: str) -> None:
    slow = threading.Event()
    seen: list[int] = []
    with Waypost(bouncer.url, namespace=namespace) as post:
        post.configure("orders", lease=0.6)
        post.publish_many("orders", range(30))

        @post.handler("orders", concurrency=3)
        def charge(body: int) -> None:
            if body == 0:
                slow.wait(1.5)  # longer than its lease, so it must have been renewed
            seen.append(body)

        report = post.worker().run(until_empty=True)
        ledger = post.ledger("orders")
    assert (report.handled, sorted(seen)) == (30, list(range(30)))
    assert (ledger.done, ledger.expired, ledger.balance) == (30, 0, 0)


@pytest.mark.promise("STORE-2")
def test_clients_need_no_more_than_statement_mode(server: PostgresServer, namespace: str) -> None:
    """A call is one statement: even where every statement may go to another connection."""
    with PgBouncer(server, pool_mode="statement") as own, Waypost(own.url, namespace=namespace) as post:
        post.configure("orders", max_running=5, max_pending=1_000)
        post.publish_many("orders", range(600))
        for _ in range(5):
            with post.receive("orders", wait=0) as message:
                assert message is not None
                assert post.extend(message) == "ok"
        assert post.ledger("orders").done == 5
        assert post.purge("orders", "ready") == 595


@pytest.mark.promise("STORE-2")
def test_tables_can_be_created_and_verified_through_pgbouncer(bouncer: PgBouncer) -> None:
    name = fresh_namespace()
    assert migrate(bouncer.url, namespace=name) == 0
    with Bench(lambda clock, _: PostgresStore.from_url(bouncer.url, namespace=name), "sync") as bench:
        bench.publish()
        assert bench.ledger().ready == 1
