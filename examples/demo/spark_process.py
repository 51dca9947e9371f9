"""The Spark process of the demo: one session that handles requests, a line of JSON each.

    {"do": "import", …}    →    {"progress": "…"} …    {"did": "import", …}   or   {"error": "…"}

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

from waypost.cli.demo.shop import ORDERS, SHOP, STORE_VARIABLE

#: How many rows are in the file twice, with the same key.
REPEATED = 1_000
#: One batch for everything: each takes Spark a while, however small.
BATCH_ROWS = 1_000_000
#: The schema of an order; a message that does not fit is put aside, and counted.
SCHEMA = "id BIGINT, customer STRING, amount BIGINT, at BIGINT, source STRING, card STRING"
#: The orders of the file are spread over the last minutes.
PAST_MINUTES = 30


def write_reply(**fields: Any) -> None:
    """Write one line of JSON to the demo."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def make_parquet(path: Path, count: int) -> None:
    """Write a file of orders as another system would deliver it, some of them twice."""
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
    """One session, and the requests that it handles."""

    def __init__(self, directory: Path) -> None:
        from waypost.spark.lake.pipeline import SETTINGS
        from waypost.spark.session import session

        os.environ["SPARK_LOCAL_DIRS"] = str(directory / "spark")
        self.directory = directory
        self.lake = directory / "lake"
        self.session = session(
            "local[2]",
            {
                "spark.sql.warehouse.dir": str(directory / "warehouse"),
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
                **SETTINGS,
            },
            progress=False,
        )

    def publish(self, *, count: int) -> dict[str, Any]:
        """Import the file into the queue: one message for each key, however often a task is tried.

        Spark shows options in plans and logs, so the URL with its password is named by its environment variable.
        """
        from pyspark.sql import functions as f

        path = self.directory / "orders.parquet"
        make_parquet(path, count)
        rows = self.session.read.parquet(str(path)).withColumn("source", f.lit("import"))
        messages = rows.select(f.struct("*").alias("body"), f.concat(f.lit("order:"), "id").alias("key"))
        messages.write.format("waypost").options(urlEnv=STORE_VARIABLE, queue=ORDERS).mode("append").save()
        return {"rows": rows.count(), "megabytes": round(path.stat().st_size / 1e6, 1)}

    def ingest(self) -> dict[str, Any]:
        """Load the messages into a table, and the revenue of each minute. This consumes nothing."""
        from pyspark.sql import functions as f

        from waypost.spark.lake.ingest import Ingest, read_schema

        schema = read_schema(SCHEMA)
        ingest = Ingest(
            self.session, str(self.lake), ORDERS, store_env=STORE_VARIABLE, schema=schema, batch_rows=BATCH_ROWS
        )
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

    def audit(self) -> dict[str, Any]:
        """Load every event into the lake, and check that all messages are accounted for."""
        from waypost.spark.lake.audit import audit
        from waypost.spark.lake.pipeline import Pipeline

        pipeline = Pipeline(
            self.session, str(self.lake), store_env=STORE_VARIABLE, progress=lambda text: write_reply(progress=text)
        )
        found = audit(pipeline)
        return {
            "clean": found.is_clean and found.not_seen == 0,
            "unaccounted": found.unaccounted_count,
            "published": found.published,
            "unexplained": found.duplicates_unexplained_count,
            "events": sum(seen.events for seen in pipeline.lake.state.seen.values()),
        }

    def report(self, *, name: str) -> dict[str, Any]:
        """Write the page with the charts."""
        from waypost.spark.lake.report import write_report

        return {"path": str(write_report(self.lake, self.lake / name))}


def main() -> None:
    """Start the session, then handle requests until the input ends."""
    requests: queue.Queue[dict[str, Any]] = queue.Queue()

    def read_requests() -> None:
        for line in sys.stdin:
            requests.put(json.loads(line))
        os._exit(0)  # the demo is gone, and needs no reply

    threading.Thread(target=read_requests, name="read-requests", daemon=True).start()
    spark = Spark(Path(sys.argv[1]))
    write_reply(did="session", version=spark.session.version)
    handlers: dict[str, Callable[..., dict[str, Any]]] = {
        "import": spark.publish,
        "ingest": spark.ingest,
        "audit": spark.audit,
        "report": spark.report,
    }
    while True:
        request = requests.get()
        do = request.pop("do")
        try:
            write_reply(did=do, **handlers[do](**request))
        except Exception as error:
            write_reply(error=f"{do}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")


if __name__ == "__main__":
    main()
