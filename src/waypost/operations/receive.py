"""Receiving: claim a message, wait for one, settle it, and deliver the continuations of settles."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from msgspec import structs

from waypost import lease_clock
from waypost.errors import (
    EnvelopeTooNew,
    OperationTooOld,
    OutcomeUnknown,
    SessionInUse,
    StoreUnavailable,
    Undecodable,
    WaypostError,
)
from waypost.identity import Operation
from waypost.message import CHOICES, Message, error_text, error_type
from waypost.operations.flow import REFUSALS, ClientContext, Flow, Sending, Sleep, Together
from waypost.operations.gathering import Lines, send_in_line, shares_calls
from waypost.operations.outgoing import deliver_outgoing
from waypost.policy import (
    POLL_FIRST_SECONDS,
    SAFETY_POLL_SECONDS,
    UNWOKEN_POLL_SECONDS,
    RetryPolicy,
)
from waypost.redaction import redact_sent_on
from waypost.store.port import BlockingWaiter, Call, Hold, Idle, Woken
from waypost.values import Claimed, ExtendStatus, Lease, ObservedOutcome, Polled, Settlement, SettleStatus, split_error
from waypost.wake.port import ALL_SLEEPERS
from waypost.wake.wakeups import WakeEvent

T = TypeVar("T")
#: Makes the message of a lease.
Make: TypeAlias = "Callable[[str, Lease, type[T] | None], Message[T]]"
log = logging.getLogger("waypost")

#: How long a message that only a newer release can decode is delayed before another claim.
TOO_NEW_SNOOZE_MS = 5_000
#: How long a message whose type no handler of a worker handles is delayed, so that another worker can claim it.
OTHER_WORKER_SNOOZE_MS = 5_000
#: The time limit of a release after an interrupt: the block must end soon, and the lease expires in any case.
RELEASE_BUDGET_SECONDS = 1.0
#: The store's times are whole milliseconds, so polling again at once would be a busy loop.
MOMENT_MIN_SECONDS = 0.001


# ---- waiting and claiming ------------------------------------------------------------------------------------


def receive(
    context: ClientContext, queue: str, wait: float | None, as_type: type[T] | None, make: Make[T] = Message
) -> Flow[Message[T] | None]:
    """Return the next decodable message, or None when the wait is over. `wait=None` waits without limit."""
    if context.draining:
        return None
    deadline = None if wait is None else context.monotonic() + wait
    found = yield from _claim_lost_again(context, queue, as_type, make)
    if found is not None:
        return found
    if wait == 0:
        return (yield from _receive(context, queue, deadline, None, as_type, make))
    shared = context.wakeups.acquire_wake_event(context.worker, queue)
    # Without a channel only a drain sets it.
    wake_event = shared or WakeEvent("")
    context.waiting.add(wake_event)
    try:
        return (yield from _receive(context, queue, deadline, wake_event, as_type, make))
    finally:
        context.waiting.discard(wake_event)
        if shared is not None:
            context.wakeups.release_wake_event(queue, shared)


def _receive(
    context: ClientContext,
    queue: str,
    deadline: float | None,
    wake_event: WakeEvent | None,
    as_type: type[T] | None,
    make: Make[T],
) -> Flow[Message[T] | None]:
    found: Message[T] | None = None
    nap, asleep = Nap(), False
    while found is None and not context.draining:
        over = deadline is not None and context.monotonic() >= deadline
        if asleep and over:
            # Before the last poll: a publish after it then wakes another sleeper.
            asleep = yield from wake_up(context, queue, wake_event)
        sleeper = None
        if wake_event is not None:
            wake_event.clear()
            if context.draining:
                break  # it may have been set before
            sleeper = wake_event.name if wake_event.working and not over else None
        claimed = yield from claim(context, queue, 1, deadline, sleeper=sleeper)
        asleep = sleeper is not None and not claimed.leases
        if claimed.outgoing:
            yield from deliver_outgoing(context, queue)
        if claimed.leases and context.draining and claimed.leases[0].lease_end_ms is not None:
            # The drain began meanwhile. (With lease=None it cannot go back.)
            yield from give_back(context, queue, claimed.leases)
            break
        if claimed.leases:
            found = yield from _readable(context, queue, claimed, as_type, make)
            nap = Nap()
            # An undecodable message was put aside; there may be more after it.
            continue
        remaining = None if deadline is None else deadline - context.monotonic()
        if remaining is not None and remaining <= 0:
            break
        yield Sleep(nap.seconds(claimed, remaining, woken=asleep), lambda: context.draining, wake_event)
    if asleep:
        yield from wake_up(context, queue, wake_event)
    return found


def wake_up(context: ClientContext, queue: str, wake_event: WakeEvent | None) -> Flow[bool]:
    """Unregister the sleeper, so that no wake-up goes to a call that has ended."""
    if wake_event is not None:
        yield from unregister(context, queue, wake_event.name)
    return False


def unregister(context: ClientContext, queue: str, sleeper: str) -> Flow[None]:
    """Remove a sleeper from the store. There are no long retries: the registration expires."""
    try:
        claimed = yield from context.operate(
            queue,
            lambda operation: context.store.claim(queue, 0, operation, worker=context.worker, sleeper=sleeper),
            budget=min(RELEASE_BUDGET_SECONDS, context.retry_budget),
            fenced=True,
        )
        report_side_effects(context, queue, claimed)
    except WaypostError as error:
        log.debug("queue %s: sleeper %s stays registered until it expires: %s", queue, sleeper, error)


def pass_wake_up_on(context: ClientContext, queue: str, sleeper: str) -> Flow[None]:
    """Unregister a sleeper that has no capacity left, and wake the others if it may have been woken for a message.

    After it is unregistered no publish names it; messages of a publish that named it before are found by the poll.
    """
    yield from unregister(context, queue, sleeper)
    try:
        for call in context.store.poll([Idle(queue)]):
            polled: Polled = yield call
            if any(one.needs_claim for one in polled.queues):
                context.wakeups.notify("ready", queue, [ALL_SLEEPERS])
    except WaypostError as error:
        log.debug("queue %s: other workers find out by their polls: %s", queue, error)


def safety_poll_seconds(lease_ms: int | None, *, woken: bool) -> float:
    """Return how often an idle queue is polled: often enough to learn of new leases before they end."""
    longest = SAFETY_POLL_SECONDS if woken else UNWOKEN_POLL_SECONDS
    return longest if lease_ms is None else min(longest, max(lease_ms / 1000, POLL_FIRST_SECONDS))


class Nap:
    """How long to sleep after a claim that found too few messages: until the store's next due time, or the next poll.

    With a working channel it polls only as a precaution. Without one it polls soon, then with growing intervals.
    """

    __slots__ = ("_least", "_poll", "moment", "only_to_be_safe", "poll_seconds")

    def __init__(self) -> None:
        #: Whether the last result was a safety poll, whose time need not be exact.
        self.only_to_be_safe = False
        #: Seconds until the store's next due time, and how often to poll until then; None while it polls more often.
        self.moment: float | None = None
        self.poll_seconds: float | None = None
        self._poll = POLL_FIRST_SECONDS
        self._least = MOMENT_MIN_SECONDS

    def seconds(self, claimed: Claimed, remaining: float | None, *, woken: bool = False) -> float:
        self.only_to_be_safe, self.moment = woken, None
        # Leases that begin meanwhile end one lease length from now at the earliest: this poll is in time for all of
        # them.
        self.poll_seconds = safety_poll_seconds(claimed.lease_ms, woken=woken)
        if woken:
            pause = self.poll_seconds * random.uniform(0.8, 1.0)
            self._poll = POLL_FIRST_SECONDS
        elif self._poll < self.poll_seconds:
            pause = self._poll * random.uniform(0.8, 1.0)
            self._poll = min(self._poll * 2, self.poll_seconds)
            self.poll_seconds = None
        else:
            pause = self.poll_seconds * random.uniform(0.8, 1.0)
        moments: list[int | None] = []
        if not claimed.paused:
            moments = [claimed.next_rate_ms, claimed.next_due_ms, claimed.next_lease_ms]
            if claimed.next_rate_ms is not None and not claimed.grouped:
                # While the rate is used up, neither due timers nor expired leases can be claimed. (If it is the rate of
                # one group, the others continue.)
                moments = [claimed.next_rate_ms]
        soonest = min((moment for moment in moments if moment is not None), default=None)
        if soonest is not None:
            self.only_to_be_safe = self.only_to_be_safe and soonest / 1000 >= pause
            # A due time without a claimable message, again and again (`max_running` is reached), must not cause a busy
            # loop.
            self.moment = max(soonest / 1000, self._least)
            pause = min(pause, self.moment)
            self._least = min(self._least * 2, POLL_FIRST_SECONDS)
        return pause if remaining is None else min(pause, remaining)


def claim(
    context: ClientContext,
    queue: str,
    limit: int,
    deadline: float | None = None,
    *,
    sleeper: str | None = None,
    poll_soon_ms: int | None = None,
    blocking: tuple[float, BlockingWaiter] | None = None,
    begun: Operation | None = None,
) -> Flow[Claimed]:
    """Claim messages. If the reply is lost and the wait is over, replay that claim and lease nothing new.

    `blocking`: the time limit of a blocking wait before the claim, which a wake-up ends, and its waiter. `begun`: the
    operation of a claim that was sent before, without a reply.
    """
    store = context.store
    yield from context.know_time()
    waits = blocking is not None and sleeper is not None and store.blocking_waits is not None
    replay = False

    def make(operation: Operation) -> Call[Claimed]:
        if replay:
            return store.claim(queue, limit, operation, worker=context.worker, replay=True)
        call = store.claim(
            queue, limit, operation, worker=context.worker, sleeper=sleeper, poll_soon_ms=poll_soon_ms,
            bytes_max=context.claim_bytes(queue),
        )  # fmt: skip
        if waits and blocking is not None and sleeper is not None and store.blocking_waits is not None:
            return store.blocking_waits.claim_after_wait(call, sleeper, *blocking)
        return call

    # A claim that is too old to be repeated is sent as a new one: the leases of the old one will expire.
    sending = Sending(
        context, queue, make, fenced=True, begun=None if begun is None else (begun, context.monotonic())
    )  # fmt: skip
    sending.may_have_run = begun is not None
    try:
        while True:
            sent, sent_at = context.monotonic(), lease_clock.now()
            try:
                claimed: Claimed = yield sending.call()
            except (StoreUnavailable, OutcomeUnknown, *REFUSALS) as error:
                pause = sending.failed("claim", error)
                waits = False
                if pause is not None:
                    yield pause
                    replay = context.draining or (deadline is not None and context.monotonic() >= deadline)
            except BaseException as error:
                sending.may_have_run = sending.may_have_run or getattr(error, "outcome", "unknown") == "unknown"
                raise
            else:
                if blocking is not None and waits:
                    # A poll may have shown meanwhile that it had not begun.
                    sent_at = max(sent_at, blocking[1].not_before)
                if waits and is_late(claimed, lease_clock.now() - sent_at):
                    # The reply came long after the claim: replay it to learn which leases are still valid.
                    waits, replay, sending.may_have_run = False, True, True
                    continue
                sending.may_have_run = False
                if not waits and not replay:
                    context.learn_throughput(queue, claimed, context.monotonic() - sent)
                return _note_claimed(context, queue, claimed, sent_at)
    except WaypostError as error:
        context.emit("claim", queue, *how(error), error_type=error_type(error), error=error_text(error))
        raise
    finally:
        if sending.may_have_run:
            # Interrupted or out of budget: messages may be leased to us. The next claim replays this one.
            context.add_lost_claim(queue, sending.operation)
        else:
            sending.end()


def _note_claimed(context: ClientContext, queue: str, claimed: Claimed, sent_at: float) -> Claimed:
    """Report the result of a claim, and store when it was sent."""
    if claimed.damaged:
        report_damaged(context, queue, claimed.damaged)
    if claimed.leases:
        context.session.time.learn(claimed.leases[-1].claimed_ms)
    report_side_effects(context, queue, claimed)
    if context.on_event is not None:
        emit_claimed(context, queue, claimed)
    return structs.replace(claimed, sent_at=sent_at)


def settle_and_claim(
    context: ClientContext,
    queue: str,
    settlements: Sequence[Settlement],
    answered: Callable[[Woken[list[SettleStatus]] | BaseException, Operation | None], None],
    limit: int,
    *,
    sleeper: str | None = None,
    poll_soon_ms: int | None = None,
) -> Flow[Claimed]:
    """Settle deliveries, then claim, both in one round trip: the settle may release the group of the next message.

    Each has its own operation and its own reply. `answered` is called with the reply to the settle and its operation
    (None: it was not sent); a failed settle is not repeated here. The claim is repeated by `claim`.
    """
    try:
        yield from context.know_time()
    except BaseException as error:
        answered(error, None)
        raise
    store, windows = context.store, context.replay_windows
    settle_operation, claim_operation = windows.begin(queue), windows.begin(queue)
    sent, sent_at = context.monotonic(), lease_clock.now()
    try:
        settled, claimed = yield Together([
            settling(context, queue, settlements, next_claim=limit)(settle_operation),
            store.claim(
                queue, limit, claim_operation, worker=context.worker, sleeper=sleeper, poll_soon_ms=poll_soon_ms,
                bytes_max=context.claim_bytes(queue),
            ),
        ])  # fmt: skip
    except BaseException as error:
        answered(error, settle_operation)
        context.add_lost_claim(queue, claim_operation)
        raise
    answered(settled, settle_operation)
    if isinstance(claimed, Exception):
        return (
            yield from claim(
                context, queue, limit, sleeper=sleeper, poll_soon_ms=poll_soon_ms, begun=claim_operation
            )
        )  # fmt: skip
    windows.end(queue, claim_operation)
    context.learn_throughput(queue, claimed, context.monotonic() - sent)
    return _note_claimed(context, queue, claimed, sent_at)


def is_late(claimed: Claimed, seconds: float) -> bool:
    """Return whether most of the lease may have passed before the reply came."""
    return bool(claimed.leases) and claimed.lease_ms is not None and seconds * 1000 > claimed.lease_ms * 2 / 3


def local_lease(claimed: Claimed) -> tuple[float, float]:
    """Return the length of the leases of a claim, and their local end by `lease_clock`."""
    lease = claimed.leases[0]
    if lease.lease_end_ms is None:
        return 0.0, float("inf")
    # A message that a repeated claim returns may have been claimed longer than its lease ago.
    length_ms = lease.lease_end_ms - lease.claimed_ms
    seconds = max(1, length_ms if claimed.lease_ms is None else min(length_ms, claimed.lease_ms)) / 1000
    return seconds, lease_clock.local_end(claimed.sent_at, seconds)


def log_late_claim(queue: str, count: int) -> None:
    """Log that the reply to a claim came so late that its messages are released."""
    log.warning(
        "a claim of %d messages of queue %s was answered after their leases had ended: they are released; give the "
        "queue a longer lease if the store is always this slow",
        count,
        queue,
        extra={"event": "claim_late", "queue": queue, "count": count},
    )


def give_back(context: ClientContext, queue: str, leases: Sequence[Lease]) -> Flow[None]:
    """Release unused leases. There are no long retries: the leases expire in any case."""
    messages = [Message[Any](queue, lease) for lease in leases]
    released = [Settlement(m.id, m.token, m._lease.nonce, "release") for m in messages]
    try:
        yield from settle(context, queue, messages, released, budget=min(RELEASE_BUDGET_SECONDS, context.retry_budget))
    except WaypostError as error:
        log.debug("queue %s: %d messages could not be released: %s", queue, len(messages), error)


def claim_lost(
    context: ClientContext, queue: str, operation: Operation, *, budget: float | None = None
) -> Flow[Claimed | None]:
    """Return what an earlier claim without a reply still leases; None if the store has deleted its result."""
    answered = False
    try:
        call = context.store.claim(queue, 1, operation, worker=context.worker, replay=True)
        # A repeat renews the leases that it returns, so they count from then.
        claimed, sent = yield from context.attempt_timed(call, budget=budget)
        answered = True
        report_side_effects(context, queue, claimed)
        if context.on_event is not None and claimed.leases:
            emit_claimed(context, queue, claimed)
        return structs.replace(claimed, sent_at=sent)
    except (OperationTooOld, SessionInUse):
        answered = True
        return None
    finally:
        if answered:
            context.replay_windows.end(queue, operation)
        else:
            context.add_lost_claim(queue, operation)


def _claim_lost_again(
    context: ClientContext, queue: str, as_type: type[T] | None, make: Make[T]
) -> Flow[Message[T] | None]:
    """Return a message that an earlier claim with a lost reply leased to us, or None."""
    while (operation := context.take_lost_claim(queue)) is not None:
        claimed = yield from claim_lost(context, queue, operation)
        if claimed is not None:
            found = yield from _readable(context, queue, claimed, as_type, make)
            if found is not None:
                return found
    return None


def give_back_lost_claims(context: ClientContext) -> Flow[int]:
    """Release the leases of claims without a reply, if the store answers soon; return how many are left."""
    for queue in context.queues_with_lost_claims():
        while (operation := context.take_lost_claim(queue)) is not None:
            try:
                claimed = yield from claim_lost(context, queue, operation, budget=RELEASE_BUDGET_SECONDS)
            except WaypostError:
                break
            if claimed is not None and claimed.leases:
                yield from give_back(context, queue, claimed.leases)
    return len(context.queues_with_lost_claims())


def report_side_effects(context: ClientContext, queue: str, claimed: Claimed) -> None:
    """Wake the clients that a claim affects besides its own, and report the side effects."""
    if claimed.wake:
        context.wake(claimed.wake)
    if claimed.also:
        context.report(claimed.also)
        # The worker of an expired lease may not know it: the notification makes it renew, which fails.
        ended = [change.id for change in claimed.also if change.id and "expired" in (change.event, change.reason)]
        if ended:
            context.wakeups.notify("held", queue, ended)


def emit_claimed(context: ClientContext, queue: str, claimed: Claimed) -> None:
    """Report one event for each message, or one if there was none."""
    if not claimed.leases:
        context.emit("polled", queue, "skipped", count=0)
    for lease in claimed.leases:
        context.emit(
            "claimed", queue, message_id=lease.id, key=lease.key, group=lease.group, priority=lease.priority,
            token=lease.token, deliveries=lease.deliveries, attempts=lease.attempts,
            _wait_ms=lease.claimed_ms - lease.ready_ms,
        )  # fmt: skip


def report_damaged(context: ClientContext, queue: str, ids: Sequence[str]) -> None:
    """Log each message whose record is damaged: only the claim that set it aside finds it."""
    for message_id in ids:
        log.warning(
            "the record of message %s of queue %s is damaged: it was set aside, and other messages are not affected; "
            "`waypost doctor --mend` lists and repairs such messages",
            message_id,
            queue,
            extra={"event": "damaged_record", "queue": queue, "message_id": message_id},
        )
        context.emit("damaged_record", queue, "failure", message_id=message_id)


def emit_settled(
    context: ClientContext, message: Message[Any], settlement: Settlement, event: str, *outcome: Any
) -> None:
    """Report the one event that closes a claim."""
    lease = message._lease
    context.emit(
        event, message.queue, *outcome, message_id=lease.id, key=lease.key, group=lease.group,
        priority=lease.priority, token=lease.token, deliveries=lease.deliveries, attempts=lease.attempts,
        reason=settlement.reason, error_type=settlement.error_type, error=split_error(settlement.error)[0],
    )  # fmt: skip


def how(error: WaypostError) -> tuple[ObservedOutcome]:
    """Return the outcome of a step that raised."""
    return ("unknown",) if error.outcome == "unknown" else ("failure",)


def _readable(
    context: ClientContext, queue: str, claimed: Claimed, as_type: type[T] | None, make: Make[T]
) -> Flow[Message[T] | None]:
    """Return the claimed message if this release can decode it as the queue's type. Otherwise put it aside."""
    if not claimed.leases:
        return None
    seconds, until = local_lease(claimed)
    if until <= lease_clock.now():
        log_late_claim(queue, len(claimed.leases))
        yield from give_back(context, queue, claimed.leases)
        return None
    for lease in claimed.leases:
        message = make(queue, lease, as_type)
        message._lease_seconds, message._lease_until = seconds, until
        try:
            message.open()
            if as_type is not None:
                _ = message.body
        except EnvelopeTooNew as error:
            aside = too_new(lease)
            yield from _put_aside(context, message, aside, error)
        except Undecodable as error:
            aside = Settlement(
                lease.id, lease.token, lease.nonce, "dead",
                reason="undecodable", error_type=error_type(error), error=error_text(error),
            )  # fmt: skip
            yield from _put_aside(context, message, aside, error)
        else:
            return message
    return None


def too_new(lease: Lease) -> Settlement:
    """Return a message that only a newer release can decode to the queue, for a newer worker."""
    return Settlement(lease.id, lease.token, lease.nonce, "snooze", after_ms=TOO_NEW_SNOOZE_MS)


def put_off(lease: Lease) -> Settlement:
    """Return a message that no handler of this worker handles to the queue, for another worker."""
    return Settlement(lease.id, lease.token, lease.nonce, "snooze", after_ms=OTHER_WORKER_SNOOZE_MS)


def _put_aside(context: ClientContext, message: Message[Any], aside: Settlement, error: Undecodable) -> Flow[None]:
    log_unreadable(message, aside, error)
    if not message.at_most_once:
        yield from settle(context, message.queue, [message], [aside])
    elif context.on_event is not None:
        emit_settled(context, message, aside, "done")


def log_unreadable(message: Message[Any], aside: Settlement, error: BaseException) -> None:
    """Log why a message is put aside."""
    log.warning(
        "message %s of queue %s cannot be read (%s): %s",
        message.id,
        message.queue,
        aside.reason or "left for a newer worker",
        error,
        extra={"event": "unreadable", "queue": message.queue, "message_id": message.id, "outcome": aside.outcome},
    )


# ---- settling ------------------------------------------------------------------------------------------------


def settling(
    context: ClientContext, queue: str, settlements: Sequence[Settlement], *, next_claim: int = 0
) -> Callable[[Operation], Call[Woken[list[SettleStatus]]]]:
    """Return the function that creates the call of a settle.

    All settles are created here, so that the redact hook is applied to all continuations.
    """
    journalled = settlements if context.redact is None else redact_sent_on(context.redact, settlements)
    return lambda operation: context.store.settle(queue, journalled, operation, next_claim=next_claim)


class SharedSettle:
    """Single settles without continuations may share a call."""

    #: Token and nonce guard it: if it is too old to be repeated it is sent as a new one, and settles or is `lost`.
    fenced = True

    def call(
        self, context: ClientContext, queue: str, items: Sequence[Settlement], operation: Operation
    ) -> Call[Woken[list[SettleStatus]]]:
        return settling(context, queue, items)(operation)

    def with_new_ids(self, context: ClientContext, queue: str, items: Sequence[Settlement]) -> Sequence[Settlement]:
        return items

    def key(self, item: Settlement) -> str:
        return item.id

    def size(self, item: Settlement) -> int:
        return len(item.id)


SettleLines: TypeAlias = Lines[Settlement, SettleStatus]


def settle(
    context: ClientContext,
    queue: str,
    messages: Sequence[Message[Any]],
    settlements: Sequence[Settlement],
    *,
    budget: float | None = None,
    lines: SettleLines | None = None,
    begun: Operation | None = None,
) -> Flow[list[SettleStatus]]:
    """Settle deliveries of one queue in one step; record and log lost leases; deliver continuations.

    With `lines` a single settle that is simply done may share a call with others that end at the same time. `begun`:
    the operation of a settle that was sent before, without a reply.
    """
    statuses: list[SettleStatus]
    is_single = len(settlements) == 1 and settlements[0].is_plain_done
    if lines is not None and is_single and shares_calls(context, messages[0].key):
        statuses = [(yield from send_in_line(context, queue, settlements[0], lines.of(queue)))]
    else:
        make = settling(context, queue, settlements)
        woken = yield from context.operate(queue, make, budget=budget, fenced=True, begun=begun)
        statuses = context.wake_and_report(woken)
    if note_settled(context, messages, settlements, statuses):
        yield from deliver_outgoing(context, queue)
    return statuses


def note_settled(
    context: ClientContext,
    messages: Sequence[Message[Any]],
    settlements: Sequence[Settlement],
    statuses: Sequence[SettleStatus],
) -> bool:
    """Record how deliveries were settled, and log lost leases; return whether there may be continuations to deliver."""
    sends_on = False
    for message, settlement, status in zip(messages, settlements, statuses, strict=True):
        message.settled = status
        if settlement.then or message._lease.chain is not None:
            sends_on = True
        if status == "lost":
            if not message.lease_lost:
                log_lease_lost(message, "settle")
            message.lease_lost = message.fenced = True
    if context.on_event is not None:
        for message, settlement, status in zip(messages, settlements, statuses, strict=True):
            emit_settled(context, message, settlement, status, "failure" if status == "lost" else "success")
    return sends_on


def log_lease_lost(message: Message[Any], phase: str) -> None:
    """Log once that a lease was lost: from now on another worker may handle the message."""
    why = "could not be renewed before its end" if phase == "deadline" else f"was lost before its {phase}"
    log.warning(
        "the lease of message %s of queue %s %s: it is or will be delivered again; "
        "give the queue a longer lease, or renew it while you work",
        message.id,
        message.queue,
        why,
        extra={
            "event": "lease_lost",
            "phase": phase,
            "queue": message.queue,
            "message_id": message.id,
            "deliveries": message.deliveries,
        },
    )


def finish(
    context: ClientContext,
    message: Message[Any],
    error: BaseException | None,
    retry: RetryPolicy,
    *,
    stopped: bool = False,
    lines: SettleLines | None = None,
) -> Flow[bool]:
    """Settle a message at the end of its block. Return True if `error` was an outcome.

    `stopped`: the block was interrupted from outside, so the message is released instead of counting as failed.
    """
    is_outcome = isinstance(error, CHOICES)
    if message.at_most_once:
        if is_outcome:
            log.warning(
                "message %s of queue %s left the store when it was claimed (lease=None): it cannot end as %s",
                message.id,
                message.queue,
                type(error).__name__,
                extra={"event": "outcome_ignored", "queue": message.queue, "message_id": message.id},
            )
        if context.on_event is not None:
            emit_settled(context, message, Settlement(message.id, message.token, message._lease.nonce), "done")
        return is_outcome
    if message.settled is not None:
        return is_outcome  # settled in its own transaction
    settlement = message.settlement(error, retry, stopped=stopped)
    interrupted = settlement.outcome == "release"
    budget = min(RELEASE_BUDGET_SECONDS, context.retry_budget) if interrupted else None
    try:
        yield from settle(context, message.queue, [message], [settlement], budget=budget, lines=lines)
    except WaypostError as failure:
        if context.on_event is not None:
            emit_settled(context, message, settlement, "unsettled", *how(failure))
        if error is None or is_outcome:
            raise
        # The caller's own error is more useful than ours; the lease will expire.
        log.warning(
            "message %s of queue %s could not be settled as %s (%s): it is delivered again when its lease ends",
            message.id,
            message.queue,
            settlement.outcome,
            failure,
            extra={"event": "settle_failed", "queue": message.queue, "message_id": message.id},
        )
    return is_outcome


def extend(context: ClientContext, queue: str, messages: Sequence[Message[Any]]) -> Flow[list[ExtendStatus]]:
    """Renew the leases of messages of one queue: `ok`, `lost`, or `cancel` where a cancel was requested."""
    holds = [Hold(message.id, message.token, message._lease.nonce) for message in messages]
    # From its first attempt: a repeat gets the result of that attempt.
    sent = lease_clock.now()
    statuses = yield from context.operate(
        queue, lambda operation: context.store.extend(queue, holds, operation), fenced=True
    )
    for message, status in zip(messages, statuses, strict=True):
        if status != "lost":
            message._lease_until = max(message._lease_until, lease_clock.local_end(sent, message._lease_seconds))
            continue
        message.fenced = True
        if not message.lease_lost:
            message.lease_lost = True
            log_lease_lost(message, "extend")
    return statuses


# ---- continuations -------------------------------------------------------------------------------------------
