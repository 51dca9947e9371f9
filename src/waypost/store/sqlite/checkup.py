"""What `waypost doctor` checks on SQLite: the library, the file, its log, and bytes in use."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from waypost.formatting import format_bytes, format_count
from waypost.store.checkup import Checkup, Findings, note, ok, wrong
from waypost.store.sqlite.connection import LOG_BYTES_KEPT, map_error
from waypost.store.sqlite.schema import Spelling
from waypost.store.sqlite.shrink import free_pages, is_wasteful, shrinks_by_steps
from waypost.views import Stats

if TYPE_CHECKING:
    from waypost.store.sqlite.store import SqliteStore

#: A larger file is not read completely to find damage.
QUICK_CHECK_BYTES_MAX = 256 * 1024 * 1024
#: If the log is this many times longer than its limit, a reader keeps it from being reused.
LOG_TIMES_MAX = 4


class SqliteCheckup(Checkup):
    """Checks of a SQLite store."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    def check_server(self, found: Sequence[Stats]) -> Findings:
        """Check the library and the file, on a connection that only reads."""
        # SQLite follows links: the log lies beside the file itself.
        path = os.path.realpath(self._store.path)
        yield ok("server", f"SQLite {sqlite3.sqlite_version}, {path}", version=sqlite3.sqlite_version)
        try:
            with closing(sqlite3.connect(path, timeout=1.0)) as connection:
                connection.execute("PRAGMA query_only = ON")
                yield from check_file(connection, path)
                yield from check_bytes(connection, self._store.spelling, found)
        except sqlite3.Error as error:
            raise map_error(error, path, "doctor") from error


def check_file(connection: sqlite3.Connection, path: str) -> Findings:
    """Check whether committed data is durable, and the file intact."""
    mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    if mode == "wal":
        yield ok("durability", "each commit is on the disk (write-ahead log, synchronous full)", journal_mode=mode)
    else:
        yield wrong("durability", f"the journal mode is {mode}", "let waypost open the file on a local disk")
    rights = [place for place in (path, os.path.dirname(path)) if not os.access(place, os.W_OK)]
    if rights:
        yield wrong("permissions", f"this user may not write to {' and '.join(rights)}", "the log lies beside the "
                    "file: give the user both")  # fmt: skip
    else:
        yield ok("permissions", "this user may write the file and its directory")
    log = os.path.getsize(path + "-wal") if os.path.exists(path + "-wal") else 0
    if log > LOG_TIMES_MAX * LOG_BYTES_KEPT:
        yield note("log", f"the write-ahead log has {format_bytes(log)}", "find the program that holds a read "
                   "transaction open", bytes=log)  # fmt: skip
    size = os.path.getsize(path)
    if is_wasteful(connection) and not shrinks_by_steps(connection):
        free = free_pages(connection) * connection.execute("PRAGMA page_size").fetchone()[0]
        yield note("free", f"{format_bytes(free)} of the file are free, and it does not shrink by itself: waypost did "
                   "not create it", "PRAGMA auto_vacuum = INCREMENTAL and then VACUUM, while no worker runs",
                   bytes=free)  # fmt: skip
    if size > QUICK_CHECK_BYTES_MAX:
        yield note("file", f"{format_bytes(size)}, too large to check for damage here", "PRAGMA integrity_check does, "
                   "while no worker runs", bytes=size)  # fmt: skip
        return
    damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage == "ok":
        yield ok("file", f"{format_bytes(size)}, no damage", bytes=size)
    else:
        yield wrong("file", f"the file is damaged: {damage}", "restore it from a backup")


#: What is measured: the tables that contain it, and the number of rows in each.
_MEASURED = {
    "message": {"message": "SELECT count(*) FROM {message}"},
    "event": {
        "entry": "SELECT coalesce(sum(last - first + 1), 0) FROM {entry}",
        "journal": "SELECT count(*) FROM {journal}",
    },
    "dedup key": {"window": "SELECT count(*) FROM {window}"},
    "result": {"result": "SELECT count(*) FROM {result}"},
}


def check_bytes(connection: sqlite3.Connection, spelling: Spelling, found: Sequence[Stats]) -> Findings:
    """Measure the bytes of messages, events, keys of a window and results: each table with its indexes, if possible."""
    sizes = table_bytes(connection)
    for what, tables in _MEASURED.items():
        number = sum(connection.execute(spelling[count]).fetchone()[0] for count in tables.values())
        if not number:
            yield ok("bytes", f"no {what}s to measure")
            continue
        names = [spelling.name(table) for table in tables]
        size = sum(sizes.get(name, 0) for name in names)
        if not size:
            yield note("bytes", f"{format_count(number, what)}; this SQLite does not know what they take", what=what)
            continue
        yield ok("bytes", f"{round(size / number):,} bytes for each {what} of {number:,}, with indexes",
                 what=what, bytes_each=round(size / number), measured=number, table_bytes=size)  # fmt: skip


def table_bytes(connection: sqlite3.Connection) -> dict[str, int]:
    """Return the bytes of each table with its indexes; empty if the library was built without `dbstat`."""
    try:
        return dict(
            connection.execute(
                "SELECT m.tbl_name, sum(s.pgsize) FROM dbstat s JOIN sqlite_master m ON m.name = s.name GROUP BY 1"
            )
        )
    except sqlite3.Error:
        return {}
