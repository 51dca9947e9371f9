"""Checks of `waypost doctor` on PostgreSQL: durability, schema drift, rights, open transactions, and bytes in use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg

from waypost.errors import AccessDenied
from waypost.formatting import format_age, format_bytes
from waypost.store.checkup import Checkup, Findings, note, ok, wrong
from waypost.store.postgres.failures import map_connection_error
from waypost.store.postgres.schema import (
    VERSION,
    Names,
    command_for,
    finish_from,
    made_by_migrations,
    older_versions,
    sql,
)
from waypost.store.postgres.schema_check import compare
from waypost.times import format_datetime
from waypost.views import Stats

if TYPE_CHECKING:
    from waypost.store.postgres.store import PostgresStore

#: A transaction open for longer keeps dead rows and delays journal readers.
OPEN_SECONDS_MAX = 60
#: Rows of a table that are measured.
ROWS_MEASURED = 1_000
#: Dead rows are reported from this number on, if they are most of the table.
DEAD_ROWS_MIN = 100_000

_RIGHTS = {"TABLE": "SELECT, INSERT, UPDATE, DELETE", "SEQUENCE": "USAGE, SELECT, UPDATE"}


class PostgresCheckup(Checkup):
    """Checks of a PostgreSQL store."""

    def __init__(self, store: PostgresStore, executor: Any) -> None:
        self._store = store
        self._executor = executor

    def check_server(self, found: Sequence[Stats]) -> Findings:
        """Check the server, on one connection of the client."""
        names = self._store.names
        connection = self._executor.lend()
        try:
            yield from check_server(connection)
            yield from check_drift(connection, names)
            yield from check_rights(connection, names)
            yield from check_transactions(connection)
            yield from check_bytes(connection, names, found)
        except psycopg.Error as error:
            raise map_connection_error(error, self._store.source.display_name, sent=True) from None
        finally:
            self._executor.take_back(connection)


def settings(connection: Any, *names: str) -> dict[str, str]:
    """Return settings of the server, as this session has them."""
    return dict(connection.execute("SELECT name, setting FROM pg_settings WHERE name = ANY(%s)", (list(names),)))


def check_server(connection: Any) -> Findings:
    """Check the version of the server, and which data a crash of it can lose."""
    found = settings(connection, "server_version", "fsync", "synchronous_commit", "full_page_writes", "autovacuum")
    yield ok("server", f"PostgreSQL {found['server_version']}", version=found["server_version"])
    off = [name for name in ("fsync", "full_page_writes") if found[name] != "on"]
    if off:
        yield wrong("durability", f"{' and '.join(off)} off: a crash of the machine can destroy the database",
                    f"set {' = on and '.join(off)} = on", **found)  # fmt: skip
    elif found["synchronous_commit"] == "off":
        yield wrong("durability", "synchronous_commit is off: a crash can lose messages that were acknowledged",
                    "set synchronous_commit = on, at least for waypost's role", **found)  # fmt: skip
    else:
        yield ok(
            "durability", f"each commit is on the disk (synchronous_commit {found['synchronous_commit']})", **found
        )
    if found["autovacuum"] != "on":
        yield wrong("vacuum", "autovacuum is off: tables of queues grow without end", "set autovacuum = on")
    else:
        yield ok("vacuum", "autovacuum is on")


def check_drift(connection: Any, names: Names) -> Findings:
    """Check whether tables and functions are those of this release."""
    try:
        found = compare(connection, names)
    except AccessDenied:
        yield note("schema", "this user may not compare the tables, which needs temporary ones",
                   f"run {command_for(names)[:-1]} --check` as their owner")  # fmt: skip
        return
    if found.version is not None and found.version > VERSION:
        yield note("schema", f"an upgrade is under way: the tables are of version {found.version}, this release uses "
                   f"functions of version {VERSION} beside the newer ones", "update waypost here before the upgrade is "
                   "finished", version=found.version)  # fmt: skip
        return
    for difference in found.differences:
        yield wrong("schema", difference, "undo the change; `waypost migrate --sql` prints how this release makes it",
                    difference=difference)  # fmt: skip
    if not found.differences:
        yield ok("schema", f"tables and functions are as this release makes them, version {found.version}",
                 version=found.version)  # fmt: skip
    older: tuple[int, ...] = ()
    # A missing right is reported together with all others.
    with suppress(psycopg.errors.InsufficientPrivilege), connection.transaction(), connection.cursor() as cursor:
        older, since = older_versions(cursor, names), finish_from(cursor, names)
    if older:
        versions = ", ".join(map(str, older))
        when = "" if since is None else f", from {format_datetime(since)} on"
        yield note("upgrade", f"an upgrade is not finished: functions of version {versions} are there beside those of "
                   f"{VERSION}", "when the last process of the old release has stopped, run "
                   f"{command_for(names)[:-1]} --finish`{when}", versions=list(older))  # fmt: skip


def check_rights(connection: Any, names: Names) -> Findings:
    """Check whether this role has all rights that clients need."""
    user = connection.execute("SELECT current_user").fetchone()[0]
    lacking = []
    for kind, name in made_by_migrations():
        rights = "TRUNCATE" if name.startswith("entry_") else _RIGHTS[kind]
        function = "has_sequence_privilege" if kind == "SEQUENCE" else "has_table_privilege"
        for right in rights.split(", "):
            allowed = connection.execute(
                f"SELECT {function}(to_regclass(%s)::oid, %s)", (names.of(name), right)
            ).fetchone()[0]
            if allowed is False:
                lacking.append(f"{right} on {names.namespace}_{name}")
    script = sql(schema=names.schema, namespace=names.namespace)
    functions = sorted(set(re.findall(rf'FUNCTION "{re.escape(names.schema)}"\."([^"]+)"', script)))
    lacking += [
        f"EXECUTE on {name}"
        for (name,) in connection.execute(
            "SELECT DISTINCT p.proname FROM pg_proc p WHERE p.pronamespace = %s::regnamespace AND p.proname = ANY(%s) "
            "AND NOT has_function_privilege(p.oid, 'EXECUTE') ORDER BY 1",
            (f'"{names.schema}"', functions),
        )
    ]
    if lacking:
        missing = ", ".join(lacking[:4]) + (f" and {len(lacking) - 4} more" if len(lacking) > 4 else "")
        yield wrong("permissions", f"role {user} lacks {missing}", "let the owner run "
                    f"{command_for(names)[:-1]} --grant {user}`", lacking=lacking)  # fmt: skip
    else:
        yield ok("permissions", f"role {user} may do all that clients do", user=user)


def check_transactions(connection: Any) -> Findings:
    """Find transactions left open: journal readers wait for them, and vacuum keeps the rows that they might read."""
    rows = connection.execute(
        "SELECT pid, extract(epoch FROM clock_timestamp() - xact_start)::float8, coalesce(usename, ''), "
        "coalesce(application_name, ''), coalesce(state, '') FROM pg_stat_activity "
        "WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_type = 'client backend' "
        "AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL OR state LIKE 'idle in transaction%%') "
        "AND clock_timestamp() - xact_start > make_interval(secs => %s) ORDER BY 2 DESC", (OPEN_SECONDS_MAX,),
    ).fetchall()  # fmt: skip
    for pid, seconds, user, application, state in rows:
        yield wrong(
            "transactions",
            f"process {pid} ({application or 'no name'}, user {user}, {state}) has a transaction open for "
            f"{format_age(timedelta(seconds=float(seconds)))}",
            f"end it: journal readers wait for it and dead rows stay; SELECT pg_terminate_backend({pid}) does",
            pid=pid, seconds=round(seconds, 1), application=application, user=user, state=state,
        )  # fmt: skip
    if not rows:
        yield ok("transactions", f"no transaction is open for more than {OPEN_SECONDS_MAX} s")


def check_bytes(connection: Any, names: Names, found: Sequence[Stats]) -> Findings:
    """Measure the bytes of messages, events, keys of a window and results."""
    events = sum(max(0, stats.journal_last - stats.journal_first + 1) for stats in found)
    for table, what in (("message", "message"), ("window", "dedup key"), ("result", "result")):
        row = connection.execute(
            f"SELECT count(*), avg(pg_column_size(t.*))::float8 FROM (SELECT * FROM {names.of(table)} "
            f"LIMIT {ROWS_MEASURED}) t"
        ).fetchone()
        size = connection.execute("SELECT pg_total_relation_size(to_regclass(%s))", (names.of(table),)).fetchone()[0]
        if not row[0]:
            yield ok("bytes", f"no {what}s to measure; {format_bytes(size or 0)} in all", what=what, table_bytes=size)
            continue
        yield ok("bytes", f"{round(row[1]):,} bytes in a row for each {what} ({row[0]:,} measured); "
                 f"{format_bytes(size)} in all, with indexes", what=what, bytes_each=round(row[1]), measured=row[0],
                 table_bytes=size)  # fmt: skip
    slices = connection.execute(
        "SELECT coalesce(sum(pg_total_relation_size(inhrelid)), 0)::bigint FROM pg_inherits "
        "WHERE inhparent = to_regclass(%s)", (names.of("entry"),),
    ).fetchone()[0]  # fmt: skip
    if events:
        yield ok("bytes", f"{round(slices / events):,} bytes for each event of {events:,}; {format_bytes(slices)} in "
                 "all", what="event", bytes_each=round(slices / events), measured=events,
                 table_bytes=slices)  # fmt: skip
    yield from check_dead_rows(connection, names)


def check_dead_rows(connection: Any, names: Names) -> Findings:
    """Check whether vacuum keeps up."""
    rows = connection.execute(
        "SELECT relname, n_live_tup, n_dead_tup FROM pg_stat_user_tables WHERE schemaname = %s "
        "AND starts_with(relname, %s) AND n_dead_tup > %s AND n_dead_tup > 4 * n_live_tup",
        (names.schema, f"{names.namespace}_", DEAD_ROWS_MIN),
    ).fetchall()
    for table, live, dead in rows:
        yield note("vacuum", f"{table} has {dead:,} dead rows beside {live:,}", "look for open transactions, or set "
                   "autovacuum_naptime = 10s", table=table, dead=dead, live=live)  # fmt: skip
