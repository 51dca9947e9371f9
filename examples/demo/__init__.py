"""`make demo`: the shop of `waypost demo` on servers that this program starts and ends: Valkey, PostgreSQL, Spark.

`__main__` has the steps; `storefront` takes orders through an outbox in PostgreSQL; `spark_process` is the process with
Spark; `processes` starts and ends all of them. The handlers are those of `waypost.cli.demo.shop`.
"""
