"""Every test of a worker runs on every store, with the sync and the async client."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.harness import Harness
from waypost.store.postgres import migrate

STORES = ("memory", "sqlite", "valkey", "postgres")
_numbers = itertools.count()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A short path: beside a file with a long path there is no room for its wake-up sockets."""
    with tempfile.TemporaryDirectory(prefix="wp-worker-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, short_folder: Path) -> str:
    match request.param:
        case "memory":
            return f"memory://worker-{next(_numbers)}"
        case "sqlite":
            return f"sqlite:///{short_folder / 'worker.db'}"
    served: str = request.getfixturevalue(f"{request.param}_url")
    return served


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """A new namespace for each test, with tables where the store needs them."""
    name = f"worker-{next(_numbers)}"
    if "url" in request.fixturenames and (url := request.getfixturevalue("url")).startswith("postgresql"):
        migrate(url, namespace=name)
    return name


@pytest.fixture(params=["sync", "async"])
def harness(request: pytest.FixtureRequest, url: str, namespace: str) -> Iterator[Harness]:
    with Harness(request.param, url, namespace=namespace) as made:
        yield made
        for queue in made.queues():
            made.check(queue)
