"""Shared records: small data by kind and name, changed by compare-and-set."""

from __future__ import annotations

from collections.abc import Sequence

from waypost.policy import RECORDS_SWEPT_MAX
from waypost.store.port import read_record_cursor, record_cursor
from waypost.values import RecordPage, RecordSaved, SharedRecord


class SharedRecords:
    """The shared records of a store."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, SharedRecord]] = {}

    def save(
        self, now: int, kind: str, name: str, data: bytes | None, version: int | None, ttl_ms: int | None, keep: int
    ) -> RecordSaved:
        """Save or remove a record, if it has the version that is expected."""
        records = self._kinds.setdefault(kind, {})
        found = records.get(name)
        if found is not None and is_over(found, now):
            del records[name]
            found = None
        if found is not None and found.data == data:
            return RecordSaved(True, found, now)
        if version is not None and version != (0 if found is None else found.version):
            return RecordSaved(False, found, now)
        if data is None:
            records.pop(name, None)
            return RecordSaved(found is not None, None, now)
        until = None if ttl_ms is None else now + ttl_ms
        if found is None:
            records[name] = saved = SharedRecord(name, data, now, now, until)
            self._sweep(now, records, keep)
        else:
            records[name] = saved = SharedRecord(name, data, max(found.version + 1, now), found.created_ms, until)
        return RecordSaved(True, saved, now)

    @staticmethod
    def _sweep(now: int, records: dict[str, SharedRecord], keep: int) -> None:
        oldest = sorted(records.values(), key=order)
        surplus = max(0, len(records) - keep)
        for index, record in enumerate(oldest[:RECORDS_SWEPT_MAX]):
            if index < surplus or is_over(record, now):
                del records[record.name]

    def page(self, now: int, kind: str, names: Sequence[str], cursor: str | None, limit: int) -> RecordPage:
        """Return records, the newest first, or those of these names."""
        records = self._kinds.get(kind, {})
        chosen = [record for record in records.values() if not is_over(record, now)]
        if names:
            return RecordPage(sorted((r for r in chosen if r.name in names), key=order, reverse=True), None, now)
        before = read_record_cursor(cursor)
        chosen = sorted((r for r in chosen if before is None or order(r) < before), key=order, reverse=True)
        page = chosen[:limit]
        more = record_cursor(*order(page[-1])) if len(chosen) > limit else None
        return RecordPage(page, more, now)


def order(record: SharedRecord) -> tuple[int, str]:
    """By creation, then by name."""
    return record.created_ms, record.name


def is_over(record: SharedRecord, now: int) -> bool:
    """Whether a record has expired."""
    return record.until_ms is not None and record.until_ms <= now
