"""Tokens are never given twice, although claims do not wait for the disk: what raises the floor of tokens."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.fault.token_figures import token_crashes
from waypost import Waypost
from waypost.cli.output import event_json
from waypost.store.postgres import check, migrate
from waypost.testing.postgres import PostgresServer

Database = psycopg.Connection[Any]


def raise_floor(database: Database, namespace: str) -> None:
    """Empty the unlogged table, as a recovery does."""
    database.execute(f'TRUNCATE "{namespace}_server"')


@pytest.mark.promise("LEASE-2", "QUEUE-3")
def test_no_token_is_given_twice_over_crashes_and_no_limit_is_passed() -> None:
    readings = list(token_crashes(3))
    assert [str(reading) for reading in readings if not reading.ok] == []


@pytest.mark.promise("LEASE-2")
def test_a_token_grows_over_a_recovery_and_claims_are_counted_separately(
    server: PostgresServer, database: Database, namespace: str
) -> None:
    with Waypost(server.url, namespace=namespace) as post:
        post.publish_many("orders", range(3))
        for _ in range(2):
            with post.receive("orders") as message:
                assert message is not None
                assert message.token == 1
                message.retry(after=0)
        raise_floor(database, namespace)
        tokens = {}
        for _ in range(3):
            with post.receive("orders") as message:
                assert message is not None
                tokens[message.body] = message.token
                if message.body == 2:
                    message.retry(after=0)
        with post.receive("orders") as message:
            assert message is not None
            assert message.token == tokens[2] + 1
        assert min(tokens.values()) > 1_700_000_000_000_000
        assert len(set(tokens.values())) == 1
        ledger = post.ledger("orders")
        assert (ledger.claims, ledger.first_claims, ledger.unexplained) == (6, 3, 0)
        reported = [event for event in post.journal("orders").events if event.event in ("claimed", "retried", "done")]
        assert [(event.event, event.claims) for event in reported] == [
            ("claimed", 1), ("retried", 1), ("claimed", 1), ("retried", 1), ("claimed", 1), ("retried", 1),
            ("claimed", 2), ("done", 2), ("claimed", 2), ("done", 2), ("claimed", 2), ("done", 2),
        ]  # fmt: skip
        assert {event_json(event)["token"] for event in reported[:2]} == {"1"}
        assert all(isinstance(event_json(event)["token"], str) for event in reported)


@pytest.mark.promise("LEASE-2", "LEASE-7")
def test_at_most_once_gives_a_token_above_the_floor_too(
    server: PostgresServer, database: Database, namespace: str
) -> None:
    with Waypost(server.url, namespace=namespace) as post:
        post.configure("orders", lease=None, completed=5)
        raise_floor(database, namespace)
        post.publish("orders", 1)
        with post.receive("orders") as message:
            assert message is not None
            assert message.token > 1_700_000_000_000_000
        ledger = post.ledger("orders")
        assert (ledger.claims, ledger.first_claims, ledger.done) == (1, 1, 1)
        assert [event.claims for event in post.journal("orders").events if event.event != "configured"] == [0, 1, 1]


@pytest.mark.promise("LEASE-2")
@pytest.mark.parametrize("how", ["a start after a clean stop", "a restored dump"])
def test_a_restore_of_an_older_state_raises_the_floor_of_tokens(how: str) -> None:
    with PostgresServer(durable=True) as server:
        migrate(server.url)
        with Waypost(server.url) as post:
            post.publish("orders", 1)
            post.publish("orders", 2)
        with Waypost(server.url) as post, post.receive("orders") as message:
            assert message is not None
            first = message.token
        if how == "a restored dump":
            # The table is a new one there, with the content of the old one.
            with psycopg.connect(server.url) as connection:
                connection.execute("CREATE TABLE kept AS SELECT * FROM wp_server")
                connection.execute("DROP TABLE wp_server")
                connection.execute("CREATE UNLOGGED TABLE wp_server AS SELECT * FROM kept")
        else:
            server.restart()
        with Waypost(server.url) as post, post.receive("orders") as message:
            assert message is not None
            assert message.token > first + 500_000


def test_the_table_that_a_recovery_empties_is_unlogged(
    server: PostgresServer, database: Database, namespace: str
) -> None:
    database.execute(f'ALTER TABLE "{namespace}_server" SET LOGGED')
    found = check(server.url, namespace=namespace)
    assert found.differences == (f"table {namespace}_server is logged and should be unlogged",)
    database.execute(f'ALTER TABLE "{namespace}_server" SET UNLOGGED')
    assert check(server.url, namespace=namespace).is_current
