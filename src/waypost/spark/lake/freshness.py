"""What a run of the pipeline did, and how far the lake is behind the journal: as JSON, and as Prometheus metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from waypost.spark.lake.tables import BRONZE_JOURNAL
from waypost.spark.source.bulk import Bulk, open_bulk

if TYPE_CHECKING:
    from waypost.spark.lake.lake import State
    from waypost.spark.lake.pipeline import Pipeline


class QueueLag(msgspec.Struct, frozen=True):
    """How far the lake has read the journal of one queue, and how much it has not read."""

    #: The number of the last event that is in the lake, and of the newest in the journal.
    offset: int
    newest: int
    #: Events that the lake has not read, and the age of the oldest of them by the store's clock.
    lag_events: int
    lag_seconds: float
    #: Events that were trimmed before they were read.
    not_seen: int = 0


class RunReport(msgspec.Struct, frozen=True):
    """What one run did."""

    lake: str
    at_ms: int
    #: The step after the run; a number that is in the table `_steps`.
    step: int
    #: How long the start of Spark took, the run after it, and both.
    seconds: dict[str, float]
    #: Events and rows of each table that this run added.
    events_added: int
    rows_added: dict[str, int]
    offsets: dict[str, QueueLag]


def measure_lag(bulk: Bulk, state: State) -> dict[str, QueueLag]:
    """Return how far each queue of a lake is behind, also those of which it has nothing yet."""
    now = bulk.run(bulk.store.time())
    chosen = None if state.source is None else state.source.queues
    found = {}
    for queue in sorted(chosen or {*state.offsets, *bulk.run(bulk.store.queues())}):
        offset, newest = state.offsets.get(queue, 0), bulk.bounds(queue)[1]
        behind = max(0, newest - offset)
        age = 0.0
        if behind:
            oldest = bulk.run(bulk.store.journal(queue, offset, 1)).events
            age = max(0, now - oldest[0].at_ms) / 1000 if oldest else 0.0
        seen = state.seen.get(queue)
        found[queue] = QueueLag(offset, newest, behind, age, 0 if seen is None else seen.not_seen)
    return found


def report_run(pipeline: Pipeline, before: Mapping[str, int], seconds: Mapping[str, float]) -> RunReport:
    """Return what a run did, and how far the lake is behind the journal now."""
    lake = pipeline.lake
    added = {name: rows - before.get(name, 0) for name, rows in lake.count_rows().items()}
    with open_bulk(pipeline.place) as bulk:
        lag = measure_lag(bulk, lake.state)
    return RunReport(
        lake.files.address, time.time_ns() // 1_000_000, lake.step,
        {name: round(value, 3) for name, value in seconds.items()}, added.get(BRONZE_JOURNAL.name, 0), added, lag,
    )  # fmt: skip


#: The gauges of a run: name, what it is, and the label of its values.
GAUGES: Final = (
    ("waypost_lake_run_timestamp_seconds", "When the last run of the pipeline ended, as a Unix time."),
    ("waypost_lake_run_seconds", "How long the last run took."),
    ("waypost_lake_run_events", "Events that the last run added to the lake."),
    ("waypost_lake_offset", "The number of the last event of the journal that is in the lake."),
    ("waypost_lake_lag_events", "Events of the journal that are not in the lake."),
    ("waypost_lake_lag_seconds", "The age of the oldest event that is not in the lake."),
    ("waypost_lake_not_seen_events", "Events that were trimmed from the journal before the lake read them."),
)


#: The field of `QueueLag` that a gauge of a queue has.
_OF_QUEUE: Final = {
    "waypost_lake_offset": "offset",
    "waypost_lake_lag_events": "lag_events",
    "waypost_lake_lag_seconds": "lag_seconds",
    "waypost_lake_not_seen_events": "not_seen",
}


def metric_values(report: RunReport, name: str) -> dict[str | None, float]:
    """Return the values of a gauge by queue, or one value under None."""
    if name in _OF_QUEUE:
        return {queue: getattr(lag, _OF_QUEUE[name]) for queue, lag in report.offsets.items()}
    of_run = {
        "waypost_lake_run_timestamp_seconds": report.at_ms / 1000,
        "waypost_lake_run_seconds": round(report.seconds.get("total", 0.0), 3),
        "waypost_lake_run_events": report.events_added,
    }
    return {None: of_run[name]}


def format_metrics(report: RunReport) -> str:
    """Return the metrics of a run in the text format of Prometheus."""
    lines = []
    for name, text in GAUGES:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        for queue, value in metric_values(report, name).items():
            lines.append(f"{name} {value}" if queue is None else f'{name}{{queue="{queue}"}} {value}')
    return "\n".join(lines) + "\n"


def write_metrics(report: RunReport, path: str) -> None:
    """Write the metrics of a run to a file, whole or not at all: a collector may read it at any moment."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}-{os.getpid()}.tmp")
    temporary.write_text(format_metrics(report), encoding="utf-8")
    temporary.replace(target)
