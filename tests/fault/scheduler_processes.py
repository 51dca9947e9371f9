"""Several scheduler processes that fail at their ticks, and the outcome of every instant."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from tests.waiting import until
from waypost import CatchUp, Waypost
from waypost.schedule.scheduler import DEPUTY_ROLE

ROOT = Path(__file__).parents[2]
TTL_SECONDS = 0.4
INTERVAL_SECONDS = 0.05
#: Catch-ups are so long that no outage here can pass them.
POLICY = CatchUp(512)
SCHEDULES = 3
QUEUE = "ticks"
#: No lease of a leader is longer.
LEASE_MS_MAX = 3_600_000


class StandbyProcesses:
    """Processes that each have a scheduler, and print `ready` after its first tick."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def _start_process(self, *arguments: str, **environment: str) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], cwd=ROOT, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")} | environment,
        )  # fmt: skip
        self._running[process.pid] = process

    def wait_until_ready(self) -> None:
        """Wait until each has ticked once."""
        for process in self._running.values():
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"

    def kill(self, pid: int) -> None:
        """Kill one process, and start none in its place."""
        process = self._running.pop(pid)
        process.kill()
        process.communicate()

    def stop(self) -> None:
        """Kill all processes, frozen ones too."""
        for pid in list(self._running):
            self.kill(pid)


class WorkerProcesses(StandbyProcesses):
    """Worker processes of `tests.fault.standby_app`."""

    def __init__(self, url: str, namespace: str, count: int) -> None:
        super().__init__()
        for _ in range(count):
            command = ("waypost.cli.main", "worker", "tests.fault.standby_app:post", "--log-level", "error")
            self._start_process(*command, APP_URL=url, APP_NAMESPACE=namespace)


class SchedulerProcesses(StandbyProcesses):
    """Processes that are restarted when they died, and resumed a while after they froze themselves."""

    def __init__(
        self,
        url: str,
        namespace: str,
        count: int,
        seed: int,
        probability: float,
        hours_off: float,
        ttl_seconds: float = TTL_SECONDS,
    ) -> None:
        super().__init__()
        self._chance = random.Random(seed)
        self._given = (url, namespace)
        self._probability = probability
        self._ttl_seconds = ttl_seconds
        self._frozen: dict[int, float] = {}
        self._hours_off = hours_off
        self.kills = self.freezes = 0
        for number in range(count):
            self._start(hours_off if number == 0 else 0.0)

    def _start(self, hours_off: float = 0.0) -> None:
        url, namespace = self._given
        given = (url, namespace, self._ttl_seconds, self._chance.randrange(2**32), self._probability, hours_off)
        self._start_process("tests.fault.faulty_scheduler", *map(str, given))

    def check_processes(self) -> None:
        """Restart processes that died, and resume those that froze."""
        for pid, process in list(self._running.items()):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                self.freezes += 1
                self._frozen[pid] = time.monotonic() + TTL_SECONDS * 2
            elif found:
                process.returncode = os.waitstatus_to_exitcode(status)
                process.communicate()
                del self._running[pid]
                self.kills += 1
                self._start(self._hours_off if self._chance.random() < 0.25 else 0.0)
        for pid, resume_at in list(self._frozen.items()):
            if time.monotonic() >= resume_at:
                del self._frozen[pid]
                os.kill(pid, signal.SIGCONT)


@contextmanager
def start_schedulers(
    url: str, namespace: str, count: int, seed: int, probability: float, hours_off: float
) -> Iterator[SchedulerProcesses]:
    made = SchedulerProcesses(url, namespace, count, seed, probability, hours_off)
    try:
        yield made
    finally:
        made.stop()


@dataclass(slots=True)
class SchedulerReport:
    """What happened to the instants of all schedules."""

    kills: int = 0
    freezes: int = 0
    fired: int = 0
    doubles: int = 0
    #: Instants between the first and the last that no scheduler fired, and what the schedules counted as missed.
    holes: int = 0
    missed: int = 0
    early: int = 0
    seen: Counter[tuple[str, int]] = field(default_factory=Counter)


def run_faulty_schedulers(
    url: str, namespace: str, *, faults: int, processes: int, seed: int, hours_off: float = 0.0
) -> SchedulerReport:
    """Let schedulers fail at `faults` ticks, and report the outcome of every instant."""
    report = SchedulerReport()
    interval_ms = round(INTERVAL_SECONDS * 1000)
    with Waypost(url, namespace=namespace) as post:
        for number in range(SCHEDULES):
            post.save_schedule(f"s{number}", queue=QUEUE, every=INTERVAL_SECONDS, missed=POLICY)
        with start_schedulers(url, namespace, processes, seed, 0.2, hours_off) as schedulers:
            deadline = time.monotonic() + 120 + faults
            while schedulers.kills + schedulers.freezes < faults and time.monotonic() < deadline:
                schedulers.check_processes()
                time.sleep(0.01)
            report.kills, report.freezes = schedulers.kills, schedulers.freezes
        anchors = {}
        for schedule in post.schedules(QUEUE):
            report.missed += schedule.missed_fires
            anchors[schedule.name] = schedule
        for message in post.messages(QUEUE):
            instant = message.instant
            assert instant is not None
            at_ms = round(instant.timestamp() * 1000)
            report.seen[message.headers["waypost-schedule"], at_ms] += 1
            report.early += message.published_at < instant
        report.fired = report.seen.total()
        report.doubles = sum(count - 1 for count in report.seen.values())
        for name, schedule in anchors.items():
            mine = sorted(at for owner, at in report.seen if owner == name)
            if mine:
                report.holes += (mine[-1] - mine[0]) // interval_ms + 1 - len(mine)
            assert schedule.fires == len(mine), "the schedule counts what it published"
    return report


@dataclass(slots=True)
class TakeoverReport:
    """What became of the instants of a schedule whose leader was killed."""

    kills: int = 0
    fired: int = 0
    doubles: int = 0
    missed: int = 0
    #: How late the latest fire was, by the store's clock.
    latest: timedelta = timedelta(0)


class _Takeovers:
    """The rounds of a run: in each one a leader is killed, and the fires of a schedule of its own are counted."""

    def __init__(self, post: Waypost) -> None:
        self.report = TakeoverReport()
        self._post = post
        self._executor = post.store.connect(start_timeout=10)

    def close(self) -> None:
        self._executor.close()

    def leader_of(self, role: str) -> str:
        """Return the name of the leader, or nothing. A request for a much shorter lease would end the leader's."""
        leader = self._executor.run(self._post.store.elect(role, "the test", LEASE_MS_MAX)).leader
        if leader == "the test":
            self._executor.run(self._post.store.resign(role, leader))
            return ""
        return leader

    def kill_leader(self, processes: StandbyProcesses) -> None:
        # The names of schedulers contain their process.
        leader = until(lambda: self.leader_of("scheduler"), "a leader")
        processes.kill(int(leader.split(":")[1]))
        self.report.kills += 1

    def wait_for_fires(self, queue: str, more: int) -> None:
        def published() -> int:
            return self._post.ledger(queue).published

        count = published() + more
        until(lambda: published() >= count, f"{more} more fires")

    def end_round(self, queue: str, missed_before: int) -> None:
        """Count what was fired, and take the leases of dead processes, so that the next round begins without them."""
        for role in ("scheduler", DEPUTY_ROLE):
            self._executor.run(self._post.store.resign(role, self.leader_of(role)))
        (schedule,) = self._post.schedules(queue)
        instants = Counter(message.instant for message in self._post.messages(queue))
        late = [message.published_at - message.instant for message in self._post.messages(queue) if message.instant]
        report = self.report
        report.missed += schedule.missed_fires - missed_before
        report.fired += instants.total()
        report.doubles += instants.total() - len(instants)
        report.latest = max([report.latest, *late])
        self._post.remove_schedule("tick", queue=queue)


def run_takeovers(url: str, namespace: str, *, kills: int, seed: int, ttl_seconds: float) -> TakeoverReport:
    """Kill the leader of three schedulers `kills` times, and report the instants of a schedule of each second."""
    with Waypost(url, namespace=namespace) as post, closing(_Takeovers(post)) as rounds:
        for number in range(kills):
            queue = f"takeover-{number}"
            post.save_schedule("tick", queue=queue, every=1.0)
            schedulers = SchedulerProcesses(url, namespace, 3, seed + number, 0.0, 0.0, ttl_seconds)
            try:
                until(lambda: rounds.leader_of(DEPUTY_ROLE), "a deputy")
                rounds.wait_for_fires(queue, 3)
                # What was missed while the processes started does not count.
                (before,) = post.schedules(queue)
                rounds.kill_leader(schedulers)
                rounds.wait_for_fires(queue, 5)
            finally:
                schedulers.stop()
            rounds.end_round(queue, before.missed_fires)
        return rounds.report


def run_late_saves(
    url: str, namespace: str, start: Callable[[int], StandbyProcesses], *, kills: int, every: float, first: int = 0
) -> TakeoverReport:
    """Save a schedule while schedulers run, and kill the leader before it fires; report the instants.

    Each kill has a queue of its own, which `first` and those behind it number.
    """
    with Waypost(url, namespace=namespace) as post, closing(_Takeovers(post)) as rounds:
        for number in range(first, first + kills):
            queue = f"late-{number}"
            processes = start(number)
            try:
                processes.wait_until_ready()
                until(lambda: rounds.leader_of("scheduler"), "a leader")
                post.save_schedule("tick", queue=queue, every=every)
                rounds.kill_leader(processes)
                rounds.wait_for_fires(queue, 2)
            finally:
                processes.stop()
            rounds.end_round(queue, 0)
        return rounds.report
