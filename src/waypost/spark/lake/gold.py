"""Gold: what happened in each queue and minute, made of silver's sums. Small enough to be read without Spark."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from waypost.spark.lake.silver import day_of
from waypost.spark.lake.tables import (
    GOLD_DEAD_LETTERS,
    GOLD_HISTOGRAMS,
    GOLD_MINUTES,
    GOLD_REDELIVERIES,
    MEASURES,
    MINUTE_EVENTS,
)
from waypost.store.bulk.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def select_days(sums: DataFrame, days: tuple[str, ...]) -> DataFrame:
    """The sums of some days."""
    return sums.where(day_of(f.col("minute_ms")).isin(*days)).withColumn(
        "minute", f.timestamp_millis(f.col("minute_ms"))
    )


def minutes(sums: DataFrame) -> DataFrame:
    """One row for each queue and minute."""
    events = f.col("events")

    def counted(wanted: str) -> Column:
        return f.coalesce(f.sum(f.when(f.col("event") == wanted, events)), f.lit(0))

    def measured(measure: str, what: str) -> Column:
        return f.coalesce(f.sum(f.when(f.col("measure") == measure, f.col(what))), f.lit(0))

    columns = [counted(event).alias(name) for name, event in MINUTE_EVENTS.items()]
    columns.append(f.coalesce(f.sum("woken"), f.lit(0)).alias("woken"))
    for measure in MEASURES:
        columns.append(measured(measure, "total_ms").alias(f"{measure}_ms_sum"))
        columns.append(measured(measure, "events").alias(f"{measure}_count"))
    return sums.groupBy("queue", "minute").agg(*columns).select(*GOLD_MINUTES.columns)


def histograms(sums: DataFrame) -> DataFrame:
    """How often each measure fell into each bucket."""
    return (
        sums.where(f.col("measure").isNotNull())
        .groupBy("queue", "minute", "measure", "bucket")
        .agg(f.sum("events").alias("count"))
        .select(*GOLD_HISTOGRAMS.columns)
    )


def redeliveries(sums: DataFrame) -> DataFrame:
    """Claims of messages that had been claimed before, by their cause."""
    return (
        sums.where((f.col("event") == "claimed") & f.col("cause").isNotNull())
        .groupBy("queue", "minute", "cause")
        .agg(f.sum("events").alias("count"))
        .select(*GOLD_REDELIVERIES.columns)
    )


def dead_letters(sums: DataFrame) -> DataFrame:
    """Deaths by their reason."""
    return (
        sums.where(f.col("event") == "dead")
        .groupBy("queue", "minute", f.coalesce("reason", f.lit("unknown")).alias("reason"))
        .agg(f.sum("events").alias("count"))
        .select(*GOLD_DEAD_LETTERS.columns)
    )


#: Each table of gold, and how it is made.
TABLE_BUILDERS: Final[tuple[tuple[Table, Callable[[DataFrame], DataFrame]], ...]] = (
    (GOLD_MINUTES, minutes),
    (GOLD_HISTOGRAMS, histograms),
    (GOLD_REDELIVERIES, redeliveries),
    (GOLD_DEAD_LETTERS, dead_letters),
)
