"""Whether anything grows under a steady load: latencies, tables, keys and memory, by parts of one long run.

    python -m benchmarks.soak --quick --json        two minutes for both stores; without --quick thirty
    python -m benchmarks.soak --seconds 600 --store postgres

A round publishes into a plain queue, a capped one that drops its oldest and one that refuses, queues with keys
(`replace`, and a window), a queue of timers, one whose handler sends messages on (`then`), and a chain with a message
that waits for it; then it claims and settles what there is, one message at a time. Rounds begin at a steady rate. The
time is cut into ten parts: of the second, the middle and the last, it prints the p50 and p99 of publish, claim and
settle, those of a raw statement measured in the same part, the server's processor time for a round, and what the store
keeps.

`…-p50-growth` is the last part over the second one, and `…-growth-to-raw` the same with each divided by its raw
statement. Both move with the load of the machine; `soak-cpu-growth`, processor time of all of the server's processes,
moves least. `soak-rows-left` counts the rows of tables that hold what waits, `soak-keys-left` the keys of Valkey that
have no end. `soak-remembered` counts what is kept for a fixed time after its end, as 1 hour for a chain and 24 for the
arrival of a message sent on: it grows for that long at a steady rate, and then no more. `soak-journal`, with the
policies and the register beside it, grows until the first slices are full. `soak-size` is what waits, with indexes, on
PostgreSQL, and the memory of Valkey with all that it remembers.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import redis

from benchmarks.core import BODY
from benchmarks.measure import Report
from waypost import Waypost
from waypost.errors import QueueFull
from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import EmbeddedServer, ValkeyServer

PARTS = 10
#: The first part warms up; these are compared.
FIRST, MIDDLE, LAST = 1, PARTS // 2, PARTS - 1
ROUNDS_A_SECOND = 20.0
QUICK_SECONDS, SECONDS = 50.0, 900.0
CAP = 100
KEYS = 25
VERBS = ("publish", "claim", "settle")
#: Tables whose rows stand for what waits, or are bounded by the number of clients.
HELD_TABLES = (
    "message", "tally", "total", "window", "result", "member", "blocker", "waiter", "ending", "sleeper", "operation",
    "rate",
)  # fmt: skip
REMEMBERED_TABLES = ("arrival", "chain")
TABLES = r"SELECT c.oid::regclass::text FROM pg_class c WHERE c.relkind = 'r' AND c.relname LIKE 'wp\_%'"


@dataclass
class Part:
    """What was measured in one part of the run."""

    milliseconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (*VERBS, "raw")})
    kept: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    cpu_seconds: float = 0

    def p50(self, verb: str) -> float:
        return statistics.median(self.milliseconds[verb])

    def p99(self, verb: str) -> float:
        values = sorted(self.milliseconds[verb])
        return values[len(values) * 99 // 100]


@dataclass(frozen=True)
class Place:
    """A store under load: its server, a raw statement on it, and what it keeps by name."""

    server: EmbeddedServer
    url: str
    raw: Callable[[], object]
    kept: Callable[[], dict[str, int]]


class Load:
    """One client that uses every feature, again and again."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._post = Waypost(place.url)
        self._round = 0
        self.part = Part()

    def __enter__(self) -> Load:
        configure = self._post.configure
        # The journal has its full length soon, so that its size is steady.
        for queue in ("plain", "first", "second", "chains", "after", "timers", "replaced", "window"):
            configure(queue, journal_max=2_000)
        configure("newest", max_pending=CAP, overload="drop_oldest", journal_max=2_000)
        configure("bounded", max_pending=CAP, overload="raise", journal_max=2_000)
        return self

    def __exit__(self, *_: object) -> None:
        self._post.close()

    def _timed(self, verb: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return call()
        finally:
            self.part.milliseconds[verb].append((time.perf_counter() - start) * 1000)

    def _publish(self, queue: str, **options: Any) -> Any:
        return self._timed("publish", lambda: self._post.publish(queue, BODY, **options))

    def _handle(self, queue: str, then: str | None = None) -> bool:
        """Claim one message and settle it; return whether there was one."""
        receiving = self._post.receive(queue)
        message = self._timed("claim", receiving.__enter__)
        if message is None:
            receiving.__exit__(None, None, None)
            return False
        if then is not None:
            message.then(then, BODY)
        elif queue == "plain":
            message.keep_result("kept", ttl=1)
        self._timed("settle", lambda: receiving.__exit__(None, None, None))
        return True

    def turn(self) -> None:
        """Run one round."""
        self._round += 1
        self.part.rounds += 1
        self._timed("raw", self._place.raw)
        self._publish("plain")
        self._publish("newest")
        with suppress(QueueFull):
            self._publish("bounded")
        self._publish("replaced", key=f"key {self._round % KEYS}", on_conflict="replace")
        self._publish("window", key=f"key {self._round}", window=1)
        self._publish("timers", delay=0.1)
        self._timed("raw", self._place.raw)
        self._publish("first")
        chain = self._publish("chains", chain=True)
        self._publish("after", after=[chain])
        self._handle("first", then="second")
        for queue in ("plain", "chains", "second", "after", "window", "timers"):
            self._handle(queue)
        self._timed("raw", self._place.raw)
        if self._round % 2:
            self._handle("bounded")
        if self._round % KEYS == 0:
            while self._handle("replaced"):
                pass


def cpu_seconds(server: EmbeddedServer) -> float:
    """Return the processor time of a server and its processes, also of those that have ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            values = path.read_text().rpartition(")")[2].split()
            if str(server.pid) in (path.parent.name, values[1]):
                # Only the first process counts the time of its ended children: the others have none.
                ticks += sum(int(value) for value in values[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def run(place: Place, seconds: float) -> list[Part]:
    """Return the parts of a run."""
    parts = []
    with Load(place) as load:
        began = time.monotonic()
        due = began
        for number in range(PARTS):
            load.part = Part()
            cpu = cpu_seconds(place.server)
            while time.monotonic() < began + seconds * (number + 1) / PARTS:
                load.turn()
                # A round that is late is not made up for: the rate is what the machine can do.
                due = max(due + 1 / ROUNDS_A_SECOND, time.monotonic())
                time.sleep(max(0.0, due - time.monotonic()))
            load.part.cpu_seconds = cpu_seconds(place.server) - cpu
            load.part.kept = place.kept()
            parts.append(load.part)
    return parts


@contextmanager
def postgres() -> Iterator[Place]:
    """A server that waits for its disk, with autovacuum."""
    with (
        PostgresServer(durable=True, autovacuum="on", autovacuum_naptime="15s", shared_buffers="128MB") as server,
        psycopg.connect(server.url, autocommit=True) as database,
        psycopg.connect(server.url, autocommit=True) as monitor,
    ):
        migrate(server.url)
        database.execute("CREATE TABLE raw (id bigserial PRIMARY KEY, data bytea)")

        def raw() -> None:
            database.execute("INSERT INTO raw (data) VALUES (%b)", (b"x" * 130,))

        def kept() -> dict[str, int]:
            tables = [name for (name,) in monitor.execute(TABLES)]
            found: Counter[str] = Counter()
            for table in tables:
                row = monitor.execute(
                    f"SELECT count(*), pg_total_relation_size('{table}') FROM ONLY {table}".encode()
                ).fetchone()
                assert row is not None
                name = table.removeprefix("wp_")
                kind = "rows" if name in HELD_TABLES else "remembered" if name in REMEMBERED_TABLES else "journal"
                found[kind] += row[0]
                found["bytes" if kind == "rows" else f"{kind} bytes"] += row[1]
                found[f"rows of {name}"] = row[0]
            return dict(found)

        yield Place(server, server.url, raw, kept)


@contextmanager
def valkey() -> Iterator[Place]:
    """A server in memory."""
    with ValkeyServer() as server, redis.Redis(port=server.port, password=server.password) as client:

        def raw() -> None:
            client.lpush("raw", b"x" * 130)
            client.ltrim("raw", 0, 99)

        def kept() -> dict[str, int]:
            info: dict[str, Any] = client.info("memory")
            keys = list(client.scan_iter(count=1_000))
            with client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.pttl(key)
                ends = pipeline.execute()
            # -1: it has no end. One that has ended since it was listed (-2) is neither.
            return {
                "keys": ends.count(-1), "remembered": sum(end >= 0 for end in ends), "bytes": int(info["used_memory"]),
            }  # fmt: skip

        yield Place(server, server.url, raw, kept)


def report_on(report: Report, store: str, parts: list[Part]) -> None:
    """Print the figures of one store."""
    first, middle, last = (parts[number] for number in (FIRST, MIDDLE, LAST))
    for verb in (*VERBS, "raw"):
        for name, part in (("first", first), ("middle", middle), ("last", last)):
            report.add(f"soak-{verb}-p50-{name}", store, "waypost", round(part.p50(verb), 3), "ms")
            report.add(f"soak-{verb}-p99-{name}", store, "waypost", round(part.p99(verb), 3), "ms")
    for verb in VERBS:
        growth = (last.p50(verb) / last.p50("raw")) / (first.p50(verb) / first.p50("raw"))
        report.add(f"soak-{verb}-p50-growth", store, "waypost", round(last.p50(verb) / first.p50(verb), 2), "x")
        report.add(f"soak-{verb}-p50-growth-to-raw", store, "waypost", round(growth, 2), "x")
    for name, part in (("first", first), ("middle", middle), ("last", last)):
        report.add(f"soak-cpu-{name}", store, "waypost", round(1000 * part.cpu_seconds / part.rounds, 2), "ms/round")
    growth = (last.cpu_seconds / last.rounds) / (first.cpu_seconds / first.rounds)
    report.add("soak-cpu-growth", store, "waypost", round(growth, 2), "x")
    report.add("soak-rounds", store, "waypost", sum(part.rounds for part in parts), "rounds")
    for name in sorted(last.kept):
        figures = [part.kept.get(name, 0) for part in (first, middle, last)]
        unit = "bytes" if name.endswith("bytes") else "keys" if store == "valkey" else "rows"
        if name.startswith("rows of "):
            if max(figures) >= 100:
                report.add(f"soak-{name.replace(' ', '-')}", store, "waypost", figures[-1], unit)
            continue
        label = {"rows": "rows-left", "keys": "keys-left", "bytes": "size"}.get(name, name.replace(" bytes", "-size"))
        for when, value in zip(("first", "middle"), figures, strict=False):
            report.add(f"soak-{label}-{when}", store, "waypost", value, unit)
        report.add(f"soak-{label}", store, "waypost", figures[-1], unit)
        report.add(f"soak-{label}-growth", store, "waypost", round(figures[-1] / max(1, figures[0]), 2), "x")


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two minutes for both stores")
    parser.add_argument("--json", action="store_true", help="one JSON object per figure")
    parser.add_argument("--seconds", type=float, metavar="N", help="so long for each store")
    parser.add_argument("--store", choices=("valkey", "postgres"), help="only this store")
    options = parser.parse_args(sys.argv[1:])
    logging.getLogger("waypost").setLevel(logging.ERROR)
    report = Report(options.json)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    for name, place in (("postgres", postgres), ("valkey", valkey)):
        if options.store in (None, name):
            with place() as made:
                report_on(report, name, run(made, seconds))


if __name__ == "__main__":
    main()
