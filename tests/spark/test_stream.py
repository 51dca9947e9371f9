"""Offsets of a stream: exact, limited, and an error where events are gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as some
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tests.spark.shop import Shop
from waypost.errors import ConfigurationError, JournalTrimmed, StoreError
from waypost.spark.source.options import read_options
from waypost.spark.source.partitions import EventRange, Partition, check_machine, split_ranges, this_machine
from waypost.spark.source.reader import Reader
from waypost.spark.source.stream import StreamReader, admit

pytestmark = pytest.mark.xdist_group("spark")
SCHEMA = StructType([StructField("queue", StringType()), StructField("number", LongType())])


@pytest.fixture
def stream(shop: Shop) -> Iterator[Any]:
    """Make readers of the shop's journal, and close them."""
    made: list[StreamReader] = []

    def make(**options: str) -> StreamReader:
        made.append(StreamReader(read_options({**shop.options, **options}), SCHEMA))
        return made[-1]

    yield make
    for reader in made:
        reader.stop()


def rows(reader: StreamReader | Reader, parts: Any) -> list[tuple[str, int]]:
    return sorted(
        (row["queue"], row["number"]) for part in parts for batch in reader.read(part) for row in batch.to_pylist()
    )


@pytest.mark.promise("SPARK-1")
def test_batches_follow_each_other_without_gap_and_the_same_offsets_give_the_same_rows(shop: Shop, stream: Any) -> None:
    shop.post.publish_many("orders", range(50))
    shop.post.publish_many("mails", range(5))
    reader = stream(maxRowsPerBatch="20")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(20)
    start, seen = reader.initialOffset(), []
    assert start == {"orders": 0, "mails": 0}
    while (end := reader.latestOffset(start, limit)) != start:
        batch = rows(reader, reader.partitions(start, end))
        assert len(batch) <= 20
        assert batch == rows(reader, reader.partitions(start, end))
        seen += batch
        start = end
    assert sorted(seen) == sorted([("orders", n + 1) for n in range(50)] + [("mails", n + 1) for n in range(5)])
    assert reader.partitions(start, start) == []


def test_a_run_for_available_events_ends_however_fast_new_ones_come(shop: Shop, stream: Any) -> None:
    shop.post.publish_many("orders", range(10))
    reader = stream()
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    shop.post.publish_many("orders", range(10))
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end == {"orders": 10}
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_a_stream_begins_at_its_starting_offsets(shop: Shop, stream: Any) -> None:
    shop.post.publish_many("orders", range(3))
    event = shop.events()[-1]
    assert stream(startingOffsets="latest").initialOffset() == {"orders": 3}
    assert stream(startingOffsets="2020-01-01T00:00:00Z").initialOffset() == {"orders": 0}
    assert stream(startingOffsets="2100-01-01T00:00:00+02:00").initialOffset() == {"orders": 3}
    assert event.number == 3


def test_a_queue_that_comes_later_is_read_from_its_first_event(shop: Shop, stream: Any) -> None:
    shop.post.publish("orders", 1)
    reader = stream(startingOffsets="latest")
    start = reader.initialOffset()
    shop.post.publish_many("late", range(4))
    end = reader.latestOffset(start, ReadAllAvailable())
    assert rows(reader, reader.partitions(start, end)) == [("late", n) for n in (1, 2, 3, 4)]


@pytest.mark.promise("SPARK-1")
def test_a_journal_trimmed_past_the_offset_is_an_error_unless_data_loss_is_allowed(shop: Shop, stream: Any) -> None:
    shop.post.publish_many("orders", range(30))
    reader = stream(queue="orders")
    start = reader.initialOffset()
    planned = reader.partitions(start, {"orders": 30})
    with shop.bulk() as bulk:
        bulk.run(bulk.store.journal_trim("orders", 12))
    end = reader.latestOffset(start, ReadAllAvailable())
    with pytest.raises(JournalTrimmed, match=r"events 1 to 12 are gone.*failOnDataLoss"):
        reader.partitions(start, end)
    with pytest.raises(JournalTrimmed, match="events 1 to 12 are gone"):
        rows(reader, planned)
    careless = stream(queue="orders", failOnDataLoss="false")
    assert rows(careless, careless.partitions(start, end)) == [("orders", n) for n in range(13, 31)]
    assert rows(careless, planned) == [("orders", n) for n in range(13, 31)]


def empty_and_remove(shop: Shop, queue: str) -> None:
    shop.post.purge(queue)
    assert shop.post.remove_queue(queue)


@pytest.mark.promise("SPARK-1", "QUEUE-8")
@pytest.mark.parametrize("follows", ["one", "all"])
def test_a_removed_queue_with_unread_events_is_an_error_unless_data_loss_is_allowed(
    shop: Shop, stream: Any, follows: str, caplog: pytest.LogCaptureFixture
) -> None:
    shop.post.publish("mails", 1)
    shop.post.publish_many("orders", range(30))
    options = {"queue": "orders"} if follows == "one" else {}
    reader, careless = stream(**options), stream(**options, failOnDataLoss="false")
    start = reader.initialOffset()
    planned = reader.partitions({"orders": 10}, {"orders": 30})
    empty_and_remove(shop, "orders")
    expected = r"queue orders was removed, and its journal with it: events 11 to .* are gone\. .*failOnDataLoss"
    with pytest.raises(JournalTrimmed, match=expected):
        rows(reader, planned)
    start["orders"] = 10
    with pytest.raises(JournalTrimmed, match=expected):
        reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    caplog.clear()
    for _ in range(2):
        end = careless.latestOffset(start, ReadAllAvailable())
        assert [row for row in rows(careless, careless.partitions(start, end)) if row[0] == "orders"] == []
        start = end
    logged = [vars(record).get("event") for record in caplog.records]
    assert logged == ["queue_removed"]


@pytest.mark.promise("SPARK-1", "QUEUE-8")
@pytest.mark.parametrize("follows", ["one", "all"])
def test_a_stream_that_has_read_all_of_a_removed_queue_goes_on_with_the_next_one(
    shop: Shop, stream: Any, follows: str
) -> None:
    shop.post.publish_many("orders", range(30))
    shop.post.purge("orders")
    reader = stream(queue="orders") if follows == "one" else stream()
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    empty_and_remove(shop, "orders")
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    shop.post.publish_many("orders", range(2))
    end = reader.latestOffset(start, ReadAllAvailable())
    last = start["orders"]
    assert rows(reader, reader.partitions(start, end)) == [("orders", last + 1), ("orders", last + 2)]


@pytest.mark.promise("SPARK-1")
def test_a_registered_reader_keeps_what_the_query_has_not_read(shop: Shop, stream: Any) -> None:
    shop.post.publish_many("orders", range(10))
    reader = stream(reader="lake", queue="orders")
    start = reader.initialOffset()
    with shop.bulk() as bulk:
        assert bulk.run(bulk.store.journal_trim("orders", 10)) == 1
        reader.commit({"orders": 4})
        assert bulk.run(bulk.store.journal_trim("orders", 10)) == 5
    assert start == {"orders": 0}


@pytest.mark.promise("SPARK-1")
@pytest.mark.parametrize("follows", ["all", "two"])
def test_a_registered_query_does_not_create_a_removed_queue_again(shop: Shop, stream: Any, follows: str) -> None:
    shop.post.publish("orders", 1)
    shop.post.publish("mails", 1)
    shop.post.purge("orders")
    reader = stream(reader="lake", **({"queue": "orders,mails"} if follows == "two" else {}))
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.commit(end)
    shop.post.journal_forget("orders", "lake")
    empty_and_remove(shop, "orders")
    reader.commit(end)
    with shop.bulk() as bulk:
        assert bulk.run(bulk.store.queues()) == ["mails"]


@pytest.mark.promise("SPARK-2")
def test_published_messages_are_followed_with_their_bodies_and_nothing_is_consumed(shop: Shop) -> None:
    shop.post.configure("orders", journal="full")
    shop.post.publish_many("orders", [{"n": n} for n in range(5)], key=lambda body: f"k{body['n']}", group="g")
    shop.post.publish("orders", {"n": 0}, key="k0")
    with shop.post.receive("orders", wait=5) as message:
        assert message is not None
    schema = StructType([StructField(name, StringType()) for name in ("id", "key", "text", "group")])
    reader = StreamReader(read_options({**shop.options, "kind": "messages", "queue": "orders"}), schema)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    found = [row for part in reader.partitions(start, end) for batch in reader.read(part) for row in batch.to_pylist()]
    reader.stop()
    assert [(row["key"], row["text"], row["group"]) for row in found] == [
        (f"k{n}", f'{{"n":{n}}}', "g") for n in range(5)
    ]
    assert shop.post.ledger("orders").ready == 4


@pytest.mark.promise("SPARK-2")
def test_a_message_whose_body_was_not_journalled_is_an_error_unless_data_loss_is_allowed(shop: Shop) -> None:
    shop.post.publish("orders", "before")
    shop.post.configure("orders", journal="full")
    shop.post.publish("orders", "after")
    schema = StructType([StructField("text", StringType())])
    options = {**shop.options, "kind": "messages", "queue": "orders"}
    careful, careless = (
        Reader(read_options({**options, "failOnDataLoss": flag}), schema) for flag in ("true", "false")
    )
    with pytest.raises(JournalTrimmed, match="event 1 is of a message whose body was not journalled"):
        rows(careful, careful.partitions())
    texts = [row["text"] for part in careless.partitions() for b in careless.read(part) for row in b.to_pylist()]
    assert sorted(texts, key=str) == [None, "after"]


def test_a_checkpoint_of_another_store_is_noticed(shop: Shop, stream: Any) -> None:
    shop.post.publish("orders", 1)
    with pytest.raises(StoreError, match="another store than before"):
        stream().latestOffset({"orders": 99}, ReadAllAvailable())


def test_the_messages_of_a_queue_cannot_be_streamed(shop: Shop, stream: Any) -> None:
    with pytest.raises(ConfigurationError, match="kind messages can be read as a stream"):
        stream(kind="ready")


@given(
    some.dictionaries(some.sampled_from("abcd"), some.integers(0, 50)),
    some.dictionaries(some.sampled_from("abcd"), some.integers(0, 50)),
    some.integers(1, 60),
)
def test_a_limit_is_kept_and_nothing_starves(start: dict[str, int], newest: dict[str, int], limit: int) -> None:
    end = admit(start, newest, limit)
    read = {queue: end[queue] - start.get(queue, 0) for queue in end}
    waiting = {queue: max(0, newest.get(queue, 0) - start.get(queue, 0)) for queue in end}
    assert all(0 <= read[queue] <= waiting[queue] for queue in end)
    assert sum(read.values()) == min(limit, sum(waiting.values()))
    if limit >= len(waiting):
        assert all(read[queue] > 0 for queue in end if waiting[queue])


@given(
    some.lists(some.tuples(some.integers(0, 100), some.integers(0, 300)), max_size=6),
    some.integers(1, 9),
    some.integers(1, 50),
)
def test_partitions_hold_everything_once_and_are_at_most_as_many_as_configured(
    ranges: list[tuple[int, int]], parts: int, rows_min: int
) -> None:
    work = [EventRange(str(index), after, after + count) for index, (after, count) in enumerate(ranges)]
    made = split_ranges(work, parts, rows_min)
    wanted = {(numbers.queue, n) for numbers in work for n in range(numbers.after, numbers.to)}
    held = [(numbers.queue, n) for part in made for numbers in part for n in range(numbers.after, numbers.to)]
    assert len(made) <= parts
    assert sorted(held) == sorted(wanted)


def test_a_sqlite_file_is_read_on_its_own_machine_only(tmp_path: Any) -> None:
    with Shop(f"sqlite:///{tmp_path}/one.db", "wp") as shop:
        shop.post.publish("orders", 1)
        reader = Reader(read_options(shop.options), SCHEMA)
        part = cast("Partition", reader.partitions()[0])
        assert part.machine == this_machine()
        part.machine = "elsewhere 5f"
        with pytest.raises(ConfigurationError, match="a file on elsewhere"):
            list(reader.read(part))
        check_machine(None)


def test_a_read_without_any_part_has_no_rows(shop: Shop) -> None:
    reader = Reader(read_options({**shop.options, "queue": "unused"}), SCHEMA)
    assert reader.partitions() == []
    # Spark then still runs one task, with a part that is not ours.
    assert list(reader.read(None)) == []
    assert list(reader.read(InputPartition(None))) == []
