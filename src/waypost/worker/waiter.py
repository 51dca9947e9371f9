"""How a consumer waits between two claims: on its event loop, or in a blocking wait in its store.

`wait_machine.py` has the states and their transitions; this module has the timers, the sleep on the loop, the unblock,
the polls and the notifications. A consumer with messages in progress stays on its loop, because it must be able to
start the messages that are claimed behind a blocking wait.

Wherever it waits, the worker's poller polls its queue: for work that no notification announced, and for timers and
leases that were not known when the wait began.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from waypost import lease_clock
from waypost.errors import WaypostError
from waypost.operations import receive
from waypost.operations.flow import ClientContext, drive_async
from waypost.operations.receive import Nap, safety_poll_seconds
from waypost.store.port import AsyncExecutor, BlockingWaits, Call, Idle
from waypost.values import Claimed, Lease, PolledQueue
from waypost.wake.port import Listening
from waypost.worker.executor_adapters import ThreadedExecutor
from waypost.worker.poller import Liveness, Poller
from waypost.worker.wait_machine import Action, WaitMachine, WaitState

log = logging.getLogger("waypost")

#: The time constant of the averages.
MEMORY_SECONDS = 0.1
#: Above this number of messages during one claim, a wake-up for each is not worth its cost; below this number a second
#: it always is, as long as claims keep up: a poll finds a message later than a wake-up does.
BUSY_MESSAGES_PER_CLAIM = 0.25
BUSY_MESSAGES_PER_SECOND = 400.0
#: A worker that polls soon continues to, with this share of a busy queue, since other workers may poll the queue too.
STILL_BUSY_MESSAGES_PER_SECOND = 200.0
#: Messages that arrived one after the other while a worker was being woken show how many arrive in its queue, whichever
#: worker handles them. A few may be a single burst; from this number on they count.
ARRIVALS_MIN = 5.0
#: Their time constant: each of many workers is woken more rarely than a single worker would be.
ARRIVALS_MEMORY_SECONDS = 0.2
#: How soon it polls again: long enough for several messages to gather, too short for a noticeable delay.
POLL_SOON_SECONDS_MIN, POLL_SOON_SECONDS_MAX = 0.002, 0.01
#: After that it sleeps, but polls again after these times: a publish that woke no worker because one was about to poll
#: may have been committed only after that poll. Later commits are found by the safety poll.
LATE_COMMIT_POLL_SECONDS = (0.03, 0.2)
#: A claim counts as at most this many times the usual duration: a worker claims ahead by the duration of claims, and a
#: single late reply would make it hold more messages than it can start for a long time.
LATE_CLAIMS = 4
#: The store counts whole milliseconds, and a claim may be slower than the last ones were.
SPARE_MS = 4
SPARE = 1.5


class PollSoon:
    """Decides after which claims of a consumer it polls again within milliseconds instead of sleeping.

    Messages can be so frequent that a sleep and a wake-up for each would cost more. A worker that polls again soon is
    not registered as a sleeper. Its claim tells the store the time of its next poll, and until then no worker is woken
    for a few messages: a busy queue sends no wake-ups, and claims take several messages.
    """

    def __init__(self, now: Callable[[], float] | None = None, *, late_commits: bool = False) -> None:
        self._now = time.monotonic if now is None else now
        self._late_commits = late_commits
        self._began = self._now()
        self._ended = self._began
        self._messages = 0.0
        self._arrivals = 0.0
        self._arrival_seconds = 0.0
        self._claim_seconds = POLL_SOON_SECONDS_MIN / 2
        self._found = 0
        self._polls_soon = False
        self._late_commit_polls: list[float] = []
        #: The time of the next poll that the next claim sends: 0 cancels the last one, None: none was ever sent.
        self.poll_soon_ms: int | None = None

    @property
    def claim_seconds(self) -> float:
        """The recent duration of claims."""
        return self._claim_seconds

    @property
    def seconds(self) -> float:
        """How soon it polls again."""
        return min(POLL_SOON_SECONDS_MAX, max(POLL_SOON_SECONDS_MIN, self._claim_seconds))

    def begin(self, may_sleep: bool) -> bool:
        """A claim begins: return whether another one follows soon. Never after a claim that found nothing."""
        self._began = self._now()
        before = self._polls_soon
        self._polls_soon = may_sleep and self._found > 0 and self.is_busy
        if self._polls_soon:
            # From the beginning of this claim until the commit of the next one, which renews it.
            self.poll_soon_ms = math.ceil((self.seconds + 2 * self._claim_seconds) * 1000 * SPARE) + SPARE_MS
            self._late_commit_polls = list(LATE_COMMIT_POLL_SECONDS)
        else:
            self.poll_soon_ms = 0 if before else None
        return self._polls_soon

    def nap(self, seconds: float) -> float:
        """Return the time to sleep, which may be shorter than the given one."""
        return min(seconds, self._late_commit_polls.pop(0)) if self._late_commit_polls else seconds

    @property
    def is_busy(self) -> bool:
        """Return whether messages are so frequent that the next one is not worth a wake-up."""
        self._fade(self._now())
        per_second = self._messages / MEMORY_SECONDS
        if self._arrivals >= ARRIVALS_MIN:
            per_second = max(per_second, self._arrivals / self._arrival_seconds)
        busy = STILL_BUSY_MESSAGES_PER_SECOND if self._polls_soon else BUSY_MESSAGES_PER_SECOND
        least = BUSY_MESSAGES_PER_CLAIM if per_second >= busy else 1.0
        return per_second * self._claim_seconds >= least

    def end(self, found: int, *, waited: bool = False, arrivals: tuple[int, float] = (0, 0.0)) -> None:
        """A claim has ended and returned this many messages. `waited`: it began in the store later than here.

        `arrivals` is how many of them arrived after the first one, in how many seconds until the claim.
        """
        now = self._now()
        if not waited:
            took = min(now - self._began, LATE_CLAIMS * self._claim_seconds)
            self._claim_seconds += (took - self._claim_seconds) / 8
        self._fade(now)
        self._messages += found
        self._arrivals += arrivals[0]
        self._arrival_seconds += arrivals[1]
        self._found = found
        if found and self._late_commits:
            self._late_commit_polls = list(LATE_COMMIT_POLL_SECONDS)

    def _fade(self, now: float) -> None:
        self._messages *= math.exp((self._ended - now) / MEMORY_SECONDS)
        rest = math.exp((self._ended - now) / ARRIVALS_MEMORY_SECONDS)
        self._arrivals *= rest
        self._arrival_seconds *= rest
        self._ended = now


def count_arrivals(leases: Sequence[Lease]) -> tuple[int, float]:
    """Return how many messages of a claim arrived after the first one, in how many seconds until the claim.

    Messages that became ready in the same millisecond count once: they may be one batch. The first does not count,
    because the claim was made for it.
    """
    if len(leases) < 2:
        return 0, 0.0
    moments = {lease.ready_ms for lease in leases}
    return len(moments) - 1, max(1, leases[0].claimed_ms - min(moments)) / 1000


class NotificationListener:
    """Listens for one consumer on the channel of its client. `wake` and `stop` are called from any thread."""

    def __init__(
        self, context: ClientContext, queue: str, *, wake: Callable[[str], None], stop: Callable[[str], None]
    ) -> None:
        self._context = context
        self._queue = queue
        self._wake = wake
        self._stop = stop
        self._name = context.wakeups.sleeper(context.worker)
        self._renewals = context.replay_windows.renewals
        self._ready: Listening | None = None
        self._held: Listening | None = None
        #: Whether it is registered as a sleeper in the store.
        self.asleep = False

    def open(self) -> None:
        """Subscribe to both topics of the queue."""
        wakeups = self._context.wakeups
        self._ready = wakeups.listen("ready", self._queue, self._name, self._wake)
        self._held = wakeups.listen("held", self._queue, None, self._stop)

    def follow_session(self) -> None:
        """Use another name if this process is a copy of another one with the same name, as on a cloned machine.

        A poll would find the sleeper of the other process in its wait, and mistake it for this one.
        """
        context = self._context
        if self._renewals == context.replay_windows.renewals or self._ready is None:
            return
        self._renewals = context.replay_windows.renewals
        self._name = f"{context.wakeups.sleeper(context.worker)}+{os.urandom(4).hex()}"
        self._ready.close()
        self._ready = context.wakeups.listen("ready", self._queue, self._name, self._wake)
        self.asleep = False

    @property
    def sleeper(self) -> str | None:
        """The name to register as a sleeper, None while a notification that is sent now would not arrive."""
        return self._name if self._ready is not None and self._ready.working else None

    async def close(self, executor: AsyncExecutor) -> None:
        """Unsubscribe and unregister, so that no message wakes a consumer that has stopped."""
        for listening in (self._ready, self._held):
            if listening is not None:
                listening.close()
        self._ready = self._held = None
        if self.asleep:
            self.asleep = False
            await drive_async(executor, receive.unregister(self._context, self._queue, self._name))

    async def pass_wake_up_on(self, executor: AsyncExecutor) -> None:
        """Unregister its sleeper: its consumer has no capacity for the messages for which it would be woken."""
        self.asleep = False
        await drive_async(executor, receive.pass_wake_up_on(self._context, self._queue, self._name))


#: A shorter blocking wait is not worth its two commands.
WAIT_SECONDS_MIN = 0.5
#: The claim is as old as the wait before it, and must be repeatable for some time after it.
WAIT_SECONDS_MAX = 180.0
#: Random variation, so that waits that began together do not all end together.
WAIT_JITTER = 0.1
#: How often the queue is polled per lease during a blocking wait: a poll shows that the claim has not begun, which
#: distinguishes a late reply from one whose leases are lost.
POLLS_PER_LEASE = 3
#: A shorter wait without a message was useless. After it the consumer sleeps on its loop, longer each time.
SHORT_WAIT_SECONDS = 2.5
BACKOFF_FIRST_SECONDS = 1.0
#: The server ends a blocking read up to a tenth of a second late: for a timer the unblock is sent this much earlier.
TIMER_SECONDS = 0.25
#: If a wait does not end within this time after its unblock, its connection is lost.
UNBLOCK_SECONDS = 2.0

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class WaitPlan:
    """A blocking wait that may follow a sleep: after which pause, for how long at most, and how often it is polled."""

    pause_seconds: float
    seconds: float
    poll_seconds: float


class WaitBackoff:
    """How long to sleep on the loop before the next blocking wait, after short waits without a message."""

    __slots__ = ("_pause_seconds", "_seconds")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pause_seconds = 0.0

    def add(self, seconds: float, *, found: bool) -> None:
        """Record how long a wait lasted, and whether its claim found messages."""
        useless = not found and seconds < SHORT_WAIT_SECONDS
        longer = min(WAIT_SECONDS_MAX, max(BACKOFF_FIRST_SECONDS, 2 * self._seconds))
        self._seconds = self._pause_seconds = longer if useless else 0.0

    def take(self) -> float:
        """Return the pause, once: after new work a wait may begin at once."""
        pause, self._pause_seconds = self._pause_seconds, 0.0
        return pause


class BlockingClaim:
    """One claim behind a blocking wait, as the executor reports it."""

    __slots__ = ("_waiter", "give_up", "not_before", "sleeper", "started_at")

    def __init__(self, waiter: Waiter, sleeper: str) -> None:
        self._waiter = waiter
        self.sleeper = sleeper
        self.started_at = time.monotonic()
        #: By `lease_clock`: the claim began after this time, since a poll found the sleeper in its wait.
        self.not_before = lease_clock.now()
        #: Ends the wait as if its connection had failed.
        self.give_up: Callable[[], None] = lambda: None

    def sent(self, give_up: Callable[[], None]) -> None:
        self.give_up = give_up

    def started(self, *, waits: bool) -> None:
        self._waiter.wait_started(waits=waits)

    def ended(self, value: str) -> None:
        self._waiter.machine.read_returned(value)


class Waiter:
    """The waits of one consumer. `is_idle` returns whether it has no messages in progress."""

    def __init__(
        self,
        context: ClientContext,
        executor: AsyncExecutor,
        queue: str,
        liveness: Liveness,
        is_idle: Callable[[], bool],
        poller: Poller,
    ) -> None:
        self.machine = WaitMachine()
        self._context = context
        self._executor = executor
        self._queue = queue
        self._liveness = liveness
        self._is_idle = is_idle
        self._poller = poller
        self._loop = asyncio.get_running_loop()
        #: None: this consumer has no blocking waits.
        self._blocking_waits: BlockingWaits | None = None
        self._backoff = WaitBackoff()
        #: The sleep on the loop, or the claim behind a blocking wait.
        self._sleep: asyncio.Future[None] | None = None
        self._claim: BlockingClaim | None = None
        #: How often the queue is polled meanwhile, None while it is not polled.
        self._poll_seconds: float | None = None
        #: The timer that ends it at the next due time of the store, and when a message that we settled is due.
        self._timer: asyncio.TimerHandle | None = None
        self._own_due = NEVER
        self._unblocks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Reserve a blocking wait, if the store has them and one is left."""
        waits = self._context.store.blocking_waits
        # A wait in a thread would occupy one of few threads, and could not be abandoned.
        if isinstance(self._executor, ThreadedExecutor):
            return
        if waits is not None and self._context.wakeups.reserve_blocking_wait():
            self._blocking_waits = waits

    def close(self) -> None:
        """Let another consumer use blocking waits."""
        if self._blocking_waits is not None:
            self._blocking_waits = None
            self._context.wakeups.release_blocking_wait()

    # ---- what ends a sleep or a wait ---------------------------------------------------------------------

    def notify(self) -> None:
        """There may be work, or a reason to stop: end the sleep or the wait, or do not begin the next one.

        A claim in progress may have searched before the message was published.
        """
        self._do(self.machine.notify())

    def interrupt(self) -> None:
        """End the sleep or the wait for another reason."""
        self._do(self.machine.interrupt())

    def wake_at(self, due: float) -> None:
        """Store the due time of a message that we settled; the reply to the last claim does not include it."""
        if due < self._own_due:
            self._own_due = due
            self.interrupt()

    def polled(self, answer: PolledQueue, sent_at: float, answered_at: float) -> None:
        """Handle the store's answer to a poll of the queue while the consumer waits."""
        if self._poll_seconds is None:
            return
        self._liveness.polled(self._poll_seconds)
        claim = self._claim
        if claim is not None and answer.blocked:
            claim.not_before = sent_at
        if answer.needs_claim:
            if self.machine.state is WaitState.WAITING:
                self._loop.call_later(UNBLOCK_SECONDS, self._check_unblocked, claim)
            self.notify()
            return
        moments = [ms for ms in (answer.next_due_ms, answer.next_lease_ms) if ms is not None]
        moment = answered_at + min(moments) / 1000 if moments else NEVER
        if claim is None:
            self._set_timer(min(moment, self._own_due))
        else:
            # Continue to wait if the next poll will be in time.
            near = moment - time.monotonic() < self._poll_seconds + TIMER_SECONDS
            self._set_timer(moment - TIMER_SECONDS if near else NEVER)

    def _do(self, action: Action | None) -> None:
        if action is Action.UNBLOCK:
            self._unblock()
        elif action is Action.END_SLEEP and self._sleep is not None and not self._sleep.done():
            self._sleep.set_result(None)

    def _begin_polls(self, sleeper: str | None, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds
        self._poller.add(self, Idle(self._queue, sleeper), poll_seconds)

    def _end_polls(self) -> None:
        self._set_timer(NEVER)
        if self._poll_seconds is not None:
            self._poll_seconds = None
            self._poller.remove(self)

    def _set_timer(self, at: float) -> None:
        """Set the monotonic time at which a claim ends the sleep or the wait; it replaces the previous one."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if at != NEVER:
            self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self.notify)

    # ---- the sleep on the loop ---------------------------------------------------------------------------

    async def sleep_for_room(self, *, owes_none: bool) -> None:
        """Sleep until a handler has ended. `owes_none`: no claim is owed meanwhile."""
        await self._sleep_until(WaitState.SLEEPING_FOR_ROOM, self._own_due, owes_none=owes_none)

    async def sleep(
        self,
        seconds: float | None,
        *,
        since: float | None = None,
        owes_none: bool = True,
        then_wait: WaitPlan | None = None,
        poll_seconds: float | None = None,
        sleeper: str | None = None,
    ) -> WaitPlan | None:
        """Sleep until the timeout, the due time of a message of ours, or a notification. `owes_none`: no claim is owed.

        The time is counted from `since`, a moment of the monotonic clock, or from now. With `poll_seconds` the queue is
        polled at this interval, which may end the sleep. With `then_wait` the sleep lasts only until nothing is in
        progress; then it returns the blocking wait that follows.
        """
        now = time.monotonic()
        end = self._own_due if seconds is None else min((since or now) + seconds, self._own_due)
        if then_wait is None or min(end - now, then_wait.seconds) < WAIT_SECONDS_MIN:
            await self._sleep_until(WaitState.SLEEPING, end, owes_none, poll_seconds, sleeper)
            return None
        wait_from = now + then_wait.pause_seconds
        if now < wait_from:
            pause = self._loop.call_later(wait_from - now, self._end_pause)
            try:
                notified = await self._sleep_until(WaitState.SLEEPING, end, owes_none, poll_seconds, sleeper)
            finally:
                pause.cancel()
        else:
            notified = await self._sleep_until(WaitState.SLEEPING_UNTIL_IDLE, end, owes_none, poll_seconds, sleeper)
        now = time.monotonic()
        left = min(end - now, then_wait.seconds)
        if notified or left < WAIT_SECONDS_MIN or now < wait_from or self._own_due != NEVER or not self._is_idle():
            return None
        return replace(then_wait, seconds=left)

    async def _sleep_until(
        self,
        state: WaitState,
        end: float,
        owes_none: bool,
        poll_seconds: float | None = None,
        sleeper: str | None = None,
    ) -> bool:
        """Sleep in this state until a monotonic time; return whether a notification ended the sleep."""
        machine = self.machine
        if owes_none:
            left = end - time.monotonic()
            self._liveness.owes_none_for(left if poll_seconds is None else min(left, poll_seconds))
        try:
            if not machine.needs_poll and not (state is WaitState.SLEEPING_UNTIL_IDLE and self._is_idle()):
                machine.sleep(state)
                self._sleep = self._loop.create_future()
                self._set_timer(end)
                if poll_seconds is not None:
                    self._begin_polls(sleeper, poll_seconds)
                await self._sleep
        finally:
            notified = machine.end_sleep()
            self._sleep = None
            self._end_polls()
            if self._own_due <= time.monotonic():
                self._own_due = NEVER
            self._liveness.owes_now()
        return notified

    def _end_pause(self) -> None:
        self.machine.await_idle()
        if self._is_idle():
            self.interrupt()

    # ---- the blocking wait -------------------------------------------------------------------------------

    def plan_wait(self, claimed: Claimed, nap: Nap, *, soon: bool = True) -> WaitPlan | None:
        """Return the blocking wait after this claim; None if a message is due so soon that the server would be late.

        Without `soon`, messages are so frequent that a wait is worth its commands only after a pause.
        """
        pause = max(self._backoff.take(), 0.0 if soon else BACKOFF_FIRST_SECONDS)
        # At-most-once messages would be lost with the reply, so there is no blocking wait for them.
        lease = (claimed.lease_ms or 0) / 1000
        if self._blocking_waits is None or not nap.only_to_be_safe or self._own_due != NEVER:
            return None
        if lease / POLLS_PER_LEASE < WAIT_SECONDS_MIN:
            return None
        poll_seconds = min(lease / POLLS_PER_LEASE, safety_poll_seconds(claimed.lease_ms, woken=True))
        return WaitPlan(pause, WAIT_SECONDS_MAX * random.uniform(1 - WAIT_JITTER, 1), poll_seconds)

    def start_wait(self, sleeper: str, plan: WaitPlan) -> BlockingClaim:
        """A claim behind a blocking wait begins."""
        self._claim = claim = BlockingClaim(self, sleeper)
        self.machine.start_wait()
        if self._own_due != NEVER:
            self.interrupt()
        self._liveness.owes_none_for(plan.poll_seconds)
        self._begin_polls(sleeper, plan.poll_seconds)
        return claim

    def wait_started(self, *, waits: bool) -> None:
        """The server has registered the wait, or the sleeper was notified before that."""
        if waits:
            self._do(self.machine.wait_started())
        else:
            self.machine.already_notified()

    def end_wait(self, *, found: bool) -> None:
        """That claim was answered, or failed."""
        claim, self._claim = self._claim, None
        self.machine.end_wait()
        self._end_polls()
        if claim is not None:
            self._backoff.add(time.monotonic() - claim.started_at, found=found)
        self._liveness.owes_now()

    def _unblock(self) -> None:
        if self._blocking_waits is None or self._claim is None:
            return
        call = self._blocking_waits.unblock(self._queue, self._claim.sleeper, self.machine.unblock_value)
        task = self._loop.create_task(self._run_unblock(call), name="waypost unblocks")
        self._unblocks.add(task)
        task.add_done_callback(self._unblocks.discard)

    async def _run_unblock(self, call: Call[None]) -> None:
        try:
            await self._executor.run(call)
        except WaypostError as error:
            log.debug("queue %s: a blocking wait could not be unblocked: %s", self._queue, error)

    def _check_unblocked(self, claim: BlockingClaim | None) -> None:
        if claim is not None and self._claim is claim:
            log.warning("queue %s: the connection of a blocking wait does not answer and is closed", self._queue)
            claim.give_up()
