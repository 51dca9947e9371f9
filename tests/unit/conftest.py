"""Clients of both modes on the stores that need no server, with a manual clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.clients import MODES, open_client
from waypost.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=[(mode, store) for mode in MODES for store in ("memory", "sqlite")], ids="-".join)
def post(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Any]:
    mode, store = request.param
    url = "memory://" if store == "memory" else f"sqlite:///{tmp_path / 'queues.db'}"
    with open_client(mode, url, clock=clock) as client:
        yield client
