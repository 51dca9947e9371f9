"""Schedules that pile up: one that fires before its last run has ended, and many that fire at the same moment."""

from __future__ import annotations

import shlex
from collections import defaultdict
from itertools import pairwise
from typing import Final

from waypost.spark.insight.advice import Advice, Facts, Measured, Rule, ScheduledRun, rank, round_up_seconds, sql_text

FIRES_MIN: Final = 10
UNENDED_SHARE: Final = 0.2
#: Fires within this time are of one moment; a spike has so many of them.
MOMENT_MS: Final = 1_000
SPIKE_MIN: Final = 10
SPIKES_MIN: Final = 3
WAIT_MS_MIN: Final = 5_000
TIMES_MIN: Final = 10
#: Jitter is this part of a schedule's interval at most: its fires stay near their times.
JITTER_PART_MAX: Final = 0.1


# ---- a schedule that catches up with itself -----------------------------------------------------------------


def runs_of(facts: Facts) -> dict[str, list[ScheduledRun]]:
    """Return the runs of each schedule in their order."""
    found: dict[str, list[ScheduledRun]] = defaultdict(list)
    for run in sorted(facts.scheduled, key=lambda run: run.published_ms):
        found[run.schedule].append(run)
    return found


def unended(runs: list[ScheduledRun]) -> float:
    """Return the part of fires at which the run before had not ended."""
    pairs = list(pairwise(runs))
    late = sum(before.ended_ms is None or before.ended_ms > run.published_ms for before, run in pairs)
    return late / max(1, len(pairs))


def measure_pile_up(facts: Facts, subject: str) -> Measured | None:
    """Return the part of fires of a schedule at which the run before had not ended."""
    runs = runs_of(facts).get(subject, [])
    return Measured(unended(runs), len(runs)) if len(runs) >= FIRES_MIN else None


def find_pile_up(facts: Facts) -> list[Advice]:
    """Name schedules that fire before their last run has ended."""
    found = []
    for schedule, runs in sorted(runs_of(facts).items()):
        share = unended(runs)
        if len(runs) < FIRES_MIN or share < UNENDED_SHARE:
            continue
        gaps = [after.published_ms - run.published_ms for run, after in pairwise(runs)]
        lasts = [run.ended_ms - run.published_ms for run in runs if run.ended_ms is not None]
        seconds = round_up_seconds(max(2 * rank(gaps, 0.5), rank(lasts, 0.95)))
        found.append(
            Advice(
                "schedule", facts.queue, schedule,
                f"schedule {schedule!r} fired {share:.0%} of the time before its last run had ended",
                {"schedule": schedule, "fires": len(runs), "unended": round(share, 3),
                 "lasts_p95_ms": round(rank(lasts, 0.95)), "every_ms": round(rank(gaps, 0.5))},
                len(runs),
                "SELECT message_id, published_ms, ended_ms, lead(published_ms) OVER (ORDER BY published_ms) AS next_ms "
                f"FROM silver_messages WHERE queue = {sql_text(facts.queue)} AND schedule = {sql_text(schedule)}",
                "one run at a time", share, UNENDED_SHARE / 2,
                code=shlex.join(
                    ["waypost", "schedules", "save", schedule, "--queue", facts.queue, "--key", schedule, "--every",
                     str(seconds)]
                ) + "  # or more workers",
            )
        )  # fmt: skip
    return found


# ---- many schedules of one moment ---------------------------------------------------------------------------


def spikes_of(facts: Facts) -> list[list[ScheduledRun]]:
    """Return runs that were published together, if many were."""
    moments: dict[int, list[ScheduledRun]] = defaultdict(list)
    for run in facts.scheduled:
        moments[run.published_ms // MOMENT_MS].append(run)
    return [runs for runs in moments.values() if len(runs) >= SPIKE_MIN and len({run.schedule for run in runs}) > 1]


def measure_spike(facts: Facts, subject: str) -> Measured | None:
    """Return p95 of the waits of scheduled messages, in milliseconds."""
    waits = [run.wait_ms for run in facts.scheduled if run.wait_ms is not None]
    return Measured(rank(waits, 0.95), len(waits)) if len(waits) >= SPIKES_MIN * SPIKE_MIN else None


def jitter_of(runs: list[ScheduledRun], seconds: int) -> float:
    """Return the jitter of a schedule in seconds: as advised, and at most a small part of its shortest intervals."""
    gaps = [after.published_ms - run.published_ms for run, after in pairwise(runs)]
    return float(min(seconds, int(JITTER_PART_MAX * rank(gaps, 0.1) / 1000)))


def find_spike(facts: Facts) -> list[Advice]:
    """Advise jitter for schedules that fire together and whose messages wait for each other."""
    spikes, measured = spikes_of(facts), measure_spike(facts, "")
    if len(spikes) < SPIKES_MIN or measured is None:
        return []
    waits = [run.wait_ms for runs in spikes for run in runs if run.wait_ms is not None]
    ids = {(run.published_ms, run.wait_ms) for runs in spikes for run in runs}
    others = [
        row.wait_ms for row in facts.deliveries
        if row.cause is None and (row.claimed_ms - row.wait_ms, row.wait_ms) not in ids
    ]  # fmt: skip
    wait, otherwise = rank(waits, 0.95), rank(others, 0.5)
    if wait < WAIT_MS_MIN or wait < TIMES_MIN * max(otherwise, 100.0):
        return []
    # Four times as long as their messages take one after the other: then few of them meet.
    seconds, runs_by_name = round_up_seconds(4 * wait), runs_of(facts)
    wanted = {
        name: jitter_of(runs_by_name[name], seconds)
        for name in sorted({run.schedule for runs in spikes for run in runs} & facts.schedules.keys())
    }
    jitter = {name: value for name, value in wanted.items() if value > facts.schedules[name]}
    if not jitter:
        return []
    names, size = list(jitter), max(len(runs) for runs in spikes)
    return [
        Advice(
            "spike", facts.queue, "", f"{len(names)} schedules fire at the same moment: up to {size} messages together "
            f"wait {wait / 1000:.1f} s (p95)",
            {"schedules": len(names), "spikes": len(spikes), "together": size, "wait_p95_ms": round(wait),
             "wait_otherwise_p50_ms": round(otherwise)},
            len(waits),
            f"SELECT CAST(floor(published_ms / {MOMENT_MS}.0) AS BIGINT) * {MOMENT_MS} AS moment_ms, count(*) AS "
            f"messages, avg(wait_ms) AS wait_ms FROM silver_messages WHERE queue = {sql_text(facts.queue)} "
            f"AND schedule IS NOT NULL GROUP BY 1 HAVING count(*) >= {SPIKE_MIN} ORDER BY 2 DESC",
            f"the fires spread over up to {max(jitter.values()):.0f} s, so that they hardly wait for each other",
            measured.value, max(measured.value / 2, 1.0), jitter=jitter,
            jitter_before={name: facts.schedules[name] for name in names},
        )
    ]  # fmt: skip


PILE_UP: Final = Rule("schedule", find_pile_up, measure_pile_up)
SPIKE: Final = Rule("spike", find_spike, measure_spike)
