"""Schedules on every store, with the sync and the async client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.harness import Harness
from waypost.testing.bench import fresh_namespace

STORES = ("memory", "sqlite", "valkey", "postgres")
_numbers = itertools.count()


@pytest.fixture
def namespace() -> str:
    return fresh_namespace()


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> str:
    match request.param:
        case "memory":
            return f"memory://schedules-{next(_numbers)}"
        case "sqlite":
            return f"sqlite:///{tmp_path / 'schedules.db'}"
        case "postgres":
            from waypost.store.postgres import migrate

            served: str = request.getfixturevalue("postgres_url")
            migrate(served, namespace=namespace)
            return served
    valkey: str = request.getfixturevalue("valkey_url")
    return valkey


@pytest.fixture(params=["sync", "async"])
def harness(request: pytest.FixtureRequest, url: str, namespace: str) -> Iterator[Harness]:
    with Harness(request.param, url, namespace=namespace) as made:
        yield made
        for queue in made.queues():
            made.check(queue)
