"""Order and limits of groups, seen from outside: handlers note their begin and end while their processes are killed.

The workers also lose replies to claims and settles: a proxy drops some of them after the store has done what they ask.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.fault.figure import Figure
from tests.fault.proxy import Proxy
from tests.waiting import WAIT_SECONDS_MAX, until
from waypost import Waypost

ROOT = Path(__file__).parents[2]
#: Longer than a loaded machine keeps a process from renewing: a lease that is lost would be an overlap of its own.
LEASE_SECONDS = 5.0
RUNNING_MAX = 2


class Size(NamedTuple):
    """How much is tried."""

    groups: int
    #: Messages of each group.
    each: int
    processes: int
    kills: int
    #: The share of replies that are lost.
    lost: float


QUICK, WHOLE = Size(60, 20, 3, 4, 0.02), Size(1_000, 200, 8, 50, 0.001)


class Run(NamedTuple):
    """One call of a handler, by the machine's clock."""

    began: int
    #: When it ended, or when its process was killed.
    ended: int
    number: int
    id: str


class Workers:
    """Worker processes that are killed and replaced, and what their handlers noted."""

    def __init__(self, url: str, namespace: str, folder: Path) -> None:
        self._environment = os.environ | {
            "APP_URL": url, "APP_NAMESPACE": namespace, "APP_NOTES": str(folder / "notes"),
            "PYTHONPATH": str(ROOT / "src"),
        }  # fmt: skip
        self._notes = folder / "notes"
        self._notes.touch()
        #: How far the notes were read, and how many calls had ended by then.
        self._read, self._ended = 0, 0
        self._processes: list[subprocess.Popen[bytes]] = []
        #: When a process was killed, by its id.
        self.killed: dict[int, int] = {}

    def start(self, count: int) -> None:
        """Start so many worker processes."""
        command = [sys.executable, "-m", "waypost.cli.main", "worker", "tests.fault.group_app:post", "--timeout", "5"]
        for _ in range(count):
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
            self._processes.append(process)

    def kill_one(self, chance: random.Random) -> None:
        """Kill one process in the middle of what it does, and start another."""
        process = self._processes.pop(chance.randrange(len(self._processes)))
        # Before the signal: until then its handlers ran for certain.
        self.killed[process.pid] = time.monotonic_ns()
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.start(1)

    def have_ended(self, count: int) -> bool:
        """Return whether so many calls have ended."""
        with self._notes.open("rb") as notes:
            notes.seek(self._read)
            # A line is written at once: what is there ends with a whole one.
            new = notes.read()
        self._read += len(new)
        self._ended += new.count(b"ended ")
        return self._ended >= count

    def runs(self) -> dict[tuple[str, str], list[Run]]:
        """Return the calls by queue and group. One that did not end lasted until its process was killed."""
        began: dict[tuple[str, str], tuple[str, str, Run, int]] = {}
        found: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for line in self._notes.read_text().splitlines():
            what, queue, group, number, id, token, process, at = line.split()
            if what == "began":
                began[id, token] = (queue, group, Run(int(at), int(at), int(number), id), int(process))
            else:
                queue, group, run, _ = began.pop((id, token))
                found[queue, group].append(run._replace(ended=int(at)))
        for queue, group, killed, pid in began.values():
            # It may have begun between the reading of the clock and the signal.
            found[queue, group].append(killed._replace(ended=max(killed.began, self.killed.get(pid, 0))))
        return {place: sorted(runs) for place, runs in found.items()}

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def group_figures(
    url: str, namespace: str, *, size: Size, chance: random.Random, verbs: bytes | None = None
) -> Iterator[Figure]:
    """Messages of many groups, killed worker processes, handlers that fail, lost replies: order and limits hold.

    `verbs`: what requests contain whose replies may be lost; None if there is no connection to lose them on.
    """
    groups, each, processes, kills, lost = size
    total = 2 * groups * each
    with tempfile.TemporaryDirectory() as folder, Waypost(url, namespace=namespace) as post, ExitStack() as stack:
        port, proxy, place = urlsplit(url).port, None, url
        if verbs is not None and port is not None:
            proxy = stack.enter_context(Proxy(port))
            proxy.drop_some(lost, seed=chance.randrange(2**32), to=verbs)
            place = url.replace(f":{port}", f":{proxy.port}")
        post.configure("ordered", order="group", lease=LEASE_SECONDS, max_deliveries=None)
        post.configure("limited", group_max_running=RUNNING_MAX, lease=LEASE_SECONDS, max_deliveries=None)
        for queue in ("ordered", "limited"):
            # Few groups, where they are limited: so that they reach their limits.
            names = cycle([f"g{index}" for index in range(groups if queue == "ordered" else groups // 20)])
            for number in range(each):
                post.publish_many(queue, [number] * groups, group=lambda body, names=names: next(names))
        workers = Workers(place, namespace, Path(folder))
        try:
            workers.start(processes)
            for kill in range(1, kills + 1):
                goal = total * kill // (kills + 2)
                until(partial(workers.have_ended, goal), "progress between two kills", seconds=WAIT_SECONDS_MAX * 10)
                workers.kill_one(chance)
            until(partial(all_done, post, groups * each), "the end of all messages", seconds=WAIT_SECONDS_MAX * 10)
        finally:
            workers.close()
        faults = f"{kills} kills, {proxy.dropped if proxy is not None else 0} lost replies"
        yield from judge(workers.runs(), groups * each, faults)
        ledgers = [post.ledger(queue) for queue in ("ordered", "limited")]
        sound = all((ledger.balance, ledger.unexplained) == (0, 0) for ledger in ledgers)
        yield Figure("groups ledgers", "balanced" if sound else f"{ledgers}", "balanced", sound)


def all_done(post: Waypost, each: int) -> bool:
    """Return whether both queues have nothing left."""
    return all(post.ledger(queue).done == each for queue in ("ordered", "limited"))


def most_at_once(runs: list[Run]) -> int:
    """Return how many of these calls ran at the same time."""
    changes = sorted(
        change for run in runs if run.ended > run.began for change in ((run.began, 1), (run.ended, -1))
    )  # one that ends as another begins has ended
    return max(accumulate(step for _, step in changes), default=0)


def judge(runs: dict[tuple[str, str], list[Run]], each: int, faults: str) -> Iterator[Figure]:
    """Compare what ran with what may run."""
    late = overlaps = most = 0
    handled: set[str] = set()
    for (queue, _), found in runs.items():
        handled.update(run.id for run in found)
        if queue == "ordered":
            pairs = list(pairwise(found))
            late += sum(after.number < before.number for before, after in pairs)
            overlaps += sum(after.began < before.ended for before, after in pairs)
        else:
            most = max(most, most_at_once(found))
    text = f"{faults}, {2 * each} messages"
    yield Figure(f"groups, {text}: out of order", str(late), "0", late == 0)
    yield Figure(f"groups, {text}: overlaps in an ordered group", str(overlaps), "0", overlaps == 0)
    yield Figure(f"groups, {text}: most of a group at once", str(most), f"{RUNNING_MAX}", most <= RUNNING_MAX)
    yield Figure(f"groups, {text}: handled", str(len(handled)), str(2 * each), len(handled) == 2 * each)
