"""A lease that is shorter than some runs: messages are delivered again although their handlers would have ended."""

from __future__ import annotations

from typing import Final

from waypost.spark.insight.advice import (
    Advice,
    Facts,
    Measured,
    Rule,
    by_message,
    count_types,
    name_type,
    rank,
    round_up_seconds,
    sql_text,
)
from waypost.spark.insight.history import Delivery, find_renewals

KIND: Final = "lease"
CLAIMS_MIN: Final = 100
EXPIRED_MIN: Final = 10
SHARE_MIN: Final = 0.005
#: Runs must come this close to the lease: otherwise leases end because workers crash.
NEAR: Final = 0.7
FIELDS: Final = ("lease_ms",)


def needless(facts: Facts) -> list[Delivery]:
    """Return the claims that expired of messages that ended done later."""
    found: list[Delivery] = []
    for rows in by_message(facts.deliveries).values():
        if any(row.outcome == "done" for row in rows):
            found += [row for row in rows if row.outcome == "expired"]
    return found


def measure(facts: Facts, subject: str) -> Measured | None:
    """Return the part of claims that expired of messages that ended done later."""
    count = len(facts.deliveries)
    return Measured(len(needless(facts)) / count, count) if count >= CLAIMS_MIN else None


def find(facts: Facts) -> list[Advice]:
    """Advise a longer lease if runs come close to it and claims expire of messages that end done."""
    lease_ms, measured = facts.policy.lease_ms, measure(facts, "")
    if measured is None or lease_ms is None or find_renewals(facts.deliveries, lease_ms):
        return []  # a worker that renews its leases loses them by crashes, however long they are
    cut_off = needless(facts)
    expired, types = len(cut_off), count_types(cut_off)
    runs = [row.run_ms for row in facts.deliveries if row.outcome == "done"]
    p999 = rank(runs, 0.999)
    if expired < EXPIRED_MIN or measured.value < SHARE_MIN or p999 < NEAR * lease_ms:
        return []
    # The runs that were cut off are longer than any that is known.
    seconds = round_up_seconds(max(2 * lease_ms, 2 * p999))
    return [
        Advice(
            KIND, facts.queue, "", f"{expired:,} leases ended before their handlers: P99.9 of run times is "
            f"{p999 / 1000:.1f} s, the lease {lease_ms / 1000:g} s{name_type(cut_off)}",
            {"expired_then_done": expired, "claims": measured.sample, "run_p999_ms": round(p999), "lease_ms": lease_ms,
             **({"expired_by_type": types} if types else {})},
            measured.sample,
            "SELECT count(*) FROM silver_deliveries AS d JOIN silver_messages AS m "
            "ON m.queue = d.queue AND m.message_id = d.message_id "
            f"WHERE d.queue = {sql_text(facts.queue)} AND d.outcome = 'expired' AND m.state = 'done'",
            f"about {measured.value:.1%} fewer deliveries, and no handler that runs twice at once", measured.value,
            SHARE_MIN / 5, {"lease": seconds}, {"lease": lease_ms / 1000},
        )
    ]  # fmt: skip


RULE: Final = Rule(KIND, find, measure, FIELDS, is_share=True)
