"""Waypost on Spark: the data source `format("waypost")`, `consume`, and the lake.

    from waypost.spark.session import session

    spark = session()
    spark.read.format("waypost").option("url", url).option("queue", "orders").option("kind", "dead").load()

    waypost.spark.consume(spark, url, "orders", function, output="/lake/orders")
    waypost.spark.read_output(spark, "/lake/orders")
    waypost.spark.backfill(spark, "/lake", "orders.parquet", queue="orders", id="order_id")
    waypost.spark.redrive(spark, "/lake", "reason = 'rejected'")

`source` is the data source, `consumer` consumes a queue in batches, `lake` keeps the history as tables,
`republish` publishes from tables and redrives. Importing this package loads neither pyspark nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waypost.spark.consumer.consume import Batch, Consumed, consume
    from waypost.spark.consumer.output import read_output
    from waypost.spark.republish.api import backfill, redrive

__all__ = ["Batch", "Consumed", "backfill", "consume", "read_output", "redrive"]


def __getattr__(name: str) -> Any:
    if name == "read_output":
        from waypost.spark.consumer.output import read_output

        return read_output
    if name in ("backfill", "redrive"):
        from waypost.spark.republish import api

        return getattr(api, name)
    if name in __all__:
        from waypost.spark.consumer import consume

        return getattr(consume, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
