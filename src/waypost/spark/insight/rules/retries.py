"""Retries that never helped: attempts after an error of which none was successful.

Only messages that ended count: those that are still retried may end done. One outage lets all retries of a day fail, so
dead letters of several days are needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from waypost.spark.insight.advice import (
    DAY_MS,
    Advice,
    Facts,
    Measured,
    Rule,
    by_message,
    count_types,
    name_type,
    sql_text,
)
from waypost.spark.insight.history import Delivery

KIND: Final = "retries"
RETRIES_MIN: Final = 50
MESSAGES_MIN: Final = 10
#: On how many days, in UTC, messages must have died of the error.
DAYS_MIN: Final = 3
FIELDS: Final = ("max_deliveries",)
#: Messages need one more delivery after a crash.
DELIVERIES_MIN: Final = 2


class Retried:
    """What became of messages with an error: how many died, on which days, their retries, and how many ended done."""

    def __init__(self) -> None:
        self.messages = self.retries = self.helped = 0
        self.days: set[int] = set()
        self.useless: list[Delivery] = []


def is_dead(rows: Sequence[Delivery], limit: int | None) -> bool:
    """Return whether the message of these deliveries died.

    A store buries a message at the claim after its last delivery, so that one is recorded as retried.
    """
    if rows[-1].outcome != "retried" or limit is None:
        return rows[-1].outcome == "dead"
    count = 0
    for row in rows:
        count = (0 if row.cause == "redriven" else count) + (row.outcome not in ("snoozed", "released"))
    return count >= limit


def by_error(facts: Facts) -> dict[str, Retried]:
    """Return what retries after each error did. A retry helps if its message ended done, at whichever attempt."""
    found: dict[str, Retried] = defaultdict(Retried)
    for rows in by_message(facts.deliveries).values():
        if rows[-1].outcome == "done":
            for row in rows:
                if row.outcome == "retried":
                    found[row.error_type or "unknown"].helped += 1
        elif is_dead(rows, facts.policy.max_deliveries):
            for error in {row.error_type or "unknown" for row in rows if row.outcome in ("retried", "dead")}:
                found[error].messages += 1
                found[error].days.add(rows[-1].ended_ms // DAY_MS)
            for row in rows[:-1]:
                if row.outcome == "retried":
                    found[row.error_type or "unknown"].retries += 1
                    found[row.error_type or "unknown"].useless.append(row)
    return found


def measure(facts: Facts, subject: str) -> Measured | None:
    """Return how many retries a message has that dies with the error."""
    one = by_error(facts).get(subject)
    if one is None or one.messages == 0:
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
        if one.helped == 0 and one.retries >= RETRIES_MIN and one.messages >= MESSAGES_MIN
        and len(one.days) >= DAYS_MIN
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
                f"none of {one.retries:,} retries after {error} was successful, on {len(one.days)} days"
                f"{name_type(one.useless)}",
                {"error_type": error, "messages": one.messages, "retries": one.retries, "successful": 0,
                 "days": len(one.days), "attempts_wasted": wasted,
                 **({"retries_by_type": types} if (types := count_types(one.useless)) else {})},
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
