"""Messages that lapse: messages that were not claimed before their expiry end as dropped, with cause lapsed.

The expiry is a column that only this module reads. A leased message is not in its index, and is again when it returns.
"""

from __future__ import annotations

from collections.abc import Sequence

from waypost.policy import LAPSE_MAX
from waypost.store.port import Draft
from waypost.store.sqlite.check import usable
from waypost.store.sqlite.moves import end
from waypost.store.sqlite.queue_records import COLUMNS, QueueRecords, as_list

_CAN_LAPSE = "m.expires_ms IS NOT NULL AND m.state <> {LEASED} AND m.state < {DEAD}"
_LAPSED = f"""
    SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:expires}}
    WHERE m.queue = ? AND {_CAN_LAPSE} AND m.expires_ms <= ? ORDER BY m.expires_ms, m.id LIMIT ?"""
_LAPSED_OF_KEYS = f"""
    SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:expires}}
    WHERE m.queue = ? AND {_CAN_LAPSE} AND m.expires_ms <= ? AND m.key IN (SELECT value FROM json_each(?))
    ORDER BY m.expires_ms, m.id"""
_NEXT = f"SELECT min(m.expires_ms) FROM {{message}} m INDEXED BY {{message:expires}} WHERE m.queue = ? AND {_CAN_LAPSE}"
_SET = "UPDATE {message} SET expires_ms = ? WHERE seq = ?"
_CLEAR = "UPDATE {message} SET expires_ms = NULL WHERE seq IN (SELECT value FROM json_each(?))"


def lapse(records: QueueRecords, operation: str | None) -> bool:
    """End messages that have lapsed, the earliest first, a bounded number; return whether there may be more."""
    records.flush_messages()
    if records.at_start is not None and not records.moments_changed:
        first_ms = records.at_start.expires_ms
        if first_ms is None or first_ms > records.now:
            return False
    rows = records.step.execute(_LAPSED, (records.number, records.now, LAPSE_MAX)).fetchall()
    if rows:
        records.moments_changed = True
        _end(records, rows, operation)
        records.flush_and_forget()
    return len(rows) == LAPSE_MAX


def lapse_keys(records: QueueRecords, keys: list[str], operation: str | None) -> None:
    """End messages of these keys that have lapsed: they must not block their keys for the next messages."""
    rows = records.step.execute(_LAPSED_OF_KEYS, (records.number, records.now, as_list(keys))).fetchall()
    if rows:
        _end(records, rows, operation)
        records.flush_messages()


def _end(records: QueueRecords, rows: list[tuple[object, ...]], operation: str | None) -> None:
    lapsed = [records.hold(row) for row in usable(records, rows)]
    records.load_holders([record.key for record in lapsed if record.key is not None])
    for record in lapsed:
        end(records, record, "dropped", operation, cause="lapsed")


def next_moment(records: QueueRecords) -> int | None:
    """Return the milliseconds until the next timer is due, or the next message lapses."""
    due = records.next_due()
    if records.at_start is not None and records.at_start.expires_ms is None and not records.moments_changed:
        return due
    expires_ms: int | None = records.step.execute(_NEXT, (records.number,)).fetchone()[0]
    if expires_ms is None:
        return due
    remaining = max(0, expires_ms - records.now)
    return remaining if due is None else min(due, remaining)


def set_expiries(records: QueueRecords, drafts: Sequence[Draft], first: int) -> None:
    """Set the expiry of drafts that have one; they were stored with numbers from `first` on."""
    records.flush_messages()
    rows = [(draft.expiry(records.now), seq) for seq, draft in enumerate(drafts, first) if draft.expires_ms]
    records.step.execute_many(_SET, rows)
    records.moments_changed = True


def clear_expiries(records: QueueRecords, seqs: Sequence[int]) -> None:
    """Remove the expiry of messages: dead letters that are made ready again do not lapse."""
    records.step.execute(_CLEAR, (as_list(seqs),))
