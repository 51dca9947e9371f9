"""The outbox beside faststream-outbox: publishing in the caller's transactions, and emptying what was published.

    python -m benchmarks.outbox --quick --json

`publish-tx` is one message in each transaction of a SQLAlchemy AsyncSession with asyncpg, beside a row of the user's;
`publish-tx-many` is 500 in each. `outbox-drain` is one worker process of each on a queue that was filled before, each
with its best settings. All by turns, on a server that waits for the disk; what counts is the median, and the ratio.
"""

from __future__ import annotations

import logging
import statistics
import subprocess
import sys

from benchmarks.measure import Report, arguments
from benchmarks.peers.harness import drain
from benchmarks.peers.registry import ROOT, environment, peer
from benchmarks.peers.turns import Turns
from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer

PEER = "faststream-outbox"
ROUNDS = 3
BATCH = 500
DRAIN = 40_000


def publish(kind: str, url: str, count: int, size: int) -> float:
    """How many messages a second a program of its own publishes."""
    chosen = peer(PEER) if kind == PEER else None
    python = sys.executable if chosen is None else chosen.command()[0]
    ran = subprocess.run(
        [python, "-m", "benchmarks.peers.outbox_publishing", kind, url, str(count), str(size)],
        cwd=ROOT, env=None if chosen is None else environment(chosen), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ran.returncode != 0:
        raise SystemExit(ran.stderr)
    return count / float(ran.stdout)


def main() -> None:
    """Run it, and print the figures."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)
    report = Report(options.json)
    share = 0.2 if options.quick else 1.0
    kinds = ["waypost", PEER] if peer(PEER).is_ready else ["waypost"]
    with PostgresServer(durable=True, autovacuum="on", shared_buffers="256MB", max_wal_size="4GB") as server:
        migrate(server.url)
        for name, count, size in (("publish-tx", 2_000, 1), ("publish-tx-many", 50_000, BATCH)):
            taken: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(ROUNDS):
                for kind in kinds:
                    taken[kind].append(publish(kind, server.url, round(count * share), size))
            medians = {kind: statistics.median(rates) for kind, rates in taken.items()}
            for kind, rate in medians.items():
                report.add(name, "postgres", kind, round(rate), "messages/s")
            if PEER in medians:
                ratio = round(medians["waypost"] / medians[PEER], 2)
                report.add(f"{name}-times-{PEER}", "postgres", "waypost", ratio, "x")
    with Turns(options.quick, "postgres") as turns:
        entries = turns.ours(["postgres"], round(DRAIN * share)) + turns.theirs(PEER, share=share)
        results = turns.take(entries, ROUNDS, drain)
        rates = {entry: statistics.median(one.rate for one in found) for entry, found in results.items() if found}
        for entry, rate in rates.items():
            report.add("outbox-drain", "postgres", entry.contestant.name, round(rate), "messages/s")
        ours = [rate for entry, rate in rates.items() if entry.contestant.peer is None]
        theirs = [rate for entry, rate in rates.items() if entry.contestant.peer is not None]
        if ours and theirs:
            report.add(f"outbox-drain-times-{PEER}", "postgres", "waypost", round(ours[0] / theirs[0], 2), "x")


if __name__ == "__main__":
    main()
