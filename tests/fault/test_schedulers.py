"""Scheduler processes that are killed and frozen at their ticks: each instant fires once, and none is missed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.scheduler_processes import (
    ROOT,
    SchedulerProcesses,
    StandbyProcesses,
    WorkerProcesses,
    run_faulty_schedulers,
    run_late_saves,
    run_takeovers,
)
from tests.waiting import until
from waypost import Waypost
from waypost.testing.bench import fresh_namespace
from waypost.testing.servers import ValkeyServer

TRIES = 3


@pytest.fixture(params=["sqlite", "valkey", "postgres"])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    namespace = fresh_namespace()
    if request.param == "sqlite":
        # Short, as the folder of a service is: beside a long path there is no room for sockets.
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            yield f"sqlite:///{folder}/ticks.db", namespace
    elif request.param == "valkey":
        with ValkeyServer(appendonly=True) as server:
            yield server.url, namespace
    else:
        from waypost.store.postgres import migrate
        from waypost.testing.postgres import PostgresServer

        with PostgresServer() as postgres:
            migrate(postgres.url, namespace=namespace)
            yield postgres.url, namespace


@pytest.mark.promise("CRON-6", "CRON-4")
def test_leaders_that_die_or_freeze_at_the_tick_fire_nothing_twice_and_miss_nothing(place: tuple[str, str]) -> None:
    url, namespace = place
    # The clock of a machine is the clock of its SQLite files; elsewhere one of the processes is an hour off.
    report = run_faulty_schedulers(
        url, namespace, faults=12, processes=4, seed=5, hours_off=0 if url.startswith("sqlite") else 1
    )
    assert report.kills + report.freezes >= 12
    assert (report.doubles, report.holes, report.missed, report.early) == (0, 0, 0, 0)
    assert report.fired > 20


@pytest.mark.promise("CRON-8", "CRON-6")
def test_a_killed_leader_is_replaced_while_its_lease_lasts(tmp_path: Path) -> None:
    # The lease is longer than any run of this test: only a standby can have fired after the kill.
    report = run_takeovers(f"sqlite:///{tmp_path / 'ticks.db'}", "wp", kills=1, seed=7, ttl_seconds=3_600)
    assert (report.kills, report.doubles) == (1, 0)
    assert report.fired >= 8


@pytest.mark.promise("CRON-8", "CRON-6")
@pytest.mark.parametrize("kind", ["schedulers", "workers"])
def test_a_schedule_saved_after_the_standbys_started_is_fired_when_the_leader_is_killed_at_once(
    place: tuple[str, str], kind: str
) -> None:
    url, namespace = place

    def start(number: int) -> StandbyProcesses:
        if kind == "workers":
            return WorkerProcesses(url, namespace, 3)
        return SchedulerProcesses(url, namespace, 3, 3, 0.0, 0.0, 15)

    # A notification may be lost on a busy machine: then the end of the lease of the leader decides. Try again.
    for number in range(TRIES):
        report = run_late_saves(url, namespace, start, kills=1, every=4.0, first=number)
        assert (report.kills, report.doubles) == (1, 0)
        assert report.fired >= 2
        if report.missed == 0:
            break
    # A standby that waits for the end of the leader's lease, or for the next poll of a worker, misses three or more.
    assert report.missed == 0


@pytest.mark.promise("CRON-7", "TIMER-4")
@pytest.mark.parametrize("role", ["scheduler", "promoter"])
def test_a_process_of_its_own_leads_works_and_hands_over_at_a_signal(role: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'alone.db'}"
    with Waypost(url) as post:
        post.save_schedule("tick", queue="ticks", every=0.1)
        post.publish("later", 1, delay=0.2)
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "waypost.cli.main", role, url],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            queue = "ticks" if role == "scheduler" else "later"
            until(lambda: post.ledger(queue).ready, "a message in the queue")
        finally:
            process.send_signal(signal.SIGTERM)
            output = process.communicate(timeout=30)[1]
        assert process.returncode == 0, output
        assert "leads" in output
        executor = post.store.connect(start_timeout=5)
        assert executor.run(post.store.elect(role, "next", 1_000)).leader == "next"
        executor.close()


@pytest.mark.promise("CRON-7", "CRON-6")
def test_workers_fire_what_they_declare_and_one_that_is_stopped_hands_over_at_once(tmp_path: Path) -> None:
    url, notes = f"sqlite:///{tmp_path / 'ticks.db'}", tmp_path / "notes"
    notes.touch()
    environment = os.environ | {"APP_URL": url, "APP_NOTES": str(notes), "PYTHONPATH": str(ROOT / "src")}

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-W", "error", "-m", "waypost.cli.main", "worker", "tests.fault.schedule_app:post"]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)

    def ticks() -> list[str]:
        return [line.split()[0] for line in notes.read_text().splitlines()]

    def wait_for_ticks(more: int) -> None:
        count = len(ticks()) + more
        until(lambda: len(ticks()) >= count, f"{more} more ticks")

    with Waypost(url) as post:
        executor = post.store.connect(start_timeout=5)
        workers = {worker.pid: worker for worker in (start(), start())}
        try:
            for _ in range(2):
                wait_for_ticks(10)
                leader = executor.run(post.store.elect("scheduler", "the test", 1)).leader
                # The names of workers hold their process.
                stopped = workers.pop(int(leader.split(":")[1]))
                stopped.send_signal(signal.SIGTERM)
                assert stopped.wait(30) == 0
                fresh = start()
                workers[fresh.pid] = fresh
                wait_for_ticks(10)
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()
            executor.close()
        assert len(set(ticks())) == len(ticks()), "an instant ran twice without a redelivery"
        (schedule,) = post.schedules()
        published = [event for event in post.journal("tick").events if event.event == "published"]
        assert {event.schedule for event in published} == {"tick"}
        assert schedule.fires >= len(ticks())
