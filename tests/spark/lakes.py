"""Messages with every kind of history, and helpers that read their tables."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tests.spark.shop import Shop
from waypost.identity import Session
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.tables import BRONZE_JOURNAL, GOLD, GOLD_MINUTES, SILVER_DELIVERIES, SILVER_MESSAGES
from waypost.store.bulk.tables import Table
from waypost.store.port import Target
from waypost.store.sqlite.entries import entries_to_rows
from waypost.store.sqlite.schema import Spelling
from waypost.testing.clock import ClockTime
from waypost.values import Settlement


def live(shop: Shop, count: int, queue: str = "orders") -> None:
    """Take messages through every state, without waiting for anything."""
    post, caller = shop.post, Session(ClockTime())
    post.publish_many(queue, range(count))
    post.publish_many(queue, range(4), key=lambda body: f"k{body}")
    post.publish_many(queue, range(4), key=lambda body: f"k{body}", on_conflict="replace")
    post.publish_many(queue, range(2), key=lambda body: f"k{body}", on_conflict="extend", delay=3600)
    post.publish_many(queue, range(3), delay=0.001)
    post.publish_many(queue, range(3), delay=3600)
    with shop.bulk() as bulk:
        store = bulk.store
        for turn in range(3):
            leases = bulk.run(store.claim(queue, count // 2, caller.operation(queue), worker=f"w{turn}")).leases
            outcomes: list[dict[str, Any]] = [
                {},
                {"outcome": "retry", "error_type": "OSError"},
                {"outcome": "snooze"},
                {"outcome": "release"},
                {"outcome": "dead", "reason": "rejected", "error_type": "ValueError"},
                {"outcome": "drop"},
                {},
            ]
            settlements = [
                Settlement(lease.id, lease.token, lease.nonce, **outcomes[number % len(outcomes)])
                for number, lease in enumerate(leases[:-1])
            ]
            bulk.run(store.settle(queue, settlements, caller.operation(queue)))
        bulk.run(store.redrive(queue, 2, caller.operation(queue)))
        bulk.run(store.cancel(queue, [Target(key="k1")], caller.operation(queue)))
        bulk.run(store.purge(queue, "dead", 1, caller.operation(queue)))


def plant(shop: Shop, statement: str, *values: object) -> int:
    """Change the file of a store directly, events as rows, and return how many rows were changed."""
    with sqlite3.connect(shop.url.removeprefix("sqlite:///")) as file:
        entries_to_rows(file, Spelling(shop.namespace))
        return file.execute(statement, values).rowcount


def rows(made: Pipeline, table: Table) -> list[dict[str, Any]]:
    """Return all rows of a table, sorted; of messages and deliveries also those that have not ended."""
    made.lake.refresh()
    if table in (SILVER_MESSAGES, SILVER_DELIVERIES):
        whole = made.lake.messages if table == SILVER_MESSAGES else made.lake.deliveries
        found = [row.asDict() for row in whole(made.spark).collect()]
    else:
        found = made.lake.rows(table).to_pylist()
    return sorted(found, key=lambda row: [str(value) for value in row.values()])


def tables(made: Pipeline) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all tables."""
    return {table.name: rows(made, table) for table in (BRONZE_JOURNAL, SILVER_DELIVERIES, SILVER_MESSAGES, *GOLD)}


def totals(made: Pipeline) -> Counter[str]:
    """Return the sums of the columns of gold's minutes."""
    total: Counter[str] = Counter()
    for row in rows(made, GOLD_MINUTES):
        total.update({name: value for name, value in row.items() if name not in ("queue", "minute")})
    return total


def eventually(holds: Callable[[], bool], beside: Future[None]) -> None:
    """Wait for a condition while a future runs; fail with the future's error if it ends first."""
    deadline = time.monotonic() + 600
    while not holds():
        assert not beside.done(), beside.exception()
        assert time.monotonic() < deadline
        time.sleep(0.05)
