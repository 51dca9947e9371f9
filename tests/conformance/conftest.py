"""Which stores the conformance suite runs on, and how each is made.

Drivers are imported where a store is made: the others run without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from waypost.store.memory import MemoryStore
from waypost.store.port import Store
from waypost.testing.bench import StoreMaker
from waypost.testing.clock import ManualClock
from waypost.testing.servers import RedisServer, ValkeyServer

#: Every store, by name. A store that is missing here is not tested: there is no other place.
STORES = ("memory", "sqlite", "valkey", "postgres")


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with ValkeyServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    from waypost.testing.postgres import PostgresServer

    with PostgresServer() as server:
        yield server.url


@pytest.fixture(params=STORES)
def store_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def make_store(store_name: str, request: pytest.FixtureRequest) -> StoreMaker:
    makers: dict[str, Callable[[pytest.FixtureRequest], StoreMaker]] = {
        "memory": memory_maker,
        "sqlite": sqlite_maker,
        "valkey": lambda asked: served_maker(asked.getfixturevalue("valkey_url")),
        "postgres": lambda asked: postgres_maker(asked.getfixturevalue("postgres_url")),
        "redis62": lambda asked: served_maker(asked.getfixturevalue("redis_url")),
    }
    return makers[store_name](request)


def memory_maker(request: pytest.FixtureRequest) -> StoreMaker:
    """A namespace of the memory store is a store of its own, shared by all clients of this process."""
    made: dict[str, MemoryStore] = {}

    def make(clock: ManualClock, namespace: str) -> Store:
        return made.setdefault(namespace, MemoryStore(namespace=namespace, clock=clock))

    return make


def sqlite_maker(request: pytest.FixtureRequest) -> StoreMaker:
    from waypost.store.sqlite import SqliteStore

    path: Path = request.getfixturevalue("tmp_path") / "conformance.db"
    return lambda clock, namespace: cast(Store, SqliteStore(path, namespace=namespace, clock=clock))


def served_maker(url: str) -> StoreMaker:
    from waypost.store.valkey import ValkeyStore

    return lambda clock, namespace: cast(Store, ValkeyStore.from_url(url, namespace=namespace, clock=clock))


def postgres_maker(url: str) -> StoreMaker:
    """Every namespace has tables of its own, made when it is first asked for."""
    from waypost.store.postgres import PostgresStore, migrate

    made: set[str] = set()

    def make(clock: ManualClock, namespace: str) -> Store:
        if namespace not in made:
            migrate(url, namespace=namespace)
            made.add(namespace)
        return cast(Store, PostgresStore.from_url(url, namespace=namespace, clock=clock))

    return make
