"""Groups that starve: while one group has much waiting, the messages of the others wait behind it.

A queue that takes turns between its groups is left alone: where others still wait, there are too few workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from waypost.policy import GROUP_FIELDS
from waypost.spark.insight.advice import Advice, Facts, Measured, Rule, is_within, join_spans, rank, sql_text
from waypost.spark.insight.history import build_history
from waypost.spark.insight.queue_model import serve
from waypost.spark.insight.whatif import Scenario, check_fit, settings_of

KIND: Final = "groups"
CLAIMS_MIN: Final = 200
OTHERS_MIN: Final = 20
LARGE_SHARE: Final = 0.5
WAIT_MS_MIN: Final = 5_000
TIMES_MIN: Final = 10
#: A message of the large group that waits for longer than this stands in the way of others.
STANDING_MS: Final = 1_000
#: Turns are advised if the model does not expect a larger part of the wait to remain.
HELPS_SHARE: Final = 0.5
#: Days differ: advice has come true if the wait is at most so many times what the model says.
MODEL_ROOM: Final = 1.25
FIELDS: Final = tuple(sorted(GROUP_FIELDS))


class Waited(NamedTuple):
    """A claim: the group of its message, when that became claimable, how long it waited, and if it was the first."""

    group: str
    ready_ms: float
    wait_ms: float
    is_first: bool


def waited(facts: Facts) -> list[Waited]:
    """Return what was recorded. Messages without a group are one group: it has no name, and takes one turn."""
    return [
        Waited(row.group or "", row.claimed_ms - row.wait_ms, row.wait_ms, row.cause is None)
        for row in facts.deliveries
    ]


def split(rows: Sequence[Waited], large: str) -> tuple[list[float], list[float]]:
    """Return the waits of other groups that became claimable behind the large one, and of those that did not."""
    spans = join_spans(
        (row.ready_ms, row.ready_ms + row.wait_ms) for row in rows if row.group == large and row.wait_ms > STANDING_MS
    )
    behind: list[float] = []
    free: list[float] = []
    for row in rows:
        if row.group != large and row.is_first:
            # What becomes claimable in the same millisecond comes before the flood or behind it: behind.
            (behind if is_within(spans, row.ready_ms + 1) else free).append(row.wait_ms)
    return behind, free


def predict(facts: Facts, large: str) -> float | None:
    """Return p95 of the waits of others behind the large group with turns, by the model; None if it does not fit."""
    history = build_history(facts.queue, facts.deliveries, policy=facts.policy, pauses=facts.pauses)
    if not check_fit(history).is_good:
        return None
    served = serve(history.arrivals, settings_of(history, Scenario(policy={"fair": True})), history.surroundings)
    rows, seen = list[Waited](), set[int]()
    for message, ready, wait in zip(served.message, served.ready_ms, served.wait_ms, strict=True):
        rows.append(Waited(history.arrivals[message].group or "", ready, wait, message not in seen))
        seen.add(message)
    return rank(split(rows, large)[0], 0.95)


def measure(facts: Facts, subject: str) -> Measured | None:
    """Return p95 of the waits of other groups behind the large one, in milliseconds."""
    if len(facts.deliveries) < CLAIMS_MIN:
        return None
    behind, _ = split(waited(facts), subject)
    return Measured(rank(behind, 0.95), len(behind)) if len(behind) >= OTHERS_MIN else Measured(0.0, len(behind))


def find(facts: Facts) -> list[Advice]:
    """Advise turns between groups where others wait behind a large one."""
    counts = Counter(row.group or "" for row in facts.deliveries if row.cause is None)
    if facts.policy.grouped or sum(counts.values()) < CLAIMS_MIN or len(counts) < 2:
        return []
    large, count = counts.most_common(1)[0]
    if count < LARGE_SHARE * sum(counts.values()):
        return []
    behind, free = split(waited(facts), large)
    wait, otherwise = rank(behind, 0.95), rank(free, 0.95)
    if len(behind) < OTHERS_MIN or wait < WAIT_MS_MIN or wait < TIMES_MIN * max(otherwise, 100.0):
        return []
    predicted = predict(facts, large)
    if predicted is not None and predicted > HELPS_SHARE * wait:
        return []  # there are too few workers for all groups together
    name = f"group {large!r}" if large else "messages without a group"
    effect = f"claims take turns: other groups wait for a round of turns at most, however much of {name} waits"
    if predicted is not None:
        effect += f"; by the model {predicted / 1000:.1f} s (p95)"
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
            effect, wait, max(float(STANDING_MS), 2 * otherwise if predicted is None else MODEL_ROOM * predicted),
            {"fair": True}, {"fair": False},
        )
    ]  # fmt: skip


RULE: Final = Rule(KIND, find, measure, FIELDS)
