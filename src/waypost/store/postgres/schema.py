"""The schema: tables by numbered migrations, functions as this release has them, and a row with the version.

Tables, indexes and functions of a namespace carry its name as a prefix, in a schema of the user's choice. A migration
is one transaction under a lock, so it is safe to run twice and from several processes at once.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any

import psycopg

from waypost.checks import check_namespace
from waypost.errors import AccessDenied, ConfigurationError, InvalidName, SchemaTooNew, SchemaTooOld, StoreError
from waypost.store.postgres.constants import inject
from waypost.store.postgres.failures import map_connection_error, map_error
from waypost.store.postgres.sources import connect

#: Grows with every change of a table or a function.
VERSION = 15
#: Changes of tables, each with the version that it leads to. A version that changes only functions has none.
MIGRATIONS = (
    (1, "0001_tables"), (2, "0002_wake_at_commit"), (3, "0003_token_floor"), (4, "0004_over_cap"),
    (6, "0006_removed_queues"), (7, "0007_function_names"), (10, "0010_minute_counters"), (11, "0011_records"),
    (12, "0012_error_texts"), (13, "0013_tracebacks"), (15, "0015_schedule_state"),
)  # fmt: skip
FUNCTIONS = (
    "base", "moves", "wake", "tidy", "chains", "accept", "publish", "claim", "settle", "extend", "cancel", "running",
    "journal", "stats", "workers", "schedules", "check", "poll", "remove", "records",
)  # fmt: skip
SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,62}")
NAME = re.compile(r"\{(#?)([a-z_]+)\}")
MADE = re.compile(r"^CREATE (?:OR REPLACE |UNLOGGED )?(TABLE|SEQUENCE|FUNCTION) \{([a-z_]+)\}", re.MULTILINE)
#: Plans are made once, for any size of a table: the planner's estimates for a table that was just empty are
#: wrong in both directions, and every statement here has its index. So the settings leave only the index.
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
        """A table or function, with its schema."""
        return f'"{self.schema}"."{self.namespace}_{name}"'

    def fill(self, text: str) -> str:
        """A file of ours with the names of this namespace in it."""

        def name(match: re.Match[str]) -> str:
            if match[2] in ("settings", "few_settings"):
                return SETTINGS if match[2] == "settings" else FEW_SETTINGS
            return f'"{self.namespace}_{match[2]}"' if match[1] else self.of(match[2])

        return NAME.sub(name, text)


@cache
def migration_text(name: str) -> str:
    """A migration as it is written, with places for names."""
    return (files("waypost.store.postgres") / "migrations" / f"{name}.sql").read_text()


@cache
def function_text(name: str) -> str:
    """A file of functions with our constants in it, and with places for names."""
    return inject((files("waypost.store.postgres") / "sql" / f"{name}.sql").read_text())


def sql(*, schema: str = "public", namespace: str = "wp", since: int = 0) -> str:
    """Return the script that `migrate` runs on a database at version `since`."""
    names = Names(schema, namespace)
    parts = [names.fill(migration_text(name)) for version, name in MIGRATIONS if version > since]
    if since and parts:
        # Every function reads the queue first: in another order, a call in progress and a migration could wait for
        # each other.
        parts.insert(0, names.fill("LOCK TABLE {queue} IN ACCESS EXCLUSIVE MODE;"))
    # A function may call one that is made later in the same script.
    parts.append("SET LOCAL check_function_bodies = off;")
    parts += [names.fill(function_text(name)) for name in FUNCTIONS]
    parts.append(
        names.fill(
            "CREATE TABLE IF NOT EXISTS {schema} (version integer NOT NULL);\n"
            "DELETE FROM {schema};\n"
            f"INSERT INTO {{schema}} (version) VALUES ({VERSION});"
        )
    )
    return "\n\n".join(parts) + "\n"


def grants(role: str, *, schema: str = "public", namespace: str = "wp") -> str:
    """Return the script that grants a role exactly what clients of a namespace need."""
    if not isinstance(role, str) or SCHEMA.fullmatch(role) is None:
        raise InvalidName("a role's name has letters, digits, _ and $, and begins with a letter or _")
    names = Names(schema, namespace)
    made = [found for _, name in MIGRATIONS for found in MADE.findall(migration_text(name))]
    functions = {found for name in FUNCTIONS for _, found in MADE.findall(function_text(name))}
    rights = {"TABLE": "SELECT, INSERT, UPDATE, DELETE", "SEQUENCE": "USAGE, SELECT, UPDATE"}
    lines = [f'GRANT USAGE ON SCHEMA "{schema}" TO "{role}";', f'GRANT SELECT ON {names.of("schema")} TO "{role}";']
    for kind, name in made:
        # Slices of the journal are written and read as the journal, and emptied by name.
        right = "TRUNCATE" if name.startswith("entry_") else rights[kind]
        lines.append(f'GRANT {right} ON {kind} {names.of(name)} TO "{role}";')
    # A function may be there several times, for different arguments.
    chosen = ", ".join(f"'{names.namespace}_{name}'" for name in sorted(functions))
    lines += [
        "DO $body$ DECLARE f regprocedure; BEGIN",
        f"    FOR f IN SELECT p.oid FROM pg_proc p WHERE p.pronamespace = '\"{schema}\"'::regnamespace",
        f"        AND p.proname IN ({chosen})",
        f"    LOOP EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO \"{role}\"', f); END LOOP;",
        "END $body$;",
    ]
    return "\n".join(lines) + "\n"


def migrate(
    url: str, *, schema: str = "public", namespace: str = "wp", grant: str | None = None, start_timeout: float = 3.0
) -> int:
    """Update a namespace of a database to this release's version; return its version before, 0 for none.

    With `grant`, the role of that name gets the rights that clients need.
    """
    names = Names(schema, namespace)
    granted = "" if grant is None else grants(grant, schema=schema, namespace=namespace)
    connection = connect(url, start_timeout)
    try:
        with connection, connection.cursor() as cursor:
            version = migrate_in(cursor, names)
            if granted:
                cursor.execute(granted)
            return version
    except psycopg.Error as error:
        raise failure(error, names) from None
    finally:
        connection.close()


def migrate_in(cursor: Any, names: Names) -> int:
    """Do what `migrate` does in the transaction of a cursor, which the caller commits; return the version before."""
    cursor.execute("SELECT pg_advisory_xact_lock(hashtext('waypost migrate'), hashtext(%s))", (names.of(""),))
    version = version_in(cursor, names) or 0
    if version > VERSION:
        raise too_new(version, names)
    if version < VERSION:
        cursor.execute(sql(schema=names.schema, namespace=names.namespace, since=version))
    return version


def drop_sql(names: Names) -> str:
    """Return the script that removes the tables and functions of a namespace, with all that is in them."""
    made = [found for _, name in MIGRATIONS for found in MADE.findall(migration_text(name))]
    functions = {found for name in FUNCTIONS for _, found in MADE.findall(function_text(name))}
    chosen = ", ".join(f"'{names.namespace}_{name}'" for name in sorted(functions))
    tables = [*(names.of(name) for kind, name in made if kind == "TABLE"), names.of("schema")]
    return "\n".join(
        [
            "DO $body$ DECLARE f regprocedure; BEGIN",
            f"    FOR f IN SELECT p.oid FROM pg_proc p WHERE p.pronamespace = '\"{names.schema}\"'::regnamespace",
            f"        AND p.proname IN ({chosen})",
            "    LOOP EXECUTE format('DROP FUNCTION IF EXISTS %s CASCADE', f); END LOOP;",
            "END $body$;",
            *(f"DROP TABLE IF EXISTS {table} CASCADE;" for table in tables),
            *(f"DROP SEQUENCE IF EXISTS {names.of(name)} CASCADE;" for kind, name in made if kind == "SEQUENCE"),
        ]
    )


def version_in(cursor: psycopg.Cursor[Any], names: Names) -> int | None:
    """The version of the tables that are there, None if there are none."""
    cursor.execute("SELECT to_regclass(%s)", (names.of("schema"),))
    found = cursor.fetchone()
    if found is None or found[0] is None:
        return None
    cursor.execute(names.fill("SELECT version FROM {schema}"))
    row = cursor.fetchone()
    return 0 if row is None else int(row[0])


def failure(error: psycopg.Error, names: Names) -> Exception:
    """Map an error of making or comparing tables."""
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
            "to check them, make temporary ones; nothing was done"
        )
    return map_error(error.sqlstate, text, "", "migrate")


def command_for(names: Names) -> str:
    """Return the command that creates these tables."""
    schema = "" if names.schema == "public" else f" --schema {names.schema}"
    namespace = "" if names.namespace == "wp" else f" --namespace {names.namespace}"
    return f"`waypost migrate URL{namespace}{schema}`"


def check_version(version: int | None, names: Names) -> None:
    """Refuse a database whose tables belong to another release."""
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
    if version > VERSION:
        raise too_new(version, names)


def too_new(version: int, names: Names) -> StoreError:
    """The tables belong to a newer release."""
    return SchemaTooNew(
        f"the tables of namespace {names.namespace} are of version {version} and this release knows {VERSION}; update "
        "waypost here, nothing was touched"
    )
