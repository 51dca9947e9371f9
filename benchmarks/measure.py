"""How a figure is measured and printed.

Contenders run by turns in one process on one machine, since every figure moves with the machine's load; what counts
is the median of each and their ratio within the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.peers.protocol import server_seconds


@dataclass(frozen=True, eq=False)
class Contender:
    """One of the implementations that are compared."""

    peer: str
    run: Callable[[], object]
    #: How many messages one run moves.
    count: int
    #: Prepares each run; not measured.
    prepare: Callable[[], object] = lambda: None
    #: A setting that is not the default, a suffix of the figure's name.
    variant: str = ""


@dataclass
class Report:
    """Prints figures as they are measured: for people, or with `--json` for scripts."""

    as_json: bool
    figures: list[dict[str, object]] = field(default_factory=list)

    def add(self, name: str, store: str, peer: str, value: float, unit: str) -> None:
        """Print one figure."""
        figure: dict[str, object] = {"name": name, "store": store, "peer": peer, "value": value, "unit": unit}
        self.figures.append(figure)
        if self.as_json:
            print(json.dumps(figure), flush=True)
        else:
            label = f"{value:,.0f}" if value >= 100 else f"{value:,.3f}"
            print(f"{store:8} {name:34} {peer:8} {label:>12} {unit}", flush=True)

    def rates(
        self, name: str, store: str, contenders: list[Contender], rounds: int, server: int | None = None
    ) -> dict[str, float]:
        """Run contenders by turns; print the median rate of each, and ours over the ceiling's.

        With the process id of a server (0: there is none) the processor time per message is printed too.
        """
        results_by_entry: dict[Contender, list[float]] = {contender: [] for contender in contenders}
        costs: dict[Contender, list[tuple[float, float]]] = {contender: [] for contender in contenders}
        for turn in range(rounds + 1):
            for contender in contenders:
                contender.prepare()
                served, spent, start = server_seconds(server or 0), time.process_time(), time.perf_counter()
                contender.run()
                seconds, spent = time.perf_counter() - start, time.process_time() - spent
                if turn:  # the first turn is a warm-up of caches, connections and scripts
                    results_by_entry[contender].append(contender.count / seconds)
                    costs[contender].append((spent, server_seconds(server or 0) - served))
        medians = {f"{c.variant} {c.peer}".strip(): statistics.median(rates) for c, rates in results_by_entry.items()}
        for contender, rates in results_by_entry.items():
            label = f"{name}-{contender.variant}" if contender.variant else name
            self.add(label, store, contender.peer, round(statistics.median(rates)), "messages/s")
            if server is not None:
                for suffix, place in (("cpu", 0), ("server-cpu", 1)):
                    cost = statistics.median(each[place] for each in costs[contender]) / contender.count * 1e6
                    self.add(f"{label}-{suffix}", store, contender.peer, round(cost, 1), "us/message")
        if "raw" in medians:
            self.add(f"{name}-to-raw", store, "waypost", round(medians["waypost"] / medians["raw"], 3), "x")
        return medians


def arguments(description: str) -> argparse.Namespace:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer messages and rounds: a minute or two")
    parser.add_argument("--json", action="store_true", help="one JSON object per figure")
    parser.add_argument("--store", choices=("valkey", "sqlite", "postgres"), help="only this store")
    return parser.parse_args(sys.argv[1:])
