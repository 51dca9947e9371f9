"""`waypost migrate`: twice, at once, only checked or only printed; its exit codes are for scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waypost import Waypost, errors, release
from waypost.cli.commands import migrate as migrate_command
from waypost.cli.main import main
from waypost.store.postgres import check, migrate, schema, undo
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer

Output = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Output:
    """Run the command in this process; return its exit code, standard output and error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["migrate", *arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.mark.promise("STORE-2")
def test_eight_processes_at_once_make_the_tables_once(server: PostgresServer) -> None:
    name = fresh_namespace()
    arguments = [sys.executable, "-W", "error", "-m", "waypost.cli.main", "migrate", "--namespace", name, "--json"]
    environment = os.environ | {"WAYPOST_URL": server.url, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    running = [
        subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(8)
    ]
    ended = [(process.communicate(timeout=60), process.returncode) for process in running]
    assert [code for _, code in ended] == [0] * 8, ended
    reported = [json.loads(out) for (out, _), _ in ended]
    assert sorted(one["changed"] for one in reported) == [False] * 7 + [True]
    assert {one["version"] for one in reported} == {schema.VERSION}
    assert check(server.url, namespace=name).is_current
    with Waypost(server.url, namespace=name) as post:
        assert post.publish("orders", 1).status == "queued"


def test_it_reports_what_it_did_and_a_second_time_that_there_was_nothing_to_do(
    server: PostgresServer, command: Output
) -> None:
    name = fresh_namespace()
    code, out, err = command(server.url, "--namespace", name)
    assert (code, out, err) == (0, f"created namespace {name} in schema public, version {schema.VERSION}\n", "")
    code, out, _ = command("--url", server.url, "--namespace", name)
    assert (code, out) == (0, f"namespace {name} in schema public is of version {schema.VERSION} already\n")


def test_tables_of_an_older_release_are_brought_up_to_date_and_keep_their_messages(
    server: PostgresServer, namespace: str, command: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Waypost(server.url, namespace=namespace) as post:
        id = post.publish("orders", 1).id
    before = schema.VERSION
    for module in ("schema", "schema_check"):
        monkeypatch.setattr(f"waypost.store.postgres.{module}.VERSION", before + 1)
    with pytest.raises(errors.SchemaTooOld, match=f"`waypost migrate URL --namespace {namespace}`"):
        Waypost(server.url, namespace=namespace).stats("orders")
    code, out, _ = command(server.url, "--namespace", namespace, "--check")
    assert (code, f"this release needs {before + 1}; run `waypost migrate" in out) == (6, True)
    code, out, _ = command(server.url, "--namespace", namespace, "--sql")
    assert (code, "CREATE TABLE" in out.partition("CREATE OR REPLACE FUNCTION")[0], "_claim" in out) == (0, False, True)
    code, out, _ = command(server.url, "--namespace", namespace, "--json")
    assert (code, json.loads(out)["before"], json.loads(out)["version"]) == (0, before, before + 1)
    with Waypost(server.url, namespace=namespace) as post:
        assert [message.id for message in post.peek("orders")] == [id]


@pytest.mark.promise("STORE-7")
def test_functions_of_two_versions_are_apart_under_the_longest_name(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch, database: Any
) -> None:
    name = fresh_namespace().ljust(48, "n")
    assert migrate(server.url, namespace=name) == 0

    def count_functions() -> int:
        (found,) = database.execute("SELECT count(*) FROM pg_proc WHERE starts_with(proname, %s)", (name,)).fetchone()
        return int(found)

    one_version = count_functions()
    with Waypost(server.url, namespace=name) as post:
        post.publish("orders", 1, key="order:1")
        with monkeypatch.context() as patched:
            for module in ("schema", "schema_check"):
                patched.setattr(f"waypost.store.postgres.{module}.VERSION", schema.VERSION + 1)
            assert migrate(server.url, namespace=name) == schema.VERSION - 1
            assert count_functions() == 2 * one_version
            assert post.publish("orders", 2, key="order:2").status == "queued"
            assert undo(server.url, namespace=name).removed == (schema.VERSION,)
        assert count_functions() == one_version
        assert check(server.url, namespace=name).is_current
        assert [message.body for message in post.messages("orders", state="ready")] == [1, 2]
        with post.receive("orders") as message:
            assert message is not None


@pytest.mark.parametrize(
    ("setting", "reported"),
    [("default_transaction_read_only%3Don", "is a replica"), ("default_transaction_read_only%3Doff", "")],
)
def test_a_server_that_may_not_be_written_is_named(
    server: PostgresServer, command: Output, setting: str, reported: str
) -> None:
    url = f"{server.url}?options=-c%20{setting}"
    code, _, err = command(url, "--namespace", fresh_namespace())
    assert (code != 0, reported in err) == (bool(reported), True), err


def test_tables_of_a_newer_release_are_left_alone(
    server: PostgresServer, namespace: str, command: Output, database: Any
) -> None:
    database.execute(f'UPDATE "{namespace}_schema" SET version = {schema.VERSION + 1}')
    code, _, err = command(server.url, "--namespace", namespace)
    assert (code, "update waypost here" in err) == (7, True)
    assert command(server.url, "--namespace", namespace, "--check")[0] == 7
    assert command(server.url, "--namespace", namespace, "--sql")[0] == 7


def test_a_check_names_what_differs_and_tolerates_what_was_added(
    server: PostgresServer, namespace: str, command: Output, database: Any
) -> None:
    database.execute(
        f'ALTER TABLE "{namespace}_message" ADD COLUMN mine text; CREATE INDEX ON "{namespace}_message" (mine);'
        f'CREATE TABLE "{namespace}_mine" (a text); ALTER TABLE "{namespace}_tally" SET (fillfactor = 90)'
    )
    code, out, _ = command(server.url, "--namespace", namespace, "--check")
    assert (code, out) == (0, f"as this release needs them, version {schema.VERSION}\n")
    database.execute(
        f'ALTER TABLE "{namespace}_message" DROP COLUMN cause; DROP TABLE "{namespace}_rate";'
        f'ALTER TABLE "{namespace}_reader" ALTER COLUMN read_to TYPE integer;'
        f'DROP INDEX "{namespace}_tally_queue"; DROP SEQUENCE "{namespace}_turn" CASCADE;'
        f'DROP FUNCTION "{namespace}_trim_completed_{schema.VERSION}";'
        f'CREATE OR REPLACE FUNCTION "{namespace}_journal_keeps_{schema.VERSION}"(p_level text, p_event text) '
        "RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT true'"
    )
    code, out, _ = command(server.url, "--namespace", namespace, "--check", "--json")
    assert code == 6
    reported = json.loads(out)
    assert reported["current"] is False
    assert set(reported["differences"]) >= {
        f"column {namespace}_reader.read_to is integer not null and should be bigint not null",
        f"function {namespace}_trim_completed_{schema.VERSION} is missing",
        f"function {namespace}_journal_keeps_{schema.VERSION} is not this release's",
        f"index {namespace}_tally_queue is missing",
        f"sequence {namespace}_turn is missing",
        f"table {namespace}_message lacks the column cause",
        f"table {namespace}_rate is missing",
    }


def test_a_check_without_tables_names_the_command_and_creates_nothing(
    server: PostgresServer, command: Output, database: Any
) -> None:
    name = fresh_namespace()
    database.execute('CREATE SCHEMA IF NOT EXISTS "Side_2"')
    code, out, _ = command(server.url, "--namespace", name, "--schema", "Side_2", "--check")
    assert (code, f"run `waypost migrate URL --namespace {name} --schema Side_2`" in out) == (6, True)
    migrate(server.url, namespace=name, schema="Side_2")
    assert command(server.url, "--namespace", name, "--schema", "Side_2", "--check")[0] == 0
    found = database.execute(
        "SELECT count(DISTINCT relnamespace) FROM pg_class WHERE relname = %s", (f"{name}_queue",)
    ).fetchone()
    assert found == (1,)


def test_the_printed_script_makes_the_same_tables(server: PostgresServer, command: Output, database: Any) -> None:
    name = fresh_namespace()
    code, out, _ = command("--sql", "--namespace", name)
    assert code == 0
    database.execute(out)
    assert check(server.url, namespace=name).is_current
    assert command(server.url, "--sql", "--namespace", name)[1] == "-- nothing to do\n"


@pytest.mark.parametrize(
    ("arguments", "code", "reported"),
    [
        ((), 2, "no store was given"),
        (("postgresql://127.0.0.1:1/a", "--url", "postgresql://127.0.0.1:1/b"), 2, "two stores are given"),
        (("postgresql://u:hunter2@127.0.0.1:1/nothing",), 3, "no connection to postgresql://127.0.0.1:1/nothing"),
        (("postgresql+psycopg://u:hunter2@host/a",), 2, "without the +psycopg"),
        (("kafka://u:hunter2@host",), 2, "is not known"),
        (("postgresql://127.0.0.1:1/a", "--namespace", "a b"), 2, "is not allowed"),
        (("postgresql://127.0.0.1:1/a", "--schema", 'a"b'), 2, "a schema name has"),
        (("postgresql://127.0.0.1:1/a", "--force"), 2, "--force belongs to --finish or --undo"),
        (("postgresql://127.0.0.1:1/a", "--finish", "--grant", "clerk"), 2, "--grant belongs to a migration"),
    ],
)
def test_a_failure_is_one_line(
    command: Output, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, reported: str
) -> None:
    monkeypatch.delenv("WAYPOST_URL", raising=False)
    ended, out, err = command(*arguments)
    assert (ended, out, err.count("\n")) == (code, "", 1)
    assert reported in err
    assert "hunter2" not in err


def test_a_missing_schema_and_a_user_without_rights_are_errors_with_the_way_out(
    server: PostgresServer, command: Output, database: Any
) -> None:
    code, _, err = command(server.url, "--schema", "nowhere")
    assert (code, 'run CREATE SCHEMA "nowhere" first' in err) == (2, True)
    database.execute("DROP ROLE IF EXISTS stranger")
    database.execute("CREATE ROLE stranger LOGIN; REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    code, _, err = command(server.socket_url.replace("postgres@", "stranger@"), "--namespace", fresh_namespace())
    assert (code, "must own waypost's tables" in err) == (3, True)


def test_stores_that_make_their_own_tables_have_nothing_to_do(command: Output, tmp_path: Path) -> None:
    code, out, _ = command(f"sqlite:///{tmp_path / 'a.db'}")
    assert (code, out.split("\n")[0]) == (0, "nothing to do: only PostgreSQL has tables to migrate")
    assert not (tmp_path / "a.db").exists()


def test_which_processes_can_run_is_reported(command: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    assert "of release 0.1 cannot use what this one writes" in command(url)[1]
    with Waypost(url) as post:
        post.publish("orders", 1)
    assert command(url, "--check")[1] == f"nothing to do: version {release.DATA_VERSION} of the data, finished\n"
    monkeypatch.setattr(migrate_command, "DATA_VERSION", release.DATA_VERSION + 1)
    for options in ((), ("--check",)):
        assert "of the release before and of this one can run side by side" in command(url, *options)[1]
