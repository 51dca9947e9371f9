"""The order in which the threads of this process write to a file: the order in which they asked.

SQLite has one writer. A connection that finds another one writing sleeps and tries again, so the connection that tries
at the right moment is next: beside a worker that claims and settles all the time, a publish could wait for hundreds of
milliseconds. Between processes this is still so, with short sleeps.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque


class TurnLock:
    """A lock that is passed to the thread that has waited longest.

    It decides which thread tries first, not which may write: SQLite decides that. So a thread takes it after a time
    limit.
    """

    def __init__(self) -> None:
        self._begin()
        _locks.add(self)

    def _begin(self) -> None:
        self._mutex = threading.Lock()
        self._owner: threading.Lock | None = None
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self, timeout: float) -> threading.Lock:
        """Wait for the turn, or until the time limit; return the argument of `release`."""
        turn = threading.Lock()
        try:
            with self._mutex:
                if self._owner is None:
                    self._owner = turn
                    return turn
                turn.acquire()
                self._waiting.append(turn)
            came = turn.acquire(timeout=timeout)
            if not came and self._stop_waiting(turn):
                with self._mutex:
                    self._owner = turn
            return turn
        except BaseException:
            self._stop_waiting(turn)
            self.release(turn)
            raise

    def _stop_waiting(self, turn: threading.Lock) -> bool:
        """Stop waiting; False if the turn has come meanwhile."""
        with self._mutex:
            if turn not in self._waiting:
                return False
            self._waiting.remove(turn)
            return True

    def release(self, turn: threading.Lock) -> None:
        """Pass the turn on, unless another thread took it."""
        with self._mutex:
            if self._owner is turn:
                self._owner = self._waiting.popleft() if self._waiting else None
                if self._owner is not None:
                    self._owner.release()


_locks: weakref.WeakSet[TurnLock] = weakref.WeakSet()
_by_file: weakref.WeakValueDictionary[str, TurnLock] = weakref.WeakValueDictionary()


def turn_lock(path: str) -> TurnLock:
    """Return the lock of a file, the same one for all its writers in this process."""
    # Two threads that open the file at the same moment may get two locks: then only SQLite orders them.
    return _by_file.setdefault(os.path.realpath(path), TurnLock())


def _after_fork() -> None:
    # The threads that held or awaited them do not exist in this process.
    for lock in list(_locks):
        lock._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
