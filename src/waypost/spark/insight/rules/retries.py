"""Retries that never helped: attempts after an error of which none was successful."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Final

from waypost.spark.insight.advice import Advice, Facts, Measured, Rule, by_message, sql_text

KIND: Final = "retries"
RETRIES_MIN: Final = 50
MESSAGES_MIN: Final = 10
FIELDS: Final = ("max_deliveries",)
#: Messages need one more delivery after a crash.
DELIVERIES_MIN: Final = 2


class Retried:
    """What became of messages that failed with an error: how many, their retries, and how many of those ended done."""

    def __init__(self) -> None:
        self.messages = self.retries = self.helped = 0


def by_error(facts: Facts) -> dict[str, Retried]:
    """Return what retries after each error did."""
    found: dict[str, Retried] = defaultdict(Retried)
    for rows in by_message(facts.deliveries).values():
        failed = {row.error_type or "unknown" for row in rows if row.outcome in ("retried", "dead")}
        for error in failed:
            found[error].messages += 1
        for before, row in pairwise(rows):
            if before.outcome == "retried":
                one = found[before.error_type or "unknown"]
                one.retries += 1
                one.helped += row.outcome == "done"
    return found


def measure(facts: Facts, subject: str) -> Measured | None:
    """Return how many retries a message has that fails with the error."""
    one = by_error(facts).get(subject)
    if one is None:
        # No message fails so any more, which needs a sample too.
        return Measured(0.0, len(facts.deliveries)) if len(facts.deliveries) >= 2 * RETRIES_MIN else None
    return Measured(one.retries / max(1, one.messages), one.messages) if one.messages >= MESSAGES_MIN else None


def last_helpful(facts: Facts) -> int:
    """Return at which delivery, counted from 1, a message of the queue was done at the latest."""
    return max((row.claim for row in facts.deliveries if row.outcome == "done"), default=1)


def find(facts: Facts) -> list[Advice]:
    """Advise fewer deliveries where no later one ever helped, or a policy without retries for an error."""
    found = []
    useless = {
        error: one for error, one in by_error(facts).items()
        if one.retries >= RETRIES_MIN and one.messages >= MESSAGES_MIN and one.helped == 0
    }  # fmt: skip
    limit = max(DELIVERIES_MIN, last_helpful(facts))
    allowed = facts.policy.max_deliveries
    for error, one in sorted(useless.items()):
        each = one.retries / one.messages
        # A lower limit is for all errors: it must take nothing from those that retries help.
        by_setting = (allowed is None or limit < allowed) and limit - 1 < each
        if not by_setting and each < DELIVERIES_MIN - 1 + 1e-9:
            continue  # as few as a limit allows
        expected = float(limit - 1) if by_setting else 0.0
        wasted = round(one.retries - expected * one.messages)
        found.append(
            Advice(
                KIND, facts.queue, error,
                f"none of {one.retries:,} retries after {error} was successful",
                {"error_type": error, "messages": one.messages, "retries": one.retries, "successful": 0,
                 "attempts_wasted": wasted},
                one.messages,
                "SELECT b.error_type, count(*) AS retries, sum(CASE WHEN d.outcome = 'done' THEN 1 ELSE 0 END) AS done "
                "FROM silver_deliveries AS b JOIN silver_deliveries AS d "
                "ON d.queue = b.queue AND d.message_id = b.message_id AND d.claim = b.claim + 1 "
                f"WHERE b.queue = {sql_text(facts.queue)} AND b.outcome = 'retried' GROUP BY b.error_type",
                f"{wasted:,} attempts saved, dead letters sooner", each, expected,
                {"max_deliveries": limit} if by_setting else {}, {"max_deliveries": allowed} if by_setting else {},
                code="" if by_setting else
                f"@post.handler({facts.queue!r}, retry=ByException(({error.rpartition('.')[2]}, NoRetry())))",
            )
        )  # fmt: skip
    return found


RULE: Final = Rule(KIND, find, measure, FIELDS)
