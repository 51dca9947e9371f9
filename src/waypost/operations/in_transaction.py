"""Cancel, reschedule and redrive as a part of the caller's own transaction.

The caller's commit decides whether it takes effect. So nothing is retried, no event is reported, and sleepers are
notified after the commit, if the commit is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from waypost.errors import InvalidInput
from waypost.identity import Operation
from waypost.operations.flow import AfterCommit, ClientContext, Flow
from waypost.operations.manage import new_due_time, one_target, redrive_progressed
from waypost.policy import CHUNK_MESSAGES_MAX
from waypost.store.port import Call, Woken
from waypost.values import CancelStatus, Redriven, RescheduleStatus

T = TypeVar("T")


def cancel(
    context: ClientContext, queue: str, *, id: str | None, key: str | None, after_commit: AfterCommit
) -> Flow[CancelStatus]:
    """Cancel one message by id or by key."""
    target = one_target("cancel", id, key)
    found = yield from _run(
        context, queue, lambda operation: context.store.cancel(queue, (target,), operation), after_commit
    )
    return found[0]


def reschedule(
    context: ClientContext,
    queue: str,
    *,
    id: str | None,
    key: str | None,
    delay: float | timedelta | None,
    at: datetime | None,
    after_commit: AfterCommit,
) -> Flow[RescheduleStatus]:
    """Change the due time of one timer, by id or by key."""
    target, due = one_target("reschedule", id, key), new_due_time(delay, at)
    found = yield from _run(
        context, queue, lambda operation: context.store.reschedule(queue, (target,), operation, **due), after_commit
    )
    return found[0]


def redrive(
    context: ClientContext,
    queue: str,
    *,
    ids: Sequence[str],
    reason: str | None,
    limit: int | None,
    rate: str | None,
    after_commit: AfterCommit,
) -> Flow[Redriven]:
    """Make dead letters ready again, chunk by chunk. None of them can die again before the commit."""
    if rate is not None:
        raise InvalidInput("a redrive in your transaction makes no pauses: give it a limit instead of a rate")
    moved: list[str] = []
    duplicates: dict[str, None] = {}
    by_id, more = bool(ids), True
    while more and (limit is None or len(moved) + len(duplicates) < limit):
        count = min(CHUNK_MESSAGES_MAX, CHUNK_MESSAGES_MAX if limit is None else limit - len(moved) - len(duplicates))
        chosen, ids = ids[:count], ids[count:]
        part = yield from _run(context, queue, _redrive_call(context, queue, count, chosen, reason), after_commit)
        moved += part.moved
        duplicates.update(dict.fromkeys(part.duplicates))
        more = bool(ids) if by_id else part.more
        if not by_id and not redrive_progressed(part, reason):
            break
    return Redriven(moved, list(duplicates), more)


def _redrive_call(
    context: ClientContext, queue: str, count: int, ids: Sequence[str], reason: str | None
) -> Callable[[Operation], Call[Woken[Redriven]]]:
    return lambda operation: context.store.redrive(queue, count, operation, ids=ids, reason=reason)


def _run(
    context: ClientContext, queue: str, call: Callable[[Operation], Call[Woken[T]]], after_commit: AfterCommit
) -> Flow[T]:
    operation = context.replay_windows.begin(queue)
    try:
        woken: Woken[T] = yield call(operation)
    finally:
        context.replay_windows.end(queue, operation)
    if woken.wake:
        after_commit(woken.wake)
    return woken.result
