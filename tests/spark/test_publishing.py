"""Bulk publish: a row is one message, however often its task runs."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as some
from pyspark.sql.types import (
    ArrayType,
    DoubleType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    YearMonthIntervalType,
)

from tests.spark.shop import Shop
from waypost import Constant, Exponential, NoRetry, Waypost
from waypost.codec import open_envelope
from waypost.errors import ConfigurationError, InvalidBody, InvalidInput, QueueFull, StoreUnavailable
from waypost.identity import is_message_id
from waypost.operations.waves import Wave
from waypost.policy import CHUNK_MESSAGES_MAX, Overload
from waypost.spark.source import publishing
from waypost.spark.source.options import WriteOptions, write_options
from waypost.spark.source.publishing import RowIds, Rows, chunks
from waypost.spark.source.writer import BatchWriter, Written, check_columns
from waypost.store.port import Draft

pytestmark = pytest.mark.xdist_group("spark")
BODY = StructType([StructField("body", StringType())])
STRUCT = StructType().add(
    "body", StructType().add("id", "long").add("tags", ArrayType(StringType())).add("none", "void")
)


def options_of(shop: Shop, **more: str) -> WriteOptions:
    return write_options({**shop.options, "queue": "out", **more})


def writer_of(shop: Shop, schema: StructType = BODY, **more: str) -> BatchWriter:
    return BatchWriter(options_of(shop, **more), schema)


def batches(count: int, size: int = 400, **columns: Any) -> Iterator[pa.RecordBatch]:
    for start in range(0, count, size):
        numbers = range(start, min(count, start + size))
        made: dict[str, Any] = {"body": [f"row {number}" for number in numbers]}
        made |= {name: [make(number) for number in numbers] for name, make in columns.items()}
        if "headers" in made:
            made["headers"] = pa.array(made["headers"], pa.map_(pa.string(), pa.string()))
        yield pa.RecordBatch.from_pydict(made)


@pytest.mark.promise("SPARK-1")
def test_two_attempts_of_one_partition_at_once_publish_every_row_once(shop: Shop) -> None:
    writer = writer_of(shop)
    ids = [RowIds(writer.write_id, 0, writer.made_ms) for _ in range(2)]
    start = threading.Barrier(2, timeout=30)
    written: list[Written] = []

    def attempt(index: int) -> None:
        start.wait()
        written.append(writer.publish(batches(3000), ids[index]))

    threads = [threading.Thread(target=attempt, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(written) == 2
    assert sum(one.counts.get("queued", 0) for one in written) == 3000
    assert sum(one.counts.get("duplicate", 0) for one in written) == 3000
    assert shop.post.ledger("out").published == 3000


@pytest.mark.promise("SPARK-1")
def test_an_attempt_that_fails_half_way_is_completed_by_the_next(shop: Shop) -> None:
    writer = writer_of(shop)

    def failing() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches(12_000)):
            if number == 20:
                raise OSError("the executor is gone")
            yield batch

    with pytest.raises(OSError, match="the executor is gone"):
        writer.publish(failing(), RowIds(writer.write_id, 3, writer.made_ms))
    assert 0 < shop.post.ledger("out").published < 12_000
    writer.publish(batches(12_000), RowIds(writer.write_id, 3, writer.made_ms))
    assert shop.post.ledger("out").published == 12_000


def test_a_row_that_was_handled_meanwhile_is_not_published_again(shop: Shop) -> None:
    writer = writer_of(shop, writeId="import")
    writer.publish(batches(5), RowIds(writer.write_id, 0))
    for _ in range(5):
        with shop.post.receive("out", wait=5) as message:
            assert message is not None
    again = writer_of(shop, writeId="import")
    assert again.publish(batches(5), RowIds(again.write_id, 0)).counts == {"duplicate": 5}
    assert shop.post.ledger("out").done == 5


def test_two_writes_without_a_name_are_two_writes(shop: Shop) -> None:
    for _ in range(2):
        writer = writer_of(shop)
        writer.publish(batches(10), RowIds(writer.write_id, 0, writer.made_ms))
    assert shop.post.ledger("out").published == 20


@pytest.mark.promise("SPARK-1")
def test_columns_set_how_each_row_is_published(shop: Shop) -> None:
    due = datetime.now(UTC) + timedelta(days=2)
    writer = writer_of(shop)
    writer.publish(
        batches(
            6,
            key=lambda n: f"k{n}" if n else None,
            delay=lambda n: 60.5 if n == 1 else None,
            due=lambda n: due if n == 2 else None,
            priority=lambda n: n,
            group=lambda n: "g" if n == 3 else None,
            headers=lambda n: [("h", "ü")] if n == 4 else None,
        ),
        RowIds(writer.write_id, 0, writer.made_ms),
    )
    messages = {message.key: message for state in ("ready", "delayed") for message in shop.stored(state, "out")}
    assert set(messages) == {None, "k1", "k2", "k3", "k4", "k5"}
    assert {message.priority for message in messages.values()} == set(range(6))
    assert messages["k2"].ready_ms == round(due.timestamp() * 1000)
    assert messages["k1"].ready_ms - messages["k1"].published_ms == 60_500
    assert messages["k3"].group == "g"
    assert messages["k4"].envelope.endswith(b"row 4")
    assert "ü".encode() in messages["k4"].envelope


@pytest.mark.promise("SPARK-1", "PUB-10")
def test_a_column_sets_when_a_row_lapses(shop: Shop) -> None:
    moment = datetime.now(UTC) + timedelta(days=2)
    for value in (moment, 250.5, None):
        writer = writer_of(shop)
        rows = batches(1, expires=lambda n, value=value: value)
        writer.publish(rows, RowIds(writer.write_id, 0, writer.made_ms))
    by_moment, by_seconds, kept = shop.stored("ready", "out")
    assert by_moment.expires_ms == round(moment.timestamp() * 1000)
    assert by_seconds.expires_ms == by_seconds.published_ms + 250_500
    assert kept.expires_ms is None


@pytest.mark.promise("SPARK-1", "PUB-12")
def test_columns_set_the_retry_policy_and_the_time_limit_of_a_row(shop: Shop) -> None:
    writer = writer_of(shop)
    policies = ["exponential:attempts=3,first=2", "none", None, "constant"]
    limits = [Decimal("1.5"), None, Decimal(7200), Decimal(30)]
    rows = batches(4, retry=lambda n: policies[n], timeout=lambda n: limits[n], headers=lambda n: [("row", str(n))])
    writer.publish(rows, RowIds(writer.write_id, 0, writer.made_ms))
    envelopes = sorted((open_envelope(one.envelope) for one in shop.stored("ready", "out")), key=lambda one: one.data)
    assert [(one.retry, one.timeout, one.headers["row"]) for one in envelopes] == [
        (Exponential(attempts=3, first=2), 1.5, "0"), (NoRetry(), None, "1"), (None, 7200, "2"), (Constant(), 30, "3"),
    ]  # fmt: skip


@pytest.mark.parametrize("remembered", [200_000, 10])
def test_rows_of_one_key_are_one_message_and_are_counted(
    shop: Shop, remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a key that the task does not remember are found by the store, those of other partitions too."""
    monkeypatch.setattr(publishing, "KEYS_REMEMBERED_MAX", remembered)
    writer = writer_of(shop)
    written = [
        writer.publish(
            batches(1200, key=lambda n: f"k{n % 600}"), RowIds(writer.write_id, part, writer.made_ms), is_first=True
        )
        for part in range(2)
    ]
    assert [one.counts for one in written] == [{"queued": 600, "collapsed": 600}, {"collapsed": 1200}]
    ledger = shop.post.ledger("out")
    assert ledger.published == 600
    # A row whose key is held by a message of another write is no row of this one.
    other = writer_of(shop)
    found = other.publish(batches(3, key=lambda n: f"k{n}"), RowIds(other.write_id, 0, other.made_ms), is_first=True)
    assert found.counts == {"duplicate": 3}


def test_structs_and_json_texts_arrive_as_json(shop: Shop) -> None:
    writer = writer_of(shop, STRUCT)
    struct = pa.RecordBatch.from_pylist([{"body": {"id": 7, "tags": ["a"], "none": None}}])
    writer.publish(iter([struct]), RowIds(writer.write_id, 0, writer.made_ms))
    text = writer_of(shop, bodyFormat="json")
    text.publish(iter([pa.RecordBatch.from_pylist([{"body": '{"id": 8}'}])]), RowIds(text.write_id, 0, text.made_ms))
    bodies = []
    for _ in range(2):
        with shop.post.receive("out", wait=5) as message:
            assert message is not None
            bodies.append(message.body)
    assert sorted(bodies, key=lambda body: body["id"]) == [{"id": 7, "tags": ["a"], "none": None}, {"id": 8}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": None}, "the body is null"),
        ({"body": "x", "priority": 12}, "priority"),
        ({"body": "x", "delay": -1.0}, "delay"),
        ({"body": "x", "delay": 1.0, "due": 5}, "both"),
        ({"body": "x", "delay": 5.0, "expires": 4.0}, "before the message is due"),
        ({"body": "x", "key": ""}, "key"),
        ({"body": "x", "retry": "sometimes"}, "a retry policy is exponential, linear"),
        ({"body": "x", "retry": "linear:attempts=0"}, "attempts"),
        ({"body": "x", "timeout": 0}, "timeout"),
        ({"body": "x", "timeout": math.nan}, "timeout"),
        ({"body": "x" * ((1 << 20) + 1)}, "bytes"),
    ],
)
def test_a_row_that_cannot_be_published_is_named(tmp_path: Any, row: dict[str, Any], message: str) -> None:
    with Shop(f"sqlite:///{tmp_path}/one.db", "wp") as shop:
        writer = writer_of(shop)
        batch = pa.RecordBatch.from_pylist([row])
        with pytest.raises(InvalidInput, match=message) as raised:
            writer.publish(iter([batch]), RowIds(writer.write_id, 3))
        place = "partition 3, row 0 (the first is 0)" + (", key ''" if "key" in row else "")
        assert str(raised.value).startswith(f"{place}: ")
        assert "\n" not in str(raised.value)


ROWS: list[dict[str, Any]] = [
    {"body": "ok", "key": "a", "delay": None},
    {"body": None, "key": "b", "delay": None},
    {"body": "ok", "key": "c", "delay": -1.0},
    {"body": "ok", "key": "d", "delay": None},
    {"body": "x" * ((1 << 20) + 1), "key": None, "delay": None},
]


def test_rows_that_cannot_be_published_are_diverted_with_their_reason(orders: Shop, tmp_path: Path) -> None:
    folder = tmp_path / "not published"
    writer = writer_of(orders, onInvalid="divert", invalidPath=str(folder), writeId="import")
    for _ in range(2):  # another attempt replaces the file of the first
        written = writer.publish(iter([pa.RecordBatch.from_pylist(ROWS)]), RowIds(writer.write_id, 7))
        assert written.counts["diverted"] == 3
    assert orders.post.ledger("out").published == 2
    (file,) = folder.iterdir()
    kept = pq.read_table(file).to_pylist()
    assert [(row["queue"], row["partition"], row["row"], row["key"]) for row in kept] == [
        ("out", 7, 1, "b"), ("out", 7, 2, "c"), ("out", 7, 4, None),
    ]  # fmt: skip
    assert [row["reason"].partition(";")[0].partition(",")[0] for row in kept] == [
        "the body is null", "a delay is a number of seconds from 0 on", "the body has 1",
    ]  # fmt: skip
    assert kept[2]["body"] == ROWS[4]["body"]


def test_a_task_that_fails_keeps_no_diverted_rows(orders: Shop, tmp_path: Path) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist(ROWS)
        raise OSError("the executor is gone")

    writer = writer_of(orders, onInvalid="divert", invalidPath=str(tmp_path / "aside"))
    with pytest.raises(OSError, match="the executor is gone"):
        writer.publish(failing(), RowIds(writer.write_id, 0))
    assert list((tmp_path / "aside").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"onInvalid": "skip"}, "onInvalid is fail or divert"),
        ({"onInvalid": "divert"}, "name the folder"),
        ({"invalidPath": "aside"}, "is for onInvalid=divert"),
        ({"onInvalid": "divert", "invalidPath": "s3://key:secret@bucket/aside"}, "with its keys"),
        ({"nan": "drop"}, "nan is fail, null or string"),
    ],
)
def test_options_for_invalid_rows_are_refused_before_any_task(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        write_options({"url": "sqlite:///a.db", "queue": "out", **options})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("rule", "wanted"), [("null", [None, None, 1.5]), ("string", ["NaN", "-Infinity", 1.5])])
def test_nan_becomes_what_the_option_names(orders: Shop, rule: str, wanted: list[Any]) -> None:
    writer = writer_of(orders, StructType().add("body", ArrayType(DoubleType())), nan=rule)
    values = pa.RecordBatch.from_pylist([{"body": [math.nan, -math.inf, 1.5]}])
    writer.publish(iter([values]), RowIds(writer.write_id, 0))
    with orders.post.receive("out", wait=20) as message:
        assert message is not None
        assert message.body == wanted


def test_an_error_names_where_a_nan_is(orders: Shop) -> None:
    lists = MapType(StringType(), ArrayType(DoubleType()))
    writer = writer_of(orders, StructType().add("body", StructType().add("a", lists)).add("key", "string"))
    kind = pa.struct([("a", pa.map_(pa.string(), pa.list_(pa.float64())))])
    bodies = pa.array([{"a": [("x", [1.0, math.inf])]}], kind)
    batch = pa.RecordBatch.from_arrays([bodies, pa.array(["order:7"])], ["body", "key"])
    with pytest.raises(InvalidInput) as raised:
        writer.publish(iter([batch]), RowIds(writer.write_id, 2))
    assert str(raised.value) == (
        "partition 2, row 0 (the first is 0), key 'order:7': body.a.x[1] is NaN or infinity, which JSON does not have: "
        "set the option nan to null or string"
    )


def test_a_time_that_python_does_not_have_is_an_error_of_its_row_alone(orders: Shop, tmp_path: Path) -> None:
    writer = writer_of(
        orders,
        StructType().add("body", ArrayType(TimestampType())),
        onInvalid="divert",
        invalidPath=str(tmp_path / "aside"),
    )
    times = pa.array([[0], [253_402_300_800_000_000]], pa.list_(pa.timestamp("us", "UTC")))
    written = writer.publish(iter([pa.RecordBatch.from_arrays([times], ["body"])]), RowIds(writer.write_id, 0))
    assert written.counts == {"queued": 1, "diverted": 1}


def test_tasks_that_are_refused_for_good_end_the_write_without_another_attempt(orders: Shop, tmp_path: Path) -> None:
    writer = writer_of(orders, countsPath=str(tmp_path / "counts"), writeId="import/1")
    refused = [writer.write_rows(iter([pa.RecordBatch.from_pylist(ROWS)]), RowIds(writer.write_id, n)) for n in (0, 1)]
    done = writer.write_rows(batches(3), RowIds(writer.write_id, 2))
    with pytest.raises(InvalidBody, match=r"^partition 0, row 1 .* \(1 more tasks were refused\)$"):
        writer.commit([*refused, done, None])
    (file,) = (tmp_path / "counts").iterdir()
    assert file.name == "write-import_1.json"
    assert json.loads(file.read_text()) == {"queue": "out", "write": "write-import_1", "counts": {"queued": 3}}


def test_a_write_whose_counts_cannot_be_kept_is_done_and_a_warning_is_logged(
    orders: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "counts").write_text("a file, not a folder")
    writer = writer_of(orders, countsPath=str(tmp_path / "counts"))
    writer.commit([writer.write_rows(batches(3), RowIds(writer.write_id, 0))])
    assert "cannot be written to countsPath" in caplog.text
    assert orders.post.ledger("out").published == 3


def test_a_store_that_cannot_be_reached_is_tried_again_by_spark(tmp_path: Path) -> None:
    with Shop(f"sqlite:///{tmp_path}/one.db", "wp") as shop:
        writer = writer_of(shop)

    def gone() -> Iterator[pa.RecordBatch]:
        raise StoreUnavailable("no server")
        yield

    with pytest.raises(StoreUnavailable):
        writer.write_rows(gone(), RowIds(writer.write_id, 0))


def test_a_full_queue_is_respected(shop: Shop) -> None:
    shop.post.configure("out", max_pending=100, overload="raise")
    writer = writer_of(shop)
    shop.post.publish("out", "one")
    with pytest.raises(QueueFull, match="its limit is 100"):
        writer.publish(batches(200), RowIds(writer.write_id, 0))
    assert shop.post.ledger("out").published == 1


@pytest.mark.promise("PUB-7")
@pytest.mark.parametrize("overload", ["raise", "block", "drop_oldest"])
def test_a_write_larger_than_an_empty_queue_does_not_pass_its_cap(shop: Shop, overload: Overload) -> None:
    shop.post.configure("out", max_pending=100, overload=overload)
    writer = writer_of(shop, blockSeconds="0.2")
    with pytest.raises(QueueFull, match="its limit is 100"):
        writer.publish(batches(250), RowIds(writer.write_id, 0))
    ledger = shop.post.ledger("out")
    assert (ledger.ready, ledger.dropped, ledger.balance) == (0 if overload == "raise" else 100, 0, 0)


@pytest.mark.promise("PUB-7")
@pytest.mark.parametrize("overload", ["block", "drop_oldest"])
def test_writes_at_once_do_not_pass_the_cap(shop: Shop, overload: Overload) -> None:
    shop.post.configure("out", max_pending=100, overload=overload)
    writer = writer_of(shop, blockSeconds="1")
    start = threading.Barrier(4, timeout=30)
    refused: list[QueueFull] = []

    def write(partition: int) -> None:
        start.wait()
        try:
            writer.publish(batches(100), RowIds(writer.write_id, partition))
        except QueueFull as error:
            refused.append(error)

    threads = [threading.Thread(target=write, args=(partition,)) for partition in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    ledger = shop.post.ledger("out")
    assert (ledger.ready, ledger.over_cap, ledger.balance) == (100, 0, 0)
    assert len(refused) == 4 - ledger.published // 100


@pytest.mark.promise("PUB-7", "SPARK-1")
def test_a_write_that_lost_its_room_to_another_waits_and_goes_on(shop: Shop) -> None:
    shop.post.configure("out", max_pending=100, overload="block")
    writer = writer_of(shop, blockSeconds="30")
    ids = RowIds(writer.write_id, 0)
    shop.post.publish_many("out", list(range(90)))
    with Waypost(store=options_of(shop).place.open()) as other:
        wave = Wave("out", chunks(Rows(writer.options, ids).drafts(next(batches(20)))))
        assert other._run(wave.send(other._context, None)) == []
    assert (len(wave), list(wave.refusals)) == (20, [None])
    thread = threading.Thread(target=lambda: writer.publish(batches(20), RowIds(writer.write_id, 0)))
    thread.start()
    while shop.post.ledger("out").published < 110:
        shop.post.purge("out", "ready")
    thread.join(60)
    ledger = shop.post.ledger("out")
    assert (ledger.published, ledger.over_cap, ledger.balance) == (110, 0, 0)


def bodies(shop: Shop, group: str | None) -> list[bytes]:
    """Return the bodies of the ready messages of a group, in the order in which they were stored."""
    stored = sorted(shop.events("out"), key=lambda event: event.number)
    ready = {message.id: message for message in shop.stored("ready", "out")}
    ids = [event.message_id for event in stored if event.event == "published" and event.group == group]
    return [open_envelope(ready[id].envelope).data for id in ids if id in ready]


def rows_of_group(numbers: Iterable[int]) -> list[bytes]:
    return [b"row %d" % number for number in numbers]


@pytest.mark.promise("PUB-7", "QUEUE-7")
def test_a_write_into_a_full_group_ends_with_an_error_that_names_it(shop: Shop) -> None:
    shop.post.configure("out", group_max_pending=100, overload="raise")
    writer = writer_of(shop)
    with pytest.raises(QueueFull, match=r"group busy of queue out holds .* 500 rows of this task") as raised:
        writer.publish(batches(600, group=lambda n: "busy"), RowIds(writer.write_id, 0))
    assert raised.value.group == "busy"
    ledger = shop.post.ledger("out")
    assert (ledger.ready, ledger.dropped, ledger.balance) == (100, 0, 0)


@pytest.mark.promise("PUB-7", "QUEUE-7", "SPARK-1")
def test_a_write_waits_for_a_full_group_and_stores_the_rows_of_others(shop: Shop) -> None:
    shop.post.configure("out", group_max_pending=100, overload="block")
    shop.post.configure_group("out", "small", max_pending=7)
    groups: list[str | None] = ["busy", "small", "a\nb", "b, on @c", None]
    writer = writer_of(shop, blockSeconds="0")
    with pytest.raises(QueueFull, match="raise group_max_pending"):
        writer.publish(batches(1000, group=lambda n: groups[n % 5]), RowIds(writer.write_id, 0))
    counts = Counter(message.group for message in shop.stored("ready", "out"))
    assert counts == {"busy": 100, "small": 7, "a\nb": 100, "b, on @c": 100, None: 200}
    # The next attempt finds what is stored, and stores the rest as there is room.
    patient = writer_of(shop, blockSeconds="60")
    written: list[Written] = []
    again = RowIds(writer.write_id, 0)
    task = threading.Thread(
        target=lambda: written.append(patient.publish(batches(1000, group=lambda n: groups[n % 5]), again))
    )
    task.start()
    while task.is_alive():
        shop.post.purge("out", "ready")
        task.join(0.02)
    (one,) = written
    assert one.counts["queued"] + one.counts["duplicate"] == 1000
    ledger = shop.post.ledger("out")
    assert (ledger.published, ledger.dropped, ledger.over_cap, ledger.balance) == (1000, 0, 0, 0)


@pytest.mark.promise("PUB-7", "QUEUE-7")
def test_a_write_larger_than_a_group_that_drops_its_oldest_keeps_the_newest_rows(shop: Shop) -> None:
    shop.post.configure("out", group_max_pending=100, overload="drop_oldest")
    writer = writer_of(shop)
    written = writer.publish(batches(600, group=lambda n: "busy" if n % 2 else None), RowIds(writer.write_id, 0))
    assert written.counts == {"queued": 600}
    assert bodies(shop, "busy") == rows_of_group(range(401, 600, 2))
    ledger = shop.post.ledger("out")
    assert (ledger.ready, ledger.dropped, ledger.balance) == (400, 200, 0)


@pytest.mark.promise("QUEUE-5", "SPARK-1")
@pytest.mark.parametrize("keyed", [False, True])
def test_the_rows_of_a_group_are_stored_in_the_order_of_their_partition(shop: Shop, keyed: bool) -> None:
    shop.post.configure("out", order="group", group_max_pending=3500, overload="block")
    columns: dict[str, Any] = {"key": lambda n: f"k{(n * 7919) % 8192:05}"} if keyed else {}
    writer = writer_of(shop, blockSeconds="60")
    ids = RowIds(writer.write_id, 0)
    rows = batches(8000, group=lambda n: "ab"[n % 2], **columns)
    task = threading.Thread(target=lambda: writer.publish(rows, ids))
    task.start()
    while task.is_alive():
        if shop.post.ledger("out").published >= 7000:
            shop.post.configure_group("out", "a", max_pending=9000)
            shop.post.configure_group("out", "b", max_pending=9000)
        task.join(0.02)
    assert bodies(shop, "a") == rows_of_group(range(0, 8000, 2))
    assert bodies(shop, "b") == rows_of_group(range(1, 8000, 2))


def test_a_dataframe_that_cannot_be_published_is_refused_before_any_task() -> None:
    for schema, message in (
        (StructType([StructField("id", StringType())]), "no column id"),
        (StructType([StructField("key", StringType())]), "needs a column body"),
        (StructType([StructField("body", StringType()), StructField("priority", StringType())]), "priority is string"),
        (StructType([StructField("body", StringType()), StructField("headers", StringType())]), "map<string,string>"),
        (StructType([StructField("body", StringType()), StructField("timeout", StringType())]), "timeout is string"),
        (StructType().add("body", "string").add("retry", STRUCT["body"].dataType), "retry is struct"),
        (
            StructType().add("body", StructType().add("a", ArrayType(YearMonthIntervalType(0, 0)))),
            "is interval",
        ),
        (StructType().add("body", StructType().add("a", "integer").add("a", "integer")), "more than one field a"),
    ):
        with pytest.raises(InvalidInput, match=message):
            check_columns(schema)


@given(some.text(max_size=20), some.integers(0, 10**6), some.integers(0, 10**9), some.text(min_size=1, max_size=40))
def test_ids_of_rows_depend_on_nothing_but_the_row(write: str, partition: int, row: int, key: str) -> None:
    one, other = RowIds(write, partition), RowIds(write, partition)
    other.of_row(row + 1)
    assert one.of_row(row) == other.of_row(row) != one.of_row(row + 1)
    assert one.of_key(key) == RowIds(write, partition + 1).of_key(key)
    assert one.of_row(row) != RowIds(write, partition + 1).of_row(row)
    assert one.of_row(row) != RowIds(write + "x", partition).of_row(row)
    assert is_message_id(one.of_row(row))
    assert is_message_id(one.of_key(key))
    assert is_message_id(RowIds(write, partition, 1_700_000_000_000).of_key(key))


def test_a_chunk_holds_no_id_twice_and_not_too_many() -> None:
    drafts = [Draft(f"{number % 700:024}", b"x") for number in range(1400)]
    made = list(chunks(drafts))
    assert all(len({draft.id for draft in chunk}) == len(chunk) <= CHUNK_MESSAGES_MAX for chunk in made)
    assert {draft.id for chunk in made for draft in chunk} == {draft.id for draft in drafts}


def hide(queue: str, body: Any, headers: dict[str, str]) -> tuple[Any, dict[str, str]]:
    """A redact hook that tasks import by name."""
    return f"(hidden from {queue})", dict.fromkeys(headers, "…")


@pytest.mark.promise("SEE-3", "SPARK-1")
def test_the_journal_keeps_what_the_redact_hook_of_a_write_lets_through(shop: Shop) -> None:
    with Waypost(shop.url, namespace=shop.namespace) as post:
        post.configure("out", journal="full")
        kinds: tuple[dict[str, Any], ...] = (
            {},
            {"key": lambda row: f"k{row}", "headers": lambda row: [("token", "row")]},
        )
        for columns in kinds:
            writer = writer_of(shop, redact="tests.spark.test_publishing:hide", writeId=str(len(columns)))
            writer.publish(batches(3, **columns), RowIds(writer.write_id, 0, writer.made_ms))
        bodies = [event.body for event in post.journal("out").events if event.event == "published"]
    assert len(bodies) == 6
    assert {open_envelope(body).data for body in bodies if body is not None} == {b"(hidden from out)"}
    assert not any(b"row" in (body or b"") for body in bodies)


@pytest.mark.parametrize("name", ["hide", "tests.spark.test_publishing:nothing", "no.such.module:hide", "os:sep"])
def test_a_redact_hook_that_cannot_be_imported_is_refused_before_any_task_runs(name: str) -> None:
    with pytest.raises(ConfigurationError, match="redact hook"):
        write_options({"url": "sqlite:///a.db", "queue": "out", "redact": name})
