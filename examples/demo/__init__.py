"""`make demo`: a shop on real servers, which this program starts and ends: Valkey, PostgreSQL and Spark.

`__main__` tells the story; `shop` has the handlers, as a user would write them; `storefront` takes orders through an
outbox in PostgreSQL; `lake` is the Spark part, a process of its own; `parts` starts and ends all of them.
"""
