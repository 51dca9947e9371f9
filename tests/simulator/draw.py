"""Scenarios by chance: a seed gives one scenario, always the same.

A scenario has some queues with limits or without, some workers and publishers, messages whose handlers do all that
handlers can do, an operator who interferes, and faults. It has calm stretches too: some rules can only be judged there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from tests.simulator.meetings import Meetings
from tests.simulator.scenario import (
    OPERATOR,
    STORE,
    HandlerPlan,
    ProcessPlan,
    QueueSetting,
    RelayPlan,
    Run,
    RunKind,
    Scenario,
    SchedulePlan,
    Step,
    pack_run,
    unpack_run,
)

QUEUE_NAMES = ("orders", "mails", "reports")
LEASES = (3.0, 6.0, 12.0, 30.0)
RUN_WEIGHTS: dict[RunKind, float] = {
    "ok": 40, "fail": 8, "retry": 4, "snooze": 4, "dead": 2, "drop": 1, "hang": 0.5, "exit": 3, "base_exception": 2,
    "cancel_self": 3, "ignore_cancel": 2, "publish": 4, "reschedule": 2, "then": 8,
}  # fmt: skip
FAULT_WEIGHTS = {
    "crash": 6, "freeze": 5, "stall": 3, "suspend": 4, "wall_clock_step": 2, "clone": 1, "partition": 6,
    "slow_link": 3, "lose_requests": 3, "lose_replies": 5, "late_replies": 5, "double_requests": 3, "reorder": 3,
    "lose_notifications": 4, "store_restart": 3, "clock_step": 3,
}  # fmt: skip
POINTS = ("before_request", "after_request", "before_reply")
#: Faults last for so many leases, or for longer than a store remembers calls.
FAULT_LEASES = (0.2, 0.5, 1.1, 1.5, 3.0)
LONG_FAULT_SECONDS = (130.0, 330.0, 400.0)
#: After the last fault everything must be over within so long: leases, the pauses of retries and timers.
QUIET_SECONDS = 420.0
#: Round trips of healthy links, from one machine to another continent.
DELAY_RANGES = ((0.0001, 0.001), (0.0005, 0.005), (0.0005, 0.005), (0.05, 0.15))
#: So long after its publish, or its due time, a message lapses.
EXPIRES_SECONDS = (0.3, 2.0, 8.0, 40.0)
#: So long nothing goes wrong in each calm stretch.
CALM_SECONDS = 100.0


class Drawing:
    """Draws one scenario."""

    def __init__(self, seed: int, *, minutes: float | None = None) -> None:
        self.seed = seed
        self.random = Random(f"waypost scenario {seed}")
        #: How long messages and faults keep coming, in seconds.
        self.length = 60 * (minutes if minutes is not None else self.random.choice((3.0, 3.0, 6.0, 12.0, 30.0)))
        self.steps: list[Step] = []
        self.labels: list[tuple[str, str]] = []
        self.queues: list[QueueSetting] = []
        self.leases: dict[str, float | None] = {}
        self.numbers = 0

    def draw(self) -> Scenario:
        return with_expiries(self._draw())

    def _draw(self) -> Scenario:
        self.queues = self._queues()
        processes = self._processes()
        schedules = self._schedules()
        self._publishes(processes)
        self._operator(processes)
        self._faults(processes)
        self._workers_stop(processes)
        for _ in range(self.random.choice((0, 1, 2, 3))):
            self._scene(processes)
        delays = self.random.choice(DELAY_RANGES)
        if delays == DELAY_RANGES[0]:
            self._gone_beside_another(processes)
        meetings = Meetings(self.seed, self.queues, processes, self.length)
        meetings.draw()
        steps = tuple(sorted((*self.steps, *meetings.steps), key=lambda step: step.at))
        return Scenario(
            self.seed, tuple(meetings.queues), tuple(meetings.processes), steps, schedules, QUIET_SECONDS, delays,
            blocking_waits=self.seed % 4 == 3,
        )  # fmt: skip

    def _chance(self, share: float) -> bool:
        return self.random.random() < share

    def _moment(self, first: float = 5.0) -> float:
        return round(self.random.uniform(first, self.length), 3)

    # ---- what there is -----------------------------------------------------------------------------------

    def _queues(self) -> list[QueueSetting]:
        queues = []
        for name in QUEUE_NAMES[: self.random.choice((1, 2, 2, 3))]:
            lease: float | None = self.random.choice(LEASES)
            if name == "mails" and self._chance(0.1):
                lease = None
            self.leases[name] = lease
            settings: dict[str, Any] = {
                "lease": lease, "max_deliveries": self.random.choice((2, 3, 5, 10)), "journal": "full",
            }  # fmt: skip
            if self._chance(0.25):
                settings["max_pending"] = self.random.choice((2, 4, 8))
                settings["overload"] = self.random.choice(("raise", "raise", "block", "drop_oldest"))
            if self._chance(0.2):
                settings["max_running"] = self.random.choice((1, 2, 3))
            if self._chance(0.15):
                settings["rate"] = self.random.choice(("4/s", "10/10s", "30/m"))
            if self._chance(0.15):
                settings["dead_max"] = self.random.choice((1, 5))
            queues.append(QueueSetting(name, settings))
        return queues

    def _processes(self) -> tuple[ProcessPlan, ...]:
        names = [queue.name for queue in self.queues]
        relayed = names[-1] if len(names) == 3 and self._chance(0.3) and self.leases[names[-1]] else None
        handled = [name for name in names if name != relayed]
        count = self.random.choice((1, 2, 2, 3))
        plans = []
        for number in range(1, count + 1):
            # The first serves everything, so that no queue is left without a worker.
            served = handled if number == 1 or self._chance(0.6) else self.random.sample(handled, 1)
            handlers = tuple(self._handler(queue) for queue in served)
            relays = (RelayPlan(relayed, handled[0]),) if relayed is not None and number <= 2 else ()
            plans.append(
                ProcessPlan(
                    f"worker-{number}", f"machine-{self.random.randint(1, 2)}", handlers, relays,
                    # It polls every second, which costs more than all else: some scenarios suffice.
                    promoter=self._chance(0.15), retry_budget=self.random.choice((5.0, 30.0, 120.0)),
                )
            )  # fmt: skip
        for number in range(1, self.random.choice((1, 2)) + 1):
            budget = self.random.choice((5.0, 30.0, 120.0))
            plans.append(ProcessPlan(f"publisher-{number}", f"machine-{number + 2}", retry_budget=budget))
        return tuple(plans)

    def _handler(self, queue: str) -> HandlerPlan:
        in_thread = self._chance(0.2)
        return HandlerPlan(
            queue,
            concurrency=self.random.choice((1, 2, 5)),
            kind="thread" if in_thread else "async",
            attempts=self.random.choice((1, 3, 5)),
            retry_seconds=self.random.choice((0.1, 1.0, 4.0)),
            timeout=None if in_thread else self.random.choice((None, None, 20.0)),
        )

    def _schedules(self) -> tuple[SchedulePlan, ...]:
        if not self._chance(0.5):
            return ()
        queue = self.random.choice(self.queues).name
        every = self.random.choice((7.0, 20.0, 60.0))
        missed = self.random.choice(("skip", "once", "3"))
        return (SchedulePlan("tick", queue, every, missed, self.random.choice((5.0, 60.0))),)

    # ---- messages ----------------------------------------------------------------------------------------

    def _label(self) -> str:
        self.numbers += 1
        return f"m{self.numbers}"

    def _runs(self, depth: int = 0) -> tuple[Run, ...]:
        count = self.random.choice((0, 1, 1, 1, 2, 3))
        runs = tuple(self._run(depth) for _ in range(count))
        if runs and runs[-1].kind in ("snooze", "reschedule", "hang", "publish"):
            # The last run is repeated: a message must come to an end.
            runs += (Run("ok"),)
        return runs

    def _run(self, depth: int) -> Run:
        kinds = list(RUN_WEIGHTS)
        kind = self.random.choices(kinds, [RUN_WEIGHTS[one] for one in kinds])[0]
        if kind in ("then", "publish") and depth >= 2:
            kind = "ok"
        lease = self.random.choice([one or 5.0 for one in self.leases.values()])
        seconds = self.random.choice((0.0, 0.05, 0.3, 1.0, 0.4 * lease, 1.5 * lease))
        after = self.random.choice((0.0, 0.5, 5.0, 20.0)) if kind in ("retry", "snooze", "reschedule") else 0.0
        if kind not in ("then", "publish"):
            return Run(kind, round(seconds, 3), after)
        queue = self.random.choice(self.queues).name
        return Run(kind, round(seconds, 3), after, queue, self._label(), self._runs(depth + 1))

    def _publishes(self, processes: Sequence[ProcessPlan]) -> None:
        publishers = [plan.name for plan in processes if not plan.handlers and not plan.relays]
        count = self.random.randint(6, 12) + round(self.length / 20)
        chains: list[str] = []
        for at in sorted(self._moment(1.0) for _ in range(count)):
            who, queue = self.random.choice(publishers), self.random.choice(self.queues).name
            if self._chance(0.08):
                self._publish_many(at, who, queue)
                continue
            label = self._label()
            arguments: dict[str, Any] = {"queue": queue, "label": label}
            runs = self._runs()
            if runs:
                arguments["runs"] = [pack_run(run) for run in runs]
            self._options(arguments, chains)
            self.labels.append((queue, label))
            self.steps.append(Step(at, who, "publish", arguments))
            if arguments.get("chain"):
                chains.append(label)
                if self._chance(0.7):
                    wait = Step(at + 1.0, who, "wait_chain", {"label": label, "timeout": 200.0})
                    self.steps.append(wait)
            elif self._chance(0.15):
                self.steps.append(Step(at + 1.0, who, "wait_result", {"label": label, "timeout": 120.0}))
            if arguments.get("key") and self._chance(0.5):
                self._publish_key_again(at, publishers, arguments)
        if self._chance(0.3):
            self.steps += [
                Step(
                    self._moment(), publishers[0], "receive", {"queue": self.queues[0].name, "wait": 8.0, "seconds": s}
                )
                for s in (0.1, 5.0)
            ]

    def _options(self, arguments: dict[str, Any], chains: list[str]) -> None:
        if self._chance(0.3):
            arguments["key"] = f"key-{self.random.randint(1, 4)}"
            arguments["on_conflict"] = self.random.choice(("keep", "keep", "replace", "extend", "error"))
            if self._chance(0.3):
                arguments["window"] = self.random.choice((5.0, 60.0))
        elif chains and self._chance(0.25):
            arguments["after"] = self.random.sample(chains, min(len(chains), self.random.choice((1, 2))))
        elif self._chance(0.25):
            arguments["chain"] = True
        if self._chance(0.25):
            arguments["delay"] = self.random.choice((0.5, 3.0, 10.0, 45.0))
        if self._chance(0.2):
            arguments["priority"] = self.random.choice((1, 9))
        if self._chance(0.1):
            arguments["size"] = 20_000
        if self._chance(0.1):
            arguments["group"] = self.random.choice(("a", "b"))

    def _publish_key_again(self, at: float, publishers: list[str], first: dict[str, Any]) -> None:
        """The same key once more, while the first is waiting or running."""
        again = {**first, "label": self._label(), "on_conflict": self.random.choice(("keep", "replace", "extend"))}
        again["runs"] = [pack_run(run) for run in self._runs()]
        pause = self.random.choice((0.0, 0.001, 0.01, 0.5, 2.0))
        self.steps.append(Step(round(at + pause, 3), self.random.choice(publishers), "publish", again))

    def _publish_many(self, at: float, who: str, queue: str) -> None:
        messages = []
        for _ in range(self.random.choice((2, 5, 12))):
            message: dict[str, Any] = {"label": self._label()}
            if self._chance(0.3):
                message["runs"] = [pack_run(run) for run in self._runs()]
            messages.append(message)
            self.labels.append((queue, message["label"]))
        self.steps.append(Step(at, who, "publish_many", {"queue": queue, "messages": messages}))
        if self._chance(0.4):
            # Another publisher at the same moment: what is full must be full for both.
            other = {"queue": queue, "label": self._label()}
            self.steps.append(Step(at, "publisher-1", "publish", other))

    # ---- what interferes ---------------------------------------------------------------------------------

    def _operator(self, processes: Sequence[ProcessPlan]) -> None:
        for _ in range(self.random.choice((0, 1, 3, 6))):
            at, queue = self._moment(), self.random.choice(self.queues)
            match self.random.choice(("pause", "configure", "purge", "cancel", "cancel", "redrive", "schedule")):
                case "pause":
                    seconds = self.random.choice((2.0, 20.0))
                    self.steps.append(Step(at, OPERATOR, "pause", {"queue": queue.name}))
                    self.steps.append(Step(at + seconds, OPERATOR, "resume", {"queue": queue.name}))
                case "configure":
                    change = {"queue": queue.name, "settings": self._change(queue)}
                    self.steps.append(Step(at, OPERATOR, "configure", change))
                case "purge":
                    state = self.random.choice(("ready", "delayed", "dead", "waiting"))
                    self.steps.append(Step(at, OPERATOR, "purge", {"queue": queue.name, "state": state}))
                case "cancel" if self.labels:
                    self._cancel()
                case "redrive":
                    self.steps.append(Step(at, OPERATOR, "redrive", {"queue": queue.name}))
                case "schedule":
                    verb = self.random.choice(("trigger_schedule", "pause_schedule", "resume_schedule"))
                    self.steps.append(Step(at, OPERATOR, verb, {"name": "tick"}))
        # Handlers under way are asked to stop now and then.
        for step in [one for one in self.steps if one.action == "publish" and self._chance(0.04)]:
            self._cancel_soon_after(step)

    def _cancel(self) -> None:
        queue, label = self.random.choice(self.labels)
        step = next((one for one in self.steps if one.arguments.get("label") == label), None)
        at = self._moment() if step is None else step.at + self.random.choice((0.2, 1.0, 5.0))
        self.steps.append(Step(round(at, 3), OPERATOR, "cancel", {"queue": queue, "label": label}))

    def _cancel_soon_after(self, step: Step) -> None:
        at = round(step.at + self.random.choice((0.1, 0.5, 3.0)), 3)
        arguments = {"queue": step.arguments["queue"], "label": step.arguments["label"]}
        self.steps.append(Step(at, OPERATOR, "cancel", arguments))

    def _change(self, queue: QueueSetting) -> dict[str, Any]:
        if self.leases[queue.name] is not None and self._chance(0.4):
            return {"lease": self.random.choice(LEASES)}
        if "max_pending" in queue.settings:
            return {"max_pending": self.random.choice((1, 3, 20))}
        if "max_running" in queue.settings:
            return {"max_running": self.random.choice((1, 2, 5))}
        return {"max_deliveries": self.random.choice((1, 3, 8))}

    def _workers_stop(self, processes: Sequence[ProcessPlan]) -> None:
        for plan in processes:
            if plan.handlers and self._chance(0.3):
                at, timeout = self._moment(), self.random.choice((0.1, 2.0, 10.0))
                self.steps.append(Step(at, plan.name, "stop", {"timeout": timeout}))
                self.steps.append(Step(round(at + timeout + 15.0, 3), plan.name, "start"))

    def _faults(self, processes: Sequence[ProcessPlan]) -> None:
        count = self.random.choice((0, 1, 2, 4, 8)) * max(1, round(self.length / 500))
        calm = [self._moment() for _ in range(1 + round(self.length / 600))]
        kinds = list(FAULT_WEIGHTS)
        chosen = self.random.sample(kinds, self.random.randint(1, 5))
        for _ in range(count):
            at = self._moment()
            if any(moment <= at < moment + CALM_SECONDS for moment in calm):
                continue
            kind = self.random.choices(chosen, [FAULT_WEIGHTS[one] for one in chosen])[0]
            who = self.random.choice([plan.name for plan in processes for _ in range(3 if plan.handlers else 1)])
            if kind in ("store_restart", "clock_step"):
                who = STORE
            self.steps.append(Step(at, who, kind, self._fault(kind) | self._point(kind)))

    def _point(self, kind: str) -> dict[str, Any]:
        """Where a fault of a process begins, if not at a moment: as a request or an answer passes."""
        if kind in ("store_restart", "clock_step", "wall_clock_step") or not self._chance(
            0.7 if kind == "crash" else 0.2
        ):
            return {}
        return {"point": self.random.choice(POINTS), "count": self.random.choice((1, 1, 2, 3))}

    def _fault(self, kind: str) -> dict[str, Any]:
        lease = self.random.choice([one or 5.0 for one in self.leases.values()])
        seconds = round(lease * self.random.choice(FAULT_LEASES), 3)
        if self._chance(0.12):
            seconds = self.random.choice(LONG_FAULT_SECONDS)
        share = self.random.choice((0.1, 0.4, 1.0))
        match kind:
            case "crash":
                return {"after": self.random.choice((0.5, 5.0, 40.0))}
            case "freeze" | "stall" | "suspend":
                return {"seconds": seconds}
            case "clone":
                return {}
            case "partition":
                ways = ("both", "both", "to_store", "from_store", "refused")
                return {"seconds": seconds, "way": self.random.choice(ways)}
            case "slow_link":
                speed = self.random.choice((None, 5_000.0, 50_000.0))
                slow = {"seconds": seconds, "delay": self.random.choice((0.0, 0.3, 1.5))}
                return slow if speed is None else slow | {"bytes_per_second": speed}
            case "late_replies" | "reorder":
                delay = round(lease * self.random.choice((0.1, 0.6, 1.2)), 3)
                return {"seconds": seconds, "share": share, "delay": delay}
            case "store_restart":
                lose = self.random.choice((0.0, 0.0, 0.5, 3.0))
                return {"down": self.random.choice((0.5, 5.0, 40.0))} | ({"lose": lose} if lose else {})
            case "clock_step" | "wall_clock_step":
                return {"by": self.random.choice((-3600.0, -30.0, -2.0, 2.0, 30.0, 3600.0))}
        return {"seconds": seconds, "share": share}

    # ---- scenes: what has to come together to mean something ---------------------------------------------------

    def _scene(self, processes: Sequence[ProcessPlan]) -> None:
        """A few steps that belong together: each part alone would hardly ever meet the others."""
        workers = [plan for plan in processes if plan.handlers]
        worker = self.random.choice(workers)
        publisher = self.random.choice([plan for plan in processes if not plan.handlers and not plan.relays])
        queue = self.random.choice(worker.handlers).queue
        lease = self.leases[queue] or 5.0
        at = self._moment(20.0)
        scene = self.random.choice(
            (
                self._cut_off_at_work,
                self._cut_off_at_work,
                self._cut_off_at_work,
                self._answered_late,
                self._answered_late,
                self._stopped_at_work,
                self._asleep_in_a_call,
                self._unheard,
                self._gone_at_work,
                self._crowd,
                self._restarted_at_work,
            )
        )
        # One of the workers of the queue, or all of them.
        serving = [plan.name for plan in workers if any(handler.queue == queue for handler in plan.handlers)]
        chosen = serving if self._chance(0.5) else [worker.name]
        scene(at, chosen, publisher.name, queue, lease)

    def _some_messages(self, at: float, who: str, queue: str, seconds: float, kinds: Sequence[RunKind]) -> None:
        for number in range(self.random.choice((1, 3, 8))):
            kind = self.random.choice(kinds)
            sent_on = (queue, self._label()) if kind == "then" else ("", "")
            run = Run(kind, round(seconds, 3), 0.0, *sent_on)
            arguments = {"queue": queue, "label": self._label(), "runs": [pack_run(run)]}
            self.steps.append(Step(round(at + number * 0.01, 3), who, "publish", arguments))

    def _cut_off_at_work(self, at: float, workers: list[str], publisher: str, queue: str, lease: float) -> None:
        """A worker is cut off for longer than its lease while handlers run, and some of them end meanwhile."""
        self._some_messages(
            at, publisher, queue, lease * self.random.choice((0.5, 3.0)), ("ok", "then", "fail", "retry")
        )
        fault = self.random.choice(("partition", "partition", "freeze", "stall", "suspend"))
        arguments: dict[str, Any] = {"seconds": round(lease * self.random.choice((1.2, 2.0)), 3)}
        if fault == "partition":
            arguments["way"] = self.random.choice(("both", "to_store", "from_store", "refused"))
        for worker in workers:
            self.steps.append(Step(round(at + 0.3, 3), worker, fault, dict(arguments)))

    def _answered_late(self, at: float, workers: list[str], publisher: str, queue: str, lease: float) -> None:
        """Answers reach a worker so late that leases in them are over."""
        for worker in workers:
            late = {"seconds": lease, "share": 1.0, "delay": round(3 * lease, 3)}
            self.steps.append(Step(at, worker, "late_replies", late))
        for pause in (0.1, 0.3, 0.6):
            self._some_messages(at + pause * lease, publisher, queue, lease, ("ok",))

    def _stopped_at_work(self, at: float, workers: list[str], publisher: str, queue: str, lease: float) -> None:
        """A worker is stopped in order while it has more than it can end in time."""
        self._some_messages(at, publisher, queue, lease, ("ok",))
        self._some_messages(at + 0.5, publisher, queue, 0.0, ("ok",))
        for worker in workers:
            self.steps.append(Step(round(at + 0.5, 3), worker, "stop", {"timeout": 0.2}))
            self.steps.append(Step(round(at + 3 * lease, 3), worker, "start"))

    def _asleep_in_a_call(self, at: float, workers: list[str], publisher: str, queue: str, lease: float) -> None:
        """A machine sleeps for longer than the store remembers a call whose answer was lost."""
        who = self.random.choice((workers[0], publisher))
        self.steps.append(Step(at, who, "lose_replies", {"seconds": 1.0, "share": 1.0}))
        self._some_messages(at + 0.05, publisher, queue, 0.0, ("ok",))
        fault = self.random.choice(("suspend", "suspend", "freeze"))
        self.steps.append(Step(round(at + 0.2, 3), who, fault, {"seconds": 400.0}))

    def _unheard(self, at: float, workers: list[str], publisher: str, queue: str, lease: float) -> None:
        """No wake-up reaches the workers."""
        for worker in workers:
            self.steps.append(Step(at, worker, "lose_notifications", {"seconds": 30.0, "share": 1.0}))
        self._some_messages(at + 1.0, publisher, queue, 0.0, ("ok",))

    def _gone_at_work(self, at: float, workers: list[str], publisher: str, queue: str, lease: float) -> None:
        """A worker crashes while handlers run; it is back before or after their leases end."""
        self._some_messages(at, publisher, queue, lease, ("ok", "then"))
        after = round(lease * self.random.choice((0.1, 2.0)), 3)
        for worker in workers:
            self.steps.append(Step(round(at + 0.3, 3), worker, "crash", {"after": after} | self._point("crash")))

    def _gone_beside_another(self, processes: Sequence[ProcessPlan]) -> None:
        """A worker crashes at work, while another one waits for the end of its leases, over a link that is fast.

        So a claim comes to the millisecond in which they end.
        """
        serving = {
            queue.name: [plan.name for plan in processes if any(one.queue == queue.name for one in plan.handlers)]
            for queue in self.queues
        }
        for queue, workers in serving.items():
            if len(workers) > 1 and self.leases[queue] is not None:
                at, lease = self._moment(20.0), self.leases[queue] or 5.0
                for pause in (0.0, 0.1, 0.2):
                    self._some_messages(at + pause, "publisher-1", queue, 0.5 * lease, ("ok",))
                after = {"after": round(3 * lease, 3)}
                self.steps.append(Step(round(at + 0.6, 3), self.random.choice(workers), "crash", after))

    def _crowd(self, at: float, workers: list[str], publisher: str, queue: str, lease: float) -> None:
        """Many publish at once."""
        key = self.random.choice((None, "crowd"))
        for who in (publisher, "publisher-1", *workers):
            for _ in range(4):
                arguments: dict[str, Any] = {"queue": queue, "label": self._label()}
                if key is not None:
                    arguments["key"] = key
                self.steps.append(Step(at, who, "publish", arguments))

    def _restarted_at_work(self, at: float, workers: list[str], publisher: str, queue: str, lease: float) -> None:
        """The store is restarted while handlers run, for longer than their leases or not."""
        self._some_messages(at, publisher, queue, lease, ("ok", "fail"))
        down = round(lease * self.random.choice((0.1, 1.5)), 3)
        self.steps.append(Step(round(at + 0.4, 3), STORE, "store_restart", {"down": down}))


def with_expiries(scenario: Scenario) -> Scenario:
    """Give an expiry to some messages of some scenarios.

    By chances of its own, so that all else is drawn as without them: seeds that are known to find something still do.
    """
    random = Random(f"waypost expiries {scenario.seed}")
    if random.random() < 0.5:
        return scenario

    def soon() -> float:
        return random.choice(EXPIRES_SECONDS)

    def expiring_run(packed: list[Any]) -> list[Any]:
        run = unpack_run(packed)
        next_runs = tuple(unpack_run(expiring_run(pack_run(one))) for one in run.next_runs)
        expires = 0.0
        if run.kind in ("then", "publish", "reschedule") and random.random() < 0.3:
            expires = soon() + (run.after if run.kind == "reschedule" else 0.0)
        return pack_run(replace(run, next_runs=next_runs, expires=expires))

    def expiring(step: Step) -> Step:
        if step.action not in ("publish", "publish_many"):
            return step
        arguments = dict(step.arguments)
        if "runs" in arguments:
            arguments["runs"] = [expiring_run(one) for one in arguments["runs"]]
        if random.random() < 0.3:
            arguments["expires"] = round(arguments.get("delay", 0.0) + soon(), 3)
        return replace(step, arguments=arguments)

    schedules = tuple(replace(one, expires=soon()) if random.random() < 0.5 else one for one in scenario.schedules)
    steps = [expiring(step) for step in scenario.steps]
    if random.random() < 0.5:
        steps = sorted((*steps, *_lapsed_with_a_key(scenario, random)), key=lambda step: step.at)
    return replace(scenario, schedules=schedules, steps=tuple(steps))


def _lapsed_with_a_key(scenario: Scenario, random: Random) -> list[Step]:
    """A message lapses in a paused queue, mostly before a poll ends it; then another one is published under its key."""
    at = round(random.uniform(10.0, max(step.at for step in scenario.steps)), 3)
    queue = random.choice(scenario.queues).name
    publisher = next(plan.name for plan in scenario.processes if not plan.handlers and not plan.relays)
    first = {"queue": queue, "label": "lapsing", "key": "lapsing", "expires": 0.3}
    second = {"queue": queue, "label": "next", "key": "lapsing", "on_conflict": random.choice(("keep", "error"))}
    return [
        Step(at, OPERATOR, "pause", {"queue": queue}),
        Step(round(at + 0.1, 3), publisher, "publish", first),
        Step(round(at + 1.5, 3), publisher, "publish", second),
        Step(round(at + 2.5, 3), OPERATOR, "resume", {"queue": queue}),
    ]


def draw(seed: int, *, minutes: float | None = None) -> Scenario:
    """The scenario of a seed; `minutes` sets how long messages and faults keep coming."""
    return Drawing(seed, minutes=minutes).draw()
