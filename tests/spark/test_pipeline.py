"""The pipeline: tables made of the journal, the same however often it runs."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from tests.spark.lakes import eventually, live, plant, rows, tables, totals
from tests.spark.shop import Shop
from waypost.errors import ConfigurationError, StoreError
from waypost.spark.lake import audit as auditing
from waypost.spark.lake.audit import audit
from waypost.spark.lake.lake import CHECKPOINT, Lake
from waypost.spark.lake.percentiles import bucket_of, merged, percentile, value_of
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.tables import (
    BRONZE_JOURNAL,
    GOLD_DEAD_LETTERS,
    GOLD_HISTOGRAMS,
    GOLD_MINUTES,
    GOLD_REDELIVERIES,
    MINUTE_EVENTS,
    SILVER_DELIVERIES,
    SILVER_MESSAGES,
)

pytestmark = pytest.mark.xdist_group("spark")
DAY_MS = 86_400_000


@pytest.mark.promise("SPARK-4", "SPARK-5", "LEASE-2")
def test_a_timer_finds_its_claim_though_the_token_has_jumped(
    postgres_shop: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    shop = postgres_shop
    shop.post.publish("orders", 1, delay=0.01)
    with shop.post.receive("orders", wait=10) as message:
        assert message is not None
        message.retry(after=0.01)
    made = pipeline(shop)
    made.run()
    with psycopg.connect(shop.url, autocommit=True) as server:
        # The state after a crash of the server.
        server.execute(f'TRUNCATE "{shop.namespace}_server"')
    with shop.post.receive("orders", wait=10) as message:
        assert message is not None
        token = message.token
    assert token > 2
    made = pipeline(shop)
    made.run()
    deliveries = sorted(rows(made, SILVER_DELIVERIES), key=lambda row: int(row["claim"]))
    assert [(row["claim"], row["outcome"], row["late_ms"] is not None) for row in deliveries] == [
        (1, "retried", True),
        (2, "done", True),
    ]
    assert deliveries[1]["token"] == token
    (known,) = rows(made, SILVER_MESSAGES)
    assert (known["token"], known["claims"]) == (token, 2)
    assert audit(made).is_clean


@pytest.mark.promise("SPARK-4")
@pytest.mark.promise("SPARK-5")
def test_tables_agree_with_the_journal_and_the_ledger(
    shop: Shop, pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the store held too much to be read without Spark.
    monkeypatch.setattr(auditing, "DRIVER_ROWS_MAX", 0)
    shop.fill(60)
    made = pipeline(shop)
    found = audit(made)
    events, ledger = shop.events(), shop.post.ledger("orders")
    bronze = sorted(rows(made, BRONZE_JOURNAL), key=lambda row: row["number"])
    assert [(row["number"], row["event"], row["message_id"]) for row in bronze] == [
        (event.number, event.event, event.message_id) for event in events
    ]
    gold = totals(made)
    texts: Counter[str] = Counter(event.event for event in events)
    assert {name: gold[name] for name in MINUTE_EVENTS} == {name: texts[event] for name, event in MINUTE_EVENTS.items()}
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
    assert found.is_clean
    assert found.published == found.accounted == ledger.published
    assert found.not_seen == 0


@pytest.mark.promise("SPARK-4")
def test_tables_do_not_depend_on_how_the_history_was_cut(orders: Shop, pipeline: Callable[..., Pipeline]) -> None:
    """Rows are updated over many batches and runs: in the end each message and each delivery is one row."""
    bit_by_bit = pipeline(orders, "bits", batch_rows=60)
    live(orders, 40)
    bit_by_bit.run()
    live(orders, 40)
    # Events of earlier days that arrive now: events need not be in the order of their times.
    read = bit_by_bit.lake.state.seen["orders"].newest
    moved = "UPDATE wp_journal SET at_ms = at_ms - ? WHERE number > ? AND number % ? = 3"
    assert plant(orders, moved, 5 * DAY_MS, read, 7) > 0
    assert plant(orders, moved, 3 * DAY_MS, read, 11) > 0
    bit_by_bit.run()
    live(orders, 30)
    again = pipeline(orders, "bits", batch_rows=90)
    again.run()
    at_once = pipeline(orders, "whole")
    at_once.run()
    wanted = tables(at_once)
    assert tables(again) == wanted
    assert again.lake.state.seen == at_once.lake.state.seen
    for table in (SILVER_DELIVERIES, SILVER_MESSAGES):
        ids = [(row["queue"], row["message_id"], row.get("token")) for row in wanted[table.name]]
        assert len(ids) == len(set(ids))
    gold = totals(at_once)
    assert gold["late_count"] > 0
    assert gold["redriven"] > 0
    assert sum(row["count"] for row in wanted[GOLD_REDELIVERIES.name]) == sum(
        row["cause"] is not None for row in wanted[SILVER_DELIVERIES.name]
    )
    days = {row["minute"].date() for row in wanted[GOLD_MINUTES.name]}
    assert len(days) >= 3


@pytest.mark.promise("SPARK-4")
def test_late_events_are_added_to_the_minutes_that_they_belong_to(
    orders: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    orders.post.publish_many("orders", range(10))
    pipeline(orders).run()
    before = totals(pipeline(orders))
    orders.post.publish_many("orders", range(5))
    plant(orders, "UPDATE wp_journal SET at_ms = (SELECT min(at_ms) FROM wp_journal) WHERE number > 12")
    made = pipeline(orders)
    made.run()
    assert before["published"] == 10
    assert totals(made)["published"] == 15
    minutes = [(row["queue"], row["minute"]) for row in rows(made, GOLD_MINUTES)]
    assert len(minutes) == len(set(minutes))


@pytest.mark.promise("SPARK-4")
def test_percentiles_of_gold_are_within_one_percent_on_skewed_data(
    orders: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    orders.post.publish_many("orders", range(3000))
    orders.work("orders", 3000)
    some = random.Random(7)
    runs = {number: int(some.lognormvariate(5, 2.5)) for number in range(1, 9001)}
    with sqlite3.connect(orders.url.removeprefix("sqlite:///")) as file:
        file.executemany(
            "UPDATE wp_journal SET run_ms = ? WHERE number = ? AND run_ms IS NOT NULL",
            [(run, number) for number, run in runs.items()],
        )
    made = pipeline(orders)
    made.run()
    exact = sorted(event.run_ms for event in orders.events() if event.run_ms is not None)
    found = [row for row in rows(made, GOLD_HISTOGRAMS) if row["measure"] == "run"]
    counts = merged((row["bucket"], row["count"]) for row in found)
    assert sum(counts.values()) == len(exact) == 3000
    for share in (0.01, 0.5, 0.9, 0.99, 0.999, 1.0):
        wanted = exact[max(1, -(-int(share * 1_000_000) * len(exact) // 1_000_000)) - 1]
        got = percentile(counts, share)
        assert got is not None
        assert abs(got - wanted) <= 0.01 * wanted, (share, got, wanted)


def test_an_empty_store_makes_empty_tables_and_later_fills_them(
    orders: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    pipeline(orders).run()
    made = pipeline(orders)
    assert all(found == [] for found in tables(made).values())
    orders.post.publish("orders", "at last")
    made.run()
    assert totals(made)["published"] == 1


def test_only_the_selected_queues_are_in_the_lake(orders: Shop, pipeline: Callable[..., Pipeline]) -> None:
    for queue in ("orders", "mails:eu", "other"):
        orders.post.publish(queue, 1)
    made = pipeline(orders, queues=("orders", "mails:eu"), format="orc", reader="lake")
    made.run()
    assert {row["queue"] for row in rows(made, SILVER_MESSAGES)} == {"orders", "mails:eu"}
    assert {row["queue"] for row in rows(made, GOLD_MINUTES)} == {"orders", "mails:eu"}
    # A registered reader records what it has read; trimming waits for no more than that.
    with orders.bulk() as bulk:
        orders.post.publish("orders", 2)
        assert bulk.run(bulk.store.journal_trim("orders", 2)) == 2


def test_a_following_pipeline_adds_new_events(orders: Shop, pipeline: Callable[..., Pipeline]) -> None:
    orders.post.publish_many("orders", range(3))
    made = pipeline(orders)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as beside:
        following = beside.submit(made.follow, 0.2, stop)
        try:
            eventually(lambda: totals(made)["published"] == 3, following)
            orders.post.publish_many("orders", range(2))
            eventually(lambda: totals(made)["published"] == 5, following)
        finally:
            stop.set()
        following.result()
    assert totals(pipeline(orders))["published"] == 5


@pytest.mark.promise("SPARK-4", "SPARK-7")
def test_gold_can_be_read_while_a_run_replaces_it(tmp_path: Path) -> None:
    """A day's folder exists before its file, and a file can be replaced between two reads of it."""
    lake = Lake(str(tmp_path))
    schema = GOLD_DEAD_LETTERS.arrow(GOLD_DEAD_LETTERS.columns)
    minute = datetime(2026, 3, 1, tzinfo=UTC)

    def day_of(count: int) -> pa.Table:
        found = [{"queue": "orders", "minute": minute, "reason": f"reason {n}", "count": n} for n in range(count)]
        return pa.Table.from_pylist(found, schema=schema)

    lake.replace_days(GOLD_DEAD_LETTERS, day_of(1), ["2026-03-01"])
    (tmp_path / GOLD_DEAD_LETTERS.name / "date=2026-03-02").mkdir()
    assert lake.rows(GOLD_DEAD_LETTERS).num_rows == 1

    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            for count in (1, 500):
                lake.replace_days(GOLD_DEAD_LETTERS, day_of(count), ["2026-03-01"])

    with ThreadPoolExecutor(1) as beside:
        replacing = beside.submit(replace)
        try:
            seen = {lake.rows(GOLD_DEAD_LETTERS).num_rows for _ in range(300)}
        finally:
            stop.set()
        replacing.result()
    assert seen <= {1, 500}


def test_a_lake_is_of_one_store_and_keeps_its_checkpoint(
    orders: Shop, pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    orders.post.publish("orders", 1)
    made = pipeline(orders)
    made.run()
    with Shop(f"sqlite:///{tmp_path}/other.db", "wp") as other:
        with pytest.raises(ConfigurationError, match=r"was made from .*orders\.db"):
            pipeline(other)
        assert pipeline(other, moved=True).source.url == other.url
    with pytest.raises(ConfigurationError, match="holds a password"):
        Pipeline(made.spark, str(tmp_path / "third"), store="valkey://:secret@127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="is new: give its store"):
        Pipeline(made.spark, str(tmp_path / "fourth"))
    with made.lake.lock(), pytest.raises(StoreError, match="another process is changing the lake"):
        pipeline(orders).run()
    made.lake.files.remove(CHECKPOINT)
    with pytest.raises(StoreError, match="every event would be there twice"):
        pipeline(orders).run()
    assert "secret" not in (tmp_path / "a lake" / "_state" / "pipeline.json").read_text()


@pytest.mark.promise("SPARK-4")
def test_a_transaction_that_commits_late_is_not_missed_and_one_rolled_back_never_appears(
    postgres_shop: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    shop = postgres_shop
    with psycopg.connect(shop.url) as late, psycopg.connect(shop.url) as undone:
        shop.post.publish("orders", "late", transaction=late)
        shop.post.publish("orders", "never", transaction=undone)
        shop.post.publish_many("orders", range(5))
        pipeline(shop).run()
        undone.rollback()
        late.commit()
    made = pipeline(shop)
    made.run()
    numbers = sorted(row["number"] for row in rows(made, BRONZE_JOURNAL))
    assert numbers == list(range(1, 7))
    assert len(rows(made, SILVER_MESSAGES)) == totals(made)["published"] == shop.post.ledger("orders").published == 6


def test_an_unknown_state_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "_state" / "pipeline.json"
    state.parent.mkdir()
    state.write_text('{"layout": 99}')
    with pytest.raises(StoreError, match="made by a newer release"):
        Lake(str(tmp_path))
    state.write_text("{")
    with pytest.raises(StoreError, match="is not the state of a lake"):
        Lake(str(tmp_path))
    with pytest.raises(ConfigurationError, match="parquet or orc, not csv"):
        Lake(str(tmp_path / "new"), format="csv")


@pytest.mark.parametrize("value", [0, 1, 2, 7, 999, 10**9])
def test_a_bucket_stands_for_its_values_within_half_a_percent(value: int) -> None:
    assert abs(value_of(bucket_of(value)) - value) <= 0.005 * value


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile({}, 0.5) is None
    assert percentile({-1: 3, 0: 1}, 0.5) == 0
    with pytest.raises(ValueError, match="share from 0 to 1"):
        percentile({}, 99)


@pytest.mark.promise("SPARK-4")
def test_a_step_that_dies_does_not_change_the_tables_and_the_next_run_completes_them(
    orders: Shop, pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes and commits are counted, and all fail after a number of them that grows with each run."""
    live(orders, 20)
    pipeline(orders).run()
    before = tables(pipeline(orders))
    live(orders, 20)
    left = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError("the disk is gone")
            return real(*arguments, **options)

        return step

    with monkeypatch.context() as broken:
        broken.setattr(Lake, "write", failing(Lake.write))
        broken.setattr(Lake, "commit", failing(Lake.commit))
        # Bronze written and not committed; committed; one table of silver written; all of silver; gold's files.
        for steps in (1, 2, 1, 3, 4):
            left = steps
            with pytest.raises((OSError, StoreError), match="the disk is gone"):
                pipeline(orders).run()
            if steps < 4:
                assert rows(pipeline(orders), SILVER_MESSAGES) == before[SILVER_MESSAGES.name]
    made = pipeline(orders)
    made.run()
    whole = pipeline(orders, "whole")
    whole.run()
    assert tables(made) == tables(whole)
    named = {path.partition("/")[0] for path in made.lake.state.paths(SILVER_MESSAGES)}
    assert set(made.lake.files.folders(SILVER_MESSAGES.name)) == named
