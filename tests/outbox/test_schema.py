"""Tables beside the user's own: migrated with data in them, verified, and known to Alembic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import BigInteger, Column, MetaData, Table, create_engine

from tests.outbox.transaction_kinds import dialect
from waypost import Waypost
from waypost.errors import InvalidName, SchemaTooNew, SchemaTooOld
from waypost.outbox import include_object, metadata
from waypost.store.postgres import check, finish, migrate, schema, sql
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer

NEXT = "ALTER TABLE {message} ADD COLUMN extra text;\nCREATE INDEX {#message_extra} ON {message} (extra);\n"
Next = Callable[[], int]


@pytest.fixture
def next_version(monkeypatch: pytest.MonkeyPatch) -> Next:
    """Simulate the next release: it has one more column, and a changed function."""

    def become() -> int:
        migration, functions = schema.migration_text, schema.function_text

        def text(name: str) -> str:
            return functions(name) + ("\n-- the next release\n" if name == "claim" else "")

        version = schema.VERSION + 1
        monkeypatch.setattr(schema, "migration_text", lambda name: NEXT if name == "9999_next" else migration(name))
        monkeypatch.setattr(schema, "function_text", text)
        monkeypatch.setattr(schema, "VERSION", version)
        monkeypatch.setattr("waypost.store.postgres.schema_check.VERSION", version)
        monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, (version, "9999_next")))
        return version

    return become


@pytest.mark.promise("BOX-5")
def test_a_migration_keeps_existing_data(server: PostgresServer, namespace: str, next_version: Next) -> None:
    url, before = server.url, schema.VERSION
    with Waypost(url, namespace=namespace) as post:
        post.configure("orders", max_deliveries=7)
        post.publish_many("orders", range(100), key=str)
        post.publish("orders", "later", delay=3600)
        with post.receive("orders") as message:
            assert message is not None
            message.dead("spoilt")
        held = post.receive("orders").__enter__()
        assert held is not None
        ledger = post.ledger("orders")
    version = next_version()
    with pytest.raises(SchemaTooOld, match="migrate"):
        Waypost(url, namespace=namespace).open()
    assert migrate(url, namespace=namespace) == before
    assert migrate(url, namespace=namespace) == version
    assert check(url, namespace=namespace).is_current
    with Waypost(url, namespace=namespace) as post:
        assert post.ledger("orders") == ledger
        assert [letter.reason for letter in post.dead_letters("orders")] == ["spoilt"]
        assert post.publish("orders", 50, key="50").status == "duplicate"
        with post.receive("orders") as message:
            assert message is not None
            assert message.body == 2


@pytest.mark.promise("BOX-5")
def test_an_older_release_does_not_change_newer_tables(
    server: PostgresServer, namespace: str, next_version: Next, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_version()
    migrate(server.url, namespace=namespace)
    monkeypatch.undo()
    with pytest.raises(SchemaTooNew):
        migrate(server.url, namespace=namespace)
    # Its functions are there until the migration is finished.
    with Waypost(server.url, namespace=namespace) as post:
        assert post.publish("orders", 1).status == "queued"
    next_version()
    finish(server.url, namespace=namespace, force=True)
    monkeypatch.undo()
    with pytest.raises(SchemaTooNew):
        Waypost(server.url, namespace=namespace).open()


@pytest.mark.promise("BOX-5")
def test_the_script_of_a_migration_does_the_same(server: PostgresServer, namespace: str, next_version: Next) -> None:
    before = schema.VERSION
    next_version()
    with psycopg.connect(server.url) as connection:
        connection.execute(sql(namespace=namespace, since=before).encode())
    assert check(server.url, namespace=namespace).is_current


@pytest.mark.promise("BOX-5")
def test_the_check_names_what_differs_and_tolerates_what_was_added(server: PostgresServer, namespace: str) -> None:
    with psycopg.connect(server.url) as connection:
        connection.execute(f'ALTER TABLE "{namespace}_message" ADD COLUMN note text'.encode())
        connection.execute(f'CREATE INDEX ON "{namespace}_message" (note)'.encode())
        connection.execute(f'ALTER TABLE "{namespace}_message" SET (autovacuum_vacuum_scale_factor = 0.5)'.encode())
    assert check(server.url, namespace=namespace).is_current
    with psycopg.connect(server.url) as connection:
        connection.execute(f'DROP INDEX "{namespace}_message_ready"'.encode())
        connection.execute(f'ALTER TABLE "{namespace}_message" ALTER COLUMN attempts TYPE bigint'.encode())
    differences = check(server.url, namespace=namespace).differences
    assert any("message_ready" in one for one in differences)
    assert any("attempts" in one for one in differences)
    assert not any("note" in one for one in differences)


@pytest.mark.promise("BOX-5")
def test_tables_that_change_all_the_time_are_vacuumed_often(server: PostgresServer, namespace: str) -> None:
    with psycopg.connect(server.url) as connection:
        found: dict[str, str] = dict(
            connection.execute(
                "SELECT relname, array_to_string(reloptions, ' ') FROM pg_class WHERE relname = ANY (%s)",
                ([f"{namespace}_{table}" for table in ("message", "tally", "operation", "sleeper")],),
            ).fetchall()
        )
    assert len(found) == 4
    assert all("autovacuum_vacuum_scale_factor=0.0" in options for options in found.values())


@pytest.fixture
def differences(server: PostgresServer) -> Callable[..., list[Any]]:
    """Return what Alembic's autogenerate would do."""

    def compare(targets: list[MetaData], *, schema: str | None, **options: Any) -> list[Any]:
        def include_name(name: str | None, type_: str, parents: Any) -> bool:
            return type_ != "schema" or name in (None, schema)

        engine = create_engine(dialect(server.url, "psycopg"))
        try:
            with engine.connect() as connection:
                options = {"target_metadata": targets, "include_schemas": True, "include_name": include_name, **options}
                context = MigrationContext.configure(connection, opts=options)
                found: list[Any] = compare_metadata(context, cast(Any, targets))
                return found
        finally:
            engine.dispose()

    return compare


@pytest.mark.promise("BOX-5")
@pytest.mark.parametrize("schema", [None, "elsewhere"])
def test_autogenerate_proposes_no_change_of_our_tables(
    server: PostgresServer, differences: Callable[..., list[Any]], schema: str | None
) -> None:
    name = fresh_namespace()
    with psycopg.connect(server.url) as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS elsewhere")
    migrate(server.url, namespace=name, schema=schema or "public")
    ours = metadata(namespace=name, schema=schema)
    theirs = MetaData()
    Table("wanted", theirs, Column("n", BigInteger), schema=schema)

    def only_these(object: Any, table: str | None, type_: str, reflected: bool, compare_to: Any) -> bool:
        return table is None or type_ != "table" or not reflected or table.startswith((name, "wanted"))

    include = include_object(namespace=name, schema=schema, then=only_these)
    found = differences([theirs, ours], schema=schema, include_object=include)
    assert [(change[0], change[1].name) for change in found] == [("add_table", "wanted")]


@pytest.mark.promise("BOX-5")
def test_the_number_of_a_queue_is_made_by_the_database(namespace: str) -> None:
    queue = next(table for table in metadata(namespace=namespace).tables.values() if table.name.endswith("_queue"))
    made = [column.name for column in queue.c if column.identity is not None]
    assert made == ["number"]


@pytest.mark.promise("BOX-5")
def test_defaults_are_in_the_metadata_unless_they_name_something_of_the_namespace(namespace: str) -> None:
    columns = [column for table in metadata(namespace=namespace).tables.values() for column in table.c]
    defaults = {
        f"{column.table.name.rpartition('_')[2]}.{column.name}": str(cast(Any, column.server_default).arg)
        for column in columns
        if column.server_default is not None and column.identity is None
    }
    assert defaults["queue.paused"] == "false"
    assert [name for name, text in defaults.items() if "{" in text] == []


@pytest.mark.promise("BOX-5")
def test_metadata_has_every_table_and_column_of_the_database(server: PostgresServer, namespace: str) -> None:
    made = {(table.name, column.name) for table in metadata(namespace=namespace).tables.values() for column in table.c}
    with psycopg.connect(server.url) as connection:
        found = set(
            connection.execute(
                "SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid "
                "WHERE starts_with(c.relname, %s) AND c.relkind IN ('r', 'p') AND NOT c.relispartition "
                "AND a.attnum > 0",
                (f"{namespace}_",),
            ).fetchall()
        )
    assert made == found
    with pytest.raises(InvalidName):
        metadata(namespace='x"; DROP')
