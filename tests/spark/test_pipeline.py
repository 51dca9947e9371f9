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
from typing import Any, cast

import duckdb
import polars
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from msgspec import structs
from pyspark.sql import functions as f

from tests.spark.lakes import eventually, live, plant, rows, tables, totals
from tests.spark.shop import Shop
from waypost.errors import ConfigurationError, StoreError
from waypost.spark.lake import audit as auditing
from waypost.spark.lake import compaction, journal, silver
from waypost.spark.lake import pipeline as pipelines
from waypost.spark.lake.audit import audit
from waypost.spark.lake.gold import replace_days
from waypost.spark.lake.lake import Lake
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
    TABLES,
)
from waypost.store.sqlite.entries import entries_to_rows
from waypost.store.sqlite.schema import Spelling

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


def make_without_spark(shop: Shop, lake: Path) -> Pipeline:
    """Return a pipeline that can do what needs no Spark."""
    return Pipeline(cast("Any", None), str(lake), store=shop.url, namespace=shop.namespace, partitions=1)


@pytest.mark.promise("SPARK-4")
def test_a_run_accepts_events_that_another_run_loads_meanwhile(
    orders: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.post.publish_many("orders", range(5))
    made, other = (make_without_spark(orders, tmp_path / "lake") for _ in range(2))
    made.prepare()

    def load_elsewhere(number: int) -> None:
        other.lake.refresh(to_write=True)
        other.lake.commit("run", {}, structs.replace(other.lake.state, offsets={"orders": number}))

    load_elsewhere(5)
    with orders.bulk() as bulk:
        bounds = bulk.bounds

        def bounds_before(queue: str) -> tuple[int, int]:
            found = bounds(queue)
            orders.post.publish_many("orders", range(5))
            load_elsewhere(found[1] + 5)
            return found

        monkeypatch.setattr(bulk, "bounds", bounds_before)
        made._load(bulk)
        assert made.lake.state.offsets == {"orders": 5}
        made.lake.refresh()
    assert made.lake.state.offsets == {"orders": 10}


@pytest.mark.promise("SPARK-4")
def test_of_two_stores_that_begin_one_lake_the_second_is_refused(orders: Shop, tmp_path: Path) -> None:
    with Shop(f"sqlite:///{tmp_path}/others.db", "wp") as others:
        for shop in (orders, others):
            shop.post.publish("orders", 1)
        first, second = (make_without_spark(shop, tmp_path / "lake") for shop in (orders, others))
        first.prepare()
        with pytest.raises(ConfigurationError, match="not from this store"):
            second.prepare()
    assert Lake(str(tmp_path / "lake")).state.source == first.source


def test_queues_are_chosen_for_a_known_lake_without_its_store(orders: Shop, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    make_without_spark(orders, lake).prepare()
    for queues in (("a",), ("a", "b")):
        made = Pipeline(cast("Any", None), str(lake), queues=queues, partitions=1)
        made.prepare()
        source = Lake(str(lake)).state.source
        assert source is not None
        assert (source.url, source.queues) == (orders.url, queues)


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
def test_one_id_in_two_queues_or_published_again_is_several_messages_wherever_the_history_is_cut(
    orders: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    sent = []
    for queue, after in (("a", None), ("b", 3600)):
        sent.append(orders.post.publish(queue, 1, delay=0.01).id)
        with orders.post.receive(queue, wait=20) as message:
            assert message is not None
            message.retry(after=0.01)
        with orders.post.receive(queue, wait=20) as message:
            assert message is not None
            if after is not None:
                message.retry(after=after)
    count = plant(orders, "UPDATE wp_journal SET message_id = ? WHERE message_id = ?", *sent)
    names = [event.event for event in orders.events("a")]
    assert names == ["published", "promoted", "claimed", "retried", "promoted", "claimed", "done"]
    assert count == len(names)
    again = []
    for turn in range(3):
        again.append(orders.post.publish("c", turn).id)
        if turn < 2:
            with orders.post.receive("c", wait=20) as message:
                assert message is not None
    plant(orders, "UPDATE wp_journal SET message_id = ? WHERE message_id IN (?, ?)", again[0], *again[1:])
    assert [event.event for event in orders.events("c")] == ["published", "claimed", "done"] * 2 + ["published"]

    def read(made: Pipeline) -> list[Any]:
        return [rows(made, table) for table in (SILVER_MESSAGES, SILVER_DELIVERIES, GOLD_MINUTES)]

    whole = pipeline(orders, "whole")
    whole.run()
    wanted = read(whole)
    assert [(row["queue"], row["state"], row["claimed"]) for row in wanted[0]] == [
        ("a", "done", 2),
        ("b", "delayed", 2),
        ("c", "done", 1),
        ("c", "done", 1),
        ("c", "ready", 0),
    ]
    assert [row["late_ms"] is not None for row in wanted[1]] == [True] * 4 + [False] * 2
    assert [(row["claims"], row["ends"]) for row in wanted[1]] == [(1, 1)] * 6
    for cut in range(1, count):
        made = pipeline(orders, f"cut at {cut}")
        made.prepare()
        with orders.bulk() as bulk:
            made._step(bulk, {"a": cut, "b": count - cut, "c": cut})
        made.run()
        assert read(made) == wanted, cut


@pytest.mark.promise("SPARK-4")
def test_rows_of_earlier_batches_are_found_by_queue_id_and_claim() -> None:
    def events(*rows: tuple[str, str, str, str | None, int | None, int | None]) -> Any:
        columns = ("queue", "event", "message_id", "cause", "run_ms", "claims")
        schema = BRONZE_JOURNAL.arrow(columns)
        return pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows], schema=schema)

    def found(ids: Any) -> list[tuple[str, str]]:
        return [(row["queue"], row["message_id"]) for row in ids.to_pylist()]

    done, published = ("a", "done", "x", None, 5, 1), ("b", "published", "x", None, None, 0)
    assert found(silver.ids_of_earlier_messages(events(done, published))) == [("a", "x")]
    assert found(silver.ids_of_earlier_messages(events(done, ("a", *published[1:])))) == []
    claimed, retried = ("a", "claimed", "x", None, None, 1), ("a", "retried", "x", None, 5, 1)
    before, after = ("a", "promoted", "x", "due", None, 0), ("a", "promoted", "x", "due", None, 1)
    for given, is_earlier in (
        ((claimed,), True),
        ((published, claimed), True),
        ((("a", *published[1:]), claimed, retried), False),
        ((before, claimed, retried, after), False),
        ((("b", *before[1:]), claimed), True),
        # Promoted again in the batch of its claim: the timer of that claim is in an earlier batch.
        ((claimed, retried, after), True),
        ((retried,), True),
        ((("b", *claimed[1:]), retried, after), True),
    ):
        ids = found(silver.ids_of_earlier_deliveries(events(*given)))
        assert (("a", "x") in ids) is is_earlier, given


@pytest.mark.promise("SPARK-4")
def test_an_id_that_is_published_again_after_its_end_begins_a_life() -> None:
    def events(*rows: tuple[str, str | None, str, int]) -> Any:
        columns = ("queue", "message_id", "event", "number")
        schema = BRONZE_JOURNAL.arrow(columns)
        return pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows], schema=schema)

    published, done = ("a", "x", "published", 1), ("a", "x", "done", 2)
    again, over, third = ("a", "x", "published", 3), ("a", "x", "dead_trimmed", 4), ("a", "x", "published", 9)
    for given, begins in (
        ((), {}),
        ((("a", None, "configured", 1),), {}),
        ((published, done, ("b", "x", "published", 3)), {}),
        ((done, again), {("a", "x"): [3]}),
        ((again, done), {("a", "x"): [3]}),
        ((published, done, again, over, third), {("a", "x"): [3, 9]}),
        # Two ends, and two publications without an end in between: the audit reports these.
        ((published, done, over), {}),
        ((done, again, ("a", "x", "published", 4)), {("a", "x"): [3]}),
    ):
        assert silver.find_lives(events(*given)) == begins, given


@pytest.mark.promise("SPARK-4")
def test_tables_are_the_same_if_tasks_write_them(
    orders: Shop, pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few events are written by the driver; here tasks write all of them, and a compaction too."""
    small = pipeline(orders, "small")
    live(orders, 30)
    with monkeypatch.context() as large:
        for module in (journal, pipelines, compaction):
            for name in ("DRIVER_EVENTS_MAX", "DRIVER_ROWS_MAX"):
                if hasattr(module, name):
                    large.setattr(module, name, 0)
        made = pipeline(orders, "a large lake")
        made.run()
        live(orders, 20)
        made.run()
        made.tidy()
    small.run()
    assert tables(made) == tables(small)
    assert made.lake.state.seen == small.lake.state.seen
    assert made.lake.files.walk("_manifests") == {}


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
        entries_to_rows(file, Spelling(orders.namespace))
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
    made = pipeline(orders, queues=("orders", "mails:eu"), reader="lake")
    made.run()
    assert {row["queue"] for row in rows(made, SILVER_MESSAGES)} == {"orders", "mails:eu"}
    assert {row["queue"] for row in rows(made, GOLD_MINUTES)} == {"orders", "mails:eu"}
    # A registered reader records what it has read; trimming waits for no more than that.
    with orders.bulk() as bulk:
        orders.post.publish("orders", 2)
        assert bulk.run(bulk.store.journal_trim("orders", 2)) == 2


@pytest.mark.promise("SPARK-9")
def test_all_tables_of_a_small_batch_are_written_in_the_job_group_of_the_run(
    orders: Shop, pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, write = pipeline(orders), Pipeline._write
    context, groups = made.spark.sparkContext, set[tuple[str | None, bool]]()

    def note_group(self: Pipeline, *given: Any) -> Any:
        group = context.getLocalProperty("spark.jobGroup.id")
        groups.add((group, threading.current_thread() is threading.main_thread()))
        return write(self, *given)

    monkeypatch.setattr(Pipeline, "_write", note_group)
    orders.post.publish("orders", 1)
    context.setJobGroup("one run", "", interruptOnCancel=True)
    try:
        made.run()
    finally:
        context.setLocalProperty("spark.jobGroup.id", cast("Any", None))
    assert groups == {("one run", True), ("one run", False)}


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
    """A reader sees one step or the next, also while files of a day are replaced."""
    lake = Lake(str(tmp_path / "lake"))
    lake.create()
    schema = GOLD_DEAD_LETTERS.arrow(GOLD_DEAD_LETTERS.columns)
    minute = datetime(2026, 3, 1, tzinfo=UTC)

    def replace(count: int) -> None:
        found = [{"queue": "orders", "minute": minute, "reason": f"reason {n}", "count": n} for n in range(count)]
        change = replace_days(lake, GOLD_DEAD_LETTERS, pa.Table.from_pylist(found, schema=schema), ["2026-03-01"])
        lake.commit("run", {GOLD_DEAD_LETTERS.name: change}, lake.state)

    replace(1)
    reader = Lake(str(tmp_path / "lake"))
    assert reader.rows(GOLD_DEAD_LETTERS).num_rows == 1
    replace(500)
    assert reader.rows(GOLD_DEAD_LETTERS).num_rows == 1
    reader.refresh()
    assert reader.rows(GOLD_DEAD_LETTERS).num_rows == 500
    stop = threading.Event()

    def keep_replacing() -> None:
        while not stop.is_set():
            for count in (1, 500):
                replace(count)

    with ThreadPoolExecutor(1) as beside:
        replacing = beside.submit(keep_replacing)
        try:
            seen = set()
            for _ in range(20):
                reader.refresh()
                seen.add(reader.rows(GOLD_DEAD_LETTERS).num_rows)
        finally:
            stop.set()
        replacing.result()
    assert seen <= {1, 500}


def test_a_lake_is_of_one_store(orders: Shop, pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    orders.post.publish_many("orders", [1, 2])
    made = pipeline(orders)
    made.run()
    with Shop(f"sqlite:///{tmp_path}/other.db", "wp") as other:
        with pytest.raises(ConfigurationError, match=r"was made from .*orders\.db"):
            pipeline(other)
        assert pipeline(other, moved=True).source.url == other.url
        other.post.publish("orders", 1)
        with pytest.raises(StoreError, match="has read up to event 2, and the newest in the journal is 1"):
            pipeline(other, moved=True).run()
    with pytest.raises(ConfigurationError, match="holds a password"):
        Pipeline(made.spark, str(tmp_path / "third"), store="valkey://:secret@127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="is new: give its store"):
        Pipeline(made.spark, str(tmp_path / "fourth"))
    written = [path.read_bytes() for path in (tmp_path / "a lake").rglob("*") if path.is_file()]
    assert not any(b"secret" in content for content in written)


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


@pytest.mark.promise("STORE-7", "SPARK-4")
def test_columns_that_a_later_release_added_to_a_lake_are_passed_over(
    postgres_shop: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    shop = postgres_shop
    shop.post.publish_many("orders", range(3))
    made = pipeline(shop)
    made.run()
    for table in (BRONZE_JOURNAL, SILVER_MESSAGES, SILVER_DELIVERIES, GOLD_MINUTES):
        made.lake.steps.folder(table.name).add_columns({"planted": pa.string()})
    with shop.post.receive("orders") as message:
        assert message is not None
    shop.post.publish_many("orders", range(2))
    made = pipeline(shop)
    made.run()
    assert sorted(row["number"] for row in rows(made, BRONZE_JOURNAL)) == list(range(1, 8))
    assert len(rows(made, SILVER_MESSAGES)) == totals(made)["published"] == 5


def test_an_unknown_state_is_refused(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "a lake"))
    lake.create()
    for state, message in (('{"layout": 99}', "made by a newer release"), ("{}", "has no state of a lake")):
        newest = lake.steps.newest()
        lake.steps.commit(0 if newest is None else newest.number, "run", state, {}, {})
        with pytest.raises(StoreError, match=message):
            Lake(str(tmp_path / "a lake"))
    old = tmp_path / "old" / "_state" / "pipeline.json"
    old.parent.mkdir(parents=True)
    old.write_text("{}")
    with pytest.raises(StoreError, match=r"release 0\.1 .* pipeline upgrade --lake"):
        Lake(str(tmp_path / "old"))
    with pytest.raises(ConfigurationError, match="'orc' is not supported"):
        Lake(str(tmp_path / "new"), format="orc")
    with pytest.raises(ConfigurationError, match="has a % in its path"):
        Lake(str(tmp_path / "a%20b"))


@pytest.mark.parametrize("value", [0, 1, 2, 7, 999, 10**9])
def test_a_bucket_stands_for_its_values_within_half_a_percent(value: int) -> None:
    assert abs(value_of(bucket_of(value)) - value) <= 0.005 * value


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile({}, 0.5) is None
    assert percentile({-1: 3, 0: 1}, 0.5) == 0
    with pytest.raises(ValueError, match="share from 0 to 1"):
        percentile({}, 99)


@pytest.mark.promise("SPARK-4")
def test_a_filter_finds_the_same_rows_in_every_reader_by_every_column(
    orders: Shop, pipeline: Callable[..., Pipeline]
) -> None:
    """Readers skip files by their statistics: none may hide a row."""
    made = pipeline(orders, "lake")
    for _ in range(3):
        live(orders, 12)
        made.run()
    lake = made.lake
    for table in TABLES:
        whole = lake.rows(table)
        by_polars = polars.scan_delta(lake.files.path(table.name))
        with duckdb.connect() as connection:
            connection.register("rows", DeltaTable(lake.files.path(table.name)).to_pyarrow_dataset())
            for column in table.columns:
                found = sorted({value for value in whole.column(column).to_pylist() if value is not None})
                for value in found[:1] + found[-1:]:
                    wanted = whole.filter(pc.field(column) == value).num_rows
                    assert lake.arrow(table, [column], pc.field(column) == value).num_rows == wanted > 0
                    assert by_polars.filter(polars.col(column) == value).collect().height == wanted
                    counted = connection.execute(f'SELECT count(*) FROM rows WHERE "{column}" = ?', [value]).fetchone()
                    assert counted == (wanted,)
                    if column in table.statistics:
                        assert lake.frame(made.spark, table).where(f.col(column) == value).count() == wanted
                missing = whole.filter(pc.field(column).is_null()).num_rows
                assert by_polars.filter(polars.col(column).is_null()).collect().height == missing
