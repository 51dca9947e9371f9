"""Flows: operations that do no I/O, and the two small drivers that run them.

A flow is a generator. It yields steps (a store's `Call`, several of them `Together`, or a `Sleep`) and receives their
results, or their errors as exceptions. All error handling (retries, budgets, lost replies, waiting) is
written once, as flows; `drive` and `drive_async` only use the executor and the clock.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from waypost import lease_clock
from waypost.errors import (
    MessageIdInUse,
    OperationTooOld,
    OutcomeUnknown,
    SessionInUse,
    StoreUnavailable,
    WaypostError,
)
from waypost.identity import Operation, Session
from waypost.message import Queue, queue_name
from waypost.policy import (
    BACKOFF_FIRST_SECONDS,
    BACKOFF_MAX_SECONDS,
    CLAIM_BYTES_FIRST,
    CLAIM_BYTES_MAX,
    CLAIM_LEASE_PART,
    REPLAY_MAX,
    RETRY_BUDGET_SECONDS,
    PolicyRecord,
)
from waypost.redaction import Redact
from waypost.store.port import AsyncExecutor, Call, ConnectionClosed, Executor, Store, Woken
from waypost.values import Claimed, ObservedOutcome, SideEffect
from waypost.views import Observed
from waypost.wake.wakeups import NO_WAKEUPS, WakeEvent, Wakeups

if TYPE_CHECKING:
    import asyncio

    from waypost.operations.publish_middleware import PublishMiddleware

T = TypeVar("T")
log = logging.getLogger("waypost")


class Together:
    """Calls to run as one flush. Each is created just before it is sent; the result is a list of results and errors."""

    __slots__ = ("calls",)

    def __init__(self, calls: Iterable[Call[Any]]) -> None:
        self.calls = calls


class Sleep:
    """A pause. `ends_early` is checked regularly, so that a drain does not wait for the end of the pause.

    With a `wake_event` it ends when that is set.
    """

    __slots__ = ("ends_early", "seconds", "wake_event")

    def __init__(
        self, seconds: float, ends_early: Callable[[], bool] | None = None, wake_event: WakeEvent | None = None
    ) -> None:
        self.seconds = seconds
        self.ends_early = ends_early
        self.wake_event = wake_event

    def parts(self) -> Iterator[float]:
        """Yield the sleeps that the pause consists of."""
        left = self.seconds
        if self.ends_early is not None:
            while left > DRAIN_CHECK_SECONDS:
                yield DRAIN_CHECK_SECONDS
                left -= DRAIN_CHECK_SECONDS
                if self.ends_early():
                    return
        yield left


class UserCall:
    """A call of the application's own code, awaited or not. On an event loop a blocking call runs in a thread."""

    __slots__ = ("awaited", "call")

    def __init__(self, call: Callable[[], Any], *, awaited: bool) -> None:
        self.call = call
        self.awaited = awaited


class Turn:
    """A wait for another task of the same event loop, or for another thread. Its result is whether it was ended.

    In a thread it also ends by itself, so that the flow can check what it waits for.
    """

    __slots__ = ("_future", "_lock")

    def __init__(self, future: asyncio.Future[None] | None) -> None:
        self._future = future
        self._lock: threading.Lock | None = None
        if future is None:
            self._lock = threading.Lock()
            self._lock.acquire()

    def end(self) -> None:
        """End the wait: from the same event loop, or from any thread. Ending it again has no effect."""
        if self._lock is not None:
            if self._lock.locked():
                self._lock.release()
        elif self._future is not None and not self._future.done():
            self._future.set_result(None)

    def wait(self) -> bool:
        """Wait in a thread."""
        assert self._lock is not None
        return self._lock.acquire(timeout=TURN_SECONDS)

    async def wait_async(self) -> bool:
        """Wait on the event loop."""
        assert self._future is not None
        await self._future
        return True


#: A thread checks after this time whether it still has to wait.
TURN_SECONDS = 0.25
#: How soon a call that waits for a message notices a drain.
DRAIN_CHECK_SECONDS = 0.25


Step: TypeAlias = "Call[Any] | Together | Sleep | UserCall | Turn"
Flow: TypeAlias = Generator[Step, Any, T]


#: Notifies sleepers, by queue, once the caller's transaction is committed.
AfterCommit: TypeAlias = Callable[[dict[str, list[str]]], object]


def drive(executor: Executor, flow: Flow[T]) -> T:
    """Run a flow to its end."""
    try:
        step = next(flow)
        while True:
            result: Any = None
            try:
                if type(step) is Together:
                    result = executor.run_many(step.calls)
                elif type(step) is Sleep:
                    for seconds in step.parts():
                        if step.wake_event is None:
                            time.sleep(seconds)
                        elif step.wake_event.wait(seconds):
                            break
                elif type(step) is UserCall:
                    result = step.call()
                elif isinstance(step, Turn):
                    result = step.wait()
                else:
                    result = executor.run(step)  # type: ignore[arg-type]
            except BaseException as error:
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except BaseException:
        # If it came between two steps, as a KeyboardInterrupt can, the flow has to give up what others wait for.
        flow.close()
        raise


async def drive_async(executor: AsyncExecutor, flow: Flow[T]) -> T:
    """The same for an event loop."""
    try:
        step = next(flow)
        while True:
            result: Any = None
            try:
                if type(step) is Together:
                    result = await executor.run_many(step.calls)
                elif type(step) is Sleep:
                    import asyncio

                    for seconds in step.parts():
                        if step.wake_event is None:
                            await asyncio.sleep(seconds)
                        elif await step.wake_event.wait_async(seconds):
                            break
                elif type(step) is UserCall:
                    import asyncio

                    result = await (step.call() if step.awaited else asyncio.to_thread(step.call))
                elif isinstance(step, Turn):
                    result = await step.wait_async()
                else:
                    result = await executor.run(step)  # type: ignore[arg-type]
            except BaseException as error:
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class _ReplayWindow:
    """The operations of one session on one queue that are in progress, oldest first."""

    __slots__ = ("id", "last", "session", "under_way")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.id = session.id
        self.last = 0
        self.under_way: dict[int, None] = {}

    @property
    def is_open(self) -> bool:
        # Operations of a session that has been replaced since do not count.
        renewed = self.session.id != self.id
        return renewed or not self.under_way or self.last + 1 - next(iter(self.under_way)) < REPLAY_MAX

    def begin(self, queue: str) -> Operation:
        operation = self.session.operation(queue)
        if operation.session != self.id:
            self.id, self.under_way = operation.session, {}
        self.last = operation.number
        self.under_way[operation.number] = None
        return operation


class ReplayWindows:
    """Numbers the operations of a client so that an operation that may be repeated is never too old for its result.

    A store keeps the results of the last `REPLAY_MAX` operations of a session on a queue. While one operation waits to
    be repeated, hundreds of others may be sent (by threads and tasks); these then use another session.
    """

    def __init__(self, session: Session) -> None:
        self._sessions = [session]
        self._windows: dict[str, list[_ReplayWindow]] = {}
        self._lock = threading.Lock()
        #: How often another process was found to have a session of this client: it is a copy of this one.
        self.renewals = 0

    def begin(self, queue: str) -> Operation:
        """Return the next operation on a queue. It counts as in progress until `end`."""
        with self._lock:
            replay_windows = self._windows.get(queue)
            if replay_windows is None:
                replay_windows = self._windows[queue] = []
            for window in replay_windows:
                if not window.under_way or window.is_open:
                    break
            else:
                if len(replay_windows) == len(self._sessions):
                    self._sessions.append(Session(self._sessions[0].time))
                window = _ReplayWindow(self._sessions[len(replay_windows)])
                replay_windows.append(window)
            return window.begin(queue)

    def end(self, queue: str, operation: Operation) -> None:
        """End an operation: it will not be repeated."""
        with self._lock:
            for window in self._windows[queue]:
                if window.id == operation.session:
                    window.under_way.pop(operation.number, None)

    def renew(self, operation: Operation) -> None:
        """Replace the session of this operation by a new one."""
        with self._lock:
            self.renewals += 1
            for session in self._sessions:
                session.renew(operation.session)


class ClientContext:
    """The common state of a client's flows: the store, the identity, the budget, and cached values."""

    def __init__(
        self,
        store: Store,
        *,
        session: Session,
        worker: str,
        retry_budget: float = RETRY_BUDGET_SECONDS,
        wakeups: Wakeups = NO_WAKEUPS,
        wake: Callable[[dict[str, list[str]]], None] | None = None,
        redact: Redact | None = None,
        on_event: OnEvent | None = None,
        name_of: Callable[[str | Queue[Any]], str] = queue_name,
        publish_middleware: PublishMiddleware | None = None,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        self.store = store
        self.session = session
        self.worker = worker
        self.retry_budget = retry_budget
        self.wakeups = wakeups
        self.wake = wake or wakeups.wake
        self.redact = redact
        self.on_event = on_event
        #: Validates the queue of a continuation: a strict client allows only declared queues.
        self.name_of = name_of
        self._publish_middleware = publish_middleware
        #: Set by a drain: a call that waits for messages stops waiting.
        self.draining = False
        #: The wake events on which such calls wait.
        self.waiting: set[WakeEvent] = set()
        self.monotonic = time.monotonic if monotonic is None else monotonic
        self.replay_windows = ReplayWindows(session)
        self._lost_claims: dict[str, list[tuple[Operation, float]]] = {}
        self._lock = threading.Lock()
        self._hook_failure_logged = False
        self._policies: dict[str, tuple[PolicyRecord, float]] = {}
        #: How many bytes a claim of a queue may return, learned from its replies.
        self._claim_bytes: dict[str, int] = {}

    def drain(self) -> None:
        """End the current and all later waits for messages."""
        self.draining = True
        for wake_event in list(self.waiting):
            wake_event.set()

    @property
    def publish_middleware(self) -> PublishMiddleware | None:
        """The publish middleware of the client, None if there is none to call."""
        middleware = self._publish_middleware
        return None if middleware is None or middleware.is_empty else middleware

    @property
    def replay_seconds(self) -> float:
        """How long a store must answer repeats: longer than the retry budget."""
        return 2 * self.retry_budget + 60

    def attempt(self, call: Call[T], *, budget: float | None = None) -> Flow[T]:
        """Run a call without an operation number; if the connection fails, repeat it within the budget.

        It is not repeated after a freeze or suspension: another client may have changed the same setting since.
        """
        return (yield from self.attempt_timed(call, budget=budget))[0]

    def attempt_timed(self, call: Call[T], *, budget: float | None = None) -> Flow[tuple[T, float]]:
        """`attempt`, and return also when the answered call was sent, by `lease_clock`."""
        started, slept_from, retries = self.monotonic(), lease_clock.now(), None
        while True:
            sent = lease_clock.now()
            try:
                result: T = yield call
                return result, sent
            except (StoreUnavailable, OutcomeUnknown) as error:
                if retries is None:
                    retries = RetryBudget(self, self.retry_budget if budget is None else budget, started)
                yield retries.pause(call.name, error)
                if lease_clock.now() - slept_from > retries.budget + FROZEN_SECONDS:
                    raise retries.give_up(call.name, error) from error

    def know_time(self) -> Flow[None]:
        """Query the store's time if the known bound is stale. A failure is ignored: the next call reports it."""
        if self.session.time.is_stale:
            try:
                self.session.time.learn((yield self.store.time()))
            except WaypostError as error:
                log.debug("the store's time is not known yet: %s", error)

    def operate(
        self,
        queue: str,
        make: Callable[[Operation], Call[T]],
        *,
        budget: float | None = None,
        fenced: bool = False,
        identify: Callable[[], None] | None = None,
        attempted: Callable[[], None] | None = None,
        begun: Operation | None = None,
    ) -> Flow[T]:
        """Run a call with an operation number; if the connection fails, repeat the same operation.

        `attempted` is called when the first attempt has ended, with or without success. `begun`: an operation that was
        sent before, without a reply.
        """
        if self.session.time.is_stale:
            yield from self.know_time()
        sending: Sending[T] | None = None
        started, operation = self.monotonic(), begun or self.replay_windows.begin(queue)
        try:
            # The first attempt is inlined: most calls need no second one.
            try:
                result: T = yield (call := make(operation))
            finally:
                if attempted is not None:
                    attempted()
            return result
        except (StoreUnavailable, OutcomeUnknown, *REFUSALS) as error:
            sending = Sending(
                self, queue, make, budget=budget, fenced=fenced, identify=identify, begun=(operation, started)
            )
            pause = sending.failed(call.name, error)
            if pause is not None:
                yield pause
            return (yield from sending.run())
        finally:
            self.replay_windows.end(queue, operation if sending is None else sending.operation)

    def operate_and_wake(self, queue: str, make: Callable[[Operation], Call[Woken[T]]], **options: Any) -> Flow[T]:
        """Run `operate`, then `wake_and_report` with the reply."""
        return self.wake_and_report((yield from self.operate(queue, make, **options)))

    def attempt_and_wake(self, call: Call[Woken[T]]) -> Flow[T]:
        """Run `attempt`, then `wake_and_report` with the reply."""
        return self.wake_and_report((yield from self.attempt(call)))

    def wake_and_report(self, woken: Woken[T]) -> T:
        """Wake the clients that a reply names, report the side effects of its step, and return its result."""
        if woken.wake:
            self.wake(woken.wake)
        if woken.also:
            self.report(woken.also)
        return woken.result

    def report(self, also: Iterable[SideEffect]) -> None:
        """Report the side effects of a step to `on_event`."""
        if self.on_event is not None:
            for change in also:
                self.emit(
                    change.event, change.queue, message_id=change.id, token=change.token, reason=change.reason,
                    count=None if change.id else change.count,
                )  # fmt: skip

    def emit(self, event: str, queue: str, outcome: ObservedOutcome = "success", **fields: Any) -> None:
        """Pass an event to `on_event`. An exception in it is logged once and has no other effect."""
        if self.on_event is None:
            return
        try:
            self.on_event(Observed(event, outcome, queue, time.time_ns() // 1_000_000, self.worker, **fields))
        except Exception:
            if not self._hook_failure_logged:
                self._hook_failure_logged = True
                log.exception(
                    "on_event failed; further failures are not logged",
                    extra={"event": "on_event_failed", "queue": queue},
                )

    def add_lost_claim(self, queue: str, operation: Operation) -> None:
        """Store a claim that got no reply in its call, for as long as the store keeps its result."""
        with self._lock:
            until = self.monotonic() + self.replay_seconds
            self._lost_claims.setdefault(queue, []).append((operation, until))

    def take_lost_claim(self, queue: str) -> Operation | None:
        """Return and remove one such claim, so that two callers never get the same message from it."""
        with self._lock:
            waiting = self._lost_claims.get(queue, [])
            while waiting:
                operation, until = waiting.pop(0)
                if until > self.monotonic():
                    return operation
                self.replay_windows.end(queue, operation)
            return None

    def queues_with_lost_claims(self) -> list[str]:
        """Return the queues with claims whose messages may be leased to this client without its knowledge."""
        with self._lock:
            return [queue for queue, waiting in self._lost_claims.items() if waiting]

    def policy(self, queue: str) -> Flow[PolicyRecord]:
        """Return a queue's policy, at most a few seconds old."""
        cached = self._policies.get(queue)
        if cached is not None and cached[1] > self.monotonic():
            return cached[0]
        policy = yield from self.attempt(self.store.policy(queue))
        self.remember_policy(queue, policy)
        return policy

    def claim_bytes(self, queue: str) -> int:
        """Return how many bytes the next claim of a queue may have, so that its reply arrives well within the lease."""
        return self._claim_bytes.get(queue, CLAIM_BYTES_FIRST)

    def learn_throughput(self, queue: str, claimed: Claimed, seconds: float) -> None:
        """Learn from the reply to a claim how many bytes the next one may return: by its speed and the lease."""
        goal = (60_000 if claimed.lease_ms is None else claimed.lease_ms) / 1000 * CLAIM_LEASE_PART
        if not claimed.leases or not (claimed.more or seconds > goal):
            return  # a short reply does not show the link's speed
        size = sum(len(lease.envelope) for lease in claimed.leases)
        fits = size * goal / max(seconds, 1e-6)
        if seconds <= goal:
            # The first, buffered data is faster than later data: increase step by step.
            fits = max(self.claim_bytes(queue), min(fits, size * 4, CLAIM_BYTES_MAX))
        self._claim_bytes[queue] = int(fits)

    def remember_policy(self, queue: str, policy: PolicyRecord) -> None:
        """Cache a policy that was just read or set."""
        self._policies[queue] = (policy, self.monotonic() + POLICY_CACHE_SECONDS)

    def forget_policy(self, queue: str) -> None:
        """Forget the policy of a removed queue: a new one with this name has the defaults."""
        self._policies.pop(queue, None)


#: A publisher that blocks on a full queue must not read its policy every few milliseconds.
POLICY_CACHE_SECONDS = 2.0

#: Is called with every event, in the thread or task in which it happened.
OnEvent: TypeAlias = Callable[[Observed], object]


#: A call is not repeated if this much more than its budget has passed: the process was frozen or suspended.
FROZEN_SECONDS = 5.0
#: How often a call that was refused before it ran is created again: each time the cause is removed first.
ANEW_MAX = 4
#: A store refuses an operation with one of these: it did not run now.
REFUSALS = (OperationTooOld, SessionInUse, MessageIdInUse)


class Sending(Generic[T]):
    """One operation in progress: repeated when the connection fails, and replaced if it certainly did not run.

    `make` builds the call for each attempt. `fenced`: a call that runs twice is harmless, because a lease or a
    comparison guards it. `identify` gives new ids to the published messages.
    """

    __slots__ = (
        "_anew",
        "_budget",
        "_context",
        "_fenced",
        "_identify",
        "_make",
        "_queue",
        "_retries",
        "_started",
        "may_have_run",
        "operation",
    )  # fmt: skip

    def __init__(
        self,
        context: ClientContext,
        queue: str,
        make: Callable[[Operation], Call[T]],
        *,
        budget: float | None = None,
        fenced: bool = False,
        identify: Callable[[], None] | None = None,
        begun: tuple[Operation, float] | None = None,
    ) -> None:
        self._context = context
        self._queue = queue
        self._make = make
        self._budget = context.retry_budget if budget is None else budget
        self._fenced = fenced
        self._identify = identify
        self.operation, self._started = begun or (context.replay_windows.begin(queue), context.monotonic())
        self._retries: RetryBudget | None = None
        self._anew = 0
        #: Whether a request was sent that got no reply.
        self.may_have_run = False

    def call(self) -> Call[T]:
        """Return the call to send."""
        return self._make(self.operation)

    def run(self, attempted: Callable[[], None] | None = None) -> Flow[T]:
        """Send it until there is a reply. `attempted` is called when the first attempt has ended, in whatever way."""
        while True:
            try:
                try:
                    result: T = yield (call := self.call())
                finally:
                    if attempted is not None:
                        attempted()
                        attempted = None
                return result
            except (StoreUnavailable, OutcomeUnknown, *REFUSALS) as error:
                pause = self.failed(call.name, error)
                if pause is not None:
                    yield pause

    def failed(self, verb: str, error: Exception) -> Sleep | None:
        """Return the pause before the next attempt, or None. Raises if there must not be another."""
        if isinstance(error, REFUSALS):
            self._begin_anew(error)
            return None
        self.may_have_run = self.may_have_run or isinstance(error, OutcomeUnknown)
        if self._retries is None:
            self._retries = RetryBudget(self._context, self._budget, self._started)
        return self._retries.pause(verb, error)

    def _begin_anew(self, error: OperationTooOld | SessionInUse | MessageIdInUse) -> None:
        """Replace this operation by another one, because it has not run; raise if it may have run.

        A refusal is the reply to the last attempt. If that was the only one, nothing has run. Neither has it if the
        number or an id belongs to another operation, because the store would know ours; nor if its time stamp is one
        that no store accepts.
        """
        self._anew += 1
        replay_windows, too_old = self._context.replay_windows, isinstance(error, OperationTooOld)
        if self._anew > ANEW_MAX or (too_old and self.may_have_run and self.operation.stamp and not self._fenced):
            raise error
        if isinstance(error, OperationTooOld) and error._store_ms is not None:
            self._context.session.time.correct(error._store_ms)
        else:
            replay_windows.renew(self.operation)
            log.warning(
                "queue %s: another process, as of a cloned machine, has the session of this client (%s): it continues "
                "with a new one", self._queue, type(error).__name__,
                extra={"event": "session_renewed", "queue": self._queue},
            )  # fmt: skip
            if self._identify is not None:
                self._identify()
        self.end()
        self.may_have_run = False
        self.operation = replay_windows.begin(self._queue)

    def end(self) -> None:
        """End the operation: it will not be sent again."""
        self._context.replay_windows.end(self._queue, self.operation)


class RetryBudget:
    """The failed attempts of one call: the pause before the next, and the error when there is none."""

    __slots__ = ("_backoff", "_context", "_deadline", "_reached", "budget")

    def __init__(self, context: ClientContext, budget: float, started: float | None = None) -> None:
        self._context = context
        self.budget = budget
        self._deadline = (context.monotonic() if started is None else started) + budget
        self._backoff = BACKOFF_FIRST_SECONDS
        self._reached = False

    def pause(self, verb: str, error: Exception) -> Sleep:
        """Return the pause before the next attempt. Raises when the budget is used up."""
        self._reached = self._reached or isinstance(error, OutcomeUnknown)
        if isinstance(error, ConnectionClosed):
            raise self.give_up(verb, error) if self._reached else error
        remaining = self._deadline - self._context.monotonic()
        if remaining <= 0:
            raise self.give_up(verb, error) from error
        # Full jitter: clients that lost the same server must not all reconnect at the same time.
        seconds = self._backoff * random.uniform(0.5, 1.0)
        self._backoff = min(self._backoff * 2, BACKOFF_MAX_SECONDS)
        return Sleep(min(seconds, remaining))

    def give_up(self, verb: str, error: Exception) -> Exception:
        """Return the error for a call that is given up; its class depends on whether the call can have run."""
        tried = f"within the retry budget of {self.budget:g} s" if self.budget > 0 else "(retries are off)"
        if self._reached:
            return OutcomeUnknown(
                f"{verb}: the request was sent, but no reply came {tried}: {error}. It may have been done: "
                "check before you repeat it, publish with a key so that a repeat is harmless, or raise retry_budget"
            )
        return StoreUnavailable(
            f"{verb}: the store could not be reached {tried}: {error}. Nothing was done: check that it runs and that "
            "the address is right, then repeat the call"
        )
