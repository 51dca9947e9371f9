"""The audit: over all history in the lake, every published message has ended, or the store holds it.

Three accounts are compared: the events of each message in the journal, what the store holds now, and what the store has
counted. A message without an end that the store does not hold is unaccounted for. A claim that nothing explains, or a
second end, is an unexplained duplicate. Where the journal was trimmed before it was read, or its level was
lowered, the end of a message may be among the events not seen: it is counted as undecided, never as lost.

The store is in use while this runs. So every suspicion is checked again in the store itself before it is reported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import functions as f

from waypost.spark.lake.lake import Lake, Seen
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.silver import CLOSING
from waypost.spark.lake.tables import BRONZE_JOURNAL, SILVER_MESSAGES
from waypost.spark.source.bulk import Bulk, open_bulk
from waypost.store.bulk.tables import MESSAGES
from waypost.values import EventRecord, Ledger, MessageState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

AUDIT_FILE: Final = "audit.json"
#: Findings that are listed with their events; all are counted.
LISTED_MAX: Final = 1_000
#: Suspicions that are checked one by one in the store. More than these are no race with a busy store.
CONFIRMED_MAX: Final = 10_000
#: Findings of one sort that are counted; if there are more, the counts are "at least".
COUNTED_MAX: Final = 100_000
HELD_STATES: Final[tuple[MessageState, ...]] = ("ready", "delayed", "waiting", "leased", "dead")
HELD_COLUMNS: Final = ("queue", "id", "state")
#: Up to this many messages are read faster without Spark.
DRIVER_ROWS_MAX: Final = 100_000
#: Counters of the store's ledger, and the journal event of each.
COUNTERS: Final = {
    "published": "published", "redriven": "redriven", "done": "done", "dead": "dead", "dropped": "dropped",
    "cancelled": "cancelled", "replaced": "replaced", "claims": "claimed", "expired": "expired",
    "released": "released", "retried": "retried", "snoozed": "snoozed", "duplicates": "duplicate",
}  # fmt: skip
LOST = "no end is journalled, and the store does not hold it"
DEAD_LETTER_LOST = "it died, and its dead letter is gone without an event"
DEATH_NOT_JOURNALLED = "the store has it as dead, and no event says so"
REDRIVE_NOT_JOURNALLED = "the store has it alive, and its newest event is its death"
CLAIMED_TWICE = "one claim is journalled more than once"
UNEXPLAINED = "it was claimed again, and no event had made it claimable"
ENDED_TWICE = "it ended more than once"


class FindingEvent(msgspec.Struct, frozen=True):
    """One event of a message, as a finding shows it."""

    number: int
    at_ms: int
    event: str
    #: As text: a number above 2**53 is not exact in many readers of JSON.
    token: str | None = None
    worker: str | None = None
    cause: str | None = None
    reason: str | None = None


class Finding(msgspec.Struct, frozen=True):
    """A message that something is wrong with, and all that is known of it."""

    queue: str
    message_id: str
    fault: str
    events: tuple[FindingEvent, ...] = ()


class QueueAudit(msgspec.Struct, frozen=True):
    """One queue's accounts."""

    published: int = 0
    #: Messages by where they are: an end, or a state in which the store holds them.
    accounted: dict[str, int] = msgspec.field(default_factory=dict)
    unaccounted: int = 0
    duplicates_unexplained: int = 0
    #: Messages whose end may be among the events not seen.
    undecided: int = 0
    #: Events that were trimmed, or not journalled.
    not_seen: int = 0
    #: Counters of which the journal has more than the store has counted.
    overcounted: dict[str, int] = msgspec.field(default_factory=dict)


class Audit(msgspec.Struct, frozen=True):
    """What the audit found."""

    at_ms: int
    published: int
    accounted: int
    unaccounted_count: int
    duplicates_unexplained_count: int
    undecided: int
    not_seen: int
    unaccounted: tuple[Finding, ...]
    duplicates_unexplained: tuple[Finding, ...]
    queues: dict[str, QueueAudit]
    #: There are too many findings to count them all.
    has_more: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether everything is accounted for and explained."""
        overcounted = any(queue.overcounted for queue in self.queues.values())
        return not (self.unaccounted_count or self.duplicates_unexplained_count or overcounted)


# ---- findings from the journal alone --------------------------------------------------------------------------


def duplicates(messages: DataFrame) -> DataFrame:
    """Messages with a claim or an end too many, and what is wrong with each."""
    count = {name: f.col(name) for name in ("claimed", "redriven", "retried", "snoozed", "released", "expired")}
    sent_back = count["retried"] + count["snoozed"] + count["released"] + count["expired"] + count["redriven"]
    ends = f.col("done") + f.col("dead") + f.col("dropped") + f.col("cancelled") + f.col("replaced")
    fault = (
        f.when(count["claimed"] > f.coalesce(f.col("claims"), f.lit(0)), f.lit(CLAIMED_TWICE))
        .when(count["claimed"] > 1 + sent_back, f.lit(UNEXPLAINED))
        .when(ends > 1 + count["redriven"], f.lit(ENDED_TWICE))
    )
    return messages.withColumn("fault", fault).where(f.col("fault").isNotNull())


def suspects(messages: DataFrame, held: DataFrame) -> DataFrame:
    """Messages that have not ended, or died, and that the store does not hold accordingly."""
    is_open = messages.where(~f.col("last_event").isin(*CLOSING) & (f.col("published") > 0))
    where = held.select("queue", f.col("id").alias("message_id"), f.col("state").alias("held")).distinct()
    joined = is_open.join(where, ["queue", "message_id"], "left")
    died = f.col("state") == "dead"
    gone = f.col("held").isNull()
    fault = (
        f.when(gone & died, f.lit(DEAD_LETTER_LOST))
        .when(gone, f.lit(LOST))
        .when((f.col("held") == "dead") & ~died, f.lit(DEATH_NOT_JOURNALLED))
        .when((f.col("held") != "dead") & died, f.lit(REDRIVE_NOT_JOURNALLED))
    )
    return joined.withColumn("fault", fault).where(f.col("fault").isNotNull())


# ---- the store ----------------------------------------------------------------------------------------------


def read_held(pipeline: Pipeline, bulk: Bulk, ledgers: Mapping[str, Ledger]) -> DataFrame:
    """The ids of all messages that the store holds, by state: read here if they are few, otherwise by Spark."""
    # What comes to be in one of these states after the ledgers were read is checked again by itself.
    counts = {
        (name, state): getattr(ledger, "dead_kept" if state == "dead" else state)
        for name, ledger in ledgers.items()
        for state in HELD_STATES
    }
    if sum(counts.values()) <= DRIVER_ROWS_MAX:
        spans = [span for (name, state), count in counts.items() if count for span in bulk.spans(name, state, 1)]
        batches = [batch for span in spans for batch in bulk.messages(span, HELD_COLUMNS)]
        return pipeline.spark.createDataFrame(pa.Table.from_batches(batches, MESSAGES.arrow(HELD_COLUMNS)))
    wanted = ("url", "urlEnv", "namespace", "queue")
    options = {name: value for name, value in pipeline.options().items() if name in wanted}
    schema = ", ".join(f"{name} {MESSAGES.columns[name]}" for name in HELD_COLUMNS)
    whole = pipeline.spark.createDataFrame([], schema)
    for state in sorted({state for (_, state), count in counts.items() if count}):
        source = pipeline.spark.read.format("waypost").schema(schema).options(kind=state, **options)
        whole = whole.unionByName(source.load())
    return whole


def read_ledgers(bulk: Bulk, queues: tuple[str, ...] | None) -> dict[str, Ledger]:
    """What the store has counted, by queue."""
    known = bulk.run(bulk.store.queues())
    return {name: bulk.run(bulk.store.stats(name)).ledger for name in known if queues is None or name in queues}


def is_confirmed(bulk: Bulk, row: Any) -> bool:
    """Return whether the store confirms a suspicion: no newer event, and the message is where it was."""
    found = None
    for state in HELD_STATES:
        page = bulk.run(bulk.store.peek(row.queue, state, 1, id=row.message_id))
        if page.messages:
            found = state
            break
    # Read after the states: a message that moved in between has a newer event.
    if any(event.number > row.last_number for event in trace(bulk, row.queue, row.message_id)):
        return False
    if found is None:
        return True
    return bool((found == "dead") != (row.state == "dead"))


def trace(bulk: Bulk, queue: str, message_id: str) -> list[EventRecord]:
    """The events of one message that the journal still has."""
    events: list[EventRecord] = []
    cursor: str | None = None
    while True:
        page = bulk.run(bulk.store.trace(queue, message_id, cursor))
        events += page.events
        cursor = page.cursor
        if cursor is None:
            return events


# ---- the whole ----------------------------------------------------------------------------------------------


def audit(pipeline: Pipeline) -> Audit:
    """Update the lake, compare it with the store, write the result into the lake and return it."""
    spark, lake = pipeline.spark, pipeline.lake
    with lake.lock(), open_bulk(pipeline.place) as bulk:
        queues = pipeline.source.queues
        before = read_ledgers(bulk, queues)
        pipeline.run_locked()
        after = read_ledgers(bulk, queues)
        pipeline.progress("audit: comparing with the store")
        rows = lake.frame(spark, SILVER_MESSAGES)
        found = suspects(rows, read_held(pipeline, bulk, after)).limit(COUNTED_MAX).collect()
        if 0 < len(found) <= CONFIRMED_MAX:
            found = [row for row in found if is_confirmed(bulk, row)]
        doubled = duplicates(rows).limit(COUNTED_MAX).collect()
        ends = rows.where(f.col("published") > 0).groupBy("queue", "state").count().collect()
        result = _compare(lake, spark, found, doubled, ends, before, after)
    lake.files.replace(AUDIT_FILE, msgspec.json.format(msgspec.json.encode(result), indent=1))
    return result


def blind_until(seen: Seen, shortfall: int) -> int:
    """The number up to which the end of a message may be among events not seen."""
    return max(seen.gap_end, seen.level_end if shortfall > seen.not_seen else 0)


def shortfalls(seen: Seen, before: Ledger) -> int:
    """How many changes the store had counted before the lake was brought up to now, and the journal lacks."""
    return sum(max(0, getattr(before, name) - seen.counts.get(event, 0)) for name, event in COUNTERS.items())


def overcounted(seen: Seen, after: Ledger) -> dict[str, int]:
    """Return the counters of which the journal has more than the store has counted by now."""
    more = {name: seen.counts.get(event, 0) - getattr(after, name) for name, event in COUNTERS.items()}
    return {name: count for name, count in more.items() if count > 0}


def _compare(
    lake: Lake, spark: SparkSession, suspected: Sequence[Any], doubled: Sequence[Any], ends: Sequence[Any],
    before: Mapping[str, Ledger], after: Mapping[str, Ledger],
) -> Audit:  # fmt: skip
    queues: dict[str, QueueAudit] = {}
    lost: list[Any] = []
    unexplained: list[Any] = []
    names = sorted({*lake.state.seen, *before})
    for name in names:
        seen = lake.state.seen.get(name, Seen())
        missing = shortfalls(seen, before[name]) if name in before else 0
        blind = blind_until(seen, missing)
        mine = [row for row in suspected if row.queue == name]
        undecided = [row for row in mine if row.last_number <= blind]
        lost += [row for row in mine if row.last_number > blind]
        again = [
            row for row in doubled if row.queue == name and (row.first_number > blind or row.fault == CLAIMED_TWICE)
        ]
        unexplained += again
        states = {row["state"]: row["count"] for row in ends if row["queue"] == name}
        for row in mine:
            states[row.state] -= 1
        queues[name] = QueueAudit(
            sum(row["count"] for row in ends if row["queue"] == name),
            {state: count for state, count in sorted(states.items()) if count},
            len(mine) - len(undecided),
            len(again),
            len(undecided),
            max(seen.not_seen, missing),
            overcounted(seen, after[name]) if name in after else {},
        )
    listed = _with_events(lake, spark, [*lost[:LISTED_MAX], *unexplained[:LISTED_MAX]])
    return Audit(
        time.time_ns() // 1_000_000,
        sum(queue.published for queue in queues.values()),
        sum(sum(queue.accounted.values()) for queue in queues.values()),
        len(lost),
        len(unexplained),
        sum(queue.undecided for queue in queues.values()),
        sum(queue.not_seen for queue in queues.values()),
        tuple(listed[: len(lost[:LISTED_MAX])]),
        tuple(listed[len(lost[:LISTED_MAX]) :]),
        queues,
        max(len(suspected), len(doubled)) >= COUNTED_MAX,
    )


def _with_events(lake: Lake, spark: SparkSession, rows: Sequence[Any]) -> list[Finding]:
    """Findings with the events of their messages, from bronze."""
    if not rows:
        return []
    wanted = sorted({row.message_id for row in rows})
    events = lake.frame(spark, BRONZE_JOURNAL).where(f.col("message_id").isin(*wanted))
    events_of: dict[tuple[str, str], list[FindingEvent]] = {}
    for event in events.orderBy("number").collect():
        events_of.setdefault((event.queue, event.message_id), []).append(
            FindingEvent(
                event.number,
                event.at_ms,
                event.event,
                None if event.token is None else str(event.token),
                event.worker,
                event.cause,
                event.reason,
            )
        )
    return [
        Finding(row.queue, row.message_id, row.fault, tuple(events_of.get((row.queue, row.message_id), ())))
        for row in rows
    ]
