"""Wake-ups beside a SQLite file: Unix datagram sockets in a directory next to it, one for each process that listens.

The file itself is watched too: every 20 ms SQLite is queried, without a lock, whether another connection has written. A
commit of the user's own transaction sends no notification, because no client sees it. If such a transaction has made
messages claimable, it has counted that; then the registered sleepers are read, and those that are no longer registered
have been woken. Where sockets cannot be created (the path is too long, the file system does not support them), that is
done after every write.

The directory is used only if no other user could have placed a file in it: a real directory, not a link, that belongs
to this user, root or the owner of the file, and is writable only by users who may write the file. The names of sockets
are random, because processes in containers that share a volume may have the same pid. Only sockets of this user with
such a name that no process uses any more are removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import sqlite3
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import msgspec

from waypost.store.sqlite.executor import ConnectionHolder
from waypost.store.sqlite.schema import TRANSACTION_WAKES, Spelling
from waypost.wake.hub import ThreadHub
from waypost.wake.port import POLL_NOW, Topic
from waypost.wake.transport import ChannelUnusable, InterruptibleTransport, Transport

log = logging.getLogger("waypost")

#: The longest path of a socket.
SOCKET_PATH_BYTES_MAX = 100
DATAGRAM_BYTES_MAX = 60_000
WATCH_SECONDS = 0.02
#: After a write to a file that is watched without sockets, schedulers read at most so often.
SCHEDULES_SECONDS = 5.0
#: How long a query waits for the file; the next one is soon.
WATCH_BUSY_SECONDS = 0.02
#: The times of a file are exact to some milliseconds.
LOG_UNCHANGED_SECONDS = 0.1
#: Attempts to create a socket: the last process that ends may remove the directory at the same time.
BIND_TRIES_MAX = 5

#: A random name; or a pid and a number, as the release before used.
_NAME = re.compile(r"[0-9a-f]{16}|[0-9]+\.[0-9]+")
_decode = msgspec.json.Decoder(tuple[str, str, str, list[str]]).decode


def directory_of(path: str) -> str:
    """Return the directory of the sockets of a file."""
    return f"{path}-wake"


def _mode_of(path: str) -> tuple[int, int | None]:
    """Return the permissions of a file and its owner; for a file that does not exist: only this user's."""
    try:
        found = os.stat(path)
    except OSError:
        return 0o600, None
    return stat.S_IMODE(found.st_mode), found.st_uid


def make_directory(path: str) -> None:
    """Create the directory beside a file, open to the group only if the group may write the file."""
    mode, _ = _mode_of(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory_of(path), 0o770 if mode & stat.S_IWGRP else 0o700)


@contextlib.contextmanager
def open_directory(path: str) -> Iterator[int]:
    """Open the directory beside a file; `OSError` if it does not exist or another user could have created it."""
    directory = directory_of(path)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        mode, owner = _mode_of(path)
        if found.st_uid not in (os.geteuid(), 0, owner):
            raise PermissionError(f"{directory} belongs to another user")
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not mode & stat.S_IWGRP):
            raise PermissionError(f"{directory} can be written by users who cannot write the file")
        yield descriptor
    finally:
        os.close(descriptor)


def _is_socket(name: str, directory: int, *, ours: bool = False) -> bool:
    """Return whether a name in a directory is a socket and not a link; `ours`: one that this user may remove."""
    try:
        found = os.lstat(name, dir_fd=directory)
    except OSError:
        return False
    if not stat.S_ISSOCK(found.st_mode):
        return False
    return not ours or (found.st_uid == os.geteuid() and _NAME.fullmatch(name) is not None)


def _remove(name: str, directory: int) -> None:
    if _is_socket(name, directory, ours=True):
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


class FileHub(ThreadHub):
    """The channel of one SQLite file. Sending needs no thread: a datagram is written or it is not."""

    def __init__(self, path: str) -> None:
        self._path = path
        super().__init__("local", lambda: self._transport_of(path), f"sockets beside {path}")
        self._sender: socket.socket | None = None

    def _transport_of(self, path: str) -> Transport:
        try:
            return SocketTransport(path, FileWatch(path, self._names))
        except OSError as error:
            log.info("no sockets beside %s (%s): the file is watched instead", path, error)
            return WatchingTransport(path, FileWatch(path, self._names))

    def _names(self, topic: Topic) -> set[str]:
        with self._lock:
            return {name for name in self._listeners.get(topic, ()) if name is not None}

    def send(self, topic: Topic, notifications: Sequence[str]) -> None:
        data = msgspec.json.encode((*topic, notifications))
        if len(data) > DATAGRAM_BYTES_MAX:
            half = len(notifications) // 2
            if half:
                self.send(topic, notifications[:half])
                self.send(topic, notifications[half:])
            return
        with self._lock:
            if self._sender is None:
                self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._sender.setblocking(False)
                # Before a hub that is no longer needed is deleted with its socket.
                weakref.finalize(self, self._sender.close)
        # If the directory cannot be trusted, no process listens there: each watches the file.
        with contextlib.suppress(OSError), open_directory(self._path) as directory:
            for name in os.listdir(directory):
                if _is_socket(name, directory):
                    _send_datagram(self._sender, directory_of(self._path), name, data, directory)


def _send_datagram(sender: socket.socket, path: str, name: str, data: bytes, directory: int) -> None:
    try:
        sender.sendto(data, os.path.join(path, name))
    except ConnectionRefusedError:
        _remove(name, directory)  # its process was killed
    except OSError:
        return  # it has just ended, or its buffer is full and it will poll anyway


class FileWatch:
    """Reads from the file whether there were commits, and which listeners were woken by them."""

    def __init__(self, path: str, names: Callable[[Topic], set[str]]) -> None:
        self._path = path
        self._names = names
        # Closed before a fork, as all connections to the file.
        self._holder = ConnectionHolder(self._connect)
        self._connection: sqlite3.Connection | None = None
        self._version = -1
        self._log_state: tuple[int, int, int] | None = None
        self._wakes: dict[str, object] = {}
        self._spellings: dict[str, Spelling] = {}

    def _connect(self, budget_seconds: float) -> sqlite3.Connection:
        if not os.path.exists(self._path):
            raise sqlite3.OperationalError("the file does not exist yet")  # and is not to be created here
        return sqlite3.connect(
            self._path, timeout=WATCH_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
        )

    def has_changed(self) -> bool:
        """Return whether another connection has committed since the last call."""
        if self._connection is not None and self._log_is_unchanged():
            return False
        with self._holder.use() as connection:
            version = connection.execute("PRAGMA data_version").fetchone()[0]
            if version == self._version and connection is self._connection:
                return False
            self._connection, self._version = connection, version
            return True

    def _log_is_unchanged(self) -> bool:
        """Return whether the log was not written since the last call: by its times, which is cheaper than a query."""
        try:
            found = os.stat(f"{self._path}-wal")
        except OSError:
            return False
        before, self._log_state = self._log_state, (found.st_ino, found.st_size, found.st_mtime_ns)
        # A second write within one tick of the file system's clock has the same time.
        return self._log_state == before and abs(time.time() - found.st_mtime) > LOG_UNCHANGED_SECONDS

    def transactions_woke(self, namespace: str) -> bool:
        """Return whether transactions of users have woken sleepers of a namespace since the last call."""
        with self._holder.use() as connection:
            try:
                query = self._spelling(namespace)["SELECT value FROM {meta} WHERE name = ?"]
                row = connection.execute(query, (TRANSACTION_WAKES,)).fetchone()
            except sqlite3.OperationalError:
                self._version = -1  # no tables yet, or another process has locked the file: it is read again
                return False
        before, self._wakes[namespace] = self._wakes.get(namespace), row
        return bool(row != before)

    def woken(self, topic: Topic) -> list[str]:
        """Return the listeners that are not registered as sleepers: they were woken, or have yet to poll."""
        query = self._spelling(topic.namespace)[
            "SELECT s.name FROM {sleeper} s JOIN {queue} q ON q.number = s.queue WHERE q.name = ? AND s.until_ms > ?"
        ]
        with self._holder.use() as connection:
            try:
                rows = connection.execute(query, (topic.queue, time.time_ns() // 1_000_000))
                asleep = {name for (name,) in rows}
            except sqlite3.OperationalError:
                return [POLL_NOW]  # no tables yet, or another process has locked the file
        return sorted(self._names(topic) - asleep)

    def _spelling(self, namespace: str) -> Spelling:
        return self._spellings.get(namespace) or self._spellings.setdefault(namespace, Spelling(namespace))

    def close(self) -> None:
        """Close the connection."""
        self._connection = None
        self._holder.close()


class SocketTransport(InterruptibleTransport):
    """A socket of this process in the directory beside the file."""

    def __init__(self, path: str, watch: FileWatch) -> None:
        self._file = path
        self._watch = watch
        self._topics: set[Topic] = set()
        #: Found while topics were added; the next wait returns it.
        self._woken: list[tuple[Topic, list[str]]] = []
        self._name = secrets.token_hex(8)
        self._path = os.path.join(directory_of(path), self._name)
        if len(os.fsencode(self._path)) > SOCKET_PATH_BYTES_MAX:
            raise OSError("the path is too long for a socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._bind()
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        super().__init__()

    def _bind(self) -> None:
        for left in reversed(range(BIND_TRIES_MAX)):
            try:
                make_directory(self._file)
                with open_directory(self._file) as directory:
                    self._socket.bind(self._path)
                    if not _is_socket(self._name, directory, ours=True):
                        raise PermissionError(f"{directory_of(self._file)} was exchanged")
                return
            except FileNotFoundError:
                if not left:
                    raise

    def open(self) -> None:
        """Nothing to do: it listens since its creation."""

    def listen(self, topics: Sequence[Topic]) -> None:
        """Watch the file for these topics. All notifications arrive anyway, and the hub filters them."""
        self._topics.update(topic for topic in topics if topic.kind == "ready")
        # For the new topics what was before is covered by the poll that follows; the others hear of it.
        self._woken += self._woken_by_transactions()

    def unlisten(self, topics: Sequence[Topic]) -> None:
        self._topics.difference_update(topics)

    def send(self, topic: Topic, notifications: Sequence[str]) -> None:
        """The hub sends by itself."""

    def wait(self, seconds: float) -> list[tuple[Topic, list[str]]]:
        if self._woken:
            woken, self._woken = self._woken, []
            return woken
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            if self.wait_readable(self._socket.fileno(), min(WATCH_SECONDS, left) if self._topics else left):
                return self._receive()
            woken = self._woken_by_transactions()
            if woken or self.was_interrupted or time.monotonic() >= until:
                return woken

    def _receive(self) -> list[tuple[Topic, list[str]]]:
        received: list[tuple[Topic, list[str]]] = []
        with contextlib.suppress(BlockingIOError):
            while len(received) < 100:
                try:
                    namespace, kind, queue, notifications = _decode(self._socket.recv(1 << 16))
                except msgspec.DecodeError:
                    continue  # not from one of us
                received.append((Topic(namespace, kind, queue), notifications))  # type: ignore[arg-type]
        return received

    def _woken_by_transactions(self) -> list[tuple[Topic, list[str]]]:
        """Return the listeners that commits of users' transactions have woken."""
        if not self._topics:
            return []
        try:
            if not self._watch.has_changed():
                return []
            namespaces = {topic.namespace for topic in self._topics}
            changed = {namespace for namespace in namespaces if self._watch.transactions_woke(namespace)}
            return [
                (topic, names)
                for topic in self._topics
                if topic.namespace in changed and (names := self._watch.woken(topic))
            ]
        except sqlite3.Error as error:
            # Sockets work without it, and workers poll.
            log.debug("%s cannot be watched (%s)", self._file, error)
            self._watch.close()
            return []

    def probe(self) -> None:
        with open_directory(self._file) as directory:
            if not _is_socket(self._name, directory, ours=True):
                raise OSError("the socket was removed")

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError), open_directory(self._file) as directory:
            _remove(self._name, directory)
        with contextlib.suppress(OSError):
            os.rmdir(directory_of(self._file))  # if it was the last
        self.close_pipe()
        self._watch.close()


class WatchingTransport(InterruptibleTransport):
    """Watches the file for every write: listeners that are no registered sleepers were woken, or have yet to poll.

    Whether a write changed a schedule is not seen: after any write schedulers read, at most once in a few seconds.
    """

    def __init__(self, path: str, watch: FileWatch) -> None:
        super().__init__()
        self._file = path
        self._watch = watch
        self._topics: set[Topic] = set()
        self._schedules_may_differ = False
        self._schedules_at = 0.0

    def open(self) -> None:
        if not os.path.exists(self._file):
            raise ChannelUnusable("the file does not exist yet")

    def listen(self, topics: Sequence[Topic]) -> None:
        self._topics.update(topics)

    def unlisten(self, topics: Sequence[Topic]) -> None:
        self._topics.difference_update(topics)

    def send(self, topic: Topic, notifications: Sequence[str]) -> None:
        """The hub sends by itself."""

    def wait(self, seconds: float) -> list[tuple[Topic, list[str]]]:
        until = time.monotonic() + seconds
        while True:
            received: list[tuple[Topic, list[str]]] = []
            if self._watch.has_changed():
                self._schedules_may_differ = True
                # A renewal is a write itself: a worker that renewed at every write would never stop.
                ready = [topic for topic in self._topics if topic.kind == "ready"]
                received = [(topic, names) for topic in ready if (names := self._watch.woken(topic))]
            received += self._schedules_to_read()
            if received:
                return received
            left = until - time.monotonic()
            if left <= 0 or self.interrupted(min(WATCH_SECONDS, left)):
                return []

    def _schedules_to_read(self) -> list[tuple[Topic, list[str]]]:
        """Return the topics of schedulers if there was a write, and they have not read for a while."""
        topics = [topic for topic in self._topics if topic.kind == "schedules"]
        now = time.monotonic()
        if not (topics and self._schedules_may_differ) or now < self._schedules_at:
            return []
        self._schedules_may_differ, self._schedules_at = False, now + SCHEDULES_SECONDS
        return [(topic, [POLL_NOW]) for topic in topics]

    def interrupted(self, seconds: float) -> bool:
        """Pause; return whether the pause was interrupted."""
        return self.wait_readable(self._inner.fileno(), seconds)

    def probe(self) -> None:
        """Nothing to do: an access to the file succeeds or raises."""

    def close(self) -> None:
        self._watch.close()
        self.close_pipe()
