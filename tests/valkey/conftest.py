"""A real Valkey server for the whole run, a redis-py client that inspects it, and a bench on a namespace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import redis

from tests.valkey.inspector import Inside
from waypost.store.port import Store
from waypost.store.valkey import ValkeyStore
from waypost.testing.bench import Bench, StoreMaker
from waypost.testing.servers import ValkeyServer


@pytest.fixture(scope="session")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as one:
        yield one


@pytest.fixture
def raw(server: ValkeyServer) -> Iterator[redis.Redis]:
    """A redis-py client, for what the store does not return."""
    with redis.Redis(port=server.port, password=server.password) as client:
        yield client


@pytest.fixture
def make_store(server: ValkeyServer) -> StoreMaker:
    return lambda clock, namespace: cast(Store, ValkeyStore.from_url(server.url, namespace=namespace, clock=clock))


@pytest.fixture
def plain_bench(make_store: StoreMaker) -> Iterator[Bench]:
    """A sync bench: these tests are about the scripts, which are the same for both modes."""
    with Bench(make_store, "sync") as subject:
        yield subject


@pytest.fixture
def inside(plain_bench: Bench, raw: redis.Redis) -> Inside:
    return Inside(raw, plain_bench.namespace)
