"""The same scenarios in real time against real stores."""

from __future__ import annotations

import pytest

from tests.simulator.real_stores import STORES, compress, run_real
from tests.simulator.scenario import (
    HandlerPlan,
    ProcessPlan,
    QueueSetting,
    Run,
    Scenario,
    Step,
    pack_run,
)

SCENARIO = Scenario(
    seed=1,
    queues=(QueueSetting("orders", {"lease": 20.0, "journal": "full", "max_deliveries": 5}),),
    processes=(
        ProcessPlan("worker-1", "machine-1", (HandlerPlan("orders"),)),
        ProcessPlan("worker-2", "machine-2", (HandlerPlan("orders", retry_seconds=0.1),)),
        ProcessPlan("publisher-1", "machine-3"),
    ),
    steps=(
        *(
            Step(30.0 + n, "publisher-1", "publish", {"queue": "orders", "label": f"m{n}", "runs": [["ok", 10.0]]})
            for n in range(10)
        ),
        Step(35.0, "publisher-1", "publish", {"queue": "orders", "label": "f", "runs": [["fail"], ["ok"]]}),
        Step(36.0, "publisher-1", "publish", {"queue": "orders", "label": "k", "key": "k", "delay": 20.0}),
        Step(37.0, "publisher-1", "publish", {"queue": "orders", "label": "k2", "key": "k"}),
        Step(
            38.0,
            "publisher-1",
            "publish",
            {"queue": "orders", "label": "c", "runs": [pack_run(Run("then", 1.0, queue="orders", label="d"))]},
        ),
        Step(40.0, "worker-1", "crash", {"after": 20.0}),
        Step(60.0, "worker-2", "freeze", {"seconds": 40.0}),
    ),
)


@pytest.mark.promise("SEE-7")
@pytest.mark.parametrize("store", STORES)
def test_a_scenario_runs_against_a_real_store(store: str) -> None:
    run = run_real(compress(SCENARIO), store)
    assert [str(finding) for finding in run.findings] == []
    assert run.faults == {"crash": 1, "freeze": 1}
    # 14 messages and the one sent on: each is published, claimed and done.
    assert run.events >= 45
