"""Dead letters that only grow, in a queue that keeps them until they are purged.

The setting deletes letters for good, so it is printed and never applied.
"""

from __future__ import annotations

from typing import Final

from waypost.formatting import format_call
from waypost.spark.insight.advice import DAY_MS, Advice, Facts, Measured, Rule, sql_text

KIND: Final = "dead_keep"
LETTERS_MIN: Final = 100
PARTS: Final = 4
KEEP_DAYS: Final = 30
FIELDS: Final = ("dead_keep_ms", "dead_max")


def growth(facts: Facts) -> list[int]:
    """Return by how many letters more there were after each of four equal parts of the time."""
    if not facts.dead_changes:
        return []
    first, last = facts.dead_changes[0][0], facts.dead_changes[-1][0]
    length = max(1, (last - first) / PARTS)
    parts = [0] * PARTS
    for at, change in facts.dead_changes:
        parts[min(PARTS - 1, int((at - first) / length))] += change
    return parts


def older(facts: Facts) -> int:
    """Return how many letters are older than the time that is advised, at most: any of them may be removed already."""
    now = max(facts.now_ms, facts.dead_changes[-1][0])
    return sum(change for at, change in facts.dead_changes if change > 0 and at < now - KEEP_DAYS * DAY_MS)


def measure(facts: Facts, subject: str) -> Measured | None:
    """Return 1 if dead letters are kept without a limit, 0 if there is one."""
    unlimited = facts.policy.dead_keep_ms is None and facts.policy.dead_max is None
    return Measured(float(unlimited), max(1, len(facts.dead_changes)))


def find(facts: Facts) -> list[Advice]:
    """Advise a time after which dead letters are removed, if they grow all the time."""
    parts, total = growth(facts), sum(change for _, change in facts.dead_changes)
    is_limited = facts.policy.dead_keep_ms is not None or facts.policy.dead_max is not None
    if is_limited or total < LETTERS_MIN or any(part <= 0 for part in parts):
        return []
    call = format_call("configure", facts.queue, dead_keep=KEEP_DAYS * DAY_MS // 1000)
    days = max(1.0, (facts.dead_changes[-1][0] - facts.dead_changes[0][0]) / DAY_MS)
    return [
        Advice(
            KIND, facts.queue, "",
            f"{total:,} dead letters more in {days:.0f} days, and none is ever removed",
            {"more": total, "days": round(days, 1), "by_part": parts, "older": older(facts)}, total,
            "SELECT date_trunc('day', minute) AS day, sum(dead) AS dead, sum(redriven) AS redriven FROM gold_minutes "
            f"WHERE queue = {sql_text(facts.queue)} GROUP BY 1 ORDER BY 1",
            f"letters older than {KEEP_DAYS} days are deleted for good: up to {older(facts):,} at once, and then about "
            f"{total / days:,.0f} a day", 1.0, 0.0,
            code=f"{call}  # deletes letters; redrive or export what you need first",
        )
    ]  # fmt: skip


RULE: Final = Rule(KIND, find, measure, FIELDS)
