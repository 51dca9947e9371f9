"""The tables of a lake, declared once: bronze, silver and gold.

Times are milliseconds by the store's clock: `timestamp_millis(at_ms)` converts them to timestamps.
"""

from __future__ import annotations

from typing import Final

from waypost.store.bulk.tables import ENVELOPE, JOURNAL, Table

#: Events that gold counts, one column each; `extended` counts what the journal calls `postponed`.
MINUTE_EVENTS: Final[dict[str, str]] = {
    "published": "published",
    "duplicates": "duplicate",
    "replaced": "replaced",
    "extended": "postponed",
    "promoted": "promoted",
    "claimed": "claimed",
    "done": "done",
    "retried": "retried",
    "snoozed": "snoozed",
    "released": "released",
    "expired": "expired",
    "dead": "dead",
    "dropped": "dropped",
    "cancelled": "cancelled",
    "redriven": "redriven",
}
#: What is measured in milliseconds: from claimable to claimed, from claimed to settled, from a timer's due time to
#: claimed.
MEASURES: Final = ("wait", "run", "late")

#: Events as they were journalled, without bodies: those are the messages' own, and are ingested by themselves.
BRONZE_JOURNAL: Final = Table(
    "bronze/journal", {name: kind for name, kind in JOURNAL.columns.items() if name not in ENVELOPE}
)

#: Events of which a message's row counts how many there were.
COUNTED_EVENTS: Final = (
    "published", "claimed", "retried", "snoozed", "released", "expired", "redriven", "done", "dead", "dropped",
    "cancelled", "replaced",
)  # fmt: skip

#: One row for each delivery: a claim, and how it ended. `outcome` is null while the lease is held.
SILVER_DELIVERIES: Final = Table(
    "silver/deliveries",
    {
        "queue": "STRING",
        "message_id": "STRING",
        #: Which claim of its message it is: 1 for the first.
        "claim": "BIGINT",
        "token": "BIGINT",
        "key": "STRING",
        "group": "STRING",
        "priority": "INT",
        "deliveries": "INT",
        "attempts": "INT",
        "worker": "STRING",
        #: What made the message claimable again; null at its first claim.
        "cause": "STRING",
        "claimed_ms": "BIGINT",
        "wait_ms": "BIGINT",
        #: How long after its due time a timer was claimed; null if there was no timer.
        "late_ms": "BIGINT",
        "outcome": "STRING",
        "ended_ms": "BIGINT",
        "run_ms": "BIGINT",
        "reason": "STRING",
        "error_type": "STRING",
        #: How many events there are of the claim and of its end: one each, or the audit reports it.
        "claims": "BIGINT",
        "ends": "BIGINT",
        "claimed_number": "BIGINT",
        "ended_number": "BIGINT",
    },
)

#: One row for each message, as far as the journal has its events.
SILVER_MESSAGES: Final = Table(
    "silver/messages",
    {
        "queue": "STRING",
        "message_id": "STRING",
        "key": "STRING",
        "group": "STRING",
        "priority": "INT",
        "size": "BIGINT",
        "chain_id": "STRING",
        "schedule": "STRING",
        #: ready, delayed, waiting, leased; or how it ended: done, dead, dropped, cancelled, replaced.
        "state": "STRING",
        "reason": "STRING",
        "error_type": "STRING",
        "published_ms": "BIGINT",
        "due_ms": "BIGINT",
        #: The first claim.
        "claimed_ms": "BIGINT",
        #: The end, where there was one.
        "ended_ms": "BIGINT",
        "last_ms": "BIGINT",
        "last_event": "STRING",
        "first_number": "BIGINT",
        "last_number": "BIGINT",
        #: The newest token that an event showed, and how many claims there were by then.
        "token": "BIGINT",
        "claims": "BIGINT",
        #: The claim that a timer waits for, or waited for last, by its number.
        "timer_claim": "BIGINT",
        #: Claims and ends summed up.
        "wait_ms": "BIGINT",
        "run_ms": "BIGINT",
        **dict.fromkeys(COUNTED_EVENTS, "BIGINT"),
    },
)

#: What gold is made of: counts of events that are alike. They merge by adding.
SILVER_SUMS: Final = Table(
    "silver/sums",
    {
        "queue": "STRING",
        "minute_ms": "BIGINT",
        #: An event of the journal, or `late` for timers that were claimed.
        "event": "STRING",
        "cause": "STRING",
        "reason": "STRING",
        #: The measure that the event has, and its bucket.
        "measure": "STRING",
        "bucket": "INT",
        "events": "BIGINT",
        "woken": "BIGINT",
        "total_ms": "BIGINT",
        "first_number": "BIGINT",
        "last_number": "BIGINT",
    },
)
#: The tables that Spark writes folder by folder.
FOLDER_TABLES: Final = (BRONZE_JOURNAL, SILVER_DELIVERIES, SILVER_MESSAGES, SILVER_SUMS)

#: One row for each queue and minute (by the store's clock) in which anything happened.
#: `woken` counts claims at most `PROMPT_MS` after their message became claimable.
GOLD_MINUTES: Final = Table(
    "gold/minutes",
    {
        "queue": "STRING",
        "minute": "TIMESTAMP",
        **dict.fromkeys(MINUTE_EVENTS, "BIGINT"),
        "woken": "BIGINT",
        **{f"{measure}_{what}": "BIGINT" for measure in MEASURES for what in ("ms_sum", "count")},
    },
)
#: How often a measure fell into a bucket (see `percentiles`), for each queue and minute.
GOLD_HISTOGRAMS: Final = Table(
    "gold/histograms",
    {"queue": "STRING", "minute": "TIMESTAMP", "measure": "STRING", "bucket": "INT", "count": "BIGINT"},
)
#: Claims of messages that had been claimed before, by what made them claimable again.
GOLD_REDELIVERIES: Final = Table(
    "gold/redeliveries", {"queue": "STRING", "minute": "TIMESTAMP", "cause": "STRING", "count": "BIGINT"}
)
#: Deaths by their reason.
GOLD_DEAD_LETTERS: Final = Table(
    "gold/dead_letters", {"queue": "STRING", "minute": "TIMESTAMP", "reason": "STRING", "count": "BIGINT"}
)
GOLD: Final = (GOLD_MINUTES, GOLD_HISTOGRAMS, GOLD_REDELIVERIES, GOLD_DEAD_LETTERS)
