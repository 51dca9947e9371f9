"""How a consumer rests between two claims, and what ends its rest.

It sleeps on its event loop and hears of work by a word. With nothing left to do it goes to the store's door, where the
store has doors: its next claim is with the server then, and begins there as soon as there is work. A consumer with
messages under way stays on its loop: what is claimed for it at the door, it must be able to start.

Wherever it rests, the worker's poller asks for its queue: for work that no wake-up told of, and for timers and leases
that were not known when it began to rest.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from waypost import lease_clock
from waypost.errors import WaypostError
from waypost.message import Claimed, PolledQueue
from waypost.operations.flow import ClientContext
from waypost.operations.receive import Nap, safety_poll_seconds
from waypost.store.port import AsyncExecutor, Call, Idle
from waypost.worker.health import Liveness
from waypost.worker.polling import Poller

log = logging.getLogger("waypost")

#: A shorter wait is not worth the way to the door.
DOOR_SECONDS_MIN = 0.5
#: It stands there for so long at most: its claim is as old as its stay, and must be repeatable for a while after it.
DOOR_SECONDS_MAX = 180.0
#: Many that came at once do not all leave at once.
DOOR_JITTER = 0.1
#: There it is polled so often in a lease: a poll shows that its claim has not begun, so what it is told later than that
#: can be told from what it lost.
POLLS_PER_LEASE = 3
#: A shorter stay that brought nothing was in vain. After it the consumer sleeps on its loop for a while, ever longer.
IN_VAIN_SECONDS = 2.5
VAIN_PAUSE_SECONDS = 1.0
#: The server ends a stay up to a tenth of a second late: for a timer it is called away so long before.
TIMER_SECONDS = 0.25
#: One that is called away and does not come within so long has lost its connection.
CALLED_SECONDS = 2.0


class Rest:
    """The sleep of one consumer. `is_idle` says whether it has nothing left to do."""

    def __init__(
        self,
        context: ClientContext,
        executor: AsyncExecutor,
        queue: str,
        liveness: Liveness,
        is_idle: Callable[[], bool],
        poller: Poller,
    ) -> None:
        #: Whether it sleeps for want of room, and whether it goes to the door as soon as it is idle.
        self.needs_room = False
        self.awaits_idleness = False
        #: Poked while it was not asleep: the next sleep ends at once.
        self.poked = False
        self._context = context
        self._executor = executor
        self._queue = queue
        self._liveness = liveness
        self._is_idle = is_idle
        self._poller = poller
        #: How often it is polled while it rests, None while it is not, and what ends its sleep at the next moment.
        self._poll_seconds: float | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._asleep: asyncio.Future[None] | None = None
        self._own_due = float("inf")
        self._has_door = False
        #: How long it may stand at the door, its name there, when it went, how often it is polled; whether it is there.
        self._door_seconds = 0.0
        self._sleeper = ""
        self._went_at = 0.0
        self._polls_at_door = 0.0
        self._stands = False
        #: Poked there, and not known yet whether its claim began after that.
        self._owes_look = False
        #: Woken on the way there, and how often it was poked since it went.
        self._told = False
        self._pokes = 0
        self._visits = 0
        self._visiting = False
        self._give_up: Callable[[], None] = lambda: None
        #: By the clock of leases, its claim has not begun before this: a poll found it at its door.
        self.not_before = 0.0
        #: Called away, or came for nothing: it sleeps on its loop for so long before it goes there again.
        self._in_vain = False
        self._vain_seconds = 0.0
        self._pause_seconds = 0.0
        self._knocks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Begin: take a door if there is one."""
        self._has_door = self._context.store.doors is not None and self._context.wakeups.take_door()

    def close(self) -> None:
        """Leave the door to others."""
        if self._has_door:
            self._has_door = False
            self._context.wakeups.give_door()

    # ---- on the loop -------------------------------------------------------------------------------------

    async def sleep(
        self,
        seconds: float | None,
        *,
        rests: bool = True,
        then_door: bool = False,
        poll_seconds: float | None = None,
        sleeper: str | None = None,
    ) -> float | None:
        """Sleep until the time is up, something of our own comes due, or a poke. `rests`: no claim is owed so long.

        With `poll_seconds` the poller asks for the queue so often, and may end the sleep. With `then_door` only until
        there is nothing left to do; then it returns how long to stand at the door.
        """
        now = time.monotonic()
        end = self._own_due if seconds is None else min(now + seconds, self._own_due)
        then_door = then_door and min(end - now, self._door_seconds) >= DOOR_SECONDS_MIN
        door_from = now + self._pause_seconds
        at_once = self.poked or (then_door and now >= door_from and self._is_idle())
        if rests:
            self._liveness.rests(end - now if poll_seconds is None else min(end - now, poll_seconds))
        self.awaits_idleness = then_door and now >= door_from
        self._asleep = asleep = self._loop.create_future()
        self._arm(end)
        to_door = self._loop.call_later(door_from - now, self._go_if_idle) if then_door and now < door_from else None
        if poll_seconds is not None and not at_once:
            self._rest(sleeper, poll_seconds)
        try:
            if not at_once:
                await asleep
        finally:
            poked = self.poked
            self._asleep, self.needs_room, self.awaits_idleness, self.poked = None, False, False, False
            self._wakes()
            if to_door is not None:
                to_door.cancel()
            now = time.monotonic()
            if self._own_due <= now:
                self._own_due = float("inf")
            self._liveness.wakes()
        left = min(end - now, self._door_seconds)
        then_door = then_door and not poked and left >= DOOR_SECONDS_MIN and now >= door_from
        return left if then_door and self._is_idle() else None

    def _go_if_idle(self) -> None:
        self.awaits_idleness = True
        if self._is_idle():
            self.wake()

    def _rest(self, sleeper: str | None, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds
        self._poller.rest(self, Idle(self._queue, sleeper), poll_seconds)

    def _wakes(self) -> None:
        self._arm(float("inf"))
        if self._poll_seconds is not None:
            self._poll_seconds = None
            self._poller.wakes(self)

    def _arm(self, at: float) -> None:
        """End the rest at a moment of the monotonic clock, and at no other."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None
        if at != float("inf"):
            self._alarm = self._loop.call_later(max(0.0, at - time.monotonic()), self._claim_now)

    def _claim_now(self) -> None:
        """End the rest by a claim: at the door that one is under way already."""
        self.poked = self.poked or not self._stands
        self.wake()

    def polled(self, answer: PolledQueue, sent_at: float, answered_at: float) -> None:
        """What the store says of the queue while it rests."""
        if self._poll_seconds is None:
            return
        self._liveness.polled(self._poll_seconds)
        if answer.at_door:
            self.not_before = sent_at
        if answer.needs_claim:
            if self._stands:
                self._loop.call_later(CALLED_SECONDS, self._check_called, self._visits)
            self._claim_now()
            return
        moments = [ms for ms in (answer.next_due_ms, answer.next_lease_ms) if ms is not None]
        moment = answered_at + min(moments) / 1000 if moments else float("inf")
        if self._visiting:
            # For a moment that the next poll will still be in time for, nobody is called away.
            near = moment - time.monotonic() < self._poll_seconds + TIMER_SECONDS
            self._arm(moment - TIMER_SECONDS if near else float("inf"))
        else:
            self._arm(min(moment, self._own_due))

    def _check_called(self, visit: int) -> None:
        if self._visiting and self._visits == visit:
            log.warning("queue %s: a waiting connection does not answer and is given up", self._queue)
            self._give_up()

    def poke(self) -> None:
        """There may be work, or a reason to stop: end the sleep, or do not begin the next one.

        A claim under way may have looked before the work came.
        """
        self.poked = True
        self._pokes += 1
        self.wake()

    def wake(self) -> None:
        """End the sleep, wherever it sleeps."""
        if self._asleep is not None and not self._asleep.done():
            self._asleep.set_result(None)
        elif self._stands:
            self._stands = False
            self._knock()
            self._owes_look, self.poked = self.poked, False

    def wake_at(self, due: float) -> None:
        """Something of our own comes due, of which the last claim's answer could not know."""
        if due < self._own_due:
            self._own_due = due
            self.wake()

    # ---- at the door -------------------------------------------------------------------------------------

    def may_go(self, claimed: Claimed, nap: Nap, *, soon: bool = True) -> bool:
        """Whether to go to the door after this claim: not if something comes due, whose moment the door would miss.

        Not `soon`: work comes so often that it is not worth the way before a while without any.
        """
        # Work that came since is reason enough to go again at once.
        in_vain, self._in_vain = self._in_vain, False
        self._pause_seconds = max(self._vain_seconds if in_vain else 0.0, 0.0 if soon else VAIN_PAUSE_SECONDS)
        # What is claimed at most once would be lost with the reply: nobody waits for that at a door.
        lease = (claimed.lease_ms or 0) / 1000
        longest = DOOR_SECONDS_MAX * random.uniform(1 - DOOR_JITTER, 1)
        self._door_seconds = longest if lease / POLLS_PER_LEASE >= DOOR_SECONDS_MIN else 0.0
        self._polls_at_door = min(lease / POLLS_PER_LEASE, safety_poll_seconds(claimed.lease_ms, woken=True))
        return self._has_door and nap.only_to_be_safe and self._own_due == float("inf")

    def go(self, sleeper: str, seconds: float) -> None:
        """A claim begins that waits at the door."""
        self._visits += 1
        self._pokes, self._told, self._visiting = 0, False, True
        self._sleeper, self._went_at = sleeper, time.monotonic()
        self.not_before = lease_clock.now()
        self._liveness.rests(self._polls_at_door)
        self._rest(sleeper, self._polls_at_door)

    def goes(self, give_up: Callable[[], None]) -> None:
        """It is on its way, and can give up."""
        self._give_up = give_up

    def arrive(self, *, told: bool) -> None:
        """It is there. Whoever called it away before that could not be heard."""
        self._told, self._stands = told, not told
        if self.poked or self._own_due < float("inf"):
            self.wake()

    def let_in(self, *, by: str) -> None:
        """That claim begins. If it was not by our knock, it may have begun before: a poke is still owed a look.

        A knock that came too late the last time can open the door now; it is no answer to what was poked since.
        """
        self._owes_look = self._owes_look and by != str(self._visits)

    def leave(self, *, found: bool) -> None:
        """That claim has ended."""
        self._visiting, self._give_up = False, lambda: None
        self._wakes()
        self._in_vain = not found and time.monotonic() - self._went_at < IN_VAIN_SECONDS
        longer = min(DOOR_SECONDS_MAX, max(VAIN_PAUSE_SECONDS, 2 * self._vain_seconds))
        self._vain_seconds = longer if self._in_vain else 0.0
        self.poked = self.poked or self._owes_look
        if self._told and self._pokes == 1:
            # That was the word that it was told by: words come in their order, so nothing has been told since.
            self.poked = False
        self._stands = self._owes_look = False
        self._liveness.wakes()

    def _knock(self) -> None:
        doors = self._context.store.doors
        if doors is None:
            return
        knock = self._loop.create_task(
            self._run(doors.knock(self._queue, self._sleeper, str(self._visits))), name="waypost knocks"
        )
        self._knocks.add(knock)
        knock.add_done_callback(self._knocks.discard)

    async def _run(self, knock: Call[None]) -> None:
        try:
            await self._executor.run(knock)
        except WaypostError as error:
            log.debug("queue %s: nobody could be called from the door: %s", self._queue, error)
