"""The Spark part of the demo: a process that starts one session, then does what it is asked, a line of JSON each.

    {"do": "import", …}    →    {"told": "…"} …    {"did": "import", …}   or   {"error": "…"}

It ends when its input does. Java ends with it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.demo.shop import ORDERS, SHOP

#: So many rows of the file stand in it twice, under the same key.
REPEATED = 1_000
#: One batch for everything: each costs Spark a while, however small.
BATCH_ROWS = 1_000_000
#: What an order is; a message that is none is put aside, and told.
SCHEMA = "id BIGINT, customer STRING, amount BIGINT, at BIGINT, source STRING, card STRING"
#: The orders of the file were made over so many minutes before now.
PAST_MINUTES = 30


def say(**told: Any) -> None:
    """One line to whoever asked."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def make_parquet(path: Path, count: int) -> None:
    """A file of orders as another system would hand it over, some of them twice."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as parquet

    chance = np.random.default_rng(7)
    now = time.time_ns() // 1_000_000
    ids = np.arange(1, count + 1)
    table = pa.table(
        {
            "id": ids,
            "customer": pa.array([f"customer-{number % 9973}" for number in ids.tolist()]),
            "amount": chance.integers(500, 9_000, count),
            "at": np.sort(now - chance.integers(0, PAST_MINUTES * 60_000, count)),
        }
    )
    parquet.write_table(pa.concat_tables([table, table.slice(0, min(REPEATED, count))]), path, row_group_size=50_000)


class Spark:
    """One session, and what it can be asked for."""

    def __init__(self, home: Path) -> None:
        from waypost.spark.lake.pipeline import SETTINGS
        from waypost.spark.session import session

        os.environ["SPARK_LOCAL_DIRS"] = str(home / "spark")
        self.home = home
        self.lake = home / "lake"
        self.session = session(
            "local[2]",
            {
                "spark.sql.warehouse.dir": str(home / "warehouse"),
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
                **SETTINGS,
            },
            progress=False,
        )

    def publish(self, *, url: str, count: int) -> dict[str, Any]:
        """Import the file into the queue: one message for each key, however often a task is tried."""
        from pyspark.sql import functions as f

        path = self.home / "orders.parquet"
        make_parquet(path, count)
        rows = self.session.read.parquet(str(path)).withColumn("source", f.lit("import"))
        messages = rows.select(f.struct("*").alias("body"), f.concat(f.lit("order:"), "id").alias("key"))
        messages.write.format("waypost").options(url=url, queue=ORDERS).mode("append").save()
        return {"rows": rows.count(), "megabytes": round(path.stat().st_size / 1e6, 1)}

    def ingest(self, *, url: str) -> dict[str, Any]:
        """The messages as a table, and what was earned in each minute. Nothing is consumed by it."""
        from pyspark.sql import functions as f

        from waypost.spark.lake.ingest import Ingest, read_schema

        schema = read_schema(SCHEMA)
        ingest = Ingest(self.session, str(self.lake), ORDERS, store=url, schema=schema, batch_rows=BATCH_ROWS)
        ingest.run()
        value = ingest.rows().select("value.*")
        minute = f.date_trunc("minute", f.timestamp_millis("at")).alias("minute")
        revenue = value.groupBy(minute, "source").agg(f.count("*").alias("orders"), f.sum("amount").alias("cents"))
        revenue.coalesce(1).write.mode("overwrite").parquet(str(self.lake / "revenue"))
        found = self.session.read.parquet(str(self.lake / "revenue")).collect()
        minutes: dict[str, list[int]] = {}
        for row in found:
            sums = minutes.setdefault(f"{row['minute']:%H:%M}", [0, 0])
            sums[0] += row["orders"]
            sums[1] += row["cents"]
        return {
            "minutes": dict(sorted(minutes.items())),
            "shop_cents": sum(row["cents"] for row in found if row["source"] == SHOP),
            "aside": ingest.corrupt().count(),
        }

    def audit(self, *, url: str) -> dict[str, Any]:
        """Every event into the lake, tables of it, and whether all messages are accounted for."""
        from waypost.spark.lake.audit import audit
        from waypost.spark.lake.pipeline import Pipeline

        pipeline = Pipeline(self.session, str(self.lake), store=url, tell=lambda text: say(told=text))
        found = audit(pipeline)
        return {
            "clean": found.is_clean and found.not_seen == 0,
            "unaccounted": found.unaccounted_count,
            "published": found.published,
            "unexplained": found.duplicates_unexplained_count,
            "events": sum(seen.events for seen in pipeline.lake.state.seen.values()),
        }

    def report(self, *, name: str) -> dict[str, Any]:
        """The page with the charts."""
        from waypost.spark.lake.report import write_report

        return {"path": str(write_report(self.lake, self.lake / name))}


def main() -> None:
    """Start the session, then answer until the input ends."""
    asked: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            asked.put(json.loads(line))
        os._exit(0)  # whoever asked is gone; nobody waits for what is under way

    threading.Thread(target=listen, name="listen", daemon=True).start()
    spark = Spark(Path(sys.argv[1]))
    say(did="session", version=spark.session.version)
    known: dict[str, Callable[..., dict[str, Any]]] = {
        "import": spark.publish,
        "ingest": spark.ingest,
        "audit": spark.audit,
        "report": spark.report,
    }
    while True:
        request = asked.get()
        do = request.pop("do")
        try:
            say(did=do, **known[do](**request))
        except Exception as error:
            say(error=f"{do}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")


if __name__ == "__main__":
    main()
