"""What rules see of a queue, read: from the tables of a lake with pyarrow, and bodies with Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds

from waypost.policy import PolicyRecord
from waypost.spark.delta.parquet import read_rows
from waypost.spark.delta.steps import COLUMNS
from waypost.spark.insight.advice import TEXT, TEXT_OF_VALUE, Bodies, Facts, FieldValue, GroupChange, ScheduledRun
from waypost.spark.insight.lake_history import (
    Rows,
    Window,
    read_changes,
    read_deliveries,
    read_never_claimed,
    read_pauses,
    to_deliveries,
)
from waypost.spark.lake.lake import Lake, State
from waypost.spark.lake.tables import BRONZE_JOURNAL, SILVER_MESSAGES, SILVER_OPEN_MESSAGES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Steps of the pipeline that follow each other within this time are of one run.
RUN_MS: Final = 30_000
#: The events that change the number of dead letters, and how.
LETTERS: Final = {"dead": 1, "redriven": -1, "dead_trimmed": -1}
#: Values of fields that are counted, the most frequent of the dead first, and how long a value may be.
VALUES_MAX: Final = 200
VALUE_CHARACTERS_MAX: Final = 100


class LoadedStep(NamedTuple):
    """A step of the lake: when it was made, and the number of the last event of each queue that it had read."""

    at_ms: int
    offsets: Mapping[str, int]


def read_facts(
    lake: Rows,
    window: Window,
    policy: PolicyRecord,
    *,
    steps: Sequence[LoadedStep] = (),
    schedules: Mapping[str, float] | None = None,
    target: str | None = None,
    bodies: Bodies | None = None,
    types: Any = None,
) -> Facts:
    """Return what a lake has of a queue in a window. `steps` are those of the lake, for how much each run loaded.

    `types` are those of messages, from `read_types`.
    """
    deliveries = sorted(to_deliveries(read_deliveries(lake, window), types), key=lambda row: row.claimed_ms)
    letters = read_letters(lake, window)
    now = max([row.ended_ms for row in deliveries] + [at for at, _ in letters], default=0)
    return Facts(
        window.queue, policy, read_changes(lake, window.queue), deliveries, read_scheduled(lake, window),
        dict(schedules or {}), letters, now, count_run_events(steps, window.queue), count_not_seen(lake, window.queue),
        bodies, read_group_changes(lake, window.queue), read_pauses(lake, window),
        read_never_claimed(lake, window.queue, now), target,
    )  # fmt: skip


def read_group_changes(lake: Rows, queue: str) -> dict[str, GroupChange]:
    """Return which groups of a queue were paused or resumed, and when last."""
    chosen = (ds.field("queue") == queue) & (ds.field("event") == "configured") & ds.field("group").is_valid()
    rows = lake.arrow(BRONZE_JOURNAL, ["at_ms", "number", "group", "cause"], chosen)
    found: dict[str, GroupChange] = {}
    for row in sorted(rows.to_pylist(), key=lambda row: row["number"]):
        own = dict(part.split("=", 1) for part in (row["cause"] or "").split(" ") if "=" in part)
        if "own_paused" in own:
            found[row["group"]] = GroupChange(row["at_ms"], own["own_paused"] == "True")
    return found


def count_not_seen(lake: Rows, queue: str) -> int:
    """Return how many events were trimmed before they were loaded; those that `--from` left out do not count."""
    seen = lake.state.seen.get(queue)
    return 0 if seen is None else max(0, seen.not_seen - lake.state.left_out.get(queue, 0))


def read_letters(lake: Rows, window: Window) -> list[tuple[int, int]]:
    """Return when there was a dead letter more or fewer."""
    chosen = (
        (ds.field("queue") == window.queue)
        & ds.field("event").isin(list(LETTERS))
        & (ds.field("at_ms") >= window.since_ms)
        & (ds.field("at_ms") < window.until_ms)
    )
    rows = lake.arrow(BRONZE_JOURNAL, ["at_ms", "event"], chosen)
    return sorted((row["at_ms"], LETTERS[row["event"]]) for row in rows.to_pylist())


def read_scheduled(lake: Rows, window: Window) -> list[ScheduledRun]:
    """Return the messages that schedules published, ended or not."""
    columns = ["message_id", "schedule", "published_ms", "due_ms", "claimed_ms", "ended_ms"]
    of_queue = ds.field("queue") == window.queue
    chosen = (
        of_queue & ds.field("schedule").is_valid()
        & (ds.field("published_ms") >= window.since_ms) & (ds.field("published_ms") < window.until_ms)
    )  # fmt: skip
    ended = lake.arrow(SILVER_MESSAGES, columns, chosen).to_pylist()
    # The schedule is known from the first of the partial rows of a message, its end from the last one.
    begun = set(lake.arrow(SILVER_OPEN_MESSAGES, ["message_id"], chosen).column("message_id").to_pylist())
    still_open = begun - {row["message_id"] for row in ended}
    partial = []
    if still_open:
        of_these = of_queue & ds.field("message_id").isin(sorted(still_open))
        partial = lake.arrow(SILVER_OPEN_MESSAGES, columns, of_these).to_pylist()
    return [to_run(row) for row in ended + merge_partial(partial)]


def merge_partial(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each message, with its first claim and its last end."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = found.setdefault(row["message_id"], dict(row))
        for name, choose in (
            ("schedule", max), ("published_ms", min), ("due_ms", max), ("claimed_ms", min), ("ended_ms", max),
        ):  # fmt: skip
            values = [value for value in (one[name], row[name]) if value is not None]
            one[name] = choose(values) if values else None
    return list(found.values())


def to_run(row: Mapping[str, Any]) -> ScheduledRun:
    """Return a message of a schedule with how long it waited for its first claim."""
    ready = row["published_ms"] if row["due_ms"] is None else row["due_ms"]
    wait = None if row["claimed_ms"] is None else max(0, row["claimed_ms"] - ready)
    return ScheduledRun(row["schedule"], row["published_ms"], wait, row["ended_ms"])


def read_steps(lake: Lake) -> list[LoadedStep]:
    """Return when each step of a lake was made, and how far it had read each queue."""
    snapshot = lake.steps.table.snapshot() if lake.steps.exists() else None
    if snapshot is None or not snapshot.files:
        return []
    rows = read_rows(lake.files, lake.steps.table.name, snapshot.files, COLUMNS, ["step", "at_ms", "state"])
    return [
        LoadedStep(row["at_ms"], msgspec.json.decode(row["state"], type=State).offsets)
        for row in sorted(rows.to_pylist(), key=lambda row: row["step"])
    ]


def count_run_events(steps: Iterable[LoadedStep], queue: str) -> list[int]:
    """Return how many events of a queue each of the last runs loaded, without the first run of the lake."""
    runs: list[tuple[int, int]] = []
    for step in steps:
        if runs and step.at_ms - runs[-1][0] < RUN_MS:
            runs.pop()
        runs.append((step.at_ms, step.offsets.get(queue, 0)))
    return [after - before for (_, before), (_, after) in pairwise(runs) if before and after > before]


# ---- bodies -------------------------------------------------------------------------------------------------


def read_bodies(spark: SparkSession, lake: Lake, window: Window) -> Bodies | None:
    """Return which values of fields dead and other messages have; None if no bodies were ingested."""
    from pyspark.sql import functions as f

    from waypost.spark.lake.ingest import STEPS, Ingest, folder_of, read_schema

    root, queue = lake.files.address, window.queue
    if folder_of(queue) not in lake.files.folders(STEPS):
        return None
    schema = Lake(root, steps=f"{STEPS}/{folder_of(queue)}", tables=()).state.schema
    ingested = Ingest(spark, root, queue, schema=None if schema is None else read_schema(schema)).rows()
    text = TEXT if schema is None else TEXT_OF_VALUE
    dead = _deaths(lake, queue)
    if dead.num_rows == 0:
        return None
    died = spark.createDataFrame(dead).withColumnRenamed("message_id", "id").withColumn("died", f.lit(1))
    published = f.col("published_ms")
    ingested = ingested.where((published >= window.since_ms) & (published < window.until_ms))
    bodies = ingested.selectExpr("id", "`group`", f"{text} AS text").join(f.broadcast(died), "id", "left")
    bodies = (
        bodies.na.fill({"died": 0}).selectExpr("died", "died_ms", "`group`", "try_parse_json(text) AS body").cache()
    )
    try:
        total = bodies.agg(f.count("*").alias("messages"), f.sum("died").alias("dead")).collect()[0]
        # An array has positions instead of names; values that are objects or arrays are no shape by themselves.
        fields = (
            bodies.where("schema_of_variant(body) LIKE 'OBJECT<%'")
            .selectExpr("*", "explode(from_json(to_json(body), 'map<string,variant>')) AS (name, found)")
            .selectExpr("died", "died_ms", "`group`", "name", "to_json(found) AS value")
            .where(f"length(value) <= {VALUE_CHARACTERS_MAX} AND value NOT LIKE '{{%' AND value NOT LIKE '[%'")
            .groupBy("name", "value")
            .agg(
                f.count("*").alias("messages"), f.sum("died").alias("dead"), f.max("died_ms").alias("died_ms"),
                # All of them have the same group, or this is null.
                f.expr("CASE WHEN count(`group`) = count(*) AND min(`group`) = max(`group`) THEN min(`group`) END")
                .alias("only_group"),
            )
            .where("dead > 0")
            .orderBy(f.desc("dead"), "name", "value")
            .limit(VALUES_MAX)
        ).collect()  # fmt: skip
        known = sorted({row["only_group"] for row in fields if row["only_group"] is not None})
        counted = bodies.where(f.col("group").isin(known)).groupBy("group").count().collect() if known else []
        sizes = {row["group"]: row["count"] for row in counted}
    finally:
        bodies.unpersist()
    values = tuple(
        FieldValue(
            row["name"], row["value"], row["messages"], row["dead"],
            row["only_group"] if sizes.get(row["only_group"]) == row["messages"] else None, row["died_ms"] or 0,
        )
        for row in fields
    )  # fmt: skip
    return Bodies(total["messages"], total["dead"] or 0, values, text, window.since_ms)


def _deaths(lake: Lake, queue: str) -> Any:
    """Return the ids of messages that died, once each, with the time of their last death, as an Arrow table."""
    chosen = (ds.field("queue") == queue) & (ds.field("event") == "dead") & ds.field("message_id").is_valid()
    rows = lake.arrow(BRONZE_JOURNAL, ["message_id", "at_ms"], chosen)
    deaths = rows.group_by("message_id").aggregate([("at_ms", "max")])
    return pa.table({"message_id": deaths.column("message_id"), "died_ms": deaths.column("at_ms_max")})
