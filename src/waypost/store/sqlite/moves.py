"""State changes of a message: to the ready messages, to the head of its priority, to its end; its key and its chain.

Every verb that changes messages uses these functions, each of which updates the ledger, the journal and the keys
together with the message.
"""

from __future__ import annotations

from waypost.identity import continuation_id
from waypost.policy import ENDED_TTL_MS, HEAD_OFFSET, NO_END_MS, RECLAIM_MAX, UNIQUE_NUMBERS
from waypost.store.port import cut_error
from waypost.store.sqlite.queue_records import COLUMNS, QueueRecords, Record
from waypost.store.sqlite.schema import DEAD, DELAYED, LEASED, READY, WAITING
from waypost.values import NOT_RUNS, EventName, Notice, chain_id, split_chain_id

LIVE_OR_DEAD = UNIQUE_NUMBERS["live_or_dead"]
#: Ends after which a key is free at once, even inside its window.
FREES_WINDOW = frozenset(("dead", "cancelled", "dropped", "replaced"))

WINDOW_SET = """
    INSERT INTO {window} (queue, key, message_id, until_ms) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET message_id = excluded.message_id, until_ms = excluded.until_ms"""
_WINDOW_FREE = "DELETE FROM {window} WHERE queue = ? AND key = ? AND message_id = ?"
_KEY_BACK = "UPDATE {message} SET key = freed_key, freed_key = NULL WHERE seq = ?"
_DEAD_OLDEST = f"""
    SELECT {COLUMNS} FROM {{message}} m INDEXED BY {{message:dead}}
    WHERE m.queue = ? AND m.state = {DEAD} ORDER BY m.ended_ms, m.id LIMIT ?"""
_DEAD_OLD = """
    SELECT count(*) FROM (
        SELECT 1 FROM {message} INDEXED BY {message:dead}
        WHERE queue = ? AND state = {DEAD} AND ended_ms <= ? LIMIT ?)"""
_COMPLETED_INSERT = """
    INSERT INTO {completed} (
        seq, queue, number, id, key, "group", priority, token, deliveries, attempts, published_ms, ready_ms,
        cancel_requested, ended_ms, reason, error_type, error
    ) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_COMPLETED_OLDEST = "SELECT seq FROM {completed} WHERE queue = ? ORDER BY number LIMIT ?"
_COMPLETED_DELETE = "DELETE FROM {completed} WHERE seq = ?"
_ENVELOPE_DELETE = "DELETE FROM {envelope} WHERE seq = ?"
_CHAIN_BEGIN = "INSERT INTO {chain} (queue, id, until_ms) VALUES (?, ?, ?)"
_MEMBER_BEGIN = "INSERT INTO {member} (queue, chain, name, count) VALUES (?, ?, ?, 1)"
_CHAINS_OLD = """
    SELECT c.queue, c.id, c.failed IS NULL AND EXISTS (
        SELECT 1 FROM {member} m WHERE m.queue = c.queue AND m.chain = c.id)
    FROM {chain} c INDEXED BY {chain:until} WHERE c.until_ms <= ? ORDER BY c.until_ms LIMIT 8"""
#: The previous release gave unfinished chains an expiry.
_CHAIN_KEEP = f"UPDATE {{chain}} SET until_ms = {NO_END_MS} WHERE queue = ? AND id = ?"
_CHAIN_FORGET = (
    "DELETE FROM {chain} WHERE queue = ? AND id = ?",
    "DELETE FROM {member} WHERE queue = ? AND chain = ?",
    "DELETE FROM {watcher} WHERE queue = ? AND chain = ?",
)
_BLOCKER = "INSERT INTO {blocker} (seq, chain) VALUES (?, ?)"
_BLOCKERS_FORGET = "DELETE FROM {blocker} WHERE seq = ?"
_WAITERS_OUT = "DELETE FROM {waiter} WHERE queue = ? AND id = ? RETURNING name, until_ms"
_ENDING = """
    INSERT INTO {ending} (queue, id, how, until_ms) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET how = excluded.how, until_ms = excluded.until_ms"""


def place(records: QueueRecords, record: Record, ready_ms: int) -> int:
    """Return the state of a message that may be claimed from `ready_ms` on; a ready one gets its position.

    In an ordered group it keeps its position, if it has one.
    """
    groups = records.groups
    if ready_ms > records.now:
        if groups is not None and not groups.is_ordered(record.group):
            record.position = 0
        return DELAYED
    if groups is None or not groups.keeps_place(record):
        record.position = records.numbers["sequence"] = records.numbers["sequence"] + 1
        if groups is not None:
            groups.joined(record)
    if groups is None or groups.is_worth_waking(record):
        records.freshly_ready += 1
    return READY


def make_claimable(records: QueueRecords, record: Record, ready_ms: int) -> None:
    """Put a message at the end of its priority, or among the timers if it is not due."""
    record.ready_ms = ready_ms
    records.move(record, place(records, record, ready_ms))
    records.touch(record)


def to_head(records: QueueRecords, record: Record, ready_ms: int, cause: str) -> None:
    """Put a message before all others of its priority, in the order of `ready_ms`; or back into its ordered group."""
    groups = records.groups
    record.cause, record.ready_ms = cause, ready_ms
    if groups is None or not groups.keeps_place(record):
        record.position = ready_ms - HEAD_OFFSET
        if groups is not None:
            groups.joined(record)
    if groups is None or groups.is_worth_waking(record):
        records.freshly_ready += 1
    records.move(record, READY)
    records.touch(record)


def ends_otherwise(records: QueueRecords, record: Record, operation: str | None, cause: str) -> bool:
    """End a delivery whose message would return if it was cancelled or its key has a next generation."""
    if record.cancel_requested:
        end(records, record, "cancelled", operation, cause=cause)
        return True
    if record.key is not None:
        holder = records.holder(record.key)
        if holder is not None and holder.owner is record and holder.parked is not None:
            end(records, record, "replaced", operation, cause=cause)
            return True
    return False


def end(
    records: QueueRecords,
    record: Record,
    how: EventName,
    operation: str | None,
    *,
    cause: str | None = None,
    begun: tuple[str, ...] = (),
) -> None:
    """End a message: count and journal it, and release its key or pass it to the next generation."""
    records.count_up(how)
    if record.state == LEASED and cause not in NOT_RUNS:
        records.count_run(record)
    dead = how == "dead"
    is_blocked = record.state == WAITING and record.key is None
    note = records.note_run if record.state == LEASED else records.note
    note(
        how,
        operation,
        record,
        cause=cause,
        reason=record.reason if dead else None,
        error_type=record.error_type if dead else None,
        error=cut_error(record.error) if dead else None,
    )
    key = record.key
    holder = None if key is None else records.holder(key)
    if dead:
        records.move(record, DEAD)
        records.touch(record)
        if record.freed_key is not None:
            # Several dead letters may have one key.
            records.flush_messages()
            records.step.execute(_KEY_BACK, (record.seq,))
            record.key, record.freed_key = record.freed_key, None
    elif how == "done" and records.policy.completed_max:
        records.remove(record, keep_envelope=True)
        _complete(records, record)
    else:
        records.remove(record)
    if record.chain is not None or is_blocked or records.is_awaited:
        ended(records, record, how, begun)
    if key is None:
        return
    if how in FREES_WINDOW:
        forget_window(records, record)
    if holder is None:
        return
    if holder.parked is record:
        holder.parked = None
    elif holder.owner is record:
        heir = holder.parked
        if heir is None:
            records.holders[key] = None
            if dead:
                keep_key(records, record)
            return
        holder.owner, holder.parked = heir, None
        make_claimable(records, heir, heir.ready_after_wait(records.now))
        records.note("promoted", operation, heir, cause="unparked")


def _complete(records: QueueRecords, record: Record) -> None:
    """Store it in the history of finished messages, whose oldest is deleted when the history is full."""
    numbers = records.numbers
    numbers["completed_last"] += 1
    numbers["completed"] += 1
    # The message must have been removed from its table first: the history takes over its envelope.
    records.flush_messages()
    records.step.execute(
        _COMPLETED_INSERT,
        (
            record.seq, records.number, numbers["completed_last"], record.id, record.published_key, record.group,
            record.priority, record.token, record.deliveries, record.attempts, record.published_ms, record.ready_ms,
            record.cancel_requested, records.now, record.reason, record.error_type, record.error,
        ),
    )  # fmt: skip
    surplus = numbers["completed"] - records.policy.completed_max
    if surplus > 0:
        forget_completed(records, surplus)


def forget_completed(records: QueueRecords, count: int) -> int:
    """Delete the oldest finished messages; return how many there were."""
    seqs = records.step.execute(_COMPLETED_OLDEST, (records.number, count)).fetchall()
    records.step.execute_many(_COMPLETED_DELETE, seqs)
    records.step.execute_many(_ENVELOPE_DELETE, seqs)
    records.numbers["completed"] -= len(seqs)
    return len(seqs)


def bury(records: QueueRecords, record: Record, reason: str, operation: str | None) -> None:
    """Make it a dead letter; the oldest letters are deleted if the policy limits their number."""
    record.reason = reason
    record.ended_ms = records.now
    end(records, record, "dead", operation)
    trim_dead(records)


def trim_dead(records: QueueRecords) -> None:
    """Delete dead letters that are too many or too old, a bounded number at a time."""
    policy = records.policy
    if policy.dead_max is None and policy.dead_keep_ms is None:
        return
    records.flush_messages()
    surplus = 0 if policy.dead_max is None else max(0, records.numbers["dead_kept"] - policy.dead_max)
    old = 0
    if policy.dead_keep_ms is not None:
        parameters = (records.number, records.now - policy.dead_keep_ms, RECLAIM_MAX)
        old = records.step.execute(_DEAD_OLD, parameters).fetchone()[0]
    count = min(RECLAIM_MAX, max(surplus, old))
    if count == 0:
        return
    for row in records.step.execute(_DEAD_OLDEST, (records.number, count)).fetchall():
        record = records.hold(row)
        remove_letter(records, record)
        records.note("dead_trimmed", None, record, cause="dead_max" if surplus else "dead_keep")


def remove_letter(records: QueueRecords, letter: Record) -> None:
    """Remove a dead letter, and free its key if it is in use."""
    if letter.key_mode == LIVE_OR_DEAD:
        forget_window(records, letter)
    records.remove(letter)


def forget_window(records: QueueRecords, record: Record) -> bool:
    """End the window of a message, the one of its publish or of a dead letter; return whether there was one."""
    return records.step.execute(_WINDOW_FREE, (records.number, record.key, record.id)).rowcount > 0


def keep_key(records: QueueRecords, letter: Record) -> None:
    """Keep the key of a dead letter in use if its mode says so: like that of a finished message, but without an end."""
    if letter.key_mode == LIVE_OR_DEAD:
        records.step.execute(WINDOW_SET, (records.number, letter.key, letter.id, NO_END_MS))


# ---- chains and waiters: notices are collected here, and `chains` applies them -----------------------------------


def begin(records: QueueRecords, record: Record, after: tuple[str, ...]) -> None:
    """Store the chain of which a new message is the first, and the chains that the message must wait for."""
    step, now = records.step, records.now
    member = chain_id(records.name, record.id)
    if record.chain == member:
        old = step.execute(_CHAINS_OLD, (now,)).fetchall()
        for forget in _CHAIN_FORGET:
            step.execute_many(forget, [(queue, id) for queue, id, unfinished in old if not unfinished])
        step.execute_many(_CHAIN_KEEP, [(queue, id) for queue, id, unfinished in old if unfinished])
        step.execute(_CHAIN_BEGIN, (records.number, record.id, NO_END_MS))
        step.execute(_MEMBER_BEGIN, (records.number, record.id, member))
    if after:
        # A removed message that waited may have had the same row number.
        step.execute(_BLOCKERS_FORGET, (record.seq,))
    for index, chain in enumerate(after):
        step.execute(_BLOCKER, (record.seq, chain))
        first_queue = split_chain_id(chain)[0]
        step.notices.append(Notice(continuation_id(record.id, index, -1), "watch", first_queue, chain, member))


def ended(records: QueueRecords, record: Record, how: EventName, begun: tuple[str, ...]) -> None:
    """Collect the notices of the end of a message, for its chain and its waiters."""
    if record.chain is not None:
        failed = None if how == "done" else (record.reason or how)
        notify_chain(records, record.chain, record.id, record.token, begun, failed)
    records.step.execute(_BLOCKERS_FORGET, (record.seq,))
    if records.is_awaited:
        names = wake_waiters(records, record.id)
        if names:
            records.sweep("ending", 1)
            records.step.execute(_ENDING, (records.number, record.id, how, records.now + ENDED_TTL_MS))


def wake_waiters(records: QueueRecords, id: str) -> list[tuple[str, int]]:
    """Remove the waiters for this end, and wake those whose wait has not expired."""
    names = records.step.execute(_WAITERS_OUT, (records.number, id)).fetchall()
    if names:
        waiters_to_wake = records.step.waiters_to_wake.setdefault(records.name, [])
        waiters_to_wake += [name for name, until in names if until > records.now]
    return names


def notify_chain(
    records: QueueRecords, chain: str, id: str, token: int, begun: tuple[str, ...], failed: str | None
) -> None:
    """Send the end of a message to the first queue of its chain."""
    first_queue, member = split_chain_id(chain)[0], chain_id(records.name, id)
    notice = Notice(continuation_id(id, token, -2), "ended", first_queue, chain, member, begun, failed)
    records.step.notices.append(notice)
