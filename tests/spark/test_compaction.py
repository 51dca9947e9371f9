"""Compaction of open rows keeps messages apart that have the same id, and refuses times that are none."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from waypost.errors import InvalidInput
from waypost.spark.delta.parquet import write_rows
from waypost.spark.delta.table import Change
from waypost.spark.lake import silver
from waypost.spark.lake.compaction import compact, find_marks_within, remove_old_rows
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.tables import COUNTED_EVENTS, SILVER_OPEN_DELIVERIES, SILVER_OPEN_MESSAGES

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.promise("SPARK-4")]


def add(lake: Lake, messages: Sequence[dict[str, Any]], deliveries: Sequence[dict[str, Any]]) -> None:
    """Add open rows to a lake, as one step."""
    changes = {}
    for table, given in ((SILVER_OPEN_MESSAGES, messages), (SILVER_OPEN_DELIVERIES, deliveries)):
        whole = pa.Table.from_pylist([dict.fromkeys(table.columns) | row for row in given], table.arrow(table.columns))
        changes[table.name] = Change(tuple(write_rows(lake.files, table.name, whole, table.statistics)))
    lake.commit("run", changes, lake.state)


def message(name: str, number: int, event: str, first: int | None = None) -> dict[str, Any]:
    """Return a partial row of a message by the number and the name of its newest event."""
    counts = dict.fromkeys(COUNTED_EVENTS, 0) | ({event: 1} if event in COUNTED_EVENTS else {})
    return {
        "queue": "orders", "message_id": name, "state": silver.STATES.get(event, event), "last_event": event,
        "first_number": first or number, "last_number": number, "last_ms": number, **counts,
    }  # fmt: skip


def delivery(name: str, number: int, *, ended: bool = False) -> dict[str, Any]:
    """Return a partial row of the first delivery of a message."""
    return {
        "queue": "orders", "message_id": name, "claim": 1, "claims": int(not ended), "ends": int(ended),
        "claimed_number": None if ended else number, "ended_number": number if ended else None, "last_number": number,
    }  # fmt: skip


def used_again(folder: Path) -> Lake:
    """Return a lake with an id that was used again after its end, which is in a larger file than its messages."""
    lake = Lake(str(folder / "lake"))
    lake.create()
    many = [f"other{number}" for number in range(5)]
    add(lake, [message("a", 1, "published")], [delivery("a", 2)])
    add(
        lake, [message("a", 10, "done", 1), *(message(name, 11, "published") for name in many)],
        [delivery("a", 10, ended=True), *(delivery(name, 12) for name in many)],
    )  # fmt: skip
    add(lake, [message("a", 20, "published")], [delivery("a", 21)])
    return lake


def test_a_message_with_the_id_of_an_ended_one_survives_a_merge_of_some_files(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = used_again(tmp_path)
    assert compact(lake, spark, at_least=3) > 0
    assert len(lake.data_files(SILVER_OPEN_MESSAGES)) == 2
    messages = {row.message_id: row for row in lake.messages_now(spark).collect()}
    assert (messages["a"].first_number, messages["a"].published, len(messages)) == (20, 1, 6)
    deliveries = {row.message_id: row for row in lake.deliveries_now(spark).collect()}
    assert (deliveries["a"].claimed_number, deliveries["a"].claims, len(deliveries)) == (21, 1, 6)


def test_only_marks_are_read_along_after_which_there_are_newer_rows(tmp_path: Path) -> None:
    lake = used_again(tmp_path)
    for table in (SILVER_OPEN_MESSAGES, SILVER_OPEN_DELIVERIES):
        first, second, third = sorted(lake.data_files(table), key=lambda file: file.highest["last_number"])
        assert find_marks_within(lake, table, [first, third]).column("last_number").to_pylist() == [10]
        assert find_marks_within(lake, table, [first]).num_rows == 0
        assert find_marks_within(lake, table, [first, second]).num_rows == 0


def test_a_skip_does_not_change_the_state_of_its_message(spark: SparkSession) -> None:
    columns = (
        "queue STRING, message_id STRING, number BIGINT, at_ms BIGINT, event STRING, key STRING, `group` STRING, "
        "priority INT, size BIGINT, chain_id STRING, schedule STRING, reason STRING, error_type STRING, cause STRING, "
        "due_ms BIGINT, token BIGINT, claims BIGINT, wait_ms BIGINT, run_ms BIGINT"
    )
    names = ("published", "claimed", "retried", "skipped")
    events = [
        ("orders", "a", number, number, event, None, "g", 0, 1, None, None, None, None,
         "held" if event == "skipped" else None, 9_000 if event == "retried" else None, 1, 1, None, None)
        for number, event in enumerate(names, 1)
    ]  # fmt: skip
    found = silver.messages(silver.message_steps(spark.createDataFrame(events, columns)), few=True).collect()
    assert [(row.state, row.last_event) for row in found] == [("delayed", "retried")]


@pytest.mark.parametrize("days", [0, -1, 10_000_000])
def test_a_number_of_days_that_rows_cannot_be_kept_for_is_refused(tmp_path: Path, days: int) -> None:
    with pytest.raises(InvalidInput, match="from 1 to"):
        remove_old_rows(Lake(str(tmp_path / "lake")), days, date(2026, 3, 1))
