"""Several scheduler processes that fail at their ticks, and the outcome of every instant."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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


class SchedulerProcesses:
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
        self._chance = random.Random(seed)
        self._given = (url, namespace)
        self._probability = probability
        self._ttl_seconds = ttl_seconds
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._frozen: dict[int, float] = {}
        self._hours_off = hours_off
        self.kills = self.freezes = 0
        for number in range(count):
            self._start(hours_off if number == 0 else 0.0)

    def _start(self, hours_off: float = 0.0) -> None:
        url, namespace = self._given
        given = (url, namespace, self._ttl_seconds, self._chance.randrange(2**32), self._probability, hours_off)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.faulty_scheduler", *map(str, given)],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        self._running[process.pid] = process

    def check_processes(self) -> None:
        """Restart processes that died, and resume those that froze."""
        for pid, process in list(self._running.items()):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                self.freezes += 1
                self._frozen[pid] = time.monotonic() + TTL_SECONDS * 2
            elif found:
                process.returncode = os.waitstatus_to_exitcode(status)
                del self._running[pid]
                self.kills += 1
                self._start(self._hours_off if self._chance.random() < 0.25 else 0.0)
        for pid, resume_at in list(self._frozen.items()):
            if time.monotonic() >= resume_at:
                del self._frozen[pid]
                os.kill(pid, signal.SIGCONT)

    def kill(self, pid: int) -> None:
        """Kill one process, and start none in its place."""
        process = self._running.pop(pid)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """Stop all processes."""
        for pid, process in self._running.items():
            os.kill(pid, signal.SIGCONT)
            process.kill()
            process.wait()


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


def run_takeovers(url: str, namespace: str, *, kills: int, seed: int, ttl_seconds: float) -> TakeoverReport:
    """Kill the leader of three schedulers `kills` times, and report the instants of a schedule of each second."""
    report = TakeoverReport()
    with Waypost(url, namespace=namespace) as post:
        executor = post.store.connect(start_timeout=10)

        def published(queue: str) -> int:
            return post.ledger(queue).published

        def leader_of(role: str) -> str:
            return executor.run(post.store.elect(role, "the test", 1)).leader

        for number in range(kills):
            queue = f"takeover-{number}"
            # Standbys read the schedules when they start, and then every few minutes.
            post.save_schedule("tick", queue=queue, every=1.0)
            schedulers = SchedulerProcesses(url, namespace, 3, seed + number, 0.0, 0.0, ttl_seconds)
            try:
                until(lambda: leader_of(DEPUTY_ROLE).startswith("ticker:"), "a deputy")
                until(lambda q=queue: published(q) >= 3, "fires before the kill")  # type: ignore[misc]
                # What was missed while the processes started does not count.
                (before,) = post.schedules(queue)
                leader = leader_of("scheduler")
                schedulers.kill(int(leader.split(":")[1]))
                report.kills += 1
                count = published(queue) + 5
                until(lambda q=queue, n=count: published(q) >= n, "fires after the kill")  # type: ignore[misc]
            finally:
                schedulers.stop()
            # Leases of dead processes may last: the next round begins without them.
            for role in ("scheduler", DEPUTY_ROLE):
                executor.run(post.store.resign(role, leader_of(role)))
            (schedule,) = post.schedules(queue)
            report.missed += schedule.missed_fires - before.missed_fires
            instants = Counter(message.instant for message in post.messages(queue))
            report.fired += instants.total()
            report.doubles += instants.total() - len(instants)
            late = [message.published_at - message.instant for message in post.messages(queue) if message.instant]
            report.latest = max([report.latest, *late])
            post.remove_schedule("tick", queue=queue)
        executor.close()
    return report
