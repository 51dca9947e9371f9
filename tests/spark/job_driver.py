"""A worker with a Spark job whose Java is killed: `python -m tests.spark.job_driver STORE`."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING

from tests.waiting import until
from waypost import Constant, Waypost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUICK = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}


def main(store: str) -> None:
    with Waypost(store) as post:
        killed: list[str] = []

        @post.spark_job("jobs", master="local[1]", config=QUICK, retry=Constant(pause=2, jitter=0))
        def work(body: str, spark: SparkSession) -> None:
            if body == "kills" and not killed:
                killed.append(body)
                java: int = spark._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr]
                os.kill(java, signal.SIGKILL)
            assert spark.range(10).count() == 10

        print(json.dumps({"imported": "pyspark" in sys.modules}), flush=True)
        work.publish("kills")
        work.publish("counts")
        with post.worker() as worker:
            (waiting,) = until(lambda: post.peek("jobs", state="delayed"))
            errors = len((waiting.error or "").splitlines())
            until(lambda: post.ledger("jobs").done == 2)
        report = worker.report()
        print(json.dumps({"done": report.done, "retried": report.retried, "error_lines": errors}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
