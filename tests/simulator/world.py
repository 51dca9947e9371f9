"""A world of machines, processes, links and one store, in which a scenario happens. A run depends on its seed alone."""

from __future__ import annotations

import gc
import warnings
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random
from typing import Any

from tests.simulator import clients
from tests.simulator.history import FaultBegan, FaultEnded, History, Recorder, ReplyArrived, RunEnded, StoreStep
from tests.simulator.loop import VirtualTimeLoop
from tests.simulator.network import Link
from tests.simulator.play import Player, Registry
from tests.simulator.process import Machine, SimulatedProcess, simulated_environment
from tests.simulator.scenario import OPERATOR, STORE, ProcessPlan, Scenario, Step
from tests.simulator.store_node import STORE_NAME, StoreNode
from tests.simulator.threads import Threads
from waypost.store.memory.store import MemoryStore

#: Faults of the link of a process.
LINK_FAULTS = frozenset((
    "partition", "slow_link", "lose_requests", "lose_replies", "late_replies", "double_requests", "reorder",
    "lose_notifications",
))  # fmt: skip
#: How long calls of the operator are repeated.
OPERATOR_BUDGET = 120.0


class RunningProcess:
    """A process, and what runs in it."""

    def __init__(self, plan: ProcessPlan | None, process: SimulatedProcess, link: Link, player: Player) -> None:
        self.plan = plan
        self.process = process
        self.link = link
        self.player = player


class World:
    """Builds what a scenario needs and runs it. `observe_store` is called after each recorded step of the store."""

    def __init__(
        self, scenario: Scenario, *, observe_store: Callable[[StoreStep, MemoryStore], None] | None = None
    ) -> None:
        self.scenario = scenario
        self._seed = f"waypost/{scenario.seed}"
        self.random = Random(self._seed)
        self.loop = VirtualTimeLoop(Random(f"{self._seed}/loop"))
        self.threads = Threads(self.loop)
        self.recorder = Recorder(lambda: self.loop.now)
        self.node = StoreNode(self.loop, self.recorder, observe_store, has_blocking_waits=scenario.blocking_waits)
        self.labels = Registry()
        self.running: dict[str, RunningProcess] = {}
        self._machines: dict[str, Machine] = {}
        self._processes: list[SimulatedProcess] = []
        self._faults = 0

    def run(self) -> History:
        """Run the scenario to its end."""
        with ExitStack() as stack:
            stack.enter_context(rare_collections())
            stack.enter_context(simulated_environment(self.loop, self.threads, self.random))
            stack.callback(self._close)
            self._begin()
            self.loop.run_until_moment(self.scenario.length_seconds)
            self.recorder.add(RunEnded, STORE_NAME, self.node.now_ms(), self.node.states())
            return self.recorder.history  # the one that is closed with the world is another

    def _begin(self) -> None:
        operator = self._start(OPERATOR, None, "operations")
        self._spawn(operator, self._set_up, operator.player)
        for step in self.scenario.steps:
            if step.action == "store_restart" and step.arguments.get("lose"):
                self.loop.at(max(0.0, step.at - step.arguments["lose"]), self.node.take_snapshot)
            self.loop.at(step.at, self._perform, step)

    async def _set_up(self, player: Player) -> None:
        for queue in self.scenario.queues:
            await player.perform(Step(0.0, OPERATOR, "configure", {"queue": queue.name, "settings": queue.settings}))
        for one in self.scenario.schedules:
            arguments = {
                "name": one.name, "queue": one.queue, "every": one.every, "missed": one.missed, "grace": one.grace,
                "expires": one.expires,
            }  # fmt: skip
            await player.perform(Step(0.0, OPERATOR, "save_schedule", arguments))
        for plan in self.scenario.processes:
            self.loop.at(self.loop.now, self._start, plan.name, plan, plan.machine)

    # ---- processes -----------------------------------------------------------------------------------------

    def _machine(self, name: str) -> Machine:
        if name not in self._machines:
            self._machines[name] = Machine(name, self.loop, Random(f"{self._seed}/machine/{name}"))
        return self._machines[name]

    def _start(self, name: str, plan: ProcessPlan | None, machine: str, original: str | None = None) -> RunningProcess:
        """Start a process; its client is made in it."""
        pid = len(self._processes) + 100
        process = SimulatedProcess(name, self._machine(machine), self.loop, self._seed, pid)
        self._processes.append(process)
        link = Link(
            self.loop, process, self.node, Random(f"{self._seed}/link/{name}/{pid}"), self.scenario.delay_range,
            self._on_reply,
        )  # fmt: skip
        before, self.loop.current = self.loop.current, process
        try:
            budget = OPERATOR_BUDGET if plan is None else plan.retry_budget
            post = clients.open_client(self.node, link, self.threads, retry_budget=budget)
            if plan is not None:
                clients.add_relays(post, plan, self.node, link, self.threads)
            player = Player(name, plan, post, self.recorder, self.labels)
            player.sleep_in_thread = self.threads.sleep
        finally:
            self.loop.current = before
        self.running[name] = running = RunningProcess(plan, process, link, player)
        if player.has_worker and original is None:
            self._spawn(running, player.start)
        return running

    def _on_reply(self, who: str, step: int) -> None:
        self.recorder.add(ReplyArrived, who, step)

    def _spawn(self, running: RunningProcess, begin: Callable[..., Coroutine[Any, Any, None]], *given: Any) -> None:
        """Run a coroutine as a task of a process; it is made there, if the process comes to that."""
        self.loop.soon(running.process, lambda: self.loop.create_task(begin(*given)))

    # ---- steps and faults ----------------------------------------------------------------------------------

    def _perform(self, step: Step) -> None:
        if step.is_fault:
            if step.who == STORE:
                self._store_fault(step)
            else:
                self._process_fault(step)
            return
        running = self.running.get(step.who)
        if running is not None and not running.process.dead:
            self._spawn(running, running.player.perform, step)

    def _begin_fault(self, step: Step) -> int:
        self._faults += 1
        self.recorder.add(FaultBegan, step.who, self._faults, step.action, dict(step.arguments))
        return self._faults

    def _end_fault(self, number: int, step: Step, end: Callable[[], object]) -> None:
        end()
        self.recorder.add(FaultEnded, step.who, number, step.action)

    def _fault(self, step: Step, end: Callable[[], object], seconds: float) -> int:
        """Record a fault that ends after a while."""
        number = self._begin_fault(step)
        self.loop.at(self.loop.now + seconds, self._end_fault, number, step, end)
        return number

    def _store_fault(self, step: Step) -> None:
        if step.action == "clock_step":
            number = self._begin_fault(step)
            self.node.clock_error += step.arguments["by"]
            self._end_fault(number, step, lambda: None)
            return
        lose = bool(step.arguments.get("lose"))
        self.node.go_down()
        self._fault(step, lambda: self.node.come_up(from_snapshot=lose), step.arguments.get("down", 1.0))

    def _process_fault(self, step: Step) -> None:
        running = self.running.get(step.who)
        if running is None or running.process.dead:
            return
        if "point" in step.arguments:
            self._wait_for_point(running, step)
            return
        process, seconds = running.process, step.arguments.get("seconds", 0.0)
        if step.action in LINK_FAULTS:
            link = running.link
            number = self._faults + 1
            link.begin_fault(number, step.action, step.arguments)
            self._fault(step, lambda: link.end_fault(number), seconds)
        elif step.action == "freeze":
            process.freeze()
            self._fault(step, process.thaw, seconds)
        elif step.action == "stall":
            process.stall()
            self._fault(step, process.end_stall, seconds)
        elif step.action == "suspend":
            process.machine.suspend()
            self._fault(step, process.machine.resume, seconds)
        elif step.action == "wall_clock_step":
            process.machine.wall_error += step.arguments["by"]
            self._fault(step, lambda: None, 0.0)
        elif step.action == "crash":
            self._crash(running, step)
        elif step.action == "clone":
            self._clone(running, step)

    def _wait_for_point(self, running: RunningProcess, step: Step) -> None:
        """Let a fault begin as one of the next requests or answers of a process passes."""
        point, link = step.arguments["point"], running.link
        left = step.arguments.get("count", 1)
        fault = replace(
            step, arguments={name: value for name, value in step.arguments.items() if name not in ("point", "count")}
        )

        def passes() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                setattr(link, point, None)
                self._process_fault(fault)

        setattr(link, point, passes)

    def _crash(self, running: RunningProcess, step: Step) -> None:
        after = step.arguments.get("after")
        number = self._begin_fault(step)
        running.process.crash()
        if not running.link.state.cut_to_store:
            self.node.forget_process(running.process)
        if after is not None and running.plan is not None:
            plan = running.plan

            def restart() -> None:
                self._start(running.player.name, plan, plan.machine)

            self.loop.at(self.loop.now + after, self._end_fault, number, step, restart)

    def _clone(self, running: RunningProcess, step: Step) -> None:
        """A copy of a process goes on beside it. Handlers under way are not copied: it begins with nothing claimed."""
        number = self._begin_fault(step)
        original = running.player
        name = step.arguments.get("name", f"{original.name}+{number}")
        copy = self._start(name, running.plan, running.process.machine.name, original.name)
        copy.process.random.setstate(running.process.random.getstate())
        clients.copy_session(original.post._session, copy.player.post._session)
        copy.process.pid = running.process.pid
        worker = original.worker
        if worker is not None:
            make = copy.player.post.worker

            def copied(**options: Any) -> Any:
                made = make(**options)
                clients.copy_worker(worker, made)
                return made

            copy.player.post.worker = copied  # type: ignore[assignment,method-assign]
            self._spawn(copy, copy.player.start)
        self._end_fault(number, step, lambda: None)

    # ---- the end -------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """End what is left, silently: no code of it may change what is judged."""
        self.recorder.history, self.node.observe_store = History(), None
        self.loop.close()
        # `finally` blocks may begin calls. They find a loop that is closed; without any, asyncio would make one.
        events._set_running_loop(self.loop)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.threads.end_all()
                for process in self._processes:
                    process.close_tasks()
                for generator in self.loop.take_generators():
                    generator.aclose().close()
        finally:
            events._set_running_loop(None)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the garbage collector run seldom: a run makes many objects that stay, and few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run(scenario: Scenario, *, observe_store: Callable[[StoreStep, MemoryStore], None] | None = None) -> History:
    """Run a scenario in virtual time."""
    return World(scenario, observe_store=observe_store).run()
