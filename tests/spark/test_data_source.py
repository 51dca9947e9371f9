"""`format("waypost")` in a real session: reads, streams and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tests.spark.shop import Shop
from waypost import Linear
from waypost.codec import open_envelope

pytestmark = pytest.mark.xdist_group("spark")


def read(spark: SparkSession, shop: Shop, **options: str) -> DataFrame:
    return spark.read.format("waypost").options(**shop.options, **options).load()


@pytest.mark.promise("SPARK-1")
def test_the_journal_and_the_dead_letters_are_tables(spark: SparkSession, shop: Shop) -> None:
    shop.fill(100)
    events = shop.events()
    counted = {row["event"]: row["count"] for row in read(spark, shop).groupBy("event").count().collect()}
    assert counted == {name: sum(e.event == name for e in events) for name in {e.event for e in events}}
    dead = read(spark, shop, kind="dead", queue="orders")
    assert {row["id"] for row in dead.select("id").collect()} == {message.id for message in shop.stored("dead")}
    assert "hush" not in dead._jdf.queryExecution().toString()
    assert read(spark, shop, queue="unused").count() == read(spark, shop, queue="unused", kind="ready").count() == 0


@pytest.mark.promise("SPARK-1")
def test_a_stream_reads_every_event_once_and_a_replayed_batch_publishes_nothing_twice(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    shop.post.publish_many("orders", [{"n": n} for n in range(250)])

    def run() -> list[Any]:
        stream = (
            spark.readStream.format("waypost").options(**shop.options, queue="orders", maxRowsPerBatch="100").load()
        )
        query = (
            stream.select(f.struct("number", "message_id").alias("body"))
            .writeStream.format("waypost")
            .options(**shop.options, queue="copies", checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(240)
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    assert run() == [100, 100, 50]
    assert shop.post.ledger("copies").published == 250
    # As if the driver had died after the last batch was written and before that was recorded.
    commits = tmp_path / "checkpoint" / "commits"
    (commits / "2").unlink()
    (commits / ".2.crc").unlink(missing_ok=True)
    assert run() == [50]
    ledger = shop.post.ledger("copies")
    assert (ledger.published, ledger.duplicates) == (250, 50)


@pytest.mark.promise("SPARK-1")
def test_a_task_that_fails_in_the_middle_of_a_write_publishes_nothing_twice(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    flag = tmp_path / "failed"

    def failing(number: int) -> int:
        if number == 11_000 and not flag.exists():
            flag.touch()
            raise OSError("the executor is gone")
        return number

    rows = spark.range(0, 12_000, 1, 1).select(f.udf(failing, "long", useArrow=False)("id").alias("id"))
    (
        rows.select(f.struct("id").alias("body"), (f.col("id") % 10).alias("priority"))
        .write.format("waypost")
        .options(**shop.options, queue="out")
        .mode("append")
        .save()
    )
    ledger = shop.post.ledger("out")
    assert flag.exists()
    assert ledger.published == 12_000
    assert ledger.duplicates > 0


@pytest.mark.promise("SPARK-1", "QUEUE-5", "PUB-12")
def test_rows_that_are_partitioned_by_group_and_sorted_arrive_in_their_order_with_their_own_policies(
    spark: SparkSession, shop: Shop
) -> None:
    shop.post.configure("out", order="group")
    rows = spark.range(0, 6_000, 1, 3).withColumn("at", f.lit(6_000) - f.col("id"))
    rows = rows.withColumn("customer", (f.col("id") % 7).cast("string"))
    ordered = rows.repartition("customer").sortWithinPartitions("customer", "at")
    body = f.struct("at").alias("body")
    retry, timeout = f.lit("linear:attempts=2").alias("retry"), f.lit("2.5").cast("decimal(9,1)").alias("timeout")
    write = ordered.select(body, ordered.customer.alias("group"), retry, timeout).write.format("waypost")
    write.options(**shop.options, queue="out").mode("append").save()
    numbers = {event.message_id: event.number for event in shop.events("out")}
    groups: dict[str | None, list[int]] = {}
    for message in sorted(shop.stored("ready", "out"), key=lambda one: numbers[one.id]):
        envelope = open_envelope(message.envelope)
        assert (envelope.retry, envelope.timeout) == (Linear(attempts=2), 2.5)
        groups.setdefault(message.group, []).append(json.loads(envelope.data)["at"])
    assert len(groups) == 7
    assert sum(map(len, groups.values())) == 6_000
    assert all(found == sorted(found) for found in groups.values())


@pytest.mark.promise("SPARK-1", "QUEUE-7")
def test_a_write_into_a_full_group_fails_with_the_name_of_the_group(spark: SparkSession, shop: Shop) -> None:
    shop.post.configure("out", overload="raise", group_max_pending=10)
    rows = spark.range(0, 100, 1, 1).select(f.struct("id").alias("body"), f.lit("acme").alias("group"))
    write = rows.write.format("waypost").options(**shop.options, queue="out").mode("append")
    with pytest.raises(Exception, match=r"QueueFull: group acme of queue out"):
        write.save()
    assert shop.post.ledger("out").ready == 10


@pytest.mark.promise("SPARK-1")
def test_sql_reads_a_queue_and_only_the_columns_of_a_schema(spark: SparkSession, tmp_path: Path) -> None:
    with Shop(f"sqlite:///{tmp_path}/one.db", "wp") as shop:
        shop.post.publish_many("orders", [{"n": n} for n in range(5)], delay=60)
        spark.sql(
            f"CREATE TEMPORARY VIEW later USING waypost OPTIONS (url '{shop.url}', queue 'orders', kind 'delayed')"
        )
        found = spark.sql("SELECT sum(get_json_object(text, '$.n')) AS total FROM later").collect()
        assert found[0]["total"] == 10
        chosen = spark.read.format("waypost").options(**shop.options).schema("event STRING, number BIGINT").load()
        assert sorted(map(tuple, chosen.collect())) == [("published", n) for n in range(1, 6)]


@pytest.mark.promise("SPARK-1")
@pytest.mark.parametrize(
    ("options", "message"),
    [({"kind": "everything"}, "kind is one of"), ({"url": "valkey://:hush@127.0.0.1"}, "holds a password")],
)
def test_a_wrong_option_is_a_clear_error(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(Exception, match=message) as raised:
        spark.read.format("waypost").options(**{"url": f"sqlite:///{tmp_path}/x.db", **options}).load()
    assert "hush" not in str(raised.value)


def test_a_queue_is_not_overwritten(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(3).select(f.struct("id").alias("body"))
    with pytest.raises(Exception, match="cannot be overwritten"):
        rows.write.format("waypost").options(url=f"sqlite:///{tmp_path}/x.db", queue="q").mode("overwrite").save()
