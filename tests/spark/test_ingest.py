"""Ingest: messages as a table, parsed, each of them once, and nothing consumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars
import pytest
from pyspark.sql import SparkSession

from tests.spark.lakes import plant
from tests.spark.shop import Shop
from waypost.errors import ConfigurationError, StoreError
from waypost.spark.lake.ingest import Ingest, count_messages, read_schema
from waypost.spark.lake.lake import Lake

pytestmark = pytest.mark.xdist_group("spark")
#: The length of a text whose body has 1 MiB, the most that a message may have.
LONG = (1 << 20) - 19
SCHEMA = "id BIGINT, name STRING, parts ARRAY<STRUCT<sku: STRING, count: INT>>"


@pytest.fixture
def ingest(spark: SparkSession, tmp_path: Path) -> Callable[..., Ingest]:
    def make(shop: Shop, queue: str = "orders", **options: Any) -> Ingest:
        schema = options.pop("schema", SCHEMA)
        return Ingest(
            spark, str(tmp_path / "lake"), queue, store=shop.url, namespace=shop.namespace,
            schema=None if schema is None else read_schema(schema), **options,
        )  # fmt: skip

    return make


@pytest.mark.promise("SPARK-2")
def test_messages_are_parsed_and_those_that_do_not_match_the_schema_are_set_aside(
    orders: Shop, ingest: Callable[..., Ingest], tmp_path: Path
) -> None:
    orders.post.configure("orders", journal="full")
    orders.post.publish_many(
        "orders", [{"id": n, "name": "ü — 見た" * n} for n in range(5)], key=lambda b: f"k{b['id']}"
    )
    orders.post.publish("orders", {"id": 9, "parts": [{"sku": "a", "count": 2}], "more": True}, headers={"h": "ä"})
    orders.post.publish("orders", {"id": 10, "name": "x" * LONG})
    orders.post.publish("orders", {"id": "no number"})
    orders.post.publish("orders", "no object")
    orders.post.publish("orders", b"\xff\x00")
    made = ingest(orders, batch_rows=4)
    assert made.run() == 7
    found = {row.value.id: row for row in made.rows().collect()}
    assert sorted(found) == [0, 1, 2, 3, 4, 9, 10]
    assert found[3].value.name == "ü — 見た" * 3
    assert found[3].key == "k3"
    assert len(found[10].value.name) == LONG
    assert found[9].value.parts[0].asDict() == {"sku": "a", "count": 2}
    assert found[9].headers == {"h": "ä"}
    aside = {bytes(row.body) for row in made.corrupt().collect()}
    assert aside == {b'{"id":"no number"}', b"no object", b"\xff\x00"}
    assert orders.post.ledger("orders").ready == 10
    by_polars = polars.read_delta(str(tmp_path / "lake" / "messages" / "orders"))
    assert sorted(value["id"] for value in by_polars["value"]) == [0, 1, 2, 3, 4, 9, 10]


@pytest.mark.promise("SPARK-2")
def test_a_message_is_there_once_however_often_its_batch_is_run(
    orders: Shop, ingest: Callable[..., Ingest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    orders.post.configure("orders", journal="full")
    sent = orders.post.publish_many("orders", [{"id": n} for n in range(6)])
    made = ingest(orders)
    with monkeypatch.context() as broken:
        # Written, but not a part of the table yet, as after a killed driver.
        broken.setattr(Lake, "commit", lambda *given: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(StoreError, match="killed"):
            made.run()
    made = ingest(orders)
    assert made.run() == 6
    assert len(made.lake.data_files(made.table)) < len(list(tmp_path.glob("lake/messages/orders/*.parquet")))
    # An id that was published again, long after.
    orders.post.publish("orders", {"id": 6})
    plant(orders, "UPDATE wp_journal SET message_id = ? WHERE number = 8", sent[2].id)
    orders.post.publish("orders", {"id": 7})
    assert ingest(orders).run() == 7
    assert ingest(orders).run() == 7
    assert sorted(row.value.id for row in ingest(orders).rows().collect()) == [0, 1, 2, 3, 4, 5, 7]


def test_bodies_that_were_not_journalled_are_an_error_or_set_aside(orders: Shop, ingest: Callable[..., Ingest]) -> None:
    orders.post.publish("mails:eu", {"id": 1})
    orders.post.configure("mails:eu", journal="full")
    orders.post.publish("mails:eu", {"id": 2})
    with pytest.raises(StoreError, match="body was not journalled"):
        ingest(orders, "mails:eu").run()
    made = ingest(orders, "mails:eu", allow_gaps=True)
    assert made.run() == 1
    assert count_messages(made) == {"queue": "mails:eu", "rows": 1, "corrupt": 1}


def test_without_a_schema_bodies_stay_as_they_came(orders: Shop, ingest: Callable[..., Ingest]) -> None:
    orders.post.configure("orders", journal="full")
    orders.post.publish("orders", b"\xff")
    orders.post.publish("orders", {"a": 1})
    made = ingest(orders, schema=None)
    assert made.run() == 2
    assert {bytes(row.body): row.text for row in made.rows().collect()} == {b"\xff": None, b'{"a":1}': '{"a":1}'}
    with pytest.raises(ConfigurationError, match="give the same one, or take them into a new lake"):
        ingest(orders, schema="id BIGINT")


def test_a_schema_is_columns_or_a_file_of_them(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "orders.json"
    file.write_text(json.dumps(read_schema(SCHEMA).jsonValue()))
    assert read_schema(str(file)) == read_schema(SCHEMA)
    for wrong in ("id NUMBERS", "id BIGINT,,", str(tmp_path / "none.json")):
        with pytest.raises(ConfigurationError, match="schema"):
            read_schema(wrong)
