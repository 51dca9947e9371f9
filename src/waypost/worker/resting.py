"""How a consumer rests between two claims, and what ends its rest.

It sleeps on its event loop and hears of work by a word. With nothing left to do it goes to the store's door, where the
store has doors: its next claim is with the server then, and begins there as soon as there is work. A consumer with
messages under way stays on its loop: what is claimed for it at the door, it must be able to start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from waypost.errors import WaypostError
from waypost.message import Claimed
from waypost.operations.flow import Link
from waypost.operations.receive import Nap
from waypost.store.port import AsyncExecutor, Call
from waypost.worker.health import Pulse

log = logging.getLogger("waypost")

#: A shorter wait is not worth the way to the door.
DOOR_SECONDS_MIN = 0.5
#: It stands there for this part of a lease at most, so that what it is told late can still be told from what it lost.
LEASES_PER_DOOR = 3


class Rest:
    """The sleep of one consumer. `is_idle` says whether it has nothing left to do."""

    def __init__(
        self, link: Link, executor: AsyncExecutor, queue: str, pulse: Pulse, is_idle: Callable[[], bool]
    ) -> None:
        #: Whether it sleeps for want of room, and whether it goes to the door as soon as it is idle.
        self.needs_room = False
        self.awaits_idleness = False
        #: Poked while it was not asleep: the next sleep ends at once.
        self.poked = False
        self._link = link
        self._executor = executor
        self._queue = queue
        self._pulse = pulse
        self._is_idle = is_idle
        self._loop = asyncio.get_running_loop()
        self._asleep: asyncio.Future[None] | None = None
        self._own_due = float("inf")
        self._has_door = False
        #: How long it may stand at the door; its name there, when it went and for how long; whether it stands there.
        self._door_seconds = 0.0
        self._sleeper = ""
        self._went_at = 0.0
        self._stands_for = 0.0
        self._stands = False
        #: Poked there, and not known yet whether its claim began after that.
        self._owes_look = False
        #: Woken on the way there, and how often it was poked since it went.
        self._told = False
        self._pokes = 0
        self._visits = 0
        #: Called away, or came for nothing: it sleeps on its loop before it goes there again.
        self._in_vain = False
        self._knocks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Begin: take a door if there is one."""
        self._has_door = self._link.store.doors is not None and self._link.wakeups.take_door()

    def close(self) -> None:
        """Leave the door to others."""
        if self._has_door:
            self._has_door = False
            self._link.wakeups.give_door()

    # ---- on the loop -------------------------------------------------------------------------------------

    async def sleep(self, seconds: float | None, *, rests: bool = True, then_door: bool = False) -> float | None:
        """Sleep until the time is up, something of our own comes due, or a poke. `rests`: no claim is owed so long.

        With `then_door` only until there is nothing left to do; then it returns how long to stand at the door.
        """
        now = time.monotonic()
        end = self._own_due if seconds is None else min(now + seconds, self._own_due)
        then_door = then_door and min(end - now, self._door_seconds) >= DOOR_SECONDS_MIN
        if rests:
            self._pulse.rests(end - now)
        self.awaits_idleness = then_door
        self._asleep = asleep = self._loop.create_future()
        alarm = None if end == float("inf") else self._loop.call_later(max(0.0, end - now), self.wake)
        try:
            if not self.poked and not (then_door and self._is_idle()):
                await asleep
        finally:
            poked = self.poked
            self._asleep, self.needs_room, self.awaits_idleness, self.poked = None, False, False, False
            if alarm is not None:
                alarm.cancel()
            now = time.monotonic()
            if self._own_due <= now:
                self._own_due = float("inf")
            self._pulse.wakes()
        left = min(end - now, self._door_seconds)
        return left if then_door and not poked and left >= DOOR_SECONDS_MIN and self._is_idle() else None

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

    def may_go(self, claimed: Claimed, nap: Nap) -> bool:
        """Whether to go to the door after this claim: not if something comes due, whose moment the door would miss."""
        in_vain, self._in_vain = self._in_vain, False
        # What is claimed at most once would be lost with the reply: nobody waits for that at a door.
        self._door_seconds = (claimed.lease_ms or 0) / 1000 / LEASES_PER_DOOR
        return self._has_door and nap.only_to_be_safe and not in_vain and self._own_due == float("inf")

    def go(self, sleeper: str, seconds: float) -> None:
        """A claim begins that waits at the door."""
        self._visits += 1
        self._pokes, self._told = 0, False
        self._sleeper, self._went_at, self._stands_for = sleeper, time.monotonic(), seconds
        self._pulse.rests(seconds)

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
        self._in_vain = not found and time.monotonic() - self._went_at < self._stands_for / 2
        self.poked = self.poked or self._owes_look
        if self._told and self._pokes == 1:
            # That was the word that it was told by: words come in their order, so nothing has been told since.
            self.poked = False
        self._stands = self._owes_look = False
        self._pulse.wakes()

    def _knock(self) -> None:
        doors = self._link.store.doors
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
