"""A server and a file with a table of the user's, and every kind of transaction on them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.outbox.transaction_kinds import KINDS, TABLE, TransactionKind, is_file, open_kind
from waypost import Waypost
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as running:
        with psycopg.connect(running.url) as connection:
            connection.execute(TABLE)
        yield running


@pytest.fixture
def namespace(server: PostgresServer) -> str:
    name = fresh_namespace()
    migrate(server.url, namespace=name)
    return name


@pytest.fixture
def post(server: PostgresServer, namespace: str) -> Iterator[Waypost]:
    with Waypost(server.url, namespace=namespace) as client:
        yield client


@dataclass(frozen=True, slots=True)
class Place:
    """A store beside a table of the user, one kind of transaction, and a client that reads."""

    kind: TransactionKind
    reader: Waypost
    url: str
    namespace: str

    def rows(self) -> list[int]:
        """Return the rows of the user's table."""
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as file:
                return [row[0] for row in file.execute("SELECT n FROM shop ORDER BY n")]
        with psycopg.connect(self.url) as connection:
            return [row[0] for row in connection.execute("SELECT n FROM shop ORDER BY n")]

    def bodies(self, queue: str) -> list[Any]:
        """Return the bodies of the queue, in order."""
        return [message.body for message in self.reader.messages(queue)]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, server: PostgresServer, tmp_path: Path) -> Iterator[Place]:
    name = fresh_namespace()
    if is_file(request.param):
        url = f"sqlite:///{tmp_path / 'shop.db'}"
        with closing(sqlite3.connect(tmp_path / "shop.db")) as file:
            file.execute(TABLE)
    else:
        url = server.url
        migrate(url, namespace=name)
        with psycopg.connect(url) as connection:
            connection.execute("TRUNCATE shop")
    with Waypost(url, namespace=name) as reader, open_kind(request.param, url, name) as kind:
        reader.ledger("orders")
        yield Place(kind, reader, url, name)
