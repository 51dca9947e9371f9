"""The schema: tables by numbered migrations, the functions of this release, and rows with the versions.

Tables, indexes and functions of a namespace carry its name as a prefix, in a schema of the user's choice. The name of a
function also ends with its version, so that clients of two releases can call their own: `migrate` creates those of this
release beside those of the release before, and `finish` removes the older ones. `migrating.py` runs both.

A migration from version 16 on only adds to tables (columns with defaults, tables, indexes), because the functions of
the previous version continue to use them. Its file may consist of several steps; each begins with a line
`-- step: NAME` and can be repeated. A step whose name begins with `concurrently` is one statement, which runs outside
of a transaction. What `finish` removes from tables, such as a column or an index, is in a file of the same name that
ends with `.finish`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

import psycopg

from waypost.checks import check_namespace
from waypost.errors import AccessDenied, ConfigurationError, InvalidName, SchemaTooNew, SchemaTooOld, StoreError
from waypost.release import DATA_VERSION, FINISHED
from waypost.store.postgres.constants import inject
from waypost.store.postgres.failures import map_connection_error, map_error

#: Grows with every change of a table or a function between releases.
VERSION = 16
#: From this version on, clients of two versions work side by side. Until then, they stop for a migration.
SIDE_BY_SIDE = 16
#: Changes of tables, each with the version that it leads to. A version that changes only functions has none.
MIGRATIONS = (
    (1, "0001_tables"), (2, "0002_wake_at_commit"), (3, "0003_token_floor"), (4, "0004_over_cap"),
    (6, "0006_removed_queues"), (7, "0007_function_names"), (10, "0010_minute_counters"), (11, "0011_records"),
    (12, "0012_error_texts"), (13, "0013_tracebacks"), (15, "0015_schedule_state"),
    (16, "0016_groups"), (16, "0016_expires"), (16, "0016_unique"), (16, "0016_side_by_side"),
)  # fmt: skip
FUNCTIONS = (
    "base", "moves", "wake", "tidy", "chains", "accept", "publish", "claim", "settle", "extend", "cancel", "running",
    "journal", "stats", "workers", "schedules", "check", "poll", "remove", "records", "groups", "group_settings",
    "group_caps", "expires", "triggers",
)  # fmt: skip
NOW_MS = "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,62}")
NAME = re.compile(r"\{(#?)([a-z_]+)\}")
MADE = re.compile(r"^CREATE (?:OR REPLACE |UNLOGGED )?(TABLE|SEQUENCE|FUNCTION) \{([a-z_]+)\}", re.MULTILINE)
#: The line before each step of a migration.
STEP = re.compile(r"^-- step: (.+)\n", re.MULTILINE)
#: The longest time that a step waits for a lock, because all later sessions wait behind it; it is then tried again.
LOCK_TIMEOUT_MS = 200
#: The pause between two batches when psql runs them.
PAUSE_BY_HAND_SECONDS = 0.02
#: The name of an index that a step makes, and its table.
INDEX = re.compile(r'INDEX CONCURRENTLY (?:IF NOT EXISTS )?"([^"]+)" ON ("[^ ]+")')
#: Processes that only publish do not register: functions that were called within this time are in use.
UNUSED_MINUTES = 15
#: Plans are made once, for any size of a table: the planner's estimates for a table that was just empty are wrong in
#: both directions, and every statement here has its index. So the settings permit only index scans.
SETTINGS = (
    "SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off "
    "SET enable_hashjoin = off SET enable_mergejoin = off SET enable_sort = off SET jit = off"
)
#: The same for functions whose statements neither join nor sort: each setting costs every call a little.
FEW_SETTINGS = "SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off"


class Names:
    """The names of one namespace's tables, functions and indexes, quoted."""

    def __init__(self, schema: str, namespace: str) -> None:
        if not isinstance(schema, str) or SCHEMA.fullmatch(schema) is None:
            raise InvalidName("a schema name has letters, digits, _ and $, and begins with a letter or _")
        self.schema = schema
        self.namespace = check_namespace(namespace)

    def of(self, name: str) -> str:
        """Return a table or function, with its schema."""
        return f'"{self.schema}"."{self.bare(name)}"'

    def bare(self, name: str) -> str:
        """Return the same without its schema, not quoted."""
        version = f"_{VERSION}" if VERSION >= SIDE_BY_SIDE and name in function_names() else ""
        return f"{self.namespace}_{name}{version}"

    def fill(self, text: str) -> str:
        """Return the text of one of our files with the names of this namespace."""

        def name(match: re.Match[str]) -> str:
            if match[2] in ("settings", "few_settings"):
                return SETTINGS if match[2] == "settings" else FEW_SETTINGS
            return f'"{self.bare(match[2])}"' if match[1] else self.of(match[2])

        return NAME.sub(name, text)


@cache
def migration_text(name: str) -> str:
    """Return the text of a migration, with placeholders for names."""
    return _path_of(name).read_text()


def _path_of(migration: str) -> Traversable:
    return files("waypost.store.postgres") / "migrations" / f"{migration}.sql"


@cache
def function_text(name: str) -> str:
    """Return a file of functions with the values of constants, and with placeholders for names."""
    return inject((files("waypost.store.postgres") / "sql" / f"{name}.sql").read_text())


@cache
def function_names() -> frozenset[str]:
    """Return the functions of this release, without namespace and version."""
    return frozenset(found for name in FUNCTIONS for _, found in MADE.findall(function_text(name)))


class Step(NamedTuple):
    """A part of a migration that is committed by itself and may be repeated. Its name begins with how to run it.

    `concurrently …` is one statement outside of a transaction: PostgreSQL does not build an index concurrently inside
    one. `in batches …` is one statement that changes a bounded number of rows, each time in a transaction of its own,
    until it changes none: no row of a large table is locked for longer than a moment. It should skip locked rows, so
    that it never waits for clients while it holds locks that they wait for; a second step without that changes the few
    remaining rows.
    """

    name: str
    script: str

    @property
    def in_transaction(self) -> bool:
        """Whether it runs in a transaction."""
        return not self.name.startswith("concurrently")

    @property
    def in_batches(self) -> bool:
        """Whether it is run again until it changes nothing."""
        return self.name.startswith("in batches")

    @property
    def at_once(self) -> str:
        """The same as a part of one transaction, for which clients stop, or which creates the tables."""
        return self._repeated("") if self.in_batches else self.script.replace("INDEX CONCURRENTLY ", "INDEX ")

    @property
    def by_hand(self) -> str:
        """The same for psql, outside of a transaction."""
        if self.in_batches:
            return self._repeated(f" COMMIT; PERFORM pg_sleep({PAUSE_BY_HAND_SECONDS});")
        leftover = self.drop_leftover
        return self.script if leftover is None else f"{leftover}\n\\gexec\n{self.script}"

    @property
    def drop_leftover(self) -> str | None:
        """A query that returns a statement to run first: it drops the index that this step makes if it is not valid.

        `IF NOT EXISTS` would keep the invalid index of an interrupted step.
        """
        named = INDEX.search(self.script)
        return named and (
            "SELECT format('DROP INDEX CONCURRENTLY %s', i.indexrelid::regclass)\n"
            "FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid\n"
            f"WHERE i.indrelid = '{named[2]}'::regclass AND c.relname = '{named[1]}' AND NOT i.indisvalid"
        )

    @property
    def being_built(self) -> str | None:
        """A query that returns a row while another session builds an index of the same table."""
        named = INDEX.search(self.script)
        return named and (
            "SELECT p.pid FROM pg_stat_progress_create_index p "
            f"WHERE p.relid = '{named[2]}'::regclass AND p.pid <> pg_backend_pid()"
        )

    def _repeated(self, then: str) -> str:
        return f"DO $batches$ BEGIN LOOP\n{self.script.strip()}\nEXIT WHEN NOT FOUND;{then}\nEND LOOP; END $batches$;"


def steps(names: Names, since: int) -> list[Step]:
    """Return the steps from a version to this release's: before `SIDE_BY_SIDE` a single one, without clients."""
    parts = [
        step
        for version, name in MIGRATIONS
        if version > since
        for step in split_steps(name, names.fill(migration_text(name)))
    ]
    if since < SIDE_BY_SIDE:
        parts += finish_steps(names, since)
    # A function may call one that is created later in the same script.
    script = ["SET LOCAL check_function_bodies = off;"]
    script += [names.fill(function_text(name)) for name in FUNCTIONS if name != "triggers"]
    parts.append(Step("functions", "\n\n".join(script)))
    if since:
        parts.append(Step("rights", _rights_as_before(names)))
    parts.append(Step("triggers", names.fill(function_text("triggers"))))
    parts.append(Step("version", names.fill(_version_script(names))))
    if since >= SIDE_BY_SIDE:
        return parts
    whole = [step.at_once for step in parts]
    # No process of an older release runs any more, or there was none.
    whole.append(names.fill(confirm_version()))
    if since:
        # Every function reads the queue first: in another order, a call in progress and the migration could wait for
        # each other.
        whole.insert(0, names.fill("LOCK TABLE {queue} IN ACCESS EXCLUSIVE MODE;"))
    return [Step("tables and functions", "\n\n".join(whole))]


def finish_steps(names: Names, since: int) -> list[Step]:
    """Return the steps by which `finish` removes parts of tables that only older versions use."""
    endings = [f"{name}.finish" for version, name in MIGRATIONS if version > since]
    return [Step(ending, names.fill(migration_text(ending))) for ending in endings if _path_of(ending).is_file()]


def confirm_version() -> str:
    """Return the statement that records that every process can read the data of this release."""
    kind, name = FINISHED
    return (
        "INSERT INTO {record} (kind, name, data, version, created_ms)\n"
        f"VALUES ('{kind}', '{name}', convert_to('{DATA_VERSION}', 'UTF8'), {NOW_MS}, {NOW_MS})\n"
        "ON CONFLICT (kind, name) DO UPDATE SET data = excluded.data, version = excluded.version;"
    )


def split_steps(name: str, text: str) -> list[Step]:
    """Return the steps of a migration's file; a file without such lines is one step."""
    first, *rest = STEP.split(text)
    found = [Step(name, first)] if first.strip() else []
    return found + [Step(title, script) for title, script in zip(rest[::2], rest[1::2], strict=True)]


def _version_script(names: Names) -> str:
    """Return the script that makes the functions of this version the ones in use."""
    restore = f"{names.fill(function_text('triggers'))}\n{_plain_clock(names)}"
    return (
        "CREATE TABLE IF NOT EXISTS {schema} (version integer NOT NULL);\n"
        "DELETE FROM {schema};\n"
        f"INSERT INTO {{schema}} (version) VALUES ({VERSION});\n"
        "INSERT INTO {interface} (version, functions, made_ms, restore)\n"
        f"VALUES ({VERSION}, ARRAY[{listed_functions(names)}], {NOW_MS}, $restore${restore}$restore$)\n"
        "ON CONFLICT (version) DO UPDATE\n"
        "SET functions = excluded.functions, made_ms = excluded.made_ms, restore = excluded.restore;\n"
        "DO $body$ DECLARE v integer; BEGIN\n"
        f"FOR v IN SELECT version FROM {{interface}} WHERE version < {VERSION} LOOP\n"
        f"    EXECUTE replace($clock${_clock_with_record(names)}$clock$, '<version>', v::text);\n"
        "END LOOP; END $body$;"
    )


def _clock_with_record(names: Names) -> str:
    """Return the clock of an older version, which every verb calls, extended to record that it was called.

    Rows are only added, so that no transaction of a user waits for another; a version in use gets about one row a
    minute, or one from each transaction that cannot see the rows of the others yet. Roles that may only read add none.
    """
    clock = f'"{names.schema}"."{names.namespace}_clock_<version>"'
    return (
        f"CREATE OR REPLACE FUNCTION {clock}(p_clock bigint) RETURNS bigint LANGUAGE plpgsql VOLATILE AS $code$\n"
        f"DECLARE v_now bigint := {NOW_MS};\n"
        "BEGIN\n"
        "    IF current_setting('transaction_read_only') = 'off' AND has_table_privilege('{used}', 'INSERT') THEN\n"
        "        IF NOT EXISTS (SELECT FROM {used} u WHERE u.version = <version> AND u.at_ms > v_now - 60000) THEN\n"
        "            INSERT INTO {used} (version, at_ms) VALUES (<version>, v_now);\n"
        "        END IF;\n"
        "    END IF;\n"
        "    RETURN coalesce(p_clock, v_now);\n"
        "END $code$"
    )


def _plain_clock(names: Names) -> str:
    """Return the clock of this version, without the record."""
    text = names.fill(function_text("base"))
    begin = text.index(f"CREATE OR REPLACE FUNCTION {names.of('clock')}")
    end = text.index("$body$;", begin) + len("$body$;")
    return text[begin:end]


def sql(*, schema: str = "public", namespace: str = "wp", since: int = 0) -> str:
    """Return the script that `migrate` runs on a database at version `since`, without transactions around its steps."""
    return "\n\n".join(step.at_once for step in steps(Names(schema, namespace), since)) + "\n"


def sql_in_steps(*, schema: str = "public", namespace: str = "wp", since: int = 0) -> str:
    """Return the same as a script for psql, each step in its own transaction."""
    names = Names(schema, namespace)
    # A script that was interrupted is run again.
    return for_psql(steps(names, since), names, only_from=(since, VERSION) if since else ())


def for_psql(steps: Iterable[Step], names: Names, *, only_from: tuple[int, ...]) -> str:
    """Return steps as a script for psql, for tables of one of these versions; of none if there are no tables.

    If there are tables, there may be clients: no step waits long for a lock. The script ends with the first error,
    and at once if another migration is running, or if the tables have changed since it was printed.
    """
    has_clients = bool(only_from)
    text = "".join(f"-- step: {step.name}\n{_for_psql(step, has_clients)}\n\n" for step in steps)
    return (f"{_begin_psql(names, only_from)}\n{text}" if has_clients and text else text).removesuffix("\n")


def take_lock(function: str, names: Names) -> str:
    """Return the expression that takes the lock of migrations if it is free, and is then true."""
    return f"{function}(hashtext('waypost migrate'), hashtext('{names.of('')}'))"


def _begin_psql(names: Names, only_from: tuple[int, ...]) -> str:
    versions = ", ".join(map(str, only_from))
    return (
        "\\set ON_ERROR_STOP on\n"
        "-- step: alone, and on the tables for which this was printed\n"
        "DO $body$ BEGIN\n"
        f"IF NOT {take_lock('pg_try_advisory_lock', names)} THEN\n"
        "    RAISE EXCEPTION 'another migration is running; when it has ended, print this script again';\n"
        "END IF;\n"
        f"IF NOT EXISTS (SELECT FROM {names.of('schema')} WHERE version IN ({versions})) THEN\n"
        "    RAISE EXCEPTION 'the tables have changed since this script was printed; print it again';\n"
        "END IF;\n"
        "END $body$;\n"
    )


def _for_psql(step: Step, has_clients: bool) -> str:
    if step.in_batches or not step.in_transaction:
        return step.by_hand
    timeout = f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_MS}ms';\n" if has_clients else ""
    return f"BEGIN;\n{timeout}{step.script}\nCOMMIT;"


def grants(role: str, *, schema: str = "public", namespace: str = "wp") -> str:
    """Return the script that grants a role exactly what clients of a namespace need."""
    if not isinstance(role, str) or SCHEMA.fullmatch(role) is None:
        raise InvalidName("a role's name has letters, digits, _ and $, and begins with a letter or _")
    names = Names(schema, namespace)
    lines = [f'GRANT {right} TO "{role}";' for right in (f'USAGE ON SCHEMA "{schema}"', *_rights(names))]
    functions = _grant_functions(names, f"'\"{role}\"'")
    return "\n".join([*lines, f"DO $body$ BEGIN\n{functions}\nEND $body$;"]) + "\n"


def _rights(names: Names) -> Iterator[str]:
    """Yield the rights of a client on tables and sequences, in the form of a GRANT statement."""
    yield f"SELECT ON {names.of('schema')}"
    rights = {"TABLE": "SELECT, INSERT, UPDATE, DELETE", "SEQUENCE": "USAGE, SELECT, UPDATE"}
    for kind, name in made_by_migrations():
        # Slices of the journal are written and read through the journal's table, but truncated by their own names.
        right = "TRUNCATE" if name.startswith("entry_") else rights[kind]
        yield f"{right} ON {kind} {names.of(name)}"


def _grant_functions(names: Names, clients: str) -> str:
    """Return the PL/pgSQL statement that lets roles call the functions of this version.

    There may be several functions of a name, with different arguments.
    """
    return (
        f"    EXECUTE (SELECT 'GRANT EXECUTE ON FUNCTION ' || string_agg(p.oid::regprocedure::text, ', ')"
        f" || ' TO ' || {clients}\n"
        f"    FROM pg_proc p WHERE p.pronamespace = '\"{names.schema}\"'::regnamespace\n"
        f"        AND p.proname IN ({listed_functions(names)}));"
    )


def _rights_as_before(names: Names) -> str:
    """Return the script that gives clients the rights for new tables and functions.

    Clients are the roles that may add messages; functions may be called by the roles that may call those of an older
    version. Functions run with the rights of their caller, so the right to call them allows nothing by itself.
    """
    role = "CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END"
    tables = "\n".join(f"        EXECUTE 'GRANT {right} TO ' || clients;" for right in _rights(names))
    return names.fill(f"""\
DO $body$
DECLARE
    clients text;
BEGIN
    SELECT string_agg(DISTINCT {role}, ', ') INTO clients FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
    WHERE c.oid = '{{message}}'::regclass AND a.privilege_type = 'INSERT' AND a.grantee <> c.relowner;
    IF clients IS NOT NULL THEN
{tables}
    {_grant_functions(names, "clients")}
    END IF;
    SELECT string_agg(DISTINCT {role}, ', ') INTO clients
    FROM pg_proc p CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
    WHERE p.pronamespace = '"{names.schema}"'::regnamespace AND a.grantee <> p.proowner
        AND p.proname IN (SELECT unnest(i.functions) FROM {{interface}} i);
    IF clients IS NOT NULL THEN
    {_grant_functions(names, "clients")}
    END IF;
END $body$;""")


def made_by_migrations() -> list[tuple[str, str]]:
    """Return the tables and sequences that migrations create, each with its kind."""
    return [found for _, name in MIGRATIONS for found in MADE.findall(migration_text(name))]


def drop_sql(names: Names) -> str:
    """Return the script that removes the tables and functions of a namespace, with all their data."""
    made = made_by_migrations()
    tables = [*(names.of(name) for kind, name in made if kind == "TABLE"), names.of("schema")]
    return "\n".join(
        [
            drop_functions(names, functions_of(names, "true")),
            *(f"DROP TABLE IF EXISTS {table} CASCADE;" for table in tables),
            *(f"DROP SEQUENCE IF EXISTS {names.of(name)} CASCADE;" for kind, name in made if kind == "SEQUENCE"),
        ]
    )


def listed_functions(names: Names) -> str:
    """Return the names of this version's functions as a list in SQL."""
    return ", ".join(f"'{names.bare(name)}'" for name in sorted(function_names()))


def functions_of(names: Names, which: str) -> str:
    """Return the query for the functions of the versions for which a condition on `i.version` holds."""
    return f"SELECT unnest(i.functions) FROM {names.of('interface')} i WHERE {which}"


def drop_functions(names: Names, chosen: str) -> str:
    """Return the script that removes functions; `chosen` is a list or a query of their names."""
    return "\n".join(
        [
            "DO $body$ DECLARE f regprocedure; BEGIN",
            f"    FOR f IN SELECT p.oid FROM pg_proc p WHERE p.pronamespace = '\"{names.schema}\"'::regnamespace",
            f"        AND p.proname IN ({chosen})",
            "    LOOP EXECUTE format('DROP FUNCTION IF EXISTS %s CASCADE', f); END LOOP;",
            "END $body$;",
        ]
    )


def version_in(cursor: psycopg.Cursor[Any], names: Names) -> int | None:
    """Return the version of the tables, None if there are none."""
    cursor.execute("SELECT to_regclass(%s)", (names.of("schema"),))
    found = cursor.fetchone()
    if found is None or found[0] is None:
        return None
    cursor.execute(names.fill("SELECT version FROM {schema}"))
    row = cursor.fetchone()
    return 0 if row is None else int(row[0])


def older_versions(cursor: psycopg.Cursor[Any], names: Names) -> tuple[int, ...]:
    """Return the versions before this release's whose functions exist too, because an update is not finished."""
    cursor.execute(names.fill("SELECT version FROM {interface} WHERE version < %s ORDER BY version"), (VERSION,))
    return tuple(version for (version,) in cursor.fetchall())


def finish_from(cursor: Any, names: Names) -> datetime | None:
    """Return the time until which `finish` refuses, because calls are not recorded for long enough yet."""
    cursor.execute(
        names.fill(f"SELECT made_ms + %s FROM {{interface}} WHERE version = %s AND made_ms > {NOW_MS} - %s"),
        (UNUSED_MINUTES * 60_000, VERSION, UNUSED_MINUTES * 60_000),
    )
    found = cursor.fetchone()
    return found and datetime.fromtimestamp(-(-found[0] // 1000), UTC)


def failure(error: psycopg.Error, names: Names) -> Exception:
    """Map an error of creating or comparing tables."""
    if error.sqlstate is None:
        return map_connection_error(error, "the PostgreSQL server", sent=True)
    text = error.diag.message_primary or ""
    if error.sqlstate == "42704":
        return ConfigurationError(f"{text}; create it first, nothing was done")
    if error.sqlstate == "3F000":
        return ConfigurationError(f'{text}; run CREATE SCHEMA "{names.schema}" first, nothing was done')
    if error.sqlstate == "42501":
        return AccessDenied(
            f"{text}; to migrate, a user must own waypost's tables and may create some in schema {names.schema}, and "
            "to check them, make temporary ones; with these rights run it again, it goes on where it stopped"
        )
    return map_error(error.sqlstate, text, "", "migrate")


def command_for(names: Names) -> str:
    """Return the command that creates these tables."""
    schema = "" if names.schema == "public" else f" --schema {names.schema}"
    namespace = "" if names.namespace == "wp" else f" --namespace {names.namespace}"
    return f"`waypost migrate URL{namespace}{schema}`"


def check_version(version: int | None, names: Names, *, is_kept: bool = False) -> None:
    """Refuse a database without the functions of this release. `is_kept`: they exist beside newer ones."""
    if version is None:
        raise SchemaTooOld(
            f"the database has no tables of waypost in schema {names.schema} under namespace {names.namespace}; run "
            f"{command_for(names)} once, or waypost.store.postgres.migrate(url)"
        )
    if version < VERSION:
        raise SchemaTooOld(
            f"the tables of namespace {names.namespace} are of version {version} and this release needs {VERSION}; run "
            f"{command_for(names)}"
        )
    if version > VERSION and not is_kept:
        raise too_new(version, names)


def too_new(version: int, names: Names) -> StoreError:
    """Return the error for tables of a newer release."""
    return SchemaTooNew(
        f"the tables of namespace {names.namespace} are of version {version} and this release knows {VERSION}; update "
        "waypost here, nothing was touched"
    )
