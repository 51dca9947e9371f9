"""Polling: one thread polls all idle queues of a worker in one call, even while the event loop is blocked.

The same call sends the worker's heartbeat, renews the registrations of its sleepers, and checks whether the worker must
lead the schedulers: an idle worker sends nothing else. A consumer is polled for from the time at which it found no
message; the reply wakes it if a claim may return messages. A failed poll is harmless: another follows. Replies to polls
also prove that the store is up while a busy worker makes no other calls.
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
from waypost.values import Elected, PolledQueue, Requested, WorkerRequest
from waypost.wake.port import Listening

log = logging.getLogger("waypost")

#: After a failed poll the next one is sooner by this factor, so that the end of a fault is noticed soon.
SOONER = 5
#: Queues that are due within this part of their interval are polled together with those that are due now.
TOGETHER = 0.5
#: The first poll is at a random time within this last part of the interval, so that workers that are started together
#: poll at different times.
FIRST_JITTER = 0.5
#: Later polls are a little earlier, at random, so that polls of several workers do not coincide. More jitter would
#: cause more polls.
JITTER = 0.02


#: Heartbeats per health window: one may be late by half its interval before the worker is considered red.
HEARTBEATS_PER_WINDOW = 1.5
INTERVAL_SECONDS_MIN = 0.05


class Liveness:
    """When the store last replied to a claim of a loop, and since when the loop owes the next claim."""

    __slots__ = ("last_claim", "owes_from")

    def __init__(self) -> None:
        self.last_claim: float | None = None
        self.owes_from = time.monotonic()

    def claimed(self) -> None:
        """Record the reply to a claim, with messages or without."""
        self.last_claim = self.owes_from = time.monotonic()

    def polled(self, seconds: float) -> None:
        """Record a poll that found no message: it counts as a claim, and none is owed for this time."""
        self.last_claim = time.monotonic()
        self.owes_none_for(seconds)

    def owes_none_for(self, seconds: float) -> None:
        """Record that no claim is owed for this time."""
        self.owes_from = time.monotonic() + seconds

    def owes_now(self) -> None:
        """Record that the next claim is owed from now on, unless one is owed already."""
        self.owes_from = min(self.owes_from, time.monotonic())

    def late_seconds(self, now: float) -> float:
        """Return for how long a claim has been owed."""
        return max(0.0, now - self.owes_from)


class PollTarget(Protocol):
    """A consumer that waits for work of its queue. Called on its event loop."""

    def polled(self, answer: PolledQueue, sent_at: float, answered_at: float) -> None:
        """Handle the store's answer for its queue: sent at a `lease_clock` time, answered at a monotonic time."""
        ...


class Candidate(Protocol):
    """A candidate for leader, which takes part in the election with the worker's polls while another leads."""

    role: str
    ttl_ms: int
    leading: bool
    by_polls: bool


class Electable(Protocol):
    """A part of a worker that may have to lead."""

    @property
    def candidate(self) -> Candidate: ...
    def update_election(self, elected: Elected) -> None:
        """Handle the result of an election. Called on its event loop."""
        ...


class PollEntry:
    """A waiting consumer, which is polled for at an interval until it is removed."""

    __slots__ = ("due", "idle", "seconds", "target")

    def __init__(self, target: PollTarget, idle: Idle, seconds: float) -> None:
        self.target = target
        self.idle = idle
        self.seconds = seconds
        self.due = time.monotonic() + seconds * random.uniform(1 - JITTER, 1)


class Poller:
    """The polling thread. `make_heartbeat` gets the worker's start by the store's clock, None at first."""

    def __init__(
        self,
        context: ClientContext,
        connected: Callable[[], Executor],
        make_heartbeat: Callable[[int | None], Heartbeat],
        *,
        window: float,
        on_request: Callable[[WorkerRequest], None] = lambda request: None,
    ) -> None:
        self._context = context
        self._connected = connected
        self._make_heartbeat = make_heartbeat
        #: Called once for each request of an operator, in the polling thread.
        self._on_request = on_request
        self._requested: Requested | None = None
        self._interval = heartbeat_interval(window)
        self._ttl_ms = round(self._interval * HEARTBEATS_PER_TTL * 1000)
        #: When the store last replied; the start counts, because it requires a reply.
        self.answered = time.monotonic()
        #: The error of the last poll, or None.
        self.error: Exception | None = None
        #: The part that takes part in the election with the polls; None again when that part stops.
        self.electable: Electable | None = None
        #: The role that the last election by a poll gave to this worker.
        self._elected_role: str | None = None
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
        #: Whether the worker has ended without waiting for this thread, so that the connection may be closed.
        self._abandoned = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start with a heartbeat."""
        self._own_polls = self._context.wakeups.listen_to_own_polls(self._context.worker)
        self._thread = threading.Thread(target=self._run, name="waypost-polls", daemon=True)
        self._thread.start()

    def heartbeat_now(self) -> None:
        """Send a heartbeat now."""
        with self._changed:
            self._heartbeat_due = 0.0
            self._changed.notify()

    def add(self, target: PollTarget, idle: Idle, seconds: float) -> None:
        """Poll a queue at this interval, first one interval from now, until it is removed."""
        entry = PollEntry(target, idle, seconds)
        with self._changed:
            self._entries[target] = entry
            # Consumers are added after each message: do not wake the thread for a poll that is due after its next one.
            if entry.due < self._sleeps_until:
                self._changed.notify()

    def remove(self, target: PollTarget) -> None:
        """Stop polling its queue."""
        with self._changed:
            self._entries.pop(target, None)

    def stop(self, timeout: float) -> None:
        """Unregister the worker and end. A call that hangs is abandoned; the worker's record then expires."""
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
            self._resign_late()
        self._resign_late()
        if self._name and not self._abandoned:
            try:
                self._connected().run(self._context.store.unregister(self._name))
            except Exception as error:
                log.debug("worker %s could not be unregistered: %s", self._name, error, extra={"event": "leave_failed"})

    def _resign_late(self) -> None:
        """Resign from a lead that a poll won after the candidate had stopped: another worker must lead at once."""
        role = self._elected_role
        if role is None or self.electable is not None or self._abandoned:
            return
        self._elected_role = None
        try:
            self._connected().run(self._context.store.resign(role, self._name))
        except Exception as error:
            log.debug("worker %s could not resign: %s", self._name, error, extra={"event": "resign_failed"})

    def _wait(self) -> tuple[list[PollEntry], bool] | None:
        """Wait for the next poll; return its queues and whether it has a heartbeat, or None at the end."""
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                self._sleeps_until = self.next_due()
                if self._sleeps_until <= now:
                    return self.take_due(now)
                self._changed.wait(self._sleeps_until - now)
            return None

    def next_due(self) -> float:
        """Return when the next poll is due."""
        return min([self._heartbeat_due, *(entry.due for entry in self._entries.values())])

    def take_due(self, now: float) -> tuple[list[PollEntry], bool]:
        """Return the queues of this poll, due now or soon, and whether it has a heartbeat."""
        heartbeats = self._heartbeat_due - now <= self._interval * TOGETHER
        # A heartbeat polls all queues: otherwise a recently added one would soon need a separate call.
        due = [one for one in self._entries.values() if heartbeats or one.due - now <= one.seconds * TOGETHER]
        for one in due:
            one.due = now + one.seconds * random.uniform(1 - JITTER, 1)
        if heartbeats:
            # At the start there is no queue to poll yet.
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
                repeat_to=self._context.worker if self._own_polls is not None else None,
            )
            answers: list[PolledQueue] = []
            elected: Elected | None = None
            requested: Requested | None = None
            at_ms = 0
            for answer in self._connected().run_many(calls):
                if isinstance(answer, Exception):
                    raise answer
                answers += answer.queues
                elected, at_ms = elected or answer.elected, max(at_ms, answer.at_ms)
                requested = requested or answer.requested
        except Exception as error:
            # Any error: a worker continues without heartbeats, and finds work when it is woken.
            self._failed(error, due, heartbeats)
            if heartbeats and due and not isinstance(error, StoreUnavailable | OutcomeUnknown):
                self._poll(due, heartbeats=False)  # a failed heartbeat must not prevent polls
            return
        self.answered = time.monotonic()
        self._context.session.time.learn(at_ms)
        if electable is not None and elected is not None:
            self._elected_role = electable.candidate.role if elected.leader == self._name else None
        if heartbeats:
            self.error = None
            if self._started_ms is None:
                # A request that the first heartbeat finds was for an earlier worker of the same name.
                self._started_ms, self._requested = at_ms, requested
            self._check_request(requested)
        elif isinstance(self.error, StoreUnavailable | OutcomeUnknown):
            self.error = None
        try:
            self._loop.call_soon_threadsafe(self._answer, due, answers, sent_at, self.answered, electable, elected)
        except RuntimeError:
            log.debug("the event loop is gone", extra={"event": "loop_gone"})

    def _check_request(self, requested: Requested | None) -> None:
        """Pass a new request on."""
        if requested is None or requested == self._requested:
            return
        self._requested = requested
        log.info(
            "worker %s was requested to %s",
            self._name,
            {"quiet": "claim no more", "stop": "stop"}.get(requested.request, requested.request),
            extra={"event": "worker_requested", "worker": self._name, "request": requested.request},
        )
        self._on_request(requested.request)

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
            # A consumer that has woken meanwhile has newer information.
            if self._entries.get(entry.target) is entry:
                entry.target.polled(answer, sent_at, answered_at)
        if electable is None or electable is not self.electable:
            return
        if elected is not None and not electable.candidate.leading:
            electable.update_election(elected)


def heartbeat_interval(window: float) -> float:
    """Return the interval of heartbeats: short enough to prove within the health window that the store replies."""
    return max(INTERVAL_SECONDS_MIN, min(HEARTBEAT_SECONDS, window / HEARTBEATS_PER_WINDOW))
