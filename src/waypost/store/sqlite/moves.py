"""How a message moves: to the claimable, back to the head, to its end, and what becomes of its key.

Every verb that changes messages goes through these few functions, each of which keeps the ledger, the journal and
the keys in step with the change.
"""

from __future__ import annotations

from waypost.policy import HEAD_OFFSET, RECLAIM_MAX
from waypost.store.sqlite.book import COLUMNS, QueueBook, Record
from waypost.store.sqlite.ends import ended
from waypost.store.sqlite.schema import DEAD, DELAYED, LEASED, READY
from waypost.values import EventName

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
