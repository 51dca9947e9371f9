"""The rules of advice, one file for each kind."""

from __future__ import annotations

from typing import Final

from waypost.spark.insight.advice import Rule
from waypost.spark.insight.rules import (
    backoff,
    concurrency,
    dead_letters,
    groups,
    journal,
    lease,
    poison,
    priorities,
    retries,
    schedules,
    wakeups,
)

RULES: Final[tuple[Rule, ...]] = (
    lease.RULE,
    retries.RULE,
    backoff.RULE,
    poison.RULE,
    concurrency.RULE,
    groups.RULE,
    priorities.RULE,
    schedules.PILE_UP,
    schedules.SPIKE,
    wakeups.RULE,
    dead_letters.RULE,
    journal.RULE,
)
BY_KIND: Final = {rule.kind: rule for rule in RULES}
