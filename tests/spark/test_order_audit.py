"""The audit of ordered groups: planted breaks of the order are found, and histories that are right are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.spark.shop import Shop
from tests.spark.test_audit import Planter
from waypost.cli.commands.pipeline import format_audit
from waypost.identity import Session
from waypost.spark.lake import silver
from waypost.spark.lake.audit import audit
from waypost.spark.lake.order import OVERLAPS, PASSED, TOO_EARLY, OrderRule, broken_order, order_since
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.tables import BRONZE_JOURNAL
from waypost.testing.clock import ClockTime
from waypost.values import Settlement

pytestmark = pytest.mark.xdist_group("spark")

#: Events that end a delivery.
ENDS = ("done", "dead", "retried", "snoozed", "released", "expired", "cancelled", "dropped")
EXACT = OrderRule(after=0, holds=True, in_order=True)


def history(text: str) -> list[dict[str, Any]]:
    """Return the events of a history, in a queue of its own.

    `a+` is published, `a(` claimed, `a)` done, others are written out, as `a:retried`. All are in one group, one a
    millisecond. `a:later` is a publication with a due time; behind `=` comes another operation.
    """
    events: list[dict[str, Any]] = []
    claims: dict[str, int] = {}
    operation = 0
    for word in text.split():
        if word == "=":
            operation += 1
            continue
        name, sign = word[0], word[1:]
        event = {"+": "published", "(": "claimed", ")": "done"}.get(sign, sign.removeprefix(":"))
        number = len(events) + 1
        row: dict[str, Any] = dict.fromkeys(BRONZE_JOURNAL.columns)
        row |= {"queue": text, "number": number, "at_ms": number, "event": event, "message_id": name, "group": "g"}
        row["operation_id"] = str(operation)
        if event == "later":
            row |= {"event": "published", "due_ms": number + 1}
        if event == "promoted":
            row["cause"] = "due"
        if event == "claimed":
            claims[name] = claims.get(name, 0) + 1
        if event in ENDS and claims.get(name):
            row["run_ms"] = 1
        row["claims"] = row["token"] = claims.get(name, 0)
        events.append(row)
    return events


def frame_of(spark: SparkSession, events: Iterable[dict[str, Any]]) -> DataFrame:
    """Return events as the lake has them."""
    rows = [tuple(event[name] for name in BRONZE_JOURNAL.columns) for event in events]
    return spark.createDataFrame(rows, BRONZE_JOURNAL.ddl).coalesce(1)


def judge(spark: SparkSession, histories: Mapping[str, OrderRule], events: DataFrame | None = None) -> set[str]:
    """Return what was claimed too early in these histories: the history, the message, the fault."""
    if events is None:
        events = frame_of(spark, [event for text in histories for event in history(text)])
    deliveries = silver.deliveries(silver.delivery_steps(events), few=True)
    found = broken_order(events, deliveries, histories).collect()
    return {f"{row.queue}: {row.message_id}: {row.fault}" for row in found}


@pytest.mark.promise("SPARK-5", "QUEUE-5")
def test_histories_in_order_have_no_finding(spark: SparkSession) -> None:
    histories = (
        "a+ b+ c+ a( a) b( b) c( c)",
        # Each comes back and is the next one again.
        "a+ b+ a( a:retried a( a:released a( a:expired a( a) b( b)",
        # Ends of every kind let the next one go.
        "a+ b+ c+ d+ a( a:dead b( b:dropped c( c:cancelled d( d)",
        "a+ b+ a:cancelled b( b)",
        # One that is delayed joins when it is ready.
        "a:later b+ b( b) a:promoted a( a)",
        # A skipped one waits alone.
        "a+ b+ a( a:retried a:skipped b( b) a:promoted a( a)",
        # Cancelled while it held its group.
        "a+ b+ a( a:retried a:cancelled b( b)",
        # A redriven one is behind those of before, and before those of after.
        "a+ b+ a( a:dead a:redriven b( b) a( a) c+ c( c)",
        "a+ a:postponed b+ b( b) a:promoted a( a)",
        # One is leased, and others wait.
        "a+ b+ a(",
    )
    assert judge(spark, dict.fromkeys(histories, EXACT)) == set()


@pytest.mark.promise("SPARK-5", "QUEUE-5")
def test_broken_histories_are_found(spark: SparkSession) -> None:
    histories = {
        "a+ b+ b( b) a( a)": f"b: {TOO_EARLY}a",
        "a+ b+ b( b)": f"b: {TOO_EARLY}a",
        "a+ b+ a( b( a) b)": f"b: {OVERLAPS}a",
        "a+ b+ a( b(": f"b: {OVERLAPS}a",
        "a+ b+ a( a:retried b( b) a( a)": f"b: {PASSED}a",
        "a+ b+ a( a:released b( b) a( a)": f"b: {PASSED}a",
        "a+ b+ a( a:expired b( b) a( a)": f"b: {PASSED}a",
        "b+ a:later a:promoted a( a) b( b)": f"a: {TOO_EARLY}b",
        "a+ b+ c+ a( a) c( c) b( b)": f"c: {TOO_EARLY}b",
    }
    found = judge(spark, dict.fromkeys(histories, EXACT))
    assert found == {f"{text}: {fault}" for text, fault in histories.items()}


@pytest.mark.promise("SPARK-5", "QUEUE-2", "QUEUE-5")
def test_only_what_must_be_wrong_by_the_rules_of_the_queue_is_found(spark: SparkSession) -> None:
    passing, loose = EXACT._replace(holds=False), EXACT._replace(in_order=False)
    # A claim that waited for another one has a smaller number, and the times tell.
    waited = "a+ b+ b( a( a) b)"
    events = [
        event
        for text in (
            "a+ b+ a( a:retried b( b) a( a)", "a+ b+ a( a:expired b( b) a( a)", "a+ = b+ b( b) a( a)",
            "a+ b+ = b( b) a( a)", "a+ b+ c+ b( b) a( a) d+ e+ e( e) d( d)", waited,
        )
        for event in history(text)
    ]  # fmt: skip
    for event in events:
        if (event["queue"], event["event"], event["message_id"]) == (waited, "claimed", "b"):
            event["at_ms"] = 50
    rules = {
        # One that waits for its next try may be passed, one that is ready again may not.
        "a+ b+ a( a:retried b( b) a( a)": passing,
        "a+ b+ a( a:expired b( b) a( a)": passing,
        # Publications may have become visible in another order, if they are not of one call.
        "a+ = b+ b( b) a( a)": loose,
        "a+ b+ = b( b) a( a)": loose,
        waited: loose,
        # What was published before the order is not judged.
        "a+ b+ c+ b( b) a( a) d+ e+ e( e) d( d)": EXACT._replace(after=7),
    }
    assert judge(spark, rules, frame_of(spark, events)) == {
        f"a+ b+ a( a:expired b( b) a( a): b: {PASSED}a",
        f"a+ b+ = b( b) a( a): b: {TOO_EARLY}a",
        f"a+ b+ c+ b( b) a( a) d+ e+ e( e) d( d): e: {TOO_EARLY}d",
    }


@pytest.mark.promise("SPARK-5", "QUEUE-2")
def test_a_queue_is_judged_when_all_messages_of_before_its_order_have_ended(spark: SparkSession) -> None:
    ended, still_there = "a+ b+ b( z:configured c+ d+ b) a( a)", "a+ z:configured b+ b( b)"
    events = history(ended) + history(still_there)
    for event in events:
        if event["event"] == "configured":
            event |= {"message_id": None, "group": None, "cause": "fair=True order=group"}
    frame = frame_of(spark, events)
    assert order_since(frame, ended, 0) == 9
    assert order_since(frame, still_there, 0) is None


@pytest.mark.promise("SPARK-5", "QUEUE-5")
def test_a_store_keeps_the_order_and_a_planted_break_is_reported(shop: Shop, pipeline: Callable[..., Pipeline]) -> None:
    with shop.bulk() as bulk:
        exact = not bulk.store.capabilities.commits_out_of_order
    shop.post.configure("orders", order="group")
    ids = [shop.post.publish("orders", number, group="g").id for number in range(6)]
    shop.post.publish_many("orders", range(6), group=lambda body: f"h{body % 2}")
    caller = Session(ClockTime())
    outcomes: list[dict[str, Any]] = [{}, {"outcome": "retry"}, {"outcome": "release"}, {"outcome": "dead"}, {}]
    with shop.bulk() as bulk:
        for turn in range(60):
            leases = bulk.run(bulk.store.claim("orders", 9, caller.operation("orders"), worker="w")).leases
            for number, lease in enumerate(leases):
                end = Settlement(lease.id, lease.token, lease.nonce, **outcomes[(turn + number) % len(outcomes)])
                bulk.run(bulk.store.settle("orders", [end], caller.operation("orders")))
    assert shop.post.ledger("orders").ready == 0
    found = audit(pipeline(shop))
    assert found.is_clean, found
    if not exact:
        return
    # Now the journal has the second message published before the first.
    planter, other = Planter(shop), "0" * len(ids[0])
    for old, new in ((ids[0], other), (ids[1], ids[0]), (other, ids[1])):
        planter.relabel("published", old, new)
    found = audit(pipeline(shop, "second"))
    assert {one.message_id: one.fault for one in found.out_of_order} == {ids[0]: TOO_EARLY + ids[1]}
    assert (found.out_of_order_count, found.queues["orders"].out_of_order, found.is_clean) == (1, 1, False)
    text = format_audit(found)
    assert f"{ids[0]}: {TOO_EARLY}{ids[1]}" in text
    assert "1 out of order: " in text
