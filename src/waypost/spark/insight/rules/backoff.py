"""Retries that come at the same time: pauses without jitter bring back all at once what failed at once."""

from __future__ import annotations

from collections import Counter
from typing import Final

from waypost.spark.insight.advice import Advice, Facts, Measured, Rule, sql_text

KIND: Final = "backoff"
RETRIES_MIN: Final = 100
#: Retries that become claimable within this time come together, if there are so many of them.
TOGETHER_MS: Final = 100
TOGETHER_MIN: Final = 20
SHARE_MIN: Final = 0.5


def measure(facts: Facts, subject: str) -> Measured | None:
    """Return the part of retries that come together with many others."""
    ready = [(row.claimed_ms - row.wait_ms) // TOGETHER_MS for row in facts.deliveries if row.cause == "retried"]
    if len(ready) < RETRIES_MIN:
        return None
    together = sum(count for count in Counter(ready).values() if count >= TOGETHER_MIN)
    return Measured(together / len(ready), len(ready))


def find(facts: Facts) -> list[Advice]:
    """Advise a larger jitter if most retries come together."""
    measured = measure(facts, "")
    if measured is None or measured.value < SHARE_MIN:
        return []
    return [
        Advice(
            KIND, facts.queue, "",
            f"{measured.value:.0%} of retries become claimable within {TOGETHER_MS} ms of {TOGETHER_MIN} others",
            {"retries": measured.sample, "together": round(measured.value * measured.sample)}, measured.sample,
            f"SELECT CAST(floor((claimed_ms - wait_ms) / {TOGETHER_MS}.0) AS BIGINT) * {TOGETHER_MS} AS ready_ms, "
            f"count(*) AS retries FROM silver_deliveries WHERE queue = {sql_text(facts.queue)} AND cause = 'retried' "
            f"GROUP BY 1 HAVING count(*) >= {TOGETHER_MIN} ORDER BY 2 DESC",
            "retries spread over half of their pause: what failed under load is not loaded all at once again",
            measured.value, SHARE_MIN / 2,
            code=f"add jitter=0.5 to the retry policy of the handler of {facts.queue!r}",
        )
    ]  # fmt: skip


RULE: Final = Rule(KIND, find, measure)
