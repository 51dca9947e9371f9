"""The same scenarios against real stores, in real time and with real processes: for the states that only they have.

    make simulate STORE=postgres SEED=3        sqlite, valkey or postgres

A process of the scenario is a process of the machine, behind a proxy of its own where its store is a server. Kills,
stops, partitions and lost answers are real; faults that cannot be made here (clocks, sleeping machines, copies) are
left out and named. Afterwards the journal of each queue is followed event by event with the rules of the simulator.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.fault.proxy import Proxy
from tests.simulator.checker import HistoryChecker
from tests.simulator.draw import draw
from tests.simulator.history import Answered, Happening, History, Recorder, StoreStep, from_line
from tests.simulator.play import Player, Registry
from tests.simulator.records import Finding
from tests.simulator.scenario import (
    OPERATOR,
    OPERATOR_VERBS,
    STORE,
    ProcessPlan,
    Run,
    Scenario,
    Step,
    pack_run,
    to_json,
    unpack_run,
)
from tests.simulator.step_rules import COUNTED, StepChecker
from waypost import AsyncWaypost
from waypost.policy import PAGE_MAX, policy_changes
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import EmbeddedServer, ValkeyServer
from waypost.values import EventRecord, Published

STORES = ("sqlite", "valkey", "postgres")
#: By how much the times of a drawn scenario are shortened, and the shortest lease that a loaded machine can keep.
FACTOR = 0.05
LEASE_SECONDS_MIN = 1.0
#: After the last step everything must have ended within this.
END_SECONDS = 90.0
#: What a request that does something has in it.
REQUESTS = {"valkey": b"EVALSHA", "postgres": b'"($1|waypost_'}
STOPS = ("freeze", "stall", "suspend")
#: Arguments that are times.
TIMES = ("seconds", "delay", "expires", "window", "timeout", "wait", "down", "after")


def compress(scenario: Scenario, factor: float = FACTOR) -> Scenario:
    """The same scenario in a shorter time."""

    def scale(value: Any) -> Any:
        return round(value * factor, 3) if isinstance(value, int | float) and not isinstance(value, bool) else value

    def shorter(step: Step) -> Step:
        given = {name: scale(value) if name in TIMES else value for name, value in step.arguments.items()}
        if "runs" in given:
            given["runs"] = [shorter_run(one) for one in given["runs"]]
        if "messages" in given:
            given["messages"] = [
                {**one, "runs": [shorter_run(run) for run in one.get("runs", [])]} for one in given["messages"]
            ]
        if "settings" in given:
            given["settings"] = settings_of(given["settings"])
        if step.action in ("wait_result", "wait_chain"):
            given["timeout"] = END_SECONDS
        return Step(round(step.at * factor, 3), step.who, step.action, given)

    def shorter_run(packed: list[Any]) -> list[Any]:
        run = unpack_run(packed)
        kind = "ok" if run.kind == "hang" else run.kind
        next_runs = tuple(unpack_run(shorter_run(pack_run(one))) for one in run.next_runs)
        after, expires = scale(run.after), scale(run.expires)
        return pack_run(Run(kind, scale(run.seconds), after, run.queue, run.label, next_runs, expires))

    def settings_of(settings: dict[str, Any]) -> dict[str, Any]:
        lease = settings.get("lease")
        return settings if lease is None else {**settings, "lease": max(LEASE_SECONDS_MIN, scale(lease))}

    return replace(
        scenario,
        queues=tuple(replace(one, settings=settings_of(one.settings)) for one in scenario.queues),
        schedules=tuple(
            replace(one, every=max(1.0, scale(one.every)), expires=scale(one.expires)) for one in scenario.schedules
        ),
        steps=tuple(shorter(step) for step in scenario.steps),
        processes=tuple(
            replace(plan, retry_budget=30.0, handlers=tuple(replace(one, timeout=None) for one in plan.handlers))
            for plan in scenario.processes
        ),
        quiet_seconds=END_SECONDS,
    )


@dataclass(slots=True)
class RealRun:
    """What a run against a real store showed."""

    store: str
    findings: list[Finding]
    events: int
    faults: Counter[str]
    left_out: Counter[str]


@dataclass(slots=True)
class RealProcess:
    """A process of the machine, and its proxy."""

    plan: ProcessPlan
    url: str
    history: Path
    proxy: Proxy | None
    running: subprocess.Popen[bytes] | None = None


@dataclass
class RealWorld:
    """Runs one scenario against one store."""

    scenario: Scenario
    store: str
    stack: ExitStack
    faults: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.namespace = fresh_namespace()
        self.server: EmbeddedServer | None = None
        self.url = f"sqlite:///{self.folder / 'scenario.db'}"
        if self.store == "valkey":
            self.server = self.stack.enter_context(ValkeyServer(appendonly=True))
        elif self.store == "postgres":
            self.server = self.stack.enter_context(PostgresServer())
        if self.server is not None:
            self.url = self.server.url
        if self.store == "postgres":
            migrate(self.url, namespace=self.namespace)
        self.path = self.folder / "scenario.json"
        self.processes: dict[str, RealProcess] = {}
        self.began = time.time()
        self.recorder = Recorder(lambda: time.time() - self.began)

    async def run(self) -> RealRun:
        self.path.write_text(to_json(self.scenario))
        async with AsyncWaypost(self.url, namespace=self.namespace) as post:
            operator = Player(OPERATOR, None, post, self.recorder, Registry())
            for queue in self.scenario.queues:
                await post.configure(queue.name, **queue.settings)
            for plan in self.scenario.processes:
                self._add(plan)
            await self._until_ready()
            self.began = time.time()
            for process in self.processes.values():
                self._send_start(process)
            for one in self.scenario.schedules:
                rule = {"name": one.name, "queue": one.queue, "every": one.every, "missed": one.missed,
                        "expires": one.expires}  # fmt: skip
                await operator.perform(Step(0.0, OPERATOR, "save_schedule", rule))
            try:
                await asyncio.gather(*(self._perform(step, operator) for step in self.scenario.steps))
                for one in self.scenario.schedules:
                    await post.remove_schedule(one.name)
                await self._until_all_ended(post)
            finally:
                await asyncio.to_thread(self._end_processes)
            return await self._judge(post)

    # ---- processes and faults ----------------------------------------------------------------------------

    def _add(self, plan: ProcessPlan) -> None:
        proxy, url = None, self.url
        if self.server is not None:
            proxy = self.stack.enter_context(Proxy(self.server.port))
            url = url.replace(f":{self.server.port}", f":{proxy.port}")
        process = self.processes[plan.name] = RealProcess(plan, url, self.folder / f"{plan.name}.history", proxy)
        process.history.touch()
        self._start(process)

    def _start(self, process: RealProcess) -> None:
        command = [
            sys.executable, "-m", "tests.simulator.real_process", str(self.path), process.plan.name, process.url,
            self.namespace, str(process.history),
        ]  # fmt: skip
        process.running = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2])

    def _send_start(self, process: RealProcess) -> None:
        """Tell a process when the scenario began."""
        assert process.running is not None
        assert process.running.stdin is not None
        process.running.stdin.write(f"{self.began!r}\n".encode())
        process.running.stdin.flush()

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        while not all(process.history.with_suffix(".ready").exists() for process in self.processes.values()):
            if time.monotonic() > deadline:
                raise TimeoutError("the processes of the scenario did not start")
            await asyncio.sleep(0.05)

    async def _perform(self, step: Step, operator: Player) -> None:
        await asyncio.sleep(max(0.0, step.at - self.recorder.now))
        if step.who == OPERATOR and step.action in OPERATOR_VERBS:
            operator.labels.published.update(self._labels())
            await operator.perform(step)
        elif step.is_fault and step.who != STORE and self._can(step):
            self.faults[step.action] += 1
            await self._fault(step, self.processes[step.who])
        elif step.is_fault:
            self.left_out[step.action] += 1

    def _can(self, step: Step) -> bool:
        links = ("partition", "lose_replies", "lose_requests")
        return step.action in ("crash", *STOPS) or (self.server is not None and step.action in links)

    async def _fault(self, step: Step, process: RealProcess) -> None:
        seconds, running = step.arguments.get("seconds", 1.0), process.running
        if step.action == "crash" and running is not None:
            running.kill()
            await asyncio.to_thread(end, running)
            await asyncio.sleep(step.arguments.get("after", 1.0))
            if process.running is running:
                self._start(process)
                self._send_start(process)
        elif step.action in STOPS and running is not None:
            os.kill(running.pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(running.pid, signal.SIGCONT)
        elif process.proxy is not None:
            if step.action == "partition":
                (process.proxy.refuse if step.arguments.get("way") == "refused" else process.proxy.silence)()
            else:
                share = step.arguments.get("share", 0.5)
                process.proxy.drop_some(share, seed=self.scenario.seed, to=REQUESTS[self.store])
            await asyncio.sleep(seconds)
            process.proxy.heal()
            process.proxy.cut()

    def _end_processes(self) -> None:
        for process in self.processes.values():
            if process.running is not None:
                end(process.running)

    async def _until_all_ended(self, post: AsyncWaypost) -> None:
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            served = [queue.name for queue in self.scenario.queues if self.scenario.is_served(queue.name)]
            ledgers = [await post.ledger(queue) for queue in served]
            if not any(one.ready + one.delayed + one.waiting + one.leased for one in ledgers):
                return
            await asyncio.sleep(0.2)

    # ---- judging -----------------------------------------------------------------------------------------

    def _happenings(self) -> Iterator[Happening]:
        yield from self.recorder.history
        for process in self.processes.values():
            with process.history.open("rb") as file:
                # A kill may have cut the last line.
                yield from (from_line(line) for line in file if line.endswith(b"\n"))

    def _labels(self) -> dict[str, Any]:
        labels = {}
        for one in self._happenings():
            results = one.result if isinstance(one, Answered) and one.error is None else None
            for result in results if isinstance(results, list) else [results]:
                if isinstance(result, dict) and "label" in result:
                    labels[result["label"]] = Published(result["id"], result["status"], result["queue"])
        return labels

    async def _judge(self, post: AsyncWaypost) -> RealRun:
        steps = StepChecker()
        history = History(sorted(self._happenings(), key=lambda one: one.at))
        changed = {step.arguments["queue"] for step in self.scenario.steps if step.action == "configure"}
        count = 0
        for queue in self.scenario.queues:
            settings = {**queue.settings, "max_deliveries": None} if queue.name in changed else queue.settings
            steps.queue(queue.name).policy.change(policy_changes(settings))
            for step in steps_of(await read_journal(post, queue.name), self.began):
                steps.observe_store(step)
                count += len(step.events)
        findings = list(steps.findings)
        judge = HistoryChecker(self.scenario, history, steps)
        judge._check_acknowledged()
        judge._check_published_once()
        findings += judge.findings
        now = self.recorder.now
        for queue in self.scenario.queues:
            ledger = await post.ledger(queue.name)
            findings += compare_ledger(queue.name, ledger, steps, now, served=self.scenario.is_served(queue.name))
        return RealRun(self.store, findings, count, self.faults, self.left_out)


def end(process: subprocess.Popen[bytes]) -> None:
    """Close the input of a process and wait until it has ended."""
    if process.stdin is not None:
        process.stdin.close()
    process.wait(60)


async def read_journal(post: AsyncWaypost, queue: str) -> list[EventRecord]:
    """All events of a queue."""
    events: list[EventRecord] = []
    last = 0
    while (page := await post._call(post._journal_call(queue, last, PAGE_MAX))).events:
        events += page.events
        last = page.last
    return events


def steps_of(events: list[EventRecord], began: float) -> Iterator[StoreStep]:
    """Events as steps: those of one operation that follow each other are one."""
    at = 0
    while at < len(events):
        first, end = events[at], at + 1
        while end < len(events) and first.operation_id is not None and events[end].operation_id == first.operation_id:
            end += 1
        yield StoreStep(
            first.at_ms / 1000 - began, first.worker or "?", at + 1, first.at_ms, "journal", None, {}, None, None,
            tuple(events[at:end]),
        )  # fmt: skip
        at = end


def compare_ledger(queue: str, ledger: Any, steps: StepChecker, at: float, *, served: bool) -> Iterator[Finding]:
    """The ledger against the journal, and nothing is left over."""
    own = steps.queue(queue).counts
    if ledger.balance or ledger.unexplained:
        text = f"the ledger of {queue} is off by {ledger.balance}, with {ledger.unexplained} unexplained claims"
        yield Finding("ledger", at, None, text)
    for name in COUNTED:
        if getattr(ledger, name) != own[name]:
            text = f"{queue} counts {getattr(ledger, name)} {name}, its journal has {own[name]}"
            yield Finding("ledger", at, None, text)
    left = ledger.ready + ledger.delayed + ledger.waiting + ledger.leased
    if left and served:
        text = f"{left} messages of {queue} have not ended {END_SECONDS:g} s after the last step"
        yield Finding("liveness", at, None, text)


def run_real(scenario: Scenario, store: str) -> RealRun:
    """Run a scenario against a real store."""
    with ExitStack() as stack:
        return asyncio.run(RealWorld(scenario, store, stack).run())


def run_seed(seed: int, store: str, *, minutes: float = 3.0) -> RealRun:
    """Run the scenario of a seed, in a shorter time, against a real store."""
    return run_real(compress(draw(seed, minutes=minutes)), store)
