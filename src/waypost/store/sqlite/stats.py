"""The figures of a queue: its ledger, its ages and its minutes."""

from __future__ import annotations

from waypost.policy import HEAD_OFFSET, MINUTES_KEPT, OLDEST_READ_MAX, PRIORITY_MAX, PRIORITY_MIN
from waypost.store.sqlite.admin import read_changes
from waypost.store.sqlite.queue_records import QueueRecords
from waypost.values import MINUTE_COUNTERS, REDELIVERY_CAUSES, Ledger, MinuteRecord, StatsRecord

_HEAD = """
    SELECT min(ready_ms) FROM (
        SELECT ready_ms FROM {message} INDEXED BY {message:ready}
        WHERE queue = ? AND state = {READY} AND priority = ? AND position >= ? ORDER BY position, id LIMIT ?)"""
_OLDEST_LEASED = """
    SELECT min(claimed_ms) FROM {message} INDEXED BY {message:leased} WHERE queue = ? AND state = {LEASED}"""
_SLEEPERS = """
    SELECT count(*) FROM {sleeper} INDEXED BY {sleeper:until}
    WHERE queue = ? AND until_ms > ? AND name NOT GLOB '~*'"""
_MINUTES = (
    f"SELECT minute, {', '.join(MINUTE_COUNTERS)} FROM {{minute}} WHERE queue = ? AND minute >= ? ORDER BY minute"
)


def ledger(records: QueueRecords) -> Ledger:
    """Return the ledger: what became of every message of the queue, from the queue's row alone."""
    n = records.numbers
    return Ledger(
        n["published"], n["redriven"], n["ready"], n["delayed"], n["waiting"], n["leased"],
        n["done"], n["dead"], n["dropped"], n["cancelled"], n["replaced"], n["dead_kept"],
        n["claims"], n["first_claims"], {cause: n[f"again_{cause}"] for cause in REDELIVERY_CAUSES},
        n["expired"], n["released"], n["retried"], n["snoozed"], n["duplicates"], n["transferred"],
        n["over_cap"],
    )  # fmt: skip


def _oldest_ready(records: QueueRecords) -> int | None:
    """Return the longest wait among the first messages of each priority, and among reclaimed ones."""
    most = 1 if records.policy.order is None else OLDEST_READ_MAX
    heads = [
        records.step.execute(_HEAD, (records.number, priority, first, most)).fetchone()[0]
        for priority in range(PRIORITY_MIN, PRIORITY_MAX + 1)
        for first in (-HEAD_OFFSET, 0)
    ]
    return max((records.now - ready_ms for ready_ms in heads if ready_ms is not None), default=None)


def stats(records: QueueRecords, minutes: int) -> StatsRecord:
    """Return the figures of a queue."""
    now, number, execute = records.now, records.number, records.step.execute
    oldest_leased = execute(_OLDEST_LEASED, (number,)).fetchone()[0]
    first = now // 60_000 - min(minutes, MINUTES_KEPT) + 1
    return StatsRecord(
        records.name, now, ledger(records), records.paused,
        _oldest_ready(records),
        None if oldest_leased is None else now - oldest_leased,
        records.next_due(), records.next_lease(),
        execute(_SLEEPERS, (number, now)).fetchone()[0],
        records.numbers["journal_first"], records.numbers["journal_last"], records.readers(),
        [
            MinuteRecord(
                minute * 60_000,
                {name: n for name, n in zip(MINUTE_COUNTERS, counts, strict=True) if n is not None},
            )
            for minute, *counts in execute(_MINUTES, (number, first))
        ],
        changes=[change for change in read_changes(records) if change.at_ms // 60_000 >= first] if minutes else [],
    )  # fmt: skip
