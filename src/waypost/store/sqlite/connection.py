"""Open the file, and map SQLite's errors to those of waypost."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable
from typing import TypeVar

from waypost.errors import ConfigurationError, ForeignData, StoreError, StoreFailed, StoreFull, StoreUnavailable
from waypost.store.sqlite.schema import Spelling, check_schema, complete, create, is_complete

T = TypeVar("T")

SQLITE_VERSION_MIN = (3, 35, 0)
#: SQLite's own busy timeout, for short waits inside a statement. We implement longer waits, with jitter.
BUSY_TIMEOUT_MS = 2
BUSY_PAUSE_FIRST_SECONDS = 0.0005
BUSY_PAUSE_MAX_SECONDS = 0.01
#: Pages in the log before they are moved into the file: with fewer, it would sync twice as often; with more, reads slow
#: down.
CHECKPOINT_PAGES = 4_000
CACHE_KIB = 16_384
#: A log that has grown is cut back to this.
LOG_BYTES_KEPT = 64 * 1024 * 1024


def check_library(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> None:
    """Refuse a SQLite library without the features that the statements use."""
    if version < SQLITE_VERSION_MIN:
        found, wanted = (".".join(map(str, v)) for v in (version, SQLITE_VERSION_MIN))
        raise ConfigurationError(
            f"SQLite {found} is too old, waypost needs {wanted} or newer; update the sqlite3 library that Python uses"
        )


def error_code(error: sqlite3.Error) -> int:
    """Return the primary code of an error, 0 if it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether another connection has locked the file, so that a further attempt makes sense."""
    return error_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_full(error: sqlite3.Error) -> bool:
    """Return whether the disk, or the limit set for the file, is full."""
    return error_code(error) == sqlite3.SQLITE_FULL


def map_error(error: sqlite3.Error, path: str, verb: str) -> StoreError:
    """Map an error of SQLite to one of ours. Unless its text says otherwise, the step was rolled back."""
    code = error_code(error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreUnavailable(
            f"{verb}: {path} is held by another writer for too long, nothing was done; "
            "find the transaction that was left open (if it is your own, pass it as transaction=), and try again"
        )
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(
            f"{verb}: no room left for {path}, nothing was written; free disk space, settle messages or trim journals"
        )
    if code == sqlite3.SQLITE_NOTADB:
        return ForeignData(f"{path} is not a SQLite database; nothing was touched, choose another path")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return StoreUnavailable(
            f"{verb}: {path} cannot be opened for writing ({error}); "
            "its directory must exist and be writable too, for the log beside the file"
        )
    if code == sqlite3.SQLITE_CORRUPT:
        return StoreFailed(
            f"{verb}: {path} is damaged ({error}); check it with PRAGMA integrity_check, restore it from a backup"
        )
    return StoreFailed(f"{verb}: SQLite answered {error} ({getattr(error, 'sqlite_errorname', type(error).__name__)})")


def same_file(path: str, main: str) -> bool:
    """Return whether both are the same file."""
    try:
        return os.path.samefile(path, main)
    except OSError:
        return False


def retry_while_busy(work: Callable[[], T], budget_seconds: float, on_busy: Callable[[], None] | None = None) -> T:
    """Try again, with pauses that grow and vary, while others have locked the file. `on_busy` may raise instead."""
    deadline = time.monotonic() + budget_seconds
    pause = BUSY_PAUSE_FIRST_SECONDS
    while True:
        try:
            return work()
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() >= deadline:
                raise
            if on_busy is not None:
                on_busy()
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(BUSY_PAUSE_MAX_SECONDS, pause * 2)


def open_file(path: str, spelling: Spelling, budget_seconds: float, *, reads_only: bool = False) -> sqlite3.Connection:
    """Open a connection of our own to a file with our tables, which are created if they are missing."""
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        raise StoreUnavailable(f"{path} cannot be opened: there is no directory {directory}; create it first")
    if os.path.isdir(path):
        raise StoreUnavailable(f"{path} is a directory; name a file in it")
    try:
        # The executor's own lock keeps threads apart; any of them may use the connection.
        connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False, cached_statements=256
        )
    except sqlite3.Error as error:
        raise map_error(error, path, "connect") from error
    try:
        retry_while_busy(lambda: _prepare(connection, path, spelling), budget_seconds)
        if reads_only:
            connection.execute("PRAGMA query_only = ON")
    except sqlite3.Error as error:
        connection.close()
        raise map_error(error, path, "connect") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: str, spelling: Spelling) -> None:
    # Check first: a file that is not ours must not be changed.
    ready = check_schema(connection, spelling, path) and is_complete(connection, spelling)
    if connection.execute("PRAGMA page_count").fetchone()[0] == 0:
        # Only possible in a new file: pages of deleted messages can then be returned to the file system.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise StoreUnavailable(
            f"{path} cannot use a write-ahead log (its journal mode stays {mode}); put it on a local disk"
        )
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES_KEPT}")
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    if ready:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have created the tables while this one waited.
        if check_schema(connection, spelling, path):
            complete(connection, spelling)
        else:
            create(connection, spelling)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
