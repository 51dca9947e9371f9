"""Random programs on the memory model and on each store, compared step by step.

`HYPOTHESIS_PROFILE=deep` draws many more, and different ones every time; the usual profile repeats the same.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from waypost.testing.bench import StoreMaker
from waypost.testing.machine import machine_for

PROFILES = {
    "usual": settings(
        max_examples=40, stateful_step_count=30, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), print_blob=False,
    ),
    "deep": settings(
        max_examples=2_000, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck),
        print_blob=True,
    ),
}  # fmt: skip


@pytest.mark.promise("STORE-4", "SEE-5", "LEASE-2", "PUB-6")
def test_a_store_and_the_model_do_the_same_in_any_program(make_store: StoreMaker) -> None:
    profile = PROFILES[os.environ.get("HYPOTHESIS_PROFILE", "usual")]
    run_state_machine_as_test(machine_for(make_store), settings=profile)
