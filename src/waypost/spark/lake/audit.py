"""The audit: over all history in the lake, every published message has ended, or the store holds it; and the reverse.

Three accounts are compared: the events of each message in the journal, what the store holds now, and what the store has
counted. A message without an end that the store does not hold is unaccounted for. A claim that nothing explains, or a
second end, is an unexplained duplicate. A message that the store holds although no event records it, or although its
end is recorded, is unrecorded: a backup was restored, or the journal was lost. A message of an ordered group that was
claimed too early is out of order (see `order`). Where the journal was trimmed before it
was read, or its level was lowered, what is missing may be among the events not seen: such a message is counted as
undecided, never as lost.

The store is in use while this runs. So every suspicion is checked again in the store itself before it is reported: a
message that has an event which the lake has not read yet is none.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql import functions as f

from waypost.errors import ConfigurationError
from waypost.spark.lake.lake import Lake, Seen
from waypost.spark.lake.order import OrderRule, broken_order, order_since, still_true
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.silver import CLOSING
from waypost.spark.lake.tables import BRONZE_JOURNAL
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
AFTER_ITS_END = "an event is journalled after its end"
NO_EVENT = "the store holds it, and no event records it"
NOT_IN_LAKE = (
    "the store holds it, and its events are not in the lake, which has read past them: the journal was replaced"
)
HELD_AFTER_END = "its end is journalled, and the store holds it"
NEVER_PUBLISHED = "events of it are journalled, and none is its publication"


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
    #: Messages that the store holds or the journal names, and whose publication, or place after their end, no event
    #: records.
    unrecorded: int = 0
    #: Messages of ordered groups that were claimed too early.
    out_of_order: int = 0


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
    unrecorded_count: int = 0
    unrecorded: tuple[Finding, ...] = ()
    out_of_order_count: int = 0
    out_of_order: tuple[Finding, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether everything is accounted for, explained, recorded and in order."""
        overcounted = any(queue.overcounted for queue in self.queues.values())
        findings = self.unaccounted_count + self.duplicates_unexplained_count + self.unrecorded_count
        return not (findings or self.out_of_order_count or overcounted)


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


def not_open(messages: DataFrame, held: DataFrame) -> DataFrame:
    """Messages that the store holds, and that are none of those that have not ended."""
    is_open = messages.where(~f.col("last_event").isin(*CLOSING)).select("queue", "message_id")
    ids = held.select("queue", f.col("id").alias("message_id")).distinct()
    return ids.join(is_open, ["queue", "message_id"], "left_anti")


def ended_among(messages: DataFrame, chosen: DataFrame) -> DataFrame:
    """The rows of some messages that have ended."""
    ended = messages.where(f.col("last_event").isin(*CLOSING))
    return ended.join(f.broadcast(chosen), ["queue", "message_id"])


def strays(messages: DataFrame) -> DataFrame:
    """Rows of events that follow no publication: after the end of their message, or of one that was not published."""
    ends = f.col("done") + f.col("dead") + f.col("dropped") + f.col("cancelled") + f.col("replaced")
    rows = messages.where(f.col("published") == 0).select(
        "queue", "message_id", "state", "first_number", "last_number", ends.alias("ends_after")
    )
    ids = f.broadcast(rows.select("queue", "message_id").distinct())
    first = messages.where(f.col("published") > 0).join(ids, ["queue", "message_id"], "left_semi")
    joined = rows.join(first.select("queue", "message_id", ends.alias("ends")), ["queue", "message_id"], "left")
    fault = (
        f.when(f.col("ends").isNull(), f.lit(NEVER_PUBLISHED))
        .when((f.col("ends") > 0) & (f.col("ends_after") > 0), f.lit(ENDED_TWICE))
        .otherwise(f.lit(AFTER_ITS_END))
    )
    return joined.withColumn("fault", fault)


# ---- the store ----------------------------------------------------------------------------------------------


def read_held(
    pipeline: Pipeline, bulk: Bulk, ledgers: Mapping[str, Ledger], queues: tuple[str, ...] | None
) -> DataFrame:
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
    options = {name: value for name, value in pipeline.options().items() if name in ("url", "urlEnv", "namespace")}
    if queues is not None:
        options["queue"] = ",".join(queues)
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


def read_fresh(bulk: Bulk, seen: Mapping[str, Seen], queues: Iterable[str]) -> dict[str, set[str]]:
    """The messages of each queue that have events which the lake has not read."""
    fresh = {}
    for queue in queues:
        # Those without a number first: if they get one meanwhile, the read of the journal finds them.
        ids = bulk.unnumbered(queue)
        newest = bulk.bounds(queue)[1]
        for batch in bulk.journal(queue, seen.get(queue, Seen()).newest, newest, ("message_id",)):
            ids.update(batch.column("message_id").to_pylist())
        fresh[queue] = ids
    return fresh


def held_state(bulk: Bulk, queue: str, message_id: str) -> MessageState | None:
    """The state in which the store holds a message, None if it does not."""
    for state in HELD_STATES:
        if bulk.run(bulk.store.peek(queue, state, 1, id=message_id)).messages:
            return state
    return None


def confirm(bulk: Bulk, seen: Mapping[str, Seen], rows: Sequence[Any]) -> list[Any]:
    """Return the suspicions that the store confirms: no newer event, and the message is where it was."""
    fresh = read_fresh(bulk, seen, {row.queue for row in rows})
    rows = [row for row in rows if row.message_id not in fresh[row.queue]]
    if not 0 < len(rows) <= CONFIRMED_MAX:
        return rows
    states = [held_state(bulk, row.queue, row.message_id) for row in rows]
    # Read after the states: a message that moved in between has a newer event.
    fresh = read_fresh(bulk, seen, {row.queue for row in rows})
    return [
        row
        for row, state in zip(rows, states, strict=True)
        if row.message_id not in fresh[row.queue] and _is_as_suspected(row, state)
    ]


def _is_as_suspected(row: Any, state: MessageState | None) -> bool:
    if row.fault in (HELD_AFTER_END, NO_EVENT):
        return state is not None
    return state is None or (state == "dead") != (row.state == "dead")


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


class _Found(msgspec.Struct, frozen=True):
    """Rows of messages with a fault, as they were collected: confirmed, not yet weighed against what was not seen."""

    suspected: Sequence[Any]
    doubled: Sequence[Any]
    strays: Sequence[Any]
    unknown: Sequence[Any]
    has_more: bool
    disordered: Sequence[Any] = ()


def audit(pipeline: Pipeline, queues: tuple[str, ...] | None = None) -> Audit:
    """Update the lake, compare it with the store, write the result into the lake and return it.

    With `queues` only these are compared; the lake is updated with all queues that it is made from.
    """
    spark, lake = pipeline.spark, pipeline.lake
    loaded = pipeline.source.queues
    unknown = sorted({*(queues or ())} - {*(loaded or queues or ())})
    if unknown:
        raise ConfigurationError(
            f"the lake {lake.files.address} is made from the queues {', '.join(loaded or ())}, not from "
            f"{', '.join(unknown)}: load them with `waypost pipeline run --queue`"
        )
    queues = queues or loaded
    with open_bulk(pipeline.place) as bulk:
        before = read_ledgers(bulk, queues)
        pipeline.run()
        after = read_ledgers(bulk, queues)
        pipeline.progress("audit: comparing with the store")
        rows = lake.messages(spark)
        if queues is not None:
            rows = rows.where(f.col("queue").isin(*queues))
        found = _find(pipeline, bulk, rows, read_held(pipeline, bulk, after, queues))
        disordered = _find_disordered(pipeline, bulk, before, after)
        found = msgspec.structs.replace(
            found, disordered=disordered, has_more=found.has_more or len(disordered) >= COUNTED_MAX
        )
        ends = rows.where(f.col("published") > 0).groupBy("queue", "state").count().collect()
        silent = {name for name in after if bulk.run(bulk.store.policy(name)).journal not in ("all", "full")}
        names = sorted({*lake.state.seen, *before} if queues is None else queues)
        result = _compare(lake, spark, names, found, ends, before, after, silent)
    lake.files.replace(AUDIT_FILE, msgspec.json.format(msgspec.json.encode(result), indent=1))
    return result


def _find(pipeline: Pipeline, bulk: Bulk, rows: DataFrame, held: DataFrame) -> _Found:
    seen = pipeline.lake.state.seen
    suspected = suspects(rows, held).limit(COUNTED_MAX).collect()
    not_known = not_open(rows, held).limit(COUNTED_MAX).collect()
    doubled = duplicates(rows).limit(COUNTED_MAX).collect()
    stray = strays(rows).limit(COUNTED_MAX).collect() if _has_strays(rows) else []
    has_more = max(len(one) for one in (suspected, not_known, doubled, stray)) >= COUNTED_MAX
    ended, unknown = _split_held(pipeline, bulk, rows, not_known)
    return _Found([*confirm(bulk, seen, suspected), *confirm(bulk, seen, ended)], doubled, stray, unknown, has_more)


def _find_disordered(
    pipeline: Pipeline, bulk: Bulk, before: Mapping[str, Ledger], after: Mapping[str, Ledger]
) -> Sequence[Any]:
    """Messages of ordered groups that were claimed too early. Only queues that have an order now are judged."""
    lake, spark = pipeline.lake, pipeline.spark
    events = lake.frame(spark, BRONZE_JOURNAL)
    rules = {}
    for name in after:
        policy, seen = bulk.run(bulk.store.policy(name)), lake.state.seen.get(name, Seen())
        if policy.order is None or policy.journal not in ("all", "full") or not seen.events:
            continue
        missing = shortfalls(seen, before[name]) if name in before else 0
        since = order_since(events, name, blind_until(seen, missing))
        if since is not None:
            in_order = not bulk.store.capabilities.commits_out_of_order
            rules[name] = OrderRule(since, policy.on_failure == "hold", in_order)
    if not rules:
        return ()
    found = broken_order(events, lake.deliveries(spark), rules).limit(COUNTED_MAX).collect()
    return still_true(found, read_fresh(bulk, lake.state.seen, {row.queue for row in found}))


def _has_strays(rows: DataFrame) -> bool:
    return not rows.where(f.col("published") == 0).isEmpty()


def _split_held(pipeline: Pipeline, bulk: Bulk, rows: DataFrame, held: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Messages that the store holds and that are not open in the lake: those that have ended there, and the unknown."""
    seen = pipeline.lake.state.seen
    fresh = read_fresh(bulk, seen, {row.queue for row in held})
    held = [row for row in held if row.message_id not in fresh[row.queue]]
    if not held:
        return [], []
    names = [(row.queue, row.message_id) for row in held]
    chosen = pipeline.spark.createDataFrame(names, "queue STRING, message_id STRING")
    ended = ended_among(rows, chosen).withColumn("fault", f.lit(HELD_AFTER_END)).collect()
    there = {(row.queue, row.message_id) for row in ended}
    unknown = [
        Row(queue=queue, message_id=message_id, state="", first_number=0, last_number=0, fault=NO_EVENT)
        for queue, message_id in names
        if (queue, message_id) not in there
    ]
    unknown = confirm(bulk, seen, unknown)
    return [row for row in ended if row.published > 0], [
        Row(**{**row.asDict(), "fault": NOT_IN_LAKE})
        if number < LISTED_MAX and trace(bulk, row.queue, row.message_id)
        else row
        for number, row in enumerate(unknown)
    ]


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
    lake: Lake, spark: SparkSession, names: Sequence[str], found: _Found, ends: Sequence[Any],
    before: Mapping[str, Ledger], after: Mapping[str, Ledger], silent: Collection[str],
) -> Audit:  # fmt: skip
    queues: dict[str, QueueAudit] = {}
    lost: list[Any] = []
    unexplained: list[Any] = []
    unrecorded: list[Any] = []
    disordered: list[Any] = []
    for name in names:
        seen = lake.state.seen.get(name, Seen())
        missing = shortfalls(seen, before[name]) if name in before else 0
        blind = blind_until(seen, missing)
        mine = [row for row in found.suspected if row.queue == name]
        sure = [row for row in mine if row.last_number > blind]
        gone = [row for row in sure if row.fault != HELD_AFTER_END]
        again = [
            row
            for row in found.doubled
            if row.queue == name and (row.first_number > blind or row.fault == CLAIMED_TWICE)
        ]
        again += [row for row in found.strays if row.queue == name and row.fault != NEVER_PUBLISHED]
        # No event of these has a number to compare with: they may belong to what was not seen, or not journalled.
        is_blind = blind > 0 or name in silent
        without = [row for row in found.unknown if row.queue == name]
        without += [row for row in found.strays if row.queue == name and row.fault == NEVER_PUBLISHED]
        kept = [row for row in sure if row.fault == HELD_AFTER_END] + ([] if is_blind else without)
        lost += gone
        unexplained += again
        unrecorded += kept
        early = [row for row in found.disordered if row.queue == name]
        disordered += early
        states = {row["state"]: row["count"] for row in ends if row["queue"] == name}
        for row in mine:
            states[row.state] = states.get(row.state, 0) - 1
        queues[name] = QueueAudit(
            sum(row["count"] for row in ends if row["queue"] == name),
            {state: count for state, count in sorted(states.items()) if count},
            len(gone),
            len(again),
            len(mine) - len(sure) + (len(without) if is_blind else 0),
            max(seen.not_seen, missing),
            overcounted(seen, after[name]) if name in after else {},
            len(kept),
            len(early),
        )
    return _assemble(lake, spark, queues, (lost, unexplained, unrecorded, disordered), found.has_more)


def _assemble(
    lake: Lake, spark: SparkSession, queues: dict[str, QueueAudit], faults: tuple[list[Any], ...], has_more: bool
) -> Audit:
    listed = [rows[:LISTED_MAX] for rows in faults]
    findings = iter(_with_events(lake, spark, [row for rows in listed for row in rows]))
    lost, unexplained, unrecorded, disordered = (tuple(islice(findings, len(rows))) for rows in listed)
    return Audit(
        time.time_ns() // 1_000_000,
        sum(queue.published for queue in queues.values()),
        sum(sum(queue.accounted.values()) for queue in queues.values()),
        len(faults[0]),
        len(faults[1]),
        sum(queue.undecided for queue in queues.values()),
        sum(queue.not_seen for queue in queues.values()),
        lost,
        unexplained,
        queues,
        has_more,
        len(faults[2]),
        unrecorded,
        len(faults[3]),
        disordered,
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
