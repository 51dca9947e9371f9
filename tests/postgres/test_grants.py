"""A role that owns nothing: with the grants that `migrate` gives it can do everything a client does, and no more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.postgres.test_versions import make
from waypost import Waypost, errors
from waypost.store.postgres import PostgresStore, grants, migrate
from waypost.testing.bench import Bench, Mode, fresh_namespace
from waypost.testing.clock import ManualClock
from waypost.testing.conformance.journal import live_a_little
from waypost.testing.postgres import PostgresServer


@pytest.fixture
def role(database: Any) -> Iterator[str]:
    name = f"clerk_{fresh_namespace().replace('-', '_')}"
    database.execute(f'CREATE ROLE "{name}" LOGIN')
    yield name
    database.execute(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"')


def url_of(server: PostgresServer, role: str) -> str:
    return server.socket_url.replace("postgres@", f"{role}@")


@pytest.mark.promise("STORE-2")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("schema", ["public", "apart"])
def test_a_role_with_these_grants_can_do_all_that_clients_do(
    server: PostgresServer, database: Any, role: str, schema: str, mode: Mode
) -> None:
    name, clock = fresh_namespace(), ManualClock()
    database.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
    migrate(server.url, namespace=name, schema=schema, grant=role)
    url = url_of(server, role)

    def make(_: object, __: str) -> Any:
        return PostgresStore.from_url(url, namespace=name, schema=schema, clock=clock)

    with Bench(make, mode) as bench:
        bench.configure(max_pending=1_000, max_running=100, rate="1000/m", completed=5, journal="full")
        live_a_little(bench)
        bench.publish(key="window", window=5)
        bench.claimed(1, sleeper="sleeper-1")
        bench.purge("ready")
        bench.run(bench.store.journal_reader("orders", "lake", None))
        bench.run(bench.store.journal_forget("orders", "lake"))
        # Enough steps that this role has to fold counters, and to empty a slice of the journal.
        for _ in range(200):
            bench.publish(queue="many")
        bench.run(bench.store.journal_trim("many", 1_000))
        database.execute(f"""SELECT setval('"{schema}"."{name}_turn"', 3)""")
        for _ in range(3):
            bench.publish(queue="many")
            clock.advance(61)
            bench.run(bench.store.journal_trim("many", 1_000))
        left = database.execute(f'SELECT count(*) FROM "{schema}"."{name}_entry_a"').fetchone()
        assert left == (0,)
        bench.check_invariants()
        assert bench.run(bench.store.queues()) == ["many", "orders"]


@pytest.mark.promise("STORE-2", "STORE-6")
def test_the_role_cannot_use_another_namespace_or_change_the_tables(
    server: PostgresServer, database: Any, role: str, namespace: str
) -> None:
    own = fresh_namespace()
    migrate(server.url, namespace=own, grant=role)
    with pytest.raises(errors.AccessDenied, match="grant"):
        PostgresStore.from_url(url_of(server, role), namespace=namespace).connect(start_timeout=5)
    with psycopg.connect(url_of(server, role), autocommit=True) as connection:
        for statement in (
            f'DROP TABLE "{own}_message"',
            f'ALTER TABLE "{own}_message" ADD COLUMN mine text',
            f'UPDATE "{own}_schema" SET version = 7',
            f'TRUNCATE "{own}_message"',
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)


def test_an_unknown_role_or_an_invalid_role_name_is_refused(server: PostgresServer) -> None:
    with pytest.raises(errors.ConfigurationError, match="create it first"):
        migrate(server.url, namespace=fresh_namespace(), grant="unknown_role")
    with pytest.raises(errors.InvalidName):
        grants('a"; DROP TABLE b; --')


def test_granting_twice_is_harmless_and_without_a_migration_it_still_grants(
    server: PostgresServer, role: str, namespace: str
) -> None:
    for _ in range(2):
        migrate(server.url, namespace=namespace, grant=role)
    with Waypost(url_of(server, role), namespace=namespace) as post:
        assert post.publish("orders", 1).status == "queued"


def test_every_object_of_a_migration_is_granted(database: Any, namespace: str) -> None:
    """A new table or function is granted too, as long as its file is written like the others."""
    text = grants("clerk", namespace=namespace)
    made = database.execute(
        "SELECT relname FROM pg_class WHERE starts_with(relname, %s) AND relkind IN ('r', 'p', 'S') "
        "UNION SELECT proname FROM pg_proc WHERE starts_with(proname, %s)",
        (f"{namespace}_", f"{namespace}_"),
    ).fetchall()
    assert len(made) > 50
    # The sequence of an identity column belongs to its table.
    missed = [name for (name,) in made if name not in re.findall(r"[\w-]+", text) and not name.endswith("_number_seq")]
    assert missed == []


@pytest.mark.promise("STORE-2", "STORE-7")
def test_a_role_keeps_its_rights_through_the_update_from_an_older_version(
    server: PostgresServer, database: Any, role: str
) -> None:
    name = fresh_namespace()
    make(database, 15, name)
    database.execute(f'GRANT SELECT, INSERT, UPDATE, DELETE ON "{name}_message" TO "{role}"')
    assert migrate(server.url, namespace=name) == 15
    with Waypost(url_of(server, role), namespace=name) as post:
        assert post.publish("orders", 1).status == "queued"
