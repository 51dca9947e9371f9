"""One file shared by threads, processes and forks, and a writer that holds the lock."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from tests.waiting import until
from waypost.errors import MessageIdInUse, OperationTooOld, QueueFull, StoreFailed, StoreUnavailable
from waypost.identity import Session
from waypost.policy import REPLAY_MAX
from waypost.store.port import Call, Draft, Woken
from waypost.store.sqlite import SqliteStore
from waypost.store.sqlite import executor as executors
from waypost.store.sqlite.executor import ConnectionHolder
from waypost.store.sqlite.step import SqliteCall, Step
from waypost.store.sqlite.turn_lock import turn_lock
from waypost.testing.clock import ClockTime
from waypost.values import Settlement

PRELUDE = """
import os, sys
from waypost.identity import Session
from waypost.values import Settlement
from waypost.store.port import Draft
from waypost.store.sqlite import SqliteStore
from waypost.testing.clock import ClockTime

store, session = SqliteStore(sys.argv[1]), Session(ClockTime())

def publish(executor, count):
    drafts = [Draft(id, b"x") for id in session.message_ids(count)]
    executor.run(store.publish("orders", drafts, session.operation("orders")))

def drain(executor):
    done = 0
    while leases := executor.run(store.claim("orders", 7, session.operation("orders"), worker="w")).leases:
        settlements = [Settlement(lease.id, lease.token, lease.nonce) for lease in leases]
        statuses = executor.run(store.settle("orders", settlements, session.operation("orders"))).result
        done += statuses.count("done")
    return done
"""


def start(path: Path, script: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PRELUDE + script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def printed_numbers(process: subprocess.Popen[str], input_text: str = "") -> list[int]:
    """Return the numbers that a process printed; it must have ended with exit code 0."""
    output, errors = process.communicate(input_text, timeout=60)
    assert process.returncode == 0, errors
    return [int(number) for number in output.split()]


# ---- processes -------------------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-3")
def test_processes_that_start_at_once_share_a_new_file_and_every_message_is_done_once(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    script = """
sys.stdin.readline()
executor = store.connect(start_timeout=20)
for _ in range(20):
    publish(executor, 10)
print(drain(executor))
executor.close()
"""
    processes = [start(path, script) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    done = sum(sum(printed_numbers(process)) for process in processes)
    store = SqliteStore(path)
    executor = store.connect(start_timeout=3)
    left = 0
    session = Session(ClockTime())
    while leases := executor.run(store.claim("orders", 100, session.operation("orders"), worker="w")).leases:
        settlements = [Settlement(lease.id, lease.token, lease.nonce) for lease in leases]
        left += len(executor.run(store.settle("orders", settlements, session.operation("orders"))).result)
    ledger = executor.run(store.stats("orders")).ledger
    executor.close()
    assert done + left == ledger.done == ledger.published == ledger.claims == 600


@pytest.mark.promise("LEASE-13", "STORE-3")
def test_a_child_opens_the_file_anew_and_so_does_its_parent(tmp_path: Path) -> None:
    script = """
executor = store.connect(start_timeout=20)
publish(executor, 5)
before = executor._writer._connection
child = os.fork()
if child == 0:
    session = Session(ClockTime())
    assert executor._writer._connection is None
    publish(executor, 7)
    done = drain(executor)
    executor.close()
    os._exit(done)
publish(executor, 2)
_, status = os.waitpid(child, 0)
done = drain(executor)
assert executor._writer._connection is not before
print(os.waitstatus_to_exitcode(status) + done, executor.run(store.stats("orders")).ledger.published)
executor.close()
"""
    assert printed_numbers(start(tmp_path / "orders.db", script)) == [14, 14]


@pytest.mark.promise("LEASE-13", "STORE-3")
def test_a_fork_that_python_did_not_see_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(tmp_path / "orders.db")
    executor = store.connect(start_timeout=3)
    inherited = executor._writer._connection
    assert inherited is not None
    number = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: number + 1)
        assert executor.run(store.pause("orders")) is True
        assert executor._writer._connection is not inherited
        assert inherited in executors._inherited
        executor.close()
    # The parent may still use it: the child did not close it.
    assert inherited.execute("SELECT count(*) FROM wp_queue").fetchone() == (1,)
    executors._inherited.remove(inherited)
    inherited.close()


@pytest.mark.promise("LEASE-13")
def test_an_awaited_connection_goes_on_in_a_child(tmp_path: Path) -> None:
    script = """
import asyncio

async def first():
    executor = await store.connect_async(start_timeout=20)
    await executor.run(store.pause("orders"))
    return executor

async def second(executor):
    assert (await executor.run(store.resume("orders"))).result is True
    await executor.close()

executor = asyncio.run(first())
child = os.fork()
if child == 0:
    asyncio.run(second(executor))
    os._exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), asyncio.run(executor.run(store.queues())).count("orders"))
asyncio.run(executor.close())
"""
    assert printed_numbers(start(tmp_path / "orders.db", script)) == [0, 1]


# ---- threads ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-3", "LEASE-1")
def test_threads_share_an_executor_and_claim_each_message_once(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "orders.db")
    executor = store.connect(start_timeout=3)
    claimed: Counter[str] = Counter()
    failures: list[BaseException] = []

    def work() -> None:
        session = Session(ClockTime())
        try:
            drafts = [Draft(id, b"x") for id in session.message_ids(20)]
            for draft in drafts:
                executor.run(store.publish("orders", [draft], session.operation("orders")))
            while leases := executor.run(store.claim("orders", 3, session.operation("orders"), worker="w")).leases:
                claimed.update(lease.id for lease in leases)
                executor.run(store.stats("orders"))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger = executor.run(store.stats("orders")).ledger
    executor.close()
    assert failures == []
    assert ledger.leased == 120
    assert set(claimed.values()) == {1}
    assert len(claimed) == 120


# ---- a locked file ------------------------------------------------------------------------------------


@pytest.mark.promise("STORE-3", "LEASE-14", "SEE-6")
def test_a_writer_that_waits_too_long_gets_an_error_and_readers_do_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    store = SqliteStore(path)
    executor = store.connect(start_timeout=3)
    executor._budget = 0.05
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match=r"held by another writer .* nothing was done"):
            executor.run(store.pause("orders"))
        assert executor.run(store.queues()) == []
        other.execute("COMMIT")
    assert executor.run(store.pause("orders")) is True
    executor.close()


@pytest.mark.promise("STORE-3", "LEASE-14")
def test_a_writer_that_releases_the_lock_in_time_costs_only_a_wait(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    store = SqliteStore(path)
    executor = store.connect(start_timeout=3)
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.1, lambda: other.execute("COMMIT"))
        timer.start()
        assert executor.run(store.pause("orders")) is True
        timer.join()
    executor.close()


# ---- batches of calls -------------------------------------------------------------------------------------------


def publish_call(store: SqliteStore, session: Session, queue: str) -> Call[Any]:
    return store.publish(queue, [Draft(session.message_ids(1)[0], b"x")], session.operation(queue))


@pytest.mark.promise("STORE-3", "PUB-2")
def test_a_failing_call_of_a_batch_fails_alone(tmp_path: Path) -> None:
    store, session = SqliteStore(tmp_path / "orders.db"), Session(ClockTime())
    executor = store.connect(start_timeout=3)
    executor.run(store.configure("full", {"max_pending": 1}))
    executor.run(publish_call(store, session, "full"))
    for _ in range(REPLAY_MAX + 2):
        old = session.operation("orders")
    executor.run(store.cancel("orders", [], old))

    def damage(step: Step) -> None:
        step.queue_for_writing("orders").numbers["ready"] += 1000
        step.execute("INSERT INTO {reserve} (number, room) VALUES (1, x'')")

    calls = [publish_call(store, session, "orders") for _ in range(12)]
    calls[1] = publish_call(store, session, "full")
    calls[4] = store.cancel("orders", [], session.operation("orders")._replace(number=1))
    calls[7] = store.stats("orders")
    calls[9] = SqliteCall("damage", damage)
    results: list[Any] = list(executor.run_many(calls))
    kinds = {index: type(result) for index, result in enumerate(results) if isinstance(result, Exception)}
    ready = executor.run(store.stats("orders")).ledger.ready
    executor.close()
    assert kinds == {1: QueueFull, 4: OperationTooOld, 9: StoreFailed}
    assert (results[7].ledger.ready, ready) == (5, 8)


@pytest.mark.promise("STORE-3")
def test_sync_and_async_give_the_same_results_for_a_batch(tmp_path: Path) -> None:
    store, session = SqliteStore(tmp_path / "orders.db"), Session(ClockTime())

    async def awaited() -> list[Any]:
        executor = await store.connect_async(start_timeout=3)
        results = await executor.run_many([publish_call(store, session, "orders") for _ in range(20)])
        await executor.close()
        return results

    results = asyncio.run(awaited())
    executor = store.connect(start_timeout=3)
    results += executor.run_many([publish_call(store, session, "orders") for _ in range(20)])
    executor.close()
    assert [result.result[0].status for result in results] == ["queued"] * 40


@pytest.mark.promise("STORE-3")
def test_threads_write_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    lock, order = turn_lock(str(tmp_path / "store.db")), list[int]()
    assert turn_lock(str(tmp_path / "." / "store.db")) is lock
    first = lock.acquire(60)

    def write(number: int) -> None:
        turn = lock.acquire(60)
        order.append(number)
        lock.release(turn)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(5)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        assert until(lambda n=number: len(lock._waiting) == n)  # type: ignore[misc]
    lock.release(first)
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2, 3, 4]


class Interrupted(BaseException):
    """What a signal handler raises in a thread."""


class InterruptedMutex:
    """A lock whose `with` statement is interrupted at its end, once."""

    def __init__(self, mutex: Any) -> None:
        self.mutex = mutex
        self.interrupts = True

    def __enter__(self) -> None:
        self.mutex.acquire()

    def __exit__(self, *ended: object) -> None:
        self.mutex.release()
        if self.interrupts:
            self.interrupts = False
            raise Interrupted


@pytest.mark.parametrize("busy", [False, True])
def test_a_thread_that_is_interrupted_while_it_queues_for_its_turn_holds_no_other_up(
    tmp_path: Path, busy: bool
) -> None:
    lock = turn_lock(str(tmp_path / "store.db"))
    first = lock.acquire(60) if busy else None
    lock._mutex = InterruptedMutex(lock._mutex)  # type: ignore[assignment]
    with pytest.raises(Interrupted):
        lock.acquire(60)
    assert not lock._waiting
    if first is not None:
        lock.release(first)
    assert lock._owner is None


class ReleasedLate(ConnectionHolder):
    """A holder that another thread closes for its own fork before the fork that closed it first has ended."""

    closed_again = threading.Event()

    def after_fork(self, *, in_child: bool) -> None:
        super().after_fork(in_child=in_child)
        if threading.current_thread() is threading.main_thread():
            assert self.closed_again.wait(30)


@pytest.mark.promise("LEASE-13")
def test_two_threads_that_fork_at_the_same_time_release_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_holders", WeakSet())
    holder, ended = ReleasedLate(lambda budget: sqlite3.connect(":memory:")), threading.Event()

    def fork() -> None:
        executors._before_fork()
        holder.closed_again.set()
        ended.wait(30)
        executors._after_fork(False)

    executors._before_fork()
    other = threading.Thread(target=fork)
    other.start()
    executors._after_fork(False)
    ended.set()
    other.join(30)
    assert not holder._lock.locked()


@pytest.mark.promise("LEASE-13")
def test_after_an_interrupt_before_a_fork_no_connection_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_holders", WeakSet())

    class Interrupting(ConnectionHolder):
        closed = 0

        def before_fork(self) -> bool:
            if Interrupting.closed == 7:
                raise Interrupted
            Interrupting.closed += 1
            return super().before_fork()

    holders = [Interrupting(lambda budget: sqlite3.connect(":memory:")) for _ in range(8)]
    # What a hook raises is reported, and the process forks all the same.
    with pytest.raises(Interrupted):
        executors._before_fork()
    executors._after_fork(False)
    assert [holder._lock.locked() for holder in holders] == [False] * 8


def test_a_turn_that_is_never_passed_on_ends_with_the_wait_of_the_next_thread(tmp_path: Path) -> None:
    lock = turn_lock(str(tmp_path / "store.db"))
    first = lock.acquire(60)
    second = lock.acquire(0)
    lock.release(first)
    assert lock._owner is second
    lock.release(second)
    assert lock._owner is None


@pytest.mark.promise("PUB-2")
def test_a_refused_publish_does_not_stop_those_that_share_its_commit(tmp_path: Path) -> None:
    store, session = SqliteStore(tmp_path / "store.db"), Session(ClockTime())
    with closing(store.connect(start_timeout=3)) as executor:
        ids = session.message_ids(3)
        drafts = [[Draft(ids[0], b"x")], [Draft(ids[0], b"y")], [Draft(ids[1], b"x")], [Draft(ids[2], b"x")]]
        calls = [store.publish("orders", one, session.operation("orders")) for one in drafts]
        results = executor.run_many(calls)
        assert [type(result) for result in results] == [Woken, MessageIdInUse, Woken, Woken]
        claimed = executor.run(store.claim("orders", 9, session.operation("orders"), worker="w"))
        assert [lease.id for lease in claimed.leases] == ids
        assert len(executor.run(store.journal("orders", 0, 99)).events) == 6
