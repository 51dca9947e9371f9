"""Renewal: one thread keeps the leases of all consumers, whatever the event loop is doing.

Every third of a lease it renews everything that is held, all messages of a queue in one call (or as many calls as
chunks), on a connection of its own. The answers tell it what was lost and what somebody wants cancelled. Only code
that holds the interpreter's lock for a third of a lease can keep it from running.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from waypost.delivery import Message, error_text, error_type
from waypost.errors import WaypostError
from waypost.message import ExtendStatus
from waypost.operations.flow import Link, drive
from waypost.operations.receive import how, log_lease_lost
from waypost.policy import CHUNK_MESSAGES_MAX
from waypost.store.port import Executor, Hold

log = logging.getLogger("waypost")

#: Renewed so often in the life of a lease, one or two renewals may fail before it is lost.
RENEWALS_PER_LEASE = 3
#: With leases of a few milliseconds the thread would do nothing else.
INTERVAL_SECONDS_MIN = 0.01


class Holder(Protocol):
    """Whoever holds leases. All of this is called from the renewing thread."""

    queue: str
    #: The shortest lease that it was given lately, in seconds; None while it has none.
    lease_seconds: float | None

    def to_renew(self) -> list[Message[Any]]: ...
    def still_concerns(self, message: Message[Any]) -> bool: ...
    def on_lost(self, message: Message[Any]) -> None: ...
    def on_cancel(self, message: Message[Any]) -> None: ...


class Renewer:
    """The thread."""

    def __init__(self, link: Link, connect: Callable[[], Executor]) -> None:
        self._link = link
        self._connect = connect
        self.executor: Executor | None = None
        self._holders: list[Holder] = []
        self._due: dict[Holder, float] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, holders: list[Holder]) -> None:
        """Begin to renew. The connection is made here, so that a lease is never the first to find it missing."""
        self._holders = holders
        self.executor = self._connect()
        self._thread = threading.Thread(target=self._loop, name="waypost-renewals", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread. If a call hangs, it is left behind: the thread is a daemon."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout)
            if not self._thread.is_alive() and self.executor is not None:
                self.executor.close()

    def hurry(self, holder: Holder) -> None:
        """A holder was given a shorter lease than it had."""
        with self._changed:
            self._due.pop(holder, None)
            self._changed.notify()

    def renew_now(self, holder: Holder) -> None:
        """Somebody wants one of its messages cancelled: the answer to a renewal says which."""
        with self._changed:
            self._due[holder] = time.monotonic()
            self._changed.notify()

    def _loop(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                for holder in self._holders:
                    if holder.lease_seconds is not None and holder not in self._due:
                        self._due[holder] = now + interval(holder.lease_seconds)
                soonest = min(self._due.values(), default=None)
                if self._stopping:
                    return
                if soonest is None or soonest > now:
                    self._changed.wait(None if soonest is None else soonest - now)
                    continue
                due = [holder for holder, when in self._due.items() if when <= now]
                for holder in due:
                    self._due[holder] = now + interval(holder.lease_seconds or 60.0)
            for holder in due:
                try:
                    self._renew(holder)
                except Exception:
                    # Leases that end for want of a renewal are redelivered; a thread that ended would lose them all.
                    log.exception("renewal failed", extra={"event": "renewal_failed", "queue": holder.queue})

    def _renew(self, holder: Holder) -> None:
        messages = holder.to_renew()
        for start in range(0, len(messages), CHUNK_MESSAGES_MAX):
            chunk = messages[start : start + CHUNK_MESSAGES_MAX]
            try:
                statuses = self._extend(holder, chunk)
            except WaypostError as error:
                log.warning(
                    "the leases of %d messages of queue %s could not be renewed: %s",
                    len(chunk),
                    holder.queue,
                    error,
                    extra={"event": "renewal_failed", "queue": holder.queue, "count": len(chunk)},
                )
                self._link.tell(
                    "renewed", holder.queue, *how(error), count=len(chunk),
                    error_type=error_type(error), error=error_text(error),
                )  # fmt: skip
                continue
            self._link.tell("renewed", holder.queue, count=statuses.count("ok") + statuses.count("cancel"))
            for message, status in zip(chunk, statuses, strict=True):
                if status != "ok":
                    self._answer(holder, message, status)

    def _extend(self, holder: Holder, messages: list[Message[Any]]) -> list[ExtendStatus]:
        link, queue = self._link, holder.queue
        operation = link.lanes.begin(queue)
        try:
            holds = [Hold(message.id, message.token, message.lease.nonce) for message in messages]
            call = link.store.extend(queue, holds, operation)
            # Later than by the next renewal it is of no use.
            budget = min(link.retry_budget, interval(holder.lease_seconds or 60.0))
            assert self.executor is not None
            return drive(self.executor, link.attempt(call, budget=budget))
        finally:
            link.lanes.end(queue, operation)

    def _answer(self, holder: Holder, message: Message[Any], status: ExtendStatus) -> None:
        if not holder.still_concerns(message):
            return  # settled meanwhile, or about to be: that answer counts
        if status == "cancel":
            if not message.cancel_requested:
                message.cancel_requested = True
                holder.on_cancel(message)
        elif not message.lease_lost:
            # Told here, not on the event loop: a handler that blocks it can look at this too.
            message.lease_lost = True
            log_lease_lost(message, "extend")
            holder.on_lost(message)


def interval(lease_seconds: float) -> float:
    """The time between two renewals."""
    return max(INTERVAL_SECONDS_MIN, lease_seconds / RENEWALS_PER_LEASE)
