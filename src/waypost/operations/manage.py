"""Managing queues: listings, history, cancel, redrive, purge, check, settings, pause, removal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, TypeVar

from waypost.checks import check_count, check_id, check_text, due_ms
from waypost.errors import ConfigurationError, InvalidInput, InvalidPolicy, InvalidTime, QueueNotEmpty, StoreFailed
from waypost.operations.flow import ClientContext, Flow, Sleep, Together
from waypost.operations.outgoing import deliver_ends
from waypost.operations.upgrading import check_new
from waypost.policy import (
    CHUNK_MESSAGES_MAX,
    GROUP_CHARACTERS_MAX,
    KEY_CHARACTERS_MAX,
    PAGE_MAX,
    WORKER_CHARACTERS_MAX,
    PolicyRecord,
    group_changes,
    new_group_settings,
    new_settings,
    parse_rate,
    policy_changes,
)
from waypost.store.port import Call, Target
from waypost.values import (
    FINAL_EVENTS,
    CancelStatus,
    CheckPage,
    CheckReport,
    Damage,
    EventRecord,
    FoundMessage,
    GroupPage,
    MessageState,
    ObservedOutcome,
    Page,
    Purged,
    Redriven,
    Removal,
    RescheduleStatus,
    StatsRecord,
    Stored,
    WorkerRequest,
)
from waypost.wake.port import ALL_SLEEPERS
from waypost.wake.wakeups import hash_key

T = TypeVar("T")
log = logging.getLogger("waypost")

#: The longest cursor of a page of groups: a name, each character of which may be escaped.
CURSOR_CHARACTERS_MAX = 12 * GROUP_CHARACTERS_MAX + 8
#: How many queues are queried for their policies in one flush.
POLICIES_TOGETHER = 64
#: How many queues are read in one flush when all of them are: a longer one would block the other clients of the store.
QUEUES_TOGETHER = 256
#: The same for histories, of which each may be a megabyte of a journal.
TRACES_TOGETHER = 16
#: A redrive at a given rate moves a few letters at short intervals, rather than many at long ones.
REDRIVE_TICK_MS = 100


# ---- reading -------------------------------------------------------------------------------------------------


def page(
    context: ClientContext,
    queue: str,
    state: MessageState,
    limit: int,
    cursor: str | None,
    filters: Mapping[str, str | None],
) -> Flow[Page]:
    """Return one page of a listing."""
    return (yield from context.attempt(context.store.peek(queue, state, limit, cursor=cursor, **filters)))


def history(context: ClientContext, queue: str, message_id: str) -> Flow[list[EventRecord]]:
    """Return every event of one message that the journal still has, in order.

    A long journal without an index is searched in parts, up to the last event that the message can have.
    """
    events: list[EventRecord] = []
    cursor: str | None = None
    last: tuple[str, int] | None = None
    while True:
        part = yield from context.attempt(context.store.trace(queue, message_id, cursor))
        events += part.events
        if part.cursor is None:
            return events
        if cursor is None:
            for state in ("dead", "ready"):
                stored = yield from context.attempt(context.store.peek(queue, state, 1, id=message_id))
                last = last or next(map(_last_event, stored.messages), None)
        if last is not None and any((one.event, one.token or 0) == last for one in events):
            return events
        cursor = part.cursor


def _last_event(stored: Stored) -> tuple[str, int] | None:
    """The last event that a message has so far, and its token, where its record shows it."""
    if stored.state == "dead":
        return "dead", stored.token  # tokens only grow: a later event would have another
    if stored.token == 0 and stored.ready_ms == stored.published_ms:
        return "published", 0  # neither claimed nor moved since
    return None


def stats_of(context: ClientContext, queues: Sequence[str], minutes: int) -> Flow[list[StatsRecord]]:
    """The state of several queues, in their order, a flush for each part of them."""
    found: list[StatsRecord] = []
    for at in range(0, len(queues), QUEUES_TOGETHER):
        part = queues[at : at + QUEUES_TOGETHER]
        found += yield from _run_together(context, context.store.stats_many(part, minutes=minutes))
    return found


def find(context: ClientContext, message_id: str) -> Flow[list[FoundMessage]]:
    """The queues that know a message: by the message itself, by the memory of its end, or else by the journal."""
    queues = yield from context.attempt(context.store.queues())
    found = yield from _run_together(context, context.store.locate(queues, message_id))
    if found:
        return found
    candidates = yield from _run_together(context, context.store.locate(queues, message_id, in_journals=True))
    for at in range(0, len(candidates), TRACES_TOGETHER):
        part = [one.queue for one in candidates[at : at + TRACES_TOGETHER]]
        results = yield Together([context.store.trace(queue, message_id) for queue in part])
        for queue, result in zip(part, results, strict=True):
            if isinstance(result, Exception):
                result = yield from context.attempt(context.store.trace(queue, message_id))
            if result.events:
                last = result.events[-1].event
                found.append(FoundMessage(queue, message_id, None, last if last in FINAL_EVENTS else None))
    return found


def _run_together(context: ClientContext, calls: Sequence[Call[list[T]]]) -> Flow[list[T]]:
    """Run the calls of a read of many queues in one flush, and return what all of them found."""
    found: list[T] = []
    results = yield Together(calls)
    for call, result in zip(calls, results, strict=True):
        # A connection that failed is tried again for each: a read has no first answer to lose.
        found += (yield from context.attempt(call)) if isinstance(result, Exception) else result
    return found


def find_key(context: ClientContext, key: str, queue: str | None) -> Flow[list[FoundMessage]]:
    """The unfinished messages of a key in one queue, or in all of them."""
    check_text("key", key, KEY_CHARACTERS_MAX)
    queues = [queue] if queue is not None else (yield from context.attempt(context.store.queues()))
    holders = yield from _run_together(context, context.store.holders(queues, key))
    found: list[FoundMessage] = []
    for at in range(0, len(holders), QUEUES_TOGETHER):
        chosen = holders[at : at + QUEUES_TOGETHER]
        results = yield Together([context.store.watch(name, id, None) for name, id in chosen])
        for (name, id), watched in zip(chosen, results, strict=True):
            if isinstance(watched, Exception):
                watched = yield from context.attempt(context.store.watch(name, id, None))
            found.append(FoundMessage(name, id, watched.state, watched.ended))
    return found


# ---- acting --------------------------------------------------------------------------------------------------


def cancel(context: ClientContext, queue: str, *, id: str | None, key: str | None) -> Flow[CancelStatus]:
    """Cancel one message by id or by key."""
    target = one_target("cancel", id, key)
    woken = yield from context.operate(queue, lambda operation: context.store.cancel(queue, (target,), operation))
    status = woken.result[0]
    if status == "unknown" and id is not None and (yield from _is_done(context, queue, id)):
        status = "finished"
    event = "cancelled" if status == "cancelled" else "cancel_requested"
    outcome: ObservedOutcome = "success" if status in ("cancelled", "requested") else "skipped"
    context.emit(event, queue, outcome, message_id=id, key=key, reason=status)
    context.wake_and_report(woken)
    if status == "requested":
        # Its worker would notice it at its next renewal; with the notification it renews at once.
        context.wakeups.notify("held", queue, [id if id is not None else hash_key(key or "")])
    if status == "cancelled":
        yield from deliver_ends(context, queue)
    return status


def one_target(verb: str, id: str | None, key: str | None) -> Target:
    """Return the message that a call names by its id or its key."""
    if (id is None) == (key is None):
        raise InvalidInput(f"{verb} needs either id= or key=, one of them")
    return Target(check_id(id)) if key is None else Target(key=check_text("key", key, KEY_CHARACTERS_MAX))


def new_due_time(delay: float | timedelta | None, at: datetime | None) -> dict[str, Any]:
    """Return the due time of a timer that is moved, as stores take it."""
    if (delay is None) == (at is None):
        raise InvalidTime("reschedule needs either delay= or at=, one of them")
    delay_ms, at_ms = due_ms(delay, at)
    return {"delay_ms": delay_ms, "at_ms": at_ms}


def reschedule(
    context: ClientContext,
    queue: str,
    *,
    id: str | None,
    key: str | None,
    delay: float | timedelta | None,
    at: datetime | None,
) -> Flow[RescheduleStatus]:
    """Give one timer another due time, by id or by key."""
    target, due = one_target("reschedule", id, key), new_due_time(delay, at)
    woken = yield from context.operate(
        queue, lambda operation: context.store.reschedule(queue, (target,), operation, **due)
    )
    status = woken.result[0]
    outcome: ObservedOutcome = "success" if status == "moved" else "skipped"
    context.emit("postponed", queue, outcome, message_id=id, key=key, reason=status)
    context.wake_and_report(woken)
    return status


def request_worker(context: ClientContext, name: str, request: WorkerRequest) -> Flow[bool]:
    """Request something of a worker, which it does after its next heartbeat."""
    check_text("the name of a worker", name, WORKER_CHARACTERS_MAX)
    return (yield from context.attempt(context.store.request_worker(name, request)))


def _is_done(context: ClientContext, queue: str, id: str) -> Flow[bool]:
    """Return whether a message is among the kept completed ones: a cancel searches only the newest of them."""
    cursor: str | None = None
    while True:
        part = yield from page(context, queue, "done", 1, cursor, {"id": id})
        cursor = part.cursor
        if part.messages or cursor is None:
            return bool(part.messages)


def redrive(
    context: ClientContext, queue: str, *, ids: Sequence[str], reason: str | None, limit: int | None, rate: str | None
) -> Flow[Redriven]:
    """Make dead letters ready again, at most as many as there are at the start, chunk by chunk."""
    size, pause = _pace(rate)
    if ids:
        left = min(len(ids), limit or len(ids))
    else:
        # Without a bound, letters that become dead again at once would be redriven forever.
        dead = (yield from context.attempt(context.store.stats(queue))).ledger.dead_kept
        left = dead if limit is None else min(limit, dead)
    moved: list[str] = []
    duplicates: dict[str, None] = {}
    more = undecided = False
    cursor: str | None = None
    while left > 0 or undecided:
        count = min(size, left)
        chosen, ids = ids[:count], ids[count:]
        part = yield from _redrive_chunk(context, queue, count, chosen, reason, cursor)
        moved += part.moved
        duplicates.update(dict.fromkeys(part.duplicates))
        more = bool(ids) or part.more
        cursor = part.cursor
        # The store stopped searching before it found as many as it may move, or whether there is one more.
        undecided = cursor is not None and not part.more
        left -= len(part.moved) + len(part.duplicates) if undecided else count
        if not undecided and (left == 0 or not more or not (ids or cursor or redrive_progressed(part, reason))):
            break
        if pause and (part.moved or part.duplicates):
            yield Sleep(pause)
    return Redriven(moved, list(duplicates), more)


def redrive_progressed(part: Redriven, reason: str | None) -> bool:
    """Whether the next chunk has other letters: those that stay dead as duplicates are found again by that reason."""
    return bool(part.moved or (part.duplicates and reason != "duplicate"))


def _redrive_chunk(
    context: ClientContext, queue: str, count: int, ids: Sequence[str], reason: str | None, cursor: str | None
) -> Flow[Redriven]:
    redriven = yield from context.operate_and_wake(
        queue, lambda operation: context.store.redrive(queue, count, operation, ids=ids, reason=reason, cursor=cursor)
    )
    if context.on_event is not None:
        for message_id in redriven.moved:
            context.emit("redriven", queue, message_id=message_id)
    return redriven


def _pace(rate: str | None) -> tuple[int, float]:
    """Return how many letters to move at a time, and the seconds between."""
    if rate is None:
        return CHUNK_MESSAGES_MAX, 0.0
    count, per_ms = parse_rate(rate)
    size = max(1, min(CHUNK_MESSAGES_MAX, count * REDRIVE_TICK_MS // per_ms))
    return size, size * per_ms / count / 1000


def check(
    context: ClientContext, queue: str, *, mend: bool, progress: Callable[[int], object] | None = None
) -> Flow[CheckReport]:
    """Find damaged records of a queue step by step, and mend them with `mend`."""
    examined, damages, cursor = 0, list[Damage](), None
    while True:
        page: CheckPage = yield from context.attempt(context.store.check(queue, cursor, mend=mend))
        examined += page.examined
        damages += page.damages
        for damage in page.damages:
            context.emit(
                "mended" if damage.mended else "damaged_record", queue, "success" if damage.mended else "failure",
                message_id=damage.id, reason=damage.kind,
            )  # fmt: skip
        if progress is not None:
            progress(examined)
        cursor = page.cursor
        if cursor is None:
            break
    if any(damage.mended for damage in damages):
        # Sleeping workers may have work again.
        context.wake({queue: [ALL_SLEEPERS]})
    balance: int | None = None
    with suppress(StoreFailed):  # unreadable counters are one kind of damage
        balance = (yield from context.attempt(context.store.stats(queue))).ledger.balance
    return CheckReport(queue, examined, damages, balance)


def purge(context: ClientContext, queue: str, state: MessageState) -> Flow[int]:
    """Delete the messages of one state that exist at the start."""
    left: int | None = None
    if state != "done":
        ledger = (yield from context.attempt(context.store.stats(queue))).ledger
        left = ledger.dead_kept if state == "dead" else getattr(ledger, state)
    removed = 0
    while left is None or removed < left:
        count = CHUNK_MESSAGES_MAX if left is None else min(CHUNK_MESSAGES_MAX, left - removed)
        part: Purged = yield from context.operate_and_wake(
            queue, lambda operation, n=count: context.store.purge(queue, state, n, operation)  # type: ignore[misc]
        )  # fmt: skip
        removed += part.removed
        if not part.more or part.removed == 0:
            break
    context.emit("purged", queue, "success" if removed else "skipped", count=removed, reason=state)
    if removed and state not in ("dead", "done"):
        yield from deliver_ends(context, queue)
    return removed


def purge_letters(context: ClientContext, queue: str, ids: Sequence[str]) -> Flow[int]:
    """Delete these dead letters, chunk by chunk."""
    removed = 0
    for start in range(0, len(ids), CHUNK_MESSAGES_MAX):
        chunk = ids[start : start + CHUNK_MESSAGES_MAX]
        part: Purged = yield from context.operate_and_wake(
            queue, lambda operation, ids=chunk: context.store.purge(queue, "dead", len(ids), operation, ids=ids)  # type: ignore[misc]
        )  # fmt: skip
        removed += part.removed
    context.emit("purged", queue, "success" if removed else "skipped", count=removed, reason="dead")
    return removed


def configure(context: ClientContext, queue: str, settings: Mapping[str, Any]) -> Flow[PolicyRecord]:
    """Change a queue's policy, for all clients."""
    changes = policy_changes(settings)
    yield from check_new(context, new_settings(changes), InvalidPolicy)
    policy = yield from context.attempt_and_wake(context.store.configure(queue, changes))
    context.remember_policy(queue, policy)
    context.emit("configured", queue, reason=" ".join(sorted(settings)))
    return policy


def warn_of_cut_retries(context: ClientContext, attempts: Mapping[str, int]) -> Flow[None]:
    """Log a warning for each queue whose `max_deliveries` ends a message before its handler's retry policy does."""
    queues = list(attempts)
    for at in range(0, len(queues), POLICIES_TOGETHER):
        part = queues[at : at + POLICIES_TOGETHER]
        policies = yield Together([context.store.policy(queue) for queue in part])
        for queue, policy in zip(part, policies, strict=True):
            # Continue if a policy cannot be read now: the first claim reports the error.
            if isinstance(policy, Exception) or policy.max_deliveries is None:
                continue
            if attempts[queue] > policy.max_deliveries:
                log.warning(
                    "the retry policy of queue %s allows %d attempts, but its max_deliveries ends a message after %d "
                    "deliveries: configure max_deliveries=%d or more, or lower attempts",
                    queue, attempts[queue], policy.max_deliveries, attempts[queue],
                    extra={
                        "event": "retries_cut", "queue": queue, "attempts": attempts[queue],
                        "max_deliveries": policy.max_deliveries,
                    },
                )  # fmt: skip


def check_types_without_lease(context: ClientContext, queues: Sequence[str]) -> Flow[None]:
    """Raise `ConfigurationError` for a queue with `lease=None`: a message whose type no handler takes would be lost."""
    for at in range(0, len(queues), POLICIES_TOGETHER):
        part = queues[at : at + POLICIES_TOGETHER]
        policies = yield Together([context.store.policy(queue) for queue in part])
        for queue, policy in zip(part, policies, strict=True):
            if not isinstance(policy, Exception) and policy.lease_ms is None:
                raise ConfigurationError(
                    f"queue {queue} has lease=None, so that a claimed message has left it, and all its handlers have "
                    "types=: a message of another type would be lost. Register a handler without types= too"
                )


def pause(context: ClientContext, queue: str) -> Flow[bool]:
    """Deliver no messages until a resume."""
    changed = yield from context.attempt(context.store.pause(queue))
    context.emit("paused", queue, "success" if changed else "skipped")
    return changed


def resume(context: ClientContext, queue: str) -> Flow[bool]:
    """Deliver messages again."""
    changed = yield from context.attempt_and_wake(context.store.resume(queue))
    context.emit("resumed", queue, "success" if changed else "skipped")
    return changed


def groups(context: ClientContext, queue: str, limit: int, cursor: str | None, group: str | None) -> Flow[GroupPage]:
    """Return one page of the groups of a queue, or one group."""
    check_count("limit", limit, 1, PAGE_MAX)
    if cursor is not None:
        check_text("cursor", cursor, CURSOR_CHARACTERS_MAX)
    if group is not None:
        check_text("group", group, GROUP_CHARACTERS_MAX)
    return (yield from context.attempt(context.store.groups(queue, limit, cursor=cursor, group=group)))


def configure_group(context: ClientContext, queue: str, group: str, settings: Mapping[str, Any]) -> Flow[bool]:
    """Change the settings of a single group, for all clients."""
    changes = group_changes(settings)
    if not changes:
        raise InvalidPolicy("configure_group needs a setting: weight, max_running, rate or max_pending")
    return (yield from _change_group(context, queue, group, changes, " ".join(sorted(settings))))


def pause_group(context: ClientContext, queue: str, group: str, *, paused: bool) -> Flow[bool]:
    """Deliver no messages of a group until it is resumed, or deliver them again."""
    return (yield from _change_group(context, queue, group, {"paused": paused}, "paused" if paused else "resumed"))


def _change_group(context: ClientContext, queue: str, group: str, changes: Mapping[str, Any], text: str) -> Flow[bool]:
    check_text("group", group, GROUP_CHARACTERS_MAX)
    yield from check_new(context, new_group_settings(changes), InvalidPolicy)
    changed = yield from context.attempt_and_wake(context.store.configure_group(queue, group, changes))
    context.emit("group_configured", queue, "success" if changed else "skipped", group=group, reason=text)
    return changed


def skip_held(context: ClientContext, queue: str, group: str) -> Flow[str | None]:
    """Let the next message of a group pass the one that holds it."""
    check_text("group", group, GROUP_CHARACTERS_MAX)
    woken = yield from context.operate(queue, lambda operation: context.store.skip_held(queue, group, operation))
    context.wake_and_report(woken)
    skipped = woken.result
    context.emit("skipped", queue, "success" if skipped else "skipped", message_id=skipped, group=group, reason="held")
    return skipped


#: The name of each kind of content that prevents the removal of a queue, singular and plural, and the way out.
LEFT: dict[str, tuple[str, str, str]] = {
    "ready": ("ready message", "ready messages", "let workers handle them or purge them"),
    "delayed": ("delayed message", "delayed messages", "wait for them or purge them"),
    "waiting": ("waiting message", "waiting messages", "wait for them or purge them"),
    "leased": ("running message", "running messages", "let their handlers finish"),
    "dead": ("dead letter", "dead letters", "redrive or purge them"),
    "schedules": ("schedule", "schedules", "remove them with remove_schedule"),
    "outgoing": ("message on its way to another queue", "messages on their way to other queues", "try again soon"),
    "chains": ("chain that has not finished", "chains that have not finished", "let them finish"),
    "readers": ("reader of its journal", "readers of its journal", "stop them and call journal_forget"),
    "damaged": ("damaged record", "damaged records", "mend them with check(mend=True)"),
    "transactions": ("open transaction that publishes", "open transactions that publish", "let them end"),
}


def remove_queue(context: ClientContext, queue: str) -> Flow[bool]:
    """Remove an empty queue with all its records; return whether it existed."""
    delivered = False
    while True:
        removal: Removal = yield from context.operate(queue, lambda operation: context.store.remove(queue, operation))
        if removal.left.get("outgoing") and not delivered:
            # There may be no worker any more whose claims would deliver it.
            yield from deliver_ends(context, queue)
            delivered = True
        elif not removal.more:
            break
    if removal.left:
        context.emit("queue_removed", queue, "failure", reason=" ".join(removal.left))
        raise not_empty(queue, removal.left)
    for call in () if removal.made_again else context.store.unlist(queue):
        yield from context.attempt(call)
    # A new queue with this name may have got a schedule before the name was removed from the list of queues with one.
    if (yield from context.attempt(context.store.schedules(queue))).schedules:
        yield from context.attempt(context.store.schedules_changed(queue))
    context.forget_policy(queue)
    context.emit("queue_removed", queue, "success" if removal.existed else "skipped")
    return removal.existed


def not_empty(queue: str, left: Mapping[str, int]) -> QueueNotEmpty:
    """Describe what is left in a queue, with the way out for each."""
    parts = []
    for name, (one, several, way_out) in LEFT.items():
        count = left.get(name, 0)
        if not count:
            continue
        parts.append(f"{count} {one if count == 1 else several} ({way_out})")
    return QueueNotEmpty(f"queue {queue} is not empty, so nothing was removed: it has {', '.join(parts)}", left=left)
