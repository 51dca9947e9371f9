"""Runs of the real worker on a virtual clock, recorded by the journal, as the model of a queue reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from tests.simulator.scenario import HandlerPlan, ProcessPlan, QueueSetting, Scenario, Step
from tests.simulator.world import World
from waypost.spark.insight.history import Delivery, History, build_history
from waypost.values import EventRecord

QUEUE = "orders"


def deliveries_of(events: Iterable[EventRecord]) -> list[Delivery]:
    """Return the ended deliveries of a journal: each claim with its end."""
    claims: dict[tuple[str, int], EventRecord] = {}
    found = []
    for event in events:
        name = (event.message_id or "", event.claims or 0)
        if event.event == "claimed":
            claims[name] = event
        elif event.run_ms is not None and name in claims:
            claim = claims.pop(name)
            found.append(
                Delivery(
                    name[0], name[1], claim.worker, claim.priority, claim.group, claim.cause, claim.at_ms,
                    claim.wait_ms or 0, event.event, event.at_ms, event.run_ms, event.reason, event.error_type,
                )
            )  # fmt: skip
    return found


def record(
    publishes: Sequence[tuple[float, dict[str, Any]]],
    *,
    workers: int = 1,
    concurrency: int = 4,
    settings: dict[str, Any] | None = None,
    faults: Sequence[Step] = (),
    seed: int = 1,
    quiet: float = 120.0,
) -> History:
    """Run workers on a virtual clock. Each publish is given by its time in seconds and its options."""
    steps = [
        Step(at, "publisher", "publish", {"queue": QUEUE, "label": f"m{number}", **options})
        for number, (at, options) in enumerate(publishes)
    ]
    names = [f"worker{number}" for number in range(1, workers + 1)]
    handler = HandlerPlan(QUEUE, concurrency=concurrency)
    world = World(
        Scenario(
            seed=seed,
            queues=(QueueSetting(QUEUE, settings or {}),),
            processes=(
                *(ProcessPlan(name, f"machine of {name}", (handler,)) for name in names),
                ProcessPlan("publisher", "machine of publisher"),
            ),
            steps=tuple(sorted([*steps, *faults], key=lambda step: step.at)),
            quiet_seconds=quiet,
        )
    )
    world.run()
    assert world.loop.unhandled == []
    model = world.node.store._queues[QUEUE]
    return build_history(QUEUE, deliveries_of(model.journal), policy=model.policy)


def poisson(random: Random, count: int, *, every: float, seconds: float, **options: Any) -> list[tuple[float, Any]]:
    """Return publishes that come by chance, `every` so many seconds on average, and run so long on average."""
    at, found = 5.0, []
    for _ in range(count):
        at += random.expovariate(1 / every)
        found.append((at, {"runs": [["ok", round(random.expovariate(1 / seconds), 3)]], **options}))
    return found
