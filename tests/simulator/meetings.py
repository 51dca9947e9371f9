"""Scenes in which a chosen fault meets a chosen operation.

Drawn by chance, some pairs would hardly ever come together: a clock that is set while schedules fire, a lost answer to
a redrive. So two of three seeds go through the list of all pairs in turn, a few pairs each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from tests.simulator.coverage import MOMENTS, all_pairs
from tests.simulator.scenario import (
    OPERATOR,
    STORE,
    STORE_FAULTS,
    ProcessPlan,
    QueueSetting,
    Run,
    Step,
    pack_run,
)

#: How many pairs a scenario has.
PAIRS_PER_SEED = 5
#: Neighbours in the list of pairs have much in common: a scenario takes them from all over it.
STRIDE = 97
#: A queue without handlers: its timers are left to the promoter.
UNSERVED = "unserved"
#: The longest stretch of time before its fault that a scene needs.
BEFORE_SECONDS = 8.0
#: What all workers of a queue do. One of all workers fires schedules, the first promotes timers; clients do the rest.
OF_HANDLERS = ("claim", "settle", "extend", "handler", "stop")


def pairs_of_seed(seed: int) -> list[tuple[str, str]]:
    """The pairs of fault and operation that a seed brings together; every third seed has none."""
    if seed % 3 == 0:
        return []
    pairs, first = all_pairs(), (seed - seed // 3 - 1) * PAIRS_PER_SEED
    return [pairs[(first + number) * STRIDE % len(pairs)] for number in range(PAIRS_PER_SEED)]


class Meetings:
    """The scenes of one scenario, one after the other."""

    def __init__(
        self, seed: int, queues: Sequence[QueueSetting], processes: Sequence[ProcessPlan], length: float
    ) -> None:
        self.random = Random(f"waypost meetings {seed}")
        self.pairs = pairs_of_seed(seed)
        self.queues = list(queues)
        self.processes = list(processes)
        self.steps: list[Step] = []
        self._length = length
        self._labels = 0
        self._workers = [plan for plan in processes if plan.handlers]
        self._publishers = [plan.name for plan in processes if not plan.handlers and not plan.relays]

    def draw(self) -> None:
        """Add the steps of all scenes, and what they need."""
        slot = (self._length - BEFORE_SECONDS) / max(1, len(self.pairs))
        for number, (fault, operation) in enumerate(self.pairs):
            at = BEFORE_SECONDS + slot * number + self.random.uniform(0.0, slot / 2)
            self._scene(round(at, 3), fault, operation, number)
        if any(operation == "promote" for _, operation in self.pairs):
            self.queues.append(QueueSetting(UNSERVED, {"lease": 30.0, "journal": "full"}))
            first = self._workers[0]
            self.processes = [replace(plan, promoter=True) if plan is first else plan for plan in self.processes]

    def _scene(self, at: float, fault: str, operation: str, number: int) -> None:
        queue, lease = self._queue()
        publisher = self.random.choice(self._publishers)
        if fault in STORE_FAULTS:
            victims = [STORE]
        elif operation in OF_HANDLERS:
            victims = [plan.name for plan in self._workers if any(one.queue == queue for one in plan.handlers)]
        elif operation == "fire_schedule":
            victims = [plan.name for plan in self._workers]
        elif operation == "promote":
            victims = [self._workers[0].name]
        else:
            victims = [publisher]
        arguments = self._fault(fault, lease)
        lasts = arguments.get("seconds", 0.0)
        for victim in victims:
            named = {"name": f"{victim}+copy{number}"} if fault == "clone" else {}
            self.steps.append(Step(at, victim, fault, arguments | named))
        scene = Scene(at, lasts, queue, lease, f"meeting-{number}")
        workers = [plan.name for plan in self._workers if any(one.queue == queue for one in plan.handlers)]
        acting = [publisher, f"{publisher}+copy{number}"] if fault == "clone" else [publisher]
        helper = OPERATOR if len(self._publishers) == 1 else next(n for n in self._publishers if n != publisher)
        for moment in (at - 0.3, at + 0.3) if fault in MOMENTS else (at + 0.2, at + 0.6 * lasts):
            for who in acting if moment > at else acting[:1]:
                self.steps += self._operation(operation, round(moment, 3), who, helper, workers, scene)
        self.steps += self._around(operation, publisher, scene)

    def _queue(self) -> tuple[str, float]:
        """The queue for a scene: without limits if there is one, with room for more, and with a short lease."""
        room: Counter[str] = Counter()
        for plan in self._workers:
            for handler in plan.handlers:
                room[handler.queue] += handler.concurrency
        limits = ("max_running", "rate", "max_pending")

        def order(one: QueueSetting) -> tuple[bool, int, bool, float]:
            lease = one.settings["lease"]
            return lease is None, sum(name in one.settings for name in limits), room[one.name] < 4, lease or 0.0

        chosen = min((one for one in self.queues if one.name in room), key=order)
        return chosen.name, chosen.settings["lease"] or 5.0

    def _fault(self, fault: str, lease: float) -> dict[str, Any]:
        seconds = round(max(2.0, self.random.choice((0.4, 0.7, 1.2)) * lease), 3)
        match fault:
            case "crash":
                return {"after": self.random.choice((0.5, 1.5))}
            case "clone":
                return {}
            case "freeze" | "stall" | "suspend":
                return {"seconds": seconds}
            case "partition":
                # Silent both ways, nothing would reach the store while it lasts.
                return {"seconds": seconds, "way": self.random.choice(("from_store", "refused"))}
            case "slow_link":
                return {"seconds": seconds, "delay": 0.3, "bytes_per_second": 50_000.0}
            case "late_replies" | "reorder":
                # Later than its own end, an answer would let the operation come after it.
                return {"seconds": seconds, "share": 1.0, "delay": round(seconds * self.random.choice((0.1, 0.4)), 3)}
            case "lose_notifications":
                # Long enough for a poll to find what no wake-up announces.
                return {"seconds": max(20.0, seconds), "share": 1.0}
            case "store_restart":
                lose = self.random.choice((0.0, 0.0, 0.2))
                return {"down": 1.0} | ({"lose": lose} if lose else {})
            case "clock_step" | "wall_clock_step":
                return {"by": self.random.choice((-3600.0, -30.0, -2.0, 2.0, 30.0, 3600.0))}
        return {"seconds": max(4.0, seconds), "share": 0.4}

    # ---- operations --------------------------------------------------------------------------------------------

    def _label(self) -> str:
        self._labels += 1
        return f"meet{self._labels}"

    def _publish(self, at: float, who: str, queue: str, run: Run | None = None, **more: Any) -> Step:
        runs = {"runs": [pack_run(run)]} if run is not None else {}
        return Step(round(at, 3), who, "publish", {"queue": queue, "label": self._label(), **runs, **more})

    def _operation(
        self, operation: str, at: float, who: str, helper: str, workers: Sequence[str], scene: Scene
    ) -> Iterator[Step]:
        """The operation at this moment, by a client with the fault or by the workers; others may help."""
        match operation:
            case "publish":
                yield self._publish(at, who, scene.queue)
            case "claim" | "settle" | "handler":
                # One that runs when the moment comes, and ends soon after it; and one that comes then.
                sender = helper if helper != OPERATOR else self._publishers[0]
                yield self._publish(at - 0.8, sender, scene.queue, Run("ok", 1.0))
                yield self._publish(at, sender, scene.queue, Run("ok", 0.1))
            case "wait_result" | "wait_chain":
                chain = {"chain": True} if operation == "wait_chain" else {}
                published = self._publish(at - 1.0, who.partition("+")[0], scene.queue, Run("ok", 3.0), **chain)
                yield published
                yield Step(at, who, operation, {"label": published.arguments["label"], "timeout": 60.0})
            case "receive":
                yield Step(at, who, "receive", {"queue": scene.queue, "wait": 3.0, "seconds": 0.1})
                yield self._publish(at + 0.5, self._publishers[0], scene.queue)
            case "stop":
                for worker in workers:
                    yield Step(at, worker, "stop", {"timeout": 2.0})
            case "cancel":
                published = self._publish(at - 1.0, who.partition("+")[0], scene.queue, delay=60.0)
                yield published
                yield Step(at, who, "cancel", {"queue": scene.queue, "label": published.arguments["label"]})
            case "configure":
                settings = {"max_deliveries": self.random.choice((3, 5, 8))}
                yield Step(at, who, "configure", {"queue": scene.queue, "settings": settings})
            case "pause" | "resume" | "redrive":
                yield Step(at, who, operation, {"queue": scene.queue})
            case "purge":
                state = self.random.choice(("dead", "delayed", "ready"))
                yield Step(at, who, "purge", {"queue": scene.queue, "state": state})
            case "trigger_schedule" | "remove_schedule":
                yield Step(at, who, operation, {"name": scene.name})
            case "save_schedule":
                yield Step(at, who, operation, {"name": scene.name, "queue": scene.queue, "every": 600.0})
            case "promote":
                yield self._publish(at - 0.5, self._publishers[0], UNSERVED, delay=0.5)
                yield self._publish(at - 0.5, self._publishers[0], UNSERVED, delay=1.0)

    def _around(self, operation: str, publisher: str, scene: Scene) -> Iterator[Step]:
        """What an operation finds, and what is put in order after it."""
        at, over = scene.at, round(scene.at + scene.lasts + 5.0, 3)
        match operation:
            case "extend":
                for before in (0.4, 0.8):
                    run = Run("ok", round(max(3.0, scene.lasts + scene.lease), 3))
                    yield self._publish(max(1.0, at - before * scene.lease), self._publishers[0], scene.queue, run)
            case "stop":
                for plan in self._workers:
                    yield Step(round(over + 10.0, 3), plan.name, "start")
            case "pause":
                yield Step(over, OPERATOR, "resume", {"queue": scene.queue})
            case "resume":
                yield Step(round(at - 1.0, 3), OPERATOR, "pause", {"queue": scene.queue})
                yield Step(over, OPERATOR, "resume", {"queue": scene.queue})
            case "redrive" | "purge":
                yield self._publish(at - 3.0, publisher, scene.queue, Run("dead"))
                yield self._publish(at - 3.0, publisher, scene.queue, delay=60.0)
            case "trigger_schedule" | "remove_schedule" | "save_schedule":
                if operation != "save_schedule":
                    saved = {"name": scene.name, "queue": scene.queue, "every": 600.0}
                    yield Step(round(at - 3.0, 3), OPERATOR, "save_schedule", saved)
                yield Step(over, OPERATOR, "remove_schedule", {"name": scene.name})
            case "fire_schedule":
                saved = {"name": scene.name, "queue": scene.queue, "every": 1.0}
                yield Step(round(at - 4.0, 3), OPERATOR, "save_schedule", saved)
                yield Step(over, OPERATOR, "remove_schedule", {"name": scene.name})


class Scene:
    """Where and when a pair meets."""

    def __init__(self, at: float, lasts: float, queue: str, lease: float, name: str) -> None:
        self.at = at
        self.lasts = lasts
        self.queue = queue
        self.lease = lease
        #: The name of its schedule, if it has one.
        self.name = name
