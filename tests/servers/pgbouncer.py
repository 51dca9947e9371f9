"""A real pgbouncer for tests, in transaction mode, on loopback in front of an embedded PostgreSQL.

    with PostgresServer() as server, PgBouncer(server) as bouncer:
        post = Waypost(bouncer.url)

The program is that of Debian's package `pgbouncer`. It has the same interface as the other servers, and refuses to run
as root like PostgreSQL does.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from waypost.errors import MissingExtra
from waypost.testing.postgres import USER, PostgresServer, answers, give_to_server_user, server_user
from waypost.testing.servers import START_SECONDS_MAX, EmbeddedServer

PROGRAM = Path("/usr/sbin/pgbouncer")
SETTINGS: dict[str, str | int] = {
    "pool_mode": "transaction",
    "auth_type": "plain",
    "max_client_conn": 500,
    "default_pool_size": 20,
    "server_login_retry": 1,
    "log_connections": 0,
    "log_disconnections": 0,
}


class PgBouncer(EmbeddedServer):
    """Between clients and a server. `options` are its own settings: `default_pool_size=4`."""

    wheel = ""
    scheme = "postgresql"

    def __init__(self, server: PostgresServer, **options: str | int) -> None:
        super().__init__()
        self._options = options
        self._behind = server

    @classmethod
    def _find_program(cls) -> Path:
        if not os.access(PROGRAM, os.X_OK):
            raise MissingExtra("no pgbouncer to start: install the package pgbouncer")
        return PROGRAM

    @property
    def url(self) -> str:
        """The URL, over loopback."""
        return self._behind.url_for(USER, self._behind.password, self.port)

    def _launch(self) -> None:
        settings = SETTINGS | self._options
        settings |= {"listen_addr": "127.0.0.1", "listen_port": self.port, "unix_socket_dir": ""}
        path = self.directory / "pgbouncer.ini"
        lines = [f"{name} = {value}" for name, value in settings.items()]
        users = self.directory / "users.txt"
        lines.append(f"auth_file = {users}")
        password = self._behind.password
        behind = f"postgres = host=127.0.0.1 port={self._behind.port} user={USER} password={password} dbname=postgres"
        path.write_text("\n".join(["[databases]", behind, "[pgbouncer]", *lines, ""]))
        users.write_text(f'"{USER}" "{password}"\n')
        give_to_server_user(self.directory)
        for file in (path, users):
            file.chmod(0o600)
            give_to_server_user(file)
        with (self.directory / "server.log").open("ab") as log:
            self._watch(
                lambda: subprocess.Popen(
                    [str(self._program), "-q", str(path)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, **server_user(self.directory),
                )
            )  # fmt: skip

    def _wait_until_it_answers(self) -> bool:
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline and self.pid is not None:
            if answers(self.port):
                return True
            time.sleep(0.02)
        return False
