"""The scenario language."""

from __future__ import annotations

from tests.simulator.scenario import (
    HandlerPlan,
    ProcessPlan,
    QueueSetting,
    RelayPlan,
    Run,
    Scenario,
    SchedulePlan,
    Step,
    body_of,
    from_json,
    pack_run,
    run_number,
    to_json,
    unpack_run,
)

THEN = Run("then", 1.5, queue="b", label="m2", next_runs=(Run("fail"), Run("ok", 2.0)))
SCENARIO = Scenario(
    seed=7,
    queues=(QueueSetting("a", {"lease": 10, "max_pending": None}), QueueSetting("b")),
    processes=(
        ProcessPlan("w1", "machine-1", handlers=(HandlerPlan("a", 3, "thread"),), promoter=True),
        ProcessPlan("r1", "machine-2", relays=(RelayPlan("a", "b"),), scheduler=False),
    ),
    steps=(
        Step(0.0, "w1", "publish", {"queue": "a", "label": "m1", "runs": [pack_run(THEN)]}),
        Step(5.0, "store", "store_restart", {"down": 3.0, "lose": 1.0}),
        Step(4.0, "w1", "freeze", {"seconds": 30.0}),
    ),
    schedules=(SchedulePlan("tick", "a", 30.0, "3"),),
)


def test_a_scenario_is_read_as_it_was_written() -> None:
    assert from_json(to_json(SCENARIO)) == SCENARIO


def test_a_run_is_read_as_it_was_packed() -> None:
    assert unpack_run(pack_run(THEN)) == THEN
    assert unpack_run(pack_run(Run())) == Run()


def test_the_last_run_of_a_message_is_repeated() -> None:
    body = body_of("m", (Run("fail"), Run("ok", 1.0)))
    assert [run_number(body, number).kind for number in (1, 2, 3)] == ["fail", "ok", "ok"]
    assert run_number(body_of("m"), 5) == Run()


def test_a_scenario_knows_when_its_faults_are_over() -> None:
    assert SCENARIO.faults_end == 34.0
    assert SCENARIO.length_seconds == 634.0
