"""A server for these tests, and independent clients of it: each has its own connection and session."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests.servers.pgbouncer import PgBouncer
from waypost.store.postgres import PostgresStore, migrate
from waypost.testing.bench import Bench, fresh_namespace
from waypost.testing.postgres import PostgresServer


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as running:
        yield running


@pytest.fixture
def namespace(server: PostgresServer) -> str:
    name = fresh_namespace()
    migrate(server.url, namespace=name)
    return name


@pytest.fixture(scope="session")
def bouncer(server: PostgresServer) -> Iterator[PgBouncer]:
    """Fewer connections to the server than the tests have clients."""
    with PgBouncer(server, default_pool_size=4) as running:
        yield running


@pytest.fixture
def way(server: PostgresServer) -> str:
    """The URL that clients connect to."""
    return server.url


@pytest.fixture
def bench(way: str, namespace: str) -> Iterator[Bench]:
    """A bench on the server's own clock: these tests run things at once, not step by step."""

    def make(clock: object, _: str) -> Any:
        return PostgresStore.from_url(way, namespace=namespace)

    with Bench(make, "sync") as subject:
        yield subject
        subject.check_invariants()


@pytest.fixture
def side_by_side() -> Callable[[list[Callable[[], object]]], list[object]]:
    """Run functions at once in threads, and return their results or errors."""

    def run(things: list[Callable[[], object]]) -> list[object]:
        start = threading.Barrier(len(things), timeout=30)
        results: list[object] = [None] * len(things)

        def work(index: int) -> None:
            start.wait()
            try:
                results[index] = things[index]()
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(things))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    return run


@pytest.fixture
def database(server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    """A separate connection to the server."""
    with psycopg.connect(server.url, autocommit=True, application_name=f"test {os.getpid()}") as connection:
        yield connection
