"""Figures of Spark jobs: a lost lease ends what a job writes, and scheduled runs of the pipeline survive kills."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.fault.figure import Figure
from tests.waiting import until
from waypost import Waypost

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 2.0
#: The longest that a task of a job may write on after its lease is lost.
WRITES_SECONDS_MAX = 5.0
QUEUE = "waypost-pipeline"
OPTIONS = ("--master", "local[1]", "--config", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1")


def spark_figures(*, quick: bool) -> Iterator[Figure]:
    """Let jobs lose their leases; then kill drivers of scheduled runs."""
    yield lost_leases(1 if quick else 3)
    yield scheduled_runs(1 if quick else 5)


def lost_leases(count: int) -> Figure:
    """Lock the store of a worker for longer than the lease of its job, and report how long the job writes on."""
    found = []
    for _ in range(count):
        with tempfile.TemporaryDirectory() as directory:
            store, folder = Path(directory, "jobs.db"), Path(directory, "written")
            folder.mkdir()
            with Waypost(f"sqlite:///{store}") as post:
                post.configure("copies", lease=LEASE_SECONDS)
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.fault.spark_job_app", f"sqlite:///{store}", str(folder)],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            )  # fmt: skip
            try:
                assert process.stdout is not None
                assert json.loads(process.stdout.readline()) == {"writes": True}
                # No renewal is written from here on.
                lock = sqlite3.connect(store, isolation_level=None, timeout=30)
                lock.execute("BEGIN IMMEDIATE")
                found.append(json.loads(process.stdout.readline()))
                lock.rollback()
                lock.close()
            finally:
                end(process)
    ended, written = (max(one[name] for one in found) for name in ("ended", "written"))
    return Figure(
        f"Spark jobs, {count} lost leases",
        f"the function has ended {ended:.1f} s, the last file was written {written:.1f} s after the loss",
        f"{WRITES_SECONDS_MAX:g} s",
        max(ended, written) <= WRITES_SECONDS_MAX,
    )


def scheduled_runs(kills: int) -> Figure:
    """Two workers fire the schedule and run the pipeline; each time the one that runs it is killed."""
    from waypost.spark.lake.lake import Lake
    from waypost.spark.lake.scheduled import schedule_pipeline

    with tempfile.TemporaryDirectory() as directory, Waypost(f"sqlite:///{directory}/orders.db") as post:
        lake, processes = f"{directory}/lake", dict[int, subprocess.Popen[bytes]]()
        post.publish_many("orders", range(100))
        schedule_pipeline(post, lake, every=1)
        post.configure(QUEUE, lease=LEASE_SECONDS, completed=True)
        try:
            for _ in range(2):
                start(processes, directory, lake)
            for number in range(kills):
                await_runs(post, 2)
                post.publish_many("orders", range(100 * number, 100 * number + 50))
                driver = until(lambda: running_driver(post, processes), "a run", seconds=300)
                end(processes.pop(driver))
                start(processes, directory, lake)
            until(lambda: post.ledger(QUEUE).expired >= kills, "the end of the leases", seconds=300)
            await_runs(post, 2)
            post.remove_schedule("pipeline", queue=QUEUE)
            until(lambda: not open_runs(post), "the end of the last run", seconds=300)
        finally:
            for process in processes.values():
                end(process)
        instants = Counter(message.instant for message in post.messages(QUEUE, "done"))
        ledger, state = post.ledger(QUEUE), Lake(lake).state
        doubled = instants.total() - len(instants)
        lost = ledger.published - ledger.done
        rows = state.seen["orders"].events - post.stats("orders").journal_last
    return Figure(
        f"pipeline on a schedule, two schedulers, {kills} drivers killed, {ledger.published} instants",
        f"instants run twice {doubled}, lost {lost}, events of the lake too many or too few {rows}, "
        f"leases expired {ledger.expired}",
        f"0, 0, 0, {kills}",
        (doubled, lost, rows, ledger.expired) == (0, 0, 0, kills),
    )


def await_runs(post: Waypost, count: int) -> None:
    """Wait until so many more runs have ended."""
    enough = post.ledger(QUEUE).done + count
    until(lambda: post.ledger(QUEUE).done >= enough, f"{count} runs", seconds=300)


def open_runs(post: Waypost) -> int:
    ledger = post.ledger(QUEUE)
    return ledger.ready + ledger.delayed + ledger.leased


def running_driver(post: Waypost, processes: dict[int, subprocess.Popen[bytes]]) -> int | None:
    """Return the process that holds the lease of a run."""
    for message in post.messages(QUEUE, "leased"):
        for pid in processes:
            if f":{pid}:" in (message.worker or ""):
                return pid
    return None


def start(processes: dict[int, subprocess.Popen[bytes]], directory: str, lake: str) -> None:
    """Start a worker of the pipeline."""
    process = subprocess.Popen(
        [sys.executable, "-m", "waypost.cli.main", "pipeline", "worker", "--lake", lake,
         "--store", f"sqlite:///{directory}/orders.db", *OPTIONS],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    processes[process.pid] = process


def end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Kill a process with its Java, and wait for its end."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
