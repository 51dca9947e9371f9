"""A broker on a real server: each test has a namespace of its own."""

from __future__ import annotations

import pytest

from tests.faststream.running import Place
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace


@pytest.fixture(params=["valkey", "postgres"])
def place(request: pytest.FixtureRequest) -> Place:
    url: str = request.getfixturevalue(f"{request.param}_url")
    namespace = fresh_namespace()
    if request.param == "postgres":
        migrate(url, namespace=namespace)
    return Place(url, namespace)


@pytest.fixture
def database(postgres_url: str) -> Place:
    namespace = fresh_namespace()
    migrate(postgres_url, namespace=namespace)
    return Place(postgres_url, namespace)
