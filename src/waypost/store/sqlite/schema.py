"""The names and tables of one namespace in a file: composed, checked, created.

A file may be shared with tables of its owner and with other namespaces. A file is ours only if its `<namespace>_meta`
table says so, and other tables are never changed.
"""

from __future__ import annotations

import re
import sqlite3
from importlib.resources import files

from waypost.checks import check_namespace
from waypost.errors import ForeignData, SchemaTooNew, SchemaTooOld
from waypost.release import DATA_VERSION, FINISHED
from waypost.values import MINUTE_COUNTERS, MINUTE_COUNTERS_FIRST, MessageState

#: The schema that a client must know to use the file: increased by a change that an older release could not work with,
#: never by an added column or table, which older releases ignore. 1: release 0.1.0; 2: the journal is packed.
SCHEMA_VERSION = 2
#: A file with at least this schema is upgraded when it is opened.
SCHEMA_VERSION_MIN = 1
MARK = "waypost sqlite store"
#: The name in `meta` of the number of steps in users' transactions that have woken sleepers.
TRANSACTION_WAKES = "transaction wakes"
#: What is reserved for a full disk: enough for a claim of 512 messages and their settles.
RESERVE_BYTES = 256 * 1024

#: The states of a message; rows contain their positions as numbers: append only.
STATES: tuple[MessageState, ...] = ("ready", "delayed", "leased", "waiting", "dead")
READY, DELAYED, LEASED, WAITING, DEAD = range(len(STATES))
STATE_NUMBERS: dict[str, int] = {state: number for number, state in enumerate(STATES)}
#: A state that no message can have.
NO_STATE = 7

_PLACE = re.compile(r"\{([a-z]+)(:[a-z]+)?\}")
_STATE = re.compile(rf"\{{({'|'.join(STATES).upper()})\}}")
_SCHEMA = files(__package__).joinpath("schema.sql").read_text(encoding="utf-8")
#: Columns that release 0.1.0 did not have. They are added to a file without them when it is opened.
ADDED = {
    ("queue", "over_cap"): "INTEGER NOT NULL DEFAULT 0",
    ("queue", "changes"): "BLOB",
    ("journal", "error"): "TEXT",
    ("worker", "request"): "TEXT",
    ("worker", "request_ms"): "INTEGER",
    ("schedule", "state"): "BLOB",
    ("queue", "grouping"): "BLOB",
    ("message", "rank"): "INTEGER",
    ("message", "holds"): "INTEGER NOT NULL DEFAULT 0",
    ("message", "expires_ms"): "INTEGER",
    ("message", "key_mode"): "INTEGER",
    ("message", "freed_key"): "TEXT",
} | {("minute", counter): "INTEGER" for counter in MINUTE_COUNTERS[MINUTE_COUNTERS_FIRST:]}
#: Tables that release 0.1.0 did not have; they are created in the same way.
ADDED_TABLES = ("record", "entry", "group")
#: Indexes of other tables that release 0.1.0 did not have.
ADDED_INDEXES = ("message:group", "message:held", "message:expires")
#: Every table with its columns, read from the file that creates them.
TABLES: dict[str, tuple[str, ...]] = {
    table: tuple(re.findall(r'^    "?([a-z_]+)"? [A-Z]', body, re.MULTILINE))
    for table, body in re.findall(r"CREATE TABLE \{([a-z]+)\} \((.*?)\)(?: WITHOUT ROWID)?;", _SCHEMA, re.DOTALL)
}


def prefix_of(namespace: str) -> str:
    """Return the prefix of a namespace's table names: never the same for two namespaces.

    SQLite ignores the case of names, and reserves names that begin with `sqlite_`. No namespace contains a `^`, so the
    marks made with it cannot be a part of another name.
    """
    spelled = re.sub("[A-Z]", lambda letter: "^" + letter[0].lower(), check_namespace(namespace))
    return ("^^" if f"{spelled}_".startswith("sqlite_") else "") + spelled


class Spelling(dict[str, str]):
    """SQL as written in this package, with its names and numbers inserted once.

    `{message}` is a table, `{message:ready}` an index, `{LEASED}` the number of a state.
    """

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.prefix = prefix_of(namespace)

    def name(self, table: str, index: str = "") -> str:
        """Return the name of a table or index, without quotes."""
        return f"{self.prefix}_{table}{index}"

    def __missing__(self, template: str) -> str:
        text = _PLACE.sub(lambda place: f'"{self.name(place[1], place[2] or "")}"', template)
        text = _STATE.sub(lambda state: str(STATE_NUMBERS[state[1].lower()]), text)
        self[template] = text
        return text


def check_schema(connection: sqlite3.Connection, spelling: Spelling, path: str) -> bool:
    """Return whether the namespace exists and can be used; raises if there is something else. Reads only."""
    names = {spelling.name(table).lower(): table for table in TABLES}
    found = {
        names[name.lower()]: kind
        for kind, name in connection.execute("SELECT type, name FROM main.sqlite_master")
        if name.lower() in names
    }
    if not found:
        return False
    where = f"in {path}, which namespace {spelling.prefix} would use"
    if "meta" not in found:
        names_found = ", ".join(sorted(spelling.name(table) for table in found))
        raise ForeignData(f"not made by waypost: {names_found} {where}; choose another namespace or another file")
    version = _version(connection, spelling, where)
    if version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"{path} has schema {version} and this release knows {SCHEMA_VERSION}; update waypost to open it"
        )
    if version < SCHEMA_VERSION_MIN:
        raise SchemaTooOld(
            f"{path} has schema {version} and this release needs {SCHEMA_VERSION_MIN} or newer; "
            "open it with the release before this one first"
        )
    for table, columns in TABLES.items():
        if table in ADDED_TABLES and table not in found:
            continue
        here = _columns(connection, spelling, table)
        missing = [column for column in columns if column not in here and (table, column) not in ADDED]
        if missing:
            raise ForeignData(
                f"table {spelling.name(table)} in {path} lacks {', '.join(missing)}: "
                "it was changed or cut by something else; restore the file or choose another namespace"
            )
    return True


def _columns(connection: sqlite3.Connection, spelling: Spelling, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f'PRAGMA main.table_info("{spelling.name(table)}")')}


def is_complete(connection: sqlite3.Connection, spelling: Spelling) -> bool:
    """Return whether it has our schema, with all tables and columns that this release adds."""
    return not (
        _missing_columns(connection, spelling)
        or _missing_tables(connection, spelling)
        or _missing_indexes(connection, spelling)
        or _is_old(connection, spelling)
    )


def _is_old(connection: sqlite3.Connection, spelling: Spelling) -> bool:
    version: int = connection.execute(spelling["SELECT value FROM {meta} WHERE name = 'schema'"]).fetchone()[0]
    return version < SCHEMA_VERSION


def _missing_columns(connection: sqlite3.Connection, spelling: Spelling) -> list[tuple[str, str]]:
    here = {table: _columns(connection, spelling, table) for table in {table for table, _ in ADDED}}
    return [(table, column) for table, column in ADDED if column not in here[table]]


def _missing_tables(connection: sqlite3.Connection, spelling: Spelling) -> list[str]:
    return [table for table in ADDED_TABLES if not _columns(connection, spelling, table)]


def _missing_indexes(connection: sqlite3.Connection, spelling: Spelling) -> list[str]:
    here = {name for (name,) in connection.execute("SELECT name FROM main.sqlite_master WHERE type = 'index'")}
    return [index for index in ADDED_INDEXES if spelling.name(index) not in here]


def complete(connection: sqlite3.Connection, spelling: Spelling) -> None:
    """Upgrade the schema of an older release to ours, in the transaction in progress."""
    is_old = _is_old(connection, spelling)
    if is_old:
        # From here on the previous release refuses the file: it cannot read packed events.
        connection.execute(spelling["UPDATE {meta} SET value = ? WHERE name = 'schema'"], (SCHEMA_VERSION,))
    for table, column in _missing_columns(connection, spelling):
        kind = ADDED[table, column]
        connection.execute(f'ALTER TABLE main."{spelling.name(table)}" ADD COLUMN {column} {kind}')
    for index in _missing_indexes(connection, spelling):
        for statement in _statements():
            if f"INDEX {{{index}}}" in statement:
                connection.execute(spelling[statement])
    for table in _missing_tables(connection, spelling):
        for statement in _statements():
            if f"{{{table}}}" in statement:
                connection.execute(spelling[statement])
    if is_old:
        _confirm_version(connection, spelling)


def _confirm_version(connection: sqlite3.Connection, spelling: Spelling) -> None:
    """Record that every process that can use the file can read the data of this release."""
    connection.execute(
        spelling["INSERT OR REPLACE INTO {record} (kind, name, data, version, created_ms) VALUES (?, ?, ?, 1, 0)"],
        (*FINISHED, b"%d" % DATA_VERSION),
    )


def _statements() -> list[str]:
    """Return the statements of the schema, one by one."""
    return [one for one in re.sub(r"--[^\n]*", "", _SCHEMA).split(";") if one.strip()]


def _version(connection: sqlite3.Connection, spelling: Spelling, where: str) -> int:
    try:
        facts = dict(connection.execute(spelling["SELECT name, value FROM {meta}"]).fetchall())
    except (sqlite3.OperationalError, ValueError):
        facts = {}
    if facts.get("made by") != MARK or not isinstance(facts.get("schema"), int):
        raise ForeignData(
            f"not made by waypost: {spelling.name('meta')} {where}; choose another namespace or another file"
        )
    return int(facts["schema"])


def create(connection: sqlite3.Connection, spelling: Spelling) -> None:
    """Create the tables, in the transaction in progress."""
    for statement in _statements():
        connection.execute(spelling[statement])
    connection.executemany(
        spelling["INSERT INTO {meta} (name, value) VALUES (?, ?)"], [("made by", MARK), ("schema", SCHEMA_VERSION)]
    )
    _confirm_version(connection, spelling)
    connection.execute(spelling["INSERT INTO {reserve} (number, room) VALUES (1, zeroblob(?))"], (RESERVE_BYTES,))
