"""The tables of a lake, declared once: bronze, silver, gold and keys.

Times are milliseconds by the store's clock: `timestamp_millis(at_ms)` converts them to timestamps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from waypost.store.bulk.tables import ENVELOPE, JOURNAL, Table

#: The column by which gold is partitioned.
DATE: Final = "date"


@dataclass(frozen=True, slots=True)
class LakeTable(Table):
    """A Delta table: the columns of which every file has exact statistics, and whether it is partitioned by date."""

    statistics: tuple[str, ...] = ()
    by_date: bool = False
    #: The schema as JSON of Spark, for columns that `ARROW_TYPES` does not have.
    schema_json: str | None = None

    def delta_schema(self) -> Any:
        """The schema of the Delta table."""
        from deltalake import Schema

        if self.schema_json is not None:
            return Schema.from_json(self.schema_json)
        schema = self.arrow(self.columns)
        return Schema.from_arrow(schema.append(pa.field(DATE, pa.date32())) if self.by_date else schema)


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
BRONZE_JOURNAL: Final = LakeTable(
    "bronze/journal",
    {name: kind for name, kind in JOURNAL.columns.items() if name not in ENVELOPE},
    statistics=("number", "at_ms", "message_id"),
)

#: Events of which a message's row counts how many there were.
COUNTED_EVENTS: Final = (
    "published", "claimed", "retried", "snoozed", "released", "expired", "redriven", "done", "dead", "dropped",
    "cancelled", "replaced",
)  # fmt: skip

#: One row for each delivery that has ended: a claim, and how it ended.
SILVER_DELIVERIES: Final = LakeTable(
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
    statistics=("message_id", "ended_ms"),
)
#: What is known of deliveries that have not ended: partial rows, at most one for each delivery and step. They merge by
#: `deliveries_now`. A row with an end marks a delivery that is in `silver/deliveries`.
SILVER_OPEN_DELIVERIES: Final = LakeTable(
    "silver/open_deliveries",
    {
        **{name: kind for name, kind in SILVER_DELIVERIES.columns.items() if name != "late_ms"},
        #: 1 if a timer made the message claimable.
        "timer": "INT",
        "last_number": "BIGINT",
    },
    statistics=("message_id", "last_number"),
)

#: One row for each message that has ended, as far as the journal has its events.
SILVER_MESSAGES: Final = LakeTable(
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
    statistics=("message_id", "last_ms"),
)
#: What is known of messages that have not ended: partial rows, at most one for each message and step. They merge by
#: `messages_now`. A row with an end marks a message that is in `silver/messages`.
SILVER_OPEN_MESSAGES: Final = LakeTable(
    "silver/open_messages", dict(SILVER_MESSAGES.columns), statistics=("message_id", "last_number")
)


#: One row for each queue and minute (by the store's clock) in which anything happened.
#: `woken` counts claims at most `PROMPT_MS` after their message became claimable.
GOLD_MINUTES: Final = LakeTable(
    "gold/minutes",
    {
        "queue": "STRING",
        "minute": "TIMESTAMP",
        **dict.fromkeys(MINUTE_EVENTS, "BIGINT"),
        "woken": "BIGINT",
        **{f"{measure}_{what}": "BIGINT" for measure in MEASURES for what in ("ms_sum", "count")},
    },
    by_date=True,
)
#: How often a measure fell into a bucket (see `percentiles`), for each queue and minute.
GOLD_HISTOGRAMS: Final = LakeTable(
    "gold/histograms",
    {"queue": "STRING", "minute": "TIMESTAMP", "measure": "STRING", "bucket": "INT", "count": "BIGINT"},
    by_date=True,
)
#: Claims of messages that had been claimed before, by what made them claimable again.
GOLD_REDELIVERIES: Final = LakeTable(
    "gold/redeliveries",
    {"queue": "STRING", "minute": "TIMESTAMP", "cause": "STRING", "count": "BIGINT"},
    by_date=True,
)
#: Deaths by their reason and the class of their error, which is null where there was none.
GOLD_DEAD_LETTERS: Final = LakeTable(
    "gold/dead_letters",
    {"queue": "STRING", "minute": "TIMESTAMP", "reason": "STRING", "error_type": "STRING", "count": "BIGINT"},
    by_date=True,
)
GOLD: Final = (GOLD_MINUTES, GOLD_HISTOGRAMS, GOLD_REDELIVERIES, GOLD_DEAD_LETTERS)
#: Tables to which steps only add rows; old rows are removed by `tidy`.
CLOSED_TABLES: Final = (BRONZE_JOURNAL, SILVER_DELIVERIES, SILVER_MESSAGES)
OPEN_TABLES: Final = (SILVER_OPEN_DELIVERIES, SILVER_OPEN_MESSAGES)
#: Every key that was ever published in a queue. Its rows are never deleted by age. A key may have several rows.
KEYS: Final = LakeTable(
    "keys",
    {
        "queue": "STRING",
        "key": "STRING",
        "message_id": "STRING",
        #: The number of the event in the journal; null in rows that a backfill has added itself.
        "number": "BIGINT",
        "at_ms": "BIGINT",
        #: The name of the backfill that added the row, null if the pipeline did.
        "backfill": "STRING",
    },
    statistics=("key", "number", "at_ms"),
)
TABLES: Final = (*CLOSED_TABLES, *OPEN_TABLES, *GOLD, KEYS)
