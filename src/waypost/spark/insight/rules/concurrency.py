"""Too few workers, or a limit that is too low, for the wait that is wished for: found by the model of the queue."""

from __future__ import annotations

from typing import Final

from waypost.spark.insight.advice import Advice, Facts, Measured, Rule, rank, sql_text
from waypost.spark.insight.history import build_history
from waypost.spark.insight.lake_history import SERVING
from waypost.spark.insight.whatif import CLAIMS_MIN, Scenario, check_fit, format_ms, parse_target, run_scenario

KIND: Final = "concurrency"


def measure(facts: Facts, subject: str) -> Measured | None:
    """Return the wait that the target is about, in milliseconds."""
    waits = [row.wait_ms for row in facts.deliveries]
    if not subject or len(waits) < CLAIMS_MIN:
        return None
    return Measured(rank(waits, parse_target(subject)[0]), len(waits))


def find(facts: Facts) -> list[Advice]:
    """Advise the fewest workers that reach the target, or a higher `max_running` if that holds them back."""
    target = facts.target
    measured = None if target is None else measure(facts, target)
    if target is None or measured is None:
        return []
    share, limit_ms = parse_target(target)
    if measured.value < limit_ms:
        return []
    history = build_history(
        facts.queue, facts.deliveries, policy=facts.policy, pauses=facts.pauses, never_claimed_ms=facts.never_claimed_ms
    )
    fit = check_fit(history)
    if not fit.is_good:
        return []
    cap = facts.policy.max_running
    found = run_scenario(history, Scenario(target=target, policy={"max_running": None}))
    if not found.reached:
        return []
    by_setting = cap is not None and cap < found.slots
    return [
        Advice(
            KIND, facts.queue, target,
            f"p{share * 100:g} wait is {format_ms(measured.value)}; {found.workers} workers with "
            f"{history.workers.concurrency} at once would make it {format_ms(found.p95_ms)} at p95 ({fit.text})",
            {"wait_ms": round(measured.value), "workers": history.workers.count, "workers_needed": found.workers,
             "concurrency": history.workers.concurrency, "max_running": cap},
            measured.sample,
            f"SELECT percentile_cont({share}) WITHIN GROUP (ORDER BY wait_ms) FROM silver_deliveries "
            f"WHERE queue = {sql_text(facts.queue)}",
            f"{target}", measured.value, limit_ms,
            {"max_running": found.slots} if by_setting else {}, {"max_running": cap} if by_setting else {},
            code="" if by_setting else
            f"start {found.workers} workers instead of {history.workers.count}, or as many more handlers at once "
            f"(concurrency={found.slots // max(1, history.workers.count)})",
        )
    ]  # fmt: skip


RULE: Final = Rule(KIND, find, measure, SERVING)
