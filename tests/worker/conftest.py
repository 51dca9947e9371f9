"""Every story of a worker is told on every store, in both colours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.stage import Stage
from waypost.testing.servers import ValkeyServer

STORES = ("memory", "sqlite", "valkey")
_numbers = itertools.count()


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with ValkeyServer(appendonly=True, appendfsync="no") as server:
        yield server.url


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "memory":
            return f"memory://stage-{next(_numbers)}"
        case "sqlite":
            return f"sqlite:///{tmp_path / 'stage.db'}"
    served: str = request.getfixturevalue("valkey_url")
    return served


@pytest.fixture
def namespace() -> str:
    return f"stage-{next(_numbers)}"


@pytest.fixture(params=["sync", "async"])
def stage(request: pytest.FixtureRequest, url: str, namespace: str) -> Iterator[Stage]:
    with Stage(request.param, url, namespace=namespace) as made:
        yield made
        for queue in made.queues():
            made.check(queue)
