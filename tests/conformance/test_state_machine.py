"""Random programs on the memory model and on each store, compared step by step.

`HYPOTHESIS_PROFILE=deep` draws many more, and different ones every time; the usual profile repeats the same.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from waypost.testing.bench import StoreMaker
from waypost.testing.machine import GROUP_STEPS, StoreMachine, machine_for

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
#: What must happen in the programs about groups.
REACHED_BY_GROUPS = {
    "groups at their limit", "groups held by a leased message", "groups held by a delayed message", "skipped",
    "groups limited by max_running", "groups limited by rate", "groups full", "groups paused", "promoted", "expired",
    "retried", "lapsed",
}  # fmt: skip
MORE_RUNS_MAX = 3


PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "usual")
#: An older server and a Cluster run the same scripts: they always have the conformance suite, and random programs in a
#: deep run. (A Cluster whose slots move has some of its own in tests/valkey.)
DEEP_ONLY = ("redis62", "cluster") if PROFILE == "deep" else ()
COMPARED = ("memory", "sqlite", "valkey", "postgres", *DEEP_ONLY)


def compare(machine: type[StoreMachine], run: settings, expected: set[str], first_seed: int | None = None) -> set[str]:
    """Run programs until all that is expected has happened, a bounded number; return what has not."""
    for more in range(1 + MORE_RUNS_MAX):
        if first_seed is not None:
            machine = seed(first_seed + more)(machine)
        run_state_machine_as_test(machine, settings=run)
        if set(machine.reached) >= expected:
            break
        run = settings(run, derandomize=False)
    return expected - set(machine.reached)


@pytest.mark.promise("STORE-4", "SEE-5", "LEASE-2", "PUB-6")
@pytest.mark.parametrize("store_name", COMPARED, indirect=True)
def test_a_store_and_the_model_give_the_same_results_in_any_program(make_store: StoreMaker) -> None:
    assert not compare(machine_for(make_store), PROFILES[PROFILE], REACHED)


@pytest.mark.promise("STORE-4", "QUEUE-5", "QUEUE-6", "QUEUE-7")
@pytest.mark.parametrize("store_name", COMPARED, indirect=True)
def test_a_store_and_the_model_give_the_same_results_in_any_program_about_groups(make_store: StoreMaker) -> None:
    machine = machine_for(make_store, GROUP_STEPS)
    if PROFILE == "deep":
        missing = compare(machine, DEEP, REACHED_BY_GROUPS)
    else:
        # The programs of this seed reach all of it at once.
        missing = compare(machine, settings(USUAL, max_examples=30), REACHED_BY_GROUPS, first_seed=1)
    assert not missing
