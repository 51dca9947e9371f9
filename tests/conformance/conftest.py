"""The stores that the conformance suite runs on, and how each is made.

Drivers are imported where a store is made: the others run without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.servers.valkey_setups import ClusterSetup
from waypost.errors import MissingExtra
from waypost.release import FINISHED
from waypost.store.memory import MemoryStore
from waypost.store.port import Store
from waypost.testing.bench import StoreMaker, fresh_namespace
from waypost.testing.clock import ManualClock
from waypost.testing.servers import RedisServer, ValkeyServer

if TYPE_CHECKING:
    from waypost.testing.postgres import PostgresServer

#: Every store, by name. A store that is missing here is not tested: there is no other place.
STORES = (
    "memory", "sqlite", "valkey", "redis62", "cluster", "postgres",
    pytest.param("postgres15", marks=pytest.mark.needs("postgresql-15")),
    pytest.param("pgbouncer", marks=pytest.mark.needs("pgbouncer")),
)  # fmt: skip


@cache
def tables() -> list[str]:
    """The tables that the migrations create empty. Parts of the journal are emptied with the whole."""
    from waypost.store.postgres.schema import MADE, MIGRATIONS, migration_text

    script = "\n".join(migration_text(name) for _, name in MIGRATIONS)
    parts = re.findall(r"^CREATE TABLE \{(\w+)\} PARTITION OF", script, re.MULTILINE)
    filled = [*re.findall(r"^INSERT INTO \{(\w+)\}", script, re.MULTILINE), "interface"]
    return [name for kind, name in MADE.findall(script) if kind == "TABLE" and name not in (*parts, *filled)]


def emptying(namespace: str) -> str:
    """Return the statements that empty the tables of a namespace, but for what `migrate` has written there."""
    statements = [f'DELETE FROM "{namespace}_{table}"' for table in tables()]
    return "; ".join(f"{one} WHERE kind <> '{FINISHED[0]}'" if one.endswith('_record"') else one for one in statements)


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
    """One client for all sync tests: reading 16,384 slots takes longer than most of them."""
    import redis

    kind: Any = redis.RedisCluster
    with kind(host="127.0.0.1", port=cluster.servers[2].port, password=cluster.password) as client:
        yield client


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    from waypost.testing.postgres import PostgresServer

    with PostgresServer() as server:
        yield server


@pytest.fixture(params=STORES)
def store_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def make_store(store_name: str, request: pytest.FixtureRequest) -> StoreMaker:
    makers: dict[str, Callable[[pytest.FixtureRequest], StoreMaker]] = {
        "memory": memory_maker,
        "sqlite": sqlite_maker,
        "valkey": lambda request: served_maker(request.getfixturevalue("valkey_url")),
        "postgres": lambda request: request.getfixturevalue("postgres_make"),
        "postgres15": lambda request: request.getfixturevalue("postgres15_make"),
        "pgbouncer": lambda request: request.getfixturevalue("pgbouncer_make"),
        "redis62": lambda request: served_maker(request.getfixturevalue("redis_url")),
        "cluster": cluster_maker,
    }
    return makers[store_name](request)


def memory_maker(request: pytest.FixtureRequest) -> StoreMaker:
    """A namespace of the memory store is a separate store, shared by all clients of this process."""
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
    """The sync client gets a driver's client, the async one finds the nodes by a URL."""
    from waypost.store.valkey import ValkeyStore

    if "mode" in request.fixturenames and request.getfixturevalue("mode") == "sync":
        client = request.getfixturevalue("cluster_client")
        return lambda clock, namespace: cast(
            Store, ValkeyStore.from_client(client, namespace=namespace, clock=clock)
        )  # fmt: skip
    return served_maker(request.getfixturevalue("cluster").url)


class PostgresNamespaces:
    """Namespaces with tables, which are reused: creating tables takes longer than most tests, emptying does not."""

    #: Dead rows gather in a namespace, since nothing vacuums here.
    USES_MAX = 30

    def __init__(self, url: str) -> None:
        self.url = url
        self._free: list[tuple[str, int]] = []

    def take(self) -> tuple[str, int]:
        from waypost.store.postgres import migrate

        if self._free:
            return self._free.pop()
        name = fresh_namespace()
        migrate(self.url, namespace=name)
        return name, 0

    def give(self, namespaces: list[tuple[str, int]]) -> None:
        import psycopg

        with psycopg.connect(self.url) as connection:
            for name, uses in namespaces:
                if uses < self.USES_MAX:
                    connection.execute(emptying(name))
                    # One at a time: a program of random steps uses many, and a transaction holds all their locks.
                    connection.commit()
                    self._free.append((name, uses + 1))

    @contextmanager
    def maker(self, url: str | None = None) -> Iterator[StoreMaker]:
        """Make stores in these namespaces, through another URL if one is given."""
        from waypost.store.postgres import PostgresStore

        in_use: dict[str, tuple[str, int]] = {}

        def make(clock: ManualClock, namespace: str) -> Store:
            if namespace not in in_use:
                in_use[namespace] = self.take()
            return PostgresStore.from_url(url or self.url, namespace=in_use[namespace][0], clock=clock)

        yield make
        self.give(list(in_use.values()))


@pytest.fixture(scope="session")
def postgres_namespaces(postgres: PostgresServer) -> PostgresNamespaces:
    return PostgresNamespaces(postgres.url)


@pytest.fixture
def postgres_make(postgres_namespaces: PostgresNamespaces) -> Iterator[StoreMaker]:
    with postgres_namespaces.maker() as make:
        yield make


@pytest.fixture(scope="session")
def postgres15_namespaces() -> Iterator[PostgresNamespaces]:
    from waypost.testing.postgres import PostgresServer

    with PostgresServer(release=15) as server:
        yield PostgresNamespaces(server.url)


@pytest.fixture
def postgres15_make(postgres15_namespaces: PostgresNamespaces) -> Iterator[StoreMaker]:
    with postgres15_namespaces.maker() as make:
        yield make


@pytest.fixture(scope="session")
def pgbouncer_url(postgres: PostgresServer) -> Iterator[str]:
    from tests.servers.pgbouncer import PgBouncer

    with PgBouncer(postgres, default_pool_size=4) as bouncer:
        yield bouncer.url


@pytest.fixture
def pgbouncer_make(postgres_namespaces: PostgresNamespaces, pgbouncer_url: str) -> Iterator[StoreMaker]:
    with postgres_namespaces.maker(pgbouncer_url) as make:
        yield make
