"""Figures of idle cost: requests of workers with nothing to do, all parts of a worker counted.

Valkey counts the requests of clients, PostgreSQL transactions. What a script calls inside the server is no request.
On a SQLite file the process counts its transactions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.fault.figure import Figure
from tests.fault.wake_figures import ROOT, Server
from tests.waiting import until

#: Requests that a client of ours sends. Scripts call others, and are counted as one.
REQUESTS = ("evalsha", "ping", "blpop", "hgetall", "get", "smembers", "sadd", "subscribe", "script|load")
PROCESSES, WORKERS = 4, 200
#: A process of PostgreSQL that is idle reports its count of transactions up to ten seconds late.
CALM_SECONDS = 11.0
#: A worker has up to three connections.
CONNECTIONS = 4 * WORKERS


def request_counter(server: Server) -> Callable[[], int]:
    """Return a function that counts the requests or transactions of a server so far."""
    if server.kind == "valkey":
        from tests.servers.valkey_setups import client_of

        def requests() -> int:
            with client_of(server) as client:
                seen: Any = client.info("commandstats")
            return sum(seen.get(f"cmdstat_{name}", {}).get("calls", 0) for name in REQUESTS)

        return requests
    import psycopg

    def transactions() -> int:
        with psycopg.connect(server.url, autocommit=True) as connection:
            row = connection.execute(
                "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
            ).fetchone()
        return 0 if row is None else int(row[0])

    return transactions


@contextmanager
def idle_workers(url: str, namespace: str, workers: int, queues: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes of idle workers, and wait until all run."""
    number = min(PROCESSES, workers)
    with ExitStack() as stack:
        processes = []
        for process in range(number):
            first, last = workers * process // number, workers * (process + 1) // number
            given = {
                "url": url, "namespace": namespace, "workers": last - first, "queues": queues, "first": first,
            }  # fmt: skip
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.fault.idle_workers", json.dumps(given)], cwd=ROOT, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
                )
            )  # fmt: skip
            stack.callback(_end, processes[-1])
        for running in processes:
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
        yield processes


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=60)


def steps_of(process: subprocess.Popen[str]) -> int:
    """Return how many transactions a process has made on its file."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def let_pass(seconds: float) -> None:
    """Wait while requests are counted."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))


def rate(count_requests: Callable[[], int], limit: float, seconds: float) -> float:
    """Return how many requests a second there are, once all workers are idle."""

    def is_calm() -> bool:
        before = count_requests()
        let_pass(CALM_SECONDS)
        return count_requests() - before <= CALM_SECONDS * limit

    until(is_calm, "the calm after the start")
    before, began = count_requests(), time.monotonic()
    let_pass(seconds)
    return (count_requests() - before) / (time.monotonic() - began)


def rate_figure(name: str, found: float, limit: float, unit: str) -> Figure:
    return Figure(f"idle: {name}", f"{found:.2f} {unit} a second", f"< {limit:g}", found < limit)


def many_queues(server: Server, seconds: float) -> Iterator[Figure]:
    """A worker with a thousand queues, and many workers with one."""
    unit = "requests" if server.kind == "valkey" else "transactions"
    for count, queues, limit in ((1, 1_000, 2.0), (WORKERS, 1, 20.0)):
        place = Server(server.kind, server.url, server.port)
        place.prepare()
        with idle_workers(place.url, place.namespace, count, queues):
            name = f"{queues:,} queues in one worker" if count == 1 else f"{count} workers"
            yield rate_figure(name, rate(request_counter(place), limit, seconds), limit, unit)


def many_queues_in_a_file(url: str, seconds: float) -> Iterator[Figure]:
    """The same with a thousand queues on SQLite."""
    with idle_workers(url, "idle", 1, 1_000) as (process,):
        found = rate(lambda: steps_of(process), 2.0, seconds)
        yield rate_figure("1,000 queues in one worker", found, 2.0, "transactions")
