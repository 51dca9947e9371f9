"""The machine room of the simulator: clocks, threads, crashes and links do what they stand for."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.draw import draw
from tests.simulator.history import (
    FaultBegan,
    FaultEnded,
    HandlerNotified,
    HandlerStarted,
    Happening,
    History,
    ReplyArrived,
    RunEnded,
    StoreStep,
)
from tests.simulator.scenario import (
    HandlerPlan,
    ProcessPlan,
    QueueSetting,
    RelayPlan,
    Scenario,
    SchedulePlan,
    Step,
)
from tests.simulator.world import World

ROOT = Path(__file__).parents[2]
#: Queues of which all workers know, so that an order between queues would show in a history.
OTHERS = ("a", "b", "c", "d")


def publishes(count: int, *, every: float = 1.0, seconds: float = 0.5, **more: Any) -> list[Step]:
    given = {"queue": "orders", "runs": [["ok", seconds]], **more}
    return [Step(5.0 + every * n, "publisher", "publish", {"label": f"m{n}", **given}) for n in range(count)]


def scenario(
    steps: list[Step],
    *,
    seed: int = 1,
    kind: Any = "async",
    lease: float = 10.0,
    workers: int = 2,
    quiet: float = 120.0,
) -> Scenario:
    names = [f"worker{n}" for n in range(1, workers + 1)]
    return Scenario(
        seed=seed,
        queues=(QueueSetting("orders", {"lease": lease}),),
        processes=(
            *(
                ProcessPlan(name, f"machine of {name}", (HandlerPlan("orders", kind=kind), *map(HandlerPlan, OTHERS)))
                for name in names
            ),
            ProcessPlan("publisher", "machine of publisher"),
        ),
        steps=tuple(sorted(steps, key=lambda step: step.at)),
        quiet_seconds=120.0,
    )


def run(chosen: Scenario) -> tuple[World, History]:
    world = World(chosen)
    history = world.run()
    assert world.loop.unhandled == []
    return world, history


def ended(history: History) -> dict[str, int]:
    """The ledger of the queue at the end, which must be balanced."""
    (last,) = history.of(RunEnded)
    ledger = last.states["orders"].ledger
    assert ledger["balance"] == 0
    return ledger


def by_worker(history: History, name: str) -> list[Happening]:
    """What a process itself did: a request under way reaches the store without it."""
    return [one for one in history if one.who == name and not isinstance(one, StoreStep | FaultBegan | FaultEnded)]


def digest(chosen: Scenario) -> str:
    return hashlib.sha256("\n".join(run(chosen)[1].lines()).encode()).hexdigest()


def digests() -> str:
    """Of runs that have much in common with all others."""
    return " ".join(map(digest, (eventful(3), *(draw(seed, minutes=4) for seed in (0, 2, 3)))))


def eventful(seed: int) -> Scenario:
    """A bit of everything, so that an order that depends on chance would show."""
    steps = publishes(30, seconds=2.0)
    steps += [
        Step(8.0, "worker1", "crash", {"after": 2.0}),
        Step(11.0, "worker2", "lose_replies", {"seconds": 10.0, "share": 0.3}),
        Step(12.0, "worker1", "partition", {"seconds": 30.0, "way": "both"}),
        Step(14.0, "worker2", "double_requests", {"seconds": 10.0, "share": 0.5}),
        Step(16.0, "publisher", "late_replies", {"seconds": 10.0, "share": 0.5, "delay": 3.0}),
        Step(20.0, "store", "store_restart", {"down": 2.0, "lose": 0.5}),
        Step(25.0, "store", "clock_step", {"by": -3.0}),
        Step(26.0, "worker1", "suspend", {"seconds": 20.0}),
        Step(27.0, "worker2", "freeze", {"seconds": 15.0}),
        Step(28.0, "publisher", "clone"),
        Step(30.0, "operator", "pause", {"queue": "orders"}),
        Step(33.0, "operator", "resume", {"queue": "orders"}),
    ]
    return scenario(steps, seed=seed)


def test_a_quiet_run_handles_each_message_once() -> None:
    _, history = run(scenario(publishes(20)))
    assert ended(history)["done"] == 20
    assert Counter(one.run for one in history.of(HandlerStarted)) == {1: 20}


@pytest.mark.promise("SEE-7")
def test_the_same_seed_gives_the_same_history() -> None:
    first = digest(eventful(3))
    assert digest(eventful(3)) == first
    assert digest(eventful(4)) != first


@pytest.mark.promise("SEE-7")
def test_a_seed_gives_the_same_history_in_every_process() -> None:
    code = "from tests.simulator.test_world import digests; print(digests())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }  # fmt: skip
    assert found == {digests()}


def test_a_crash_ends_a_process_without_another_step_and_its_messages_come_back() -> None:
    steps = [*publishes(1, seconds=5.0), Step(6.0, "worker1", "crash"), Step(6.0, "worker2", "crash", {"after": 1.0})]
    _, history = run(scenario(steps))
    assert ended(history)["done"] == 1
    assert ended(history)["expired"] == 1
    assert not [one for one in by_worker(history, "worker1") if one.at > 6.0]


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_lost_replies_lose_nothing(kind: str) -> None:
    steps = [*publishes(30, every=0.5), Step(6.0, "worker1", "lose_replies", {"seconds": 30.0, "share": 0.5})]
    steps += [Step(6.0, "publisher", "lose_replies", {"seconds": 30.0, "share": 0.5})]
    _, history = run(scenario(steps, kind=kind))
    assert ended(history)["published"] == ended(history)["done"] == 30


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_a_handler_cut_off_for_longer_than_its_lease_learns_of_it_before_another_starts(kind: str) -> None:
    steps = [*publishes(1, seconds=60.0)]
    steps += [Step(8.0, f"worker{n}", "partition", {"seconds": 40.0}) for n in (1, 2)]
    _, history = run(scenario([*steps, Step(15.0, "worker3", "start")], workers=3, kind=kind))
    (first, *others), notified = list(history.of(HandlerStarted)), list(history.of(HandlerNotified))
    if first.who != "worker3":
        assert [one.what for one in notified] == ["lost"]
        assert notified[0].at < others[0].at


def test_a_suspended_machine_has_a_monotonic_clock_that_stands_still() -> None:
    world = World(scenario([Step(10.0, "worker1", "suspend", {"seconds": 100.0})]))
    world.run()
    suspended, awake = (world._machines[f"machine of worker{n}"] for n in (1, 2))
    assert suspended.boot_clock() - suspended.monotonic() == pytest.approx(100.0, rel=0.01)
    assert awake.boot_clock() - awake.monotonic() == pytest.approx(0.0)


@pytest.mark.parametrize("point", ["before_request", "after_request", "before_reply"])
def test_a_process_can_crash_as_a_request_or_an_answer_passes(point: str) -> None:
    steps = publishes(20)
    steps += [Step(5.5 + 2 * n, "worker1", "crash", {"point": point, "count": n, "after": 0.5}) for n in range(1, 8)]
    _, history = run(scenario(steps, workers=1))
    assert ended(history)["done"] == 20
    assert len(list(history.of(FaultBegan))) >= 5


def test_leases_are_renewed_while_the_event_loop_is_busy() -> None:
    steps = [*publishes(1, seconds=5.0), Step(6.0, "worker1", "stall", {"seconds": 60.0})]
    _, history = run(scenario(steps, workers=1))
    assert ended(history) | {"done": 1, "claims": 1, "expired": 0} == ended(history)
    assert not list(history.of(HandlerNotified))


@pytest.mark.promise("LEASE-3")
@pytest.mark.parametrize("blocking_waits", [False, True])
def test_leases_of_several_queues_are_kept_over_a_link_that_is_slow_for_their_length(blocking_waits: bool) -> None:
    queues = [f"q{number}" for number in range(4)]
    plan = Scenario(
        seed=1,
        queues=tuple(QueueSetting(name, {"lease": 0.9}) for name in queues),
        processes=(
            ProcessPlan("worker", "a", tuple(map(HandlerPlan, queues))),
            ProcessPlan("publisher", "b"),
        ),
        steps=tuple(
            Step(5.0, "publisher", "publish", {"queue": name, "label": name, "runs": [["ok", 20.0]]}) for name in queues
        ),
        quiet_seconds=60.0,
        delay_range=(0.15, 0.2),
        blocking_waits=blocking_waits,
    )
    _, history = run(plan)
    (last,) = history.of(RunEnded)
    ledgers = [last.states[name].ledger for name in queues]
    assert [(one["done"], one["claims"], one["expired"]) for one in ledgers] == [(1, 1, 0)] * 4
    assert not list(history.of(HandlerNotified))


def test_a_frozen_process_goes_on_where_it_was() -> None:
    steps = [*publishes(1, seconds=5.0), Step(6.0, "worker1", "freeze", {"seconds": 60.0})]
    _, history = run(scenario(steps, workers=1))
    assert ended(history)["done"] == 1
    assert not [one for one in by_worker(history, "worker1") if 6.0 < one.at < 66.0]


def test_a_restart_loses_the_writes_of_its_last_seconds() -> None:
    steps = [*publishes(10, every=0.1, delay=60.0), Step(5.55, "store", "store_restart", {"down": 1.0, "lose": 0.3})]
    _, history = run(scenario(steps))
    assert 5 <= ended(history)["published"] < 10


def test_a_clone_takes_a_session_of_its_own_and_both_go_on() -> None:
    steps = [*publishes(20), Step(7.5, "publisher", "clone")]
    steps += [
        Step(9.25 + n, "publisher+1", "publish", {"queue": "orders", "label": f"c{n}", "runs": [["ok", 0.1]]})
        for n in range(5)
    ]
    _, history = run(scenario(steps))
    assert ended(history)["done"] == 25


@pytest.mark.parametrize("blocking_waits", [False, True])
def test_claims_can_be_answered_after_their_leases_have_ended(blocking_waits: bool) -> None:
    late = 0
    for seed in range(4):
        steps = publishes(20, every=3.0)
        steps += [
            Step(6.0, f"worker{n}", "late_replies", {"seconds": 60.0, "share": 0.5, "delay": 12.0}) for n in (1, 2)
        ]
        _, history = run(replace(scenario(steps, seed=seed), blocking_waits=blocking_waits))
        claims = {one.step: one for one in history.of(StoreStep) if one.verb == "claim"}
        claimed = {lease.nonce: one.at for one in claims.values() for lease in one.result.leases}
        arrived = [one for one in history.of(ReplyArrived) if one.step in claims and claims[one.step].result.leases]
        late += sum(one.at > claims[one.step].at + 10.0 for one in arrived)
        assert all(one.at < claimed[one.nonce] + 10.0 for one in history.of(HandlerStarted))
        assert ended(history)["done"] == 20
    assert late > 0


@pytest.mark.promise("SEE-7")
def test_idle_workers_wait_in_a_store_that_has_blocking_waits() -> None:
    quiet = replace(scenario(publishes(20, every=5.0)), blocking_waits=True)
    world, history = run(quiet)
    assert ended(history)["done"] == 20
    assert any(world.node._waits.values())
    faults = replace(eventful(3), blocking_waits=True)
    assert digest(faults) == digest(faults) != digest(eventful(3))


def test_schedules_relays_and_promoters_run() -> None:
    plan = Scenario(
        seed=1,
        queues=(QueueSetting("orders", {"lease": 10}),),
        processes=(
            ProcessPlan("worker1", "a", (HandlerPlan("orders"),), promoter=True),
            ProcessPlan("worker2", "b", relays=(RelayPlan("inbox", "orders"),)),
        ),
        steps=(Step(5.0, "operator", "pause", {"queue": "mail"}),),
        schedules=(SchedulePlan("tick", "orders", 10.0), SchedulePlan("tock", "inbox", 20.0)),
        quiet_seconds=95.0,
    )
    _, history = run(plan)
    started = Counter(one.label for one in history.of(HandlerStarted))
    assert started["schedule tick"] in (9, 10)
    assert started["schedule tock"] in (4, 5)


def test_nothing_is_left_after_a_run() -> None:
    world, _ = run(eventful(3))
    left = weakref.ref(world)
    del world
    gc.collect()
    assert left() is None


def test_handlers_that_are_left_at_the_end_are_closed_silently(caplog: pytest.LogCaptureFixture) -> None:
    # Many short ones first, so that the worker claims more than it can start.
    steps = publishes(700, every=0.002, seconds=0.0)
    steps += [replace(one, at=one.at + 1.4) for one in publishes(60, every=0.0, seconds=1000.0)]
    for kind in ("async", "thread"):
        run(scenario(steps, kind=kind, workers=1))
        gc.collect()
    assert caplog.records == []
