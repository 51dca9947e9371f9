"""What tests of upgrades share: a build of the next release, processes of both, and a connection to their database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.upgrade.fleet import Fleet
from tests.upgrade.next_release import build
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace


@pytest.fixture(scope="session")
def next_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("next"))


@pytest.fixture
def fleet(postgres_url: str, tmp_path: Path, next_source: Path) -> Iterator[Fleet]:
    namespace = fresh_namespace()
    migrate(postgres_url, namespace=namespace)
    fleet = Fleet(postgres_url, namespace, tmp_path, next_source)
    yield fleet
    fleet.stop_all()


@pytest.fixture
def database(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection
