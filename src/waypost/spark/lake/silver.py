"""Silver: one row for each delivery and one for each message.

The events of a message may be in many batches. A step merges its own events into rows. Those of messages that ended are
final and go to `silver/messages`. The others are partial rows: they are added to `silver/open_messages` and merge with
those of other steps when they are read, so nothing is rewritten. Only for messages that end in a step without having
begun in it are earlier partial rows read, by their ids. So a step costs what is new in it, however long the history and
however many messages are open. Deliveries work alike.

Numbers of events follow cause and effect within a message, so "the newest" is by number, never by time.

An id may be published again after its end: that is another message. If both are in one batch, the column `life` tells
them apart; without such ids, which are rare, there is no such column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as f
from pyspark.sql.window import Window

from waypost.spark.delta.data_source import TO
from waypost.spark.lake.tables import (
    COUNTED_EVENTS,
    SILVER_DELIVERIES,
    SILVER_MESSAGES,
    SILVER_OPEN_DELIVERIES,
    SILVER_OPEN_MESSAGES,
)
from waypost.values import EventName

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

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
#: A message by its queue and its id, which is unique within its queue only.
IDS: Final = pa.schema([("queue", pa.string()), ("message_id", pa.string())])
#: By queue and id, at which numbers a message with the id of an ended one was published.
Lives: TypeAlias = Mapping[tuple[str, str], Sequence[int]]
NO_LIVES: Final[Lives] = {}
#: Events that name a message but do not change it.
ASIDE: Final = ("duplicate", "configured", "paused", "resumed", "trimmed", "skipped")


def day_of(milliseconds: Column) -> Column:
    """The day of a time, in UTC, as text."""
    return f.date_from_unix_date((milliseconds / 86_400_000).cast("int")).cast("string")


def _repartition(steps: DataFrame, *, few: bool) -> DataFrame:
    """Steps of one message in one place. Aggregates that hold texts are sorted for: so that is done once, not twice."""
    return in_one_task(steps) if few else steps.repartition("message_id", "queue")


def in_one_task(rows: DataFrame) -> DataFrame:
    """Return rows that one task computes: nothing after it needs an exchange of rows."""
    return rows.coalesce(1)


# ---- ids that are published again ---------------------------------------------------------------------------


def find_lives(events: Any) -> dict[tuple[str, str], list[int]]:
    """Return at which numbers a message with the id of an ended one was published, where both are in one batch."""
    event, number = events.column("event"), events.column("number")
    names = _join_names(events.column("queue"), events.column("message_id"))
    ends, published = pc.is_in(event, pa.array(CLOSING)), pc.equal(event, "published")
    ended = names.filter(ends).combine_chunks()
    # Usually an id ends once, after it was published.
    first_end = pc.take(number.filter(ends), pc.index_in(names.filter(published), value_set=ended))
    later = pc.fill_null(pc.greater(number.filter(published), first_end), False)
    chosen = pc.unique(names.filter(published).filter(later)).to_pylist()
    if len(pc.unique(ended)) < len(ended):
        counts = pc.value_counts(ended)
        chosen += counts.field("values").filter(pc.greater(counts.field("counts"), 1)).to_pylist()
    if not chosen:
        return {}
    rows = events.filter(pc.is_in(names, pa.array(chosen, pa.string())))
    return _begins(rows.select(["queue", "message_id", "event", "number"]).to_pylist())


def _begins(events: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[int]]:
    begins: dict[tuple[str, str], list[int]] = {}
    ended: set[tuple[str, str]] = set()
    for row in sorted(events, key=lambda row: int(row["number"])):
        name = row["queue"], row["message_id"]
        if row["event"] in CLOSING:
            ended.add(name)
        elif row["event"] == "published" and name in ended:
            ended.remove(name)
            begins.setdefault(name, []).append(row["number"])
    return begins


def with_lives(steps: DataFrame, begins: Lives) -> DataFrame:
    """Return steps with the life of the message that each belongs to, if there are ids with several."""
    if not begins:
        return steps
    rows = [(queue, message_id, list(numbers)) for (queue, message_id), numbers in begins.items()]
    known = steps.sparkSession.createDataFrame(rows, "queue STRING, message_id STRING, begins ARRAY<BIGINT>")
    life = f.size(f.filter("begins", lambda number: number <= f.col("last_number")))
    joined = steps.join(f.broadcast(known), ["queue", "message_id"], "left")
    return joined.withColumn("life", f.when(f.col("begins").isNull(), 0).otherwise(life)).drop("begins")


def _life(steps: DataFrame) -> list[str]:
    return ["life"] if "life" in steps.columns else []


def _with_ids(ids: Any, begins: Lives) -> Any:
    """Return queues and ids with those of several lives: what is open of them belongs to a life that ends here."""
    if not begins:
        return ids
    names = [pa.array([name[index] for name in begins], pa.string()) for index in (0, 1)]
    both = pa.concat_tables([ids.cast(IDS), pa.Table.from_arrays(names, schema=IDS)])
    return both.group_by(["queue", "message_id"]).aggregate([])


# ---- messages -----------------------------------------------------------------------------------------------


def _lookup(names: Mapping[str, str | int], key: Column) -> Column:
    """Return the value of a key, null if it has none."""
    # As text, one call to Java makes it instead of hundreds.
    pairs = ", ".join(f"'{name}', {value!r}" for name, value in names.items())
    return f.expr(f"map({pairs})")[key]


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
        f.lit(True).alias("is_new"),
    )


def open_steps(messages: DataFrame) -> DataFrame:
    """Return partial rows in the form to which new events can be merged."""
    columns = [name for name in SILVER_MESSAGES.columns if name not in ("state", "last_event")]
    otherwise = f.col("state") == _lookup(OTHERWISE, f.col("last_event"))
    newest = _newest_code(f.col("last_event"), f.col("last_number"), otherwise)
    # A row of an older release has no count of claims; there it was equal to the token.
    known = messages.withColumn("claims", f.coalesce("claims", "token"))
    return known.select(*columns, newest.alias("newest"), f.lit(False).alias("is_new"))


def messages(steps: DataFrame, *, few: bool = False) -> DataFrame:
    """Return one row for each message, merged from its steps."""
    # The newest by number wins; those of rows that were open are older than any new event.
    newest = {
        name: f.max_by(name, f.when(f.col(name).isNotNull(), f.col("last_number")))
        for name in ("reason", "error_type", "ended_ms")
    }
    merged = (
        _repartition(steps, few=few)
        .groupBy("message_id", "queue", *_life(steps))
        .agg(
            *(f.max(name).alias(name) for name in ("key", "group", "priority", "size", "chain_id", "schedule")),
            *(column.alias(name) for name, column in newest.items()),
            *(f.min(name).alias(name) for name in ("published_ms", "claimed_ms", "first_number")),
            *(f.max(name).alias(name) for name in ("due_ms", "last_ms", "last_number", "newest", "token")),
            *(f.max(name).alias(name) for name in ("claims", "timer_claim")),
            *(f.sum(name).alias(name) for name in ("wait_ms", "run_ms", *COUNTED_EVENTS)),
            f.bool_or("is_new").alias("is_new"),
            (~f.bool_and("is_new")).alias("was_open"),
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
        .select(*SILVER_MESSAGES.columns, "is_new", "was_open")
    )


def route_messages(rows: DataFrame) -> DataFrame:
    """Return rows with the table that each goes to. A message that was open and has ended also marks its open rows."""
    ended = f.col("last_event").isin(*CLOSING)
    done, still_open = f.lit(SILVER_MESSAGES.name), f.lit(SILVER_OPEN_MESSAGES.name)
    targets = (
        f.when(ended & f.col("was_open"), f.array(done, still_open))
        .when(ended, f.array(done))
        .otherwise(f.array(still_open))
    )
    return rows.where("is_new").select(*SILVER_MESSAGES.columns, f.explode(targets).alias(TO))


def _lives(partials: DataFrame) -> DataFrame:
    """Return partial rows with the number up to which their message has ended: an id may be published again."""
    of_message = Window.partitionBy("message_id", "queue")
    ends = f.when(f.col("last_event").isin(*CLOSING), f.col("last_number"))
    return partials.withColumn("ended_number", f.coalesce(f.max(ends).over(of_message), f.lit(0)))


def current_partials(partials: DataFrame) -> DataFrame:
    """Return the partial rows of messages that have not ended."""
    return _lives(partials).where(f.col("first_number") > f.col("ended_number")).drop("ended_number")


def messages_now(partials: DataFrame) -> DataFrame:
    """Return the messages that have not ended, one row each."""
    return messages(open_steps(current_partials(partials))).select(*SILVER_MESSAGES.columns)


def merge_open_messages(partials: DataFrame, *, all_of_them: bool) -> DataFrame:
    """Return fewer partial rows that mean the same. Marks of ended messages go if no row of theirs is elsewhere."""
    now = messages_now(partials)
    if all_of_them:
        return now
    marks = _lives(partials).where(f.col("last_event").isin(*CLOSING) & (f.col("last_number") == f.col("ended_number")))
    return now.unionByName(marks.select(*SILVER_MESSAGES.columns))


def ids_of_earlier_messages(events: Any, begins: Lives = NO_LIVES) -> Any:
    """Return the queues and ids of messages that end in a batch of events and began before it, as Arrow tables."""
    event, names = events.column("event"), _join_names(events.column("queue"), events.column("message_id"))
    began = pc.unique(names.filter(pc.equal(event, "published")))
    earlier = pc.and_(pc.is_in(event, pa.array(CLOSING)), pc.invert(pc.is_in(names, began)))
    return _with_ids(_distinct_ids(events, earlier), begins)


def _join_names(*columns: Any) -> Any:
    """Return one text for each row. An id is unique within its queue only."""
    return pc.binary_join_element_wise(*columns, "\0", null_handling="replace")


def _distinct_ids(events: Any, chosen: Any) -> Any:
    rows = events.filter(pc.and_(chosen, pc.is_valid(events.column("message_id"))))
    return rows.select(["queue", "message_id"]).group_by(["queue", "message_id"]).aggregate([])


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
        number.alias("last_number"),
        f.lit(True).alias("is_new"),
    )


def open_delivery_steps(partials: DataFrame) -> DataFrame:
    """Return partial rows in the form to which new events can be merged."""
    return partials.select(*SILVER_OPEN_DELIVERIES.columns, f.lit(False).alias("is_new"))


def deliveries(steps: DataFrame, *, few: bool = False) -> DataFrame:
    """Return one row for each delivery, merged from its steps, and how many of its claims are new."""
    summed = ("claims", "ends")
    keys = ("queue", "message_id", "claim")
    largest = [name for name in SILVER_OPEN_DELIVERIES.columns if name not in (*keys, *summed)]
    merged = (
        _repartition(steps, few=few)
        .groupBy("message_id", "queue", "claim", *_life(steps))
        .agg(
            *(f.max(name).alias(name) for name in largest),
            *(f.sum(name).alias(name) for name in summed),
            f.sum(f.when(f.col("is_new"), f.col("claims")).otherwise(0)).alias("new_claims"),
            f.bool_or("is_new").alias("is_new"),
            (~f.bool_and("is_new")).alias("was_open"),
        )
    )
    return merged.withColumn("late_ms", f.when(f.col("timer") == 1, f.col("wait_ms")))


#: The columns of a row that goes to either table of deliveries.
DELIVERY_COLUMNS: Final = (*SILVER_DELIVERIES.columns, "timer", "last_number")


def route_deliveries(rows: DataFrame) -> DataFrame:
    """Return rows with the table that each goes to. A delivery that was open and has ended also marks its open rows."""
    ended = f.col("ends") > 0
    done, still_open = f.lit(SILVER_DELIVERIES.name), f.lit(SILVER_OPEN_DELIVERIES.name)
    targets = (
        f.when(ended & f.col("was_open"), f.array(done, still_open))
        .when(ended, f.array(done))
        .otherwise(f.array(still_open))
    )
    # A partial row has only what is new: counts of partial rows are added up.
    claims = f.when(ended, f.col("claims")).otherwise(f.col("new_claims"))
    return rows.where("is_new").withColumn("claims", claims).select(*DELIVERY_COLUMNS, f.explode(targets).alias(TO))


def _delivery_lives(partials: DataFrame) -> DataFrame:
    of_delivery = Window.partitionBy("message_id", "queue", "claim")
    ends = f.when(f.col("ends") > 0, f.col("last_number"))
    return partials.withColumn("closed_number", f.coalesce(f.max(ends).over(of_delivery), f.lit(0)))


def current_deliveries(partials: DataFrame) -> DataFrame:
    """Return the partial rows of deliveries that have not ended."""
    return _delivery_lives(partials).where(f.col("last_number") > f.col("closed_number")).drop("closed_number")


def deliveries_now(partials: DataFrame) -> DataFrame:
    """Return the deliveries that have not ended, one row each."""
    rows = deliveries(open_delivery_steps(current_deliveries(partials)))
    return rows.where(f.col("claims") > 0).select(*SILVER_DELIVERIES.columns)


def merge_open_deliveries(partials: DataFrame, *, all_of_them: bool) -> DataFrame:
    """Return fewer partial rows that mean the same. Marks of ended deliveries go only if no row is elsewhere."""
    now = deliveries(open_delivery_steps(current_deliveries(partials))).select(*SILVER_OPEN_DELIVERIES.columns)
    if all_of_them:
        return now
    marks = _delivery_lives(partials).where((f.col("ends") > 0) & (f.col("last_number") == f.col("closed_number")))
    return now.unionByName(marks.select(*SILVER_OPEN_DELIVERIES.columns))


def ids_of_earlier_deliveries(events: Any, begins: Lives = NO_LIVES) -> Any:
    """Return the queues and ids of messages whose claim, or timer before a claim, may be in an earlier batch."""
    event, ids, claims = events.column("event"), events.column("message_id"), events.column("claims")
    message = _join_names(events.column("queue"), ids)
    claim, next_claim = (_join_names(message, count.cast(pa.string())) for count in (claims, pc.add(claims, 1)))
    claimed = pc.equal(event, "claimed")
    ended = pc.or_(pc.is_valid(events.column("run_ms")), pc.equal(event, "done"))
    # A claim has its timer here too, if its message began here or its own timer was promoted here.
    began = pc.unique(message.filter(pc.equal(event, "published")))
    timer = pc.and_(pc.equal(event, "promoted"), pc.fill_null(pc.equal(events.column("cause"), "due"), False))
    timers = pc.unique(next_claim.filter(timer))
    whole = pc.or_(pc.is_in(message, began), pc.is_in(claim, timers))
    lacks_timer = pc.and_(claimed, pc.invert(whole))
    lacks_claim = pc.and_(ended, pc.invert(pc.is_in(claim, pc.unique(claim.filter(claimed)))))
    return _with_ids(_distinct_ids(events, pc.or_(lacks_timer, lacks_claim)), begins)
