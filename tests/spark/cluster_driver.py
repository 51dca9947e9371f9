"""A driver program on a cluster, which kills itself at a chosen point.

    python -m tests.spark.cluster_driver MASTER POINT OUTPUT NAMESPACE URL...

It prints what it read as lines of JSON. POINT is where it kills itself while it consumes: `written`, after its function
has written and before the commit; `committed`, after the commit and before the settle.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import waypost.spark
from waypost.spark import Batch
from waypost.spark.consumer import consume
from waypost.spark.consumer.consume import _Consumer
from waypost.spark.session import session


def report(**result: Any) -> None:
    print(json.dumps(result), flush=True)


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def read(spark: SparkSession, url: str, namespace: str) -> None:
    """Read on executors: the journal by two of its columns, and messages with their bodies."""
    source = spark.read.format("waypost").options(url=url, namespace=namespace, queue="orders")
    messages = source.option("kind", "ready").load().select("text")
    events = source.option("kind", "journal").schema("number BIGINT, event STRING").load()
    texts = [row["text"] for row in messages.collect()]
    report(
        url=url,
        columns=events.columns,
        events=sorted((row["number"], row["event"]) for row in events.collect()),
        longest=max(map(len, texts)),
        has_unicode='{"é":"見た"}' in texts,
    )


def write(spark: SparkSession, url: str, namespace: str, flag: Path) -> None:
    """A write in which a task of one executor fails half-way and is run again."""

    def failing(number: int) -> int:
        if number == 59_000 and not flag.exists():
            flag.touch()
            raise OSError("the executor is gone")
        return number

    rows = spark.range(0, 60_000, 1, 2).select(f.udf(failing, "long", useArrow=False)("id").alias("id"))
    out = rows.select(f.struct("id").alias("body")).write.format("waypost").mode("append")
    out.options(url=url, namespace=namespace, queue="out").save()
    report(failed=flag.exists())


def main() -> None:
    master, point, output, namespace, *urls = sys.argv[1:]
    spark = session(
        master,
        {
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
        },
        name="waypost cluster",
    )
    if master.startswith("local-cluster"):
        for url in urls:
            read(spark, url, namespace)
        write(spark, urls[0], namespace, Path(output) / "failed")
        context: Any = spark.sparkContext._jsc
        report(executors=context.sc().getExecutorMemoryStatus().size() - 1)
    if point == "committed":
        setattr(_Consumer, "settle", die)  # noqa: B010
    # Executors write the output, although it is small.
    consume.SMALL_BYTES = -1

    def load(rows: DataFrame, batch: Batch) -> None:
        batch.write(rows.select("id", "text"))
        report(batch=batch.name, size=batch.size)
        if point == "written":
            die()

    # It may have begun before the leases of an earlier one have ended: then it waits for them.
    waypost.spark.consume(
        spark, urls[0], "orders", load, output=f"{output}/lake", namespace=namespace, follow=True, timeout=300
    )
    report(ended=True)


if __name__ == "__main__":
    main()
