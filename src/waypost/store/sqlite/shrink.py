"""Returns free pages of a file to the file system, in small steps and in a thread, while there is nothing to claim.

SQLite keeps the pages of deleted rows in the file for later rows. A file that waypost created can return them page by
page (`auto_vacuum = INCREMENTAL`); a file that had other tables first only by a VACUUM of its owner.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from waypost.errors import StoreError

log = logging.getLogger("waypost")

#: A file with more free pages than this number, and than this part of its pages, is shrunk.
FREE_PAGES_MAX = 1_024
FREE_PART_MAX = 1 / 8
#: This many free pages are kept for the next messages.
FREE_PAGES_KEPT = 256
#: The pages of one step: other calls wait for its end, some milliseconds.
STEP_PAGES = 128
#: The pause between two steps.
PAUSE_SECONDS = 0.05
#: How often it is checked whether the file can shrink.
CHECK_SECONDS = 1.0
#: How long a close waits for the end of a step.
STOP_SECONDS = 10.0
_INCREMENTAL = 2


class Shrinker:
    """Shrinks the file of one executor, whose connection is lent by `use`."""

    def __init__(self, path: str, use: Callable[[], AbstractContextManager[sqlite3.Connection]]) -> None:
        self._path = path
        self._use = use
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._check_at = 0.0

    def consider(self, connection: sqlite3.Connection) -> None:
        """Start to shrink the file if it has many free pages. Called when there was nothing to do."""
        now = time.monotonic()
        if now < self._check_at or self._stopped.is_set():
            return
        self._check_at = now + CHECK_SECONDS
        if self._thread is not None and self._thread.is_alive():
            return
        try:
            if not is_wasteful(connection) or not shrinks_by_steps(connection):
                return
        except sqlite3.Error:
            return  # the call itself has succeeded
        thread = threading.Thread(target=self._shrink, name="waypost-sqlite-shrink", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.debug("%s does not shrink now (%s)", self._path, error)
            return
        self._thread = thread

    def stop(self) -> None:
        """Stop for good, and wait for the step in progress."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def _shrink(self) -> None:
        try:
            while not self._stopped.wait(PAUSE_SECONDS):
                with self._use() as connection:
                    if free_pages(connection) <= FREE_PAGES_KEPT:
                        # The file is truncated when the log has been moved into it.
                        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                        return
                    # `execute` would end a statement without columns after its first page.
                    connection.executescript(f"PRAGMA incremental_vacuum({STEP_PAGES})")
        except (sqlite3.Error, StoreError) as error:
            # Others write, or the file is full or missing: it is tried again later.
            log.debug("%s does not shrink now (%s)", self._path, error)


def free_pages(connection: sqlite3.Connection) -> int:
    """Return the number of pages that no row uses."""
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0])


def is_wasteful(connection: sqlite3.Connection) -> bool:
    """Return whether a file has so many free pages that it should shrink."""
    free = free_pages(connection)
    return free > FREE_PAGES_MAX and free > FREE_PART_MAX * connection.execute("PRAGMA page_count").fetchone()[0]


def shrinks_by_steps(connection: sqlite3.Connection) -> bool:
    """Return whether a file can return pages one by one."""
    return bool(connection.execute("PRAGMA auto_vacuum").fetchone()[0] == _INCREMENTAL)
