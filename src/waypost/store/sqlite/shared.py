"""Shared records: small data by kind and name, changed by compare-and-set."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from waypost.policy import RECORDS_SWEPT_MAX
from waypost.store.port import read_record_cursor, record_cursor
from waypost.store.sqlite.step import Step
from waypost.values import RecordPage, RecordSaved, SharedRecord

_COLUMNS = "name, data, version, created_ms, until_ms"
_FIND = f"SELECT {_COLUMNS} FROM {{record}} WHERE kind = ? AND name = ? AND (until_ms IS NULL OR until_ms > ?)"
_REMOVE = "DELETE FROM {record} WHERE kind = ? AND name = ?"
_WRITE = """
    INSERT INTO {record} (kind, name, data, version, created_ms, until_ms) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (kind, name) DO UPDATE SET data = excluded.data, version = excluded.version,
        created_ms = excluded.created_ms, until_ms = excluded.until_ms"""
_COUNT = "SELECT count(*) FROM {record} WHERE kind = ?"
_OLDEST = "SELECT name, until_ms FROM {record} WHERE kind = ? ORDER BY created_ms, name LIMIT ?"
_PAGE = f"""
    SELECT {_COLUMNS} FROM {{record}} INDEXED BY {{record:created}}
    WHERE kind = ?1 AND (?2 IS NULL OR (created_ms, name) < (?2, ?3)) AND (until_ms IS NULL OR until_ms > ?4)
    ORDER BY created_ms DESC, name DESC LIMIT ?5"""
_NAMED = f"""
    SELECT {_COLUMNS} FROM {{record}}
    WHERE kind = ? AND name IN (SELECT value FROM json_each(?)) AND (until_ms IS NULL OR until_ms > ?)
    ORDER BY created_ms DESC, name DESC"""


def save(
    step: Step, kind: str, name: str, data: bytes | None, version: int | None, ttl_ms: int | None, keep: int
) -> RecordSaved:
    """Save or remove a record, if it has the expected version."""
    now = step.now
    row = step.execute(_FIND, (kind, name, now)).fetchone()
    found = None if row is None else SharedRecord(*row)
    if found is not None and found.data == data:
        return RecordSaved(True, found, now)
    if version is not None and version != (0 if found is None else found.version):
        return RecordSaved(False, found, now)
    if data is None:
        step.execute(_REMOVE, (kind, name))
        return RecordSaved(found is not None, None, now)
    created = now if found is None else found.created_ms
    until = None if ttl_ms is None else now + ttl_ms
    saved = SharedRecord(name, data, now if found is None else max(found.version + 1, now), created, until)
    step.execute(_WRITE, (kind, name, data, saved.version, created, until))
    if found is None:
        _sweep(step, kind, keep)
    return RecordSaved(True, saved, now)


def _sweep(step: Step, kind: str, keep: int) -> None:
    """Delete the oldest records that are too many or have expired, a bounded number."""
    surplus = step.execute(_COUNT, (kind,)).fetchone()[0] - keep
    oldest = step.execute(_OLDEST, (kind, RECORDS_SWEPT_MAX)).fetchall()
    gone = [
        (kind, name)
        for index, (name, until) in enumerate(oldest)
        if index < surplus or (until is not None and until <= step.now)
    ]
    step.execute_many(_REMOVE, gone)


def page(step: Step, kind: str, names: Sequence[str], cursor: str | None, limit: int) -> RecordPage:
    """Return records, the newest first, or those with these names."""
    if names:
        rows = step.execute(_NAMED, (kind, msgspec.json.encode(names).decode(), step.now)).fetchall()
        return RecordPage([SharedRecord(*row) for row in rows], None, step.now)
    before = read_record_cursor(cursor) or (None, None)
    rows = step.execute(_PAGE, (kind, *before, step.now, limit + 1)).fetchall()
    found = [SharedRecord(*row) for row in rows[:limit]]
    more = record_cursor(found[-1].created_ms, found[-1].name) if len(rows) > limit else None
    return RecordPage(found, more, step.now)
