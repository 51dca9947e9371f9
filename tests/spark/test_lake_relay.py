"""A queue that a relay wrote to the lake is a table for Spark, from every store."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from tests.spark.shop import Shop
from waypost import Waypost


@pytest.mark.promise("BOX-4")
def test_a_relayed_queue_is_a_table_with_a_day_in_it(shop: Shop, spark: SparkSession, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    lake.mkdir()
    with Waypost(shop.url, namespace=shop.namespace) as post:
        ids = [one.id for one in post.publish_many("orders", [{"n": n} for n in range(1_200)], headers={"via": "web"})]
        post.relay("orders", to=f"lake://{lake}")
        post.worker().run(until_empty=True, signals=False)
        assert (post.ledger("orders").done, post.ledger("orders").balance) == (1_200, 0)
    table = spark.read.parquet(str(lake))
    assert dict(table.dtypes)["published_at"] == "timestamp"
    assert dict(table.dtypes)["date"] == "date"
    found = table.select(
        "id", "queue", f.col("headers")["via"].alias("via"), f.get_json_object(f.col("body").cast("string"), "$.n")
    ).collect()
    assert sorted(row["id"] for row in found) == sorted(ids)
    assert {(row["queue"], row["via"]) for row in found} == {("orders", "web")}
    assert {int(row[3]) for row in found} == set(range(1_200))
    assert table.where(f.col("date") == f.to_date("published_at")).count() == 1_200
