"""A worker whose Spark job writes files until it is cancelled: `python -m tests.fault.spark_job_app STORE FOLDER`.

It prints a line of JSON when the job writes, and one when its lease was lost and all of its writing has ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from waypost import Waypost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUICK = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
#: After this time without a new file the tasks are taken to have ended.
QUIET_SECONDS = 3.0


def main(store: str, folder: str) -> None:
    lost_at: list[float] = []
    ended = threading.Event()
    with Waypost(store) as post:

        @post.spark_job("copies", master="local[2]", config=QUICK, on_lease_lost=lambda _: lost_at.append(time.time()))
        def copy(body: int, spark: SparkSession) -> None:
            def write(number: int) -> int:
                while True:
                    Path(folder, f"{number}-{time.time_ns()}").touch()
                    time.sleep(0.02)

            try:
                spark.sparkContext.parallelize(range(2), 2).map(write).count()
            finally:
                ended.set()

        copy.publish(1)
        worker = post.worker().start()
        while not os.listdir(folder):
            time.sleep(0.05)
        worker.quiet()
        print(json.dumps({"writes": True}), flush=True)
        ended.wait()
        ended_at = time.time()
        while (
            time.time() - (newest := max(int(name.split("-")[1]) for name in os.listdir(folder)) / 1e9) < QUIET_SECONDS
        ):
            time.sleep(0.1)
        print(json.dumps({"ended": ended_at - lost_at[0], "written": newest - lost_at[0]}), flush=True)
        # Java ends with this process; the worker need not wait for the store.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
