"""The embedded PostgreSQL: it keeps what was committed, ends with whoever started it, and comes in several releases."""

from __future__ import annotations

import psycopg
import pytest

from tests.fault.test_servers import is_gone
from waypost import Waypost
from waypost.store.postgres import migrate
from waypost.testing.postgres import FOLDERS, PostgresServer


@pytest.mark.promise("STORE-2")
@pytest.mark.parametrize("release", [*sorted(FOLDERS), pytest.param(15, marks=pytest.mark.needs("postgresql-15"))])
def test_a_message_lives_its_life_on_every_release_there_is(release: int) -> None:
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


def test_what_was_committed_survives_a_kill_and_the_directory_goes_with_the_server() -> None:
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
