"""Waypost on Spark: the data source `format("waypost")`, and what stands on it.

    from waypost.spark.session import session

    spark = session()
    spark.read.format("waypost").option("url", url).option("queue", "orders").option("kind", "dead").load()

    waypost.spark.consume(spark, url, "orders", function, output="/lake/orders")

Importing this package loads neither pyspark nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waypost.spark.consuming import Batch, Consumed, consume

__all__ = ["Batch", "Consumed", "consume"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from waypost.spark import consuming

        return getattr(consuming, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
