"""Reads the store for a collection of metrics: where messages are, how old the oldest is, which workers there are.

An unavailable store must not delay the metrics of the process: a thread reads it, and a collection waits for the thread
for a limited time. Collections at the same time, or shortly after each other, share one reading.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence

from msgspec import Struct

from waypost.errors import UnusableClient, WaypostError
from waypost.policy import START_TIMEOUT_SECONDS
from waypost.store.port import Executor, Store
from waypost.values import StatsRecord, WorkerRecord

log = logging.getLogger("waypost")

#: How long a collection waits for the store. Collectors give up after ten seconds.
WAIT_SECONDS = 3.0
#: A reading is reused for this long.
FRESH_SECONDS = 1.0
#: How many queues of a store are read.
QUEUES_READ_MAX = 100


class Reading(Struct, frozen=True):
    """The figures of a store at one time."""

    queues: list[StatsRecord]
    #: How late the oldest timer is that is due and not ready yet, in milliseconds by queue.
    late_ms: dict[str, int]
    workers: list[WorkerRecord]
    #: Queues that were not read because there are too many.
    unread: int = 0


class _Pending:
    """A reading under way."""

    __slots__ = ("at", "done", "reading")

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.done = threading.Event()
        self.reading: Reading | None = None


class StoreReader:
    """Reads one store over its own connection, opened by the first reading."""

    def __init__(
        self,
        store: Store,
        queues: Iterable[str] | None = None,
        *,
        wait_seconds: float = WAIT_SECONDS,
        fresh: float = FRESH_SECONDS,
        start_timeout: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self._store = store
        #: None: all queues.
        self._queues = None if queues is None else sorted(set(queues))
        self._wait_seconds = wait_seconds
        self._fresh = fresh
        self._start_timeout = start_timeout
        self._executor: Executor | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pending: _Pending | None = None
        self._reported = False

    def read(self) -> Reading | None:
        """Return the figures of the store, or None if it does not reply in time."""
        with self._lock:
            pending = self._pending
            is_old = pending is None or (pending.done.is_set() and time.monotonic() - pending.at > self._fresh)
            if pending is None or is_old:
                pending = self._pending = _Pending()
                threading.Thread(target=self._run, args=(pending,), name="waypost-reading", daemon=True).start()
        pending.done.wait(self._wait_seconds)
        return pending.reading

    def close(self) -> None:
        """Close the connection, unless a reading is using it."""
        with self._lock:
            pending, executor = self._pending, self._executor
            if executor is not None and (pending is None or pending.done.is_set()):
                self._executor = None
                self._close(executor)

    def _close(self, executor: Executor) -> None:
        # In a forked child the connection belongs to the parent.
        if self._pid == os.getpid():
            executor.close()

    def _run(self, pending: _Pending) -> None:
        try:
            pending.reading = self._read()
            self._reported = False
        except Exception as error:
            self._log_failure(error)
            executor, self._executor = self._executor, None
            if executor is not None:
                self._close(executor)
        finally:
            pending.done.set()

    def _log_failure(self, error: Exception) -> None:
        log.log(
            logging.DEBUG if self._reported else logging.WARNING,
            "metrics: the store could not be read (%s)%s",
            error,
            "; give the client a URL to export its figures" if isinstance(error, UnusableClient) else "",
            extra={"event": "metrics_not_read"},
            exc_info=None if isinstance(error, WaypostError) else error,
        )
        self._reported = True

    def _connected(self) -> Executor:
        if self._pid != os.getpid():
            self._executor, self._pid = None, os.getpid()
        if self._executor is None:
            self._executor = self._store.connect(start_timeout=self._start_timeout)
        return self._executor

    def _read(self) -> Reading:
        store, executor = self._store, self._connected()
        names = self._queues
        if names is None:
            names = executor.run(store.queues())
            names.sort()
        chosen = names[:QUEUES_READ_MAX]
        found = [_raise_error(answer) for answer in executor.run_many([store.stats(queue) for queue in chosen])]
        # A timer that is due and not ready means that no worker claims and no promoter runs.
        due = [stats for stats in found if stats.next_due_ms == 0]
        late = {stats.queue: self._late_ms(executor, stats) for stats in due}
        return Reading(found, late, executor.run(store.workers()), len(names) - len(chosen))

    def _late_ms(self, executor: Executor, stats: StatsRecord) -> int:
        page = executor.run(self._store.peek(stats.queue, "delayed", 1))
        # It may have become ready between the two reads; then the first timer, if there is one, is not due yet.
        return max([0, *(stats.at_ms - stored.ready_ms for stored in page.messages)])


def _raise_error(answer: StatsRecord | Exception) -> StatsRecord:
    if isinstance(answer, Exception):
        raise answer
    return answer


def journal_lag(stats: StatsRecord) -> int:
    """Return how many events of the journal its slowest reader has not read."""
    readers: Sequence[int] = list(stats.journal_readers.values())
    return max(0, stats.journal_last - min(readers)) if readers else 0
