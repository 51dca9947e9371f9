"""An import of a million rows against a history of ten million keys: run by `make more`, it prints its figures."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

import waypost.spark
from tests.spark.shop import Shop
from tests.spark.test_backfill import stopped
from tests.spark.test_backfill_runs import new_lake, run_killed, work_off
from waypost.spark.delta.parquet import FileWriter
from waypost.spark.delta.table import Change
from waypost.spark.lake.tables import KEYS
from waypost.spark.republish.audit import Audit, audit
from waypost.spark.republish.state import Records
from waypost.spark.source.tables import BACKFILL_PREFIX

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.promise("SPARK-8")]
HISTORY, ROWS, PART = 10_000_000, 1_000_000, 500_000
CHUNK = 10_000


def old_keys(start: int) -> pa.Table:
    """Return a part of the history: keys and ids as programs make them."""
    numbers = pa.array(range(start, start + PART), pa.int64())
    text = numbers.cast(pa.string())
    columns = {
        "queue": pa.repeat("orders", PART), "key": pc.binary_join_element_wise("order-", text, ""),
        "message_id": pc.utf8_lpad(text, 24, "0"), "number": pa.repeat(0, PART), "at_ms": numbers,
        "backfill": pa.nulls(PART, pa.string()),
    }  # fmt: skip
    return pa.table(columns).cast(KEYS.arrow(KEYS.columns))


def resident_mb(pid: str = "self") -> int:
    """Return the largest resident memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def test_a_million_rows_against_ten_million_keys(
    orders: Shop, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures: dict[str, Any] = {}
    lake = new_lake(orders, tmp_path / "lake")
    with FileWriter(lake.files, KEYS.name, KEYS.arrow(KEYS.columns), KEYS.statistics) as writer:
        for start in range(0, HISTORY, PART):
            writer.write(old_keys(start))
    lake.commit("history", {KEYS.name: Change(tuple(writer.made))}, lake.state)
    orders.post.configure("orders", journal_max=50_000_000)
    rows = str(tmp_path / "rows.parquet")
    # Every second row is new.
    spark.range(ROWS).selectExpr(
        "concat('order-', CASE WHEN id % 2 = 0 THEN 20000000 + id ELSE id * 10 END) AS order_id", "id AS amount"
    ).write.parquet(rows)
    given: dict[str, Any] = {"queue": "orders", "id": "order_id", "name": "import", "dry_run": False}
    began = time.monotonic()
    planned = waypost.spark.backfill(spark, lake, rows, **given, stop=stopped())
    figures["plan seconds"] = round(time.monotonic() - began, 1)
    assert isinstance(planned, Audit)
    assert planned.input == {"rows": ROWS, "collapsed": 0, "known": ROWS // 2, "new": ROWS // 2}
    began = time.monotonic()
    assert run_killed("after-publish:450", lake, chunk_rows=CHUNK).returncode == -9
    work_off(orders)
    done = run_killed("none:0", lake, days=7, chunk_rows=CHUNK)
    assert done.returncode == 0, done.stderr
    figures["send seconds, two processes"] = round(time.monotonic() - began, 1)
    with orders.bulk() as bulk:
        batches = list(bulk.journal("orders", 0, bulk.bounds("orders")[1], ("event", "message_id", "key")))
    events = pa.Table.from_batches(batches)
    mine = pc.and_(pc.equal(events["event"], "published"), pc.starts_with(events["message_id"], BACKFILL_PREFIX))
    keys = events.filter(mine)["key"]
    assert len(keys) == len(pc.unique(keys)) == ROWS // 2
    found = audit(Records(lake.files, "import"), lake, orders.place)
    assert found.settled == ROWS // 2
    began = time.monotonic()
    lake.refresh()
    again = waypost.spark.backfill(spark, lake, rows, **given)
    figures["again seconds"] = round(time.monotonic() - began, 1)
    assert isinstance(again, Audit)
    assert (again.requested, again.input["known"]) == (0, ROWS)
    figures["driver MB"] = resident_mb()
    figures["sender MB"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    with capsys.disabled():
        print("\n" + ", ".join(f"{name}: {value}" for name, value in figures.items()))
