"""Groups that starve: while one group has much waiting, the messages of the others wait behind it.

A queue that takes turns between its groups is left alone: where others still wait, there are too few workers.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from waypost.policy import GROUP_FIELDS
from waypost.spark.insight.advice import Advice, Facts, Measured, Rule, is_within, merge_spans, rank, sql_text

KIND: Final = "groups"
CLAIMS_MIN: Final = 200
OTHERS_MIN: Final = 20
LARGE_SHARE: Final = 0.5
WAIT_MS_MIN: Final = 5_000
TIMES_MIN: Final = 10
#: A message of the large group that waits for longer than this stands in the way of others.
STANDING_MS: Final = 1_000
FIELDS: Final = tuple(sorted(GROUP_FIELDS))


def split(facts: Facts, large: str) -> tuple[list[int], list[int]]:
    """Return the waits of other groups that became claimable behind the large one, and of those that did not.

    Messages without a group are one: it has no name, and takes one turn.
    """
    spans = merge_spans([row for row in facts.deliveries if (row.group or "") == large and row.wait_ms > STANDING_MS])
    behind: list[int] = []
    free: list[int] = []
    for row in facts.deliveries:
        if (row.group or "") != large and row.cause is None:
            # What becomes claimable in the same millisecond comes before the flood or behind it: behind.
            ready = row.claimed_ms - row.wait_ms
            (behind if is_within(spans, ready + 1) else free).append(row.wait_ms)
    return behind, free


def measure(facts: Facts, subject: str) -> Measured | None:
    """Return p95 of the waits of other groups behind the large one, in milliseconds."""
    if len(facts.deliveries) < CLAIMS_MIN:
        return None
    behind, _ = split(facts, subject)
    return Measured(rank(behind, 0.95), len(behind)) if len(behind) >= OTHERS_MIN else Measured(0.0, len(behind))


def find(facts: Facts) -> list[Advice]:
    """Advise turns between groups where others wait behind a large one."""
    counts = Counter(row.group or "" for row in facts.deliveries if row.cause is None)
    if facts.policy.grouped or sum(counts.values()) < CLAIMS_MIN or len(counts) < 2:
        return []
    large, count = counts.most_common(1)[0]
    if count < LARGE_SHARE * sum(counts.values()):
        return []
    behind, free = split(facts, large)
    wait, otherwise = rank(behind, 0.95), rank(free, 0.95)
    if len(behind) < OTHERS_MIN or wait < WAIT_MS_MIN or wait < TIMES_MIN * max(otherwise, 100.0):
        return []
    name = f"group {large!r}" if large else "messages without a group"
    return [
        Advice(
            KIND, facts.queue, large,
            f"{len(counts) - 1} groups wait {wait / 1000:.1f} s (p95) behind {name}, and {otherwise / 1000:.1f} s "
            "otherwise",
            {"group": large, "share": round(count / sum(counts.values()), 3), "wait_behind_p95_ms": round(wait),
             "wait_otherwise_p95_ms": round(otherwise), "messages_behind": len(behind)},
            len(behind) + len(free),
            "SELECT d.group, count(*) AS messages, avg(wait_ms) AS wait_ms, max(wait_ms) AS longest_ms "
            f"FROM silver_deliveries AS d WHERE d.queue = {sql_text(facts.queue)} GROUP BY d.group ORDER BY 2 DESC",
            f"claims take turns: other groups wait for a round of turns at most, however much of {name} waits", wait,
            max(2 * otherwise, float(STANDING_MS)), {"fair": True}, {"fair": False},
        )
    ]  # fmt: skip


RULE: Final = Rule(KIND, find, measure, FIELDS)
