"""Bulk reads return exactly what the store's own verbs return, whole or in parts."""

from __future__ import annotations

import itertools
from typing import Any

import psycopg
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tests.spark.shop import Shop, as_rows, rows_of, stored_rows
from waypost.spark.source.options import read_options
from waypost.spark.source.reader import Reader
from waypost.store.bulk.reader import PageSize
from waypost.store.bulk.tables import JOURNAL, MESSAGES, SCHEDULES
from waypost.testing.postgres import PostgresServer
from waypost.values import MessageState, StoredSchedule

pytestmark = pytest.mark.xdist_group("spark")
ALL = list(JOURNAL.columns)


@pytest.mark.promise("SPARK-1")
def test_the_journal_in_bulk_is_the_journal_event_by_event(shop: Shop) -> None:
    shop.fill()
    events = shop.events()
    kinds = {event.event for event in events}
    assert {"published", "duplicate", "claimed", "done", "dead", "retried", "configured"} <= kinds
    with shop.bulk() as bulk:
        first, newest = bulk.bounds("orders")
        assert (first, newest) == (1, len(events))
        assert as_rows(list(bulk.journal("orders", 0, newest, ALL)), "number") == rows_of(events)


@pytest.mark.promise("SPARK-1")
def test_a_journal_cut_anywhere_loses_no_event_and_repeats_none(shop: Shop) -> None:
    shop.fill(80)
    with shop.bulk() as bulk:
        _, newest = bulk.bounds("orders")
        cuts = sorted({0, 1, 2, 79, 80, 81, newest // 2, newest - 1, newest})
        numbers = [
            number
            for after, to in itertools.pairwise(cuts)
            for batch in bulk.journal("orders", after, to, ["number"])
            for number in batch.column("number").to_pylist()
        ]
        assert sorted(numbers) == list(range(1, newest + 1))


def test_only_the_columns_of_the_schema_are_read(shop: Shop) -> None:
    shop.fill(20)
    with shop.bulk() as bulk:
        _, newest = bulk.bounds("orders")
        for columns in (["event"], ["queue"], ["text", "number"], ["worker", "key"]):
            batches = list(bulk.journal("orders", 0, newest, columns))
            assert {tuple(batch.schema.names) for batch in batches} == {tuple(columns)}
            assert sum(batch.num_rows for batch in batches) == newest


@pytest.mark.promise("SPARK-1")
@pytest.mark.parametrize("state", ["ready", "delayed", "leased", "dead"])
def test_messages_in_bulk_are_those_of_a_listing(shop: Shop, state: MessageState) -> None:
    shop.fill()
    with shop.bulk() as bulk:
        for parts in (1, 3):
            spans = bulk.spans("orders", state, parts)
            batches = [batch for span in spans for batch in bulk.messages(span, list(MESSAGES.columns))]
            rows = as_rows(batches, "id")
            assert len(spans) <= parts
            assert rows == stored_rows("orders", shop.stored(state))
            assert rows


def test_bodies_are_bytes_and_text_where_they_are_text(shop: Shop) -> None:
    shop.fill(10)
    with shop.bulk() as bulk:
        rows = [
            row
            for span in bulk.spans("orders", "ready", 1)
            for batch in bulk.messages(span, ["body", "text", "content_type", "headers"])
            for row in batch.to_pylist()
        ]
    by_type = {row["content_type"]: row for row in rows if row["body"] != b"text"}
    assert by_type["application/octet-stream"]["body"] == b"\xff\x00\xfe"
    assert by_type["application/octet-stream"]["text"] is None
    assert any(row["text"] == '{"seen":"ja — 見た"}' and row["headers"] == [("a", "ä")] for row in rows)
    assert any(len(row["body"]) == 1 << 20 and row["text"] == "x" * (1 << 20) for row in rows)


def test_an_unused_queue_has_no_rows(shop: Shop) -> None:
    with shop.bulk() as bulk:
        assert bulk.bounds("unused") == (1, 0)
        assert list(bulk.journal("unused", 0, 5, ALL)) == []
        for span in bulk.spans("unused", "ready", 4):
            assert list(bulk.messages(span, ["id"])) == []


def test_the_first_event_since_a_time_is_found(shop: Shop) -> None:
    shop.fill(50)
    events = shop.events()
    with shop.bulk() as bulk:
        assert bulk.first_since("orders", 0) == 1
        assert bulk.first_since("orders", events[-1].at_ms + 1) == len(events) + 1
        wanted = events[len(events) // 2].at_ms
        assert bulk.first_since("orders", wanted) == next(e.number for e in events if e.at_ms >= wanted)


@pytest.mark.promise("SPARK-1")
def test_a_transaction_that_commits_late_is_not_missed(postgres: PostgresServer, shop: Shop) -> None:
    if not shop.url.startswith("postgres"):
        shop.post.publish("orders", 1)
        with shop.bulk() as bulk:
            assert bulk.bounds("orders") == (1, 1)  # one writer at a time: nothing can commit late
        return
    shop.post.publish("orders", "first")
    with psycopg.connect(shop.url) as late, shop.bulk() as bulk:
        # It has a transaction id before the next publish, and commits after it.
        late.execute("SELECT pg_current_xact_id()")
        shop.post.publish("orders", "second")
        assert bulk.bounds("orders")[1] == 1
        late.commit()
        assert bulk.bounds("orders")[1] == 2
        rows = as_rows(list(bulk.journal("orders", 0, 2, ["number", "event"])), "number")
        assert [row["number"] for row in rows] == [1, 2]


@pytest.mark.promise("SPARK-1")
def test_schedules_are_a_table_on_every_store(shop: Shop) -> None:
    schema = StructType([StructField("key", StringType()), StructField("fires", LongType())])
    reader = Reader(read_options({**shop.options, "kind": "schedules", "queue": "reports,unused"}), schema)

    def rows() -> list[dict[str, Any]]:
        return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]

    assert rows() == []
    saved = [
        StoredSchedule("daily", "v1", b"\x00\xffrule", False, 1_900_000_000_000, 1_900_000_000_250, 3, 1, 5),
        StoredSchedule("über", "v2", b"other", True, None, None),
    ]
    with shop.bulk() as bulk:
        for schedule in saved:
            bulk.run(bulk.store.save_schedule("reports", schedule, version=None, next_ms=None))
        (batch,) = bulk.schedules("reports", list(SCHEDULES.columns))
        listed = bulk.run(bulk.store.schedules("reports")).schedules
    assert batch.to_pylist() == [
        {name: "reports" if name == "queue" else getattr(schedule, name) for name in SCHEDULES.columns}
        for schedule in listed
    ]
    assert [(one.key, one.paused, one.spec) for one in listed] == [(one.key, one.paused, one.spec) for one in saved]
    assert rows() == [{"key": one.key, "fires": one.fires} for one in listed]


def test_pages_hold_many_small_rows_or_few_large_ones() -> None:
    page = PageSize(16, 1000, 1_000_000)
    for _ in range(5):
        page.learn(page.rows, page.rows * 100)
    assert page.rows == 1000
    page.learn(page.rows, page.rows * 1_000_000)
    assert page.rows == 1
    page.learn(0, 0)
    page.learn(1, 2_000_000)
    assert page.rows == 1


@pytest.mark.promise("SPARK-4")
def test_the_end_of_a_journal_is_found_while_events_come_as_fast_as_it_is_read(
    orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.post.publish("orders", 0)
    with orders.bulk() as bulk:
        run, calls = bulk.run, itertools.count(1)

        def read_and_publish(call: Any) -> Any:
            assert next(calls) < 100, "the end is read again and again"
            orders.post.publish("orders", 1)
            return run(call)

        monkeypatch.setattr(bulk, "run", read_and_publish)
        first, newest = bulk.bounds("orders")
    assert (first, newest) == (1, len(orders.events()))
