"""Running steps: one transaction each, from any thread and any process.

An executor has two connections, one that writes and one that reads, each behind a lock: a reader never waits for
the writer. Connections do not survive a fork: SQLite keeps its file locks per process, and a child that inherits
an open file would assume locks that it does not have. So they are closed just before a fork, and each process
opens its own after it. The executors of one file in a process write in turn: see `turn_lock.py`.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar, cast

from waypost.errors import WaypostError
from waypost.store.port import Call, ConnectionClosed
from waypost.store.sqlite.chains import deliver_notices
from waypost.store.sqlite.connection import is_full, map_error, open_file, retry_while_busy
from waypost.store.sqlite.schema import Spelling
from waypost.store.sqlite.shrink import Shrinker
from waypost.store.sqlite.step import SqliteCall, Step
from waypost.store.sqlite.turn_lock import turn_lock
from waypost.values import Claimed, Polled

T = TypeVar("T")

#: How long a step may wait for the file while others write.
BUSY_BUDGET_SECONDS = 5.0
#: Steps that share one commit in `run_many`: one sync for all of them, but not so many that other writers wait long.
GROUP_MAX = 8
#: How long a fork waits for the end of the current step.
FORK_WAIT_SECONDS = 5.0

_RESERVE_GIVE = "DELETE FROM {reserve}"


class ConnectionHolder:
    """One connection, opened when it is needed, and the lock that keeps threads apart."""

    def __init__(self, opener: Callable[[float], sqlite3.Connection]) -> None:
        self._opener = opener
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._pid = os.getpid()
        _holders.add(self)

    @contextmanager
    def use(self, budget_seconds: float = BUSY_BUDGET_SECONDS) -> Iterator[sqlite3.Connection]:
        """Yield the connection, for this thread alone."""
        if self._pid != os.getpid():
            self._after_unseen_fork()
        with self._lock:
            if self._connection is None:
                self._connection = self._opener(budget_seconds)
            yield self._connection

    def _after_unseen_fork(self) -> None:
        # A fork that Python did not notice could not close the connection. It must not be closed here either: that
        # would change the parent's files. So it is kept, unused, until the process ends.
        _inherited.append(self._connection)
        self._connection, self._lock, self._pid = None, threading.Lock(), os.getpid()

    def close(self) -> None:
        """Close the connection; the next use opens another one."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None and self._pid == os.getpid():
            self._connection.close()
        self._connection = None

    def before_fork(self) -> bool:
        """Wait for the step in progress and close; return whether this worked."""
        if not self._lock.acquire(timeout=FORK_WAIT_SECONDS):
            return False
        try:
            self._drop()
        except BaseException:
            self._lock.release()
            raise
        return True

    def after_fork(self, *, in_child: bool) -> None:
        """Continue after a fork: the connection is opened again when it is needed."""
        if in_child:
            self._pid = os.getpid()
        self._lock.release()


_holders: weakref.WeakSet[ConnectionHolder] = weakref.WeakSet()
_inherited: list[sqlite3.Connection | None] = []


class _ClosedForFork(threading.local):
    """Those that the fork of this thread has closed. Another thread may fork at the same time."""

    def __init__(self) -> None:
        self.holders: list[ConnectionHolder] = []


_closed_for_fork = _ClosedForFork()


def _before_fork() -> None:
    for holder in list(_holders):
        if holder.before_fork():
            _closed_for_fork.holders.append(holder)


def _after_fork(in_child: bool) -> None:
    closed, _closed_for_fork.holders = _closed_for_fork.holders, []
    for holder in closed:
        holder.after_fork(in_child=in_child)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=lambda: _after_fork(False),
        after_in_child=lambda: _after_fork(True),
    )


class SqliteExecutor:
    """Runs calls on one file. Safe to use from several threads, and after a fork in both processes."""

    def __init__(
        self,
        path: str,
        spelling: Spelling,
        clock: Callable[[], int],
        *,
        replay_ttl_ms: int,
        busy_budget_seconds: float = BUSY_BUDGET_SECONDS,
        on_busy: Callable[[], None] | None = None,
    ) -> None:
        self._path = path
        self._spelling = spelling
        self._clock = clock
        self._replay_ttl_ms = replay_ttl_ms
        self._budget = busy_budget_seconds
        self._on_busy = on_busy
        self._writer = ConnectionHolder(lambda budget: open_file(path, spelling, budget))
        self._reader = ConnectionHolder(lambda budget: open_file(path, spelling, budget, reads_only=True))
        self._shrinker = Shrinker(path, lambda: self._using(self._writer))
        self._turn_lock = turn_lock(path)
        self._closed = False

    def start(self, timeout_seconds: float) -> None:
        """Open the file now, so that errors are raised at once."""
        with self._writer.use(timeout_seconds):
            pass

    def run(self, call: Call[T]) -> T:
        """Run one call as one transaction."""
        mine = cast("SqliteCall[T]", call)
        if not mine.writes:
            with self._using(self._reader) as connection:
                return self._retry_while_busy(mine, lambda: self._read(connection, mine))
        with self._using(self._writer) as connection:
            result = self._write_out(connection, mine)
            if isinstance(result, Polled) or (isinstance(result, Claimed) and not result.leases):
                self._shrinker.consider(connection)
            return result

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        """Run calls in order; each gives its result or its error. Consecutive writes share a commit."""
        results: list[T | Exception] = []
        waiting: list[SqliteCall[T]] = []
        for call in calls:
            mine = cast("SqliteCall[T]", call)
            if mine.writes:
                waiting.append(mine)
            if waiting and (not mine.writes or len(waiting) == GROUP_MAX):
                group = self._run_group(waiting)
                results += group
                waiting = []
            if not mine.writes:
                alone = self._alone(mine)
                results.append(alone)
        group = self._run_group(waiting)
        return results + group

    def close(self) -> None:
        """Close the connections. Calls after this raise."""
        self._closed = True
        self._shrinker.stop()
        self._writer.close()
        self._reader.close()

    @contextmanager
    def _using(self, holder: ConnectionHolder) -> Iterator[sqlite3.Connection]:
        if self._closed:
            raise ConnectionClosed(f"the connection to {self._path} was closed; connect again")
        with holder.use() as connection:
            yield connection

    def _alone(self, call: SqliteCall[T]) -> T | Exception:
        try:
            return self.run(call)
        except Exception as error:
            return error

    def _run_group(self, calls: Sequence[SqliteCall[T]]) -> list[T | Exception]:
        """Run writes that share one commit, each with its own savepoint."""
        if len(calls) > 1:
            try:
                with self._using(self._writer) as connection:
                    return self._write_together(connection, calls)
            except (sqlite3.Error, WaypostError):
                # Nothing of the group was written: run alone, each call raises its own error.
                pass
        results: list[T | Exception] = []
        for call in calls:
            alone = self._alone(call)
            results.append(alone)
        return results

    def _write_together(self, connection: sqlite3.Connection, calls: Sequence[SqliteCall[T]]) -> list[T | Exception]:
        if all(call.shares_step for call in calls):
            try:
                return self._in_turn(lambda: self._write_as_one_step(connection, calls))
            except WaypostError:
                pass  # one of them is refused: run them separately, so that the others are not
        return self._in_turn(lambda: self._write_group(connection, calls))

    def _write_as_one_step(self, connection: sqlite3.Connection, calls: Sequence[SqliteCall[T]]) -> list[T | Exception]:
        """Run calls whose changes are collected and written together: all of them, or none if one is refused."""
        with transaction(connection, "BEGIN IMMEDIATE"):
            step = self._new_step(connection, fills=any(call.fills for call in calls))
            results: list[T | Exception] = [call.step(step) for call in calls]
            self._end_step(step)
        return results

    def _write_group(self, connection: sqlite3.Connection, calls: Sequence[SqliteCall[T]]) -> list[T | Exception]:
        results: list[T | Exception] = []
        with transaction(connection, "BEGIN IMMEDIATE"):
            for call in calls:
                connection.execute("SAVEPOINT call")
                try:
                    results.append(self._step(connection, call))
                except sqlite3.Error:
                    raise
                except Exception as error:
                    connection.execute("ROLLBACK TO call")
                    results.append(error)
                connection.execute("RELEASE call")
        return results

    def _retry_while_busy(self, call: SqliteCall[T], work: Callable[[], T]) -> T:
        try:
            return retry_while_busy(work, self._budget, self._on_busy)
        except sqlite3.Error as error:
            raise map_error(error, self._path, call.name) from error

    def _read(self, connection: sqlite3.Connection, call: SqliteCall[T]) -> T:
        with transaction(connection, "BEGIN"):
            return self._step(connection, call)

    def _write_out(self, connection: sqlite3.Connection, call: SqliteCall[T]) -> T:
        try:
            return self._in_turn(lambda: self._write(connection, call))
        except sqlite3.Error as error:
            if not is_full(error) or call.fills:
                raise map_error(error, self._path, call.name) from error
        # The file is full, and this call adds no messages: free the reserve first, then delete old history.
        try:
            return self._in_turn(lambda: self._write(connection, call, give_reserve=True))
        except sqlite3.Error as error:
            if not is_full(error):
                raise map_error(error, self._path, call.name) from error
        try:
            return self._in_turn(lambda: self._write(connection, call, give_reserve=True, give_way=True))
        except sqlite3.Error as error:
            raise map_error(error, self._path, call.name) from error

    def _in_turn(self, work: Callable[[], T]) -> T:
        """Write after the threads of this process that asked before."""
        deadline = time.monotonic() + self._budget
        turn = self._turn_lock.acquire(self._budget)
        try:
            return retry_while_busy(work, max(0.0, deadline - time.monotonic()), self._on_busy)
        finally:
            self._turn_lock.release(turn)

    def _write(
        self, connection: sqlite3.Connection, call: SqliteCall[T], *, give_reserve: bool = False, give_way: bool = False
    ) -> T:
        with transaction(connection, "BEGIN IMMEDIATE"):
            if give_reserve:
                connection.execute(self._spelling[_RESERVE_GIVE])
            return self._step(connection, call, give_way=give_way)

    def _step(self, connection: sqlite3.Connection, call: SqliteCall[T], *, give_way: bool = False) -> T:
        step = self._new_step(connection, fills=call.fills, give_way=give_way)
        result = call.step(step)
        self._end_step(step)
        return result

    def _new_step(self, connection: sqlite3.Connection, *, fills: bool, give_way: bool = False) -> Step:
        return Step(
            connection, self._spelling, self._clock(),
            replay_ttl_ms=self._replay_ttl_ms, give_way=give_way, fills=fills,
        )  # fmt: skip

    @staticmethod
    def _end_step(step: Step) -> None:
        if step.notices:
            # Calls that return no names wake no waiter: waiters poll again later.
            deliver_notices(step)
        step.finish()


@contextmanager
def transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    """Commit all statements inside together, or roll them back."""
    try:
        connection.execute(begin)
        yield
        connection.execute("COMMIT")
    except BaseException:
        # Some errors (a full disk, a file locked by others) end the transaction themselves.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class AsyncSqliteExecutor:
    """The same for an event loop: a separate thread does the waiting."""

    def __init__(self, executor: SqliteExecutor) -> None:
        self._sync = executor
        self._thread = _thread()
        self._pid = os.getpid()
        self._closed = False

    async def start(self, timeout_seconds: float) -> None:
        """Open the file now."""
        await self._in_thread(lambda: self._sync.start(timeout_seconds))

    async def run(self, call: Call[T]) -> T:
        """Run one call as one transaction."""
        return await self._in_thread(lambda: self._sync.run(call))

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        """Run calls in order; each gives its result or its error."""
        chosen = list(calls)
        return await self._in_thread(lambda: self._sync.run_many(chosen))

    async def close(self) -> None:
        """Close the connections and end the thread."""
        if not self._closed:
            await self._in_thread(self._sync.close)
            self._closed = True
            self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise ConnectionClosed("the connection was closed; connect again")
        if self._pid != os.getpid():
            # Threads do not survive a fork.
            self._thread, self._pid = _thread(), os.getpid()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="waypost-sqlite")
