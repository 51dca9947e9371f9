"""Lakes made by hand: gold tables like the pipeline's, with known figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from waypost.spark.delta.parquet import write_rows
from waypost.spark.delta.table import Change
from waypost.spark.lake.gold import add_sums, write_days
from waypost.spark.lake.lake import Lake, Source
from waypost.spark.lake.percentiles import bucket_of
from waypost.spark.lake.report.series import COUNTS
from waypost.spark.lake.sums import sum_events
from waypost.spark.lake.tables import BRONZE_JOURNAL, GOLD, SILVER_DELIVERIES, SILVER_OPEN_MESSAGES, LakeTable

KINDS = ("minutes", "histograms", "redeliveries", "dead_letters")
START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
CLEAN: dict[str, Any] = {
    "at_ms": 1_772_366_400_000, "published": 204_133, "accounted": 204_133, "unaccounted_count": 0,
    "duplicates_unexplained_count": 0, "undecided": 0, "not_seen": 0, "unaccounted": [], "duplicates_unexplained": [],
    "queues": {"orders": {"overcounted": {}}}, "has_more": False,
}  # fmt: skip


def minute(number: int) -> datetime:
    return START + timedelta(minutes=number)


def counts(queue: str, number: int, **given: int) -> dict[str, Any]:
    return {"queue": queue, "minute": minute(number)} | dict.fromkeys(COUNTS, 0) | given


def make_lake(path: Path, audit: Mapping[str, Any] | None = None, **tables: Sequence[Mapping[str, Any]]) -> Path:
    """Write a lake with these rows, by the pipeline's own writer."""
    lake = Lake(str(path))
    lake.create()
    changes = {}
    for table in GOLD:
        given = list(tables.get(table.name.removeprefix("gold/"), ()))
        schema = table.arrow(table.columns)
        missing = {"error_type": None}
        columns = {name: [row.get(name, missing.get(name, 0)) for row in given] for name in table.columns}
        changes[table.name] = Change(tuple(write_days(lake, table, pa.table(columns, schema))))
    lake.commit("run", changes, replace(lake.state, source=Source(url="valkey://127.0.0.1:6379")))
    if audit is not None:
        (path / "audit.json").write_text(json.dumps(audit))
    return path


def busy_lake(path: Path, minutes: int = 90, audit: Mapping[str, Any] | None = None) -> Path:
    """Write the lake of a shop's day: three queues, a burst, a worker that died, a poison message."""
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in KINDS}
    for number in range(minutes):
        burst = 6 if 40 <= number < 50 else 1
        for queue, rate in (("orders", 900), ("payments", 850), ("mails", 300)):
            published = int(burst * rate * (1 + 0.3 * math.sin(number / 7)))
            failing = 25 if queue == "payments" and 60 <= number < 66 else 2
            tables["minutes"].append(
                counts(queue, number, published=published, claimed=published + failing, done=published - 1,
                       retried=failing, dead=1, duplicates=published // 50, expired=burst - 1, woken=published // 9)
            )  # fmt: skip
            slow = burst * (3 if queue == "payments" else 1)
            for measure, middle in (
                ("wait", 2 * slow**3),
                ("run", 14 * slow),
                ("late", queue == "mails"),
            ):
                for spread in range(24) if middle else ():
                    value = middle * 1.35 ** (spread - 6)
                    weight = max(1, int(published * math.exp(-((spread - 6) ** 2) / 14) / 6))
                    found = {"measure": measure, "bucket": bucket_of(int(value)), "count": weight}
                    tables["histograms"].append({"queue": queue, "minute": minute(number)} | found)
            for cause, count in (("retried", failing), ("expired", burst - 1), ("released", number % 3)):
                if count:
                    tables["redeliveries"].append(
                        {"queue": queue, "minute": minute(number), "cause": cause, "count": count}
                    )
            reason = ("rejected", "retries_exhausted")[number % 2]
            tables["dead_letters"].append({"queue": queue, "minute": minute(number), "reason": reason, "count": 1})
    return make_lake(path, audit, **tables)


#: Queues that a planted lake has problems in, by the problem.
EXPIRING, DYING, GROWING, UNSERVED, SLOW = "orders", "payments", "mails", "reports", "exports"
CALM = "refunds"


def planted_lake(
    path: Path,
    *,
    minutes: int,
    queues: int,
    points: int = 180,
    audit: Mapping[str, Any] | None = CLEAN,
    healthy: bool = False,
) -> Path:
    """Write the lake of a long time with many queues: gold at some minutes of it, with problems in the first queues."""
    names = [EXPIRING, DYING, GROWING, UNSERVED, SLOW, CALM, *(f"service-{number:03}.events" for number in range(200))]
    names = names[:queues] if not healthy else [CALM, *names[6:]][:queues]
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in KINDS}
    step = max(1, minutes // points)
    for order, queue in enumerate(names):
        for place, number in enumerate(range(0, minutes, step)):
            part = number / max(1, minutes)
            day = 1 + 0.6 * math.sin(2 * math.pi * number / 1440) if minutes > 1440 else 1 + 0.3 * math.sin(place / 9)
            published = max(1, int((4000 / (1 + order)) * day * (1 + 0.1 * ((place * 7 + order) % 5))))
            _plant(tables, queue, number, published, part, healthy=healthy)
    made = make_lake(path, audit, **tables)
    if UNSERVED in names:
        # Messages of the queue without a worker, which are still ready.
        since = int(START.timestamp() * 1000)
        waiting = {"queue": UNSERVED, "message_id": "m1", "state": "ready", "last_ms": since, "last_number": 1}
        add_rows(Lake(str(made)), SILVER_OPEN_MESSAGES, [waiting])
    return made


def add_rows(lake: Lake, table: LakeTable, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a table that is not gold."""
    change = Change(tuple(write_rows(lake.files, table.name, _rows(table, rows))))
    lake.commit("run", {table.name: change}, lake.state)


def _plant(
    tables: dict[str, list[dict[str, Any]]], queue: str, number: int, published: int, part: float, *, healthy: bool
) -> None:
    """Add a minute of one queue."""
    at = {"queue": queue, "minute": minute(number)}
    expired = published // 3 if queue == EXPIRING and 0.45 <= part < 0.5 else 0
    dead = published // 12 if queue == DYING and part >= 0.6 else 0
    retried = published // 8 if queue == DYING else 0
    done = 0 if queue == UNSERVED else published // 2 if queue == GROWING and part > 0.5 else published - dead
    claimed = 0 if queue == UNSERVED else done + dead + retried + expired
    tables["minutes"].append(
        counts(queue, number, published=published, claimed=claimed, done=done, dead=dead, retried=retried,
               expired=expired, woken=claimed // 2)
    )  # fmt: skip
    slow = 2_000 if queue == SLOW and 0.7 <= part < 0.75 else 1
    for measure, middle in (("wait", 12 * slow), ("run", 90)) if claimed else ():
        for times, share in ((0.6, 0.3), (1.0, 0.4), (2.0, 0.28), (9.0, 0.02)):
            found = {
                "measure": measure,
                "bucket": bucket_of(int(middle * times)),
                "count": max(1, int(claimed * share)),
            }
            tables["histograms"].append(at | found)
    for cause, count in (("expired", expired), ("retried", retried)):
        if count:
            tables["redeliveries"].append(at | {"cause": cause, "count": count})
    for reason, error, count in (
        ("rejected", "shop.NoSuchCustomer", dead - dead // 4),
        ("retries_exhausted", "OSError", dead // 4),
    ):
        if count:
            tables["dead_letters"].append(at | {"reason": reason, "error_type": error, "count": count})


def recorded_lake(path: Path, seconds: int = 180, audit: Mapping[str, Any] | None = CLEAN, *, queues: int = 2) -> Path:
    """Write the lake of some minutes with its events and deliveries: a worker that dies, and errors of one kind."""
    events, deliveries, number = [], [], 0
    begin = int(START.timestamp() * 1000)
    for second in range(seconds):
        for turn in range(6 + second % 5):
            at, id = begin + second * 1000 + turn * 90, f"m{second:04}{turn:02}"
            worker = f"shop-{1 + turn % 3}:41{turn % 3}7:a1b2c3d4"
            died = worker.startswith("shop-2") and 60 <= second < 64
            end = "expired" if died else "dead" if second % 20 == 7 and turn == 0 else "done"
            if worker.startswith("shop-2") and second >= 64:
                worker = "shop-4:9127:e5f60718"
            wait = 5 + 40 * (turn + 1) * (8 if 60 <= second < 90 else 1)
            queue = ("orders", "mails")[turn % min(2, queues)]
            if queues > 2 and turn > 2:
                queue = f"service-{(second * 7 + turn) % (queues - 2):03}.events"
            common = {"queue": queue, "message_id": id, "worker": worker, "token": 1}
            error = {"reason": "rejected", "error_type": "shop.NoSuchCustomer"} if end == "dead" else {}
            for event, later, more in (
                ("published", 0, {}),
                ("claimed", wait, {"wait_ms": wait, "cause": "expired" if second == 95 and turn < 4 else None}),
                (end, wait + 120, {"run_ms": 120} | error),
            ):
                number += 1
                events.append(common | {"event": event, "at_ms": at + later, "number": number} | more)
            outcome = {"done": "done", "dead": "dead", "expired": "expired"}[end]
            deliveries.append(
                common
                | {
                    "claimed_ms": at + wait,
                    "ended_ms": at + wait + 120,
                    "outcome": outcome,
                    "wait_ms": wait,
                    "run_ms": 120,
                }
            )
    made = events_lake(path, events, audit)
    add_rows(Lake(str(made)), SILVER_DELIVERIES, deliveries)
    return made


def events_lake(path: Path, events: Sequence[Mapping[str, Any]], audit: Mapping[str, Any] | None = CLEAN) -> Path:
    """Write a lake with these events, and their gold."""
    lake = Lake(str(make_lake(path, audit)))
    lake.commit("run", add_sums(lake, sum_events(_rows(BRONZE_JOURNAL, events))), lake.state)
    add_rows(lake, BRONZE_JOURNAL, events)
    return path


def _rows(table: LakeTable, rows: Sequence[Mapping[str, Any]]) -> Any:
    empty = dict.fromkeys(table.columns)
    return pa.Table.from_pylist([empty | dict(row) for row in rows], schema=table.arrow(table.columns))
