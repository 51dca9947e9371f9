"""How soon a sleeping worker starts a published message, and what an idle worker costs.

    python -m benchmarks.wake --quick --json

`start` is the time from the call of `publish` in one process to the first line of the handler in another, at 200
messages a second (SQLite: 20), with the worker asleep between most of them. `poll` beside it is the same without
wake-ups. `idle` is the requests of an idle worker in a second. What a commit takes with sleepers is measured by
`make faults`.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import Report, arguments
from waypost import AsyncWaypost, Waypost
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer

RATE = 200
SPAWN = multiprocessing.get_context("spawn")


def work(url: str, wake: str | None, queue: str, started: Any, stop: Any, answers: Any, mode: str) -> None:
    """Run one worker process, which sends back the nanoseconds from publish to start of each message."""
    logging.getLogger("waypost").setLevel(logging.ERROR)
    latencies: list[int] = []

    async def handle(body: int) -> None:
        latencies.append(time.perf_counter_ns() - body)

    if mode == "sync":
        post = Waypost(url, wake=wake)
        post.handler(queue)(handle)
        with post, post.worker():
            started.set()
            stop.wait()
    else:

        async def run() -> None:
            async with AsyncWaypost(url, wake=wake) as post:
                post.handler(queue)(handle)
                worker = post.worker()
                async with worker:
                    started.set()
                    await asyncio.to_thread(stop.wait)

        asyncio.run(run())
    answers.put(latencies)


def publish_evenly(post: Waypost, queue: str, count: int, rate: float) -> None:
    """Publish messages at a steady rate."""
    start = time.perf_counter()
    for number in range(count):
        pause = start + number / rate - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        post.publish(queue, time.perf_counter_ns())


def start_latency(url: str, wake: str | None, count: int, rate: float = RATE, mode: str = "async") -> list[float]:
    """Return the milliseconds from publish to start of each message."""
    queue = f"start-{time.monotonic_ns()}"
    started, stop, answers = SPAWN.Event(), SPAWN.Event(), SPAWN.Queue()
    process = SPAWN.Process(target=work, args=(url, wake, queue, started, stop, answers, mode))
    process.start()
    try:
        started.wait(30)
        with Waypost(url, wake=wake) as post:
            time.sleep(0.5)  # the worker sleeps by then
            publish_evenly(post, queue, count, rate)
            while post.ledger(queue).done < count:
                time.sleep(0.02)
        stop.set()
        latencies: list[int] = answers.get(timeout=30)
    finally:
        stop.set()
        process.join(30)
    return [nanoseconds / 1e6 for nanoseconds in latencies[count // 10 :]]


@contextmanager
def stores(only: str | None) -> Iterator[dict[str, str]]:
    with ValkeyServer() as valkey, PostgresServer() as postgres, tempfile.TemporaryDirectory(dir="/tmp") as folder:
        from waypost.store.postgres import migrate

        migrate(postgres.url)
        urls = {"valkey": valkey.url, "postgres": postgres.url, "sqlite": f"sqlite:///{Path(folder) / 'bench.db'}"}
        yield {name: url for name, url in urls.items() if only in (None, name)}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


# ---- the cost of an idle worker --------------------------------------------------------------------------------------


def requests(store: str, url: str) -> int:
    """Return how many commands or transactions a server has counted so far."""
    if store == "valkey":
        import redis

        with redis.Redis.from_url(url.replace("valkey://", "redis://")) as client:
            seen: Any = client.info("commandstats")
        return sum(seen.get(name, {}).get("calls", 0) for name in ("cmdstat_evalsha", "cmdstat_ping"))
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    return 0 if row is None else int(row[0])


def idle_rate(store: str, url: str, seconds: float) -> float:
    """Return the commands or transactions per second of one idle worker process."""
    started, stop, answers = SPAWN.Event(), SPAWN.Event(), SPAWN.Queue()
    arguments = (url, None, f"idle-{time.monotonic_ns()}", started, stop, answers, "async")
    process = SPAWN.Process(target=work, args=arguments)
    process.start()
    try:
        started.wait(30)
        time.sleep(2)
        before = requests(store, url)
        time.sleep(seconds)
        return (requests(store, url) - before) / seconds
    finally:
        stop.set()
        answers.get(timeout=30)
        process.join(30)


def main() -> None:
    """Run the benchmark of the command line."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)
    report = Report(options.json)
    count, rounds = (400, 3) if options.quick else (2_000, 5)
    with stores(options.store) as urls:
        for store, url in urls.items():
            latencies: dict[str, list[float]] = {"async": [], "sync": [], "poll": []}
            # Each message on SQLite waits for the disk three times: at 200 a second this would measure the disk.
            number, rate = (count // 5, RATE / 10) if store == "sqlite" else (count, RATE)
            for _ in range(rounds):
                latencies["async"] += start_latency(url, None, number, rate)
                latencies["sync"] += start_latency(url, None, number, rate, "sync")
                latencies["poll"] += start_latency(url, "poll", number // 4, rate)
            for name, values in latencies.items():
                report.add(f"start-{name}-p50", store, "waypost", round(statistics.median(values), 3), "ms")
                report.add(f"start-{name}-p99", store, "waypost", round(percentile(values, 0.99), 3), "ms")
            if store != "sqlite":
                seconds = 15.0 if options.quick else 60.0
                report.add("idle", store, "waypost", round(idle_rate(store, url, seconds), 3), "requests/s")


if __name__ == "__main__":
    main()
