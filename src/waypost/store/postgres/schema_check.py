"""Compares the tables and functions of a namespace with those of this release, by name.

The migration script is run on temporary tables, both sets of tables are compared, and the transaction is rolled back.
So there is no second description that could be out of date. Additions by hand (a column, an index, a table) are not
reported, nor are storage settings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from waypost.store.postgres.schema import (
    VERSION,
    Names,
    command_for,
    failure,
    finish_from,
    older_versions,
    sql,
    version_in,
)
from waypost.store.postgres.sources import connect

#: The schema of a session's temporary tables, by its alias.
TEMPORARY = "pg_temp"

_COLUMNS = """
    SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.atthasdef
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE c.relnamespace = %s AND starts_with(c.relname, %s) AND c.relkind IN ('r', 'p') AND a.attnum > 0
        AND NOT a.attisdropped"""
_INDEXES = """
    SELECT c.relname, pg_get_indexdef(c.oid), i.indisvalid FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid
    WHERE c.relnamespace = %s AND starts_with(c.relname, %s) AND c.relkind IN ('i', 'I')"""
_SEQUENCES = """
    SELECT c.relname FROM pg_class c WHERE c.relnamespace = %s AND starts_with(c.relname, %s) AND c.relkind = 'S'"""
#: Tables that must be empty after a recovery.
_LOGGED = """
    SELECT c.relname FROM pg_class c WHERE c.relnamespace = %s AND starts_with(c.relname, %s) AND c.relkind = 'r'
        AND c.relpersistence = 'p'"""
_TRIGGERS = """
    SELECT c.relname, t.tgname, t.tgenabled, t.tgtype, t.tgdeferrable, t.tginitdeferred, p.proname
    FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_proc p ON p.oid = t.tgfoid
    WHERE c.relnamespace = %s AND starts_with(c.relname, %s) AND NOT t.tgisinternal"""
_FUNCTIONS = """
    SELECT p.proname, p.pronargs, p.prosrc, p.proconfig FROM pg_proc p
    WHERE p.pronamespace = %s AND starts_with(p.proname, %s)"""


@dataclass(frozen=True, slots=True)
class SchemaCheck:
    """The result: the version, None if there are no tables, and the differences from this release."""

    version: int | None
    differences: tuple[str, ...]
    #: Older versions whose functions exist too: the update is not finished.
    older: tuple[int, ...] = ()
    #: The time until which `finish` refuses to remove them, because calls of them are not recorded for long enough.
    finish_from: datetime | None = None

    @property
    def is_current(self) -> bool:
        """Whether clients of this release can work with this namespace."""
        return self.version == VERSION and not self.differences


def check(url: str, *, schema: str = "public", namespace: str = "wp", start_timeout: float = 3.0) -> SchemaCheck:
    """Compare a namespace of a database with what `migrate` would make. Nothing is changed."""
    names = Names(schema, namespace)
    connection = connect(url, start_timeout)
    try:
        return _compare(connection, names)
    except psycopg.Error as error:
        raise failure(error, names) from None
    finally:
        connection.rollback()
        connection.close()


def drift(database: str | psycopg.Connection[Any], namespace: str = "wp", *, schema: str = "public") -> list[str]:
    """Return the differences between a namespace of a database and this release, one per line.

    `database` is a URL, or a psycopg connection, which is left unchanged.
    """
    names = Names(schema, namespace)
    if isinstance(database, str):
        found = check(database, schema=schema, namespace=namespace)
    else:
        found = compare(database, names)
    if found.version is None:
        return [f"there are no tables of namespace {namespace} in schema {schema}; run {command_for(names)}"]
    if found.version < VERSION:
        return [f"the tables are of version {found.version} and this release needs {VERSION}; run {command_for(names)}"]
    if found.version > VERSION:
        return [f"the tables are of version {found.version}, newer than this release ({VERSION}); update waypost here"]
    return list(found.differences)


def compare(connection: psycopg.Connection[Any], names: Names) -> SchemaCheck:
    """The same on a psycopg connection, which is left unchanged."""
    try:
        with connection.transaction(force_rollback=True):
            return _compare(connection, names)
    except psycopg.Error as error:
        raise failure(error, names) from None


def _compare(connection: psycopg.Connection[Any], names: Names) -> SchemaCheck:
    """Compare in a transaction that the caller rolls back."""
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        version = version_in(cursor, names)
        if version != VERSION:
            return SchemaCheck(version, ())
        # A temporary table is never logged, and UNLOGGED is an error for it; so is CONCURRENTLY in a transaction.
        script = sql(schema=TEMPORARY, namespace=names.namespace)
        cursor.execute(script.replace("CREATE UNLOGGED ", "CREATE ").replace("INDEX CONCURRENTLY ", "INDEX "))
        cursor.execute("SELECT %s::regnamespace::oid, pg_my_temp_schema()", (f'"{names.schema}"',))
        found = cursor.fetchone()
        assert found is not None
        differences = tuple(sorted(_differences(cursor, names, *found)))
        if differences or not (older := older_versions(cursor, names)):
            return SchemaCheck(version, differences)
        return SchemaCheck(version, (), older, finish_from(cursor, names))


def _differences(cursor: psycopg.Cursor[Any], names: Names, present: int, wanted: int) -> list[str]:
    def rows(query: str, place: int) -> list[tuple[Any, ...]]:
        return cursor.execute(query, (place, f"{names.namespace}_")).fetchall()

    differences: list[str] = []
    columns = {(table, column): rest for table, column, *rest in rows(_COLUMNS, present)}
    tables = {table for table, _ in columns}
    for table, column, *rest in rows(_COLUMNS, wanted):
        if table not in tables:
            differences.append(f"table {table} is missing")
        elif (table, column) not in columns:
            differences.append(f"table {table} lacks the column {column}")
        elif columns[table, column] != rest:
            differences.append(
                f"column {table}.{column} is {_describe(columns[table, column])} and should be {_describe(rest)}"
            )
    indexes = {name: (_bare(definition), valid) for name, definition, valid in rows(_INDEXES, present)}
    for name, definition, _ in rows(_INDEXES, wanted):
        if name not in indexes:
            differences.append(f"index {name} is missing")
        elif indexes[name] != (_bare(definition), True):
            differences.append(f"index {name} is {indexes[name][0]} and should be {_bare(definition)}")
    differences += [
        f"table {name} is logged and should be unlogged"
        for (name,) in rows(_LOGGED, present)
        if name == f"{names.namespace}_server"
    ]
    sequences = {name for (name,) in rows(_SEQUENCES, present)}
    differences += [f"sequence {name} is missing" for (name,) in rows(_SEQUENCES, wanted) if name not in sequences]
    triggers = {(table, name): rest for table, name, *rest in rows(_TRIGGERS, present)}
    for table, name, *rest in rows(_TRIGGERS, wanted):
        if table in tables and (table, name) not in triggers:
            differences.append(f"trigger {name} of table {table} is missing")
        elif triggers.get((table, name), rest) != rest:
            differences.append(f"trigger {name} of table {table} is disabled or not this release's")
    functions: dict[tuple[str, int], list[list[Any]]] = {}
    for name, count, *rest in rows(_FUNCTIONS, present):
        functions.setdefault((name, count), []).append(rest)
    for name, count, source, settings in rows(_FUNCTIONS, wanted):
        if (name, count) not in functions:
            differences.append(f"function {name} is missing")
        elif [source.replace(f'"{TEMPORARY}".', f'"{names.schema}".'), settings] not in functions[name, count]:
            differences.append(f"function {name} is not this release's")
    # A missing table is listed once, not for each of its columns.
    return list(dict.fromkeys(differences))


def _describe(column: list[Any]) -> str:
    kind, required, has_default = column
    return f"{kind}{' not null' if required else ''}{' with a default' if has_default else ''}"


def _bare(definition: str) -> str:
    """Return an index's definition from its kind on, without the schema of its table."""
    return re.sub(r"^CREATE (UNIQUE )?INDEX .* ON (?:ONLY )?.* USING ", lambda match: match[1] or "", definition)
