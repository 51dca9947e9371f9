"""Brings a namespace to the version of this release, without stopping its clients; finishes that, or takes it back.

    migrate   before the first process of the new release: adds to tables, and creates its functions beside the old ones
    finish    after the last process of the old release: removes the old functions, and what only they used
    undo      instead of finish, after the last process of the new release: the old functions alone are there again

Each step is a short transaction that waits for a lock only for a moment, and is then tried again. An interrupted
migration continues when it is run again; two at once run one after the other. From a version before `SIDE_BY_SIDE`
there is one step, and the clients of the older release must stop for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import psycopg

from waypost.errors import ConfigurationError, StoreUnavailable
from waypost.release import VERSION as RELEASE
from waypost.release import minor_of
from waypost.store.postgres import schema
from waypost.store.postgres.schema import (
    LOCK_TIMEOUT_MS,
    SIDE_BY_SIDE,
    UNUSED_MINUTES,
    Names,
    Step,
    confirm_version,
    drop_functions,
    failure,
    finish_from,
    finish_steps,
    for_psql,
    functions_of,
    grants,
    listed_functions,
    older_versions,
    steps,
    take_lock,
    too_new,
    version_in,
)
from waypost.store.postgres.sources import connect
from waypost.store.register import registered
from waypost.times import format_datetime

#: How often a step tries to get its locks, and the longest pause between two attempts.
LOCK_ATTEMPTS: Final = 60
LOCK_PAUSE_SECONDS_MAX: Final = 2.0
#: How often a migration checks whether another one has ended.
LOCK_POLL_SECONDS: Final = 0.1
#: How often a migration that waits for another one reports that it waits.
WAITING_SECONDS: Final = 1.0
#: The pause between two batches of a step, as a multiple of the duration of the batch, and the longest pause: in it,
#: other sessions can use the disk and the processors.
BATCH_PAUSE_TIMES: Final = 3.0
BATCH_PAUSE_SECONDS_MAX: Final = 1.0
#: How often a step in batches reports its progress.
REPORT_SECONDS: Final = 5.0

Report = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Turn:
    """The turn of one migration: the connection that it uses, and one whose transaction holds the lock."""

    connection: psycopg.Connection[Any]
    lock: psycopg.Connection[Any]

    def confirm(self) -> None:
        """Raise an error if the lock was lost with its connection."""
        self.lock.execute("SELECT")


@dataclass(frozen=True, slots=True)
class Finished:
    """What `finish` did, or why it did nothing."""

    #: The versions whose functions were removed.
    removed: tuple[int, ...]
    #: Why the older versions are still needed; empty if they are not, or if that was not checked.
    needed: tuple[str, ...] = ()


def migrate(
    url: str,
    *,
    schema: str = "public",
    namespace: str = "wp",
    grant: str | None = None,
    start_timeout: float = 3.0,
    report: Report = lambda text: None,
) -> int:
    """Bring a namespace of a database to this release's version; return its version before, 0 for none.

    With `grant`, the role of that name gets the rights that clients need; a separate step gives the roles that already
    have them the rights for new tables and functions. `report` is called with the name of each step, and, for a step in
    batches, with its rows.
    """
    names = Names(schema, namespace)
    granted = "" if grant is None else grants(grant, schema=schema, namespace=namespace)

    def run(turn: _Turn) -> int:
        with turn.connection.cursor() as cursor:
            before = version_in(cursor, names) or 0
            _refuse_newer(before, names)
            if grant is not None:
                cursor.execute("SELECT %s::regrole", (f'"{grant}"',))  # fails before anything was done
            if before < _version():
                for step in steps(names, before):
                    report(step.name)
                    _run_step(turn, step, patient=before >= SIDE_BY_SIDE, report=report)
            if granted:
                cursor.execute(granted)
        return before

    return _with_lock(url, names, start_timeout, run, report)


def migrate_in(cursor: Any, names: Names) -> int:
    """Do what `migrate` does in the transaction of a cursor, which the caller commits; return the version before."""
    _take_lock(cursor, names)
    version = version_in(cursor, names) or 0
    _refuse_newer(version, names)
    if version < _version():
        for step in steps(names, version):
            # The locks of one transaction are held until its end in any case.
            cursor.execute(step.at_once)
    return version


def finish(
    url: str,
    *,
    schema: str = "public",
    namespace: str = "wp",
    force: bool = False,
    start_timeout: float = 3.0,
    report: Report = lambda text: None,
) -> Finished:
    """Remove the functions of older versions, and what only they used, if no process of an older release is left.

    A worker that is registered with another release, and a call of an older function within the last 15 minutes, mean
    that there is one. Such calls are noted since `migrate`: until 15 minutes after it nothing is removed. `force`
    removes them nevertheless.
    """
    return _run_plan(url, Names(schema, namespace), _plan_finish, force, start_timeout, report)


def undo(
    url: str,
    *,
    schema: str = "public",
    namespace: str = "wp",
    force: bool = False,
    start_timeout: float = 3.0,
    report: Report = lambda text: None,
) -> Finished:
    """Take back a migration that is not finished: the functions of the version before are the newest again.

    What was added to tables stays, unused. An interrupted migration can be taken back too, and an interrupted `undo`
    continues when it is run again. `force` takes the migration back although workers of this release are registered.
    Calls of the newer functions are not recorded: the caller must know that processes of this release which only
    publish have ended.
    """
    return _run_plan(url, Names(schema, namespace), _plan_undo, force, start_timeout, report)


def finish_sql(
    url: str,
    *,
    schema: str = "public",
    namespace: str = "wp",
    force: bool = False,
    back: bool = False,
    start_timeout: float = 3.0,
) -> tuple[str, Finished]:
    """Return what `finish` would run, or `undo` with `back`, as a script for psql, and what it would remove.

    The script is empty if processes need what would be removed.
    """
    names = Names(schema, namespace)
    planner = _plan_undo if back else _plan_finish
    plan = _with_lock(url, names, start_timeout, lambda turn: planner(turn.connection, names, force))
    return for_psql(plan.steps, names, only_from=(_version(),)), plan.outcome


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to finish a migration, or to take it back."""

    outcome: Finished
    steps: tuple[Step, ...] = ()


def _run_plan(
    url: str,
    names: Names,
    planner: Callable[[psycopg.Connection[Any], Names, bool], _Plan],
    force: bool,
    start_timeout: float,
    report: Report,
) -> Finished:
    def run(turn: _Turn) -> Finished:
        plan = planner(turn.connection, names, force)
        for step in plan.steps:
            report(step.name)
            _run_step(turn, step, patient=True, report=report)
        return plan.outcome

    return _with_lock(url, names, start_timeout, run, report)


def _plan_finish(connection: psycopg.Connection[Any], names: Names, force: bool) -> _Plan:
    with connection.cursor() as cursor:
        found = version_in(cursor, names) or 0
        _refuse_newer(found, names)
        if found < _version():
            raise ConfigurationError("the new version is not there yet: run `waypost migrate URL` first")
        older = older_versions(cursor, names)
        if not older:
            return _Plan(Finished(()), (Step("version", names.fill(confirm_version())),))
        needed = () if force else (
            *_workers_of(cursor, names, mine=False), *_recent_calls(cursor, names, older), *_too_early(cursor, names),
        )  # fmt: skip
        if needed:
            return _Plan(Finished((), needed))
    # From here on it can be finished, but not taken back: columns and indexes that were removed are lost.
    steps = [Step("begin", names.fill(f"UPDATE {{interface}} SET restore = '' WHERE version < {_version()};"))]
    steps += finish_steps(names, older[0])
    steps.append(Step("older functions", drop_functions(names, functions_of(names, f"i.version < {_version()}"))))
    steps.append(Step("version", names.fill(
        f"DELETE FROM {{interface}} WHERE version < {_version()};\nDELETE FROM {{used}};\n{confirm_version()}"
    )))  # fmt: skip
    return _Plan(Finished(older), tuple(steps))


def _plan_undo(connection: psycopg.Connection[Any], names: Names, force: bool) -> _Plan:
    with connection.cursor() as cursor:
        found = version_in(cursor, names) or 0
        _refuse_newer(found, names)
        older = older_versions(cursor, names) if found >= SIDE_BY_SIDE else ()
        if not older or not _has_functions(cursor, names):
            raise ConfigurationError(
                f"there is nothing to take back: namespace {names.namespace} has the functions of one version only"
            )
        needed = () if force else _workers_of(cursor, names, mine=True)
        if needed:
            return _Plan(Finished((), needed))
        # Use the triggers and the clock as the previous release stored them: those of this release may differ.
        cursor.execute(names.fill("SELECT restore FROM {interface} WHERE version = %s"), (older[-1],))
        ((restore,),) = cursor.fetchall()
        if not restore:
            raise ConfigurationError(
                "an interrupted `waypost migrate URL --finish` has begun to remove what only the release before uses, "
                "which cannot be taken back: run it again"
            )
    back = names.fill(
        f"UPDATE {{schema}} SET version = {older[-1]};\nDELETE FROM {{interface}} WHERE version = {_version()};\n"
    ) + drop_functions(names, listed_functions(names))
    # One step: with half of it done, calls of an older release would not be recorded, and triggers would be
    # inconsistent.
    return _Plan(Finished((_version(),)), (Step("triggers, clock, version and newer functions", f"{restore}\n{back}"),))


def _version() -> int:
    return schema.VERSION


def _refuse_newer(version: int, names: Names) -> None:
    if version > _version():
        raise too_new(version, names)


def _with_lock(
    url: str, names: Names, start_timeout: float, run: Callable[[_Turn], T], report: Report = lambda text: None
) -> T:
    """Run while no other migration runs.

    The lock belongs to a transaction on a connection of its own, which ends with the process. A session lock would
    remain with the server process of a connection pooler, and would not exclude clients that get another server
    process.
    """
    try:
        with closing(connect(url, start_timeout)) as lock, closing(connect(url, start_timeout)) as connection:
            connection.autocommit = True
            # No snapshot between its statements: building an index concurrently waits for the end of older snapshots.
            lock.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            with lock.cursor() as cursor:
                cursor.execute(
                    "SELECT set_config(s.name, '0', true) FROM pg_settings s "
                    "WHERE s.name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')"
                )
                _take_lock(cursor, names, report)
            try:
                return run(_Turn(connection, lock))
            finally:
                with suppress(psycopg.Error):
                    lock.rollback()  # a pooler ends the transaction of a closed connection some time later
    except psycopg.Error as error:
        raise failure(error, names) from None


def _take_lock(cursor: Any, names: Names, report: Report = lambda text: None) -> None:
    """Take the lock of migrations for a transaction, by trying again and again.

    A statement that waits for the lock has a snapshot, and building an index concurrently waits for the end of that
    snapshot: the migration with the lock and the ones that wait for it would wait for each other.
    """
    reported_at = time.monotonic()
    while True:
        cursor.execute(f"SELECT {take_lock('pg_try_advisory_xact_lock', names)}")
        (has_lock,) = cursor.fetchone()
        if has_lock:
            return
        if time.monotonic() - reported_at >= WAITING_SECONDS:
            reported_at = time.monotonic()
            report("another migration of this namespace is running; this one waits for its end")
        time.sleep(LOCK_POLL_SECONDS)


def _run_step(turn: _Turn, step: Step, *, patient: bool, report: Report) -> None:
    """Run one step. With `patient` it waits for locks only for short times, so that others can continue."""
    rows, began = 0, time.monotonic()
    reported = began
    while (changed := _run_once(turn, step, patient=patient)) and step.in_batches:
        rows += changed
        now = time.monotonic()
        if now - reported >= REPORT_SECONDS:
            report(f"{step.name}: {rows:,} rows")
            reported = now
        time.sleep(min(BATCH_PAUSE_SECONDS_MAX, BATCH_PAUSE_TIMES * (now - began)))
        began = time.monotonic()


def _run_once(turn: _Turn, step: Step, *, patient: bool) -> int:
    """Run the script of a step; return how many rows it changed."""
    connection, pause = turn.connection, 0.05
    for _ in range(LOCK_ATTEMPTS):
        turn.confirm()
        try:
            if not step.in_transaction:
                _drop_leftover(connection, step)
                return max(0, connection.execute(step.script.encode()).rowcount)
            with connection.transaction():
                if patient:
                    connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_MS}ms'".encode())
                if step.in_batches:
                    # Its rows are not locked while the disk writes. A batch that is lost in a crash is run again,
                    # because the following step cannot have been committed without it.
                    connection.execute("SET LOCAL synchronous_commit = off")
                return max(0, connection.execute(step.script.encode()).rowcount)
        except psycopg.errors.LockNotAvailable:
            time.sleep(pause)
            pause = min(LOCK_PAUSE_SECONDS_MAX, 2 * pause)
    raise StoreUnavailable(
        f"step {step.name!r} did not get its lock in {LOCK_ATTEMPTS} attempts, because transactions that use these "
        "tables are open all the time; end long ones (pg_stat_activity lists them), then run this again: it goes on "
        "where it stopped"
    )


def _drop_leftover(connection: psycopg.Connection[Any], step: Step) -> None:
    """Remove the index that a step makes if an interrupted one left it unfinished."""
    if step.drop_leftover is None or step.being_built is None:
        return
    # The server finishes the statement of a process that was killed: the index may still become valid.
    while connection.execute(step.being_built.encode()).fetchone() is not None:
        time.sleep(LOCK_POLL_SECONDS)
    for (statement,) in connection.execute(step.drop_leftover.encode()).fetchall():
        connection.execute(statement.encode())


def _has_functions(cursor: psycopg.Cursor[Any], names: Names) -> bool:
    """Return whether functions of this version exist, even if the migration to it has not finished."""
    cursor.execute(
        f"SELECT FROM pg_proc p WHERE p.pronamespace = '\"{names.schema}\"'::regnamespace "
        f"AND p.proname IN ({listed_functions(names)}) LIMIT 1"
    )
    return cursor.fetchone() is not None


def _workers_of(cursor: psycopg.Cursor[Any], names: Names, *, mine: bool) -> tuple[str, ...]:
    """Return one sentence about each registered worker of this release, or of all others."""
    cursor.execute(names.fill("SELECT name, record, at_ms, until_ms, request, request_ms FROM {workers}(NULL, 1000)"))
    found = [registered(*row) for row in cursor.fetchall()]
    return tuple(
        f"worker {one.name} of release {one.version} is registered"
        for one in found
        if (minor_of(one.version) == minor_of(RELEASE)) == mine
    )


def _recent_calls(cursor: psycopg.Cursor[Any], names: Names, versions: tuple[int, ...]) -> tuple[str, ...]:
    """Return one sentence about each older version whose functions were called a short time ago."""
    cursor.execute(
        names.fill(
            "SELECT u.version, (extract(epoch FROM clock_timestamp()) - max(u.at_ms) / 1000.0)::float8 FROM {used} u "
            "WHERE u.version = ANY(%s) AND u.at_ms > (extract(epoch FROM clock_timestamp()) - %s) * 1000 "
            "GROUP BY u.version ORDER BY u.version"
        ),
        (list(versions), UNUSED_MINUTES * 60),
    )
    return tuple(
        f"functions of version {version} were called {max(0, seconds):.0f} s ago; {UNUSED_MINUTES} minutes without a "
        "call mean that no process uses them"
        for version, seconds in cursor.fetchall()
    )


def _too_early(cursor: psycopg.Cursor[Any], names: Names) -> tuple[str, ...]:
    """Return a sentence if calls of older functions have not been recorded for long enough."""
    until = finish_from(cursor, names)
    if until is None:
        return ()
    return (
        f"calls of older functions have been noted for less than {UNUSED_MINUTES} minutes; until "
        f"{format_datetime(until)} it is not known whether a process that only publishes makes some",
    )
