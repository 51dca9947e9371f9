"""The pipeline from a journal to gold, called by `benchmarks.spark`.

`pipeline` takes events of a Valkey store through bronze and silver to gold, in an empty lake each time, in a session of
two cores. Its variants are histories of other lengths: their rates are to be alike.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks.measure import Contender, Report
from waypost.spark.lake.pipeline import Pipeline
from waypost.testing.servers import ValkeyServer

#: Variants by their number of events.
SIZES = {"100k": 100_000, "300k": 300_000, "1m": 1_000_000, "3m": 3_000_000}


def pipelining(report: Report, spark: SparkSession, events: int, sizes: list[str], rounds: int, folder: Path) -> None:
    """The figures of the pipeline."""
    from benchmarks.spark import fill

    lakes = (str(folder / f"lake-{number}") for number in itertools.count())

    def run(url: str) -> None:
        Pipeline(spark, next(lakes), store=url).run()

    with ValkeyServer(tcp=False) as server:
        count = fill(server.url, events)
        report.rates("pipeline", "lake", [Contender("waypost", lambda: run(server.url), count)], rounds)
    for size in sizes:
        with ValkeyServer(tcp=False) as server:
            url, count = server.url, fill(server.url, SIZES[size])
            contender = Contender("waypost", lambda url=url: run(url), count, variant=size)  # type: ignore[misc]
            report.rates("pipeline", "lake", [contender], 1)
