"""Lakes made by hand: gold tables like the pipeline's, with known figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from waypost.spark.delta.table import Change
from waypost.spark.lake.gold import write_days
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.percentiles import bucket_of
from waypost.spark.lake.report.series import COUNTS
from waypost.spark.lake.tables import GOLD

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
        columns = {name: [row.get(name, 0) for row in given] for name in table.columns}
        changes[table.name] = Change(tuple(write_days(lake, table, pa.table(columns, schema))))
    lake.commit("run", changes, lake.state)
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
