"""Queues of both modes on Valkey and SQLite; where the store does not matter, on SQLite only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_message_queue.queues import MODES, Queues
from waypost.testing.bench import fresh_namespace


@pytest.fixture(params=MODES)
def queues(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queues]:
    made = Queues(request.param, f"sqlite:///{tmp_path}/queues.db", "wp")
    yield made
    made.close()


@pytest.fixture(params=MODES)
def on_valkey(request: pytest.FixtureRequest, valkey_url: str) -> Iterator[Queues]:
    made = Queues(request.param, valkey_url, fresh_namespace())
    yield made
    made.close()
