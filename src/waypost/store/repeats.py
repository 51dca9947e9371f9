"""Whether an operation is answered, run or refused: the one rule of all stores. Lua and SQL have the same rule.

An operation that ran is remembered, with its mark, for longer than a repeat of it is let through: it ran no earlier
than `STAMP_AHEAD_MS` before its stamp, a repeat passes until `window` after the stamp, and the memory lasts for
`window + STAMP_AHEAD_MS` after the run. So what passes and is not remembered has never run.
"""

from __future__ import annotations

from waypost.errors import MessageIdTaken, OperationTooOld, SessionTaken
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
    """Whether the remembered result is the answer; False: it runs for the first time. Raises where neither is right.

    `known` is the mark under which its number is remembered; `newest` the largest number of its session;
    `removed_ms` when a queue of this name was last removed, 0 if it never was.
    """
    check_removal(queue, operation, now_ms, window_ms=window_ms, removed_ms=removed_ms)
    if known == operation.mark:
        return True
    if operation.number <= newest - REPLAY_MAX:
        raise too_old(queue, None)
    if operation.stamp > now_ms + STAMP_AHEAD_MS:
        # The store's clock was set back. Let through, it could be repeated for longer than it is remembered.
        raise too_old(queue, now_ms)
    if known is not None:
        raise session_taken(queue)
    return False


def too_old(queue: str, store_ms: int | None) -> OperationTooOld:
    """The store may have forgotten the operation. Without a time: too many others of its session came after it."""
    return OperationTooOld(
        f"a call on queue {queue} was repeated so late that the store may have forgotten whether it ran; it did not "
        "run now. It may have been done the first time: check the queue before you call again, or publish with a "
        "key, so that a second call is harmless",
        store_ms=store_ms,
    )


def check_removal(queue: str, operation: Operation, now_ms: int, *, window_ms: int, removed_ms: int) -> None:
    """Refuse an operation that is too old, or was meant for a queue that has been removed since.

    A removal that lies further ahead of the clock than a stamp may was made before the clock was set back: it would
    refuse every operation until the clock has caught up, so it does not count.
    """
    if operation.stamp < now_ms - window_ms:
        raise too_old(queue, now_ms)
    if operation.stamp <= removed_ms <= now_ms + STAMP_AHEAD_MS:
        raise removed_since(queue, max(now_ms, removed_ms + 1))


def removed_since(queue: str, store_ms: int) -> OperationTooOld:
    """The queue was removed after the operation was first sent; a new operation makes a new queue."""
    return OperationTooOld(
        f"queue {queue} was removed after this call was first sent, so it did not run now. It may have been done "
        "before the removal: check the queue before you call again, or publish with a key, so that a second call is "
        "harmless",
        store_ms=store_ms,
    )


def session_taken(queue: str) -> SessionTaken:
    """Another process has the same session: a snapshot of a machine was started twice, or a process was copied."""
    return SessionTaken(
        f"another process uses the session of this client on queue {queue} (was the machine or the process cloned?); "
        "nothing was done: make a new client, and call again"
    )


def id_taken(queue: str, message_id: str) -> MessageIdTaken:
    """The store has a message of this id, and it is not this publish that stored it."""
    return MessageIdTaken(
        f"queue {queue} already has a message {message_id}; nothing of this publish was written: publish with new ids"
    )
