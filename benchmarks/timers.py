"""How late timers are, beside other queues.

    python -m benchmarks.timers --quick --json

5,000 timers (1,000 with `--quick`) are published to a worker at its defaults, then come due evenly over 5 (or 2)
seconds. `lateness-p50` and `lateness-p99` are milliseconds from the due time to the start of the handler by the
machine's clock; `early` counts handlers that started before. Medians of three runs, by turns; `early` is their sum.
"""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass

from benchmarks.measure import Report, arguments
from benchmarks.peers.harness import Contestant, latenesses, percentile
from benchmarks.peers.hosts import Host
from benchmarks.peers.turns import Turns

STORES = ("valkey", "postgres", "sqlite")
PEERS = ("faststream-redis-timers", "celery", "faststream-outbox", "pgqueuer")
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Lateness:
    """One run."""

    median: float
    worst: float
    early: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many timers, over how many seconds they are due, and the lead in which they are published."""

    count: int
    span: float
    lead: float

    def measure(self, contestant: Contestant, host: Host) -> Lateness:
        """Measure one run of one contender."""
        late = latenesses(contestant, host, self.count, self.span, self.lead)
        return Lateness(percentile(late, 0.5), percentile(late, 0.99), sum(1 for one in late if one < 0))


def main() -> None:
    """Run the benchmark of the command line."""
    options = arguments(__doc__ or "")
    logging.getLogger("waypost").setLevel(logging.ERROR)
    report = Report(options.json)
    sizes = Sizes(1_000, 2.0, 1.5) if options.quick else Sizes(5_000, 5.0, 4.0)
    with Turns(options.quick, options.store) as turns:
        results_by_entry = turns.take(turns.ours(STORES) + turns.theirs(*PEERS), ROUNDS, sizes.measure)
        for entry, results in results_by_entry.items():
            name, store = entry.contestant.name, entry.store
            report.add("lateness-p50", store, name, round(statistics.median(one.median for one in results), 2), "ms")
            report.add("lateness-p99", store, name, round(statistics.median(one.worst for one in results), 2), "ms")
            report.add("early", store, name, sum(one.early for one in results), "timers")


if __name__ == "__main__":
    main()
