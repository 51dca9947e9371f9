"""Which stores the conformance suite runs on, and how each is made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from waypost.store.memory import MemoryStore
from waypost.store.port import Store
from waypost.testing.bench import StoreMaker
from waypost.testing.clock import ManualClock

#: Every store, by name. A store that is missing here is not tested: there is no other place.
STORES = ["memory"]


def memory_maker() -> StoreMaker:
    """Namespaces of one memory store are stores of their own: one process, one namespace, one model."""
    made: dict[str, MemoryStore] = {}

    def make(clock: ManualClock, namespace: str) -> Store:
        return made.setdefault(namespace, MemoryStore(namespace=namespace, clock=clock))

    return make


@pytest.fixture(params=STORES)
def store_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def make_store(store_name: str, request: pytest.FixtureRequest) -> StoreMaker:
    maker: Callable[[], StoreMaker] = {"memory": memory_maker}[store_name]
    return maker()
