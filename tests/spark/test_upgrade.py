"""A lake of release 0.1 becomes Delta tables: the same rows, and a run continues where 0.1 stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.spark.lakes import live, tables
from tests.spark.shop import Shop
from waypost.cli.main import main
from waypost.errors import InvalidInput, StoreError
from waypost.spark.files import LocalFiles
from waypost.spark.lake.ingest import Ingest, read_schema
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.sums import SUMS, merge_sums, sum_events, sum_late
from waypost.spark.lake.tables import BRONZE_JOURNAL, GOLD, SILVER_DELIVERIES, SILVER_MESSAGES
from waypost.spark.lake.upgrade import upgrade
from waypost.spark.source.reader import journal_columns, published_batch
from waypost.spark.source.tables import PUBLISHED

pytestmark = pytest.mark.xdist_group("spark")


class OldLake:
    """Writes the tables of a lake as release 0.1 laid them out."""

    def __init__(self, path: Path, format: str) -> None:
        self.path, self.format = path, format
        self.state: dict[str, Any] = {
            "layout": 1, "format": format, "source": None, "schema": None, "bronze_batch": 1, "silver_batch": 0,
            "tables": {}, "open": {}, "seen": {}, "stale_days": [],
        }  # fmt: skip

    def write(self, table: str, folder: str, rows: pa.Table, batch: int | None = 0) -> None:
        """Write a folder; with a batch as final rows, without one as rows that may change."""
        target = self.path / table / folder / "date=2026-03-01"
        target.mkdir(parents=True)
        if self.format == "orc":
            orc.write_table(rows, str(target / "part-0.orc"))
        else:
            pq.write_table(rows, str(target / "part-0.parquet"))
        (target / "_SUCCESS").touch()
        if batch is None:
            self.state["open"].setdefault(table, []).append(folder)
        else:
            found = {"path": folder, "first": batch, "last": batch, "newest": "2026-03-01"}
            self.state["tables"].setdefault(table, []).append(found)

    def finish(self) -> None:
        folder = self.path / "_state"
        folder.mkdir(exist_ok=True)
        (folder / "pipeline.json").write_text(json.dumps(self.state))


def rows_of(found: Sequence[dict[str, Any]], table: Any) -> pa.Table:
    return pa.Table.from_pylist(list(found), schema=table.arrow(table.columns))


@pytest.mark.promise("SPARK-4")
@pytest.mark.parametrize("format", ["parquet", "orc"])
def test_a_lake_of_0_1_is_converted_and_continued(
    orders: Shop, pipeline: Callable[..., Pipeline], tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    live(orders, 30)
    first = pipeline(orders, "first")
    first.run()
    known, read = tables(first), first.lake.state.seen
    old = OldLake(tmp_path / "old", format)
    old.write(BRONZE_JOURNAL.name, "batch=000000000-aa", rows_of(known[BRONZE_JOURNAL.name], BRONZE_JOURNAL))
    for table, is_final in (
        (SILVER_DELIVERIES, lambda row: row["ends"] > 0),
        (
            SILVER_MESSAGES,
            lambda row: row["last_event"] in ("done", "dropped", "cancelled", "replaced", "dead_trimmed"),
        ),
    ):
        mine = known[table.name]
        old.write(table.name, "batch=000000000-bb/part=closed", rows_of([r for r in mine if is_final(r)], table))
        old.write(
            table.name, "batch=000000000-bb/part=open", rows_of([r for r in mine if not is_final(r)], table), None
        )
    # Gold is behind by one day; the old sums have it.
    bronze = rows_of(known[BRONZE_JOURNAL.name], BRONZE_JOURNAL)
    late = rows_of([row for row in known[SILVER_DELIVERIES.name] if row["late_ms"] is not None], SILVER_DELIVERIES)
    measured = (late[name] for name in ("queue", "message_id", "claimed_ms", "late_ms"))
    sums = merge_sums([sum_events(bronze), sum_late(*measured)])
    old.write("silver/sums", "batch=000000000-cc", sums.cast(SUMS))
    for table in GOLD:
        found = rows_of(known[table.name], table)
        days = pc.strftime(found.column("minute"), "%Y-%m-%d")
        for number, day in enumerate(sorted(set(days.to_pylist()))):
            target = tmp_path / "old" / table.name / f"date={day}"
            target.mkdir(parents=True)
            pq.write_table(found.filter(pc.equal(days, day)).slice(number and 1), target / "rows.parquet")
    old.state["stale_days"] = sorted(set(days.to_pylist()))[1:]
    old.state["seen"] = msgspec.to_builtins(read)
    old.state["source"] = msgspec.to_builtins(first.lake.state.source)
    # A second batch is in bronze and not in silver yet.
    live(orders, 10)
    second = pipeline(orders, "second")
    second.run()
    newest = read["orders"].newest
    ahead = [row for row in tables(second)[BRONZE_JOURNAL.name] if row["number"] > newest]
    old.write(BRONZE_JOURNAL.name, "batch=000000001-dd", rows_of(ahead, BRONZE_JOURNAL), 1)
    old.finish()

    with pytest.raises(StoreError, match=r"release 0\.1"):
        Lake(str(tmp_path / "old"))
    for _ in range(2):
        assert main(["pipeline", "upgrade", "--lake", str(tmp_path / "old")]) == 0
        assert "consists of Delta tables" in capsys.readouterr().out
    converted = pipeline(orders, "old")
    assert tables(converted) == known
    assert converted.lake.state.seen == read
    if format == "orc":
        return  # from here on it is the same
    with orders.bulk() as bulk:
        # What was loaded already is not needed any more.
        bulk.run(bulk.store.journal_trim("orders", newest + len(ahead)))
    for file in (tmp_path / "old").rglob("*.parquet"):
        os.utime(file, (1, 1))
    # Files that are in no table since a day are deleted; those of the second batch are merged before.
    converted.tidy()
    assert tables(converted) == tables(second)
    converted.run()
    assert tables(converted) == tables(second)
    assert converted.lake.state.seen == second.lake.state.seen
    live(orders, 5)
    converted.run()
    second.run()
    assert tables(converted) == tables(second)
    assert not (tmp_path / "old" / "_state").exists()


def test_there_must_be_a_lake_to_convert(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no lake at"):
        upgrade(str(tmp_path / "none"))
    state = tmp_path / "old" / "_state" / "pipeline.json"
    state.parent.mkdir(parents=True)
    state.write_text("{")
    with pytest.raises(StoreError, match="is not the state of a lake"):
        upgrade(str(tmp_path / "old"))


def write_old_messages(lake: Path, rows: pa.Table, corrupt: pa.Table, source: dict[str, Any], offset: int) -> None:
    """Write ingested messages as release 0.1 laid them out."""
    state, name = lake / "_state", "eu+orders"
    (state / f"ingest-{name}" / "offsets").mkdir(parents=True)
    offsets = json.dumps({"eu:orders": offset})
    (state / f"ingest-{name}" / "offsets" / "0").write_text(f'v1\n{{"batchWatermarkMs":0}}\n{offsets}')
    folders = []
    for part, found in (("rows", rows), ("corrupt", corrupt)):
        folder = f"batch=000000000-aa/part={part}"
        target = lake / "messages" / name / folder / "date=2026-03-01"
        target.mkdir(parents=True)
        pq.write_table(found, str(target / "part-0.parquet"), use_deprecated_int96_timestamps=True)
        (target / "_SUCCESS").touch()
        folders.append({"path": folder, "first": 0, "last": 0, "newest": "2026-03-01"})
    (lake / "messages" / name / "batch=000000001-bb").mkdir()
    content = {
        "layout": 1, "format": "parquet", "source": source, "schema": "struct<id:bigint,at:timestamp>",
        "bronze_batch": 0, "tables": {f"messages/{name}": folders},
    }  # fmt: skip
    (state / f"ingest-{name}.json").write_text(json.dumps(content))


@pytest.mark.promise("SPARK-2")
def test_messages_that_0_1_ingested_are_converted_and_continued(
    orders: Shop, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    post, queue, lake = orders.post, "eu:orders", tmp_path / "old"
    post.configure(queue, journal="full")
    sent = post.publish_many(queue, [{"id": 0, "at": "2026-03-01T12:00:00Z"}, {"id": 1}])
    names = list(PUBLISHED.columns)
    with orders.bulk() as bulk:
        events = list(bulk.journal(queue, 0, 3, journal_columns(names)))
    found = pa.Table.from_batches([published_batch(queue, batch, names, fail=True) for batch in events])
    at = pa.array([0, None], pa.int64()).cast(pa.timestamp("us"))
    values = pa.StructArray.from_arrays([pa.array([0, 1], pa.int64()), at], names=["id", "at"])
    rows = found.append_column("value", values)
    write_old_messages(lake, rows, found.slice(0, 0), {"url": orders.url, "queues": [queue]}, 3)
    schema = read_schema("id BIGINT, at TIMESTAMP")
    with pytest.raises(StoreError, match=r"loaded .* by release 0\.1 .* pipeline upgrade --lake"):
        Ingest(spark, str(lake), queue, schema=schema)
    with monkeypatch.context() as broken:
        broken.setattr(Lake, "commit", lambda *given: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            upgrade(str(lake))
    lines: list[str] = []
    upgrade(str(lake), lines.append)
    assert lines == ["messages/eu+orders: 2 rows"]
    assert not (lake / "_state").exists()
    assert list((lake / "messages" / "eu+orders").glob("batch=*")) == []
    post.publish(queue, {"id": 2})
    made = Ingest(spark, str(lake), queue, schema=schema)
    assert made.run() == 3
    table = polars.read_delta(str(lake / "messages" / "eu+orders")).sort("number")
    assert [value["id"] for value in table["value"]] == [0, 1, 2]
    assert table["value"][0]["at"].isoformat() == "1970-01-01T00:00:00+00:00"
    assert table["id"].to_list()[:2] == [one.id for one in sent]


@pytest.mark.parametrize("folder", ["_state/ingest-eu+orders", "messages/eu+orders/batch=000000000-aa"])
def test_a_conversion_of_messages_that_is_killed_while_it_deletes_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    empty = pa.table({"id": pa.array([], pa.string())})
    write_old_messages(tmp_path, empty, empty, {"url": "sqlite:///x.db", "queues": ["eu:orders"]}, 1)
    remove = LocalFiles.remove

    def killed(files: LocalFiles, name: str) -> None:
        remove(files, name)
        if name == folder:
            raise OSError("killed")

    with monkeypatch.context() as broken:
        broken.setattr(LocalFiles, "remove", killed)
        with pytest.raises(OSError, match="killed"):
            upgrade(str(tmp_path))
    lines: list[str] = []
    upgrade(str(tmp_path), lines.append)
    assert lines == ["messages/eu+orders is converted already", "messages/eu+orders: 0 rows"]
    assert not (tmp_path / "_state").exists()
    assert list((tmp_path / "messages" / "eu+orders").glob("batch=*")) == []


def test_messages_of_0_1_without_their_offsets_are_refused(tmp_path: Path) -> None:
    empty = pa.table({"id": pa.array([], pa.string())})
    write_old_messages(tmp_path, empty, empty, {"url": "sqlite:///x.db", "queues": ["eu:orders"]}, 1)
    offsets = tmp_path / "_state" / "ingest-eu+orders" / "offsets" / "0"
    for content, text in (("v1\nnothing", "is no offset of the journal"), (None, "is gone, which says how far")):
        if content is None:
            offsets.unlink()
        else:
            offsets.write_text(content)
        with pytest.raises(StoreError, match=text):
            upgrade(str(tmp_path))
    (tmp_path / "_state" / "ingest-eu+orders.json").write_text("[")
    with pytest.raises(StoreError, match="is not the state of ingested messages"):
        upgrade(str(tmp_path))
