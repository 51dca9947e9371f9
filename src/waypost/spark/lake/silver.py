"""Silver: one row for each delivery, one for each message, and the sums that gold is made of.

The events of a message may be in many batches. So each step merges the new events with the rows that were still open:
rows that can no longer change are closed, the others stay open for the next step. The cost of a step depends on the new
events and the open rows, never on the whole history.

Numbers of events follow cause and effect within a message, so "the newest" is by number, never by time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, get_args

from pyspark.sql import functions as f

from waypost.spark.lake.lake import DATE, PART
from waypost.spark.lake.percentiles import BUCKET_OF_ZERO, GROWTH
from waypost.spark.lake.tables import COUNTED_EVENTS, SILVER_DELIVERIES, SILVER_MESSAGES, SILVER_SUMS
from waypost.values import EventName

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: A claim within this time after its message became claimable counts as prompt: a worker was awake or woken.
PROMPT_MS: Final = 100
#: Numbers and names of events together as one number: the largest has both of the newest event.
_CODES: Final = {name: code for code, name in enumerate(get_args(EventName))}
_CODE_ROOM: Final = 64
_OTHERWISE: Final = 32
assert len(_CODES) < _OTHERWISE
#: After these nothing more happens to a message. A dead one may be redriven for as long as its letter is kept.
CLOSING: Final = ("done", "dropped", "cancelled", "replaced", "dead_trimmed")
#: The state of a message by its newest event.
STATES: Final = {
    "published": "ready", "postponed": "delayed", "promoted": "ready", "claimed": "leased", "retried": "delayed",
    "snoozed": "delayed", "released": "ready", "expired": "ready", "redriven": "ready", "cancel_requested": "leased",
    "dead_trimmed": "dead",
}  # fmt: skip
#: The same where the event has another effect: published behind another message, or due at once.
OTHERWISE: Final = {"published": "waiting", "postponed": "ready", "retried": "ready", "snoozed": "ready"}
#: The reason by which sums know a change of what the journal keeps.
JOURNAL_LEVEL: Final = "journal"
#: Events that name a message but do not change it.
ASIDE: Final = ("duplicate", "configured", "paused", "resumed", "trimmed")


def day_of(milliseconds: Column) -> Column:
    """The day of a time, in UTC, as text."""
    return f.date_from_unix_date((milliseconds / 86_400_000).cast("int")).cast("string")


def bucket_of(value: Column) -> Column:
    """The bucket of a number of milliseconds, as `percentiles.bucket_of` finds it."""
    bucket = f.floor(f.log(value) / f.lit(math.log(GROWTH))).cast("int")
    return f.when(value < 1, f.lit(BUCKET_OF_ZERO)).otherwise(bucket)


def _repartition(steps: DataFrame) -> DataFrame:
    """Steps of one message in one place. Aggregates that hold texts are sorted for: so that is done once, not twice."""
    return steps.repartition("message_id", "queue")


# ---- messages -----------------------------------------------------------------------------------------------


def _lookup(names: Mapping[str, str | int], key: Column) -> Column:
    """Return the value of a key, null if it has none."""
    return f.create_map(*(f.lit(part) for pair in names.items() for part in pair))[key]


def _newest_code(event: Column, number: Column, otherwise: Column) -> Column:
    """One number of which the largest is that of the newest event, with its name and the state of the message."""
    code = f.coalesce(_lookup(_CODES, event), f.lit(_OTHERWISE - 1))
    return number * _CODE_ROOM + code + f.when(otherwise, f.lit(_OTHERWISE)).otherwise(f.lit(0))


def message_steps(events: DataFrame) -> DataFrame:
    """Each event as the row of a message of which nothing else is known."""
    event, at = f.col("event"), f.col("at_ms")
    timer = (event == "promoted") & (f.col("cause") == "due")
    parked = (event == "published") & f.col("cause").isin("parked", "blocked")
    at_once = event.isin("retried", "snoozed", "postponed") & (f.col("due_ms") <= at)
    return events.where(f.col("message_id").isNotNull() & ~event.isin(*ASIDE)).select(
        "queue",
        "message_id",
        *("key", "group", "priority", "size", "chain_id", "schedule", "reason", "error_type"),
        f.when(event == "published", at).alias("published_ms"),
        f.when(event == "published", f.col("due_ms")).alias("due_ms"),
        f.when(event == "claimed", at).alias("claimed_ms"),
        f.when(event.isin(*CLOSING[:-1], "dead"), at).alias("ended_ms"),
        at.alias("last_ms"),
        f.col("number").alias("first_number"),
        f.col("number").alias("last_number"),
        _newest_code(event, f.col("number"), parked | at_once).alias("newest"),
        "token",
        "claims",
        f.when(timer, f.col("claims") + 1).alias("timer_claim"),
        "wait_ms",
        "run_ms",
        *((event == name).cast("bigint").alias(name) for name in COUNTED_EVENTS),
    )


def open_steps(messages: DataFrame) -> DataFrame:
    """Return rows of messages in the form to which new events can be merged."""
    columns = [name for name in SILVER_MESSAGES.columns if name not in ("state", "last_event")]
    otherwise = f.col("state") == _lookup(OTHERWISE, f.col("last_event"))
    newest = _newest_code(f.col("last_event"), f.col("last_number"), otherwise)
    # A row of an older release has no count of claims; there it was equal to the token.
    known = messages.withColumn("claims", f.coalesce("claims", "token"))
    return known.select(*columns, newest.alias("newest"))


def messages(steps: DataFrame) -> DataFrame:
    """Return one row for each message, merged from its steps."""
    # The newest by number wins; those of rows that were open are older than any new event.
    newest = {
        name: f.max_by(name, f.when(f.col(name).isNotNull(), f.col("last_number")))
        for name in ("reason", "error_type", "ended_ms")
    }
    merged = (
        _repartition(steps)
        .groupBy("message_id", "queue")
        .agg(
            *(f.max(name).alias(name) for name in ("key", "group", "priority", "size", "chain_id", "schedule")),
            *(column.alias(name) for name, column in newest.items()),
            *(f.min(name).alias(name) for name in ("published_ms", "claimed_ms", "first_number")),
            *(f.max(name).alias(name) for name in ("due_ms", "last_ms", "last_number", "newest", "token")),
            *(f.max(name).alias(name) for name in ("claims", "timer_claim")),
            *(f.sum(name).alias(name) for name in ("wait_ms", "run_ms", *COUNTED_EVENTS)),
        )
    )
    names = f.array(*(f.lit(name) for name in _CODES))
    code, last_event = (f.col("newest") % _OTHERWISE).cast("int"), f.col("last_event")
    otherwise = f.col("newest") % _CODE_ROOM >= _OTHERWISE
    delayed = (last_event == "published") & f.col("due_ms").isNotNull()
    state = (
        f.when(otherwise, _lookup(OTHERWISE, last_event))
        .when(delayed, f.lit("delayed"))
        .otherwise(f.coalesce(_lookup(STATES, last_event), last_event))
    )
    ended = f.when(f.col("state").isin(*CLOSING, "dead"), f.col("ended_ms"))
    return (
        merged.withColumn("last_event", f.coalesce(f.get(names, code), f.lit("unknown")))
        .withColumn("state", state)
        .withColumn("ended_ms", ended)
        .select(*SILVER_MESSAGES.columns)
    )


def partition_messages(rows: DataFrame) -> DataFrame:
    """Return rows of messages with their part, closed or open, and the day of their first event."""
    part = f.when(f.col("last_event").isin(*CLOSING), "closed").otherwise("open")
    day = day_of(f.coalesce(f.col("published_ms"), f.col("last_ms")))
    return rows.withColumn(PART, part).withColumn(DATE, day)


# ---- deliveries ---------------------------------------------------------------------------------------------


def delivery_steps(events: DataFrame) -> DataFrame:
    """Claims, the ends of claims, and timers that became claimable, as rows of deliveries."""
    event, at, number = f.col("event"), f.col("at_ms"), f.col("number")
    claimed = event == "claimed"
    timer = (event == "promoted") & (f.col("cause") == "due")
    # An end without a claim's time is that of a message without a lease: it ended no delivery.
    ended = f.col("run_ms").isNotNull() | ((event == "done") & (f.col("cause") == "at_most_once"))
    return events.where(claimed | timer | ended).select(
        "queue",
        "message_id",
        # A timer belongs to the claim that comes after it, whose token is not known yet.
        f.when(timer, f.col("claims") + 1).otherwise(f.col("claims")).alias("claim"),
        f.when(~timer, f.col("token")).alias("token"),
        *("key", "group", "priority"),
        *(f.when(claimed, f.col(name)).alias(name) for name in ("deliveries", "attempts", "worker", "cause")),
        f.when(claimed, at).alias("claimed_ms"),
        "wait_ms",
        timer.cast("int").alias("timer"),
        f.when(ended, event).alias("outcome"),
        f.when(ended, at).alias("ended_ms"),
        "run_ms",
        *(f.when(ended, f.col(name)).alias(name) for name in ("reason", "error_type")),
        claimed.cast("bigint").alias("claims"),
        ended.cast("bigint").alias("ends"),
        f.when(claimed, number).alias("claimed_number"),
        f.when(ended, number).alias("ended_number"),
    )


def open_deliveries(deliveries: DataFrame) -> DataFrame:
    """Return rows of deliveries in the form to which their ends can be merged."""
    columns = [name for name in SILVER_DELIVERIES.columns if name != "late_ms"]
    known = deliveries.withColumn("claim", f.coalesce("claim", "token"))
    return known.select(*columns, f.col("late_ms").isNotNull().cast("int").alias("timer"))


def waiting_timers(messages: DataFrame) -> DataFrame:
    """Timers of open messages that became claimable in an earlier batch, and were not claimed in it."""
    waiting = messages.where(f.col("timer_claim") > f.coalesce(f.col("claims"), f.lit(0)))
    given = {
        "queue": f.col("queue"), "message_id": f.col("message_id"), "claim": f.col("timer_claim"), "timer": f.lit(1),
        "claims": f.lit(0), "ends": f.lit(0),
    }  # fmt: skip
    columns = [name for name in SILVER_DELIVERIES.columns if name != "late_ms"]
    return waiting.select(
        *(given.get(name, f.lit(None)).cast(SILVER_DELIVERIES.columns[name]).alias(name) for name in columns),
        given["timer"].alias("timer"),
    )


def deliveries(steps: DataFrame) -> DataFrame:
    """One row for each delivery."""
    summed = ("claims", "ends")
    largest = [name for name in SILVER_DELIVERIES.columns if name not in ("queue", "message_id", "claim", "late_ms")]
    merged = (
        _repartition(steps)
        .groupBy("message_id", "queue", "claim")
        .agg(
            *((f.sum(name) if name in summed else f.max(name)).alias(name) for name in largest),
            f.max("timer").alias("timer"),
        )
    )
    late = f.when(f.col("timer") == 1, f.col("wait_ms"))
    held = (f.col("claims") > 0) | (f.col("ends") > 0)
    return merged.where(held).withColumn("late_ms", late).select(*SILVER_DELIVERIES.columns)


def partition_deliveries(rows: DataFrame) -> DataFrame:
    """Return rows of deliveries with their part, closed or open, and the day of their claim."""
    part = f.when(f.col("ends") > 0, "closed").otherwise("open")
    day = day_of(f.coalesce(f.col("claimed_ms"), f.col("ended_ms")))
    return rows.withColumn(PART, part).withColumn(DATE, day)


# ---- sums ---------------------------------------------------------------------------------------------------


def event_sums(events: DataFrame) -> DataFrame:
    """Events counted by queue and minute, and by the columns of gold."""
    event, at, number = f.col("event"), f.col("at_ms"), f.col("number")
    claimed = event == "claimed"
    value = f.greatest(f.when(claimed, f.col("wait_ms")).otherwise(f.col("run_ms")), f.lit(0))
    measure = f.when(claimed, f.lit("wait")).otherwise(f.lit("run"))
    is_level_change = (event == "configured") & f.col("cause").contains("journal=")
    has_value = f.when(claimed, f.col("wait_ms")).otherwise(f.col("run_ms")).isNotNull()
    return (
        events.select(
            "queue",
            (at - at % 60_000).alias("minute_ms"),
            "event",
            f.when(claimed, f.col("cause")).alias("cause"),
            f.when(event == "dead", f.col("reason")).when(is_level_change, f.lit(JOURNAL_LEVEL)).alias("reason"),
            f.when(has_value, measure).alias("measure"),
            f.when(has_value, bucket_of(value)).alias("bucket"),
            f.when(has_value, value).alias("value"),
            (claimed & (f.col("wait_ms") <= PROMPT_MS)).cast("bigint").alias("woken"),
            number.alias("number"),
        )
        .groupBy("queue", "minute_ms", "event", "cause", "reason", "measure", "bucket")
        .agg(
            f.count("*").alias("events"),
            f.sum("woken").alias("woken"),
            f.coalesce(f.sum("value"), f.lit(0)).alias("total_ms"),
            f.min("number").alias("first_number"),
            f.max("number").alias("last_number"),
        )
        .select(*SILVER_SUMS.columns)
    )


def late_sums(deliveries: DataFrame, first_new: Column) -> DataFrame:
    """How late timers were claimed, of the claims that are new: those with numbers from `first_new` on."""
    at, late = f.col("claimed_ms"), f.greatest(f.col("late_ms"), f.lit(0))
    nothing = f.lit(None)
    return (
        deliveries.where(f.col("late_ms").isNotNull() & (f.col("claimed_number") >= first_new))
        .groupBy("queue", (at - at % 60_000).alias("minute_ms"), bucket_of(late).alias("bucket"))
        .agg(f.count("*").alias("events"), f.sum(late).alias("total_ms"))
        .select(
            "queue",
            "minute_ms",
            f.lit("late").alias("event"),
            nothing.cast("string").alias("cause"),
            nothing.cast("string").alias("reason"),
            f.lit("late").alias("measure"),
            "bucket",
            "events",
            f.lit(0).cast("bigint").alias("woken"),
            "total_ms",
            nothing.cast("bigint").alias("first_number"),
            nothing.cast("bigint").alias("last_number"),
        )
    )


def merge_sums(sums: DataFrame) -> DataFrame:
    """Sums of several batches as one."""
    return (
        sums.groupBy("queue", "minute_ms", "event", "cause", "reason", "measure", "bucket")
        .agg(
            *(f.sum(name).alias(name) for name in ("events", "woken", "total_ms")),
            f.min("first_number").alias("first_number"),
            f.max("last_number").alias("last_number"),
        )
        .select(*SILVER_SUMS.columns)
    )
