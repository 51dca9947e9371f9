"""An upgrade that begins too early, waits, is refused or is cut short: nothing is removed that a process uses."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests.postgres.test_versions import make
from tests.upgrade.fleet import Fleet
from tests.waiting import until
from waypost import Waypost
from waypost.errors import SchemaTooOld, StoreUnavailable, WaypostError
from waypost.policy import WORKERS_MAX
from waypost.release import VERSION as RELEASE
from waypost.store.port import Heartbeat
from waypost.store.postgres import migrate, migrating, schema
from waypost.store.register import pack
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import program_of

SECONDS = 120
NEXT = schema.VERSION + 1
Database = psycopg.Connection[Any]


def begin(fleet: Fleet) -> None:
    code, printed = fleet.migrate("next")
    assert code == 0, printed


def run_psql(fleet: Fleet, script: str) -> subprocess.CompletedProcess[str]:
    psql = str(program_of(PostgresServer.wheel, "pginstall18/bin/psql"))
    return subprocess.run(
        [psql, "--quiet", fleet.url], input=script, text=True, capture_output=True, timeout=SECONDS, check=False
    )


def versions(database: Database, fleet: Fleet) -> list[int]:
    """Return the versions of the functions that are there."""
    found = database.execute("SELECT proname FROM pg_proc WHERE starts_with(proname, %s)", (f"{fleet.namespace}_",))
    return sorted({int(name.rpartition("_")[2]) for (name,) in found})


def triggers(database: Database, fleet: Fleet) -> list[tuple[str, str]]:
    return database.execute(
        "SELECT t.tgname, p.proname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_proc p ON "
        "p.oid = t.tgfoid WHERE starts_with(c.relname, %s) AND NOT t.tgisinternal", (f"{fleet.namespace}_",),
    ).fetchall()  # fmt: skip


# ---- who is left -------------------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-7")
def test_finish_waits_until_calls_have_been_noted_for_15_minutes(fleet: Fleet) -> None:
    with Waypost(fleet.url, namespace=fleet.namespace) as post:
        post.publish("orders", 1)  # it was called before the migration, so this is not noted
        begin(fleet)
        code, printed = fleet.migrate("next", "--finish")
        assert (code, "were called" in printed) == (1, False), printed
        (until_text,) = re.findall(r"for less than 15 minutes; until (\S+Z) it is not known", printed)
        assert fleet.migrate("next", "--check")[1].endswith(f"--finish` removes them, from {until_text} on\n")
        doctor = fleet.run("next", "-m", "waypost.cli.main", "doctor", fleet.url, "--namespace", fleet.namespace)[1]
        assert f"--finish`, from {until_text} on" in " ".join(doctor.split())
        post.publish("orders", 2)
        code, printed = fleet.migrate("next", "--finish", "--force")
        assert (code, printed.startswith("removed the functions")) == (0, True), printed
        with pytest.raises(SchemaTooOld, match="if an upgrade to a newer release was finished, update waypost here"):
            post.publish("orders", 3)


@pytest.mark.promise("STORE-7")
def test_finish_waits_no_longer_than_15_minutes_without_a_call(fleet: Fleet, database: Database) -> None:
    begin(fleet)
    fleet.pass_time_without_calls()
    assert "removes them, from" not in fleet.migrate("next", "--check")[1]
    code, printed = fleet.migrate("next", "--finish")
    assert (code, printed.startswith("removed the functions")) == (0, True), printed
    # What only the release before needs is in a script of its own.
    assert database.execute("SELECT to_regclass(%s)", (f'"{fleet.namespace}_used_at"',)).fetchone() == (None,)
    code, printed = fleet.migrate("next", "--check")
    assert (code, "are there too" in printed) == (0, False), printed


@pytest.mark.promise("STORE-7")
def test_a_migration_after_one_that_was_reverted_begins_to_note_anew(fleet: Fleet) -> None:
    begin(fleet)
    fleet.pass_time_without_calls()
    assert fleet.migrate("next", "--undo")[0] == 0
    begin(fleet)
    code, printed = fleet.migrate("next", "--finish")
    assert (code, "for less than 15 minutes" in printed) == (1, True), printed


@pytest.mark.promise("STORE-7")
def test_calls_of_an_older_version_are_noted_once_a_minute(fleet: Fleet, database: Database) -> None:
    begin(fleet)
    clock = f'SELECT "{fleet.namespace}_clock_{schema.VERSION}"(NULL)'.encode()

    def noted() -> list[int]:
        found = database.execute(f'SELECT version FROM "{fleet.namespace}_used"'.encode()).fetchall()
        return [version for (version,) in found]

    with database.transaction():
        database.execute("SET TRANSACTION READ ONLY")
        database.execute(clock)
    assert noted() == []
    for _ in range(20):
        database.execute(clock)
    assert noted() == [schema.VERSION]
    database.execute(f'UPDATE "{fleet.namespace}_used" SET at_ms = at_ms - 60000'.encode())
    for _ in range(20):
        database.execute(clock)
    assert noted() == [schema.VERSION] * 2
    database.execute(f'SELECT "{fleet.namespace}_clock_{NEXT}"(NULL)'.encode())
    assert len(noted()) == 2
    database.execute(f'DELETE FROM "{fleet.namespace}_used"'.encode())
    with database.transaction():
        database.execute("SET LOCAL ROLE pg_monitor")  # may not write
        assert database.execute(clock).fetchone() is not None
    assert noted() == []


@pytest.mark.promise("STORE-7")
def test_releases_that_differ_by_a_patch_are_one_release(
    fleet: Fleet, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = schema.Names("public", fleet.namespace)

    def registered(*, mine: bool) -> int:
        with database.cursor() as cursor:
            return len(migrating._workers_of(cursor, names, mine=mine))

    with Waypost(fleet.url, namespace=fleet.namespace) as post:

        @post.handler("orders")
        def handle(body: object) -> None: ...

        with post.worker():
            until(lambda: registered(mine=True) == 1, "a registered worker")
            monkeypatch.setattr(migrating, "RELEASE", ".".join([*RELEASE.split(".")[:2], "77"]))
            assert (registered(mine=True), registered(mine=False)) == (1, 0)
            monkeypatch.setattr(migrating, "RELEASE", "77.7.0")
            assert (registered(mine=True), registered(mine=False)) == (0, 1)


@pytest.mark.promise("STORE-7")
def test_the_last_worker_of_a_full_register_is_found(fleet: Fleet, database: Database) -> None:
    database.execute(
        f'INSERT INTO "{fleet.namespace}_worker" (name, record, at_ms, until_ms) '
        "SELECT n, CASE WHEN n = %s THEN %s::bytea ELSE %s::bytea END, 0, 9e15 "
        "FROM (SELECT lpad(g::text, 8, '0') AS n FROM generate_series(1, %s) g) n".encode(),
        (f"{WORKERS_MAX:08}", *(pack(Heartbeat("w", version=one)) for one in ("0.0.9", RELEASE)), WORKERS_MAX),
    )
    with database.cursor() as cursor:
        found = migrating._workers_of(cursor, schema.Names("public", fleet.namespace), mine=False)
    assert found == (f"worker {WORKERS_MAX:08} of release 0.0.9 is registered",)


@pytest.mark.promise("STORE-7")
def test_a_grant_to_a_role_that_is_not_there_migrates_nothing(fleet: Fleet, database: Database) -> None:
    code, printed = fleet.migrate("next", "--grant", "nobody_there")
    assert (code != 0, "nothing was done" in printed) == (True, True), printed
    assert versions(database, fleet) == [schema.VERSION]


# ---- rights ------------------------------------------------------------------------------------------------------


@pytest.fixture
def strict(postgres_url: str, fleet: Fleet) -> Iterator[Database]:
    """A database in which nobody may call a function to whom that is not granted; the fleet works in it."""
    name = f"strict_{fresh_namespace().replace('-', '_')}"
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        owner.execute(f'CREATE DATABASE "{name}"'.encode())
        owner.execute(f'CREATE ROLE "{name}" LOGIN PASSWORD \'{name}\'; CREATE ROLE "{name}_reads"'.encode())
        fleet.url = f"{postgres_url.rpartition('/')[0]}/{name}"
        with psycopg.connect(fleet.url, autocommit=True) as connection:
            connection.execute("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC")
            yield connection
        owner.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())
        owner.execute(f'DROP ROLE "{name}"; DROP ROLE "{name}_reads"'.encode())


def migrate_by_command(fleet: Fleet) -> None:
    begin(fleet)


def migrate_by_script(fleet: Fleet) -> None:
    code, script = fleet.migrate("next", "--sql")
    assert code == 0, script
    done = run_psql(fleet, script)
    assert done.returncode == 0, done.stderr


def migrate_in_a_transaction(fleet: Fleet) -> None:
    """As Django does."""
    code, printed = fleet.run(
        "next",
        "-c",
        f"""\
import psycopg
from waypost.store.postgres.migrating import migrate_in
from waypost.store.postgres.schema import Names
with psycopg.connect({fleet.url!r}) as connection, connection.cursor() as cursor:
    migrate_in(cursor, Names("public", {fleet.namespace!r}))
""",
    )
    assert code == 0, printed


@pytest.mark.promise("STORE-2", "STORE-7")
@pytest.mark.parametrize("way", [migrate_by_command, migrate_by_script, migrate_in_a_transaction])
def test_roles_may_use_what_is_new(fleet: Fleet, strict: Database, way: Callable[[Fleet], None]) -> None:
    role = strict.info.dbname
    migrate(fleet.url, namespace=fleet.namespace, grant=role)
    reads = f'"{fleet.namespace}_stats_{schema.VERSION}"'
    (signature,) = strict.execute(
        "SELECT oid::regprocedure::text FROM pg_proc WHERE proname = %s", (reads[1:-1],)
    ).fetchall()[0]
    strict.execute(f'GRANT EXECUTE ON FUNCTION {signature} TO "{role}_reads"'.encode())
    way(fleet)
    for who, allowed in ((role, True), (f"{role}_reads", True), ("pg_monitor", False)):
        found = strict.execute(
            "SELECT DISTINCT has_function_privilege(%s, oid, 'EXECUTE') FROM pg_proc WHERE starts_with(proname, %s) "
            "AND right(proname, 3) = %s", (who, f"{fleet.namespace}_", f"_{NEXT}"),
        ).fetchall()  # fmt: skip
        assert found == [(allowed,)], who
    (may_publish,) = strict.execute(
        "SELECT has_table_privilege(%s, %s, 'INSERT')", (f"{role}_reads", f'"{fleet.namespace}_message"')
    ).fetchall()
    assert may_publish == (False,)
    fleet.url = re.sub("//.*@", f"//{role}:{role}@", fleet.url)
    assert fleet.configure("next", "orders", lease=5)[0] == 0
    with Waypost(fleet.url, namespace=fleet.namespace) as post:
        assert post.publish("orders", 1).status == "queued"


@pytest.mark.promise("STORE-2", "STORE-7")
def test_the_owner_of_the_tables_may_use_what_another_role_adds(fleet: Fleet, strict: Database) -> None:
    role, superuser = strict.info.dbname, fleet.url
    strict.execute(f'GRANT CREATE ON SCHEMA public TO "{role}"'.encode())
    owner = re.sub("//.*@", f"//{role}:{role}@", fleet.url)
    with psycopg.connect(owner) as connection:
        make(connection, 15, fleet.namespace)
    assert migrate(superuser, namespace=fleet.namespace) == 15
    with Waypost(owner, namespace=fleet.namespace) as post:
        post.configure("orders", fair=True)
        assert post.publish("orders", 1, group="eu").status == "queued"
        begin(fleet)
        assert post.publish("orders", 2, group="eu").status == "queued"
    fleet.url = owner
    assert fleet.configure("next", "orders", lease=5)[0] == 0


# ---- scripts for psql --------------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-7")
def test_a_script_ends_at_once_while_another_migration_runs(fleet: Fleet, database: Database) -> None:
    for options in ((), ("--finish", "--force"), ("--undo",)):
        code, script = fleet.migrate("next", "--sql", *options)
        assert code == 0, script
        lock = schema.take_lock("pg_try_advisory_lock", schema.Names("public", fleet.namespace))
        assert database.execute(f"SELECT {lock}".encode()).fetchone() == (True,)
        before = versions(database, fleet)
        done = run_psql(fleet, script)
        assert (done.returncode, "another migration is running" in done.stderr) == (3, True), done.stderr
        assert versions(database, fleet) == before
        database.execute("SELECT pg_advisory_unlock_all()")
        if not options:
            begin(fleet)


@pytest.mark.promise("STORE-7")
def test_a_script_ends_with_the_first_step_that_does_not_get_its_lock(fleet: Fleet, database: Database) -> None:
    script = fleet.migrate("next", "--sql")[1]
    with database.transaction():
        database.execute(f'LOCK TABLE "{fleet.namespace}_message" IN ACCESS SHARE MODE'.encode())
        done = run_psql(fleet, script)
        assert (done.returncode, "lock timeout" in done.stderr) == (3, True), done.stderr
        assert versions(database, fleet) == [schema.VERSION]
    assert run_psql(fleet, script).returncode == 0
    assert fleet.migrate("next", "--check")[0] == 0


@pytest.mark.promise("STORE-7")
def test_a_script_for_tables_that_have_changed_meanwhile_changes_nothing(fleet: Fleet, database: Database) -> None:
    begin(fleet)
    script = fleet.migrate("next", "--finish", "--force", "--sql")[1]
    assert fleet.migrate("next", "--undo")[0] == 0
    done = run_psql(fleet, script)
    assert (done.returncode, "have changed since this script was printed" in done.stderr) == (3, True), done.stderr
    assert versions(database, fleet) == [schema.VERSION]
    with Waypost(fleet.url, namespace=fleet.namespace) as post:
        assert post.publish("orders", 1).status == "queued"


@pytest.mark.promise("STORE-7")
def test_a_script_keeps_no_lock_in_a_session_with_other_settings(fleet: Fleet) -> None:
    script = fleet.migrate("next", "--sql")[1]
    kept = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();"
    # As in a session whose user has made these settings.
    before = "\\set AUTOCOMMIT off\nSET statement_timeout = '50s';\nCOMMIT;\n"
    done = run_psql(fleet, f"{before}{script}\n\\pset tuples_only on\n{kept}")
    assert (done.returncode, done.stdout.split()) == (0, ["0"]), done.stderr
    assert fleet.migrate("next", "--check")[0] == 0


@pytest.mark.promise("STORE-7")
def test_batches_of_a_script_do_not_wait_long_for_rows(held: Database, database: Database) -> None:
    database.execute("SET statement_timeout = '20s'; INSERT INTO planted VALUES (1)")
    held.execute("UPDATE planted SET n = 2")
    step = schema.Step("in batches planted", "UPDATE planted SET n = 3 WHERE n = 1;")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        database.execute(step.by_hand.encode())
    held.rollback()
    database.execute(step.by_hand.encode())
    assert database.execute("SELECT n FROM planted").fetchall() == [(3,)]


# ---- locks -------------------------------------------------------------------------------------------------------

WAITING = schema.Step("a column", "ALTER TABLE planted ADD COLUMN IF NOT EXISTS more text;")


@pytest.fixture
def held(postgres_url: str, database: Database) -> Iterator[Database]:
    """A connection whose open transaction has read a table."""
    database.execute("DROP TABLE IF EXISTS planted; CREATE TABLE planted (n integer)")
    with psycopg.connect(postgres_url) as reader:
        reader.execute("SELECT count(*) FROM planted")
        yield reader
    database.execute("DROP TABLE planted")


@pytest.mark.promise("STORE-7")
def test_a_step_tries_to_get_its_lock_again_while_others_continue(
    postgres_url: str, held: Database, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    here, sleep = threading.get_ident(), time.sleep

    def pause(seconds: float) -> None:
        if threading.get_ident() != here:
            sleep(seconds)  # a thread of another test
            return
        pauses.append(seconds)
        with psycopg.connect(postgres_url) as other:
            other.execute("SET LOCAL lock_timeout = 5000; INSERT INTO planted VALUES (1)")
        if len(pauses) == 3:
            held.rollback()

    monkeypatch.setattr("waypost.store.postgres.migrating.time.sleep", pause)
    reported: list[str] = []
    migrating._run_step(migrating._Turn(database, database), WAITING, patient=True, report=reported.append)
    assert pauses == [0.05, 0.1, 0.2]
    assert reported == ["a column: waits for a lock, because a transaction that uses these tables is open"] * 3
    assert database.execute("SELECT count(*), count(more) FROM planted").fetchone() == (3, 0)


@pytest.mark.promise("STORE-7")
def test_a_step_that_never_gets_its_lock_is_an_error_with_the_way_out(
    held: Database, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrating, "LOCK_ATTEMPTS", 2)
    with pytest.raises(StoreUnavailable, match=r"step 'a column' did not get its lock in 2 attempts.*run this again"):
        migrating._run_step(migrating._Turn(database, database), WAITING, patient=True, report=lambda text: None)


@pytest.mark.promise("STORE-7")
def test_an_index_that_is_still_built_for_a_killed_migration_is_waited_for(
    postgres_url: str, held: Database, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'CREATE INDEX CONCURRENTLY IF NOT EXISTS "planted_n" ON "public"."planted" (n);'
    step = schema.Step("concurrently an index", script)
    held.execute("INSERT INTO planted VALUES (1)")
    here, sleep, waits = threading.get_ident(), time.sleep, 0

    def pause(seconds: float) -> None:
        nonlocal waits
        if threading.get_ident() == here:
            waits += 1
            held.commit()
        sleep(seconds)

    with psycopg.connect(postgres_url, autocommit=True) as killed:
        building = threading.Thread(target=killed.execute, args=(script.encode(),))
        building.start()
        progress = "SELECT FROM pg_stat_progress_create_index WHERE relid = 'planted'::regclass"
        until(lambda: database.execute(progress).fetchone() is not None, "an index that is being built")
        monkeypatch.setattr("waypost.store.postgres.migrating.time.sleep", pause)
        migrating._run_step(migrating._Turn(database, database), step, patient=True, report=lambda text: None)
        building.join(SECONDS)
    found = database.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'planted_n'::regclass").fetchone()
    assert (waits > 0, found) == (True, (True,))


@pytest.mark.promise("STORE-7")
def test_a_migration_that_waits_for_another_one_reports_it(
    postgres_url: str, held: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = schema.Names("public", fresh_namespace())
    held.execute(f"SELECT {schema.take_lock('pg_advisory_xact_lock', names)}".encode())
    monkeypatch.setattr(migrating, "WAITING_SECONDS", 0.0)
    reported: list[str] = []

    def report(text: str) -> None:
        reported.append(text)
        held.commit()  # the other one has ended

    assert migrating._with_lock(postgres_url, names, 3.0, lambda turn: "ran", report) == "ran"
    assert reported == ["another migration of this namespace is running; this one waits for its end"]


@pytest.mark.promise("STORE-7")
def test_settings_of_the_role_do_not_end_or_change_steps(postgres_url: str) -> None:
    timeouts = ("statement_timeout", "lock_timeout", "idle_session_timeout")
    settings = dict.fromkeys(timeouts, "77s") | {"default_transaction_isolation": "serializable"}
    options = "%20".join(f"-c%20{name}%3D{value}" for name, value in settings.items())

    def run(turn: migrating._Turn) -> list[str]:
        found = [turn.connection.execute(f"SHOW {name}".encode()).fetchall() for name in timeouts]
        with turn.connection.transaction():
            found.append(turn.connection.execute("SHOW transaction_isolation").fetchall())
        return [value for ((value,),) in found]

    url = f"{postgres_url}{'&' if '?' in postgres_url else '?'}options={options}"
    names = schema.Names("public", fresh_namespace())
    assert migrating._with_lock(url, names, 3.0, run) == ["0", "0", "0", "read committed"]


@pytest.mark.promise("STORE-7")
def test_a_step_in_a_transaction_has_no_timeout_of_statements(database: Database) -> None:
    database.execute("SET statement_timeout = '77s'; CREATE TEMP TABLE planted_timeouts (found text)")
    step = schema.Step("a setting", "INSERT INTO planted_timeouts SELECT current_setting('statement_timeout');")
    migrating._run_step(migrating._Turn(database, database), step, patient=True, report=lambda text: None)
    assert database.execute("SELECT found FROM planted_timeouts").fetchall() == [("0",)]


@pytest.mark.promise("STORE-7")
def test_no_step_runs_after_the_lock_of_migrations_was_lost(postgres_url: str, database: Database) -> None:
    names = schema.Names("public", fresh_namespace())
    step = schema.Step("a table", "CREATE TABLE planted_late (n integer);")

    def run(turn: migrating._Turn) -> None:
        (pid,) = turn.lock.execute("SELECT pg_backend_pid()").fetchall()[0]
        database.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))
        migrating._run_step(turn, step, patient=True, report=lambda text: None)

    with pytest.raises(WaypostError):
        migrating._with_lock(postgres_url, names, 3.0, run)
    assert database.execute("SELECT to_regclass('planted_late')").fetchone() == (None,)


# ---- kills -------------------------------------------------------------------------------------------------------

#: Before the first step, and right after the index, both steps in batches, the setting, an index of the journal, all of
#: these, the functions, the rights and the version. After the last one nothing is left to do.
POINTS = (0, 5, 7, 9, 11, 17, 35, 37, 39, 43)
#: Runs `waypost migrate` with options and kills it at a point: before the step of a number, or right after it.
KILLED = """
import os, signal, sys
from waypost.cli.main import main
from waypost.store.postgres import migrating

point, run, done = int(sys.argv[1]), migrating._run_step, 0

def run_step(connection, step, **options):
    global done
    for is_after in (False, True):
        if done == point:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        if not is_after:
            run(connection, step, **options)

migrating._run_step = run_step
sys.exit(main(["migrate", *sys.argv[2:]]))
"""


def kill(fleet: Fleet, point: int, *options: str) -> None:
    """Run `waypost migrate` of the next release up to a point."""
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(point), "--url", fleet.url, "--namespace", fleet.namespace, *options],
        env=fleet.environment("next"), timeout=SECONDS, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, f"there is no point {point}"


@pytest.mark.promise("STORE-7")
def test_a_migration_that_is_killed_goes_on_when_it_is_run_again(
    fleet: Fleet, database: psycopg.Connection[Any]
) -> None:
    with Waypost(fleet.url, namespace=fleet.namespace) as post:
        post.publish_many("orders", range(100))
        for point in POINTS:
            kill(fleet, point)
            # The release before goes on, whatever is there of the next one.
            assert post.publish("orders", point).status == "queued"
            with post.receive("orders", wait=20) as message:
                assert message is not None
        assert fleet.migrate("next")[0] == 0
        code, printed = fleet.migrate("next", "--check")
        assert (code, f"as this release needs them, version {schema.VERSION + 1};" in printed) == (0, True), printed
        ledger = post.ledger("orders")
        assert (ledger.published, ledger.done, ledger.balance) == (110, 10, 0)
    left = database.execute(
        "SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
        "WHERE starts_with(c.relname, %s) AND NOT i.indisvalid", (fleet.namespace,),
    ).fetchone()  # fmt: skip
    assert left == (0,)


@pytest.mark.promise("STORE-7")
def test_an_undo_that_is_killed_goes_on_when_it_is_run_again(fleet: Fleet, database: Database) -> None:
    before = triggers(database, fleet)
    begin(fleet)
    assert len(triggers(database, fleet)) == len(before) + 1
    for point in (0, 1):
        kill(fleet, point, "--undo")
        with Waypost(fleet.url, namespace=fleet.namespace) as post:
            assert post.publish("orders", point).status == "queued"
    assert versions(database, fleet) == [schema.VERSION]
    assert triggers(database, fleet) == before
    assert fleet.migrate("next", "--undo")[1].endswith("has the functions of one version only\n")
    code, printed = fleet.migrate("this", "--check")
    assert (code, "are there too" in printed) == (0, False), printed


@pytest.mark.promise("STORE-7")
def test_an_undo_holds_nothing_that_calls_in_progress_wait_for(fleet: Fleet, database: Database) -> None:
    begin(fleet)
    held = (
        "SELECT array_agg(h.relation::regclass::text) FILTER (WHERE h.granted AND h.mode = 'AccessExclusiveLock') "
        "FROM pg_locks w JOIN pg_locks h ON h.pid = w.pid "
        "WHERE NOT w.granted AND w.relation = %s::regclass HAVING count(*) > 0"
    )
    queue = f'"{fleet.namespace}_queue"'
    with psycopg.connect(fleet.url) as call, ThreadPoolExecutor(1) as pool:
        call.execute(f"SELECT count(*) FROM {queue}".encode())
        undone = pool.submit(fleet.migrate, "next", "--undo")
        assert until(lambda: database.execute(held, (queue,)).fetchone(), "an undo that waits") == (None,)
        # The rest of such a call.
        call.execute(f'LOCK TABLE "{fleet.namespace}_tally" IN ROW EXCLUSIVE MODE'.encode())
        call.rollback()
        assert undone.result()[0] == 0


@pytest.mark.promise("STORE-7")
def test_an_interrupted_migration_is_reverted(fleet: Fleet, database: Database) -> None:
    before = triggers(database, fleet)
    kill(fleet, 41)
    assert triggers(database, fleet) != before
    assert fleet.migrate("next", "--undo")[0] == 0
    assert (versions(database, fleet), triggers(database, fleet)) == ([schema.VERSION], before)
    assert fleet.migrate("this", "--check")[0] == 0


@pytest.mark.promise("STORE-7")
def test_a_finish_that_is_killed_goes_on_when_it_is_run_again(fleet: Fleet, database: Database) -> None:
    begin(fleet)
    for point in (1, 3, 5, 7):
        kill(fleet, point, "--finish", "--force")
        assert fleet.configure("next", "orders", lease=5)[0] == 0
        if point < 7:
            # What it removes from tables does not return.
            code, printed = fleet.migrate("next", "--undo")
            assert (code != 0, "cannot be taken back: run it again" in printed) == (True, True), printed
    assert versions(database, fleet) == [NEXT]
    code, printed = fleet.migrate("next", "--finish")
    assert (code, printed.endswith("has nothing to remove\n")) == (0, True), printed
    code, printed = fleet.migrate("next", "--check")
    assert (code, "are there too" in printed) == (0, False), printed


def kill_within(fleet: Fleet, database: Database, part: str) -> None:
    """Start `waypost migrate` of the next release, and kill it while the server runs a statement with this in it."""
    migration = subprocess.Popen(
        [sys.executable, "-m", "waypost.cli.main", "migrate", "--url", fleet.url, "--namespace", fleet.namespace],
        env=fleet.environment("next"),
    )
    running: list[int] = []

    def runs() -> bool:
        found = database.execute(
            "SELECT pid FROM pg_stat_activity WHERE state = 'active' AND position(%s IN query) > 0 "
            "AND pid <> pg_backend_pid() AND wait_event_type IN ('Timeout', 'Lock')", (part,),
        )  # fmt: skip
        running[:] = [pid for (pid,) in found.fetchall()]
        return bool(running)

    try:
        until(runs, "a migration within its step")
    finally:
        migration.kill()
        migration.wait()
    # The server notices at the end of a statement that its client is gone; here it is ended within it.
    database.execute("SELECT pg_terminate_backend(%s, 10000)", (running[0],))


@pytest.mark.promise("STORE-7")
def test_a_migration_that_is_killed_within_a_batch_goes_on(fleet: Fleet, database: Database) -> None:
    with Waypost(fleet.url, namespace=fleet.namespace) as post:
        post.publish_many("orders", range(1_200))
    trigger = f'"{fleet.namespace}_slow"'
    database.execute(
        f"""
        CREATE FUNCTION {trigger}() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            -- The second batch takes long.
            IF (SELECT count(*) FROM "{fleet.namespace}_message" m WHERE to_jsonb(m) ->> 'planted' = 'filled') > 0 THEN
                PERFORM pg_sleep({SECONDS});
            END IF;
            RETURN NULL;
        END $$;
        CREATE TRIGGER {trigger} BEFORE UPDATE ON "{fleet.namespace}_message"
            FOR EACH STATEMENT EXECUTE FUNCTION {trigger}();""".encode()
    )
    kill_within(fleet, database, "SET planted = ")
    left = f'SELECT count(*) FROM "{fleet.namespace}_message" WHERE planted IS NULL'.encode()
    assert database.execute(left).fetchone() == (700,)
    database.execute(f"DROP FUNCTION {trigger} CASCADE".encode())
    begin(fleet)
    assert database.execute(left).fetchone() == (0,)
    assert fleet.migrate("next", "--check")[0] == 0


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("way", [migrate_by_command, migrate_by_script])
def test_a_migration_that_is_killed_within_an_index_goes_on(
    postgres_url: str, fleet: Fleet, database: Database, way: Callable[[Fleet], None]
) -> None:
    with Waypost(fleet.url, namespace=fleet.namespace) as post:
        post.publish_many("orders", range(100))
    with psycopg.connect(postgres_url) as reader:
        # An index that is built concurrently waits for the end of every older snapshot.
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT 1")
        kill_within(fleet, database, "INDEX CONCURRENTLY")
    index = (f'"{fleet.namespace}_message_planted"',)
    is_valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)"
    assert database.execute(is_valid, index).fetchone() == (False,)
    way(fleet)
    assert database.execute(is_valid, index).fetchone() == (True,)
    assert fleet.migrate("next", "--check")[0] == 0
