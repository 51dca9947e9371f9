"""The outbox beside faststream-outbox: publishing in the caller's transactions, and emptying what was published.

    python -m benchmarks.outbox --quick --json

`publish-tx` is one message in each transaction of a SQLAlchemy AsyncSession with asyncpg, beside a row of the user's;
`publish-tx-many` is 500 in each. `outbox-drain` is one worker process of each on a queue that was filled before, each
with its best settings. All by turns, on a server that waits for the disk; what counts is the median, and the ratio.

`…-cpu` is the processor time of a message, in the program and in the server together: on a busy machine the rates mean
little, and this figure is still useful.
"""

from __future__ import annotations

import logging
import statistics
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.measure import Report, arguments
from benchmarks.peers.harness import drain
from benchmarks.peers.protocol import server_seconds
from benchmarks.peers.registry import ROOT, environment, peer
from benchmarks.peers.turns import Turns
from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer

PEER = "faststream-outbox"
ROUNDS = 3
BATCH = 500
DRAIN = 40_000


@dataclass(frozen=True, slots=True)
class Published:
    """The result of one run."""

    rate: float
    #: Processor time of the program and of the server, for each message.
    cpu_microseconds: float


def publish(kind: str, server: PostgresServer, count: int, size: int) -> Published:
    """Publish `count` messages in a separate program."""
    chosen = peer(PEER) if kind == PEER else None
    python = sys.executable if chosen is None else chosen.command()[0]
    assert server.pid is not None
    before = server_seconds(server.pid)
    ran = subprocess.run(
        [python, "-m", "benchmarks.peers.outbox_publishing", kind, server.url, str(count), str(size)],
        cwd=ROOT, env=None if chosen is None else environment(chosen), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ran.returncode != 0:
        raise SystemExit(ran.stderr)
    seconds, client_seconds = map(float, ran.stdout.split())
    return Published(count / seconds, (client_seconds + server_seconds(server.pid) - before) / count * 1e6)


def transactions(report: Report, name: str, count: int, size: int) -> None:
    """Publish in transactions of `size` messages, beside the peer if it is set up."""
    kinds = ["waypost", PEER] if peer(PEER).is_ready else ["waypost"]
    results_by_entry: dict[str, list[Published]] = {kind: [] for kind in kinds}
    with PostgresServer(durable=True, autovacuum="on", shared_buffers="256MB", max_wal_size="4GB") as server:
        migrate(server.url)
        for _ in range(ROUNDS):
            for kind in kinds:
                results_by_entry[kind].append(publish(kind, server, count, size))
    rates = {kind: statistics.median(one.rate for one in runs) for kind, runs in results_by_entry.items()}
    for kind, runs in results_by_entry.items():
        report.add(name, "postgres", kind, round(rates[kind]), "messages/s")
        cpu = statistics.median(one.cpu_microseconds for one in runs)
        report.add(f"{name}-cpu", "postgres", kind, round(cpu, 1), "us/message")
    if PEER in kinds:
        report.add(f"{name}-times-{PEER}", "postgres", "waypost", round(rates["waypost"] / rates[PEER], 2), "x")


def main() -> None:
    """Run it, and print the figures."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)
    report = Report(options.json)
    share = 0.2 if options.quick else 1.0
    for name, count, size in (("publish-tx", 2_000, 1), ("publish-tx-many", 50_000, BATCH)):
        transactions(report, name, round(count * share), size)
    with Turns(options.quick, "postgres") as turns:
        entries = turns.ours(["postgres"], round(DRAIN * share)) + turns.theirs(PEER, share=share)
        results = turns.take(entries, ROUNDS, drain)
        drained = {entry: statistics.median(one.rate for one in found) for entry, found in results.items() if found}
        for entry, rate in drained.items():
            report.add("outbox-drain", "postgres", entry.contestant.name, round(rate), "messages/s")
        ours = [rate for entry, rate in drained.items() if entry.contestant.peer is None]
        theirs = [rate for entry, rate in drained.items() if entry.contestant.peer is not None]
        if ours and theirs:
            report.add(f"outbox-drain-times-{PEER}", "postgres", "waypost", round(ours[0] / theirs[0], 2), "x")


if __name__ == "__main__":
    main()
