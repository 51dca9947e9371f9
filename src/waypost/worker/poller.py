"""Polling: one thread asks the store about all idle queues of a worker at once, whatever the event loop is doing.

The same call tells the store of the worker (a heartbeat), renews the registrations of its sleepers, and asks whether
the worker is to lead the schedulers: an idle worker sends nothing else. A consumer rests here from when it found
nothing; the answer wakes it if a claim may bring something. A poll that fails harms nothing: another follows. That
polls are answered is also the proof that the store is there while a busy worker has nothing to ask it for.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from waypost import lease_clock
from waypost.errors import OutcomeUnknown, StoreUnavailable
from waypost.operations.flow import ClientContext
from waypost.policy import HEARTBEAT_SECONDS, HEARTBEATS_PER_TTL
from waypost.store.port import Executor, Heartbeat, Idle, Registration
from waypost.values import Elected, PolledQueue
from waypost.wake.port import Listening

log = logging.getLogger("waypost")

#: After a failed poll the next one comes so much sooner: who looks after a fault should not have to wait.
SOONER = 5
#: What would be polled within this part of its interval is polled with the others: one call for all.
TOGETHER = 0.5
#: The first poll of a worker comes by chance within this last part of its interval: workers that are started together
#: poll at different times from then on.
FIRST_JITTER = 0.5
#: Later ones come a little sooner than they must, by chance, so that polls that fall together part. More costs the
#: store more polls.
JITTER = 0.02


#: A heartbeat may be late by half of its interval before a store that is there is taken for one that is not.
HEARTBEATS_PER_WINDOW = 1.5
INTERVAL_SECONDS_MIN = 0.05


class Liveness:
    """When the store last answered a claim of a loop, and since when the loop owes the next."""

    __slots__ = ("last_claim", "owes_from")

    def __init__(self) -> None:
        self.last_claim: float | None = None
        self.owes_from = time.monotonic()

    def claimed(self) -> None:
        """A claim was answered, with messages or without."""
        self.last_claim = self.owes_from = time.monotonic()

    def polled(self, seconds: float) -> None:
        """The store said that a claim would bring nothing: that counts as one, and none is owed for so long."""
        self.last_claim = time.monotonic()
        self.owes_none_for(seconds)

    def owes_none_for(self, seconds: float) -> None:
        """No claim is owed for so long."""
        self.owes_from = time.monotonic() + seconds

    def owes_now(self) -> None:
        """The next claim is owed from now on, unless one is owed already."""
        self.owes_from = min(self.owes_from, time.monotonic())

    def late_seconds(self, now: float) -> float:
        """For how long a claim has been owed."""
        return max(0.0, now - self.owes_from)


class PollTarget(Protocol):
    """A consumer that waits for work of its queue. Called on its event loop."""

    def polled(self, answer: PolledQueue, sent_at: float, answered_at: float) -> None:
        """What the store says of its queue: sent when by `lease_clock`, answered when by the monotonic clock."""
        ...


class Candidate(Protocol):
    """A candidate for leader, which takes part with the polls of a worker while another one leads."""

    role: str
    ttl_ms: int
    leading: bool
    by_polls: bool


class Electable(Protocol):
    """A part of a worker that may have to lead."""

    @property
    def candidate(self) -> Candidate: ...
    def update_election(self, elected: Elected) -> None:
        """Who leads. On its event loop."""
        ...


class PollEntry:
    """One rest of a consumer: polled every so many seconds until it ends."""

    __slots__ = ("due", "idle", "seconds", "target")

    def __init__(self, target: PollTarget, idle: Idle, seconds: float) -> None:
        self.target = target
        self.idle = idle
        self.seconds = seconds
        self.due = time.monotonic() + seconds * random.uniform(1 - JITTER, 1)


class Poller:
    """The thread. `make_heartbeat` is given when the worker started by the store's clock, None at first."""

    def __init__(
        self,
        context: ClientContext,
        connected: Callable[[], Executor],
        make_heartbeat: Callable[[int | None], Heartbeat],
        *,
        window: float,
    ) -> None:
        self._context = context
        self._connected = connected
        self._make_heartbeat = make_heartbeat
        self._interval = heartbeat_interval(window)
        self._ttl_ms = round(self._interval * HEARTBEATS_PER_TTL * 1000)
        #: When the store last answered; a start counts, since it needs one.
        self.answered = time.monotonic()
        #: What the last poll failed with.
        self.error: Exception | None = None
        #: The part that asks with the polls whether it is to lead.
        self.electable: Electable | None = None
        self._loop = asyncio.get_running_loop()
        self._name = ""
        self._started_ms: int | None = None
        self._entries: dict[PollTarget, PollEntry] = {}
        self._own_polls: Listening | None = None
        self._changed = threading.Condition()
        self._heartbeat_due = 0.0
        #: When the thread polls next.
        self._sleeps_until = 0.0
        self._stopping = False
        #: The worker has ended without waiting, and the connection may be closed.
        self._abandoned = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin with a heartbeat, at once."""
        self._own_polls = self._context.wakeups.listen_to_own_polls(self._context.worker)
        self._thread = threading.Thread(target=self._run, name="waypost-polls", daemon=True)
        self._thread.start()

    def heartbeat_now(self) -> None:
        """Send a heartbeat now."""
        with self._changed:
            self._heartbeat_due = 0.0
            self._changed.notify()

    def add(self, target: PollTarget, idle: Idle, seconds: float) -> None:
        """Poll a queue every so many seconds, from that long from now on, until it wakes."""
        entry = PollEntry(target, idle, seconds)
        with self._changed:
            self._entries[target] = entry
            # A consumer rests after each message: the thread is not disturbed for what comes after its next poll.
            if entry.due < self._sleeps_until:
                self._changed.notify()

    def remove(self, target: PollTarget) -> None:
        """Poll its queue no more."""
        with self._changed:
            self._entries.pop(target, None)

    def stop(self, timeout: float) -> None:
        """Unregister the worker and end. A call that hangs is left behind; the store forgets the worker by itself."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._own_polls is not None:
            self._own_polls.close()
        if self._thread is not None:
            self._thread.join(timeout)
            self._abandoned = self._thread.is_alive()

    # ---- the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            self._poll(due[0], heartbeats=due[1])
        if self._name and not self._abandoned:
            try:
                self._connected().run(self._context.store.unregister(self._name))
            except Exception as error:
                log.debug("worker %s could not be unregistered: %s", self._name, error, extra={"event": "leave_failed"})

    def _wait(self) -> tuple[list[PollEntry], bool] | None:
        """Wait for the next poll: which queues, and whether with a heartbeat; None at the end."""
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                self._sleeps_until = self.next_due()
                if self._sleeps_until <= now:
                    return self.take_due(now)
                self._changed.wait(self._sleeps_until - now)
            return None

    def next_due(self) -> float:
        """When the next poll is due."""
        return min([self._heartbeat_due, *(entry.due for entry in self._entries.values())])

    def take_due(self, now: float) -> tuple[list[PollEntry], bool]:
        """The queues of this poll and whether it carries a heartbeat: what is due, and what soon would be."""
        heartbeats = self._heartbeat_due - now <= self._interval * TOGETHER
        # A heartbeat takes all queues along: one that began to rest lately would be a call of its own soon after.
        due = [one for one in self._entries.values() if heartbeats or one.due - now <= one.seconds * TOGETHER]
        for one in due:
            one.due = now + one.seconds * random.uniform(1 - JITTER, 1)
        if heartbeats:
            # At the start there is nothing to poll for yet.
            first = self._started_ms is None
            self._heartbeat_due = now + self._interval * (random.uniform(1 - FIRST_JITTER, 1) if first else 1)
        return due, heartbeats

    def _poll(self, due: Sequence[PollEntry], *, heartbeats: bool) -> None:
        sent_at = lease_clock.now()
        try:
            electable = self.electable
            if electable is not None and electable.candidate.leading:
                electable = None
            calls = self._context.store.poll(
                [one.idle for one in due],
                registration=self._heartbeat(electable) if heartbeats else None,
                echo=self._context.worker if self._own_polls is not None else None,
            )
            answers: list[PolledQueue] = []
            elected: Elected | None = None
            at_ms = 0
            for answer in self._connected().run_many(calls):
                if isinstance(answer, Exception):
                    raise answer
                answers += answer.queues
                elected, at_ms = elected or answer.elected, max(at_ms, answer.at_ms)
        except Exception as error:
            # Whatever it is: a worker works whether or not anybody can see it, and finds work when it is woken.
            self._failed(error, due, heartbeats)
            if heartbeats and due and not isinstance(error, StoreUnavailable | OutcomeUnknown):
                self._poll(due, heartbeats=False)  # what is wrong with the heartbeat must not hide work
            return
        self.answered = time.monotonic()
        self._context.session.time.learn(at_ms)
        if heartbeats:
            self.error = None
            self._started_ms = at_ms if self._started_ms is None else self._started_ms
        elif isinstance(self.error, StoreUnavailable | OutcomeUnknown):
            self.error = None
        try:
            self._loop.call_soon_threadsafe(self._answer, due, answers, sent_at, self.answered, electable, elected)
        except RuntimeError:
            log.debug("the event loop is gone", extra={"event": "loop_gone"})

    def _heartbeat(self, electable: Electable | None) -> Registration:
        heartbeat = self._make_heartbeat(self._started_ms)
        self._name = heartbeat.name
        if electable is None:
            return Registration(heartbeat, self._ttl_ms)
        return Registration(heartbeat, self._ttl_ms, electable.candidate.role, electable.candidate.ttl_ms)

    def _failed(self, error: Exception, due: Sequence[PollEntry], heartbeats: bool) -> None:
        log.log(
            logging.WARNING if self.error is None else logging.DEBUG,
            "worker %s could not poll its store (%s); trying again",
            self._name,
            error,
            extra={"event": "poll_failed", "worker": self._name},
        )
        self.error = error
        with self._changed:
            now = time.monotonic()
            for one in due:
                one.due = min(one.due, now + one.seconds / SOONER)
            if heartbeats:
                self._heartbeat_due = min(self._heartbeat_due, now + self._interval / SOONER)

    # ---- the event loop ----------------------------------------------------------------------------------

    def _answer(
        self,
        due: Sequence[PollEntry],
        answers: Sequence[PolledQueue],
        sent_at: float,
        answered_at: float,
        electable: Electable | None,
        elected: Elected | None,
    ) -> None:
        for entry, answer in zip(due, answers, strict=True):
            # One that has woken meanwhile knows better.
            if self._entries.get(entry.target) is entry:
                entry.target.polled(answer, sent_at, answered_at)
        if electable is not None and elected is not None and not electable.candidate.leading:
            electable.update_election(elected)


def heartbeat_interval(window: float) -> float:
    """The time between two heartbeats: often enough to prove within the health window that the store answers."""
    return max(INTERVAL_SECONDS_MIN, min(HEARTBEAT_SECONDS, window / HEARTBEATS_PER_WINDOW))
