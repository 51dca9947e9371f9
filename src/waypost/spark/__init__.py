"""Waypost on Spark: the data source `format("waypost")`, and what stands on it.

    from waypost.spark.session import session

    spark = session()
    spark.read.format("waypost").option("url", url).option("queue", "orders").option("kind", "dead").load()

Importing this package loads neither pyspark nor pyarrow.
"""
