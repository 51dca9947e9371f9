"""The pytest plugin: the `promise` mark, and the fixtures of the conformance suite.

Load it from the `conftest.py` at the root of the tests, and define there how a store is made:

    pytest_plugins = ["waypost.testing.plugin"]

    @pytest.fixture
    def make_store(tmp_path):
        return lambda clock, namespace: MyStore(tmp_path / "a.db", namespace=namespace, clock=clock)

Then `from waypost.testing.conformance import *` in a test module runs the suite on it, sync and async.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from waypost.testing.bench import Bench, Mode, StoreMaker

# Failed assertions of the suite show their values, like those of any test module.
pytest.register_assert_rewrite("waypost.testing.bench", "waypost.testing.conformance", "waypost.testing.machine")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, so that `--strict-markers` accepts it."""
    config.addinivalue_line("markers", "promise(*ids): the promises of docs/promises.md that this test shows")


@pytest.fixture(params=["sync", "async"])
def mode(request: pytest.FixtureRequest) -> Mode:
    """The mode of the executor: sync or async."""
    chosen: Mode = request.param
    return chosen


@pytest.fixture
def make_store() -> StoreMaker:
    """Return a function that makes the store under test from a clock and a namespace. Override it."""
    raise pytest.UsageError("define a fixture `make_store` that returns a function (clock, namespace) -> store")


@pytest.fixture
def bench(make_store: StoreMaker, mode: Mode) -> Iterator[Bench]:
    """The store under test: helper verbs, a manual clock, and a check of the invariants after the test."""
    from waypost.testing.bench import Bench

    with Bench(make_store, mode) as subject:
        yield subject
        subject.check_invariants()
