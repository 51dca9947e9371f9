"""A real Valkey server for the whole run, a client of its own to look behind the store, and a bench on a namespace."""

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
    """The server's own words, for what the store does not show."""
    with redis.Redis(port=server.port, password=server.password) as client:
        yield client


@pytest.fixture
def make_store(server: ValkeyServer) -> StoreMaker:
    return lambda clock, namespace: cast(Store, ValkeyStore.from_url(server.url, namespace=namespace, clock=clock))


@pytest.fixture
def plain_bench(make_store: StoreMaker) -> Iterator[Bench]:
    """A bench of one colour: what is shown here is the scripts' work, the same for both."""
    with Bench(make_store, "sync") as subject:
        yield subject


@pytest.fixture
def inside(plain_bench: Bench, raw: redis.Redis) -> Inside:
    return Inside(raw, plain_bench.namespace)
