"""Repeats after the store's memory: processes that freeze in the middle of calls, machines that sleep, cloned sessions.

A process has calls under way whose replies do not come. It is stopped (SIGSTOP) until the store has forgotten what it
did, and goes on: its repeats must be refused. One of two such processes has a monotonic clock that stands still while
it is stopped, as on a suspended machine. Two more have the same session, and publish and handle at the same time.

    python -m tests.fault.repeat_figures ROLE URL …    is one of the processes
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.fault.figure import Figure
from tests.fault.proxy import Proxy
from tests.waiting import WAIT_SECONDS_MAX, until
from waypost import Waypost
from waypost.errors import OperationTooOld, OutcomeUnknown
from waypost.policy import STAMP_AHEAD_MS
from waypost.store.opening import open_store

ROOT = Path(__file__).parents[2]
#: How long operations may be repeated: short, so that a figure need not wait for minutes.
WINDOW_MS = 2_000
#: No store remembers longer than this after a call: Valkey keeps a session's results for up to twice the time.
FORGOTTEN_MS = 2 * (WINDOW_MS + STAMP_AHEAD_MS) + 500
TICK_SECONDS = 0.02
#: A longer pause between two ticks is a stop of the process, and counts for no more than this.
STEP_SECONDS_MAX = 0.5


# ---- the processes ---------------------------------------------------------------------------------------------


class StoppingClock:
    """A monotonic clock that stands still while the process is stopped."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()
        self._lock = threading.Lock()
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            self()

    def __call__(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._seconds += min(now - self._last, STEP_SECONDS_MAX)
            self._last = now
            return self._seconds


class StopsAfterCalls:
    """A SQLite file loses no reply on the way: its process is stopped when all calls have run, and then loses them."""

    def __init__(self, inner: Any, calls: int) -> None:
        self.inner = inner
        self._barrier = threading.Barrier(calls, action=lambda: os.kill(os.getpid(), signal.SIGSTOP))
        self._left = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def connect(self, *, start_timeout: float) -> Any:
        executor = self.inner.connect(start_timeout=start_timeout)
        run = executor.run

        def run_and_lose(call: Any) -> Any:
            result = run(call)
            if call.name == "publish" and not hasattr(self._left, "lost"):
                self._left.lost = True
                self._barrier.wait(WAIT_SECONDS_MAX)
                raise OutcomeUnknown("the reply was lost")
            return result

        executor.run = run_and_lose
        return executor


def open_short_replay(url: str) -> Any:
    return open_store(url, namespace="wp", clock=None, replay_ttl_ms=WINDOW_MS, durability="server")


def freezer(url: str, queue: str, calls: int, *, suspended: bool) -> None:
    """Publish `calls` messages at once, each by its own client, and print the outcome of each."""
    outcomes: list[str] = []
    store = open_short_replay(url)
    if url.startswith("sqlite"):
        store = StopsAfterCalls(store, calls)
    clock: Callable[[], float] = StoppingClock() if suspended else time.monotonic
    connected, begin = threading.Barrier(calls + 1), threading.Event()

    def publish(number: int) -> None:
        with Waypost(store=store if url.startswith("sqlite") else open_short_replay(url)) as post:
            post._context.monotonic = clock
            post._session.time._monotonic = clock
            post._run(post._context.know_time())
            connected.wait(WAIT_SECONDS_MAX)
            begin.wait()
            try:
                post.publish(queue, number)
                outcomes.append("published")
            except OperationTooOld:
                outcomes.append("refused")
            except Exception as error:
                outcomes.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(calls)]
    for thread in threads:
        thread.start()
    connected.wait(WAIT_SECONDS_MAX)
    print("ready", flush=True)
    sys.stdin.readline()
    begin.set()
    for thread in threads:
        thread.join()
    print(json.dumps(outcomes), flush=True)


def clone(url: str, queue: str, calls: int, session: dict[str, Any]) -> None:
    """Publish and handle with the session that the other process has too; print the ids published and handled."""
    published: list[str] = []
    handled: list[str] = []
    with Waypost(store=open_store(url, namespace="wp", clock=None, replay_ttl_ms=60_000, durability="server")) as post:
        mine = post._session
        mine.id, mine._mark, mine._counter = bytes.fromhex(session["id"]), session["mark"], session["counter"]
        mine._numbers = dict(session["numbers"])
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(calls):
            published.append(post.publish(queue, number).id)
            with post.receive(queue) as message:
                if message is not None:
                    handled.append(message.id)
    print(json.dumps([published, handled]), flush=True)


# ---- the parent process ------------------------------------------------------------------------------------


def process(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fault.repeat_figures", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def send_line(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


def wait_ready(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"


def last_line(child: subprocess.Popen[str]) -> Any:
    output, _ = child.communicate(timeout=WAIT_SECONDS_MAX)
    assert child.returncode == 0, "a process failed"
    return json.loads(output.strip().splitlines()[-1])


def drain(post: Waypost, queue: str) -> list[str]:
    """Handle all messages of a queue."""
    handled: list[str] = []
    while True:
        with post.receive(queue, wait=0.05) as message:
            if message is None:
                return handled
            handled.append(message.id)


def frozen_figures(post: Waypost, url: str, port: int | None, calls: int) -> Iterator[Figure]:
    """Measure both kinds of freezes at once, so that the long wait serves both."""
    kinds = {"a freeze": False, "a suspended clock": True}
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(port)) if port is not None else None
        way = url if proxy is None else url.replace(f":{port}", f":{proxy.port}")
        # So that the server has the script of a publish, and the queues are there.
        for kind in kinds:
            post.publish(kind.replace(" ", "-"), "first")
            drain(post, kind.replace(" ", "-"))
        children = {kind: process("freezer", way, kind.replace(" ", "-"), calls, int(kinds[kind])) for kind in kinds}
        for child in children.values():
            stack.callback(child.kill)
            wait_ready(child)
        if proxy is not None:
            proxy.silence(requests=False)
        for child in children.values():
            send_line(child, "go")
        for kind, child in children.items():
            queue = kind.replace(" ", "-")
            until(lambda queue=queue: post.ledger(queue).published == calls + 1)  # type: ignore[misc]
            if proxy is not None:
                os.kill(child.pid, signal.SIGSTOP)
            until(lambda child=child: is_stopped(child.pid))  # type: ignore[misc]
        if proxy is not None:
            proxy.cut()
            proxy.heal()
        end_ms = post._call(post.store.time()) + FORGOTTEN_MS
        until(lambda: post._call(post.store.time()) > end_ms)
        post.publish("others", 1)  # a step that sweeps
        for kind, child in children.items():
            os.kill(child.pid, signal.SIGCONT)
            outcomes = last_line(child)
            yield from compare_outcomes(post, f"repeats after {kind}", kind.replace(" ", "-"), calls, outcomes)


def compare_outcomes(post: Waypost, name: str, queue: str, calls: int, outcomes: list[str]) -> Iterator[Figure]:
    refused = outcomes.count("refused")
    published = post.ledger(queue).published - 1
    yield Figure(
        name, f"refused {refused} of {calls}, run again {published - calls}", f"{calls}, 0",
        refused == calls and published == calls,
    )  # fmt: skip
    handled = drain(post, queue)
    ledger = post.ledger(queue)
    stranded = published - len(handled)
    yield Figure(
        f"{name}, what is left", f"stranded {stranded}, balance {ledger.balance}", "0, 0",
        stranded == 0 and ledger.balance == 0 and ledger.done == published + 1,
    )  # fmt: skip


def clone_figures(post: Waypost, url: str, calls: int) -> Iterator[Figure]:
    """Two processes with one session, at the same time."""
    queue, session = "cloned", post._session
    post.configure(queue, lease=60)
    state = {"id": os.urandom(8).hex(), "mark": session._mark, "counter": 7, "numbers": {}}
    children = [process("clone", url, queue, calls, json.dumps(state)) for _ in range(2)]
    try:
        for child in children:
            wait_ready(child)
        for child in children:
            send_line(child, "go")
        outputs = [last_line(child) for child in children]
    finally:
        for child in children:
            child.kill()
    published = [id for ids, _ in outputs for id in ids]
    handled = [id for _, ids in outputs for id in ids] + drain(post, queue)
    ledger = post.ledger(queue)
    yield Figure(
        "cloned session", f"confirmed {len(set(published))}, stored {ledger.published}", f"{2 * calls}, {2 * calls}",
        len(set(published)) == len(published) == ledger.published == 2 * calls,
    )  # fmt: skip
    twice, stranded = len(handled) - len(set(handled)), ledger.published - len(set(handled))
    yield Figure(
        "cloned session, what is left",
        f"handled twice {twice}, stranded {stranded}, balance {ledger.balance}",
        "0, 0, 0",
        twice == 0 and stranded == 0 and ledger.balance == 0,
    )


def repeat_figures(url: str, port: int | None, calls: int) -> Iterator[Figure]:
    """Measure all figures on one store; `port` is that of its server, None without one."""
    with Waypost(url) as post:
        yield from frozen_figures(post, url, port, calls)
        yield from clone_figures(post, url, calls)


if __name__ == "__main__":
    role, url, queue, calls, more = sys.argv[1:]
    if role == "freezer":
        freezer(url, queue, int(calls), suspended=more == "1")
    else:
        clone(url, queue, int(calls), json.loads(more))
