"""The embedded PostgreSQL: it keeps committed data, ends with the process that started it, and has several releases."""

from __future__ import annotations

import stat

import psycopg
import pytest

from tests.fault.test_embedded_servers import is_gone
from waypost import Waypost
from waypost.errors import (
    AccessDenied,
    MessageIdInUse,
    OperationTooOld,
    OutcomeUnknown,
    QueueFull,
    SchemaTooOld,
    SessionInUse,
    StoreFailed,
    StoreFull,
    StoreUnavailable,
    WaypostError,
)
from waypost.store.postgres import migrate
from waypost.store.postgres.failures import map_error
from waypost.testing.postgres import FOLDERS, PostgresServer


@pytest.mark.promise("STORE-2")
@pytest.mark.parametrize("release", [*sorted(FOLDERS), pytest.param(15, marks=pytest.mark.needs("postgresql-15"))])
def test_messages_work_on_every_available_postgresql_release(release: int) -> None:
    with PostgresServer(release=release) as server:
        migrate(server.url)
        with psycopg.connect(server.url) as connection:
            assert connection.info.server_version // 10000 == release
        with Waypost(server.url) as post:
            post.configure("orders", max_pending=10, max_running=5, rate="100/s", completed=3)
            post.publish("orders", 1, key="k", delay=0.001)
            post.publish("orders", 2, key="k", on_conflict="replace")
            with post.receive("orders", wait=5) as message:
                assert message is not None
                assert message.body == 2
                id = message.id
            assert post.ledger("orders").done == 1
            assert [event.event for event in post.history("orders", id)] == ["published", "claimed", "done"]


def test_committed_data_survives_a_kill_and_the_directory_is_removed_with_the_server() -> None:
    with PostgresServer(durable=True) as server:
        pid, directory, port = server.pid, server.directory, server.port
        assert pid is not None
        migrate(server.url)
        with Waypost(server.socket_url) as post:
            post.publish("orders", 1)
        server.kill()
        assert is_gone(pid)
        server.restart()
        assert server.port == port
        with Waypost(server.url) as post:
            assert post.stats("orders").ledger.ready == 1
    assert not directory.exists()
    assert server.pid is None


@pytest.mark.promise("STORE-2")
def test_other_users_of_the_machine_cannot_connect_to_an_embedded_server() -> None:
    with PostgresServer() as server:
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(f"postgresql://postgres@127.0.0.1:{server.port}/postgres")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(server.url_for("postgres", "guess"))
        with psycopg.connect(server.url) as over_loopback, psycopg.connect(server.socket_url) as over_socket:
            assert over_loopback.execute("SELECT 1").fetchone() == over_socket.execute("SELECT 1").fetchone() == (1,)
        # The socket trusts users that may enter its directory.
        assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
        assert not (server.directory / "password").exists()


@pytest.mark.promise("SEE-6", "STORE-2")
@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("40001", StoreUnavailable), ("40P01", StoreUnavailable), ("55P03", StoreUnavailable),
        ("08006", StoreUnavailable), ("57P03", StoreUnavailable), ("57P01", OutcomeUnknown), ("53100", StoreFull),
        ("57P05", OutcomeUnknown), ("25P04", OutcomeUnknown),
        ("42501", AccessDenied), ("42P01", SchemaTooOld), ("22012", StoreFailed), ("23505", StoreUnavailable),
        ("WPKNW", MessageIdInUse), ("WPGON", OperationTooOld),
        ("WPFUL", QueueFull), ("WPOLD", OperationTooOld), ("WPSES", SessionInUse),
    ],
)  # fmt: skip
def test_an_error_of_the_server_is_one_of_ours(state: str, error: type[WaypostError]) -> None:
    text = "1 2" if state == "WPFUL" else "1" if state in ("WPOLD", "WPGON") else "a text"
    assert type(map_error(state, text, "orders", "publish")) is error
