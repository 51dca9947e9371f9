"""Whether an operation is answered, run or refused: one rule for all stores. Lua and SQL have the same rule.

An operation that ran is remembered, with its mark, for longer than a repeat of it is accepted: it ran no earlier
than `STAMP_AHEAD_MS` before its stamp, a repeat is accepted until `window` after the stamp, and the record is kept for
`window + STAMP_AHEAD_MS` after the run. So an accepted operation without a record has never run.
"""

from __future__ import annotations

from waypost.errors import MessageIdInUse, OperationTooOld, SessionInUse
from waypost.identity import Operation
from waypost.policy import REPLAY_MAX, STAMP_AHEAD_MS


def is_repeat(
    queue: str,
    operation: Operation,
    now_ms: int,
    *,
    window_ms: int,
    known: bytes | None,
    newest: int,
    removed_ms: int = 0,
) -> bool:
    """Return whether the remembered result is the answer; False: it runs for the first time. Raises if it is refused.

    `known` is the mark under which its number is remembered; `newest` the largest number of its session;
    `removed_ms` when a queue of this name was last removed, 0 if it never was.
    """
    check_removal(queue, operation, now_ms, window_ms=window_ms, removed_ms=removed_ms)
    if known == operation.mark:
        return True
    if operation.number <= newest - REPLAY_MAX:
        raise too_old(queue, None)
    if operation.stamp > now_ms + STAMP_AHEAD_MS:
        # The store's clock was set back. If accepted, it could be repeated for longer than it is remembered.
        raise too_old(queue, now_ms)
    if known is not None:
        raise session_in_use(queue)
    return False


def too_old(queue: str, store_ms: int | None) -> OperationTooOld:
    """Return the error for an operation that may be forgotten. Without a time: too many others came after it."""
    return OperationTooOld(
        f"a call on queue {queue} was repeated so late that the store may have forgotten whether it ran; it did not "
        "run now. It may have been done the first time: check the queue before you call again, or publish with a "
        "key, so that a second call is harmless",
        store_ms=store_ms,
    )


def check_removal(queue: str, operation: Operation, now_ms: int, *, window_ms: int, removed_ms: int) -> None:
    """Refuse an operation that is too old, or was meant for a queue that has been removed since.

    A removal further ahead of the clock than a stamp may be happened before the clock was set back: it would
    refuse every operation until the clock reaches it, so it does not count.
    """
    if operation.stamp < now_ms - window_ms:
        raise too_old(queue, now_ms)
    if operation.stamp <= removed_ms <= now_ms + STAMP_AHEAD_MS:
        raise removed_since(queue, max(now_ms, removed_ms + 1))


def removed_since(queue: str, store_ms: int) -> OperationTooOld:
    """Return the error for an operation from before the removal of its queue; a new operation creates a new queue."""
    return OperationTooOld(
        f"queue {queue} was removed after this call was first sent, so it did not run now. It may have been done "
        "before the removal: check the queue before you call again, or publish with a key, so that a second call is "
        "harmless",
        store_ms=store_ms,
    )


def session_in_use(queue: str) -> SessionInUse:
    """Return the error for a session that another process uses too: a machine or a process was cloned."""
    return SessionInUse(
        f"another process uses the session of this client on queue {queue} (was the machine or the process cloned?); "
        "nothing was done: create a new client, and call again"
    )


def id_in_use(queue: str, message_id: str) -> MessageIdInUse:
    """Return the error for a message id that exists, stored by another publish."""
    return MessageIdInUse(
        f"queue {queue} already has a message {message_id}; nothing of this publish was written: publish with new ids"
    )
