"""A worker with a job over Spark Connect that is cancelled: `python -m tests.spark.remote_job_driver MASTER`."""

from __future__ import annotations

import json
import sys
import threading
from typing import TYPE_CHECKING

from tests.waiting import until
from waypost import Waypost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def main(master: str) -> None:
    began, ended = threading.Event(), threading.Event()
    with Waypost("memory://") as post:

        @post.spark_job("jobs", master=master)
        def count(body: str, spark: SparkSession) -> None:
            if body == "short":
                assert spark.range(10).count() == 10
                return
            if body == "close":
                # What the server does to a session that was idle for long.
                spark.client.release_session()
                return
            began.set()
            try:
                while True:
                    # Minutes for one core, in one operation.
                    spark.sql(
                        "SELECT sum(hash(a.id, b.id)) FROM range(1000000) a CROSS JOIN range(1000000) b"
                    ).collect()
            finally:
                ended.set()

        with post.worker():
            count.publish("short")
            published = count.publish("endless")
            count.publish("short")
            until(began.is_set)
            status = post.cancel(published)
            until(ended.is_set, "the end of the function")
            until(lambda: post.ledger("jobs").done == 2, "the next message")
            count.publish("close")
            count.publish("short")
            until(lambda: post.ledger("jobs").done == 4, "a message with a new session")
        ledger = post.ledger("jobs")
        found = {"status": status, "cancelled": ledger.cancelled, "retried": ledger.retried}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
