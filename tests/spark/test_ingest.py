"""Ingest: messages as a table, parsed, each of them once, and nothing consumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructField, StructType

from tests.spark.lakes import plant
from tests.spark.shop import Shop
from waypost.errors import ConfigurationError, InvalidInput, StoreError
from waypost.spark.delta.data_source import write_frame
from waypost.spark.insight.history import RECORDED
from waypost.spark.insight.lake_history import read_types, to_deliveries
from waypost.spark.lake.ingest import Ingest, count_messages, merge_messages, read_schema, tidy_messages
from waypost.spark.lake.lake import Lake

pytestmark = pytest.mark.xdist_group("spark")
#: The length of a text whose body has 1 MiB, the most that a message may have.
LONG = (1 << 20) - 19
SCHEMA = "id BIGINT, name STRING, parts ARRAY<STRUCT<sku: STRING, count: INT>>"


@dataclass
class Order:
    id: int


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
    typed = orders.post.publish("orders", Order(11))
    orders.post.publish("orders", {"id": "no number"})
    orders.post.publish("orders", "no object")
    orders.post.publish("orders", b"\xff\x00")
    made = ingest(orders, batch_rows=4)
    lake = Lake(str(tmp_path / "lake"))
    assert read_types(lake, "orders") is None
    assert made.run() == 8
    found = {row.value.id: row for row in made.rows().collect()}
    assert sorted(found) == [0, 1, 2, 3, 4, 9, 10, 11]
    assert found[3].value.name == "ü — 見た" * 3
    assert found[3].key == "k3"
    assert len(found[10].value.name) == LONG
    assert found[9].value.parts[0].asDict() == {"sku": "a", "count": 2}
    assert found[9].headers == {"h": "ä"}
    aside = {bytes(row.body) for row in made.corrupt().collect()}
    assert aside == {b'{"id":"no number"}', b"no object", b"\xff\x00"}
    assert orders.post.ledger("orders").ready == 11
    by_polars = polars.read_delta(str(tmp_path / "lake" / "messages" / "orders"))
    assert sorted(value["id"] for value in by_polars["value"]) == [0, 1, 2, 3, 4, 9, 10, 11]
    # Models know the type of what was ingested.
    (one,) = read_types(lake, "orders").to_pylist()
    assert (one["id"], one["type_name"]) == (typed.id, found[11].type_name)
    rows = pa.table({name: [typed.id, "other"] for name in RECORDED})
    assert [row.type_name for row in to_deliveries(rows, read_types(lake, "orders"))] == [found[11].type_name, None]


@pytest.mark.promise("SPARK-2")
def test_fields_may_have_any_name(orders: Shop, ingest: Callable[..., Ingest], tmp_path: Path) -> None:
    names = ("a b", "c.d", "e`f", "value", "number", "x,y;{}()=", "été", "select", 'q"q')
    orders.post.configure("orders", journal="full")
    schema = StructType([StructField(name, LongType()) for name in names])
    nested = StructType([*schema.fields, StructField("in side", MapType(StringType(), ArrayType(schema)))])
    inside = {name: number for number, name in enumerate(names)}
    orders.post.publish("orders", {**inside, "in side": {"k": [inside]}})
    made = ingest(orders, schema=json_schema(tmp_path, nested))
    assert made.run() == 1
    assert count_messages(made)["corrupt"] == 0
    path = str(tmp_path / "lake" / "messages" / "orders")
    wanted = {**inside, "in side": {"k": [inside]}}
    assert made.rows().select("value").collect()[0].value.asDict(recursive=True) == wanted
    # What a run says of its schema can be given to the next one, and it may gain a field.
    described = made.lake.state.schema
    assert described is not None
    assert read_schema(described) == nested
    orders.post.publish("orders", {"a b": 7, "new. one": 1})
    made = ingest(orders, schema=f"{described}, `new. one` BIGINT")
    assert made.run() == 2
    tidy_messages(str(tmp_path / "lake"), lambda text: None)
    assert len(DeltaTable(path).file_uris()) == 1
    found = polars.read_delta(path).sort("number")["value"].to_list()
    assert {name: found[0][name] for name in names} == inside
    assert (found[1]["a b"], found[1]["new. one"], found[1]["c.d"]) == (7, 1, None)
    by_duckdb = duckdb.from_arrow(DeltaTable(path).to_pyarrow_dataset()).project('value."a b", value."c.d"')
    assert sorted(by_duckdb.fetchall(), key=str) == [(0, 1), (7, None)]
    with pytest.raises(InvalidInput, match="a field of the schema has no name"):
        ingest(orders, "mails", schema=json_schema(tmp_path, StructType([StructField("", LongType())])))


def json_schema(tmp_path: Path, schema: StructType) -> str:
    file = tmp_path / "other.json"
    file.write_text(json.dumps(schema.jsonValue()))
    return str(file)


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
        ingest(orders, "mails:eu", schema="id STRING").run()
    # Nothing was loaded, so another schema may be chosen.
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
    with pytest.raises(ConfigurationError, match="are in the lake without a schema: give none, or load them into"):
        ingest(orders, schema="id BIGINT")


@pytest.mark.promise("SPARK-2")
def test_a_schema_gains_fields_and_small_files_are_merged(
    orders: Shop, ingest: Callable[..., Ingest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders.post.configure("orders", journal="full")
    orders.post.publish("orders", {"id": 1, "name": "a", "parts": [{"sku": "s", "count": 1}]})
    assert ingest(orders).run() == 1
    more = "id BIGINT, name STRING, parts ARRAY<STRUCT<sku: STRING, count: INT, color: STRING>>, at TIMESTAMP"
    orders.post.publish("orders", {"id": 2, "parts": [{"sku": "t", "color": "red"}], "at": "2026-03-01T12:00:00Z"})
    made = ingest(orders, schema=more)
    assert made.run() == 2
    path = str(tmp_path / "lake" / "messages" / "orders")
    # In one file, and in several.
    for _ in range(2):
        rows = sorted((row.value.asDict(recursive=True) for row in made.rows().collect()), key=lambda row: row["id"])
        assert rows[0]["at"] is None
        assert rows[0]["parts"] == [{"sku": "s", "count": 1, "color": None}]
        assert rows[1]["parts"] == [{"sku": "t", "count": None, "color": "red"}]
        found = (
            duckdb.from_arrow(DeltaTable(path).to_pyarrow_dataset()).project("value.id, value.at IS NULL").fetchall()
        )
        assert sorted(found) == [(1, True), (2, False)]
        assert sorted(value["id"] for value in polars.read_delta(path)["value"]) == [1, 2]
        tidy_messages(str(tmp_path / "lake"), print)
        made = ingest(orders, schema=more)
        assert len(DeltaTable(path).file_uris()) == 1
    assert capsys.readouterr().out.startswith("messages/orders: 1 files fewer, deleted 0 files")
    for schema, text in (
        (SCHEMA, "the schema lacks value.parts.color, value.at, which messages of orders in the lake have"),
        (more.replace("BIGINT", "STRING"), "column value.id of the table messages/orders is long, and the rows have s"),
        (more + ", local TIMESTAMP_NTZ", "column value.local has the type timestamp_ntz"),
        (None, "are in the lake with a schema"),
    ):
        with pytest.raises(ValueError, match=text):
            ingest(orders, schema=schema)


def test_messages_are_not_loaded_into_a_table_that_another_process_created_with_another_schema(
    orders: Shop, ingest: Callable[..., Ingest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.post.configure("orders", journal="full")
    orders.post.publish("orders", {"id": 1})
    made, other = ingest(orders, schema="id BIGINT"), ingest(orders, schema="id STRING")

    def write_and_create(*given: Any) -> Any:
        written = write_frame(*given)
        other._create()
        return written

    with monkeypatch.context() as changed:
        changed.setattr("waypost.spark.lake.ingest.write_frame", write_and_create)
        with pytest.raises(ConfigurationError, match="id of the table messages/orders is string, and the rows"):
            made.run()
    assert list((tmp_path / "lake" / "messages").rglob("*.parquet")) == []
    assert other.run() == 1


def test_many_batches_are_merged_by_the_run_itself(
    orders: Shop, ingest: Callable[..., Ingest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_messages, "__defaults__", (2,))
    orders.post.configure("orders", journal="full")
    orders.post.publish_many("orders", [{"id": n} for n in range(4)])
    made = ingest(orders, schema=None, batch_rows=2)
    assert made.run() == 4
    assert len(made.lake.data_files(made.table)) == 1
    assert polars.read_delta(str(tmp_path / "lake" / "messages" / "orders"))["text"].len() == 4


def test_a_schema_is_columns_or_a_file_of_them(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "orders.json"
    file.write_text(json.dumps(read_schema(SCHEMA).jsonValue()))
    assert read_schema(str(file)) == read_schema(SCHEMA)
    for wrong in ("id NUMBERS", "id BIGINT,,", str(tmp_path / "none.json")):
        with pytest.raises(ConfigurationError, match="schema"):
            read_schema(wrong)
