"""How fast one worker process empties a queue, beside other queues.

    python -m benchmarks.worker --quick --json

`drain` is `waypost worker` with its defaults (leases, at least once, one handler call per message, concurrency 10,
journal `all`) in its own process, with an async handler that only records its start, on a queue that was filled before.
The rate is counted from the first start of a handler to the last, so no program's start-up counts. Peers run with the
settings that were best for them, by turns with ours. `drain-batch` has handlers of batches; other kinds of handlers
have their own names. `cpu` is the processor time of the worker process per message, which a busy machine affects less.
Valkey has no persistence here; PostgreSQL and SQLite wait for the disk.

`--profile` prints where the time of one drain goes instead; with `--store` on that store.
"""

from __future__ import annotations

import cProfile
import itertools
import logging
import pstats
import statistics
import sys
from typing import Any

from benchmarks.core import BODY
from benchmarks.measure import Report, arguments
from benchmarks.peers.harness import drain
from benchmarks.peers.hosts import host
from benchmarks.peers.turns import Entry, Turns
from waypost import Waypost
from waypost.store.postgres import migrate

STORES = ("valkey", "postgres", "sqlite")
#: Messages of ours in one drain: about a second's work.
COUNTS = {"valkey": 100_000, "postgres": 40_000, "sqlite": 25_000}
PEERS = ("dramatiq", "bullmq", "taskiq", "arq", "pgqueuer", "graphile-worker")
#: Other ways to handle a message, and how they are called in the figures.
VARIANTS = {"turn": "one-turn", "thread": "threads", "once": "at-most-once"}
ROUNDS = 3


async def nothing(body: dict[str, Any]) -> None:
    """The handler of the profile."""


def rates(report: Report, turns: Turns, names: tuple[str, str], entries: list[Entry]) -> None:
    """Print the medians, and the ratio of our rate to that of each peer. `names` are those of the rate and the time."""
    results_by_entry = turns.take(entries, ROUNDS, drain)
    medians = {entry: statistics.median(one.rate for one in results) for entry, results in results_by_entry.items()}
    for entry, results in results_by_entry.items():
        cpu = statistics.median(one.cpu_us for one in results)
        report.add(names[0], entry.store, entry.contestant.name, round(medians[entry]), "messages/s")
        report.add(names[1], entry.store, entry.contestant.name, round(cpu, 1), "us/message")
    for ours, theirs in itertools.product(medians, medians):
        if ours.contestant.peer is None and theirs.contestant.peer is not None and ours.store == theirs.store:
            ratio = round(medians[ours] / medians[theirs], 2)
            report.add(f"times-{theirs.contestant.name}", ours.store, "waypost", ratio, "x")


def profile(store: str, count: int) -> None:
    """Print where the time goes, by function: the worker runs in this process, since a profile slows it anyway."""
    with host(store) as place, place.place() as url:
        if store == "postgres":
            migrate(url)
        with Waypost(url) as post:
            post.handler("profiled")(nothing)
            post.publish_many("profiled", itertools.repeat(BODY, count))
            profiler = cProfile.Profile()
            profiler.enable()
            post.worker().run(until_empty=True, signals=False)
            profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    """Run the benchmark of the command line."""
    wants_profile = "--profile" in sys.argv
    if wants_profile:
        sys.argv.remove("--profile")
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)
    if wants_profile:
        profile(options.store or "valkey", COUNTS[options.store or "valkey"])
        return
    report = Report(options.json)
    share = 0.4 if options.quick else 1.0
    with Turns(options.quick, options.store) as turns:
        entries = [entry for store in STORES for entry in turns.ours([store], round(COUNTS[store] * share))]
        rates(report, turns, ("drain", "cpu"), entries + turns.theirs(*PEERS, share=share))
        batches = turns.ours(["valkey"], round(COUNTS["valkey"] * share), "batch")
        rates(report, turns, ("drain-batch", "cpu-batch"), batches + turns.theirs("faststream", share=share))
        for variant, name in VARIANTS.items() if not options.quick else ():
            slower = [entry for store in STORES for entry in turns.ours([store], COUNTS[store] // 4, variant)]
            rates(report, turns, (name, f"cpu-{name}"), slower)


if __name__ == "__main__":
    main()
