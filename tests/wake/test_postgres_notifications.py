"""Notifications of PostgreSQL are sent at the commit, and not at all where no sleeper would receive them."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.servers.pgbouncer import PgBouncer
from tests.waiting import until
from tests.wake.conftest import Received, served_hub
from waypost import Waypost
from waypost.operations import receive
from waypost.operations.flow import drive
from waypost.store.port import Draft
from waypost.store.postgres import migrate
from waypost.store.postgres.schema import VERSION
from waypost.testing.postgres import PostgresServer
from waypost.wake.port import Topic
from waypost.wake.postgres import channel_of


class Listener:
    """A connection that receives all notifications of a queue."""

    def __init__(self, url: str, namespace: str, queue: str = "orders") -> None:
        self.url = url
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute(f'LISTEN "{channel_of(Topic(namespace, "ready", queue))}"')

    def received(self) -> list[str]:
        """Return what has arrived before a notification of our own."""
        with psycopg.connect(self.url, autocommit=True) as other:
            channel = self.connection.execute("SELECT pg_listening_channels()").fetchone()
            assert channel is not None
            other.execute("SELECT pg_notify(%s, 'the end')", channel)
        notifications: list[str] = []
        for notice in self.connection.notifies(timeout=20):
            if notice.payload == "the end":
                break
            notifications += notice.payload.split("\n")
        return notifications


@pytest.fixture
def listener(prepared: PostgresServer, namespace: str) -> Iterator[Listener]:
    made = Listener(prepared.url, namespace)
    yield made
    made.connection.close()


def put_to_sleep(post: Waypost, *names: str) -> None:
    for name in names:
        drive(post._connected(), receive.claim(post._context, "orders", 1, sleeper=name))


@pytest.mark.promise("WAKE-4", "BOX-2")
def test_a_notification_is_sent_at_the_commit_and_none_after_a_rollback(
    prepared: PostgresServer, namespace: str, listener: Listener
) -> None:
    with Waypost(prepared.url, namespace=namespace) as post:
        put_to_sleep(post, "@a", "@b")

        def publish(connection: psycopg.Connection[Any]) -> None:
            id = post._session.message_ids(1)[0]
            draft = Draft(id, b"\x00" + id.encode())
            call: Any = post.store.publish("orders", [draft], post._context.replay_windows.begin("orders"))
            values = [value for _, value in call.parameters]
            kinds = [kind for kind, _ in call.parameters]
            result = connection.pgconn.exec_params(call.command, values, kinds, [1] * len(values))
            assert not result.error_message

        with psycopg.connect(prepared.url) as connection:
            connection.execute("SELECT 1")
            publish(connection)
            assert listener.received() == []
            connection.rollback()
            assert listener.received() == []
            connection.execute("SELECT 1")
            publish(connection)
            assert listener.received() == []
            connection.commit()
        assert listener.received() == ["@b"]


@pytest.mark.promise("WAKE-4")
def test_without_sleepers_nothing_is_sent(prepared: PostgresServer, namespace: str, listener: Listener) -> None:
    with Waypost(prepared.url, namespace=namespace) as post:
        post.publish("orders", 1)
        assert listener.received() == ["*"]
        for number in range(50):
            post.publish("orders", number)
        post.publish_many("orders", range(100))
        assert listener.received() == []


@pytest.mark.promise("WAKE-4")
def test_sleepers_of_another_channel_are_not_notified_on_this_one(
    prepared: PostgresServer, namespace: str, listener: Listener
) -> None:
    with Waypost(prepared.url, namespace=namespace) as post:
        # What the client itself sends to the other one would come a moment later.
        post._context.wake = lambda names: None
        put_to_sleep(post, "elsewhere", "@here")
        post.publish_many("orders", range(2))
        assert listener.received() == ["@here"]


@pytest.mark.promise("WAKE-2", "WAKE-4")
def test_many_names_go_in_several_payloads(prepared: PostgresServer, namespace: str, listener: Listener) -> None:
    names = [f"@{number:03}{'x' * 124}" for number in range(120)]
    with Waypost(prepared.url, namespace=namespace) as post:
        put_to_sleep(post, *names)
        post.publish_many("orders", range(120))
        assert sorted(listener.received()) == names


@pytest.mark.promise("WAKE-4")
@pytest.mark.parametrize("queue", ["orders", "q" * 128, "a:b.c-d"])
def test_the_server_and_the_client_compute_the_same_channel_name(
    prepared: PostgresServer, namespace: str, queue: str
) -> None:
    with psycopg.connect(prepared.url) as connection:
        row = connection.execute(f'SELECT "{namespace}_channel_{VERSION}"(%s)', (queue,)).fetchone()
    assert row == (channel_of(Topic(namespace, "ready", queue)),)
    assert len(row[0].encode()) <= 63


@pytest.mark.promise("WAKE-3", "STORE-5")
def test_a_connection_pool_of_the_caller_lends_no_connection_permanently(
    prepared: PostgresServer, namespace: str
) -> None:
    from psycopg_pool import ConnectionPool

    started: list[int] = []
    with (
        ConnectionPool(prepared.url, min_size=1, max_size=3, open=True) as pool,
        Waypost(client=pool, namespace=namespace) as post,
        Waypost(prepared.url, namespace=namespace) as other,
    ):

        @post.handler("orders")
        async def handle(body: int) -> None:
            started.append(body)

        with post.worker():
            assert until(lambda: other.stats("orders").sleepers == 1, "a sleeper")
            other.publish("orders", 1)
            assert until(lambda: started == [1], "the start")


@pytest.mark.needs("pgbouncer")
@pytest.mark.promise("WAKE-4", "STORE-2", "TIMER-3")
def test_behind_a_pooler_that_breaks_listen_workers_poll_and_log_it_once(
    prepared: PostgresServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[int] = []
    with (
        caplog.at_level(logging.WARNING, "waypost"),
        PgBouncer(prepared) as pooler,
        Waypost(pooler.url, namespace=namespace, start_timeout=1.0) as post,
        Waypost(pooler.url, namespace=namespace, start_timeout=1.0) as other,
    ):

        @post.handler("orders")
        async def handle(body: int) -> None:
            started.append(body)

        with post.worker():
            assert until(lambda: post.wakeups.state == "broken", "the discovery")
            assert post.wakeups.degraded
            for number in range(5):
                other.publish("orders", number)
                assert until(lambda n=number: n in started, "the start")  # type: ignore[misc]
            assert other.stats("orders").sleepers == 0
    warnings = [record for record in caplog.records if record.__dict__.get("event") == "wake_broken"]
    assert len(warnings) == 1
    assert "pooler" in warnings[0].getMessage()


@pytest.mark.needs("pgbouncer")
@pytest.mark.promise("WAKE-4", "STORE-2")
def test_behind_a_pooler_wake_ups_can_go_straight_to_the_server(prepared: PostgresServer, namespace: str) -> None:
    started: list[int] = []
    with PgBouncer(prepared) as pooler, Waypost(pooler.url, namespace=namespace, wake=prepared.url) as post:

        @post.handler("orders")
        async def handle(body: int) -> None:
            started.append(body)

        with post.worker():
            assert until(lambda: post.stats("orders").sleepers == 1, "a sleeper")
            post.publish("orders", 1)
            assert until(lambda: started == [1], "the start")
            assert post.wakeups.state == "working"


@pytest.mark.promise("WAKE-3")
def test_a_restarted_server_is_listened_to_again(namespace: str) -> None:
    with PostgresServer() as server:
        migrate(server.url, namespace=namespace)
        hub = served_hub("postgres", server.url)
        notes = Received()
        listener = hub.listen(Topic(namespace, "ready", "orders"), "a", notes)
        assert until(lambda: listener.working)
        server.kill()
        assert until(lambda: not listener.working, "the notice")
        server.start()
        assert until(lambda: listener.working, "the repair")
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("SELECT pg_notify(%s, 'a')", (channel_of(listener.topic),))
        assert notes.wait_for("a")
        hub.stop()


@pytest.mark.promise("WAKE-1", "WAKE-5")
def test_a_message_that_is_committed_while_a_worker_falls_asleep_is_not_left_behind(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "SAFETY_POLL_SECONDS", 600.0)
    chance = random.Random(7)
    started: list[int] = []
    left_behind = 0
    with PostgresServer(durable=True) as server:
        migrate(server.url, namespace=namespace)
        with (
            Waypost(server.url, namespace=namespace) as post,
            Waypost(server.url, namespace=namespace) as first,
            Waypost(server.url, namespace=namespace) as second,
        ):

            @post.handler("orders")
            async def handle(body: int) -> None:
                started.append(body)

            with post.worker() as worker:
                for number in range(0, 200, 2):
                    assert until(lambda: first.stats("orders").sleepers == 1, "a sleeper")
                    other = threading.Timer(chance.uniform(0, 0.01), second.publish, ("orders", number + 1))
                    other.start()
                    first.publish("orders", number)
                    other.join()
                    deadline = time.monotonic() + 3
                    while len(started) < number + 2 and time.monotonic() < deadline:
                        time.sleep(0.005)
                    if len(started) < number + 2:
                        # This is what the safety poll is for: a step that took longer than a woken worker polls again.
                        left_behind += 1
                        worker._worker.poll_now("orders")
                    assert until(lambda n=number: len(started) == n + 2, "both starts")  # type: ignore[misc]
    assert left_behind <= 3
