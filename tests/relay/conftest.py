"""Each system is started once, when the first test asks for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.relay.target_systems import PLACES, Place

_numbers = itertools.count()
SYSTEMS = [
    pytest.param(name, marks=[pytest.mark.needs("rabbitmq-server")] if name == "rabbitmq" else []) for name in PLACES
]


@pytest.fixture(scope="session")
def places() -> Iterator[dict[str, Place]]:
    with ExitStack() as stack:

        class Started(dict[str, Place]):
            def __missing__(self, name: str) -> Place:
                self[name] = stack.enter_context(PLACES[name]())
                return self[name]

        yield Started()


@pytest.fixture(params=SYSTEMS)
def place(request: pytest.FixtureRequest, places: dict[str, Place]) -> Place:
    return places[request.param]


@pytest.fixture
def name() -> str:
    """Of a stream, a topic, a subject or a queue that nobody else uses."""
    return f"orders-{next(_numbers)}"
