"""A driver program that does everything once over Spark Connect or on a cluster, and prints what it found as JSON.

python -m tests.spark.remote_driver MASTER FOLDER NAMESPACE URL
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import waypost.spark
from tests.spark.shop import Shop
from waypost.spark import Batch, read_output
from waypost.spark.lake.audit import audit
from waypost.spark.lake.ingest import Ingest, count_messages, read_schema
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.session import session

ROWS = 500
HELD = 20


def report(**result: Any) -> None:
    print(json.dumps(result), flush=True)


def write_orders(rows: DataFrame, batch: Batch) -> None:
    batch.write(rows.select("id", f.from_json("text", "id BIGINT").alias("order")))


def use_source(spark: SparkSession, shop: Shop, folder: str) -> None:
    """Publish and read by the data source, and consume."""
    shop.post.configure("orders", journal="full")
    rows = spark.range(0, ROWS, 1, 2).select(f.struct("id").alias("body"), f.col("id").cast("string").alias("key"))
    rows.write.format("waypost").mode("append").options(**shop.options, queue="orders").save()
    ready = spark.read.format("waypost").options(**shop.options, queue="orders", kind="ready").load()
    report(ready=ready.count(), published=shop.post.ledger("orders").published)

    consumed = waypost.spark.consume(
        spark, shop.url, "orders", write_orders, output=f"{folder}/out", namespace=shop.namespace
    )
    shop.post.publish_many("orders", [{"id": 0}] * HELD)
    report(done=consumed.done, rows=read_output(spark, f"{folder}/out").select("id").distinct().count())


def use_lake(spark: SparkSession, shop: Shop, folder: str) -> None:
    """Fill a lake, audit it, and ingest messages."""
    place: dict[str, Any] = {"store": shop.url, "namespace": shop.namespace}
    pipeline = Pipeline(spark, f"{folder}/lake", **place)
    pipeline.run()
    found = audit(pipeline)
    report(clean=found.is_clean, accounted=found.queues["orders"].accounted)
    ingest = Ingest(spark, f"{folder}/lake", "orders", schema=read_schema("id BIGINT"), **place)
    ingest.run()
    counts = count_messages(ingest)
    report(**counts, total=ingest.rows().agg(f.sum("value.id")).collect()[0][0])


def main() -> None:
    master, parts, folder, namespace, url = sys.argv[1:]
    config = {"spark.sql.shuffle.partitions": "2"}
    if not master.startswith("sc://"):
        short = "-XX:TieredStopAtLevel=1"
        config |= {
            "spark.driver.extraJavaOptions": short, "spark.executor.extraJavaOptions": short,
            "spark.executor.memory": "512m", "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }  # fmt: skip
    spark = session(master, config, name="waypost remote")
    try:
        with Shop(url, namespace) as shop:
            use_source(spark, shop, folder)
            if parts == "all":
                use_lake(spark, shop, folder)
        if not master.startswith("sc://"):
            context: Any = spark.sparkContext._jsc
            report(executors=context.sc().getExecutorMemoryStatus().size() - 1)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
