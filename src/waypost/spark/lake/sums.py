"""Sums: events counted by queue and minute, and by what gold distinguishes. They merge by adding.

Computed with pyarrow where the events are read, so that they cost no query of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from waypost.spark.lake.percentiles import BUCKET_OF_ZERO, GROWTH
from waypost.spark.source.tables import BACKFILL_PREFIX

#: A claim within this time after its message became claimable counts as prompt: a worker was awake or woken.
PROMPT_MS: Final = 100
#: The reason by which sums know a change of what the journal keeps.
JOURNAL_LEVEL: Final = "journal"
#: The columns of events that are summed up.
SUM_COLUMNS: Final = (
    "queue", "number", "at_ms", "event", "message_id", "cause", "reason", "error_type", "wait_ms", "run_ms",
)  # fmt: skip
KEYS: Final = ("queue", "minute_ms", "event", "cause", "reason", "error_type", "measure", "bucket", "backfill")
#: An event of the journal, or `late` for timers that were claimed; the measure that it has, and its bucket.
SUMS: Final = pa.schema(
    [
        ("queue", pa.string()),
        ("minute_ms", pa.int64()),
        ("event", pa.string()),
        ("cause", pa.string()),
        ("reason", pa.string()),
        ("error_type", pa.string()),
        ("measure", pa.string()),
        ("bucket", pa.int32()),
        ("events", pa.int64()),
        ("woken", pa.int64()),
        ("total_ms", pa.int64()),
        ("first_number", pa.int64()),
        ("last_number", pa.int64()),
        # Whether the messages were published by a backfill; null counts as false.
        ("backfill", pa.bool_()),
    ]
)
_MINUTE_MS: Final = 60_000


def sum_events(events: Any, step_ms: int = _MINUTE_MS) -> Any:
    """Count events that are alike, by steps of a minute or less."""
    event = events.column("event")
    claimed = pc.equal(event, "claimed")
    measured = pc.if_else(claimed, events.column("wait_ms"), events.column("run_ms"))
    has_value = pc.is_valid(measured)
    value = pc.if_else(has_value, pc.max_element_wise(measured, 0, skip_nulls=False), None)
    cause, reason, died = events.column("cause"), events.column("reason"), pc.equal(event, "dead")
    is_level = pc.and_(pc.equal(event, "configured"), pc.fill_null(pc.match_substring(cause, "journal="), False))
    nothing = pa.scalar(None, pa.string())
    prompt = pc.fill_null(pc.less_equal(events.column("wait_ms"), PROMPT_MS), False)
    number = events.column("number")
    columns = {
        "queue": events.column("queue"),
        "minute_ms": floor_to_step(events.column("at_ms"), step_ms),
        "event": event,
        "cause": pc.if_else(claimed, cause, nothing),
        "reason": pc.if_else(died, reason, pc.if_else(is_level, JOURNAL_LEVEL, nothing)),
        "error_type": pc.if_else(died, events.column("error_type"), nothing),
        "measure": pc.if_else(has_value, pc.if_else(claimed, "wait", "run"), nothing),
        "bucket": bucket_of(value),
        "events": pa.nulls(events.num_rows, pa.int64()).fill_null(1),
        "woken": pc.and_(claimed, prompt).cast(pa.int64()),
        "total_ms": pc.fill_null(value, 0),
        "first_number": number,
        "last_number": number,
        "backfill": are_backfilled(events.column("message_id")),
    }
    return merge_sums([pa.table(columns).cast(SUMS)])


def are_backfilled(message_ids: Any) -> Any:
    """Return for each id whether a backfill made it."""
    return pc.fill_null(pc.starts_with(message_ids, BACKFILL_PREFIX), False)


def without_backfilled(sums: Any) -> Any:
    """Return sums without those of messages that a backfill published."""
    return sums.filter(pc.invert(pc.fill_null(sums.column("backfill"), False)))


def sum_late(queue: Any, message_ids: Any, claimed_ms: Any, late_ms: Any) -> Any:
    """Count how late timers were claimed, one element for each claim."""
    late = pc.max_element_wise(late_ms, 0)
    count = len(late)
    nothing = pa.nulls(count, pa.string())
    columns = {
        "queue": queue,
        "minute_ms": floor_to_step(claimed_ms, _MINUTE_MS),
        "event": nothing.fill_null("late"),
        "cause": nothing,
        "reason": nothing,
        "error_type": nothing,
        "measure": nothing.fill_null("late"),
        "bucket": bucket_of(late),
        "events": pa.nulls(count, pa.int64()).fill_null(1),
        "woken": pa.nulls(count, pa.int64()).fill_null(0),
        "total_ms": late,
        "first_number": pa.nulls(count, pa.int64()),
        "last_number": pa.nulls(count, pa.int64()),
        "backfill": are_backfilled(message_ids),
    }
    return merge_sums([pa.table(columns).cast(SUMS)])


def floor_to_step(milliseconds: Any, step_ms: int) -> Any:
    """Return the beginning of the step of each time."""
    return pc.multiply(pc.divide(milliseconds, step_ms), step_ms)


def bucket_of(values: Any) -> Any:
    """Return the bucket of each number of milliseconds, as `percentiles.bucket_of` finds it."""
    safe = pc.max_element_wise(values, 1, skip_nulls=False).cast(pa.float64())
    bucket = pc.floor(pc.divide(pc.ln(safe), math.log(GROWTH))).cast(pa.int32())
    return pc.if_else(pc.less(values, 1), pa.scalar(BUCKET_OF_ZERO, pa.int32()), bucket)


def merge_sums(sums: Iterable[Any]) -> Any:
    """Return several sums as one."""
    rows = pa.concat_tables([SUMS.empty_table(), *sums])
    added = ("events", "woken", "total_ms")
    found = rows.group_by(list(KEYS), use_threads=False).aggregate(
        [*((name, "sum") for name in added), ("first_number", "min"), ("last_number", "max")]
    )
    names = {
        **{f"{name}_sum": name for name in added},
        "first_number_min": "first_number",
        "last_number_max": "last_number",
    }
    renamed = found.rename_columns([names.get(name, name) for name in found.column_names])
    return renamed.select(SUMS.names).cast(SUMS)


def add_up(rows: Sequence[Any], keys: Sequence[str], counts: Sequence[str]) -> Any:
    """Return rows with equal keys as one row, with the sums of its counts."""
    whole = pa.concat_tables(rows)
    found = whole.group_by(list(keys), use_threads=False).aggregate([(name, "sum") for name in counts])
    return found.rename_columns(
        [name.removesuffix("_sum") if name not in keys else name for name in found.column_names]
    )
