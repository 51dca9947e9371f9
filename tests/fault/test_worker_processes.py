"""Real worker processes: killed, stopped, frozen, blocked, cut off from their server, poisoned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fault.worker_group import ROOT, SERVERS, WorkerGroup, is_there, worker_group_on
from tests.waiting import WAIT_SECONDS_MAX, until

LEASE = 0.8


@pytest.fixture(params=["sqlite", *SERVERS])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WorkerGroup]:
    with worker_group_on(request.param, tmp_path) as (made, _):
        yield made
        for queue in made.post.queues():
            ledger = made.post.ledger(queue)
            assert (ledger.balance, ledger.unexplained) == (0, 0)


@pytest.mark.promise("LEASE-3", "LEASE-4")
def test_a_message_whose_worker_is_killed_is_delivered_again_when_its_lease_ends(group: WorkerGroup) -> None:
    group.post.configure("hanging", lease=LEASE)
    published = group.post.publish("hanging", 1)
    first, second = group.start("hanging"), group.start("hanging")
    until(lambda: group.count("began") == 1, "the first delivery")
    killed = group.read_notes()[0][3]
    os.kill(killed, signal.SIGKILL)
    until(lambda: group.post.ledger("hanging").done == 1, "the second delivery")
    assert [(what, delivery) for what, _, delivery, _ in group.read_notes()] == [
        ("began", 1),
        ("began", 2),
        ("ended", 2),
    ]
    events = {event.event: event for event in group.post.history("hanging", published.id)}
    assert events["expired"].run_time is not None
    assert {first.pid, second.pid} >= {killed}


@pytest.mark.promise("LEASE-3", "LEASE-4", "LEASE-11")
def test_a_handler_in_a_process_ends_with_its_killed_worker_and_is_delivered_again(group: WorkerGroup) -> None:
    group.post.configure("grinding", lease=LEASE)
    group.post.publish_many("grinding", range(30))
    killed = group.start("grinding")
    until(lambda: group.count("ended") >= 3, "some work")
    (grinding,) = until(
        lambda: {pid for _, body, _, pid in group.read_notes() if body == "0"}, "the message that never ends"
    )
    killed.kill()
    until(lambda: not is_there(grinding), "the end of its process")
    other = group.start("grinding")
    until(lambda: group.post.ledger("grinding").done == 30, "the rest")
    assert " done" in group.stop(other)
    ended = Counter(body for what, body, _, _ in group.read_notes() if what == "ended")
    assert set(ended) == {str(number) for number in range(30)}
    # Only what was under way or not settled when the worker was killed can have run twice.
    assert sum(ended.values()) - 30 <= group.post.ledger("grinding").expired
    assert not any(is_there(pid) for _, _, _, pid in group.read_notes())


@pytest.mark.promise("LEASE-11", "LEASE-5")
def test_a_worker_that_is_stopped_under_load_loses_nothing(group: WorkerGroup) -> None:
    group.post.publish_many("slow", range(300))
    worker = group.start("slow")
    until(lambda: group.count("ended") >= 10, "some work")
    output = group.stop(worker)
    ledger = group.post.ledger("slow")
    assert ledger.leased == 0
    assert ledger.done == group.count("ended") == group.count("began")
    assert ledger.done + ledger.ready == 300
    assert all(stored.deliveries == 0 for stored in group.post.peek("slow", 300))
    assert f"{ledger.done:,} done" in output
    assert "slow       slow: 5 at once on the event loop" in output
    again = group.start("slow", processes=2)
    until(lambda: group.post.ledger("slow").done == 300, "the rest")
    group.stop(again, signal.SIGINT)
    assert set(Counter(body for what, body, _, _ in group.read_notes() if what == "ended").values()) == {1}


@pytest.mark.promise("LEASE-11")
def test_a_second_signal_does_not_wait(group: WorkerGroup) -> None:
    group.post.publish("hanging", 1)
    worker = group.start("hanging")
    until(lambda: group.count("began") == 1, "the first delivery")
    worker.send_signal(signal.SIGTERM)

    def ended() -> bool:
        worker.send_signal(signal.SIGTERM)
        return worker.poll() is not None

    until(ended, "its end")
    assert worker.returncode == -signal.SIGTERM
    assert group.post.ledger("hanging").leased == 1


@pytest.mark.promise("LEASE-2", "LEASE-3")
def test_a_worker_that_was_frozen_for_longer_than_its_lease_cannot_settle(group: WorkerGroup) -> None:
    group.post.configure("late", lease=LEASE)
    published = group.post.publish("late", 1)
    frozen = group.start("late")
    until(lambda: group.count("began") == 1, "the first delivery")
    group.freeze(frozen)
    other = group.start("late")
    until(lambda: group.post.ledger("late").done == 1, "the second delivery")
    (group.folder / "thawed").touch()
    frozen.send_signal(signal.SIGCONT)
    # Its own clock or a renewal cancelled the handler, or it ended first and its settle was refused.
    output = group.stop(frozen)
    assert "the lease of message" in output
    group.stop(other)
    names = [event.event for event in group.post.history("late", published.id)]
    assert names == ["published", "claimed", "expired", "claimed", "done"]
    assert group.post.ledger("late").done == 1


@pytest.mark.promise("LEASE-3", "LEASE-2")
def test_a_handler_whose_process_was_frozen_sees_that_its_lease_is_lost(group: WorkerGroup) -> None:
    group.post.configure("lease-lost", lease=LEASE)
    published = group.post.publish("lease-lost", 1)
    frozen = group.start("lease-lost")
    until(lambda: group.count("began") == 1, "the first delivery")
    group.freeze(frozen)
    other = group.start("lease-lost")
    until(lambda: group.post.ledger("lease-lost").done == 1, "the second delivery")
    frozen.send_signal(signal.SIGCONT)
    until(lambda: group.count("lost-True") == 1, "the news")
    assert [(what, delivery, pid) for what, _, delivery, pid in group.read_notes() if what != "began"] == [
        ("lost-False", 2, other.pid),
        ("lost-True", 1, frozen.pid),
    ]
    assert "the lease of message" in group.stop(frozen)
    group.stop(other)
    names = [event.event for event in group.post.history("lease-lost", published.id)]
    assert names == ["published", "claimed", "expired", "claimed", "done"]


@pytest.mark.promise("LEASE-2", "LEASE-4")
def test_a_worker_that_was_frozen_while_asleep_starts_no_message_whose_lease_it_lost(group: WorkerGroup) -> None:
    # Long enough a lease for an idle worker to be in a blocking wait: the server claims for it there.
    group.post.configure("slow", lease=2.4)
    frozen = group.start("slow")
    until(lambda: group.post.stats("slow").sleepers == 1, "a sleeper")
    group.freeze(frozen)
    group.post.publish("slow", 1)
    other = group.start("slow")
    until(lambda: group.count("ended") == 1, "the work of the other one")
    frozen.send_signal(signal.SIGCONT)
    until(lambda: group.post.stats("slow").sleepers == 2, "two sleepers")
    group.post.publish("slow", 2)
    until(lambda: group.post.ledger("slow").done == 2, "the second message")
    assert [(what, body) for what, body, _, _ in group.read_notes()] == [
        ("began", "1"), ("ended", "1"), ("began", "2"), ("ended", "2"),
    ]  # fmt: skip
    assert group.read_notes()[0][3] == other.pid
    for worker in (frozen, other):
        group.stop(worker)


@pytest.mark.promise("LEASE-3")
def test_an_event_loop_that_is_blocked_for_longer_than_the_lease_loses_nothing(group: WorkerGroup) -> None:
    group.post.configure("blocking", lease=LEASE)
    group.post.publish_many("blocking", range(5))
    blocked, other = group.start("blocking"), group.start("blocking")
    until(lambda: group.post.ledger("blocking").done == 5, "all of it")
    assert group.post.ledger("blocking").expired == 0
    assert group.count("began") == 5
    group.stop(blocked)
    group.stop(other)


@pytest.mark.promise("LEASE-5", "DEAD-1")
def test_a_poison_message_ends_after_exactly_its_limit_while_others_flow(group: WorkerGroup) -> None:
    group.post.configure("poison", lease=0.3, max_deliveries=3)
    group.post.publish_many("poison", ["a", "poison", "b", "c"])
    # Each delivery kills a process, and the supervisor starts another.
    workers = group.start("poison", processes=2)
    until(lambda: group.post.ledger("poison").dead == 1 and group.post.ledger("poison").done == 3, "the end of all")
    (letter,) = group.post.dead_letters("poison")
    assert (letter.body, letter.reason, letter.deliveries) == ("poison", "max_deliveries", 3)
    assert [delivery for what, body, delivery, _ in group.read_notes() if body == "poison"] == [1, 2, 3]
    output = group.stop(workers)
    assert output.count("starting another") == 3


@pytest.mark.promise("LEASE-14")
@pytest.mark.parametrize("store", SERVERS)
def test_workers_go_on_by_themselves_after_their_server_was_restarted_under_load(tmp_path: Path, store: str) -> None:
    with worker_group_on(store, tmp_path) as (group, server):
        assert server is not None
        group.post.configure("slow", lease=2)
        group.post.publish_many("slow", range(200))
        workers = [group.start("slow"), group.start("slow")]
        # One that has not connected yet would rightly give up: its first connection has a start timeout.
        until(lambda: len(group.post.workers()) == 2, "both at work")
        until(lambda: group.count("ended") >= 20, "some work")
        server.kill()
        server.restart()
        until(lambda: group.post.ledger("slow").done == 200, "the rest")
        ledger = group.post.ledger("slow")
        assert (ledger.balance, ledger.unexplained, ledger.dead) == (0, 0, 0)
        assert {body for what, body, _, _ in group.read_notes() if what == "ended"} == {
            str(number) for number in range(200)
        }
        for worker in workers:
            group.stop(worker)


#: A client whose module is never fully imported, as of a program that connects or reads much when it starts.
SLOW_START = """
import os, time
from pathlib import Path
Path(f"importing-{os.getpid()}").touch()
time.sleep(600)
"""

#: The command, with a signal that comes in the middle of the start of its first process.
SIGNALLED = """
import os, signal, subprocess, sys
from waypost.cli.main import main
class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Popen
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def supervisor(folder: Path, *python: str) -> Iterator[subprocess.Popen[str]]:
    """Start `waypost worker --processes 2` whose processes never finish their start; all are killed at the end."""
    (folder / "slow_start.py").write_text(SLOW_START)
    # A file, not a pipe: the end of a pipe would be awaited for as long as one of the processes holds it.
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *python, "worker", "slow_start:post", "--processes", "2"], cwd=folder, stderr=output,
            text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in importing(folder):
            if is_there(pid):
                os.kill(pid, signal.SIGKILL)


def importing(folder: Path) -> list[int]:
    """Return the processes that have begun to start."""
    return [int(path.name.partition("-")[2]) for path in folder.glob("importing-*")]


@pytest.mark.promise("LEASE-11")
def test_processes_that_are_stopped_while_they_start_end_in_order(tmp_path: Path) -> None:
    with supervisor(tmp_path, "-m", "waypost.cli.main") as process:
        until(lambda: len(importing(tmp_path)) == 2, "the start of both")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS_MAX) == 0, (tmp_path / "output").read_text()
        assert not any(is_there(pid) for pid in importing(tmp_path))


@pytest.mark.promise("LEASE-11")
def test_a_signal_that_comes_while_a_process_is_started_reaches_it(tmp_path: Path) -> None:
    with supervisor(tmp_path, "-c", SIGNALLED) as process:
        assert process.wait(WAIT_SECONDS_MAX) == 0, (tmp_path / "output").read_text()
