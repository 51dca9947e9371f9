"""Flows: operations that do no I/O, and the two small drivers that run them.

A flow is a generator. It yields steps (a store's `Call`, several of them `Together`, or a `Sleep`) and is sent their
results, or has their errors thrown in. Everything that can go wrong (retries, budgets, lost replies, waiting) is
written once as flows; `drive` and `drive_async` only touch the executor and the clock.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from waypost import lease_clock
from waypost.delivery import Queue, queue_name
from waypost.errors import OutcomeUnknown, StoreUnavailable
from waypost.identity import Operation, Session
from waypost.message import Claimed, Observed, ObservedOutcome
from waypost.policy import (
    BACKOFF_FIRST_SECONDS,
    BACKOFF_MAX_SECONDS,
    CLAIM_BYTES_FIRST,
    CLAIM_BYTES_MAX,
    CLAIM_LEASE_PART,
    REPLAY_MAX,
    RETRY_BUDGET_SECONDS,
    Policy,
)
from waypost.redaction import Redact
from waypost.store.port import AsyncExecutor, Call, Executor, Store, Woken
from waypost.wake.bell import Bell
from waypost.wake.wakeups import NO_WAKEUPS, Wakeups

if TYPE_CHECKING:
    from waypost.operations.around import Around

T = TypeVar("T")
log = logging.getLogger("waypost")


class Together:
    """Calls to run as one flush. They are made while they are sent; the answer is a list of results and errors."""

    __slots__ = ("calls",)

    def __init__(self, calls: Iterable[Call[Any]]) -> None:
        self.calls = calls


class Sleep:
    """A pause; with `ends_early`, one that is looked at now and then, so that a drain need not wait for its end.

    With a `bell` it ends when that rings.
    """

    __slots__ = ("bell", "ends_early", "seconds")

    def __init__(self, seconds: float, ends_early: Callable[[], bool] | None = None, bell: Bell | None = None) -> None:
        self.seconds = seconds
        self.ends_early = ends_early
        self.bell = bell

    def parts(self) -> Iterator[float]:
        """The pause cut into as many sleeps as it needs."""
        left = self.seconds
        if self.ends_early is not None:
            while left > LOOK_SECONDS:
                yield LOOK_SECONDS
                left -= LOOK_SECONDS
                if self.ends_early():
                    return
        yield left


class Foreign:
    """A call of the application's own code, awaited or not. On an event loop one that blocks runs in a thread."""

    __slots__ = ("awaited", "call")

    def __init__(self, call: Callable[[], Any], *, awaited: bool) -> None:
        self.call = call
        self.awaited = awaited


#: How soon somebody who waits for a message notices a drain.
LOOK_SECONDS = 0.25


Step: TypeAlias = "Call[Any] | Together | Sleep | Foreign"
Flow: TypeAlias = Generator[Step, Any, T]


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
                        if step.bell is None:
                            time.sleep(seconds)
                        elif step.bell.wait(seconds):
                            break
                elif type(step) is Foreign:
                    result = step.call()
                else:
                    result = executor.run(step)  # type: ignore[arg-type]
            except BaseException as error:
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def drive_async(executor: AsyncExecutor, flow: Flow[T]) -> T:
    """The same for an event loop."""
    import asyncio

    try:
        step = next(flow)
        while True:
            result: Any = None
            try:
                if type(step) is Together:
                    result = await executor.run_many(step.calls)
                elif type(step) is Sleep:
                    for seconds in step.parts():
                        if step.bell is None:
                            await asyncio.sleep(seconds)
                        elif await step.bell.wait_async(seconds):
                            break
                elif type(step) is Foreign:
                    result = await (step.call() if step.awaited else asyncio.to_thread(step.call))
                else:
                    result = await executor.run(step)  # type: ignore[arg-type]
            except BaseException as error:
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class _Lane:
    """The operations of one session on one queue that are still under way, oldest first."""

    __slots__ = ("last", "session", "under_way")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.last = 0
        self.under_way: dict[int, None] = {}

    @property
    def is_open(self) -> bool:
        return not self.under_way or self.last + 1 - next(iter(self.under_way)) < REPLAY_MAX


class Lanes:
    """Numbers the operations of a client so that none that may be repeated can be too old to be answered.

    A store remembers the last `REPLAY_MAX` operations of a session on a queue. While one operation waits to be
    repeated, hundreds of others may pass it (threads, tasks); those then go by another session, a second lane.
    """

    def __init__(self, session: Session) -> None:
        self._sessions = [session]
        self._lanes: dict[str, list[_Lane]] = {}
        self._lock = threading.Lock()

    def begin(self, queue: str) -> Operation:
        """The next operation on a queue. It counts as under way until `end`."""
        with self._lock:
            lanes = self._lanes.get(queue)
            if lanes is None:
                lanes = self._lanes[queue] = []
            for lane in lanes:
                if lane.is_open:
                    break
            else:
                if len(lanes) == len(self._sessions):
                    self._sessions.append(Session())
                lane = _Lane(self._sessions[len(lanes)])
                lanes.append(lane)
            operation = lane.session.operation(queue)
            lane.last = operation.number
            lane.under_way[operation.number] = None
            return operation

    def end(self, queue: str, operation: Operation) -> None:
        """This operation will not be repeated any more."""
        with self._lock:
            for lane in self._lanes[queue]:
                if lane.session.id == operation.session:
                    lane.under_way.pop(operation.number, None)


class Link:
    """What the flows of one client share: the store, the identity, the budget, and what they remember."""

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
        around: Around | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.session = session
        self.worker = worker
        self.retry_budget = retry_budget
        self.wakeups = wakeups
        self.wake = wake or wakeups.wake
        self.redact = redact
        self.on_event = on_event
        #: The checked name of a queue that messages are sent on to: a strict client knows which there are.
        self.name_of = name_of
        self._around = around
        #: Set by a drain: a call that waits for messages stops waiting.
        self.draining = False
        #: What such calls wait on.
        self.waiting: set[Bell] = set()
        self.monotonic = monotonic
        self.lanes = Lanes(session)
        self._lost_claims: dict[str, list[tuple[Operation, float]]] = {}
        self._lock = threading.Lock()
        self._told_of_bad_hook = False
        self._policies: dict[str, tuple[Policy, float]] = {}
        #: How many bytes a claim of a queue may bring, as far as its answers have shown.
        self._claim_bytes: dict[str, int] = {}

    def drain(self) -> None:
        """End the waits for messages, now and from now on."""
        self.draining = True
        for bell in list(self.waiting):
            bell.ring()

    @property
    def around(self) -> Around | None:
        """The publish middleware of the client, None if there is none to call."""
        return None if self._around is None or self._around.is_empty else self._around

    @property
    def replay_seconds(self) -> float:
        """How long a store remembers results: longer than any repeat of ours can come."""
        return 2 * self.retry_budget + 60

    def attempt(self, call: Call[T], *, budget: float | None = None) -> Flow[T]:
        """Run a call; when the connection fails, run the same call again within the budget.

        The call carries its operation, so the store answers a repeat with the first result.
        """
        return (yield from self.attempt_timed(call, budget=budget))[0]

    def attempt_timed(self, call: Call[T], *, budget: float | None = None) -> Flow[tuple[T, float]]:
        """`attempt`, and when the call that was answered was sent, by `lease_clock`."""
        started, trouble = self.monotonic(), None
        while True:
            sent = lease_clock.now()
            try:
                result: T = yield call
                return result, sent
            except (StoreUnavailable, OutcomeUnknown) as error:
                if trouble is None:
                    trouble = Trouble(self, self.retry_budget if budget is None else budget, started)
                yield trouble.pause(call.name, error)

    def attempt_woken(self, call: Call[Woken[T]]) -> Flow[T]:
        """`attempt`, then wake whom the answer names."""
        woken = yield from self.attempt(call)
        if woken.wake:
            self.wake(woken.wake)
        return woken.result

    def tell(self, event: str, queue: str, outcome: ObservedOutcome = "success", **told: Any) -> None:
        """Tell `on_event` what happened. It is foreign code: whatever it raises changes nothing here."""
        if self.on_event is None:
            return
        try:
            self.on_event(Observed(event, outcome, queue, time.time_ns() // 1_000_000, self.worker, **told))
        except Exception:
            if not self._told_of_bad_hook:
                self._told_of_bad_hook = True
                log.exception("on_event failed; this is said once", extra={"event": "on_event_failed", "queue": queue})

    def add_lost_claim(self, queue: str, operation: Operation) -> None:
        """Remember a claim whose reply was lost for longer than its call could wait, as long as the store does."""
        with self._lock:
            until = self.monotonic() + self.replay_seconds
            self._lost_claims.setdefault(queue, []).append((operation, until))

    def take_lost_claim(self, queue: str) -> Operation | None:
        """One such claim, for one caller only: two must not get the same message from it."""
        with self._lock:
            waiting = self._lost_claims.get(queue, [])
            while waiting:
                operation, until = waiting.pop(0)
                if until > self.monotonic():
                    return operation
                self.lanes.end(queue, operation)
            return None

    def queues_with_lost_claims(self) -> list[str]:
        """The queues whose claims may hold something that nobody knows of."""
        with self._lock:
            return [queue for queue, waiting in self._lost_claims.items() if waiting]

    def policy(self, queue: str) -> Flow[Policy]:
        """A queue's policy, at most a few seconds old."""
        cached = self._policies.get(queue)
        if cached is not None and cached[1] > self.monotonic():
            return cached[0]
        policy = yield from self.attempt(self.store.policy(queue))
        self.remember_policy(queue, policy)
        return policy

    def claim_bytes(self, queue: str) -> int:
        """How many bytes the next claim of a queue may bring, so that its answer arrives well within the lease."""
        return self._claim_bytes.get(queue, CLAIM_BYTES_FIRST)

    def learn_link(self, queue: str, claimed: Claimed, seconds: float) -> None:
        """Learn from an answer to a claim how many bytes the next one may bring: by its speed and the lease."""
        goal = (60_000 if claimed.lease_ms is None else claimed.lease_ms) / 1000 * CLAIM_LEASE_PART
        if not claimed.leases or not (claimed.more or seconds > goal):
            return  # a short answer says little of the link
        size = sum(len(lease.envelope) for lease in claimed.leases)
        fits = size * goal / max(seconds, 1e-6)
        if seconds <= goal:
            # What came out of buffers came faster than the next will: grow step by step.
            fits = max(self.claim_bytes(queue), min(fits, size * 4, CLAIM_BYTES_MAX))
        self._claim_bytes[queue] = int(fits)

    def remember_policy(self, queue: str, policy: Policy) -> None:
        """Keep a policy just read or set for a moment."""
        self._policies[queue] = (policy, self.monotonic() + POLICY_CACHE_SECONDS)


#: A full queue is asked for its policy; a publisher that blocks must not ask every few milliseconds.
POLICY_CACHE_SECONDS = 2.0

#: Gets every event, in the thread or task where it happened.
OnEvent: TypeAlias = Callable[[Observed], object]


class Trouble:
    """The failed tries of one call: how long to pause before the next, and what to say when there is none."""

    __slots__ = ("_backoff", "_budget", "_deadline", "_link", "_reached")

    def __init__(self, link: Link, budget: float, started: float | None = None) -> None:
        self._link = link
        self._budget = budget
        self._deadline = (link.monotonic() if started is None else started) + budget
        self._backoff = BACKOFF_FIRST_SECONDS
        self._reached = False

    def pause(self, verb: str, error: Exception) -> Sleep:
        """The pause before the next try. Raises when the budget is used up, telling whether the call can have run."""
        self._reached = self._reached or isinstance(error, OutcomeUnknown)
        remaining = self._deadline - self._link.monotonic()
        if remaining <= 0:
            raise self._last_word(verb, error) from error
        # Full jitter below the step: clients that lost the same server must not come back in step.
        seconds = self._backoff * random.uniform(0.5, 1.0)
        self._backoff = min(self._backoff * 2, BACKOFF_MAX_SECONDS)
        return Sleep(min(seconds, remaining))

    def _last_word(self, verb: str, error: Exception) -> Exception:
        tried = f"within the retry budget of {self._budget:g} s" if self._budget > 0 else "(retries are off)"
        if self._reached:
            return OutcomeUnknown(
                f"{verb}: the request was sent, but no reply came {tried}: {error}. It may have been done: look before "
                "repeating it, publish with a key so that a repeat is harmless, or raise retry_budget"
            )
        return StoreUnavailable(
            f"{verb}: the store could not be reached {tried}: {error}. Nothing was done: check that it runs and that "
            "the address is right, then repeat the call"
        )
