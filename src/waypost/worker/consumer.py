"""One handler at work: a loop that claims, and as many runners as handlers may run at once.

A runner is a task that handles one message after the other, so a message needs no task of its own, and a handler that
never waits needs no iteration of the event loop. The claim loop claims a few more messages than can run now: as many as
will start while its next call is in progress, by the recent rate of finished messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from waypost import codec, lease_clock
from waypost.errors import EnvelopeTooNew, OutcomeUnknown, StoreUnavailable, Undecodable, WaypostError
from waypost.message import Message, Outcome, Retry, check_returned
from waypost.operations import receive
from waypost.operations.flow import ClientContext, Flow, drive_async
from waypost.operations.outgoing import deliver_outgoing
from waypost.operations.settle_target import HeldMessages
from waypost.policy import CHUNK_MESSAGES_MAX
from waypost.store.port import AsyncExecutor
from waypost.values import Claimed, Drained, Lease, Settlement
from waypost.wake.port import ALL_SLEEPERS
from waypost.wake.wakeups import hash_key
from waypost.worker.handler import Handler, current_slot
from waypost.worker.handler_calls import Caller, Ending, Slot, Unfinished
from waypost.worker.handler_log import done_level, log_chosen, log_done, log_failure
from waypost.worker.poller import Liveness, Poller
from waypost.worker.settler import Settler
from waypost.worker.signals import is_stop_request
from waypost.worker.wait_machine import IN_WAIT, WaitState
from waypost.worker.waiter import NotificationListener, PollSoon, Waiter, WaitPlan, count_arrivals

if TYPE_CHECKING:
    from waypost.worker.renewer import Renewer

log = logging.getLogger("waypost")

#: Messages that will start within this time are claimed ahead: longer than a round trip, too short to delay other
#: workers.
SOON_SECONDS = 0.03
#: For stores whose claims take longer than that: messages that start during this many claims are claimed ahead.
CLAIMS_AHEAD = 3
#: A claim costs the store about the same for one or many messages: a smaller claim waits while enough messages are
#: here.
WORTH_A_CLAIM = CHUNK_MESSAGES_MAX // 2
#: A runner whose handlers never wait yields to other tasks after this time.
TURN_SECONDS = 0.01
#: With this many outcomes waiting for the store, no more messages are claimed.
UNSETTLED_MAX = 4 * CHUNK_MESSAGES_MAX
#: The pause after a claim that failed permanently.
FAILED_CLAIM_SECONDS = 1.0
#: How long a cancelled handler may take to end before it counts as still running.
CANCEL_GRACE_SECONDS = 1.0
#: How often a busy worker checks whether its queue has limits that it shares with others.
LIMITS_SECONDS = 5.0


class Consumer:
    """Claims, runs and ends the messages of one handler. Lives on one event loop."""

    def __init__(
        self,
        handler: Handler,
        context: ClientContext,
        executor: AsyncExecutor,
        renewer: Renewer,
        poller: Poller,
        *,
        owner: object,
        on_work: Callable[[set[str] | None], None],
        on_abort: Callable[[BaseException], None],
        work_count: Callable[[], int],
    ) -> None:
        self.handler = handler
        self.queue = handler.queue
        self.owner = owner
        self.lease_seconds: float | None = None
        self.handled = 0
        self.cancelled = 0
        #: The worker's counter of work when this queue was last found empty.
        self.empty_at = -1
        self.quiet = False
        self.liveness = Liveness()
        self._context = context
        self._executor = executor
        self._renewer = renewer
        self._on_work = on_work
        self._on_abort = on_abort
        self._work_count = work_count
        #: Whether a call that does not wait ends before another one can begin.
        self._in_turn = handler.is_async and not handler.process
        #: Whether a handler that returns nothing needs no further checks.
        self._done_level = done_level()
        self._is_plain = (
            not handler.manual and handler.batch is None and context.on_event is None and self._done_level is None
        )
        self._ready: deque[Message[Any]] = deque()
        self._held = HeldMessages()
        self.settler = Settler(context, executor, self.queue, self._held, self._on_settled, handler.retry, renewer)
        self._caller = Caller(handler, self._settle, self._on_handler_waits, context, executor)
        self._slots: list[Slot] = []
        self._idle: list[Slot] = []
        self._busy = 0
        self._stopping = False
        self._at_most_once = False
        #: Whether the queue has `max_running` or a rate, and when to check again.
        self._limited = False
        #: Whether the queue takes turns between groups: then messages held here would delay the turns of others.
        self._grouped = False
        #: Whether the store answered the last claim.
        self._claims_succeed = False
        self._limits_due = 0.0
        self._claiming: asyncio.Task[None] | None = None
        #: Whether the claim loop is about to continue: runners yield to it, so that they run while its claim is in
        #: progress.
        self._claim_due = False
        self._poll_soon = PollSoon(late_commits=context.wakeups.late_commits)
        self._listener = NotificationListener(context, self.queue, wake=self._on_wake, stop=self._on_cancel_request)
        self._waiter = Waiter(context, executor, self.queue, self.liveness, self._is_idle, poller)
        self._low = 0
        self._rate = 0.0
        self._mark = (0.0, 0)
        self._loop = asyncio.get_running_loop()

    # ---- start, stop -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start claiming."""
        self._waiter.open()
        self._start_claiming()

    def _start_claiming(self) -> None:
        self.settler.start()
        self._listener.open()
        self._claiming = self._loop.create_task(self._claim_loop(), name=f"waypost claims {self.queue}")
        self._claiming.add_done_callback(self._task_ended)

    def stop_claiming(self) -> None:
        """Stop claiming; continue with claimed messages."""
        self.quiet = True
        self.notify()

    def notify(self) -> None:
        """Poll: there may be work, or a reason to stop."""
        self._waiter.notify()

    async def stop(self, deadline: float) -> None:
        """Release messages that have not started; wait for handlers until the deadline, then cancel if possible."""
        self.stop_claiming()
        self._stopping = True
        self._give_back_ready()
        if self._claiming is not None:
            _, late = await asyncio.wait([self._claiming], timeout=receive.RELEASE_BUDGET_SECONDS)
            if late:
                self._claiming.cancel()
                await asyncio.gather(self._claiming, return_exceptions=True)
        await self._listener.close(self._executor)
        self._waiter.close()
        self._give_back_ready()
        self._wake_runners(len(self._idle))
        runners = [slot.task for slot in self._slots if slot.task is not None and not slot.task.done()]
        if runners:
            await asyncio.wait(runners, timeout=max(0.0, deadline - time.monotonic()))
        self._give_back_ready()
        late_ones = [slot for slot in self._slots if slot.messages]
        if self.handler.can_be_stopped and late_ones:
            for slot in late_ones:
                slot.cancel("stopped")
            self.cancelled += len(late_ones)
            tasks = [slot.task for slot in late_ones if slot.task is not None]
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_SECONDS)
        await self._give_back_lost_claims()
        await self.settler.stop(max(receive.RELEASE_BUDGET_SECONDS, deadline - time.monotonic()))
        await self._caller.stop()

    def close(self) -> None:
        """Kill the remaining processes."""
        self._caller.close()

    @property
    def concurrency(self) -> int:
        """How many handler calls can run at the same time."""
        return self.handler.concurrency

    @property
    def running(self) -> int:
        """The number of running handler calls."""
        return self._busy

    @property
    def in_flight(self) -> int:
        """The number of messages that were claimed here and are not settled yet."""
        return len(self._ready) + self._busy + len(self.settler)

    def report(self) -> Drained:
        """The current state."""
        outcomes = self.settler.outcomes
        return Drained(
            handled=self.handled, released=outcomes["released"], cancelled=self.cancelled, running=self._busy,
            unsettled=self.settler.unsettled, past_lease=self._past_lease(), done=outcomes["done"],
            retried=outcomes["retried"], dead=outcomes["dead"],
        )  # fmt: skip

    def _past_lease(self) -> int:
        """The number of running handler calls that cannot be stopped and whose leases have expired."""
        if self.handler.can_be_stopped:
            return 0
        running = [slot.messages for slot in list(self._slots)]
        return sum(bool(messages) and all(one.lease_lost for one in messages) for messages in running)

    def runners(self) -> list[asyncio.Task[None]]:
        """The calls that have not ended: after a stop, those whose handlers still run."""
        return [slot.task for slot in self._slots if slot.task is not None and not slot.task.done()]

    def _give_back_ready(self) -> None:
        kept = [message for message in self._ready if message.at_most_once]
        for message in self._ready:
            # Messages of a queue with lease=None cannot be released: they are handled until the deadline.
            if not message.at_most_once:
                self._give_back(message)
        self._ready.clear()
        self._ready.extend(kept)

    def _give_back(self, message: Message[Any]) -> None:
        lease = message._lease
        settlement = Settlement(lease.id, lease.token, lease.nonce, "release")
        if message.fenced:
            self._close_lost(message, settlement)
        else:
            self.settler.add(message, settlement)

    async def _give_back_lost_claims(self) -> None:
        """Repeat claims whose replies were lost, once, and release the messages that they hold."""
        while (operation := self._context.take_lost_claim(self.queue)) is not None:
            flow = receive.claim_lost(self._context, self.queue, operation, budget=receive.RELEASE_BUDGET_SECONDS)
            try:
                claimed = await drive_async(self._executor, flow)
            except WaypostError:
                return  # their leases will expire
            for lease in claimed.leases if claimed is not None else ():
                self._give_back(Message(self.queue, lease))

    # ---- wake-ups ----------------------------------------------------------------------------------------

    def _on_wake(self, notification: str) -> None:
        self._from_thread(self.notify)

    def _on_cancel_request(self, notification: str) -> None:
        """Renew the lease of a message at once if it is held here, because its cancel was requested."""
        for message in list(self._held):
            if notification in (ALL_SLEEPERS, message.id) or (
                message.key is not None and notification == hash_key(message.key)
            ):
                self._renewer.renew_now(self)
                return

    # ---- claiming ----------------------------------------------------------------------------------------

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_abort(error)

    def _request_claim(self) -> bool:
        """Let the claim loop send the collected outcomes with its next claim, if that is soon; return whether it is."""
        if self.quiet or not self._claims_succeed or self._waiter.machine.state in IN_WAIT:
            return False
        self.notify()
        return True

    def _follow_grouping(self, grouped: bool) -> None:
        """Send outcomes with claims in a queue with turns between groups, and separately in any other."""
        if grouped != self._grouped:
            self._grouped = grouped
            self.settler.request_claim = self._request_claim if grouped else None
            self.settler.send_now()

    async def _claim_loop(self) -> None:
        try:
            await self._claim_until_quiet()
        finally:
            self.quiet = True
            self.settler.send_now()

    async def _claim_until_quiet(self) -> None:
        nap, waiter = receive.Nap(), self._waiter
        self._mark = (time.monotonic(), 0)
        wait: WaitPlan | None = None
        while not self.quiet:
            await self._learn_limits()
            limit = self._room()
            if limit <= 0:
                if self.settler.waits_for_claim:
                    self.settler.send_now()
                if self._listener.asleep:
                    # It had capacity to claim ahead when it was registered, and its handlers take longer now.
                    await self._listener.pass_wake_up_on(self._executor)
                    continue  # a handler may have ended meanwhile, and interrupts only a sleep
                # A claim is not made without free capacity; outcomes that the store does not accept do not prevent one.
                try:
                    await waiter.sleep_for_room(owes_none=len(self.settler) < UNSETTLED_MAX)
                finally:
                    self._claim_due = False
                wait = None
                continue
            self._listener.follow_session()
            sleeper = self._listener.sleeper
            if waiter.machine.needs_poll or sleeper is None:
                wait = None
            work = self._work_count()
            waiter.machine.begin_claim()
            polls_soon = self._poll_soon.begin(sleeper is not None and wait is None)
            if polls_soon:
                sleeper = None
            found = await self._claim_lost()
            if self.settler.waits_for_claim and found is None:
                # Its settle is one more unit of work, and this claim follows it.
                work += 1
            claimed = found or await self._claim(limit, sleeper, wait)
            self._claims_succeed = claimed is not None
            if claimed is None:
                self.settler.send_now()
                wait = await waiter.sleep(FAILED_CLAIM_SECONDS, owes_none=False)
                continue
            self.liveness.claimed()
            self._follow_grouping(claimed.grouped)
            self._poll_soon.end(
                len(claimed.leases), waited=wait is not None, arrivals=count_arrivals(claimed.leases)
            )  # fmt: skip
            wait = None
            has_room = len(claimed.leases) < limit and not claimed.more
            asleep = self._listener.asleep = sleeper is not None and found is None and has_room
            if claimed.leases:
                nap = receive.Nap()
                self._accept(claimed)
                if self._stopping:
                    self._give_back_ready()  # before a runner starts it
            if claimed.outgoing:
                await drive_async(self._executor, deliver_outgoing(self._context, self.queue))
            if self.quiet:
                return
            if not claimed.leases and not self.in_flight:
                self.empty_at = work
                self._on_work(None)
            if polls_soon and has_room:
                if claimed.leases:
                    # Do not leave a timer that is due sooner to the next poll.
                    due = self._poll_soon.seconds if claimed.next_due_ms is None else claimed.next_due_ms / 1000
                    await waiter.sleep(min(self._poll_soon.seconds, max(due, receive.MOMENT_MIN_SECONDS)))
                # Nothing was found: the next claim registers it as a sleeper.
                continue
            # With free capacity it sleeps if it can be woken; otherwise it claims until it finds nothing.
            if asleep or not claimed.leases:
                wait = await self._sleep_after(claimed, nap, sleeper if asleep else None)

    async def _sleep_after(self, claimed: Claimed, nap: receive.Nap, sleeper: str | None) -> WaitPlan | None:
        """Sleep after a claim that leased all messages there were, and return the blocking wait that follows.

        `sleeper` is the name that the claim has registered, if any.
        """
        answered = time.monotonic()
        if claimed.leases:
            # To plan the wait takes longer than to start a handler.
            await asyncio.sleep(0)
        waiter, asleep = self._waiter, sleeper is not None
        pause = nap.seconds(claimed, None, woken=asleep)
        seconds = self._poll_soon.nap(pause)
        plan = waiter.plan_wait(claimed, nap, soon=not self._poll_soon.is_busy) if asleep else None
        if seconds < pause or nap.poll_seconds is None:
            wait = await waiter.sleep(seconds, since=answered, then_wait=plan)
        else:
            # Nothing to do: from now on a single poll covers all idle queues of the worker.
            wait = await waiter.sleep(
                nap.moment, since=answered, then_wait=plan, poll_seconds=nap.poll_seconds, sleeper=sleeper
            )
        self._mark = (time.monotonic(), self.handled)
        return wait

    async def _claim(self, limit: int, sleeper: str | None, wait: WaitPlan | None) -> Claimed | None:
        """Make one claim, with or without a blocking wait. None if the store does not answer."""
        waiter, poll_soon_ms = self._waiter, self._poll_soon.poll_soon_ms
        if self.settler.waits_for_claim:
            return await self._run_claim(
                self.settler.settle_and_claim(limit, sleeper=sleeper, poll_soon_ms=poll_soon_ms)
            )  # fmt: skip
        if wait is None or sleeper is None:
            flow = receive.claim(self._context, self.queue, limit, sleeper=sleeper, poll_soon_ms=poll_soon_ms)
            return await self._run_claim(flow)
        blocking = (wait.seconds, waiter.start_wait(sleeper, wait))
        flow = receive.claim(
            self._context, self.queue, limit, sleeper=sleeper, poll_soon_ms=poll_soon_ms, blocking=blocking
        )
        claimed = None
        try:
            claimed = await self._run_claim(flow)
        finally:
            waiter.end_wait(found=claimed is not None and bool(claimed.leases))
        return claimed

    async def _claim_lost(self) -> Claimed | None:
        """Return what a claim without a reply still leases, or None if there is no such claim."""
        operation = self._context.take_lost_claim(self.queue)
        if operation is None:
            return None
        found = await self._run_claim(receive.claim_lost(self._context, self.queue, operation))
        return found if found is not None and found.leases else None

    async def _run_claim(self, flow: Flow[Claimed] | Flow[Claimed | None]) -> Claimed | None:
        try:
            return await drive_async(self._executor, flow)
        except WaypostError as error:
            away = isinstance(error, StoreUnavailable | OutcomeUnknown)
            log.log(
                logging.WARNING if away else logging.ERROR,
                "queue %s: nothing could be claimed (%s); trying again",
                self.queue,
                error,
                extra={"event": "claim_failed", "queue": self.queue},
            )
            return None

    async def _learn_limits(self) -> None:
        """Learn the limits before claiming ahead: messages held here count against a shared `max_running` or rate."""
        now = time.monotonic()
        if self._rate * SOON_SECONDS < 1 or now < self._limits_due:
            return
        self._limits_due = now + LIMITS_SECONDS
        try:
            policy = await drive_async(self._executor, self._context.policy(self.queue))
        except WaypostError:
            return  # the next claim will raise it
        self._limited = policy.max_running is not None or policy.rate_count is not None

    def _is_idle(self) -> bool:
        return not self._ready and not self._busy

    def _room(self) -> int:
        """Return how many more messages can start now or soon."""
        then, handled_then = self._mark
        ended, now = self.handled - handled_then, time.monotonic()
        if ended > 0 and now > then:
            rate = ended / (now - then)
            self._rate = rate if self._rate == 0.0 else (self._rate + rate) / 2
            self._mark = (now, self.handled)
        if len(self.settler) >= UNSETTLED_MAX:
            self._low = 0
            return 0
        per_call = self.handler.batch or 1
        ahead = not (self._at_most_once or self._limited or self._grouped)
        # As many as will start during the next claims: more if claims take long.
        seconds = max(SOON_SECONDS, CLAIMS_AHEAD * self._poll_soon.claim_seconds)
        soon = int(self._rate * seconds) * per_call if ahead else 0
        self._low = soon // 2
        free = (self.handler.concurrency - self._busy) * per_call
        room = min(free + soon - len(self._ready), CHUNK_MESSAGES_MAX)
        # With enough messages here, wait until the claim is larger.
        return 0 if 0 < self._low < len(self._ready) and room < WORTH_A_CLAIM else room

    def _accept(self, claimed: Claimed) -> None:
        """Hold the messages of a claim, and start their handlers."""
        messages = self._hold(claimed, claimed.leases)
        if messages:
            self._begin(messages)

    def _hold(self, claimed: Claimed, leases: Sequence[Lease]) -> list[Message[Any]]:
        """Return messages of a claim, whose leases are renewed from now on; none if the claim was answered too late."""
        queue, as_type = self.queue, self.handler.as_type
        seconds, until = receive.local_lease(claimed)
        target = self.settler.target
        messages = [Message(queue, lease, as_type, target, seconds, until) for lease in leases]
        self._at_most_once = leases[0].lease_end_ms is None
        if not self._at_most_once:
            self._held.add_all(messages)
            if until <= lease_clock.now():
                receive.log_late_claim(queue, len(messages))
                for message in messages:
                    self._give_back(message)
                return []
            if self.lease_seconds is None or seconds < self.lease_seconds:
                self.lease_seconds = seconds
                self._renewer.reschedule(self)
            self._renewer.expect_end(self, until, seconds)
        return messages

    def _begin(self, messages: list[Message[Any]]) -> None:
        """Start handlers for messages, as far as there are free runners."""
        self._ready.extend(messages)
        if self._in_turn:
            # One runner handles them all, and wakes the others when the handler waits.
            awake = len(self._slots) - len(self._idle) - self._busy
            self._wake_runners(0 if awake else 1)
        else:
            self._wake_runners(len(messages))

    def _on_settled(self, soonest_ms: int | None, sent_to: set[str]) -> None:
        if soonest_ms is not None:
            self._waiter.wake_at(time.monotonic() + soonest_ms / 1000)
        if self._waiter.machine.state is WaitState.SLEEPING_FOR_ROOM:
            self._end_sleep_for_room()
        self._on_work(sent_to)

    def _end_sleep_for_room(self) -> None:
        self._claim_due = True
        self._waiter.interrupt()

    # ---- running -----------------------------------------------------------------------------------------

    def _wake_runners(self, count: int) -> None:
        idle = self._idle
        while count > 0 and idle:
            waiting = idle.pop().waiting
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
            count -= 1
        while count > 0 and len(self._slots) < self.handler.concurrency and not self._stopping:
            slot = Slot(self)
            slot.task = self._loop.create_task(self._run(slot), name=f"waypost handles {self.queue}")
            # A runner that ends with an error, for example of a log handler, would leave its message leased for ever.
            slot.task.add_done_callback(self._task_ended)
            self._slots.append(slot)
            count -= 1

    def _on_handler_waits(self) -> None:
        if self._ready:
            self._wake_runners(len(self._ready))

    async def _run(self, slot: Slot) -> None:
        current_slot.set(slot)
        ready, machine, clock = self._ready, self._waiter.machine, lease_clock.now
        turn = clock()
        while True:
            if not ready:
                if self._stopping:
                    return
                slot.waiting = self._loop.create_future()
                self._idle.append(slot)
                try:
                    await slot.waiting
                except asyncio.CancelledError:
                    if self._is_given_up(slot):
                        raise
                    # A handler that has ended had set a timer that cancels its task, which is now the task of this
                    # runner.
                    self._idle = [idle for idle in self._idle if idle is not slot]
                    await self._clear_cancellation(slot)
                turn = clock()
                continue
            if self._claim_due:
                await self._let_others_run(slot)
                turn = clock()
                continue
            now = clock()
            messages = self._take(now)
            if messages:
                slot.messages, slot.started = messages, now
                self._busy += 1
                result, error = None, None
                try:
                    result = self._caller.begin(slot, messages)
                    if type(result) is Unfinished:
                        result = await result.rest
                except BaseException as failure:
                    error = failure
                self._busy -= 1
                slot.messages = ()
                if isinstance(error, asyncio.CancelledError) and slot.ending is None and self._is_given_up(slot):
                    # The event loop is being closed. A thread may still run the handler, so do not release the message.
                    if self.handler.can_be_stopped:
                        self._end(slot, messages, None, error, given_up=True)
                    raise error
                self._end(slot, messages, result, error)
                if slot.task is not None and slot.task.cancelling():
                    await self._clear_cancellation(slot)
                if slot.started - turn > TURN_SECONDS:
                    await self._let_others_run(slot)
                    turn = clock()
            state = machine.state
            if state is WaitState.SLEEPING_FOR_ROOM and len(ready) <= self._low:
                self._end_sleep_for_room()
            elif state is WaitState.SLEEPING_UNTIL_IDLE and self._is_idle():
                self._waiter.interrupt()

    async def _let_others_run(self, slot: Slot) -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._is_given_up(slot):
                raise
            await self._clear_cancellation(slot)

    def _is_given_up(self, slot: Slot) -> bool:
        """Return whether the event loop is being closed, which cancels all tasks; a handler can cancel only its own."""
        return slot.task is not None and slot.task.cancelling() > 0 and self.settler.is_given_up

    async def _clear_cancellation(self, slot: Slot) -> None:
        """Undo the cancellation of a runner by its own handler, which must not reach the next message."""
        task = slot.task
        while task is not None and task.cancelling() and not self._is_given_up(slot):
            task.uncancel()
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if self._is_given_up(slot):
                    raise

    def _take(self, now: float) -> list[Message[Any]]:
        """Return the messages of the next call, without those that need no handler or have lost their lease."""
        ready, batch = self._ready, self.handler.batch
        if batch is None:
            message = ready.popleft()
            if now < message._lease_until and not message.lease_lost and not message.cancel_requested:
                return [message]
            self._give_back(message)
            return []
        messages: list[Message[Any]] = []
        while ready and len(messages) < batch:
            message = ready.popleft()
            if now >= message._lease_until or message.lease_lost or message.cancel_requested:
                self._give_back(message)
                continue
            try:
                # A handler process decodes its messages itself.
                if not self.handler.process and (
                    "body" in self.handler.parameter_kinds or self.handler.as_type is not None
                ):
                    _ = message.body
            except Undecodable as error:
                self._settle(message, error)
                continue
            except BaseException as error:
                self._fail_unread(message, error)
                continue
            messages.append(message)
        return messages

    def _fail_unread(self, message: Message[Any], error: BaseException) -> None:
        """The code of the body's type ended as a handler may: so does its message, and the others go on."""
        stopped = is_stop_request(error)
        if stopped:
            self._on_abort(error)
        settlement = self._settle(message, error, stopped=stopped)
        if not stopped:
            log_failure(self.handler, [message], error, [settlement])

    # ---- ending ------------------------------------------------------------------------------------------

    def _end(
        self,
        slot: Slot,
        messages: list[Message[Any]],
        result: Any,
        error: BaseException | None,
        *,
        given_up: bool = False,
    ) -> None:
        self.handled += 1
        if error is None and result is None and self._is_plain and slot.ending is None:
            settlement = messages[0].plain_done()
            if settlement is not None:
                self.settler.add(messages[0], settlement)
                return
        ending: Ending | None = None
        if slot.ending is not None:
            ending, error = slot.take_ending(error, messages)
        if not messages:
            return  # none of a batch could be decoded, and each is settled already
        if error is None and result is not None:
            try:
                result = check_returned(result)
            except Exception as refusal:
                error = refusal
        if error is None and not isinstance(result, Outcome):
            # The result of a handler in a transaction or a process is already stored.
            why_not = self.handler.keep_result(messages[0], result) or codec.refusal_of(messages[0]._result)
            if why_not is not None:
                self._report_refused_result(messages[0], why_not)
        failed = False
        stopped = given_up or (isinstance(error, asyncio.CancelledError) and ending is not None)
        if error is None and isinstance(result, Outcome):
            error, failed = result, True
        elif isinstance(error, Outcome):
            failed = True
        elif error is not None and not stopped:
            if self.handler.is_async and is_stop_request(error):
                stopped = True
                self._on_abort(error)
            else:
                failed = error is not messages[0].undecodable
        if self._context.on_event is not None:
            slot.report(self._context, messages, error, ending, stopped=stopped)
        settlements = [self._settle(message, error, stopped=stopped) for message in messages]
        if failed and error is not None:
            log_failure(self.handler, messages, error, settlements)
        elif error is None:
            done = log_chosen(self.handler, messages, settlements)
            if self._done_level is not None and done:
                log_done(self._done_level, self.handler, done, lease_clock.now() - slot.started)

    def _report_refused_result(self, message: Message[Any], refusal: str) -> None:
        log.error(
            "the result of message %s of queue %s could not be kept (%s): the message is done, without a result",
            message.id,
            self.queue,
            refusal,
            extra={"event": "result_not_kept", "queue": self.queue, "message_id": message.id},
        )
        self._context.emit(
            "result_not_kept", self.queue, "failure", message_id=message.id, token=message.token, error=refusal
        )

    def _settle(self, message: Message[Any], error: BaseException | None, *, stopped: bool = False) -> Settlement:
        handler = self.handler
        if handler.manual and error is None and message.outcome is None:
            error = Retry(reason="left unsettled")
        settlement = message.settlement(error, handler.retry, stopped=stopped)
        unreadable = message.undecodable
        if unreadable is not None and error is unreadable:
            if isinstance(unreadable, EnvelopeTooNew):
                settlement = receive.too_new(message._lease)
            receive.log_unreadable(message, settlement, unreadable)
        if message.fenced or (message.lease_lost and settlement.outcome == "release"):
            self._close_lost(message, settlement)
        elif message.at_most_once:
            if self._context.on_event is not None:
                receive.emit_settled(self._context, message, settlement, "done")
            self.settler.outcomes["done"] += 1  # by its claim
            self._on_end_without_settle()
        else:
            self.settler.add(message, settlement)
        return settlement

    def _close_lost(self, message: Message[Any], settlement: Settlement) -> None:
        """Give up a message: its lease is lost or about to expire, and the store would accept no outcome."""
        self._held.discard(message)
        message.settled = "lost"
        if self._context.on_event is not None:
            receive.emit_settled(self._context, message, settlement, "lost", "failure")
        self._on_end_without_settle()

    def _on_end_without_settle(self) -> None:
        """Report the end of a message that no settle reports: a worker that runs until it is empty waits for it."""
        if not self.in_flight:
            self._on_work(set())

    # ---- calls of the renewing thread ---------------------------------------------------------

    def to_renew(self) -> list[Message[Any]]:
        """Return all leases held here, except those whose handlers have run for too long."""
        now = lease_clock.now()
        held = list(self._held)
        if held:
            # The queue's lease can change while messages with the previous lease length are held.
            self.lease_seconds = min(message._lease_seconds for message in held)
        overdue: set[Message[Any]] = set()
        for slot in list(self._slots):
            messages = slot.messages
            if messages and now - slot.started > self.handler.renewal_limit(messages):
                overdue.update(messages)
                slot.log_overdue(self.handler)
        return [message for message in held if message not in overdue] if overdue else held

    def held(self) -> list[Message[Any]]:
        return list(self._held)

    def runs(self, message: Message[Any]) -> bool:
        return any(message in slot.messages for slot in list(self._slots))

    def still_concerns(self, message: Message[Any]) -> bool:
        settler = self.settler
        return (
            message in self._held and message not in settler.sending and message not in settler.sending_with_claim
        )  # fmt: skip

    def on_lost(self, message: Message[Any]) -> None:
        # First, so that the call is marked as cancelled before the end of its process is noticed.
        self._from_thread(self._stop_handler, message, "lost")
        self._caller.kill_lost()

    def on_cancel(self, message: Message[Any]) -> None:
        self._from_thread(self._stop_handler, message, "cancel")

    def _from_thread(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            log.debug("the event loop is gone", extra={"event": "loop_gone", "queue": self.queue})

    def _stop_handler(self, message: Message[Any], ending: Ending) -> None:
        found = False
        for slot in self._slots:
            if message not in slot.messages:
                continue
            found = True
            # While other messages of a batch are valid the handler continues, and can check each of them.
            if self.handler.can_be_stopped and all(one.lease_lost or one.cancel_requested for one in slot.messages):
                slot.cancel(ending)
        if ending == "lost" and self.handler.on_lease_lost is not None and (found or message in self._ready):
            try:
                self.handler.on_lease_lost(message)
            except Exception:
                log.exception("on_lease_lost failed", extra={"event": "on_lease_lost_failed", "queue": self.queue})
