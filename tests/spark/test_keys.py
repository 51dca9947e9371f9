"""The table of keys, and gold without messages of backfills."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from tests.spark.lakes import live, rows, totals
from tests.spark.shop import Shop
from waypost.cli.main import main
from waypost.codec import encode_body, encode_head, make_envelope
from waypost.identity import Session
from waypost.spark.lake.compaction import remove_old_rows
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.tables import BRONZE_JOURNAL, GOLD, GOLD_MINUTES, KEYS, TABLES
from waypost.spark.source.tables import BACKFILL_PREFIX
from waypost.store.port import Draft
from waypost.testing.clock import ClockTime
from waypost.values import Settlement

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.promise("SPARK-8")]


def keys(made: Pipeline) -> list[tuple[Any, ...]]:
    made.lake.refresh()
    return sorted(
        (row["queue"], row["key"], row["message_id"], row["number"]) for row in made.lake.rows(KEYS).to_pylist()
    )


def journalled(shop: Shop) -> list[tuple[Any, ...]]:
    events = [one for one in shop.events() if one.event == "published" and one.key is not None]
    return sorted(("orders", one.key, one.message_id, one.number) for one in events)


def test_every_published_key_is_in_the_table_and_stays_when_its_events_are_deleted(
    orders: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    made = pipeline(orders, "lake")
    for _ in range(2):
        live(orders, 12)
        made.run()
    assert keys(made) == journalled(orders) != []
    today = datetime.now(UTC).date() + timedelta(days=30)
    remove_old_rows(made.lake, 7, today)
    made.tidy()
    assert made.lake.rows(BRONZE_JOURNAL).num_rows == 0
    assert keys(made) == journalled(orders)


def test_a_lake_without_the_table_gets_the_keys_of_its_events(orders: Shop, pipeline: Callable[..., Pipeline]) -> None:
    made = pipeline(orders, "lake")
    live(orders, 12)
    made.run()
    older = Lake(made.lake.files.address, tables=[table for table in TABLES if table != KEYS])
    older.commit("older release", {}, msgspec.structs.replace(older.state, has_keys=False))
    shutil.rmtree(made.lake.files.path(KEYS.name))
    later = pipeline(orders, "lake")
    live(orders, 12)
    later.run()
    assert keys(later) == journalled(orders)
    assert later.lake.state.has_keys


def test_gold_excludes_messages_of_backfills_if_configured_also_in_a_day_made_anew(
    orders: Shop, pipeline: Callable[..., Pipeline], running_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    caller = Session(ClockTime())
    orders.post.publish_many("orders", range(10))
    with orders.bulk() as bulk:
        ids = [f"{BACKFILL_PREFIX}{number:019}" for number in range(7)]
        drafts = [Draft(id, make_envelope(id, encode_body(1), encode_head()), forwarded=True) for id in ids]
        bulk.run(bulk.store.publish("orders", drafts, caller.operation("orders")))
        leases = bulk.run(bulk.store.claim("orders", 17, caller.operation("orders"), worker="w")).leases
        ends = [Settlement(lease.id, lease.token, lease.nonce) for lease in leases]
        bulk.run(bulk.store.settle("orders", ends, caller.operation("orders")))
    whole = pipeline(orders, "whole")
    whole.run()
    assert totals(whole)["done"] == totals(whole)["run_count"] == 17
    made = pipeline(orders, "lake", gold_without_backfills=True)
    made.run()
    assert totals(made)["published"] == totals(made)["claimed"] == totals(made)["done"] == 10
    assert totals(made)["run_count"] == totals(made)["wait_count"] == 10
    # The other tables have them all, and the lake remembers the choice.
    assert made.lake.state.seen["orders"].counts["done"] == 17
    before = {table.name: rows(made, table) for table in GOLD}
    again = pipeline(orders, "lake")
    days = {row["minute"].date() for row in rows(whole, GOLD_MINUTES)}
    for day in days:
        again.rebuild(day)
    assert {table.name: rows(again, table) for table in GOLD} == before
    address = made.lake.files.address
    assert main(["pipeline", "run", "--lake", address, "--backfills", "count"]) == 0
    for day in days:
        again.rebuild(day)
    assert totals(again) == totals(whole)
