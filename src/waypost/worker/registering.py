"""Registering: one thread tells the store of the worker, whatever the event loop is doing.

At once when it starts, when its state changes and when it stops, otherwise every ten seconds: one small call for all of
its queues. A beat that fails harms nothing: another follows, and the store remembers the worker for three of them.
That beats are answered is also the proof that the store is there while a busy worker has nothing to ask it for.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from waypost.message import Health, WorkerState
from waypost.policy import BEAT_SECONDS, BEATS_PER_TTL
from waypost.release import VERSION
from waypost.store.port import Beat, Executor, ServedQueue, Store
from waypost.store.register import fitting
from waypost.worker.health import Served

log = logging.getLogger("waypost")

#: A beat may be late by half of its interval before a store that is there is taken for one that is not.
BEATS_PER_WINDOW = 1.5
#: After a failed beat the next one comes so much sooner: who looks after a fault should not have to wait.
SOONER = 5
INTERVAL_SECONDS_MIN = 0.05
#: So much of why a worker is not well travels with its record.
REASONS_MAX = 3
REASON_CHARACTERS_MAX = 200


def interval(window: float) -> float:
    """The time between two beats: often enough to prove within the health window that the store answers."""
    return max(INTERVAL_SECONDS_MIN, min(BEAT_SECONDS, window / BEATS_PER_WINDOW))


class Registrar:
    """The thread. `tell` makes the beat; it is given when the worker started by the store's clock, None at first."""

    def __init__(
        self, store: Store, connected: Callable[[], Executor], tell: Callable[[int | None], Beat], *, window: float
    ) -> None:
        self._store = store
        self._connected = connected
        self._tell = tell
        self._interval = interval(window)
        self._ttl_ms = round(self._interval * BEATS_PER_TTL * 1000)
        #: When the store last answered; a start counts, since it needs one.
        self.answered = time.monotonic()
        #: What the last beat failed with.
        self.error: Exception | None = None
        self._name = ""
        self._started_ms: int | None = None
        self._changed = threading.Condition()
        self._due = 0.0
        self._stopping = False
        #: Nobody waits any more, and the connection may be closed by now.
        self._abandoned = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to beat, at once."""
        self._thread = threading.Thread(target=self._loop, name="waypost-register", daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """There is something new to tell."""
        with self._changed:
            self._due = 0.0
            self._changed.notify()

    def stop(self, timeout: float) -> None:
        """Leave the register and end. A call that hangs is left behind; the store forgets the worker by itself."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout)
            self._abandoned = self._thread.is_alive()

    def _loop(self) -> None:
        while self._wait():
            self._beat()
        if self._name and not self._abandoned:
            try:
                self._connected().run(self._store.leave(self._name))
            except Exception as error:
                log.debug("worker %s could not say goodbye: %s", self._name, error, extra={"event": "leave_failed"})

    def _wait(self) -> bool:
        """Until the next beat is due; whether there is to be one."""
        with self._changed:
            while not self._stopping and (pause := self._due - time.monotonic()) > 0:
                self._changed.wait(pause)
            self._due = time.monotonic() + self._interval
            return not self._stopping

    def _beat(self) -> None:
        try:
            beat = self._tell(self._started_ms)
            self._name = beat.name
            at_ms = self._connected().run(self._store.beat(beat, self._ttl_ms))
        except Exception as error:
            # Whatever it is: a worker works whether or not anybody can see it.
            log.log(
                logging.WARNING if self.error is None else logging.DEBUG,
                "worker %s could not tell the store of itself (%s); trying again",
                self._name,
                error,
                extra={"event": "beat_failed", "worker": self._name},
            )
            self.error = error
            with self._changed:
                self._due = min(self._due, time.monotonic() + self._interval / SOONER)
        else:
            self.answered = time.monotonic()
            self.error = None
            if self._started_ms is None:
                self._started_ms = at_ms


def beat_of(
    name: str,
    consumers: Sequence[Served],
    state: WorkerState,
    health: Health,
    *,
    processes: int,
    started_ms: int | None,
) -> Beat:
    """What a worker has to tell of itself now."""
    now = time.monotonic()
    queues = tuple(
        ServedQueue(
            consumer.queue, consumer.handler.concurrency, consumer.in_flight, consumer.handled,
            None if (claim := consumer.pulse.last_claim) is None else max(0, round((now - claim) * 1000)),
        )
        for consumer in consumers
    )  # fmt: skip
    reasons = tuple(reason[:REASON_CHARACTERS_MAX] for reason in health.reasons[:REASONS_MAX])
    host, pid = socket.gethostname(), os.getpid()
    return fitting(Beat(name, host, pid, VERSION, state, health.status, reasons, processes, started_ms, queues))
