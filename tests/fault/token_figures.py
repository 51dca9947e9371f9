"""Tokens over crashes of PostgreSQL: processes claim under load, the server crashes, and no token is given twice.

A claim commits asynchronously unless its queue has a limit, so a crash may forget it: the server writes such commits at
its next round only, which is made long here. Each round ends in claims that nothing synchronous follows, and then in a
crash: the server is stopped at once, or it or one of its processes is killed.

    python -m tests.fault.token_figures URL    is one of the processes: commands in, answers out, one JSON value a line
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import psycopg

from tests.fault.figure import Figure
from tests.waiting import WAIT_SECONDS_MAX, until
from waypost import Waypost
from waypost.errors import WaypostError
from waypost.identity import Session
from waypost.store.opening import open_store
from waypost.store.postgres import migrate
from waypost.testing.clock import ClockTime
from waypost.testing.postgres import PostgresServer
from waypost.values import Settlement
from waypost.views import Event

ROOT = Path(__file__).parents[2]
PROCESSES = 3
#: Claims of this queue wait for the disk, and those of the other do not.
LIMITED, PLAIN = "limited", "plain"
RUNNING_MAX = 5


class Claimer:
    """The parent's side of one of the processes."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "tests.fault.token_figures", url]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, *command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> list[list[Any]]:
        """Return the answer to the oldest command: claims as queue, id, token and nonce."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a process has ended"
        claims: list[list[Any]] = json.loads(line)
        return claims

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def stop_at_once(server: PostgresServer) -> None:
    """Shut the server down immediately."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGQUIT)
    until(lambda: server.pid is None)
    server.restart()


def kill_server(server: PostgresServer) -> None:
    """Kill the first process; the others end by themselves, and no server starts on their memory before that."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        pids = [pid for (pid,) in connection.execute("SELECT pid FROM pg_stat_activity")]
    server.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    server.restart()


def kill_backend(server: PostgresServer) -> None:
    """Kill one backend: the server ends all the others and recovers, without a restart."""

    def started() -> object:
        with suppress(psycopg.OperationalError), psycopg.connect(server.url, autocommit=True) as connection:
            return connection.execute("SELECT pg_postmaster_start_time()").fetchone()
        return None

    def is_lost(connection: psycopg.Connection[Any]) -> bool:
        try:
            connection.execute("SELECT 1")
        except psycopg.OperationalError:
            return True
        return False

    before = started()
    with suppress(psycopg.OperationalError), psycopg.connect(server.url, autocommit=True) as other:
        with suppress(psycopg.OperationalError), psycopg.connect(server.url, autocommit=True) as killed:
            os.kill(killed.info.backend_pid, signal.SIGKILL)
        # All others are ended before it recovers.
        until(lambda: is_lost(other))
    until(lambda: started() == before)


CRASHES: tuple[Callable[[PostgresServer], None], ...] = (stop_at_once, kill_backend, kill_server)


def events(post: Waypost, queue: str) -> Iterator[Event]:
    """Read the whole journal of a queue."""
    page = post.journal(queue)
    while page.events:
        yield from page.events
        page = post.journal(queue, page.last)


def token_crashes(rounds: int) -> Iterator[Figure]:
    """Crash the server again and again while processes publish, claim and settle."""
    history: list[tuple[str, str, int, str]] = []
    passed = 0
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer(durable=True, wal_writer_delay="10s"))
        migrate(server.url)
        post = stack.enter_context(Waypost(server.url))
        post.configure(LIMITED, lease=600, max_running=RUNNING_MAX)
        post.configure(PLAIN, lease=600)
        claimers = [Claimer(server.url) for _ in range(PROCESSES)]
        for claimer in claimers:
            stack.callback(claimer.close)

        def send_to_all(*command: object) -> list[list[Any]]:
            for claimer in claimers:
                claimer.send(*command)
            claims = [claim for claimer in claimers for claim in claimer.answer()]
            history.extend((queue, id, token, nonce) for queue, id, token, nonce in claims)
            return claims

        for number in range(rounds):
            post.publish_many(LIMITED, range(60))
            post.publish_many(PLAIN, range(60))
            send_to_all("load", 5)
            # The first of them wakes the process that writes such commits: it then sleeps for its long round.
            send_to_all("claim", PLAIN, 1)
            held = len(send_to_all("claim", LIMITED, 2))
            send_to_all("claim", PLAIN, 3)
            CRASHES[number % len(CRASHES)](server)
            # Leases from before the crash are still held, even if the crash lost them.
            passed += max(0, held + len(send_to_all("claim", LIMITED, 2)) - RUNNING_MAX)
            send_to_all("claim", PLAIN, 3)
            send_to_all("settle")
        given = Counter((queue, id, token) for queue, id, token, _ in set(history))
        journaled = {
            (queue, event.message_id, event.token)
            for queue in (LIMITED, PLAIN)
            for event in events(post, queue)
            if event.event == "claimed"
        }
        ledgers = [post.ledger(queue) for queue in (LIMITED, PLAIN)]
    twice = sum(count > 1 for count in given.values())
    missing = {queue: sum(claim not in journaled for claim in given if claim[0] == queue) for queue in (LIMITED, PLAIN)}
    name = f"tokens over {rounds} crashes"
    yield Figure(f"{name}, given twice", f"{twice} of {len(given)}", "0", twice == 0)
    yield Figure(f"{name}, max_running passed", f"{passed}", "0", passed == 0)
    yield Figure(f"{name}, limited claims not in the journal", f"{missing[LIMITED]}", "0", missing[LIMITED] == 0)
    # Each crash must find claims that are not on the disk, or the figure proves nothing.
    yield Figure(f"{name}, other claims forgotten", f"{missing[PLAIN]}", "more than 0", missing[PLAIN] > 0)
    balances = [(ledger.balance, ledger.unexplained) for ledger in ledgers]
    yield Figure(f"{name}, ledgers", f"{balances}", "all 0", not any(any(pair) for pair in balances))


# ---- one of the processes -----------------------------------------------------------------------------------


def serve(url: str, commands: IO[str], answers: IO[str]) -> None:
    """Run the commands of the parent, and answer with the claims."""
    store = open_store(url, namespace="wp", clock=None, replay_ttl_ms=300_000, durability="server")
    executor = store.connect(start_timeout=10)
    session = Session(ClockTime())
    held: dict[str, list[Settlement]] = {LIMITED: [], PLAIN: []}

    def repeated(step: Callable[[], Any]) -> Any:
        """Run a step until the server is back, each time as a new operation."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while True:
            try:
                return step()
            except WaypostError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def claim(queue: str, limit: int) -> list[list[Any]]:
        operation = session.operation(queue)
        claimed = executor.run(store.claim(queue, limit, operation, worker=f"claimer:{os.getpid()}"))
        held[queue] += [Settlement(lease.id, lease.token, lease.nonce) for lease in claimed.leases]
        return [[queue, lease.id, lease.token, lease.nonce.hex()] for lease in claimed.leases]

    def settle() -> list[list[Any]]:
        for queue, settlements in held.items():
            if settlements:
                executor.run(store.settle(queue, settlements, session.operation(queue)))
                settlements.clear()
        return []

    for line in commands:
        name, *rest = json.loads(line)
        if name == "claim":
            queue, limit = rest
            claims = repeated(partial(claim, queue, limit))
        elif name == "settle":
            claims = repeated(settle)
        else:
            claims = []
            for _ in range(rest[0]):
                claims += repeated(lambda: claim(LIMITED, 1)) + repeated(lambda: claim(PLAIN, 1))
                repeated(settle)
        answers.write(json.dumps(claims) + "\n")
        answers.flush()


if __name__ == "__main__":
    logging.getLogger("waypost").setLevel(logging.ERROR)
    serve(sys.argv[1], sys.stdin, sys.stdout)
