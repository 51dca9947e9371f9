"""A driver program whose lake is in an object store: everything that a lake can do, once, and what it found as JSON.

python -m tests.spark.s3_driver LAKE FOLDER URL
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.spark.lakes import live, tables
from tests.spark.readers import read_by_others, read_by_spark, texts
from tests.spark.shop import Shop
from waypost.spark.lake import compaction, journal
from waypost.spark.lake import pipeline as pipelines
from waypost.spark.lake.audit import audit
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.report import write_report
from waypost.spark.session import session


def report(**result: Any) -> None:
    print(json.dumps(result), flush=True)


def agree(made: Pipeline, spark: SparkSession) -> bool:
    """Return whether polars, duckdb and Spark read the same rows of every table."""
    made.lake.refresh()
    return texts(read_by_spark(made.lake, spark)) == texts(read_by_others(made.lake.files.address))


def use_lake(spark: SparkSession, lake: str, folder: Path, shop: Shop) -> None:
    def make(root: str, **options: Any) -> Pipeline:
        return Pipeline(spark, root, store=shop.url, namespace=shop.namespace, **options)

    # Two runs at once, in small batches, after the one that was killed.
    live(shop, 20)
    with ThreadPoolExecutor(2) as both:
        runs = [both.submit(make(lake, batch_rows=60).run) for _ in range(2)]
        for run in runs:
            run.result()
    whole = make(str(folder / "local"))
    whole.run()
    made = make(lake)
    report(at_once=tables(made) == tables(whole), agree=agree(made, spark))

    # Tasks write what the driver wrote until now.
    for module in (journal, pipelines, compaction):
        for name in ("DRIVER_EVENTS_MAX", "DRIVER_ROWS_MAX"):
            if hasattr(module, name):
                setattr(module, name, 0)
    live(shop, 20)
    made.run()
    made.tidy(keep_days=3)
    made.rebuild(datetime.now(UTC).date())
    whole.run()
    report(by_tasks=tables(made) == tables(whole), manifests=len(made.lake.files.walk("_manifests")))
    found = audit(made)
    report(clean=found.is_clean, published=found.published, audited=made.lake.files.read("audit.json") is not None)
    report(page=write_report(lake, folder / "report.html").read_text().startswith("<!doctype html>"))


def main() -> None:
    lake, folder, url = sys.argv[1:]
    config = {"spark.sql.shuffle.partitions": "2", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
    spark = session("local[2]", config, name="waypost on S3")
    try:
        with Shop(url, "wp") as shop:
            use_lake(spark, lake, Path(folder), shop)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
