"""The checker: it finds nothing in the code as it is, and finds what is planted into it."""

from __future__ import annotations

import pytest

from tests.simulator.checker import run_and_judge
from tests.simulator.draw import draw
from tests.simulator.planted import FAULTS, find, planted

#: Planted faults that drawn scenarios find soon; `make simulate PLANTED=1` looks for all of them.
FOUND_SOON = (
    "a claim that does not grow the token",
    "expiry that counts twice",
    "dedup mark after the enqueue",
    "poison by exit is free",
    "lost settle batch",
    "renewal of the wrong message",
    "double promotion",
    "chain notice lost",
    "a message is handed out after its expiry",
)


@pytest.mark.parametrize("seed", range(1, 9))
def test_nothing_is_wrong_with_a_drawn_scenario(seed: int) -> None:
    assert [str(finding) for finding in run_and_judge(draw(seed, minutes=4)).findings] == []


def test_a_seed_gives_the_same_history_each_time() -> None:
    first, second = (run_and_judge(draw(11, minutes=3)).history.lines() for _ in range(2))
    assert len(first) > 100
    assert first == second


@pytest.mark.parametrize("name", FOUND_SOON)
def test_a_planted_fault_is_found_by_its_rule(name: str) -> None:
    fault = next(one for one in FAULTS if one.name == name)
    found = find(fault, first_seed=1, scenarios=20)
    assert found.finding is not None, str(found)
    assert found.finding.rule in fault.rules


def test_there_are_twenty_eight_planted_faults() -> None:
    assert len(FAULTS) == len({one.name for one in FAULTS}) == 28
    for one in FAULTS:
        with planted(one):
            pass  # what it changes is there
