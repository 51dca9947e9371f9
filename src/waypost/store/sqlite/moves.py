"""How a message moves: to the ready messages, back to the head, to its end, and what becomes of its key and its chain.

Every verb that changes messages goes through these few functions, each of which keeps the ledger, the journal and
the keys in step with the change.
"""

from __future__ import annotations

from waypost.identity import continuation_id
from waypost.policy import ENDED_TTL_MS, HEAD_OFFSET, NO_END_MS, RECLAIM_MAX
from waypost.store.sqlite.queue_records import COLUMNS, QueueBook, Record
from waypost.store.sqlite.schema import DEAD, DELAYED, LEASED, READY
from waypost.values import EventName, Notice, chain_id, split_chain_id

#: Ends after which a key is free at once, even inside its window.
FREES_WINDOW = frozenset(("dead", "cancelled", "dropped", "replaced"))

_WINDOW_FREE = "DELETE FROM {window} WHERE queue = ? AND key = ? AND message_id = ?"
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
#: The release before gave unfinished chains an end.
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


def placed(book: QueueBook, ready_ms: int) -> tuple[int, int]:
    """The state and position of a message that may be claimed from `ready_ms` on."""
    if ready_ms > book.now:
        return DELAYED, 0
    book.freshly_ready += 1
    position = book.numbers["sequence"] = book.numbers["sequence"] + 1
    return READY, position


def make_claimable(book: QueueBook, record: Record, ready_ms: int) -> None:
    """To the end of its priority, or to the timers if its time has not come."""
    record.ready_ms = ready_ms
    state, position = placed(book, ready_ms)
    if state == READY:
        record.position = position
    book.move(record, state)
    book.touch(record)


def to_head(book: QueueBook, record: Record, ready_ms: int, cause: str) -> None:
    """Before all others of its priority, in the order of `ready_ms`."""
    record.cause, record.ready_ms = cause, ready_ms
    record.position = ready_ms - HEAD_OFFSET
    book.freshly_ready += 1
    book.move(record, READY)
    book.touch(record)


def ends_otherwise(book: QueueBook, record: Record, operation: str | None, cause: str) -> bool:
    """A delivery that would go back ends here instead if it was cancelled, or its key's next generation waits."""
    if record.cancel_requested:
        end(book, record, "cancelled", operation, cause=cause)
        return True
    if record.key is not None:
        holder = book.holder(record.key)
        if holder is not None and holder.parked is not None:
            end(book, record, "replaced", operation, cause=cause)
            return True
    return False


def end(
    book: QueueBook,
    record: Record,
    how: EventName,
    operation: str | None,
    *,
    cause: str | None = None,
    begun: tuple[str, ...] = (),
) -> None:
    """The end of a message: counted, journalled, its key free or handed to the next generation."""
    book.count_up(how)
    dead = how == "dead"
    note = book.note_run if record.state == LEASED else book.note
    note(
        how,
        operation,
        record,
        cause=cause,
        reason=record.reason if dead else None,
        error_type=record.error_type if dead else None,
    )
    key = record.key
    holder = None if key is None else book.holder(key)
    if dead:
        book.move(record, DEAD)
        book.touch(record)
    elif how == "done" and book.policy.completed_max:
        book.remove(record, keep_envelope=True)
        _complete(book, record)
    else:
        book.remove(record)
    if record.chain is not None or book.is_awaited:
        ended(book, record, how, begun)
    if key is None:
        return
    if how in FREES_WINDOW:
        book.step.execute(_WINDOW_FREE, (book.number, key, record.id))
    if holder is None:
        return
    if holder.parked is record:
        holder.parked = None
    elif holder.owner is record:
        heir = holder.parked
        if heir is None:
            book.holders[key] = None
            return
        holder.owner, holder.parked = heir, None
        make_claimable(book, heir, max(heir.ready_ms, book.now))
        book.note("promoted", operation, heir, cause="unparked")


def _complete(book: QueueBook, record: Record) -> None:
    """Into the history of finished messages, which lets its oldest go when it is full."""
    numbers = book.numbers
    numbers["completed_last"] += 1
    numbers["completed"] += 1
    # The message must have left its table first: the history takes over its envelope.
    book.flush_messages()
    book.step.execute(
        _COMPLETED_INSERT,
        (
            record.seq, book.number, numbers["completed_last"], record.id, record.key, record.group, record.priority,
            record.token, record.deliveries, record.attempts, record.published_ms, record.ready_ms,
            record.cancel_requested, book.now, record.reason, record.error_type, record.error,
        ),
    )  # fmt: skip
    surplus = numbers["completed"] - book.policy.completed_max
    if surplus > 0:
        forget_completed(book, surplus)


def forget_completed(book: QueueBook, count: int) -> int:
    """Let the oldest finished messages go; how many there were."""
    seqs = book.step.execute(_COMPLETED_OLDEST, (book.number, count)).fetchall()
    book.step.execute_many(_COMPLETED_DELETE, seqs)
    book.step.execute_many(_ENVELOPE_DELETE, seqs)
    book.numbers["completed"] -= len(seqs)
    return len(seqs)


def bury(book: QueueBook, record: Record, reason: str, operation: str | None) -> None:
    """To the dead letters, which lose their oldest if the policy bounds them."""
    record.reason = reason
    record.ended_ms = book.now
    end(book, record, "dead", operation)
    trim_dead(book)


def trim_dead(book: QueueBook) -> None:
    """Let dead letters go that are too many or too old, a bounded number at a time."""
    policy = book.policy
    if policy.dead_max is None and policy.dead_keep_ms is None:
        return
    book.flush_messages()
    surplus = 0 if policy.dead_max is None else max(0, book.numbers["dead_kept"] - policy.dead_max)
    old = 0
    if policy.dead_keep_ms is not None:
        parameters = (book.number, book.now - policy.dead_keep_ms, RECLAIM_MAX)
        old = book.step.execute(_DEAD_OLD, parameters).fetchone()[0]
    count = min(RECLAIM_MAX, max(surplus, old))
    if count == 0:
        return
    for row in book.step.execute(_DEAD_OLDEST, (book.number, count)).fetchall():
        record = book.hold(row)
        book.remove(record)
        book.note("dead_trimmed", None, record, cause="dead_max" if surplus else "dead_keep")


# ---- chains and waiters: notices are gathered here, and `chains` acts on them ------------------------------------


def begin(book: QueueBook, record: Record, after: tuple[str, ...]) -> None:
    """A message was stored that is the first of a chain, or has to wait for others."""
    step, now = book.step, book.now
    member = chain_id(book.name, record.id)
    if record.chain == member:
        old = step.execute(_CHAINS_OLD, (now,)).fetchall()
        for forget in _CHAIN_FORGET:
            step.execute_many(forget, [(queue, id) for queue, id, unfinished in old if not unfinished])
        step.execute_many(_CHAIN_KEEP, [(queue, id) for queue, id, unfinished in old if unfinished])
        step.execute(_CHAIN_BEGIN, (book.number, record.id, NO_END_MS))
        step.execute(_MEMBER_BEGIN, (book.number, record.id, member))
    for index, chain in enumerate(after):
        step.execute(_BLOCKER, (record.seq, chain))
        home = split_chain_id(chain)[0]
        step.notices.append(Notice(continuation_id(record.id, index, -1), "watch", home, chain, member))


def ended(book: QueueBook, record: Record, how: EventName, begun: tuple[str, ...]) -> None:
    """A message ended: its chain and those who wait for it are to be told."""
    if record.chain is not None:
        failed = None if how == "done" else (record.reason or how)
        tell_home(book, record.chain, record.id, record.token, begun, failed)
    book.step.execute(_BLOCKERS_FORGET, (record.seq,))
    if book.is_awaited:
        names = wake_waiters(book, record.id)
        if names:
            book.sweep("ending", 1)
            book.step.execute(_ENDING, (book.number, record.id, how, book.now + ENDED_TTL_MS))


def wake_waiters(book: QueueBook, id: str) -> list[tuple[str, int]]:
    """Take out who waits for this end, and wake those of them who have asked lately."""
    names = book.step.execute(_WAITERS_OUT, (book.number, id)).fetchall()
    if names:
        expectant = book.step.expectant.setdefault(book.name, [])
        expectant += [name for name, until in names if until > book.now]
    return names


def tell_home(book: QueueBook, chain: str, id: str, token: int, begun: tuple[str, ...], failed: str | None) -> None:
    """The end of a message, for the home of its chain."""
    home, member = split_chain_id(chain)[0], chain_id(book.name, id)
    notice = Notice(continuation_id(id, token, -2), "ended", home, chain, member, begun, failed)
    book.step.notices.append(notice)
