"""`make demo`: a shop on real servers, which this program starts and ends: Valkey, PostgreSQL and Spark.

`__main__` has the steps; `shop` the handlers, as a user would write them; `storefront` takes orders through an outbox
in PostgreSQL; `spark_process` is the process with Spark; `processes` starts and ends all of them.
"""
