"""Random programs on the memory model and on each store, compared step by step.

`HYPOTHESIS_PROFILE=deep` draws many more, and different ones every time; the usual profile repeats the same.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from waypost.testing.bench import StoreMaker
from waypost.testing.machine import machine_for

#: Shrinking a long program takes minutes: only the deep profile does it.
USUAL = settings(
    max_examples=80,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
DEEP = settings(max_examples=2_000, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))
PROFILES = {"usual": USUAL, "deep": DEEP}
#: What must happen in a run. Hypothesis draws other programs when the code changes, or when other modules are loaded:
#: if something did not happen, it draws more of them.
REACHED = {
    "published", "duplicate", "promoted", "claimed", "done", "retried", "expired", "dead", "cancelled", "replaced",
    "forgotten", "cloned", "lapsed",
}  # fmt: skip
MORE_RUNS_MAX = 3


PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "usual")
#: An older server and a Cluster run the same scripts: they always have the conformance suite, and random programs in a
#: deep run. (A Cluster whose slots move has some of its own in tests/valkey.)
DEEP_ONLY = ("redis62", "cluster") if PROFILE == "deep" else ()
COMPARED = ("memory", "sqlite", "valkey", "postgres", *DEEP_ONLY)


@pytest.mark.promise("STORE-4", "SEE-5", "LEASE-2", "PUB-6")
@pytest.mark.parametrize("store_name", COMPARED, indirect=True)
def test_a_store_and_the_model_give_the_same_results_in_any_program(make_store: StoreMaker) -> None:
    machine = machine_for(make_store)
    run_state_machine_as_test(machine, settings=PROFILES[PROFILE])
    for _ in range(MORE_RUNS_MAX):
        if set(machine.reached) >= REACHED:
            break
        run_state_machine_as_test(machine, settings=settings(PROFILES[PROFILE], derandomize=False))
    assert set(machine.reached) >= REACHED, machine.reached
