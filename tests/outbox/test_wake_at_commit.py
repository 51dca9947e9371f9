"""The sleepers to wake are chosen when the caller's transaction is committed, not when it published."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from tests.outbox.transaction_kinds import dialect
from tests.servers.pgbouncer import PgBouncer
from tests.unit.clients import begin_operation
from tests.waiting import until
from tests.wake.test_postgres_notifications import Listener, put_to_sleep
from waypost import Retry, Waypost
from waypost.operations import receive
from waypost.testing.postgres import PostgresServer
from waypost.wake.port import Topic
from waypost.wake.sqlite import FileWatch
from waypost.worker import poller


@pytest.fixture
def listener(server: PostgresServer, namespace: str) -> Iterator[Listener]:
    made = Listener(server.url, namespace)
    yield made
    made.connection.close()


@pytest.fixture
def connection(server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(server.url) as made:
        yield made


def wake_up(post: Waypost, name: str) -> None:
    """Claim like a worker that has work and no longer sleeps."""
    operation = begin_operation(post._context, "orders")
    post._call(post.store.claim("orders", 0, operation, worker="w", sleeper=name))


@pytest.mark.promise("BOX-2", "WAKE-2")
def test_a_worker_that_falls_asleep_after_the_publish_is_woken_by_its_commit(
    post: Waypost, connection: psycopg.Connection[Any], listener: Listener
) -> None:
    post.publish("orders", 1, transaction=connection)
    put_to_sleep(post, "@late")
    assert listener.received() == []
    connection.commit()
    assert listener.received() == ["@late"]


@pytest.mark.promise("BOX-2", "WAKE-2")
def test_a_worker_that_is_awake_again_by_the_commit_is_not_woken(
    post: Waypost, connection: psycopg.Connection[Any], listener: Listener
) -> None:
    put_to_sleep(post, "@busy", "@asleep")
    post.publish("orders", 1, transaction=connection)
    # What it does is its own step, and nothing of the open transaction holds it up.
    wake_up(post, "@busy")
    connection.commit()
    assert listener.received() == ["@asleep"]


@pytest.mark.promise("BOX-2", "WAKE-2")
def test_a_transaction_wakes_one_sleeper_per_message_and_none_for_a_savepoint_rolled_back(
    post: Waypost, connection: psycopg.Connection[Any], listener: Listener
) -> None:
    put_to_sleep(post, *(f"@{number}" for number in range(9)))
    post.publish("orders", 1, transaction=connection)
    with connection.transaction(force_rollback=True):
        post.publish_many("orders", range(5), transaction=connection)
    post.publish("orders", 2, key="k", transaction=connection)
    post.publish_many("orders", [3, 4], transaction=connection)
    connection.commit()
    assert sorted(listener.received()) == ["@5", "@6", "@7", "@8"]
    assert post.stats("orders").sleepers == 5


@pytest.mark.promise("WAKE-2", "WAKE-4", "BOX-2")
def test_a_commit_without_sleepers_sends_no_notification(
    post: Waypost, connection: psycopg.Connection[Any], listener: Listener
) -> None:
    post.publish("orders", 0, transaction=connection)
    connection.commit()
    assert listener.received() == ["*"], "the sleepers are unknown: all are woken, once"
    for number in range(30):
        post.publish("orders", number, transaction=connection)
        if number % 3 == 0:
            post.publish_many("orders", [number, number], transaction=connection)
        connection.commit()
    assert listener.received() == []


@pytest.mark.promise("BOX-2")
def test_a_paused_queue_wakes_no_worker_and_one_resumed_before_the_commit_does(
    post: Waypost, connection: psycopg.Connection[Any], listener: Listener
) -> None:
    put_to_sleep(post, "@a")
    post.pause("orders")
    post.publish("orders", 1, transaction=connection)
    connection.commit()
    assert listener.received() == []
    assert post.purge("orders") == 1
    post.publish("orders", 2, transaction=connection)
    post.publish("orders", 3, key="k", transaction=connection)
    post.resume("orders")
    assert listener.received() == []
    connection.commit()
    assert listener.received() == ["@a"]


@pytest.mark.promise("BOX-1", "BOX-2", "WAKE-2")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_repeatable_read_transaction_wakes_all_sleepers_and_does_not_fail(
    post: Waypost, connection: psycopg.Connection[Any], listener: Listener, level: str
) -> None:
    put_to_sleep(post, "@a")
    connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
    connection.execute("SELECT count(*) FROM shop")
    post.publish("orders", 1, transaction=connection)
    wake_up(post, "@a")
    put_to_sleep(post, "@a", "@b")
    connection.commit()
    assert listener.received() == ["*"]
    assert post.ledger("orders").ready == 1


@pytest.mark.promise("BOX-2", "BOX-3")
def test_a_settle_in_a_transaction_wakes_workers_for_released_messages(post: Waypost, listener: Listener) -> None:
    post.publish("orders", 1)
    listener.received()
    with post.receive("orders") as message:
        assert message is not None
        with message.transaction():
            message.outcome = Retry(after=0)
            put_to_sleep(post, "@a")
            assert listener.received() == []
        assert message.settled == "retried"
    assert listener.received() == ["@a"]


@pytest.mark.promise("CHAIN-2", "BOX-2")
def test_the_end_of_a_chain_in_a_transaction_delays_no_sleeper(
    post: Waypost, connection: psycopg.Connection[Any], listener: Listener
) -> None:
    first = post.publish("steps", 1, chain=True)
    post.publish("orders", 2, after=[first])
    with post.receive("steps") as message:
        assert message is not None
        put_to_sleep(post, "@a")
        with message.transaction(connection):
            pass
        wake_up(post, "@a")
        put_to_sleep(post, "@a")
        assert listener.received() == []
        connection.commit()
    assert listener.received() == ["@a"]


@pytest.mark.needs("pgbouncer")
@pytest.mark.promise("BOX-2", "WAKE-2", "WAKE-4", "STORE-2")
def test_behind_a_pooler_a_commit_wakes_a_worker_with_a_direct_connection(
    server: PostgresServer, namespace: str
) -> None:
    started = threading.Event()
    with (
        PgBouncer(server) as pooler,
        Waypost(pooler.url, namespace=namespace, wake=server.url) as worker,
        Waypost(pooler.url, namespace=namespace) as post,
        closing(psycopg.connect(pooler.url, prepare_threshold=None)) as connection,
    ):

        @worker.handler("orders")
        async def handle(body: int) -> None:
            started.set()

        with worker.worker():
            post.publish("orders", 1, transaction=connection)
            assert until(lambda: worker.stats("orders").sleepers == 1, "a sleeper")
            connection.commit()
            assert started.wait(20)


@pytest.mark.promise("BOX-2")
def test_a_queue_with_a_cap_is_woken_at_the_commit_too(
    post: Waypost, connection: psycopg.Connection[Any], listener: Listener
) -> None:
    post.configure("orders", max_pending=5)
    put_to_sleep(post, "@a")
    post.publish("orders", 1, transaction=connection)
    put_to_sleep(post, "@b")
    assert listener.received() == []
    connection.commit()
    assert listener.received() == ["@b"]


@pytest.mark.promise("WAKE-2")
def test_a_schedule_that_fires_unregisters_the_sleeper_that_it_wakes(post: Waypost, listener: Listener) -> None:
    post.save_schedule("rollup", queue="orders", cron="0 9 * * *", body=1)
    put_to_sleep(post, "@a")
    post.trigger_schedule("rollup", queue="orders")
    assert listener.received() == ["@a"]
    assert post.stats("orders").sleepers == 0


@pytest.mark.promise("BOX-2", "BOX-3")
def test_a_settle_in_a_session_of_the_caller_wakes_workers_at_its_commit(
    server: PostgresServer, post: Waypost, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, woken = create_engine(dialect(server.url, "psycopg")), list[Any]()
    monkeypatch.setattr(post._context, "wake", woken.append)
    with Session(engine) as session:
        for commits in (False, True):
            post.publish("orders", 1)
            woken.clear()
            with post.receive("orders") as message:
                assert message is not None
                put_to_sleep(post, "a")  # it listens to a channel other than the store's own
                with message.transaction(session):
                    message.outcome = Retry(after=0)
                assert woken == [], "nothing is committed yet"
                session.commit() if commits else session.rollback()
        assert woken == [{"orders": ["a"]}]
    engine.dispose()


@pytest.mark.promise("BOX-2")
def test_a_commit_of_a_session_on_sqlite_wakes_the_sleepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, woken, handled = f"sqlite:///{tmp_path / 'shop.db'}", list[Any](), list[int]()
    engine = create_engine(url)
    with Waypost(url) as post, Waypost(url) as other:
        wake = post.wakeups.wake

        def record(names: dict[str, list[str]]) -> None:
            woken.append(names)
            wake(names)

        monkeypatch.setattr(post._context, "wake", record)

        @other.handler("orders")
        def charge(body: int) -> None:
            handled.append(body)

        with other.worker(), Session(engine) as session:
            until(lambda: post.stats("orders").sleepers == 1, "a sleeper")
            post.publish("orders", 1, transaction=session)
            post.cancel("orders", key="none", transaction=session)
            session.rollback()
            session.commit()
            assert woken == [], "nothing was published"
            for body in (2, 3):
                until(lambda: post.stats("orders").sleepers == 1, "a sleeper")
                post.publish("orders", body, transaction=session)
                assert len(woken) == body - 2, "nothing is committed yet"
                session.commit()
                assert woken[body - 2 :] == [{"orders": ["*"]}]
                until(lambda: len(handled) == len(woken), "the handler")
    engine.dispose()
    assert handled == [2, 3]


@pytest.mark.promise("BOX-2")
def test_savepoints_of_a_session_neither_wake_before_the_commit_nor_forget_the_sleepers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, woken = f"sqlite:///{tmp_path / 'shop.db'}", list[Any]()
    engine = create_engine(url)
    with Waypost(url) as post, Session(engine) as session:
        post.ledger("orders")
        monkeypatch.setattr(post._context, "wake", woken.append)
        post.publish("orders", 1, transaction=session)
        with session.begin_nested():
            post.publish("orders", 2, transaction=session)
        assert woken == [], "a released savepoint commits nothing"
        session.commit()
        assert woken == [{"orders": ["*"]}]

        post.publish("orders", 3, transaction=session)
        savepoint = session.begin_nested()
        post.publish("orders", 4, transaction=session)
        savepoint.rollback()
        assert len(woken) == 1
        session.commit()
        assert woken[1:] == [{"orders": ["*"]}], "what was published before the savepoint is committed"

        post.publish("orders", 5, transaction=session)
        with session.begin_nested(), session.begin_nested():
            post.publish("orders", 6, transaction=session)
        session.rollback()
        session.commit()
        assert len(woken) == 2, "all of it was rolled back"
        assert [message.body for message in post.messages("orders")] == [1, 2, 3]
    engine.dispose()


@pytest.mark.promise("BOX-2")
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_session_whose_info_its_owner_has_cleared_ends_and_wakes_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    url, woken = f"sqlite:///{tmp_path / 'shop.db'}", list[Any]()
    engine = create_engine(url)
    with Waypost(url) as post, Session(engine) as session:
        post.ledger("orders")
        monkeypatch.setattr(post._context, "wake", woken.append)
        post.publish("orders", 1, transaction=session)
        session.info.clear()
        getattr(session, end)()
        assert woken == []
        post.publish("orders", 2, transaction=session)
        session.commit()
        assert woken == [{"orders": ["*"]}]
    engine.dispose()


@pytest.fixture
def sleeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Waypost, list[int]]]:
    """A worker of queue orders in a file that polls so rarely that only a wake-up lets it find a message in time."""
    monkeypatch.setattr(receive, "SAFETY_POLL_SECONDS", 3600.0)
    monkeypatch.setattr(poller, "heartbeat_interval", lambda window: 3600.0)
    handled: list[int] = []
    with Waypost(f"sqlite:///{tmp_path / 'shop.db'}") as worker:
        worker.configure("orders", lease=3600)

        @worker.handler("orders")
        def charge(body: int) -> None:
            handled.append(body)

        with worker.worker():
            until(lambda: worker.stats("orders").sleepers == 1, "a sleeper")
            yield worker, handled


@pytest.mark.promise("BOX-2", "BOX-6")
def test_a_commit_of_any_connection_to_a_file_wakes_the_sleepers(
    sleeping: tuple[Waypost, list[int]], tmp_path: Path
) -> None:
    worker, handled = sleeping
    path = tmp_path / "shop.db"
    engine = create_engine(f"sqlite:///{path}")
    with Waypost(f"sqlite:///{path}") as post, closing(sqlite3.connect(path)) as connection:
        post.publish("orders", 1, transaction=connection)
        connection.commit()
        until(lambda: handled == [1], "the handler")
        with engine.begin() as other:
            until(lambda: worker.stats("orders").sleepers == 1, "a sleeper")
            post.publish("orders", 2, transaction=other)
        until(lambda: handled == [1, 2], "the handler")
        until(lambda: worker.stats("orders").sleepers == 1, "a sleeper")
        post.publish("orders", 3, delay=0.5, transaction=connection)
        connection.commit()
        until(lambda: len(handled) == 3, "the timer")
    assert handled == [1, 2, 3]
    engine.dispose()


@pytest.mark.promise("BOX-2", "BOX-6")
def test_a_commit_of_another_process_to_a_file_wakes_the_sleepers(
    sleeping: tuple[Waypost, list[int]], tmp_path: Path
) -> None:
    _, handled = sleeping
    program = (
        "import os, sqlite3, sys; from waypost import Waypost\n"
        "post, connection = Waypost(f'sqlite:///{sys.argv[1]}'), sqlite3.connect(sys.argv[1])\n"
        "post.publish('orders', 1, transaction=connection); connection.commit()\n"
        "os._exit(0)"  # without a close, which could notify
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "shop.db")], check=True, timeout=90)
    until(lambda: handled, "the handler")
    assert handled == [1]


@pytest.mark.promise("BOX-2", "WAKE-2")
def test_other_writes_to_a_file_wake_no_sleeper(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    watch = FileWatch(str(path), lambda topic: {"@a", "@b"})
    with Waypost(f"sqlite:///{path}") as post, closing(sqlite3.connect(path)) as connection:
        put_to_sleep(post, "@a", "@b")
        assert watch.has_changed()
        assert not watch.has_changed()
        connection.execute("CREATE TABLE shop (n)")
        connection.commit()
        post.publish("others", 1)
        post.publish("others", 1, transaction=connection)
        connection.rollback()
        assert watch.has_changed()
        assert not watch.transactions_woke("wp")
        post.publish("orders", 1, transaction=connection)
        assert not watch.has_changed()
        connection.commit()
        assert watch.has_changed()
        assert watch.transactions_woke("wp")
        assert not watch.transactions_woke("wp")
        (woken,) = watch.woken(Topic("wp", "ready", "orders"))
        assert woken in ("@a", "@b"), "one message wakes one"
    watch.close()
