"""A message that runs a Spark job: sums of a day's orders, written as a table. Needs `pip install "waypost[spark]"`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from waypost import Message, Queue, Waypost

if TYPE_CHECKING:  # the worker imports PySpark; a program that only publishes does not
    from pyspark.sql import SparkSession


@dataclass
class Day:
    """What is published into `sums`."""

    day: str


post = Waypost("sqlite:///shop.db")
SUMS = Path("sums").resolve()  # Java may run in another folder
ORDERS = [
    ("2026-03-01", "Spain", 20),
    ("2026-03-01", "Spain", 30),
    ("2026-03-01", "Italy", 20),
    ("2026-03-02", "Spain", 9),
]


@post.spark_job(Queue("sums", Day), master="local[2]", timeout=timedelta(minutes=30))
def summarize(day: Day, spark: SparkSession, message: Message[Day]) -> None:
    orders = spark.createDataFrame(ORDERS, "day STRING, country STRING, amount BIGINT")
    sums = orders.where(orders.day == day.day).groupBy("country").sum("amount").orderBy("country", ascending=False)
    # A folder for each day, replaced as a whole: a second delivery of the same message writes the same.
    sums.coalesce(1).write.mode("overwrite").parquet(f"{SUMS}/day={day.day}")
    print(f"{day.day}: {sums.count()} countries")
    for country, amount in spark.read.parquet(f"{SUMS}/day={day.day}").collect():
        print(country, amount)


def main() -> None:
    with post:
        summarize.publish(Day("2026-03-01"), key="sums:2026-03-01")
        with post.worker():  # or `waypost worker spark_job:post` in a process of its own
            while post.ledger("sums").done < 1:
                time.sleep(0.05)
        ledger = post.ledger("sums")
        print(f"{ledger.done} done, {ledger.dead} dead")


if __name__ == "__main__":
    main()
