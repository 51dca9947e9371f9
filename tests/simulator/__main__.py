"""Run the simulator.

make simulate SEED=7             one seed: its story if something is wrong with it, shortened
make simulate HOURS=100          drawn scenarios until so many hours were simulated, on all cores
make simulate SEED=1000 HOURS=5  the same, from a seed on
make simulate PLANTED=1          find each planted fault: fault, seed, seconds, rule
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulator.checker import Judged, run_and_judge
from tests.simulator.coverage import pairs_of, table
from tests.simulator.draw import draw
from tests.simulator.planted import FAULTS, SECONDS_MAX, Found, find_on_all_cores
from tests.simulator.real_stores import STORES
from tests.simulator.real_stores import run_seed as run_real_seed
from tests.simulator.records import Finding
from tests.simulator.scenario import Scenario, to_json
from tests.simulator.shrink import Shrinker, size_of
from tests.simulator.story import write_story

#: Failing seeds whose stories are told; of the others only the findings are shown.
STORIES_MAX = 3
#: So long a failing scenario is made shorter.
SHRINK_SECONDS = 60.0


@dataclass(slots=True)
class Batch:
    """What some scenarios showed."""

    scenarios: int = 0
    hours: float = 0.0
    happenings: int = 0
    #: Processor time that it took.
    seconds: float = 0.0
    failing: list[tuple[int, list[Finding]]] = field(default_factory=list)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, other: Batch) -> None:
        self.scenarios += other.scenarios
        self.hours += other.hours
        self.happenings += other.happenings
        self.seconds += other.seconds
        self.failing += other.failing
        self.pairs += other.pairs


def run_seed(seed: int) -> Batch:
    """Run the scenario of a seed."""
    began = time.process_time()
    judged = run_and_judge(draw(seed))
    failing = [(seed, judged.findings)] if judged.findings else []
    pairs = pairs_of(judged.history)
    spent = time.process_time() - began
    return Batch(1, judged.scenario.length_hours, len(judged.history), spent, failing, pairs)


@contextmanager
def no_log() -> Iterator[None]:
    """Log nothing: with faults there would be a line for each."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run_seeds(seeds: range) -> Batch:
    """Run the scenarios of some seeds."""
    batch = Batch()
    with no_log():
        for seed in seeds:
            batch.add(run_seed(seed))
    return batch


def run_hours(first_seed: int, hours: float, *, processes: int | None = None) -> Iterator[Batch]:
    """Run drawn scenarios in several processes until so many hours were simulated; what each part showed."""
    part = 10
    count = processes or os.cpu_count() or 1
    simulated, seed = 0.0, first_seed
    with ProcessPoolExecutor(count) as pool:
        while simulated < hours:
            parts = [range(seed + n * part, seed + (n + 1) * part) for n in range(count)]
            seed = parts[-1].stop
            for batch in pool.map(run_seeds, parts):
                simulated += batch.hours
                yield batch


def shorten(judged: Judged, *, tries: int = 400, seconds: float | None = SHRINK_SECONDS) -> Judged:
    """The same finding in a shorter scenario."""
    rule, at = judged.findings[0].rule, judged.findings[0].at

    def still_fails(scenario: Scenario) -> bool:
        return any(finding.rule == rule for finding in run_and_judge(scenario).findings)

    return run_and_judge(Shrinker(still_fails, tries=tries, seconds=seconds).shrink(judged.scenario, until=at))


def show_failing(seed: int) -> None:
    """Print the story of a failing seed, shortened, and how to run it again."""
    judged = run_and_judge(draw(seed))
    short = shorten(judged)
    print(f"seed {seed}: {size_of(judged.scenario)}; shortened to {size_of(short.scenario)}")
    print(write_story(short if short.findings else judged))
    path = Path("/tmp" if os.name == "posix" else ".") / f"waypost-simulator-{os.getpid()}-{seed}.json"
    path.write_text(to_json(short.scenario))
    print(f"the shortened scenario: {path}; once it is understood it belongs into tests/simulator/corpus")


def hours_on_two_cores(total: Batch) -> float:
    """How many hours two cores would simulate in an hour if they did nothing else: by the processor time."""
    return total.hours / max(total.seconds, 1e-9) * 3600 * 2


def simulate_hours(first_seed: int, hours: float) -> int:
    """Run for so many simulated hours, and print what was seen."""
    began, total = time.monotonic(), Batch()
    for batch in run_hours(first_seed, hours):
        for seed, findings in batch.failing:
            print(f"seed {seed}: {findings[0]}", flush=True)
        total.add(batch)
    spent = time.monotonic() - began
    print("\n".join(table(total.pairs)))
    print(
        f"{total.hours:,.0f} hours in {total.scenarios:,} scenarios from seed {first_seed} on, {total.happenings:,} "
        f"happenings, in {spent:.0f} s: {total.hours / spent * 3600:,.0f} hours an hour"
    )
    print(
        f"processor time {total.seconds:.0f} s: {hours_on_two_cores(total):,.0f} hours an hour of two cores that do "
        "nothing else"
    )
    print(f"violations: {sum(len(findings) for _, findings in total.failing)} in {len(total.failing)} scenarios")
    for seed, _ in total.failing[:STORIES_MAX]:
        print()
        show_failing(seed)
    return 1 if total.failing else 0


def find_all(first_seed: int = 1, *, seconds: float = SECONDS_MAX) -> Iterator[Found]:
    """Look for each planted fault in turn."""
    for one in FAULTS:
        yield find_on_all_cores(one, first_seed=first_seed, seconds=seconds)


def simulate_planted(first_seed: int) -> int:
    """Find each planted fault, and print by which seed, in how long and by which rule."""
    found = 0
    for one in find_all(first_seed):
        found += one.finding is not None
        print(one, flush=True)
    print(f"planted faults found: {found} of {len(FAULTS)}")
    return 0 if found == len(FAULTS) else 1


def simulate_seed(seed: int) -> int:
    """Run one seed, and print its story if something is wrong with it."""
    judged = run_and_judge(draw(seed))
    if judged.findings:
        show_failing(seed)
        return 1
    print(f"seed {seed}: {size_of(judged.scenario)}, {judged.scenario.length_hours:.2f} hours: nothing is wrong")
    return 0


def simulate_real(seed: int, store: str) -> int:
    """Run the scenario of a seed against a real store, and print what was wrong with it."""
    result = run_real_seed(seed, store)
    faults = ", ".join(f"{count} {name}" for name, count in result.faults.items()) or "none"
    print(f"seed {seed} on {store}: {result.events} events; faults: {faults}; violations: {len(result.findings)}")
    if result.left_out:
        print("faults that cannot be made here: " + ", ".join(f"{n} {name}" for name, n in result.left_out.items()))
    for finding in result.findings:
        print(f"  {finding}")
    return 1 if result.findings else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description="Simulate waypost with faults.")
    parser.add_argument("--seed", type=int, help="the seed, or the first of them")
    parser.add_argument("--hours", type=float, help="simulate for so many hours")
    parser.add_argument("--planted", action="store_true", help="find each planted fault")
    parser.add_argument("--store", choices=STORES, help="a real store, in real time")
    given = parser.parse_args(arguments)
    with no_log():
        if given.store is not None:
            return simulate_real(given.seed or 1, given.store)
        if given.planted:
            return simulate_planted(given.seed or 1)
        if given.hours is None and given.seed is not None:
            return simulate_seed(given.seed)
        return simulate_hours(given.seed or 1, given.hours or 50.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
