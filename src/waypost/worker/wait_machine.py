"""How a consumer waits between two claims: the state machine. It does no I/O; `waiter.py` drives it.

A consumer sleeps on its event loop, where a notification wakes it. If no handler runs, it uses a blocking wait
instead, if its store has them: its next claim is queued in the server behind a blocking read, and begins as soon as
that read returns. A publish ends the read, and so does an unblock, which is a value that the consumer pushes itself.

                 sleep                      notify, interrupt, end_sleep
    ACTIVE ----------------> SLEEPING… -------------------------------> ACTIVE

                 start_wait           wait_started         read_returned          end_wait
    ACTIVE ----------------> STARTING ------------> WAITING ------------> CLAIMING ------> ACTIVE
                                |                      |                     ^
                   notify, interrupt      notify, interrupt: UNBLOCK         |
                                v                      v                     |
                          INTERRUPTED ---------> UNBLOCKING -----------------+
                                 wait_started: UNBLOCK     read_returned

    state                where              what ends it
    ACTIVE               event loop         (the claim loop runs, or a claim without a wait is in progress)
    SLEEPING             event loop         a notification, the time
    SLEEPING_FOR_ROOM    event loop         also: a handler has ended
    SLEEPING_UNTIL_IDLE  event loop         also: no handler runs any more
    STARTING             way to the server  (an unblock would come too early: the server deletes it)
    INTERRUPTED          way to the server  (the unblock follows as soon as the server has registered the wait)
    WAITING              server             a publish, an unblock, the time limit
    UNBLOCKING           server             the same; the unblock is sent
    CLAIMING             way back           (the read has returned: the claim runs, its answer follows)

    state        event              next state           what is sent or done
    ACTIVE       begin_claim        ACTIVE               the notifications so far are answered by this claim
    ACTIVE       notify             ACTIVE               counted: the next sleep ends at once
    ACTIVE       interrupt          ACTIVE
    ACTIVE       sleep              SLEEPING…
    SLEEPING     await_idle         SLEEPING_UNTIL_IDLE  (the pause before a blocking wait is over)
    SLEEPING…    notify, interrupt  ACTIVE               END_SLEEP
    SLEEPING…    end_sleep          ACTIVE               the notifications so far are answered by the claim that follows
    ACTIVE       start_wait         STARTING             (the driver sends: register, blocking read, claim)
    ACTIVE       start_wait         INTERRUPTED          the same, if a notification is not answered
    STARTING     notify, interrupt  INTERRUPTED
    STARTING     wait_started       WAITING
    INTERRUPTED  wait_started       UNBLOCKING           UNBLOCK
    STARTING     already_notified   CLAIMING             (the server ends the read at once)
    INTERRUPTED  already_notified   CLAIMING             (the server ends the read at once)
    WAITING      notify, interrupt  UNBLOCKING           UNBLOCK
    WAITING      read_returned      CLAIMING
    UNBLOCKING   read_returned      CLAIMING             if by our unblock: the notifications before it are answered
    INTERRUPTED, UNBLOCKING, CLAIMING
                 notify             unchanged            counted
    STARTING, INTERRUPTED, WAITING, UNBLOCKING, CLAIMING
                 end_wait           ACTIVE               a notification that is not answered ends the next sleep at once

A notification means that there may be work. It is answered by a claim that begins after it. A claim behind a blocking
wait may have begun before: only one that our own unblock released is known to have begun after the notifications that
came before the unblock. Any other notification makes the next claim follow at once (`needs_poll`). An interrupt ends a
wait or a sleep for another reason, and requires no claim.
"""

from __future__ import annotations

from enum import Enum


class WaitState(Enum):
    """Where a consumer waits. See the tables above."""

    ACTIVE = "active"
    SLEEPING = "sleeping"
    SLEEPING_FOR_ROOM = "sleeping for room"
    SLEEPING_UNTIL_IDLE = "sleeping until idle"
    STARTING = "starting"
    INTERRUPTED = "interrupted"
    WAITING = "waiting"
    UNBLOCKING = "unblocking"
    CLAIMING = "claiming"


class Action(Enum):
    """What the driver has to do."""

    END_SLEEP = "end the sleep on the event loop"
    UNBLOCK = "push `unblock_value` to the list that the blocking read reads"


ASLEEP = frozenset((WaitState.SLEEPING, WaitState.SLEEPING_FOR_ROOM, WaitState.SLEEPING_UNTIL_IDLE))
IN_WAIT = frozenset(
    (WaitState.STARTING, WaitState.INTERRUPTED, WaitState.WAITING, WaitState.UNBLOCKING, WaitState.CLAIMING)
)


class WaitMachine:
    """The states of one consumer. Each method is an event, and returns what the driver must do."""

    __slots__ = ("_answered", "_notified", "_unblock_answers", "_wait_number", "state")

    def __init__(self) -> None:
        self.state = WaitState.ACTIVE
        #: Notifications since the last claim of the loop began, or since the blocking wait started.
        self._notified = 0
        #: How many of them the claim behind the wait answers.
        self._answered = 0
        #: How many of them that claim answers if our unblock releases it.
        self._unblock_answers = 0
        #: Distinguishes the unblock of this wait from one that came too late for an earlier wait.
        self._wait_number = 0

    @property
    def needs_poll(self) -> bool:
        """Whether a notification came that no claim has answered."""
        return self._notified > self._answered

    @property
    def unblock_value(self) -> str:
        """The value by which this wait recognises its own unblock."""
        return str(self._wait_number)

    # ---- claims and sleeps of the loop -------------------------------------------------------------------

    def begin_claim(self) -> None:
        """Begin a claim: it answers all notifications so far."""
        self._notified = self._answered = 0

    def sleep(self, state: WaitState) -> None:
        """Begin a sleep on the event loop."""
        assert self.state is WaitState.ACTIVE, self.state
        assert state in ASLEEP, state
        self.state = state

    def await_idle(self) -> None:
        """End the pause before a blocking wait: the sleep now lasts only until no handler runs."""
        if self.state is WaitState.SLEEPING:
            self.state = WaitState.SLEEPING_UNTIL_IDLE

    def end_sleep(self) -> bool:
        """End the sleep; return whether a notification ended it. A claim follows, which answers that notification."""
        notified = self.needs_poll
        self.state = WaitState.ACTIVE
        self.begin_claim()
        return notified

    # ---- what ends a sleep or a wait ---------------------------------------------------------------------

    def notify(self) -> Action | None:
        """Handle a notification: there may be work, or a reason to stop."""
        self._notified += 1
        return self.interrupt()

    def interrupt(self) -> Action | None:
        """End the sleep or the wait, for another reason than possible work."""
        state = self.state
        if state in ASLEEP:
            self.state = WaitState.ACTIVE
            return Action.END_SLEEP
        if state is WaitState.STARTING:
            self.state = WaitState.INTERRUPTED
        elif state is WaitState.WAITING:
            return self._unblock()
        return None

    # ---- the blocking wait -------------------------------------------------------------------------------

    def start_wait(self) -> None:
        """Send a claim behind a blocking wait."""
        assert self.state is WaitState.ACTIVE, self.state
        self.state = WaitState.INTERRUPTED if self.needs_poll else WaitState.STARTING
        self._notified = self._answered = self._unblock_answers = 0
        self._wait_number += 1

    def wait_started(self) -> Action | None:
        """The server has registered the wait: from now on it receives an unblock."""
        if self.state is WaitState.INTERRUPTED:
            return self._unblock()
        self.state = WaitState.WAITING
        return None

    def already_notified(self) -> None:
        """The sleeper was chosen before the server could register the wait: the read ends at once.

        The notification of that choice has arrived or will arrive. The claim began after it was sent, and so answers
        it; notifications arrive in order, so a second one is new.
        """
        self.state = WaitState.CLAIMING
        self._answered = 1

    def read_returned(self, value: str) -> None:
        """The blocking read has returned this value, and the claim behind it begins.

        An unblock that arrived too late for an earlier wait can end this one: then it answers no notification.
        """
        if value == self.unblock_value:
            self._answered = self._unblock_answers
        self.state = WaitState.CLAIMING

    def end_wait(self) -> None:
        """The claim behind the wait got its reply, or failed."""
        assert self.state in IN_WAIT, self.state
        self.state = WaitState.ACTIVE
        # The notification that `already_notified` expects may not have arrived, and may never: the next one counts as
        # new.
        self._notified, self._answered = max(0, self._notified - self._answered), 0

    def _unblock(self) -> Action:
        self.state = WaitState.UNBLOCKING
        self._unblock_answers = self._notified
        return Action.UNBLOCK
