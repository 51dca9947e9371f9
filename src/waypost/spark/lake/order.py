"""Broken order in ordered groups, from the journal alone: claims out of order, and two of one group leased at once.

A group of a queue with `order="group"` hands out one message at a time, in the order in which they first became ready.
So of two messages of a group that were claimed one after the other, the first had ended before, unless it came back
and the second was let pass it: it was skipped, or `on_failure="pass"` let it wait alone. And of two that were never
claimed the one that became ready first is claimed first.

Nothing is reported that may have been right. What was there when an order was switched on was claimed by other rules
until it was converted, so only messages are judged that were published after the last of those had ended. A message
that was postponed, redriven or mended has another place than its publication tells. Where commits become visible out
of order, the order of two publications is known only within one operation, and events may have numbers in another
order than they happened: there the times have to agree too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import functions as f
from pyspark.sql.window import Window

from waypost.spark.lake.silver import CLOSING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

OVERLAPS: Final = "it was claimed while another message of its ordered group was leased: "
PASSED: Final = "it was claimed while an earlier message of its ordered group had not ended: "
TOO_EARLY: Final = "it was claimed before a message of its ordered group that was ready earlier: "
#: Ends of a delivery after which the message is ready again or will be; the others end the message.
COMES_BACK: Final = ("retried", "snoozed", "released", "expired")
#: Those after which `on_failure="pass"` lets others go on meanwhile.
WAITS: Final = ("retried", "snoozed")
#: Changes of settings after which a queue has to be judged anew, in the text of its event.
CHANGES_ORDER: Final = r"(^| )(order|on_failure)="


class OrderRule(NamedTuple):
    """By what rules the groups of a queue are judged."""

    #: Messages are judged whose publication has a larger number.
    after: int
    #: Whether a message that failed holds its group.
    holds: bool
    #: Whether the numbers of events are the order in which publications became visible.
    in_order: bool


def order_since(events: DataFrame, queue: str, seen_from: int) -> int | None:
    """Return the number up to which messages of an ordered queue are not judged; None if none can be.

    `seen_from`: up to there events are missing. A conversion has ended when all messages have that it found.
    """
    mine = events.where(f.col("queue") == queue)
    changes = mine.where(
        (f.col("event") == "configured") & f.col("group").isNull() & f.col("cause").rlike(CHANGES_ORDER)
    )
    changed = changes.agg(f.max("number")).first()
    since = max(seen_from, (changed[0] if changed is not None else None) or 0)
    if since == 0:
        return 0
    ended = f.max(f.when(f.col("event").isin(*CLOSING, "dead"), f.col("number")))
    spans = mine.where(f.col("message_id").isNotNull() & (f.col("event") != "duplicate")).groupBy("message_id")
    found = spans.agg(
        f.min("number").alias("first_number"), f.max("number").alias("last_number"), ended.alias("ended_number")
    ).where((f.col("first_number") <= since) & (f.col("ended_number").isNull() | (f.col("last_number") > since)))
    last = found.agg(f.max("last_number"), f.count(f.when(f.col("ended_number").isNull(), 1))).first()
    if last is None or last[0] is None:
        return since
    return None if last[1] else int(last[0])


def broken_order(events: DataFrame, deliveries: DataFrame, rules: Mapping[str, OrderRule]) -> DataFrame:
    """Return messages that were claimed too early, one row each: queue, message_id, other, fault and last_number."""
    spark = events.sparkSession
    known = f.broadcast(
        spark.createDataFrame(
            [(queue, *rule) for queue, rule in rules.items()],
            "queue STRING, after BIGINT, holds BOOLEAN, in_order BOOLEAN",
        )
    )
    members = _members(events.join(known, "queue").where(f.col("number") > f.col("after")))
    claimed = deliveries.where(f.col("group").isNotNull() & (f.col("claims") == 1)).select(
        "queue", "group", "message_id", "claimed_number", "claimed_ms", "ended_number", "ended_ms", "outcome"
    )
    found = _claimed_beside(claimed, members).unionByName(_claimed_first(members))
    return found.groupBy("queue", "message_id").agg(
        f.min("other").alias("other"), f.min("fault").alias("fault"), f.max("last_number").alias("last_number")
    )


def _members(events: DataFrame) -> DataFrame:
    """Return the messages of groups that were published behind the number from which a queue is judged."""
    event, number, at = f.col("event"), f.col("number"), f.col("at_ms")
    published = event == "published"
    later = published & (f.col("due_ms").isNotNull() | f.col("cause").isin("parked", "blocked"))
    promoted = event == "promoted"
    moved = event.isin("postponed", "redriven") | promoted & (f.col("cause") == "mended")
    ends = event.isin(*CLOSING, "dead")

    def first(chosen: Column, value: Column) -> Column:
        return f.min(f.when(chosen, value))

    rows = (
        events.where(f.col("message_id").isNotNull() & f.col("group").isNotNull())
        .groupBy("queue", "group", "message_id")
        .agg(
            f.first("holds").alias("holds"), f.first("in_order").alias("in_order"),
            first(published, number).alias("published_number"), f.count(f.when(published, 1)).alias("publications"),
            f.bool_or(later).alias("was_later"), f.bool_or(moved).alias("was_moved"),
            first(promoted, number).alias("promoted_number"),
            first(published, f.col("operation_id")).alias("operation"),
            first(event == "claimed", number).alias("first_claim"),
            first(event == "claimed", at).alias("first_claim_ms"),
            first(ends, number).alias("end_number"), first(ends, at).alias("end_ms"),
            f.max(f.when(event == "skipped", number)).alias("skipped_number"),
        )
    )  # fmt: skip
    joined = f.when(f.col("was_later"), f.col("promoted_number")).otherwise(f.col("published_number"))
    # One whose place is not known is only judged where its place does not matter.
    placed = (f.col("publications") == 1) & ~f.coalesce(f.col("was_moved"), f.lit(False))
    return rows.where(f.col("published_number").isNotNull()).withColumn("joined", f.when(placed, joined))


def _claimed_beside(claimed: DataFrame, members: DataFrame) -> DataFrame:
    """Messages that were claimed while the one that was claimed before them in their group had not ended."""
    mine = members.select(
        "queue", "group", "message_id", "joined", "holds", "in_order", "end_number", "end_ms", "skipped_number"
    )  # fmt: skip
    in_turn = f.when(f.col("in_order"), f.lit(0)).otherwise(f.col("claimed_ms"))
    before = Window.partitionBy("queue", "group").orderBy(in_turn, "claimed_number")
    names = ("message_id", "joined", "claimed_number", "ended_number", "ended_ms", "outcome", "end_number", "end_ms",
             "skipped_number")  # fmt: skip
    pairs = claimed.join(mine, ["queue", "group", "message_id"]).select(
        "queue", "group", "message_id", "joined", "holds", "in_order", "claimed_number", "claimed_ms",
        *(f.lag(name).over(before).alias(f"before_{name}") for name in names),
    )  # fmt: skip
    pairs = pairs.where(
        (f.col("before_message_id") != f.col("message_id")) & (f.col("before_claimed_number") < f.col("claimed_number"))
    )

    def is_behind(name: str) -> Column:
        """Whether the end of the other one came after this claim, or not at all."""
        number, at = f.col(f"before_{name}_number"), f.col(f"before_{name}_ms")
        return number.isNull() | (number > f.col("claimed_number")) & (f.col("in_order") | (at > f.col("claimed_ms")))

    came_back = f.col("before_outcome").isin(*COMES_BACK) & (
        f.col("holds") | ~f.col("before_outcome").isin(*WAITS)
    )  # fmt: skip
    skipped = f.coalesce(f.col("before_skipped_number") > f.col("before_claimed_number"), f.lit(False))
    fault = f.when(is_behind("ended") & is_behind("end"), f.lit(OVERLAPS)).when(
        came_back & is_behind("end") & ~skipped & (f.col("before_joined") < f.col("joined")), f.lit(PASSED)
    )
    return _found(pairs, fault, "before_message_id", "claimed_number")


def _claimed_first(members: DataFrame) -> DataFrame:
    """Messages that were claimed before one that had become ready earlier and had never been claimed."""
    judged = members.where(f.col("joined").isNotNull() & (f.col("in_order") | ~f.col("was_later")))
    # Where the order of two publications is not known, those of one operation have it.
    batch = f.when(f.col("in_order"), f.lit("")).otherwise(f.coalesce("operation", "message_id"))
    judged = judged.withColumn("batch", batch)
    earlier = Window.partitionBy("queue", "group", "batch").orderBy("joined").rowsBetween(Window.unboundedPreceding, -1)
    # Until when each waited for its first claim. Never: as far as the journal was read.
    waited = f.coalesce("first_claim", "end_number", f.lit(2**62))
    waited_ms = f.coalesce("first_claim_ms", "end_ms", f.lit(2**62))
    last = f.max(f.struct(waited.alias("number"), waited_ms.alias("ms"), "message_id")).over(earlier)
    pairs = judged.withColumn("last", last).where(f.col("first_claim").isNotNull())
    late = (f.col("last.number") > f.col("first_claim")) & (
        f.col("in_order") | (f.col("last.ms") > f.col("first_claim_ms"))
    )
    rows = pairs.withColumn("before_message_id", f.col("last.message_id"))
    return _found(rows, f.when(late, f.lit(TOO_EARLY)), "before_message_id", "first_claim")


def _found(rows: DataFrame, fault: Column, other: str, number: str) -> DataFrame:
    return (
        rows.withColumn("fault", fault)
        .where(f.col("fault").isNotNull())
        .select(
            "queue", "message_id", f.col(other).alias("other"), f.concat("fault", other).alias("fault"),
            f.col(number).alias("last_number"),
        )
    )  # fmt: skip


def still_true(rows: Sequence[Any], fresh: Mapping[str, set[str]]) -> list[Any]:
    """Return the findings of messages that have no event which the lake has not read yet."""
    return [row for row in rows if not {row.message_id, row.other} & fresh[row.queue]]
