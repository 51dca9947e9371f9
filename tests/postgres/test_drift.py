"""Differences between a database and this release are named, and additions of the user are accepted."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from waypost.errors import StoreUnavailable
from waypost.store.postgres import drift, migrate, schema
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer


@pytest.mark.promise("BOX-5")
@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ("SELECT 1", []),
        ('ALTER TABLE "{}_message" ADD COLUMN mine text; CREATE INDEX ON "{}_message" (mine)', []),
        ('CREATE TABLE "{}_mine" (a text); ALTER TABLE "{}_tally" SET (fillfactor = 90)', []),
        ('DROP INDEX "{}_message_lease"', ["index {}_message_lease is missing"]),
        (
            'ALTER TABLE "{}_reader" ALTER COLUMN read_to TYPE integer',
            ["column {}_reader.read_to is integer not null and should be bigint not null"],
        ),
        ('ALTER TABLE "{}_tally" DROP COLUMN wake CASCADE', [
            "table {}_tally lacks the column wake", "trigger {}_tally_wake of table {}_tally is missing",
        ]),
        (
            f'DROP FUNCTION "{{}}_trim_completed_{schema.VERSION}"',
            [f"function {{}}_trim_completed_{schema.VERSION} is missing"],
        ),
        ('DROP TRIGGER "{}_tally_wake" ON "{}_tally"', ["trigger {}_tally_wake of table {}_tally is missing"]),
        (
            'ALTER TABLE "{}_tally" DISABLE TRIGGER "{}_tally_wake"',
            ["trigger {}_tally_wake of table {}_tally is disabled or not this release's"],
        ),
        ('DROP TABLE "{}_tally"', ["index {}_tally_queue is missing", "table {}_tally is missing"]),
    ],
)  # fmt: skip
def test_differences_are_named(
    server: PostgresServer, namespace: str, database: Any, change: str, reported: list[str]
) -> None:
    database.execute(change.replace("{}", namespace))
    assert drift(server.url, namespace) == [line.replace("{}", namespace) for line in reported]


@pytest.mark.promise("BOX-5")
def test_tables_of_another_version_or_none_are_one_line_with_the_way_out(
    server: PostgresServer, namespace: str, database: Any
) -> None:
    unused = fresh_namespace()
    (line,) = drift(server.url, unused)
    assert f"run `waypost migrate URL --namespace {unused}`" in line
    for change, reported in ((-1, "run `waypost migrate"), (1, "update waypost here")):
        database.execute(f'UPDATE "{namespace}_schema" SET version = {schema.VERSION + change}')
        (line,) = drift(server.url, namespace)
        assert reported in line


@pytest.mark.promise("BOX-5")
def test_a_connection_of_the_caller_is_not_changed(server: PostgresServer, database: Any) -> None:
    name = fresh_namespace()
    database.execute('CREATE SCHEMA IF NOT EXISTS "Side_2"')
    migrate(server.url, namespace=name, schema="Side_2")
    with psycopg.connect(server.url) as connection:
        connection.execute("CREATE TEMPORARY TABLE mine (n int)")
        connection.execute(f'DROP INDEX "Side_2"."{name}_message_lease"'.encode())
        assert drift(connection, name, schema="Side_2") == [f"index {name}_message_lease is missing"]
        connection.execute("INSERT INTO mine VALUES (1)")
        connection.rollback()
        connection.autocommit = True
        assert drift(connection, name, schema="Side_2") == []
        assert connection.info.transaction_status == 0
    assert drift(server.url, name, schema="Side_2") == []


def test_an_unreachable_server_is_an_error_and_not_a_difference() -> None:
    with pytest.raises(StoreUnavailable, match="no connection"):
        drift("postgresql://127.0.0.1:1/nothing")
