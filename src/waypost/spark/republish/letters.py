"""Dead letters that SQL chooses: over the live dead letters of the store, and over tables of the lake."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from waypost.errors import InvalidInput
from waypost.spark.delta.data_source import Target, write_frame
from waypost.spark.lake.lake import Lake
from waypost.spark.republish.inputs import explain_sql, register_views
from waypost.spark.republish.plan import KEY, Preview, known_keys
from waypost.spark.republish.redriving import CHOSEN
from waypost.spark.republish.sending import next_number
from waypost.spark.republish.state import Input, Plan, Records
from waypost.spark.source.bulk import Bulk
from waypost.spark.source.credentials import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SAMPLES: Final = 5
TEXT_MAX: Final = 200
#: The column of the key of a letter's copy; a letter has a column `key` of its own.
COPY_KEY: Final = "copy_key"


def source_options(place: Place) -> dict[str, str]:
    """Return the options of the data source for a store."""
    where = {"url": place.url} if place.url is not None else {"urlEnv": place.url_env or ""}
    return {**where, "namespace": place.namespace}


def dead_letters(spark: SparkSession, place: Place, queues: Sequence[str]) -> DataFrame:
    """Return the dead letters of some queues, or of all; `body` is the parsed text, `bytes` the body as it is."""
    read = spark.read.format("waypost").options(**source_options(place)).option("kind", "dead")
    if queues:
        read = read.option("queue", ",".join(queues))
    return read.load().withColumnRenamed("body", "bytes").withColumn("body", f.try_parse_json("text"))


def choose_letters(spark: SparkSession, lake: Lake, place: Place, given: Input) -> DataFrame:
    """Return the letters that the condition chooses. It may name tables of the lake in subqueries."""
    if not given.source.strip():
        raise InvalidInput("--where is empty: give a condition, such as \"reason = 'rejected'\"")
    letters = dead_letters(spark, place, given.queues)
    register_views(spark, lake, given.source)
    return explain_sql("--where", given.source, letters.columns, lambda: letters.where(given.source))


def without_copied(spark: SparkSession, lake: Lake, bulk: Bulk, chosen: DataFrame, to_queue: str) -> DataFrame:
    """Return the letters of which the other queue has no copy yet, known by the keys of the copies."""
    key = f.concat_ws(":", *(f.col(name).cast("string") for name in CHOSEN))
    return chosen.withColumn(COPY_KEY, key).join(
        known_keys(spark, lake, bulk, [to_queue]).withColumnRenamed(KEY, COPY_KEY), COPY_KEY, "left_anti"
    )


def preview_letters(spark: SparkSession, lake: Lake, bulk: Bulk, chosen: DataFrame, given: Input) -> Preview:
    """Return how many letters were chosen, by queue and reason, and some of them."""
    total = None
    if given.to_queue is not None:
        total, chosen = chosen.count(), without_copied(spark, lake, bulk, chosen, given.to_queue)
    found = chosen.groupBy("queue", "reason").count().collect()
    counts = {f"{row['queue']}: {row['reason']}": int(row["count"]) for row in found}
    rows = chosen.select("queue", "id", "reason", "error_type", f.substring("text", 1, TEXT_MAX).alias("body"))
    samples = [row.asDict() for row in rows.limit(SAMPLES).collect()]
    new = sum(counts.values())
    counts = dict(sorted(counts.items()))
    if given.to_queue is not None:
        total = new if total is None else total
        return Preview(given.to_queue, {"letters": total, "known": total - new, "new": new, **counts}, samples)
    queues = ", ".join(sorted({row["queue"] for row in found}))
    return Preview(queues, {"letters": new, **counts}, samples)


def plan_letters(
    spark: SparkSession, lake: Lake, bulk: Bulk, chosen: DataFrame, given: Input, priority: int, records: Records
) -> None:
    """Write the chosen letters to a file, and record them as the plan."""
    newest, total, rows = dict[str, int](), None, chosen.select(*CHOSEN)
    if given.to_queue is not None:
        newest[given.to_queue] = bulk.bounds(given.to_queue)[1]
        total = rows.count()
        rows = without_copied(spark, lake, bulk, rows, given.to_queue).select(*CHOSEN)
    # One file in one order; what comes before it runs in many tasks.
    rows = rows.repartition(1).sortWithinPartitions("queue", "id")
    files = write_frame(rows, lake.files, {"": Target(records.rows, CHOSEN)}).get("", [])
    count = sum(file.rows for file in files)
    total = count if total is None else total
    plan = Plan(
        next_number(records), given, time.time_ns() // 1_000_000, tuple(files),
        {"rows": total, "known": total - count, "new": count}, newest, priority=priority,
    )  # fmt: skip
    records.begin(plan)
