"""Priorities that starve: messages of a low priority wait for minutes while higher ones come."""

from __future__ import annotations

from typing import Final

from waypost.spark.insight.advice import Advice, Facts, Measured, Rule, is_within, join_spans, rank, sql_text

KIND: Final = "priorities"
CLAIMS_MIN: Final = 50
WAIT_MS_MIN: Final = 60_000
TIMES_MIN: Final = 10
#: While they wait, at least this part of the claims is of higher priorities: otherwise they wait for each other.
PASSED_MIN: Final = 0.5


def waits_of(facts: Facts) -> dict[int, list[int]]:
    """Return the waits of first claims by priority."""
    found: dict[int, list[int]] = {}
    for row in facts.deliveries:
        if row.cause is None and row.priority is not None:
            found.setdefault(row.priority, []).append(row.wait_ms)
    return {priority: waits for priority, waits in found.items() if len(waits) >= CLAIMS_MIN}


def passed_by(facts: Facts, priority: int) -> float:
    """Return which part of the claims were of higher priorities while messages of this one waited."""
    spans = join_spans(
        (row.claimed_ms - row.wait_ms, row.claimed_ms) for row in facts.deliveries if row.priority == priority
    )
    own = higher = 0
    for row in facts.deliveries:
        if row.priority is not None and is_within(spans, row.claimed_ms):
            own += row.priority == priority
            higher += row.priority > priority
    return higher / max(1, own + higher)


def measure(facts: Facts, subject: str) -> Measured | None:
    """Return p95 of the waits of a priority, in milliseconds."""
    waits = waits_of(facts).get(int(subject))
    return None if waits is None else Measured(rank(waits, 0.95), len(waits))


def find(facts: Facts) -> list[Advice]:
    """Name priorities that wait for long behind higher ones."""
    waits = {priority: rank(own, 0.95) for priority, own in waits_of(facts).items()}
    found = []
    for priority, wait in sorted(waits.items()):
        higher = {other: value for other, value in waits.items() if other > priority}
        if not higher or wait < WAIT_MS_MIN or wait < TIMES_MIN * max(*higher.values(), 100.0):
            continue
        if passed_by(facts, priority) < PASSED_MIN:
            continue
        count = len(waits_of(facts)[priority])
        above = max(higher.values())
        found.append(
            Advice(
                KIND, facts.queue, str(priority),
                f"messages of priority {priority} wait {wait / 1000:.0f} s (p95), higher ones at most "
                f"{above / 1000:.1f} s",
                {"priority": priority, "wait_p95_ms": round(wait), "wait_higher_p95_ms": round(above)}, count,
                "SELECT priority, count(*) AS messages, avg(wait_ms) AS wait_ms, max(wait_ms) AS longest_ms "
                f"FROM silver_deliveries WHERE queue = {sql_text(facts.queue)} GROUP BY priority ORDER BY priority",
                f"messages of priority {priority} have slots of their own", wait, float(WAIT_MS_MIN),
                code=f"publish what has priority {priority} to a queue of its own with a handler of its own, or add "
                "workers",
            )
        )  # fmt: skip
    return found


RULE: Final = Rule(KIND, find, measure)
