"""Publish: drafts become messages, unless their key is in use or they arrived before.

Everything is decided before anything is written: what happens to each draft, and whether there is room for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from waypost.policy import ARRIVAL_TTL_MS, BURY_MAX, PRIORITY_MAX, PRIORITY_MIN, UNIQUE_NUMBERS
from waypost.store.port import Draft, queue_full
from waypost.store.repeats import id_in_use
from waypost.store.sqlite.expires import lapse_keys, set_expiries
from waypost.store.sqlite.groups import oldest_of_longest, over_group_caps
from waypost.store.sqlite.moves import WINDOW_SET, begin, end, make_claimable, notify_chain, place
from waypost.store.sqlite.queue_records import (
    COLUMNS,
    ENVELOPE_BYTES_MAX,
    Holder,
    QueueRecords,
    Record,
    as_list,
)
from waypost.store.sqlite.schema import LEASED, READY, WAITING
from waypost.values import Published, PublishStatus

_WINDOWS = """
    SELECT w.key, w.message_id FROM json_each(?) j CROSS JOIN {window} w
    WHERE w.queue = ? AND w.key = j.value AND w.until_ms > ?"""
_KEY_MODE = "UPDATE {message} SET key_mode = ? WHERE seq = ?"
_ARRIVALS = """
    SELECT a.id FROM json_each(?) j CROSS JOIN {arrival} a WHERE a.queue = ? AND a.id = j.value AND a.until_ms > ?"""
_ARRIVAL_SET = """
    INSERT INTO {arrival} (queue, id, until_ms) VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET until_ms = excluded.until_ms"""
_DROPPABLE = f"""
    SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:ready}}
    WHERE m.queue = ? AND m.state = {READY} AND m.priority = ? ORDER BY m.position, m.id LIMIT ?"""

#: Why a message is ready again that was claimed after it joined its ordered group: it keeps its place in it.
CLAIMED_BEFORE = frozenset(("expired", "released", "retried", "snoozed"))

#: What to do with a draft, and the id of the message that it concerns.
Plan = tuple[str, str]


def publish(
    records: QueueRecords, drafts: Sequence[Draft], operation: str | None, *, schedule: str | None = None
) -> list[Published]:
    """Store drafts, and return the result of each."""
    expiring = any(draft.expires_ms for draft in drafts)
    if not expiring and _are_plain(records, drafts):
        return _publish_plain(records, drafts, operation, schedule)
    keys = [draft.key for draft in drafts if draft.key is not None]
    if keys:
        lapse_keys(records, keys, operation)
    plans = _plans(records, drafts)
    # The unique index finds an id that is in use when the message is written; but for these, something is written
    # before.
    of_chains = [draft.id for draft in drafts if draft.chain is not None or draft.after]
    if of_chains:
        records.load(of_chains)
    for draft, (action, holder_id) in zip(drafts, plans, strict=True):
        known = action == "replace" and holder_id == draft.id
        if known or (of_chains and action == "new" and draft.id in records.messages):
            raise id_in_use(records.name, draft.id)
    _make_room(records, drafts, plans, operation)
    records.make()
    seq = records.step.take_seq(len(drafts))
    results = [
        _store(records, draft, action, holder_id, seq + index, operation, schedule)
        for index, (draft, (action, holder_id)) in enumerate(zip(drafts, plans, strict=True))
    ]
    if expiring:
        set_expiries(records, drafts, seq)
    if keys:
        _set_key_modes(records, drafts, seq)
    _remember(records, drafts, plans)
    count_over_cap(
        records,
        sum(_passes_cap(draft) and action in ("new", "park") for draft, (action, _) in zip(drafts, plans, strict=True)),
    )
    return results


def _are_plain(records: QueueRecords, drafts: Sequence[Draft]) -> bool:
    """Return whether all are ready now, alike, and fit, with nothing else to decide: most batches are."""
    cap = records.policy.max_pending
    if not drafts or (cap is not None and _pending(records) + len(drafts) > cap):
        return False
    if records.groups is not None and records.groups.has_caps:
        return False
    priority, id_length = drafts[0].priority, len(drafts[0].id)
    for draft in drafts:
        if (
            draft.key is not None or draft.delay_ms or draft.at_ms is not None or draft.forwarded or draft.after
            or draft.chain is not None or draft.priority != priority or len(draft.id) != id_length
            or not 0 < len(draft.envelope) <= ENVELOPE_BYTES_MAX
        ):  # fmt: skip
            return False
    return True


def _publish_plain(
    records: QueueRecords, drafts: Sequence[Draft], operation: str | None, schedule: str | None
) -> list[Published]:
    """Store drafts that need no decision, all at once."""
    records.make()
    ids, envelopes = [draft.id for draft in drafts], [draft.envelope for draft in drafts]
    priority, groups, count = drafts[0].priority, [draft.group for draft in drafts], len(drafts)
    records.add_ready(records.step.take_seq(count), ids, envelopes, priority, groups)
    records.count_up("published", count)
    records.note_many(
        "published", operation, ids, priority=priority, group=groups, token=0, deliveries=0, attempts=0,
        cause=None, size=[len(envelope) for envelope in envelopes], schedule=schedule,
        body=[_copy(draft) for draft in drafts] if records.policy.journal == "full" else None,
    )  # fmt: skip
    name = records.name
    return [Published(id, "queued", name) for id in ids]


def _plans(records: QueueRecords, drafts: Sequence[Draft]) -> list[Plan]:
    keys = [draft.key for draft in drafts if draft.key is not None]
    forwarded = [draft.id for draft in drafts if draft.forwarded]
    if not keys and not forwarded:
        return [("new", draft.id) for draft in drafts]
    arrived: set[str] = set()
    if forwarded:
        records.load(forwarded)
        parameters = (as_list(forwarded), records.number, records.now)
        arrived = {row[0] for row in records.step.execute(_ARRIVALS, parameters)}
        arrived.update(id for id in forwarded if id in records.messages)
    windows: dict[str, str] = {}
    if keys:
        records.load_holders(keys)
        windows = find_windows(records, keys)
    return [_plan(records, draft, arrived, windows) for draft in drafts]


def find_windows(records: QueueRecords, keys: list[str]) -> dict[str, str]:
    """Return which of these keys are inside a window, and the message of each window."""
    return dict(records.step.execute(_WINDOWS, (as_list(keys), records.number, records.now)).fetchall())


def _plan(records: QueueRecords, draft: Draft, arrived: set[str], windows: dict[str, str]) -> Plan:
    if draft.forwarded and draft.id in arrived:
        return "arrived", draft.id
    if draft.key is None:
        return "new", draft.id
    holder = records.holders[draft.key]
    if holder is None:
        holder_id = windows.get(draft.key)
        if holder_id is None:
            return "new", draft.id
        return ("conflict" if draft.on_conflict == "error" else "duplicate"), holder_id
    check_schema = holder.parked or holder.owner
    if draft.on_conflict == "keep":
        return "duplicate", check_schema.id
    if draft.on_conflict == "error":
        return "conflict", check_schema.id
    if holder.parked is None and holder.owner.state == LEASED:
        return "park", holder.owner.id
    return draft.on_conflict, check_schema.id


def _make_room(records: QueueRecords, drafts: Sequence[Draft], plans: list[Plan], operation: str | None) -> None:
    cap = records.policy.max_pending
    groups = records.groups if records.policy.grouped else None
    capped_groups = groups is not None and groups.has_caps
    if cap is None and not capped_groups:
        return
    added = [
        draft
        for draft, (action, _) in zip(drafts, plans, strict=True)
        if action in ("new", "park") and not _passes_cap(draft)
    ]
    # One that replaces a message of another group is one more in its own.
    moved = [
        draft
        for draft, (action, holder_id) in zip(drafts, plans, strict=True)
        if action == "replace" and not _passes_cap(draft) and records.messages[holder_id].group != draft.group
    ]
    if not added and not (moved and capped_groups):
        return
    if capped_groups or (cap is not None and _pending(records) + len(added) > cap):
        # An id that is in use is refused as such, whether the queue is full or not.
        stored = [
            draft.id for draft, (action, _) in zip(drafts, plans, strict=True) if action in ("new", "park", "replace")
        ]
        records.load(stored)
        for id in stored:
            if id in records.messages:
                raise id_in_use(records.name, id)
    spared = {holder_id for _, holder_id in plans}
    doomed = over_group_caps(records, [draft.group for draft in added + moved], spared) if capped_groups else []
    spared.update(record.id for record in doomed)
    for record in doomed + _over_cap(records, len(added), len(doomed), spared):
        end(records, record, "dropped", operation, cause="overload")


def _over_cap(records: QueueRecords, added: int, dropped: int, spared: set[str]) -> list[Record]:
    """Return what must be dropped so that the queue does not exceed `max_pending`; raises `QueueFull`."""
    cap, pending = records.policy.max_pending, _pending(records)
    if cap is None or added == 0:
        return []
    over = min(pending - dropped + added - cap, added + BURY_MAX)
    if over <= 0:
        return []
    if records.policy.overload == "drop_oldest":
        in_turns = records.groups is not None and records.groups.takes_turns
        droppable = oldest_of_longest(records, over, spared) if in_turns else _oldest(records, over, spared)
        if len(droppable) == over:
            return droppable
    raise queue_full(records.name, pending, cap)


def _passes_cap(draft: Draft) -> bool:
    """Return whether it is part of a settle, so that it is never refused."""
    return draft.forwarded and not draft.capped


def _pending(records: QueueRecords) -> int:
    return records.numbers["ready"] + records.numbers["delayed"] + records.numbers["waiting"]


def count_over_cap(records: QueueRecords, added: int) -> None:
    """Count how many of the messages just accepted without a check of `max_pending` exceed it."""
    cap = records.policy.max_pending
    if added and cap is not None:
        records.numbers["over_cap"] += min(added, max(0, _pending(records) - cap))


def _oldest(records: QueueRecords, count: int, spared: set[str]) -> list[Record]:
    """Return the ready messages to drop first: lowest priority, then oldest, none that this publish concerns."""
    records.flush_messages()
    chosen: list[Record] = []
    for priority in range(PRIORITY_MIN, PRIORITY_MAX + 1):
        parameters = (records.number, priority, count - len(chosen) + len(spared))
        for row in records.step.execute(_DROPPABLE, parameters).fetchall():
            if len(chosen) < count and row[1] not in spared:
                chosen.append(records.hold(row))
        if len(chosen) == count:
            break
    return chosen


def _store(
    records: QueueRecords,
    draft: Draft,
    action: str,
    holder_id: str,
    seq: int,
    operation: str | None,
    schedule: str | None,
) -> Published:
    if action in ("duplicate", "conflict", "arrived"):
        records.count_up("duplicates")
        records.note("duplicate", operation, message_id=holder_id, key=draft.key)
        if draft.forwarded and draft.chain is not None and action != "arrived":
            # Another message, not of this chain, has the key: the branch of the draft ends here.
            notify_chain(records, draft.chain, draft.id, 0, (), "duplicate")
        return Published(holder_id, "conflict" if action == "conflict" else "duplicate", records.name)
    now = records.now
    due = draft.at_ms if draft.at_ms is not None else now + draft.delay_ms
    ready_ms = due if due > now else now
    if action == "extend":
        return _extend(records, holder_id, ready_ms, operation)

    status: PublishStatus = "delayed" if due > now else "queued"
    cause: str | None = "forwarded" if draft.forwarded else None
    envelope, key = draft.envelope, draft.key
    record = Record(
        seq,
        draft.id,
        WAITING,
        draft.priority,
        0,
        ready_ms,
        now,
        len(envelope),
        key,
        draft.group,
        chain=draft.chain,
        key_mode=UNIQUE_NUMBERS[draft.unique] or None,
    )
    waits = False
    if key is not None:
        holder = records.holder(key)
        if action == "park" and holder is not None:
            cause, waits, holder.parked = "parked", True, record
            status = "replaced" if draft.on_conflict == "replace" else "extended"
        elif action == "replace" and holder is not None:
            cause, status = "replace", "replaced"
            old = records.messages[holder_id]
            if old.state == WAITING:
                waits, holder.parked = True, record
            else:
                holder.owner = record
            end(records, old, "replaced", operation, cause="publish")
        else:
            records.holders[key] = Holder(record)
    elif draft.after:
        cause, waits = "blocked", True
    if not waits:
        record.state = place(records, record, ready_ms)
    records.add(record, envelope)
    if draft.chain is not None or draft.after:
        begin(records, record, draft.after)
    records.count_up("published")
    records.note(
        "published",
        operation,
        record,
        cause=cause,
        due_ms=ready_ms if due > now else None,
        body=_copy(draft) if records.policy.journal == "full" else None,
        schedule=schedule,
    )
    return Published(draft.id, status, records.name)


def _copy(draft: Draft) -> bytes:
    return draft.envelope if draft.journal_copy is None else draft.journal_copy


def _extend(records: QueueRecords, holder_id: str, ready_ms: int, operation: str | None) -> Published:
    record = records.messages[holder_id]
    if record.state == WAITING:
        record.ready_ms = ready_ms if ready_ms > records.now else record.published_ms
        records.touch(record)
    else:
        if record.cause not in CLAIMED_BEFORE:
            record.position = 0  # never claimed: it joins its group again when it is due
        make_claimable(records, record, ready_ms)
    records.note("postponed", operation, record, due_ms=ready_ms)
    return Published(holder_id, "extended", records.name)


def _set_key_modes(records: QueueRecords, drafts: Sequence[Draft], first: int) -> None:
    """Store how long messages keep their keys, if that is not simply while they are unfinished."""
    rows = [(UNIQUE_NUMBERS[draft.unique], seq) for seq, draft in enumerate(drafts, first) if draft.unique != "live"]
    if rows:
        records.flush_messages()
        records.step.execute_many(_KEY_MODE, rows)


def _remember(records: QueueRecords, drafts: Sequence[Draft], plans: list[Plan]) -> None:
    """Store the keys that stay in use after their message has ended, and the arrivals of continuations."""
    number, now = records.number, records.now
    windows = [
        (number, draft.key, draft.id, now + draft.window_ms)
        for draft, (action, _) in zip(drafts, plans, strict=True)
        if draft.window_ms and draft.key is not None and action in ("new", "park", "replace")
    ]
    if windows:
        records.sweep("window", len(windows))
        records.step.execute_many(WINDOW_SET, windows)
    # Also if its key was in use: that reply is final, and must not change when the message is sent again.
    arrivals = [
        (number, draft.id, now + ARRIVAL_TTL_MS)
        for draft, (action, _) in zip(drafts, plans, strict=True)
        if draft.forwarded and action != "arrived"
    ]
    if arrivals:
        records.sweep("arrival", len(arrivals))
        records.step.execute_many(_ARRIVAL_SET, arrivals)
