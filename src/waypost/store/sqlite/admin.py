"""Administer a queue: redrive, purge, configure, pause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec
from msgspec import structs

from waypost.errors import InvalidPolicy
from waypost.policy import CHANGES_KEPT, LEASE_NEEDED, PolicyRecord, Unique
from waypost.store.port import Draft, format_changes
from waypost.store.sqlite.check import usable
from waypost.store.sqlite.expires import clear_expiries
from waypost.store.sqlite.groups import configured, has_limited_groups
from waypost.store.sqlite.moves import (
    LIVE_OR_DEAD,
    end,
    forget_completed,
    forget_window,
    keep_key,
    make_claimable,
    remove_letter,
)
from waypost.store.sqlite.peek import BY_GROUP, ORDERS
from waypost.store.sqlite.publish import count_over_cap, find_windows, publish
from waypost.store.sqlite.queue_records import COLUMNS, Holder, QueueRecords, as_list
from waypost.store.sqlite.schema import DEAD, STATE_NUMBERS
from waypost.values import ChangeRecord, EventName, MessageState, Published, Purged, Redriven

_DEAD_ALL = f"""
    SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:dead}}
    WHERE m.queue = ? AND m.state = {DEAD} AND m.reason <> 'duplicate' ORDER BY m.ended_ms, m.id LIMIT ?"""
_DEAD_BY_REASON = f"""
    SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:reason}}
    WHERE m.queue = ? AND m.state = {DEAD} AND m.reason = ? ORDER BY m.ended_ms, m.id LIMIT ?"""
_DEAD_BY_ID = f"""
    SELECT {COLUMNS}
    FROM (SELECT DISTINCT value FROM json_each(?)) j CROSS JOIN {{message}} m INDEXED BY {{message:id}}
    WHERE m.queue = ? AND m.id = j.value AND m.state = {DEAD} AND (?3 IS NULL OR m.reason = ?3)
    ORDER BY m.ended_ms, m.id LIMIT ?"""

_CHANGES = "SELECT changes FROM {queue} WHERE number = ?"
_CHANGES_SET = "UPDATE {queue} SET changes = ? WHERE number = ?"
_decode_changes = msgspec.json.Decoder(list[ChangeRecord]).decode


def redrive(records: QueueRecords, limit: int, operation: str, ids: Sequence[str], reason: str | None) -> Redriven:
    """Make dead letters ready again; their counts start again, their token continues."""
    parameters: tuple[object, ...]
    if ids:
        query, parameters = _DEAD_BY_ID, (as_list(ids), records.number, reason, limit + 1)
    elif reason is not None:
        query, parameters = _DEAD_BY_REASON, (records.number, reason, limit + 1)
    else:
        # Without a filter, dead letters that are duplicates are excluded: they would be chosen again and again.
        query, parameters = _DEAD_ALL, (records.number, limit + 1)
    chosen = [records.hold(row) for row in usable(records, records.step.execute(query, parameters).fetchall())]
    records.load_holders([record.key for record in chosen if record.key is not None])
    windows = find_windows(records, [record.key for record in chosen if record.key is not None])
    moved, duplicates = [], []
    for record in chosen[:limit]:
        if record.key is not None:
            if records.holders[record.key] is not None or windows.get(record.key, record.id) != record.id:
                record.reason = "duplicate"
                records.touch(record)
                duplicates.append(record.id)
                continue
            if record.key_mode == LIVE_OR_DEAD:
                forget_window(records, record)
            records.holders[record.key] = Holder(record)
        record.deliveries = record.attempts = record.cancel_requested = 0
        record.reason = record.error_type = record.error = record.ended_ms = None
        record.cause, record.position = "redriven", 0
        records.count_up("redriven")
        records.note("redriven", operation, record)
        make_claimable(records, record, records.now)
        moved.append(record.id)
    clear_expiries(records, [record.seq for record in chosen[:limit]])
    count_over_cap(records, len(moved))
    return Redriven(moved, duplicates, len(chosen) > limit)


def replace_dead(records: QueueRecords, message_id: str, draft: Draft, operation: str) -> Published | None:
    """Publish a message in place of a dead letter; None if there is no such letter."""
    rows = records.step.execute(_DEAD_BY_ID, (as_list([message_id]), records.number, None, 1)).fetchall()
    letters = [records.hold(row) for row in usable(records, rows)]
    if not letters:
        return None
    letter = letters[0]
    # The message inherits from the letter how long its key is in use, and the key itself.
    had_key = letter.key_mode == LIVE_OR_DEAD and forget_window(records, letter)
    unique: Unique = get_args(Unique)[letter.key_mode or 0]
    (published,) = publish(records, [structs.replace(draft, unique=unique)], operation)
    if published.status in ("queued", "delayed"):
        records.remove(letter)
        records.note("dead_trimmed", operation, letter, cause="edited")
    elif had_key:
        keep_key(records, letter)
    return published


def purge(records: QueueRecords, state: MessageState, limit: int, operation: str, ids: Sequence[str] = ()) -> Purged:
    """Remove messages of one state, in the order of its listing, up to a limit."""
    if state == "done":
        return Purged(forget_completed(records, limit), records.numbers["completed"] > 0)
    index, order, where = str(state), ORDERS[state], ""
    if state == "ready" and records.groups is not None and records.groups.takes_turns:
        index, order, where = "group", BY_GROUP, " AND m.rank IS NOT NULL"
    query = (
        f"SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:{index}}} "
        f"WHERE m.queue = ? AND m.state = {STATE_NUMBERS[state]}{where} ORDER BY {order} LIMIT ?"
    )
    parameters: tuple[object, ...] = (records.number, limit + 1)
    if ids:
        query, parameters = _DEAD_BY_ID, (as_list(ids), records.number, None, limit + 1)
    rows = records.step.execute(query, parameters).fetchall()
    chosen = [records.hold(row) for row in usable(records, rows[:limit])]
    records.load_holders([record.key for record in chosen if record.key is not None])
    for record in chosen:
        if state == "dead":
            remove_letter(records, record)
            records.note("dead_trimmed", operation, record, cause="purge")
        else:
            end(records, record, "cancelled", operation, cause="purge")
    return Purged(len(chosen), len(rows) > limit)


def configure(records: QueueRecords, changes: Mapping[str, Any]) -> PolicyRecord:
    """Change the queue's policy; it takes effect at the next step."""
    records.make()
    before, text = records.policy, format_changes(changes)
    after = before.changed(changes)
    if after.grouped and after.lease_ms is None and has_limited_groups(records):
        raise InvalidPolicy(LEASE_NEEDED)
    records.set_policy(after)
    configured(records, before)
    records.note("configured", None, cause=text)
    if records.policy != before:
        _keep_change(records, "configured", text)
    return records.policy


def set_paused(records: QueueRecords, paused: bool) -> bool:
    """Return whether this changed anything."""
    if paused:
        records.make()
    if records.paused == paused:
        return False
    records.paused = paused
    event: EventName = "paused" if paused else "resumed"
    records.note(event, None)
    _keep_change(records, event, "")
    return True


def read_changes(records: QueueRecords) -> list[ChangeRecord]:
    """Return the last changes of the queue's settings, oldest first."""
    row = records.step.execute(_CHANGES, (records.number,)).fetchone()
    return [] if row is None or row[0] is None else _decode_changes(row[0])


def _keep_change(records: QueueRecords, event: EventName, text: str) -> None:
    kept = [*read_changes(records), ChangeRecord(records.now, event, text)][-CHANGES_KEPT:]
    records.step.execute(_CHANGES_SET, (msgspec.json.encode(kept), records.number))


def worth_waking(records: QueueRecords) -> int:
    """Return how many sleepers a changed limit should wake."""
    return records.numbers["ready"] + (records.numbers["delayed"] > 0)


def worth_resuming(records: QueueRecords) -> int:
    """Return how many sleepers a resume should wake: one of them for timers and lease ends."""
    return records.numbers["ready"] + (records.numbers["delayed"] + records.numbers["leased"] > 0)
