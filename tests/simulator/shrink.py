"""Make a failing scenario short: leave out what the finding does not need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulator.scenario import FAULTS, Scenario, Step, labels_of

#: By how much the times of a scenario may be cut at its end.
QUIET_SECONDS = (60.0, 120.0, 250.0)

StillFails = Callable[[Scenario], bool]


class Shrinker:
    """Tries shorter scenarios as long as one of them still fails, so many or so long at most."""

    def __init__(self, still_fails: StillFails, *, tries: int = 400, seconds: float | None = None) -> None:
        self._still_fails = still_fails
        self._left = tries
        self._until = None if seconds is None else time.monotonic() + seconds
        self.tries = 0

    def shrink(self, scenario: Scenario, *, until: float | None = None) -> Scenario:
        """The shortest that was found. `until`: nothing that begins later can matter."""
        if until is not None:
            scenario = self._first_that_fails(scenario, [scenario.with_steps(steps_before(scenario, until))])
        while not self._is_over:
            shorter = self._drop_steps(scenario)
            shorter = self._first_that_fails(shorter, without_processes(shorter))
            shorter = self._first_that_fails(shorter, simpler(shorter))
            if shorter == scenario:
                break
            scenario = shorter
        return scenario

    @property
    def _is_over(self) -> bool:
        return self._left <= 0 or (self._until is not None and time.monotonic() > self._until)

    def _fails(self, scenario: Scenario) -> bool:
        if self._is_over:
            return False
        self._left -= 1
        self.tries += 1
        return self._still_fails(scenario)

    def _first_that_fails(self, scenario: Scenario, others: Iterator[Scenario] | list[Scenario]) -> Scenario:
        for other in others:
            if other != scenario and self._fails(other):
                return other
        return scenario

    def _drop_steps(self, scenario: Scenario) -> Scenario:
        """Leave out steps: first halves, then ever smaller parts."""
        size = max(1, len(scenario.steps) // 2)
        while size >= 1 and not self._is_over:
            at, dropped = 0, False
            while at < len(scenario.steps) and not self._is_over:
                rest = scenario.with_steps(scenario.steps[:at] + scenario.steps[at + size :])
                if self._fails(rest):
                    scenario, dropped = rest, True
                else:
                    at += size
            if size == 1 and not dropped:
                break
            size = max(1, size // 2) if size > 1 else (1 if dropped else 0)
        return scenario


def steps_before(scenario: Scenario, moment: float) -> tuple[Step, ...]:
    """The steps up to a moment."""
    return tuple(step for step in scenario.steps if step.at <= moment)


def without_processes(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios without one of the processes, its steps and its faults."""
    for plan in scenario.processes:
        processes = tuple(one for one in scenario.processes if one is not plan)
        steps = tuple(step for step in scenario.steps if step.who != plan.name)
        fewer = replace(scenario, processes=processes, steps=steps)
        if is_still_served(scenario, fewer):
            yield fewer


def simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios without schedules, without a queue that nothing names, with fewer settings, with a shorter end."""
    if scenario.schedules:
        yield replace(scenario, schedules=())
    for queue in scenario.queues:
        if len(scenario.queues) > 1 and not is_used(scenario, queue.name):
            yield replace(scenario, queues=tuple(one for one in scenario.queues if one is not queue))
    for index, queue in enumerate(scenario.queues):
        for name in queue.settings:
            if name not in ("lease", "journal"):
                settings = {key: value for key, value in queue.settings.items() if key != name}
                changed = replace(queue, settings=settings)
                yield replace(scenario, queues=(*scenario.queues[:index], changed, *scenario.queues[index + 1 :]))
    for index, plan in enumerate(scenario.processes):
        for handler in plan.handlers if len(plan.handlers) > 1 else ():
            fewer = replace(plan, handlers=tuple(one for one in plan.handlers if one is not handler))
            other = replace(scenario, processes=(*scenario.processes[:index], fewer, *scenario.processes[index + 1 :]))
            if is_still_served(scenario, other):
                yield other
    for seconds in QUIET_SECONDS:
        if seconds < scenario.quiet_seconds:
            yield replace(scenario, quiet_seconds=seconds)


def is_still_served(scenario: Scenario, shorter: Scenario) -> bool:
    """Whether each queue and the schedules still have their process: without it they stand still by themselves."""
    queues = [queue.name for queue in scenario.queues if scenario.is_served(queue.name)]
    has_scheduler = any(plan.handlers and plan.scheduler for plan in shorter.processes)
    return all(shorter.is_served(name) for name in queues) and (has_scheduler or not shorter.schedules)


def is_used(scenario: Scenario, queue: str) -> bool:
    """Whether a step, a handler, a relay or a schedule names a queue."""
    in_plans = any(
        queue
        in [*(one.queue for one in plan.handlers), *(name for one in plan.relays for name in (one.source, one.target))]
        for plan in scenario.processes
    )
    in_schedules = any(one.queue == queue for one in scenario.schedules)
    return in_plans or in_schedules or any(queue in str(step.arguments) for step in scenario.steps)


def size_of(scenario: Scenario) -> str:
    """How large a scenario is, in words."""
    faults = sum(step.action in FAULTS for step in scenario.steps)
    messages = sum(1 for step in scenario.steps for _ in labels_of(step))
    return f"{len(scenario.steps)} steps ({messages} messages, {faults} faults), {len(scenario.processes)} processes"
