"""A journal that is too short for the interval of the pipeline: events are trimmed before they are loaded."""

from __future__ import annotations

from typing import Final

from waypost.spark.insight.advice import Advice, Facts, Measured, Rule, round_up_count, sql_text

KIND: Final = "journal"
RUNS_MIN: Final = 3
FULL_SHARE: Final = 0.5
FIELDS: Final = ("journal_max",)


def measure(facts: Facts, subject: str) -> Measured | None:
    """Return which part of the journal the most events between two runs of the pipeline are."""
    if len(facts.run_events) < RUNS_MIN:
        return None
    return Measured(max(facts.run_events) / facts.policy.journal_max, len(facts.run_events))


def find(facts: Facts) -> list[Advice]:
    """Advise a longer journal if one interval fills more than half of it."""
    measured = measure(facts, "")
    if measured is None or measured.value < FULL_SHARE:
        return []
    most, before = max(facts.run_events), facts.policy.journal_max
    length = round_up_count(4 * most)
    gone = f", and {facts.not_seen:,} were trimmed before they were loaded" if facts.not_seen else ""
    return [
        Advice(
            KIND, facts.queue, "",
            f"{most:,} events came between two runs of the pipeline, and the journal keeps {before:,}{gone}",
            {"events_between_runs": most, "journal_max": before, "not_seen": facts.not_seen, "runs": measured.sample},
            measured.sample,
            "SELECT min(number) AS first, max(number) AS last, max(number) - min(number) + 1 - count(*) AS not_seen "
            f"FROM bronze_journal WHERE queue = {sql_text(facts.queue)}",
            "a run may be late, or fail three times, before an event is lost to the lake", measured.value, 0.3,
            {"journal_max": length}, {"journal_max": before},
        )
    ]  # fmt: skip


RULE: Final = Rule(KIND, find, measure, FIELDS)
