"""Lakes made by hand: gold tables in the shape of the pipeline's, with figures that are known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from waypost.spark.report.gold import COUNTS

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
COMMON = [("queue", pa.string()), ("minute", pa.timestamp("us", "UTC"))]
SCHEMAS = {
    "minutes": pa.schema([*COMMON, *((name, pa.int64()) for name in COUNTS)]),
    "histograms": pa.schema([*COMMON, ("measure", pa.string()), ("bucket", pa.int32()), ("count", pa.int64())]),
    "redeliveries": pa.schema([*COMMON, ("cause", pa.string()), ("count", pa.int64())]),
    "dead_letters": pa.schema([*COMMON, ("reason", pa.string()), ("count", pa.int64())]),
}
CLEAN = {
    "published": 204_133, "accounted": 204_133, "unaccounted": [], "not_seen": 0, "duplicates_unexplained": 0,
    "at": "2026-03-01T13:00:00Z",
}  # fmt: skip


def bucket(milliseconds: float) -> int:
    """The bucket of a value, as the pipeline has it."""
    return -1 if milliseconds < 1 else math.floor(math.log(milliseconds) / math.log(1.01))


def minute(number: int) -> datetime:
    return START + timedelta(minutes=number)


def counts(queue: str, number: int, **given: int) -> dict[str, Any]:
    return {"queue": queue, "minute": minute(number)} | dict.fromkeys(COUNTS, 0) | given


def make_lake(
    path: Path, audit: Mapping[str, Any] | None = None, **tables: Sequence[Mapping[str, Any]]
) -> Path:  # fmt: skip
    """Write a lake with these rows."""
    for name, rows in ({"minutes": ()} | tables).items():
        folder = path / "gold" / name
        folder.mkdir(parents=True)
        parquet.write_table(pa.Table.from_pylist(list(rows), SCHEMAS[name]), folder / "part-0.parquet")
    if audit is not None:
        (path / "audit.json").write_text(json.dumps(audit))
    return path


def busy_lake(path: Path, minutes: int = 90, audit: Mapping[str, Any] | None = None) -> Path:
    """A shop's day: three queues, a burst, a worker that died, a poison message."""
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}
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
                    found = {"measure": measure, "bucket": bucket(value), "count": weight}
                    tables["histograms"].append({"queue": queue, "minute": minute(number)} | found)
            for cause, count in (("retried", failing), ("expired", burst - 1), ("released", number % 3)):
                if count:
                    tables["redeliveries"].append(
                        {"queue": queue, "minute": minute(number), "cause": cause, "count": count}
                    )
            reason = ("rejected", "retries_exhausted")[number % 2]
            tables["dead_letters"].append({"queue": queue, "minute": minute(number), "reason": reason, "count": 1})
    return make_lake(path, audit, **tables)
