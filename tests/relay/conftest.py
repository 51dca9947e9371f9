"""Each system is started once, when the first test needs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.relay.target_systems import SYSTEMS, TargetSystem

_numbers = itertools.count()
PARAMETERS = [
    pytest.param(name, marks=[pytest.mark.needs("rabbitmq-server")] if name == "rabbitmq" else []) for name in SYSTEMS
]


@pytest.fixture(scope="session")
def systems() -> Iterator[dict[str, TargetSystem]]:
    with ExitStack() as stack:

        class Started(dict[str, TargetSystem]):
            def __missing__(self, name: str) -> TargetSystem:
                self[name] = stack.enter_context(SYSTEMS[name]())
                return self[name]

        yield Started()


@pytest.fixture(params=PARAMETERS)
def system(request: pytest.FixtureRequest, systems: dict[str, TargetSystem]) -> TargetSystem:
    return systems[request.param]


@pytest.fixture
def name() -> str:
    """The name of a stream, topic, subject or queue that no other test uses."""
    return f"orders-{next(_numbers)}"
