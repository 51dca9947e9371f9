"""Lease renewal: one thread renews the leases of all holders, another one watches when they end.

Both run while the event loop is blocked. Every third of a lease all held messages are renewed, those of a queue in one
call (or one per chunk), on a separate connection. The calls of several queues are sent together, so that a slow reply
for one of them does not delay the others. The replies contain lost leases and requests to cancel. Only code that holds
the GIL for a third of a lease can prevent the thread from running.

A lease ends here a little before it ends in the store, counted from the time at which the answered claim or renewal
was sent. The second thread waits for that time and makes no calls, so a store that does not answer cannot delay it:
the handler is then notified, as when the store returns `lost`. It may still finish; then the store decides.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from waypost import lease_clock
from waypost.errors import OutcomeUnknown, StoreUnavailable, WaypostError
from waypost.identity import Operation
from waypost.message import Message, error_text, error_type
from waypost.operations.flow import REFUSALS, ClientContext, Flow, Sending, Sleep, Together, drive
from waypost.operations.receive import how, log_lease_lost
from waypost.policy import CHUNK_MESSAGES_MAX
from waypost.store.port import Call, Executor, Hold
from waypost.values import ExtendStatus

log = logging.getLogger("waypost")

#: Renewals per lease: one or two may fail before the lease is lost.
RENEWALS_PER_LEASE = 3
#: The shortest interval, so that leases of a few milliseconds do not keep the thread busy.
INTERVAL_SECONDS_MIN = 0.01
#: A thread's wait does not count the time in which the machine was suspended, so the lease clock is read this often.
CLOCK_CHECK_SECONDS = 1.0
#: After this time a renewal without a reply is left to its thread, and another thread renews from then on.
STUCK_SECONDS_MIN = 2.0
#: How many threads may be stuck in calls; each ends with its call, after half a minute of silence at the latest.
STUCK_MAX = 16
#: Messages that are renewed together, so that messages with a short lease do not wait for the replies of all others.
TOGETHER_MESSAGES_MAX = 4 * CHUNK_MESSAGES_MAX
#: Connections over which calls are distributed if the store runs the calls of a connection one after the other.
CONNECTIONS_MAX = 4

Phase = Literal["extend", "deadline"]


class Holder(Protocol):
    """A part of a client or worker that holds leases of one queue. All of this is called from other threads."""

    queue: str
    #: Its shortest recent lease, in seconds; None while it has none.
    lease_seconds: float | None

    def to_renew(self) -> list[Message[Any]]: ...
    def held(self) -> list[Message[Any]]: ...
    def runs(self, message: Message[Any]) -> bool:
        """Whether a handler or a block runs for it, which must be stopped when its lease ends."""
        ...

    def still_concerns(self, message: Message[Any]) -> bool: ...
    def on_lost(self, message: Message[Any]) -> None: ...
    def on_cancel(self, message: Message[Any]) -> None: ...


class Renewer:
    """The two threads. With `on_demand` they start with the first lease, and end when there is none."""

    def __init__(self, context: ClientContext, connect: Callable[[], Executor], *, on_demand: bool = False) -> None:
        self._context = context
        self._connect = connect
        self._on_demand = on_demand
        self.executor: Executor | None = None
        self._holders: list[Holder] = []
        self._due: dict[Holder, float] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        #: Since when the renewing thread waits for the store, and its time limit; None while it does not wait.
        self._calling: tuple[float, float] | None = None
        self._stuck: list[threading.Thread] = []
        self._losing = threading.Lock()
        self._connecting = threading.Lock()
        #: The time before which no lease ends, and the thread that waits for it.
        self._next_end = float("inf")
        self._ends_changed = threading.Condition()
        self._ends_thread: threading.Thread | None = None

    def start(self, holders: list[Holder]) -> None:
        """Start renewing. The connection is opened here, so that the first renewal does not have to wait for it."""
        self._holders = holders
        self.executor = self._connect()
        self._start_threads()

    def _start_threads(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="waypost-renewals", daemon=True)
            self._thread.start()
        if self._ends_thread is None:
            self._ends_thread = threading.Thread(target=self._watch_ends, name="waypost-lease-ends", daemon=True)
            self._ends_thread.start()

    def stop(self, timeout: float) -> None:
        """End the threads. A thread that hangs in a call is abandoned: it is a daemon."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
            thread = self._thread
        with self._ends_changed:
            self._ends_changed.notify()
            ends_thread = self._ends_thread
        if ends_thread is not None:
            ends_thread.join(timeout)
        if thread is not None:
            thread.join(timeout)
        self._close()

    def _close(self) -> None:
        """Close the connection once no thread uses it: the last thread that hung in a call closes it."""
        me = threading.current_thread()
        with self._changed:
            threads = [*self._stuck, *([] if self._thread is None else [self._thread])]
            if not self._stopping or any(one.is_alive() for one in threads if one is not me):
                return
            executor, self.executor = self.executor, None
        if executor is not None:
            executor.close()

    def reschedule(self, holder: Holder) -> None:
        """Wake the thread, because a holder has a shorter lease than before."""
        with self._changed:
            self._due.pop(holder, None)
            self._changed.notify()

    def renew_now(self, holder: Holder) -> None:
        """Renew the leases of a holder at once: the reply contains lost leases and requests to cancel."""
        with self._changed:
            self._due[holder] = time.monotonic()
            self._changed.notify()

    def expect_end(self, holder: Holder, until: float, lease_seconds: float) -> None:
        """Watch leases that end at this time from now on; a lease that ends soon is renewed at once."""
        if until < self._next_end:
            with self._ends_changed:
                if until < self._next_end:
                    self._next_end = until
                    self._ends_changed.notify()
        if until - lease_clock.now() < (RENEWALS_PER_LEASE - 1) * renewal_interval(lease_seconds):
            # The reply to the claim was late, or the claim waited in the server: the next renewal might be too late.
            self.renew_now(holder)

    def keep(self, holder: Holder, message: Message[Any]) -> None:
        """Renew the lease of a newly claimed message; starts the threads if necessary."""
        with self._changed:
            if holder not in self._holders:
                self._holders.append(holder)
            seconds = holder.lease_seconds
            if seconds is None or message._lease_seconds < seconds:
                holder.lease_seconds = message._lease_seconds
                self._due.pop(holder, None)
                self._changed.notify()
            with self._ends_changed:
                self._start_threads()
        self.expect_end(holder, message._lease_until, message._lease_seconds)

    # ---- renewing ----------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            self._renew_when_due()
        finally:
            self._close()

    def _renew_when_due(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                if self._stopping or self._thread is not me:
                    return
                now = time.monotonic()
                for holder in self._holders:
                    if holder.lease_seconds is not None and holder not in self._due:
                        self._due[holder] = now + renewal_interval(holder.lease_seconds)
                soonest = min(self._due.values(), default=None)
                if soonest is None or soonest > now:
                    self._changed.wait(None if soonest is None else soonest - now)
                    continue
                due = [holder for holder, when in self._due.items() if when <= now]
                if self._on_demand:
                    due = self._forget_idle(due)
                    if not self._holders:
                        self._thread = None
                        with self._ends_changed:
                            self._ends_changed.notify()
                        return
                for holder in due:
                    self._due[holder] = now + renewal_interval(holder.lease_seconds or 60.0)
            try:
                self._renew(due)
            except Exception:
                # A failed renewal costs some leases; if the thread ended, all would be lost.
                log.exception("renewal failed", extra={"event": "renewal_failed"})

    def _forget_idle(self, due: list[Holder]) -> list[Holder]:
        """Return the holders that hold messages; the others register again with their next message."""
        idle = [holder for holder in due if not holder.held()]
        for holder in idle:
            self._due.pop(holder, None)
            self._holders.remove(holder)
            holder.lease_seconds = None
        return [holder for holder in due if holder not in idle]

    def _renew(self, due: list[Holder]) -> None:
        """Renew the leases of several holders: those with the shortest leases first."""
        renewals: list[Renewal] = []
        count = 0
        for holder in sorted(due, key=lambda one: one.lease_seconds or 60.0):
            messages = holder.to_renew()
            for start in range(0, len(messages), CHUNK_MESSAGES_MAX):
                chunk = messages[start : start + CHUNK_MESSAGES_MAX]
                if renewals and count + len(chunk) > TOGETHER_MESSAGES_MAX:
                    self._renew_together(renewals)
                    renewals, count = [], 0
                renewals.append(Renewal(holder, chunk))
                count += len(chunk)
        if renewals:
            self._renew_together(renewals)

    def _renew_together(self, renewals: list[Renewal]) -> None:
        groups = [renewals]
        if not self._context.store.capabilities.runs_together:
            groups = [renewals[start::CONNECTIONS_MAX] for start in range(min(CONNECTIONS_MAX, len(renewals)))]
        seconds = min(one.interval for one in renewals)
        self._calling = (lease_clock.now(), max(seconds, STUCK_SECONDS_MIN))
        threads = [
            threading.Thread(target=self._renew_group, args=(group, seconds), name="waypost-renewals", daemon=True)
            for group in groups[1:]
        ]
        try:
            for thread in threads:
                thread.start()
            self._renew_group(groups[0], seconds)
            for thread in threads:
                thread.join()
        finally:
            if self._thread is threading.current_thread():
                self._calling = None

    def _renew_group(self, renewals: list[Renewal], seconds: float) -> None:
        sent = lease_clock.now()
        try:
            try:
                replies = self._extend(renewals, seconds)
            except WaypostError as error:
                replies = [error] * len(renewals)
            for renewal, reply in zip(renewals, replies, strict=True):
                self._take_reply(renewal, reply, sent)
        except Exception:
            queues = ", ".join(one.holder.queue for one in renewals)
            log.exception("renewal failed", extra={"event": "renewal_failed", "queue": queues})

    def _take_reply(self, renewal: Renewal, reply: list[ExtendStatus] | WaypostError, sent: float) -> None:
        holder, messages = renewal.holder, renewal.messages
        if isinstance(reply, WaypostError):
            log.warning(
                "the leases of %d messages of queue %s could not be renewed: %s",
                len(messages),
                holder.queue,
                reply,
                extra={"event": "renewal_failed", "queue": holder.queue, "count": len(messages)},
            )
            self._context.emit(
                "renewed", holder.queue, *how(reply), count=len(messages),
                error_type=error_type(reply), error=error_text(reply),
            )  # fmt: skip
            return
        self._context.emit("renewed", holder.queue, count=reply.count("ok") + reply.count("cancel"))
        for message, status in zip(messages, reply, strict=True):
            if status != "lost":
                # Not an earlier end: the reply to a call may arrive after the reply to the next one.
                end = lease_clock.local_end(sent, message._lease_seconds)
                message._lease_until = max(message._lease_until, end)
            if status != "ok":
                self._answer(holder, message, status)

    def _extend(self, renewals: list[Renewal], seconds: float) -> list[list[ExtendStatus] | WaypostError]:
        """Send renewals together, with this time limit: after the next renewal they have no use."""
        with self._connecting:
            if self.executor is None:
                self.executor = self._connect()
            executor = self.executor
        return drive(executor, extend_together(self._context, renewals, min(self._context.retry_budget, seconds)))

    def _answer(self, holder: Holder, message: Message[Any], status: ExtendStatus) -> None:
        if not holder.still_concerns(message):
            return  # settled meanwhile, or being settled: that reply decides
        if status == "cancel":
            if not message.cancel_requested:
                message.cancel_requested = True
                holder.on_cancel(message)
        else:
            self._lose(holder, message, "extend")

    def _lose(self, holder: Holder, message: Message[Any], phase: Phase) -> None:
        """Report once that a lease is lost. A reply of the store is final; our own clock may be early."""
        with self._losing:
            message.fenced = message.fenced or phase == "extend"
            if message.lease_lost:
                return
            # Set here, not on the event loop: a handler that blocks the loop can read it too.
            message.lease_lost = True
        log_lease_lost(message, phase)
        self._context.emit(
            "lease_lost", holder.queue, "failure", message_id=message.id, token=message.token,
            deliveries=message.deliveries, attempts=message.attempts, reason=phase,
        )  # fmt: skip
        holder.on_lost(message)

    # ---- the ends of leases ------------------------------------------------------------------------------

    def _watch_ends(self) -> None:
        while True:
            with self._ends_changed:
                if self._stopping:
                    return
                now, end = lease_clock.now(), self._next_end
                if now < end:
                    if end == float("inf") and self._on_demand and self._thread is None:
                        self._ends_thread = None
                        return
                    self._ends_changed.wait(None if end == float("inf") else min(end - now, CLOCK_CHECK_SECONDS))
                else:
                    # From here on a new lease wakes this thread, even if it ends after all known ones.
                    self._next_end = float("inf")
            self._replace_stuck_thread()
            if now < end:
                continue
            try:
                soonest = self._end_leases()
            except Exception:
                log.exception("the ends of leases could not be checked", extra={"event": "lease_ends_failed"})
                soonest = lease_clock.now() + CLOCK_CHECK_SECONDS
            with self._ends_changed:
                self._next_end = min(self._next_end, soonest)

    def _end_leases(self) -> float:
        """Report the leases that have ended; return the earliest end of the others."""
        now, soonest = lease_clock.now(), float("inf")
        for holder in list(self._holders):
            for message in holder.held():
                if message.lease_lost:
                    continue
                if message._lease_until > now:
                    soonest = min(soonest, message._lease_until)
                elif holder.runs(message):
                    self._lose(holder, message, "deadline")
        return soonest

    def _replace_stuck_thread(self) -> None:
        """Renew from another thread, on another connection, if a call hangs."""
        calling = self._calling
        if calling is None or lease_clock.now() - calling[0] <= calling[1]:
            return
        with self._changed:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            if self._calling is not calling or self._thread is None or len(self._stuck) >= STUCK_MAX:
                return
            self._stuck.append(self._thread)
            self._calling = None
            self._thread = threading.Thread(target=self._loop, name="waypost-renewals", daemon=True)
            self._thread.start()


class Renewal:
    """The leases of one holder that one call renews."""

    __slots__ = ("holder", "interval", "messages")

    def __init__(self, holder: Holder, messages: list[Message[Any]]) -> None:
        self.holder = holder
        self.messages = messages
        self.interval = renewal_interval(holder.lease_seconds or 60.0)

    def sending(self, context: ClientContext, budget: float) -> Sending[list[ExtendStatus]]:
        """Return its call, which can be sent again: the store compares tokens, so that a repeat is harmless."""
        queue = self.holder.queue
        holds = [Hold(message.id, message.token, message._lease.nonce) for message in self.messages]

        def make(operation: Operation) -> Call[list[ExtendStatus]]:
            return context.store.extend(queue, holds, operation)

        return Sending(context, queue, make, budget=budget, fenced=True)


def extend_together(
    context: ClientContext, renewals: list[Renewal], budget: float
) -> Flow[list[list[ExtendStatus] | WaypostError]]:
    """Send renewals as one flush; those whose connection failed are sent again within the budget."""
    yield from context.know_time()
    sendings = [renewal.sending(context, budget) for renewal in renewals]
    replies: list[Any] = [None] * len(sendings)
    waiting = list(range(len(sendings)))
    try:
        while waiting:
            try:
                answers: list[Any] = yield Together([sendings[place].call() for place in waiting])
            except WaypostError as error:
                answers = [error] * len(waiting)
            again: list[int] = []
            pause: Sleep | None = None
            for place, answer in zip(waiting, answers, strict=True):
                replies[place] = answer
                if isinstance(answer, (StoreUnavailable, OutcomeUnknown, *REFUSALS)):
                    try:
                        pause = sendings[place].failed("extend", answer) or pause
                        again.append(place)
                    except WaypostError as error:
                        replies[place] = error
                elif isinstance(answer, Exception) and not isinstance(answer, WaypostError):
                    raise answer
            if pause is not None:
                yield pause
            waiting = again
        return replies
    finally:
        for sending in sendings:
            sending.end()


def renewal_interval(lease_seconds: float) -> float:
    """Return the time between two renewals."""
    return max(INTERVAL_SECONDS_MIN, lease_seconds / RENEWALS_PER_LEASE)
