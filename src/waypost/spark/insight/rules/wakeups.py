"""Wake-ups that do not work: messages wait for a poll although a worker is free."""

from __future__ import annotations

from typing import Final

from waypost.spark.insight.advice import Advice, Facts, Measured, Rule, rank, sql_text
from waypost.spark.insight.history import build_history
from waypost.spark.lake.sums import PROMPT_MS

KIND: Final = "wakeups"
CLAIMS_MIN: Final = 50
#: Half of the messages that find a free slot wait for longer than this: no notification takes so long.
WAIT_MS_MIN: Final = 1_000


def measure(facts: Facts, subject: str) -> Measured | None:
    """Return the median wait of messages that find a free slot, in milliseconds."""
    if len(facts.deliveries) < CLAIMS_MIN or facts.policy.rate_count is not None:
        return None
    history = build_history(facts.queue, facts.deliveries, policy=facts.policy)
    waits = history.surroundings.pickup_ms
    return Measured(rank(waits, 0.5), len(waits)) if len(waits) >= CLAIMS_MIN else None


def find(facts: Facts) -> list[Advice]:
    """Name queues whose free workers are not woken."""
    measured = measure(facts, "")
    if measured is None or measured.value < WAIT_MS_MIN:
        return []
    return [
        Advice(
            KIND, facts.queue, "",
            f"messages wait {measured.value / 1000:.1f} s (median) although a worker is free: it polls, and is not "
            "woken",
            {"wait_p50_ms": round(measured.value)}, measured.sample,
            "SELECT sum(woken) AS woken, sum(claimed) AS claimed FROM gold_minutes WHERE queue = "
            f"{sql_text(facts.queue)}",
            f"claims within {PROMPT_MS} ms", measured.value, float(PROMPT_MS),
            code="waypost doctor  # names why notifications do not arrive; see `wake=` of the client",
        )
    ]  # fmt: skip


RULE: Final = Rule(KIND, find, measure)
