"""How long a message waits for an idle worker, beside other queues.

    python -m benchmarks.latency --quick --json

One producer process publishes 200 messages a second, one worker process handles them. `latency-p50` and `latency-p99`
are milliseconds from the beginning of the call to publish to the start of the handler; the first second is not
counted. Medians of three runs, by turns. Both sides read the same clock, which no adjustment of the time moves.
"""

from __future__ import annotations

import logging
import statistics
from functools import partial

from benchmarks.measure import Report, arguments
from benchmarks.peers.harness import Contestant, latencies, percentile
from benchmarks.peers.hosts import Host
from benchmarks.peers.turns import Turns

STORES = ("valkey", "postgres", "sqlite")
PEERS = ("taskiq", "huey", "bullmq", "pgqueuer", "faststream-outbox", "graphile-worker")
RATE = 200.0
ROUNDS = 3


def both(contestant: Contestant, host: Host, seconds: float) -> tuple[float, float]:
    """Return the two figures of one run."""
    waited = latencies(contestant, host, RATE, seconds)
    return percentile(waited, 0.5), percentile(waited, 0.99)


def main() -> None:
    """Run the benchmark of the command line."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)
    report = Report(options.json)
    with Turns(options.quick, options.store) as turns:
        entries = turns.ours(STORES) + turns.theirs(*PEERS)
        results_by_entry = turns.take(entries, ROUNDS, partial(both, seconds=2.0 if options.quick else 10.0))
        for entry, results in results_by_entry.items():
            for name, values in zip(("latency-p50", "latency-p99"), zip(*results, strict=True), strict=True):
                report.add(name, entry.store, entry.contestant.name, round(statistics.median(values), 2), "ms")


if __name__ == "__main__":
    main()
