"""This release and the next one work on one database at the same time, through an upgrade and back."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.postgres.test_versions import make
from tests.upgrade.fleet import Fleet
from tests.upgrade.next_release import NEXT_RELEASE
from tests.waiting import until
from waypost import Waypost
from waypost.cli.commands import migrate as migrate_command
from waypost.cli.main import main
from waypost.errors import SchemaTooNew
from waypost.store.postgres import migrate, migrating, schema
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import program_of

SECONDS = 120
ROLES = ("publish", "work", "receive")


def begin_upgrade(fleet: Fleet) -> None:
    """Bring the fleet to the middle of an upgrade: both releases publish and work."""
    fleet.start("this", *ROLES)
    fleet.wait_for_more("this", "work")
    code, printed = fleet.migrate("next")
    assert (code, f"from version {schema.VERSION} to {schema.VERSION + 1}" in printed) == (0, True), printed
    fleet.wait_for_more("this", "work")
    fleet.start("next", *ROLES)
    fleet.wait_for_more("next", "work")
    fleet.wait_for_more("this", "work")


@pytest.mark.promise("STORE-7")
def test_an_upgrade_goes_on_beside_the_release_before(fleet: Fleet) -> None:
    begin_upgrade(fleet)
    code, printed = fleet.migrate("next", "--finish")
    assert code == 1, printed
    assert f"functions of version {schema.VERSION} were called" in printed
    assert "is registered" in printed
    fleet.stop("this", *ROLES)
    code, printed = fleet.migrate("next", "--finish")
    assert (code, "is registered" in printed) == (1, False), printed
    fleet.pass_time_without_calls()
    code, printed = fleet.migrate("next", "--finish")
    assert (code, printed.startswith(f"removed the functions of version {schema.VERSION} ")) == (0, True), printed
    assert fleet.migrate("next", "--finish")[1].endswith("has nothing to remove\n")
    assert fleet.migrate("next", "--check")[0] == 0
    fleet.wait_for_more("next", "work")
    fleet.stop("next", "publish")
    fleet.check_all()
    with pytest.raises(SchemaTooNew, match="update waypost here"):
        Waypost(fleet.url, namespace=fleet.namespace).open()


@pytest.mark.promise("STORE-7")
def test_an_upgrade_is_reverted(fleet: Fleet) -> None:
    begin_upgrade(fleet)
    code, printed = fleet.migrate("next", "--undo")
    assert (code, f"of release {NEXT_RELEASE} is registered" in printed) == (1, True), printed
    fleet.stop("next", "publish")
    fleet.wait_until_handled()  # the release before leaves newer envelopes for a newer worker
    fleet.stop("next", "work", "receive")
    code, printed = fleet.migrate("next", "--undo")
    assert (code, printed.startswith(f"removed the functions of version {schema.VERSION + 1} ")) == (0, True), printed
    fleet.wait_for_more("this", "work")
    assert fleet.migrate("this", "--check")[0] == 0
    assert fleet.migrate("next")[0] == 0  # and once more
    fleet.wait_for_more("this", "work")
    fleet.stop("this", "publish")
    fleet.check_all()
    with Waypost(fleet.url, namespace=fleet.namespace) as post:
        assert (post.ledger("orders").balance, post.ledger("orders").unexplained) == (0, 0)


def is_complete(database: psycopg.Connection[Any], namespace: str) -> bool:
    """Whether all messages are filled, and the index of the journal has the indexes of all its parts."""
    (left,) = database.execute(f'SELECT count(*) FROM "{namespace}_message" WHERE planted IS NULL').fetchall()
    (valid,) = database.execute(
        "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)", (f'"{namespace}_entry_planted"',)
    ).fetchall()
    return (left, valid) == ((0,), (True,))


@pytest.mark.promise("STORE-7", "BOX-5")
@pytest.mark.parametrize("before", [0, 15, schema.VERSION], ids=lambda version: f"from {version}")
def test_the_next_release_migrates_what_there_is(
    postgres_url: str, tmp_path: Path, next_source: Path, database: psycopg.Connection[Any], before: int
) -> None:
    fleet = Fleet(postgres_url, fresh_namespace(), tmp_path, next_source)
    if before == schema.VERSION:
        migrate(postgres_url, namespace=fleet.namespace)
        with Waypost(postgres_url, namespace=fleet.namespace) as post:
            post.publish_many("orders", range(2_500))
    elif before:
        make(database, before, fleet.namespace)
    code, printed = fleet.migrate("next")
    assert code == 0, printed
    assert is_complete(database, fleet.namespace)
    assert fleet.migrate("next", "--check")[0] == 0


@pytest.mark.promise("STORE-7", "BOX-5")
def test_two_migrations_at_once_take_turns(fleet: Fleet, database: psycopg.Connection[Any]) -> None:
    with Waypost(fleet.url, namespace=fleet.namespace) as post:
        post.publish_many("orders", range(2_500))
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(fleet.migrate, "next") for _ in range(3)]
        assert [one.result()[0] for one in found] == [0, 0, 0], [one.result()[1] for one in found]
    assert is_complete(database, fleet.namespace)
    assert fleet.migrate("next", "--check")[0] == 0


@pytest.mark.promise("STORE-7", "BOX-5")
def test_the_script_for_psql_does_the_same(fleet: Fleet, database: psycopg.Connection[Any]) -> None:
    with Waypost(fleet.url, namespace=fleet.namespace) as post:
        post.publish_many("orders", range(2_500))
    code, script = fleet.migrate("next", "--sql")
    assert code == 0, script
    psql = str(program_of(PostgresServer.wheel, "pginstall18/bin/psql"))
    run_psql = [psql, "--quiet", "-v", "ON_ERROR_STOP=1", fleet.url]
    subprocess.run(run_psql, input=script, text=True, check=True)
    assert is_complete(database, fleet.namespace)
    code, printed = fleet.migrate("next", "--check")
    assert (code, f"functions of version {schema.VERSION} are there too" in printed) == (0, True), printed
    code, script = fleet.migrate("next", "--undo", "--sql")
    assert code == 0, script
    subprocess.run(run_psql, input=script, text=True, check=True)
    assert fleet.migrate("this", "--check")[0] == 0
    assert fleet.migrate("next", "--undo", "--sql")[1].endswith("has the functions of one version only\n")
    assert fleet.migrate("next")[0] == 0
    with Waypost(fleet.url, namespace=fleet.namespace) as post:
        post.publish("orders", 1)
    code, printed = fleet.migrate("next", "--finish", "--sql")
    assert (code, "DROP FUNCTION" in printed, f"functions of version {schema.VERSION} were called" in printed) == (
        1, False, True)  # fmt: skip
    code, script = fleet.migrate("next", "--finish", "--sql", "--force")
    assert code == 0, script
    subprocess.run(run_psql, input=script, text=True, check=True)
    code, printed = fleet.migrate("next", "--check")
    assert (code, "are there too" in printed) == (0, False), printed
    with pytest.raises(SchemaTooNew), Waypost(fleet.url, namespace=fleet.namespace) as post:
        post.publish("orders", 1)


@pytest.mark.promise("STORE-7")
def test_a_step_in_batches_goes_on_until_nothing_is_left_and_reports_its_rows(
    database: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrating, "REPORT_SECONDS", 0.0)
    database.execute("CREATE TEMP TABLE planted AS SELECT n, false AS filled FROM generate_series(1, 1200) n")
    chosen = "SELECT n FROM planted WHERE NOT filled ORDER BY n LIMIT 500"
    step = schema.Step("in batches planted", f"UPDATE planted SET filled = true WHERE n IN ({chosen})")
    reported: list[str] = []
    migrating._run_step(migrating._Turn(database, database), step, patient=True, report=reported.append)
    assert reported == [f"in batches planted: {rows} rows" for rows in ("500", "1,000", "1,200")]
    assert database.execute("SELECT count(*) FROM planted WHERE NOT filled").fetchone() == (0,)


def test_a_migration_that_takes_long_reports_its_steps(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["migrate", postgres_url, "--namespace", fresh_namespace()]
    monkeypatch.setattr(migrate_command, "REPORT_AFTER_SECONDS", 0.0)
    assert main(command) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("created namespace")
    assert printed.err.startswith("waypost: ")
    assert printed.err.endswith(" s: tables and functions\n")


def test_one_step_that_takes_long_is_reported_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with migrate_command.Progress() as fast:
        fast.report("a short step")
    monkeypatch.setattr(migrate_command, "REPORT_AFTER_SECONDS", 0.05)
    with migrate_command.Progress() as progress:
        progress.report("an index")
        first = until(lambda: capsys.readouterr().err, "a reported step")
        progress.report("a column")
        progress.report("a column")
    assert re.findall(" s: (.*)", first + capsys.readouterr().err) == ["an index", "a column"]
