"""Figures of the simulator: hours with faults, and planted faults that are found."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.fault.figure import Figure
from tests.simulator.__main__ import Batch, hours_on_two_cores, run_hours
from tests.simulator.coverage import all_pairs, missing
from tests.simulator.planted import FAULTS, SECONDS_MAX, find, find_on_all_cores

HOURS, HOURS_QUICK = 500.0, 15.0


def simulator_figures(*, quick: bool, seed: int) -> Iterator[Figure]:
    """Simulated hours without a violation, and each planted fault with the seed that finds it."""
    began, total = time.monotonic(), Batch()
    for batch in run_hours(seed, HOURS_QUICK if quick else HOURS):
        total.add(batch)
    an_hour = total.hours / (time.monotonic() - began) * 3600
    two_cores = hours_on_two_cores(total)
    violations = [str(finding) for _, findings in total.failing for finding in findings]
    yield Figure(
        f"simulator, {total.hours:.0f} hours in {total.scenarios} scenarios from seed {seed} on, {an_hour:.0f} an hour "
        f"({two_cores:.0f} by the processor time of two cores)",
        f"violations {len(violations)}" + (f", the first: {violations[0]}" if violations else ""),
        "0",
        not violations,
    )
    count, never = len(all_pairs()), len(missing(total.pairs))
    if not quick:
        yield Figure(
            "simulator, pairs of a fault and an operation that met", f"{count - never} of {count}", "95 %",
            never <= count * 0.05,
        )  # fmt: skip
    found = 0
    for one in FAULTS:
        # Quick: from a seed that is known to find it.
        result = find(one, first_seed=one.seed, seconds=SECONDS_MAX) if quick else find_on_all_cores(one)
        found += result.finding is not None
        rule = "nothing" if result.finding is None else result.finding.rule
        yield Figure(
            f"simulator, planted fault: {one.name}",
            f"found by {rule}, seed {result.seed}, {result.scenarios} scenarios",
            " or ".join(one.rules),
            result.finding is not None,
        )
    yield Figure("simulator, planted faults found", f"{found} of {len(FAULTS)}", "28", found == len(FAULTS) == 28)
