"""Spark as a worker: each message is in the output once, whichever process dies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import polars
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import waypost.spark
from tests.spark.shop import Shop
from waypost import Constant, Dead, NoRetry, Snooze
from waypost.codec import encode_body, encode_head, make_envelope, open_envelope
from waypost.errors import ConfigurationError, InvalidInput
from waypost.identity import Session, continuation_id
from waypost.spark import Batch, Consumed, read_output
from waypost.spark.consumer.claim_source import Claim, leases_of, make_operation
from waypost.spark.consumer.consume import _Consumer
from waypost.spark.consumer.output import Output
from waypost.spark.delta.steps import Step, Steps
from waypost.spark.source.credentials import Place
from waypost.store.port import Draft
from waypost.testing.clock import ClockTime
from waypost.values import Continuation, Settlement

pytestmark = pytest.mark.xdist_group("spark")


def run(spark: SparkSession, shop: Shop, fn: Any, output: Path | None, **options: Any) -> Consumed:
    result = None if output is None else str(output)
    return waypost.spark.consume(spark, shop.url, "orders", fn, output=result, namespace=shop.namespace, **options)


def write_ids(rows: DataFrame, batch: Batch) -> None:
    batch.write(rows.select("id", "text"))


def written(spark: SparkSession, output: Path, table: str = "") -> list[str]:
    """Return the ids in a table, as Spark reads it and as any reader of Delta does."""
    found = sorted(row["id"] for row in read_output(spark, str(output), table).select("id").collect())
    assert found == sorted(DeltaTable(str(output / table)).to_pyarrow_dataset().to_table(["id"])["id"].to_pylist())
    return found


@pytest.mark.promise("SPARK-3")
def test_each_message_is_in_the_output_once_under_the_name_of_its_batch(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    sent = shop.post.publish_many("orders", [{"n": n, "é": "見"} for n in range(700)], group="g", headers={"h": "ü"})
    names: list[str] = []

    def load(rows: DataFrame, batch: Batch) -> None:
        names.append(batch.name)
        assert batch.size == rows.count()
        first = rows.orderBy("published_ms").first()
        assert first is not None
        assert (first["queue"], first["group"], first["deliveries"]) == ("orders", "g", 1)
        assert first["headers"] == {"h": "ü"}
        batch.write(rows.select("id", f.get_json_object("text", "$.n").alias("n")))

    result = run(spark, shop, load, tmp_path / "an output", batch=400)
    assert (result.batches, result.done, result.lost) == (2, 700, 0)
    assert written(spark, tmp_path / "an output") == sorted(one.id for one in sent)
    found = {row["waypost_batch"] for row in read_output(spark, str(tmp_path / "an output")).collect()}
    assert found == set(names)
    ledger = shop.post.ledger("orders")
    assert (ledger.done, ledger.leased, ledger.ready, ledger.claims) == (700, 0, 0, 700)
    assert ledger.balance == 0
    assert run(spark, shop, write_ids, tmp_path / "an output") == Consumed()


@pytest.mark.promise("SPARK-3")
def test_a_committed_message_that_was_not_settled_is_settled_when_it_is_redelivered_and_not_written_twice(
    spark: SparkSession, shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [one.id for one in shop.post.publish_many("orders", range(20))]
    shop.post.configure("orders", lease=0.5)
    settle = _Consumer.settle
    monkeypatch.setattr(_Consumer, "settle", _dies)
    with pytest.raises(RuntimeError, match="the driver died"):
        run(spark, shop, write_ids, tmp_path / "out")
    monkeypatch.setattr(_Consumer, "settle", settle)
    shop.post.configure("orders", lease=60)
    # Until its lease has ended and another consumer has claimed it, a message can still be settled by its first token.
    stolen = _claimed_again(shop, 5)
    result = run(spark, shop, write_ids, tmp_path / "out")
    assert result.repeated == 15
    assert result.done == 0
    _give_back(shop, stolen)
    again = run(spark, shop, write_ids, tmp_path / "out")
    assert (again.repeated, again.done) == (5, 0)
    assert written(spark, tmp_path / "out") == sorted(ids)
    assert shop.post.ledger("orders").done == 20
    assert run(spark, shop, write_ids, tmp_path / "out") == Consumed()


class Killed(BaseException):
    """Stands for a kill: nothing is cleaned up or settled after it."""


@pytest.mark.promise("SPARK-3")
def test_a_consumer_that_is_killed_at_any_point_writes_each_message_once_to_every_table(
    spark: SparkSession, orders: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With short leases a slow machine claims a message many times: it must not become a dead letter.
    orders.post.configure("orders", lease=2, max_deliveries=None)
    sent: list[str] = []
    committed = 0

    def killed(*given: Any, **named: Any) -> Any:
        raise Killed

    follow = Steps.follow

    def follow_when_opened(steps: Steps, step: Step, **named: Any) -> Any:
        """Complete the step before, but not a new one: a commit calls this without `sync`."""
        return follow(steps, step, **named) if named else killed()

    def load(rows: DataFrame, batch: Batch) -> None:
        batch.write(rows.select("id"), "eu/orders")
        batch.write(rows.select("id", "text"), "us")

    def seen_by_others() -> list[int]:
        return [len(polars.read_delta(str(tmp_path / "out" / name))) for name in ("eu/orders", "us")]

    for target, name, is_seen in (
        (_Consumer, "_commit", False),
        (Steps, "_commit_row", False),
        (Steps, "follow", False),
        (_Consumer, "_settle_batch", True),
        (Output, "maintain", True),
    ):
        new = [one.id for one in orders.post.publish_many("orders", range(3))]
        with monkeypatch.context() as broken:
            broken.setattr(target, name, killed if name != "follow" else follow_when_opened)
            with pytest.raises(Killed):
                run(spark, orders, load, tmp_path / "out")
        known = len(sent)
        sent += new
        # Messages of earlier turns may be in this batch, if their leases have ended.
        found = seen_by_others()
        assert found[0] == found[1]
        assert committed <= found[0] <= known + (3 if is_seen else 0), name
        committed = found[0]
    while orders.post.ledger("orders").done < len(sent):
        run(spark, orders, load, tmp_path / "out", follow=True, timeout=2)
    assert written(spark, tmp_path / "out", "eu/orders") == written(spark, tmp_path / "out", "us") == sorted(sent)


def _dies(*_: Any) -> Any:
    raise RuntimeError("the driver died")


def _claimed_again(shop: Shop, count: int) -> list[Any]:
    """Let the leases of messages end, and claim them as another consumer."""
    leases: list[Any] = []
    deadline = threading.Event()
    while len(leases) < count:
        deadline.wait(0.05)
        leases += shop.claim("orders", count - len(leases)).leases
    return leases


def _give_back(shop: Shop, leases: list[Any]) -> None:
    with shop.bulk() as bulk:
        released = [Settlement(lease.id, lease.token, lease.nonce, "release") for lease in leases]
        bulk.run(bulk.store.settle("orders", released, Session(ClockTime()).operation("orders")))


@pytest.mark.promise("SPARK-3")
def test_a_function_that_fails_writes_nothing_to_the_output_and_its_messages_are_retried(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    shop.post.publish_many("orders", range(10))

    def failing(rows: DataFrame, batch: Batch) -> None:
        batch.write(rows.select("id"))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(spark, shop, failing, tmp_path / "out", retry=Constant(pause=3600))
    ledger = shop.post.ledger("orders")
    assert (ledger.retried, ledger.delayed, ledger.done) == (10, 10, 0)
    assert list((tmp_path / "out").glob("*.parquet")) == []
    assert DeltaTable(str(tmp_path / "out")).file_uris() == []
    shop.post.publish("orders", "another")
    result = run(spark, shop, failing, None, retry=NoRetry(), on_error="continue")
    assert (result.batches, result.dead) == (1, 1)
    assert [letter.reason for letter in shop.post.dead_letters("orders")] == ["retries_exhausted"]


def test_a_function_ends_some_messages_otherwise(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    shop.post.publish_many("orders", [{"n": n} for n in range(10)])

    def sort_out(rows: DataFrame, batch: Batch) -> None:
        numbered = rows.withColumn("n", f.get_json_object("text", "$.n").cast("int"))
        batch.end(numbered.where("n < 3"), Dead("small"))
        batch.end([row["id"] for row in numbered.where("n = 9").collect()], Snooze(3600))
        with pytest.raises(InvalidInput, match="is not of batch"):
            batch.end(["unknown"], Dead())
        batch.write(numbered.where("n between 3 and 5").select("id"), "numbers/small")
        batch.write(numbered.where("n between 6 and 8").select("id"), "numbers/small")
        batch.write(numbered.where("n < 3").select("id", "n"), "refused", partition_by="n")
        with pytest.raises(InvalidInput, match="would be inside of the output itself"):
            batch.write(numbered)
        with pytest.raises(InvalidInput, match="'orc' is not supported"):
            batch.write(numbered, "numbers/small", format="orc")

    result = run(spark, shop, sort_out, tmp_path / "out")
    assert (result.done, result.dead, result.other) == (6, 3, 1)
    assert len(written(spark, tmp_path / "out", "numbers/small")) == 6
    assert sorted(row["n"] for row in read_output(spark, str(tmp_path / "out"), "refused").collect()) == [0, 1, 2]
    assert {letter.reason for letter in shop.post.dead_letters("orders")} == {"small"}
    assert shop.post.ledger("orders").delayed == 1


@pytest.mark.promise("SPARK-3")
def test_a_body_that_cannot_be_read_is_dead_and_the_others_are_done(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    good = [one.id for one in shop.post.publish_many("orders", ["x" * (1 << 20), {"é": "見た"}, b"\xff\x00"])]
    session = Session(ClockTime())
    bad = session.message_ids(1)[0]
    with shop.bulk() as bulk:
        draft = Draft(bad, b"\x01" + bad.encode() + b"\x02\0\0\0\0{broken")
        bulk.run(bulk.store.publish("orders", [draft], session.operation("orders")))
    result = run(spark, shop, write_ids, tmp_path / "out")
    assert result.done == 3
    assert written(spark, tmp_path / "out") == sorted(good)
    (letter,) = shop.post.dead_letters("orders")
    assert (letter.id, letter.reason) == (bad, "undecodable")


@pytest.mark.promise("SPARK-3")
def test_two_consumers_of_one_output_that_hold_the_same_message_write_it_once(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    ids = [one.id for one in shop.post.publish_many("orders", range(6))]
    shop.post.configure("orders", lease=1)
    runs: list[int] = []

    def other(rows: DataFrame, batch: Batch) -> None:
        write_ids(rows, batch)
        shop.post.pause("orders")

    def frozen(rows: DataFrame, batch: Batch) -> None:
        runs.append(batch.size)
        batch.write(rows.select("id", "text"))
        if len(runs) == 1:
            # As if this driver had been frozen for longer than its leases last, and another one had claimed them.
            for message in batch._messages.values():
                message.lease_lost = message.fenced = True
            _give_back(shop, _claimed_again(shop, 2))
            shop.post.configure("orders", lease=60)
            assert run(spark, shop, other, tmp_path / "out", batch=4, partitions=1).done == 4
            assert len(written(spark, tmp_path / "out")) == 4

    result = run(spark, shop, frozen, tmp_path / "out")
    assert runs == [6, 2]
    assert result.repeated == 4
    assert written(spark, tmp_path / "out") == sorted(ids)
    shop.post.resume("orders")
    last = run(spark, shop, write_ids, tmp_path / "out")
    assert (last.done, last.repeated + result.done) == (0, 2)
    assert written(spark, tmp_path / "out") == sorted(ids)
    assert shop.post.ledger("orders").done == 6


@pytest.mark.promise("SPARK-3")
def test_leases_are_renewed_while_the_function_runs(spark: SparkSession, tmp_path: Path) -> None:
    with Shop(f"sqlite:///{tmp_path}/one.db", "wp") as shop:
        shop.post.configure("orders", lease=6)
        shop.post.publish("orders", 1)
        deadline = threading.Event()

        def slow(rows: DataFrame, batch: Batch) -> None:
            (before,) = shop.stored("leased")
            while shop.stored("leased")[0].lease_end_ms == before.lease_end_ms:
                deadline.wait(0.05)
            assert batch.lost == frozenset()

        assert run(spark, shop, slow, None).done == 1


def test_a_second_attempt_of_a_task_claims_the_same_messages(shop: Shop) -> None:
    shop.post.publish_many("orders", range(300))
    claim = Claim(shop.place, "orders", "06f0000000000000000000000", 200, 2, None)
    first = [lease for rows in claim.take(0) for lease in leases_of(rows)]
    second = [lease for rows in claim.take(0) for lease in leases_of(rows)]
    other = [lease for rows in claim.take(1) for lease in leases_of(rows)]
    assert len(first) == 200
    assert [(lease.id, lease.token, lease.nonce) for lease in first] == [
        (lease.id, lease.token, lease.nonce) for lease in second
    ]
    assert {lease.id for lease in other}.isdisjoint({lease.id for lease in first})
    assert shop.post.ledger("orders").claims == 300


def test_a_sqlite_file_is_consumed_on_its_own_machine_only(tmp_path: Path) -> None:
    with Shop(f"sqlite:///{tmp_path}/one.db", "wp") as shop:
        shop.post.publish("orders", 1)
        with pytest.raises(ConfigurationError, match="the SQLite store is a file on elsewhere"):
            list(Claim(shop.place, "orders", "06f0000000000000000000000", 10, 1, "elsewhere 5f").take(0))
        assert shop.post.ledger("orders").ready == 1


def test_operations_of_claims_are_never_shared() -> None:
    made = {make_operation(name, task, number, 0) for name in "ab" for task in range(5) for number in range(300)}
    assert len(made) == 2 * 5 * 300


@pytest.mark.parametrize(
    ("options", "result"),
    [
        ({"batch": 0}, "batch is a number"),
        ({"partitions": 0}, "partitions is a number"),
        ({"on_error": "ignore"}, "on_error is raise or continue"),
        ({"retry": 5}, "a retry policy is an object"),
        ({"url": "memory://"}, "lives in one process"),
        ({"url": "valkey://:hush@127.0.0.1"}, "holds a password"),
    ],
)
def test_invalid_options_are_refused(spark: SparkSession, tmp_path: Path, options: Any, result: str) -> None:
    url = options.pop("url", f"sqlite:///{tmp_path}/one.db")
    with pytest.raises(ValueError, match=result):
        waypost.spark.consume(spark, url, "orders", write_ids, **options)


def test_a_queue_without_leases_and_an_output_of_another_queue_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    with Shop(f"sqlite:///{tmp_path}/one.db", "wp") as shop:
        shop.post.configure("orders", lease=None)
        with pytest.raises(InvalidInput, match="at most once"):
            run(spark, shop, write_ids, tmp_path / "out")
        shop.post.configure("orders", lease=60)
        shop.post.publish("orders", 1)
        run(spark, shop, write_ids, tmp_path / "out")
        with pytest.raises(ConfigurationError, match="belongs to queue orders"):
            waypost.spark.consume(spark, Place(shop.url), "mails", write_ids, output=str(tmp_path / "out"))


def test_a_consumer_that_follows_waits_for_more_until_its_time_is_over(spark: SparkSession, tmp_path: Path) -> None:
    with Shop(f"sqlite:///{tmp_path}/one.db", "wp") as shop:
        shop.post.publish("orders", 0)
        seen: list[int] = []

        def next_one(rows: DataFrame, batch: Batch) -> None:
            seen.append(batch.size)
            if len(seen) < 3:
                shop.post.publish("orders", len(seen), delay=0.2)
            else:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(spark, shop, next_one, None, follow=True)
        assert seen == [1, 1, 1]
        ledger = shop.post.ledger("orders")
        assert (ledger.done, ledger.ready, ledger.released) == (2, 1, 1)
        result = run(spark, shop, lambda rows, batch: None, None, follow=True, timeout=0.5)
        assert result.done <= 1


def hide(queue: str, body: Any, headers: dict[str, str]) -> tuple[Any, dict[str, str]]:
    return f"(hidden from {queue})", dict.fromkeys(headers, "…")


@pytest.mark.promise("SEE-3", "SPARK-3")
def test_continuations_of_a_consumer_are_journalled_redacted(spark: SparkSession, shop: Shop) -> None:
    for queue in ("orders", "next"):
        shop.post.configure(queue, journal="full")
    shop.post.publish_many("orders", range(3))

    def send_on(rows: DataFrame, batch: Batch) -> None:
        for message in batch._messages.values():
            id = continuation_id(message.id, message.token, 0)
            head = encode_head(headers={"token": "Canary7Secret"})
            message._then = (Continuation(id, "next", make_envelope(id, encode_body({"card": "Canary7Secret"}), head)),)

    assert run(spark, shop, send_on, None, redact=hide).done == 3
    assert [message.body for message in shop.post.messages("next")] == [{"card": "Canary7Secret"}] * 3
    bodies = [event.body or b"" for event in shop.post.journal("next").events if event.event == "published"]
    assert [open_envelope(body).data for body in bodies] == [b"(hidden from next)"] * 3
    assert not any(b"Canary7Secret" in body for body in bodies)
