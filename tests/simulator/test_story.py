"""Stories, shortening and coverage: what a person sees of a failing seed."""

from __future__ import annotations

import pytest

from tests.simulator import coverage
from tests.simulator.__main__ import main, shorten
from tests.simulator.checker import Judged, run_and_judge
from tests.simulator.draw import draw
from tests.simulator.history import FaultBegan, History, StoreStep
from tests.simulator.planted import FAULTS, planted
from tests.simulator.scenario import from_json, to_json
from tests.simulator.shrink import Shrinker, size_of
from tests.simulator.story import write_story

POISON = next(one for one in FAULTS if one.name == "poison by exit is free")


def failing() -> Judged:
    for seed in range(1, 30):
        judged = run_and_judge(draw(seed, minutes=1))
        if any(finding.rule in POISON.rules for finding in judged.findings):
            return judged
    raise AssertionError("no scenario has a handler that exits")


def test_a_failing_scenario_is_shortened_to_what_it_needs() -> None:
    with planted(POISON):
        judged = failing()
        short = shorten(judged, tries=100, seconds=None)
    assert short.findings[0].rule in POISON.rules
    assert len(short.scenario.steps) <= max(3, len(judged.scenario.steps) // 3), size_of(short.scenario)


def test_a_story_has_what_is_wrong_and_what_happened_to_the_message() -> None:
    with planted(POISON):
        judged = failing()
    finding = judged.findings[0]
    story = write_story(judged)
    assert str(finding) in story
    label = finding.sentence.split("handler of ")[1].split(" in ")[0]
    for text in (
        f"{label} is claimed by",
        f"handler begins with {label}",
        f"the handler of {label} ends",
        "is given back",
    ):
        assert text in story


def test_shrinking_keeps_the_steps_that_are_needed() -> None:
    scenario = draw(3, minutes=3)
    needed = [scenario.steps[4], scenario.steps[-2]]
    short = Shrinker(lambda one: all(step in one.steps for step in needed)).shrink(scenario)
    assert list(short.steps) == needed


def test_shrinking_keeps_who_serves_the_queues_and_fires_the_schedules() -> None:
    scenario = next(one for one in map(draw, range(1, 50)) if one.schedules and len(one.processes) > 2)
    short = Shrinker(lambda one: bool(one.schedules)).shrink(scenario)
    served = [queue.name for queue in scenario.queues if scenario.is_served(queue.name)]
    assert [queue.name for queue in short.queues if short.is_served(queue.name)] == served
    assert any(plan.handlers and plan.scheduler for plan in short.processes)
    assert short.steps == ()
    assert from_json(to_json(short)) == short


@pytest.mark.parametrize(("fault", "is_met"), [("clone", True), ("wall_clock_step", True), ("crash", False)])
def test_a_copy_meets_the_faults_of_its_machine_but_not_those_of_the_original(fault: str, is_met: bool) -> None:
    step = StoreStep(
        1.0, "worker-1+1", step=1, store_ms=0, verb="claim", operation=None, arguments={}, result=None, error=None,
        events=(),
    )  # fmt: skip
    history = History([FaultBegan(1.0, "worker-1", number=1, fault=fault, arguments={}), step])
    assert coverage.pairs_of(history)[fault, "claim"] == is_met


def test_coverage_names_the_pairs_that_were_reached_and_those_that_were_not() -> None:
    pairs = coverage.pairs_of(run_and_judge(draw(2, minutes=3)).history)
    assert pairs
    lines = coverage.table(pairs)
    assert lines[-2].startswith("pairs reached: ")
    assert lines[-1].startswith("never reached: ")
    assert not set(coverage.missing(pairs)) & set(pairs)


@pytest.mark.promise("SEE-7")
def test_the_command_runs_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "1"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
