"""Which stores the conformance suite runs on, and how each is made.

Drivers are imported where a store is made: the others run without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from waypost.errors import MissingExtra
from waypost.store.memory import MemoryStore
from waypost.store.port import Store
from waypost.testing.bench import StoreMaker
from waypost.testing.clock import ManualClock
from waypost.testing.servers import RedisServer, ValkeyServer
from waypost.testing.setups import ClusterSetup

#: Every store, by name. A store that is missing here is not tested: there is no other place.
STORES = ("memory", "sqlite", "valkey", "redis62", "cluster")


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with ValkeyServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    try:
        server = RedisServer()
    except MissingExtra:
        pytest.skip(f"needs the wheel {RedisServer.wheel}")
    with server:
        yield server.url


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterSetup]:
    with ClusterSetup() as setup:
        yield setup


@pytest.fixture(scope="session")
def cluster_client(cluster: ClusterSetup) -> Iterator[Any]:
    """One for all tests that block: to learn 16,384 slots takes longer than most of them."""
    import redis

    kind: Any = redis.RedisCluster
    with kind(host="127.0.0.1", port=cluster.servers[2].port) as client:
        yield client


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
        "redis62": lambda asked: served_maker(asked.getfixturevalue("redis_url")),
        "cluster": cluster_maker,
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


def cluster_maker(request: pytest.FixtureRequest) -> StoreMaker:
    """The face that blocks is handed a client, the other finds the nodes by a URL."""
    from waypost.store.valkey import ValkeyStore

    if "colour" in request.fixturenames and request.getfixturevalue("colour") == "sync":
        client = request.getfixturevalue("cluster_client")
        return lambda clock, namespace: cast(
            Store, ValkeyStore.from_client(client, namespace=namespace, clock=clock)
        )  # fmt: skip
    return served_maker(request.getfixturevalue("cluster").url)
