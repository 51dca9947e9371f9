"""Many queues read together: each has the rows that it has alone, and the tables are read once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.spark.shop import Shop
from waypost.policy import DEFAULT_POLICY
from waypost.spark.insight import queue_rows
from waypost.spark.insight.advice import Facts
from waypost.spark.insight.facts import read_facts, read_steps
from waypost.spark.insight.lake_history import Rows, Window
from waypost.spark.insight.queue_rows import read_together
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.pipeline import Pipeline

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.promise("SPARK-6")]
QUEUES = 6


@pytest.fixture
def lake(orders: Shop, pipeline: Callable[..., Pipeline]) -> Lake:
    """Queues of different sizes, with retries, dead letters, changes of settings, a pause and a schedule."""
    for number in range(QUEUES):
        orders.post.publish_many(f"q{number}", range(8 + 4 * number))
        orders.work(f"q{number}", 6 + number)
    orders.post.configure("q1", lease=30, max_deliveries=3)
    orders.post.pause("q2")
    orders.post.resume("q2")
    orders.post.save_schedule("s", queue="q3", every=3600)
    orders.post.trigger_schedule("s", queue="q3")
    orders.post.publish("empty", 1)
    made = pipeline(orders)
    made.run()
    return Lake(made.lake.files.address)


def in_order(facts: Facts) -> Facts:
    """Deliveries of one millisecond are in any order."""
    return replace(facts, deliveries=sorted(facts.deliveries, key=lambda row: (row.claimed_ms, row.message_id)))


def test_queues_read_together_have_the_facts_that_each_has_alone(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, queues, reads = read_steps(lake), sorted(lake.state.seen), list[str]()
    arrow = Lake.arrow

    def counted(self: Lake, table: Any, *given: Any) -> Any:
        reads.append(table if isinstance(table, str) else table.name)
        return arrow(self, table, *given)

    monkeypatch.setattr(Lake, "arrow", counted)

    def facts_of(rows: Rows, queue: str) -> Facts:
        return in_order(read_facts(rows, Window(queue), DEFAULT_POLICY, steps=steps))

    alone = {queue: facts_of(lake, queue) for queue in queues}
    assert len(alone["q5"].deliveries) == 11
    assert alone["q1"].changes
    assert alone["q2"].pauses
    assert alone["q3"].scheduled
    assert any(facts.dead_changes for facts in alone.values())
    assert alone["empty"].never_claimed_ms == []
    for most, parts in ((1_000_000, 1), (0, QUEUES + 1)):
        monkeypatch.setattr(queue_rows, "CLAIMS_TOGETHER_MAX", most)
        reads.clear()
        assert {queue: facts_of(rows, queue) for queue, rows in read_together(lake, queues, 0, 2**53)} == alone
        assert len(reads) <= len(queue_rows.COLUMNS) * parts
    wanted = queues[1:3]
    assert [queue for queue, _ in read_together(lake, wanted, 0, 2**53)] == wanted
