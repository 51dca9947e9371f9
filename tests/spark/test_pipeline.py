"""The pipeline: tables made of the journal, the same whenever and however often it is run."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.shop import Shop
from waypost.errors import ConfigurationError, StoreError
from waypost.spark.bronze import Bronze
from waypost.spark.lake import CHECKPOINT, Lake
from waypost.spark.percentiles import bucket_of, merged, percentile, value_of
from waypost.spark.pipeline import Pipeline
from waypost.spark.tables import (
    BRONZE_JOURNAL,
    GOLD,
    GOLD_DEAD_LETTERS,
    GOLD_HISTOGRAMS,
    GOLD_MINUTES,
    GOLD_REDELIVERIES,
    MINUTE_EVENTS,
    SILVER_DELIVERIES,
    SILVER_MESSAGES,
    Table,
)

pytestmark = pytest.mark.xdist_group("spark")


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[Shop]:
    """A store in a file: what the tables hold does not depend on the store, which has tests of its own."""
    with Shop(f"sqlite:///{tmp_path}/orders.db", "wp") as shop:
        yield shop


@pytest.fixture
def pipeline(spark: SparkSession, tmp_path: Path) -> Callable[..., Pipeline]:
    """Makes pipelines from a shop into a lake."""

    def make(shop: Shop, lake: str = "lake", **options: Any) -> Pipeline:
        return Pipeline(spark, str(tmp_path / lake), store=shop.url, namespace=shop.namespace, **options)

    return make


def rows(made: Pipeline, table: Table) -> list[dict[str, Any]]:
    """All rows of a table, in one order."""
    if table in GOLD:
        found = made.lake.rows(table).to_pylist()
    else:
        found = [row.asDict() for row in made.lake.frame(made.spark, table).collect()]
    return sorted(found, key=lambda row: [str(value) for value in row.values()])


def tables(made: Pipeline) -> dict[str, list[dict[str, Any]]]:
    return {table.name: rows(made, table) for table in (BRONZE_JOURNAL, SILVER_DELIVERIES, SILVER_MESSAGES, *GOLD)}


def totals(made: Pipeline) -> Counter[str]:
    """The columns of gold's minutes, summed up."""
    total: Counter[str] = Counter()
    for row in rows(made, GOLD_MINUTES):
        total.update({name: value for name, value in row.items() if name not in ("queue", "minute")})
    return total


@pytest.mark.promise("SPARK-4")
def test_tables_tell_what_the_journal_and_the_ledger_tell(shop: Shop, pipeline: Callable[..., Pipeline]) -> None:
    shop.fill(60)
    made = pipeline(shop)
    made.run()
    events, ledger = shop.events(), shop.post.ledger("orders")
    bronze = sorted(rows(made, BRONZE_JOURNAL), key=lambda row: row["number"])
    assert [(row["number"], row["event"], row["message_id"]) for row in bronze] == [
        (event.number, event.event, event.message_id) for event in events
    ]
    gold = totals(made)
    told = Counter(event.event for event in events)
    assert {name: gold[name] for name in MINUTE_EVENTS} == {name: told[event] for name, event in MINUTE_EVENTS.items()}
    assert (gold["published"], gold["done"], gold["claimed"]) == (ledger.published, ledger.done, ledger.claims)
    messages = Counter(row["state"] for row in rows(made, SILVER_MESSAGES))
    assert messages == Counter(
        ready=ledger.ready, delayed=ledger.delayed, leased=ledger.leased, dead=ledger.dead, done=ledger.done
    )
    deliveries = rows(made, SILVER_DELIVERIES)
    assert len(deliveries) == ledger.claims
    assert Counter(row["outcome"] for row in deliveries) == Counter(
        {"done": ledger.done, "dead": ledger.dead, "retried": ledger.retried, None: ledger.leased}
    )
    assert {(row["reason"], row["count"]) for row in rows(made, GOLD_DEAD_LETTERS)} == {("rejected", ledger.dead)}
    waits = sum(event.wait_ms or 0 for event in events)
    assert (gold["wait_ms_sum"], gold["wait_count"]) == (waits, ledger.claims)
    assert gold["run_count"] == sum(event.run_ms is not None for event in events)
