"""Where contenders run: one server for all of them, and a clean place on it for each turn."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import psycopg
import redis

from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer


class Host(Protocol):
    """A server or a folder for contenders."""

    @property
    def pid(self) -> int:
        """The process id of the server, 0 if there is none."""
        ...

    def place(self) -> AbstractContextManager[str]:
        """Return the URL of an empty database for one turn."""
        ...


class ValkeyHost:
    """A Valkey without persistence, emptied before each turn."""

    def __init__(self, server: ValkeyServer) -> None:
        self._server = server

    @property
    def pid(self) -> int:
        return self._server.pid or 0

    @contextmanager
    def place(self) -> Iterator[str]:
        with redis.Redis(port=self._server.port, password=self._server.password) as client:
            client.flushall()
            client.script_flush()
        # The scheme that all clients accept.
        yield f"redis://:{self._server.password}@127.0.0.1:{self._server.port}/0"


class PostgresHost:
    """A PostgreSQL that waits for its disk, with a database for each turn: no turn pays for another's dead rows."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._numbers = itertools.count()

    @property
    def pid(self) -> int:
        return self._server.pid or 0

    @contextmanager
    def place(self) -> Iterator[str]:
        name = f"bench_{next(self._numbers)}"
        with psycopg.connect(self._server.url, autocommit=True) as database:
            # Writes of earlier turns are on disk before this one begins.
            database.execute("CHECKPOINT")
            database.execute(f"CREATE DATABASE {name}")
            try:
                yield self._server.url.rpartition("/")[0] + f"/{name}"
            finally:
                database.execute(f"DROP DATABASE {name} WITH (FORCE)")


class SqliteHost:
    """A new file for each turn."""

    pid = 0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    @contextmanager
    def place(self) -> Iterator[str]:
        yield f"sqlite:///{self._folder / f'bench-{next(self._numbers)}.db'}"


@contextmanager
def host(store: str) -> Iterator[Host]:
    """Return the host of a store."""
    match store:
        case "valkey":
            with ValkeyServer() as valkey:
                yield ValkeyHost(valkey)
        case "postgres":
            server = PostgresServer(durable=True, autovacuum="on", shared_buffers="256MB", max_wal_size="4GB")
            with server:
                yield PostgresHost(server)
        case _:
            with tempfile.TemporaryDirectory() as folder:
                yield SqliteHost(Path(folder).absolute())


@contextmanager
def empty_store(store: str) -> Iterator[str]:
    """Start a server if the store needs one, and create its tables if it has any; return the URL."""
    with host(store) as place, place.place() as url:
        if store == "postgres":
            migrate(url)
        yield url
