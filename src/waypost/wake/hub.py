"""The listeners of one process on one channel, and the one thread and connection that they share.

A `Hub` keeps the listeners by topic and calls them. `ThreadHub` adds a thread, which is started with the first
listener and ends with the last. It keeps a `Transport`, the connection itself, alive: it checks whether the other side
still answers, and opens a new one when it does not. Listeners are notified to poll whenever notifications may have been
missed.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

from waypost.urls import redact_text
from waypost.wake.port import ALL_SLEEPERS, POLL_NOW, OnNotification, State, Topic
from waypost.wake.transport import ChannelUnusable, Transport

log = logging.getLogger("waypost")

#: A connection without traffic for this long is probed. Longer than the time between two polls of a worker, which are
#: sent back over it and prove that it works without a request.
PROBE_SECONDS = 20.0
#: After a failure it is retried, first soon, then with growing delays.
RETRY_FIRST_SECONDS = 0.05
RETRY_MAX_SECONDS = 5.0
#: A connection that carries no notifications (because of a pooler) is tried again after this time.
UNUSABLE_RETRY_SECONDS = 60.0
#: A client that only sends keeps the connection for this long after its last notification.
SENDER_SECONDS = 10.0
#: While a channel is down, no more notifications than this are kept: they would come too late to be of use.
OUTGOING_MAX = 1_000


class Listener:
    """One listener."""

    __slots__ = ("_hub", "name", "on_notification", "topic")

    def __init__(self, hub: Hub, topic: Topic, name: str | None, on_notification: OnNotification) -> None:
        self._hub = hub
        self.topic = topic
        self.name = name
        self.on_notification = on_notification

    @property
    def working(self) -> bool:
        return self._hub.carries(self.topic)

    def close(self) -> None:
        self._hub.remove(self)


class Hub:
    """The listeners of this process, and a channel within it: the one for stores in memory."""

    kind = "local"

    def __init__(self) -> None:
        self._listeners: dict[Topic, dict[str | None, list[Listener]]] = {}
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def state(self) -> State:
        return "working" if self._listeners else "idle"

    def carries(self, topic: Topic) -> bool:
        """Return whether notifications on this topic arrive now."""
        return True

    def send(self, topic: Topic, notifications: Sequence[str]) -> None:
        self.dispatch(topic, notifications)

    def listen(self, topic: Topic, name: str | None, on_notification: OnNotification) -> Listener:
        listener = Listener(self, topic, name, on_notification)
        with self._lock:
            self._listeners.setdefault(topic, {}).setdefault(name, []).append(listener)
            self._changed()
        return listener

    def remove(self, listener: Listener) -> None:
        """Remove a listener. Safe to call twice."""
        with self._lock:
            names = self._listeners.get(listener.topic, {})
            listeners = names.get(listener.name, [])
            if listener not in listeners:
                return
            listeners.remove(listener)
            if not listeners:
                del names[listener.name]
            if not names:
                del self._listeners[listener.topic]
            self._changed()

    def flush(self, timeout: float) -> bool:
        return True

    def stop(self) -> None:
        """Remove all listeners. A later `listen` starts the channel again."""
        with self._lock:
            self._listeners.clear()
            self._changed()

    def _changed(self) -> None:
        """A listener was added or removed. Called under the lock."""

    def dispatch(self, topic: Topic, notifications: Iterable[str]) -> None:
        """Call the listeners; an error of one does not keep the others from being called."""
        with self._lock:
            names = self._listeners.get(topic)
            if names is None:
                return
            chosen: list[tuple[Listener, str]] = []
            for notification in notifications:
                to_all = notification in (ALL_SLEEPERS, POLL_NOW)
                for listeners in list(names.values()) if to_all else (names.get(notification, ()), names.get(None, ())):
                    chosen += [(listener, notification) for listener in listeners]
        for listener, notification in chosen:
            try:
                listener.on_notification(notification)
            except Exception:
                log.exception("a listener failed", extra={"event": "wake_failed", "queue": topic.queue})

    def request_poll(self, topics: Iterable[Topic] | None = None) -> None:
        """Tell all listeners, or those of some topics, to poll: notifications may have been missed."""
        with self._lock:
            chosen = list(self._listeners if topics is None else topics)
        for topic in chosen:
            self.dispatch(topic, (POLL_NOW,))


class ThreadHub(Hub):
    """A hub over a connection."""

    def __init__(self, kind: str, make: Callable[[], Transport], description: str = "", *, url: object = None) -> None:
        super().__init__()
        #: Its secrets are removed from error texts of the driver.
        self._url = url
        self.kind = kind
        self._make = make
        self._description = description or kind
        self._live: set[Topic] = set()
        self._outgoing: list[tuple[Topic, Sequence[str]]] = []
        self._sending = False
        #: Set when a listener was added or removed, or there is something to send.
        self._is_new = False
        self._sent_at = float("-inf")
        self._transport: Transport | None = None
        self._thread: threading.Thread | None = None
        self._wake_event = threading.Event()
        self._drained = threading.Condition(self._lock)
        self._state: State = "idle"
        self._failure_logged = False

    @property
    def state(self) -> State:
        return self._state

    def carries(self, topic: Topic) -> bool:
        return topic in self._live

    def send(self, topic: Topic, notifications: Sequence[str]) -> None:
        with self._lock:
            if len(self._outgoing) < OUTGOING_MAX:
                self._outgoing.append((topic, notifications))
                self._changed()

    def flush(self, timeout: float) -> bool:
        with self._drained:
            return self._drained.wait_for(lambda: not self._outgoing and not self._sending, timeout)

    def stop(self) -> None:
        with self._lock:
            self._outgoing.clear()
            self._sent_at = float("-inf")
            super().stop()

    def _changed(self) -> None:
        if self._thread is None:
            if not self._listeners and not self._outgoing:
                return
            self._thread = threading.Thread(target=self._run, name=f"waypost-wake-{self.kind}", daemon=True)
            self._state = "starting"
            self._thread.start()
        self._is_new = True
        self._wake_event.set()
        if self._transport is not None:
            self._transport.interrupt()

    # ---- the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = RETRY_FIRST_SECONDS
        while not self._end_if_unused():
            transport: Transport | None = None
            try:
                transport = self._make()
                transport.open()
                with self._lock:
                    self._transport = transport
                pause = RETRY_FIRST_SECONDS
                self._serve(transport)
                return  # from here on another thread may be at work
            except Exception as error:
                self._mark_broken(error)
                seconds = (
                    UNUSABLE_RETRY_SECONDS if isinstance(error, ChannelUnusable) else pause * random.uniform(0.5, 1.0)
                )
            finally:
                if transport is not None:
                    self._close(transport)
            self._pause(seconds)
            pause = min(pause * 2, RETRY_MAX_SECONDS)

    def _close(self, transport: Transport) -> None:
        with self._lock:
            if self._transport is transport:
                self._transport = None
        try:
            transport.close()
        except Exception:
            log.debug("closing a wake-up channel failed", exc_info=True)

    def _pause(self, seconds: float) -> None:
        """Pause between two attempts, until the last listener is removed."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._wake_event.wait(left):
                self._wake_event.clear()
                with self._lock:
                    if not self._listeners:
                        return

    def _end_if_unused(self) -> bool:
        """Return whether the thread is no longer needed; another one may then be started at once."""
        with self._lock:
            if self._listeners or self._outgoing or time.monotonic() < self._sent_at + SENDER_SECONDS:
                return False
            self._thread, self._state, self._failure_logged = None, "idle", False
            self._live.clear()
            return True

    def _serve(self, transport: Transport) -> None:
        """Serve one connection. Returns when it is no longer needed, raises when it fails."""
        known: set[Topic] = set()
        first = True
        while True:
            with self._lock:
                self._is_new = False
                wanted = set(self._listeners)
                outgoing, self._outgoing = self._outgoing, []
                self._sending = bool(outgoing)
            new, gone = sorted(wanted - known), sorted(known - wanted)
            if new:
                transport.listen(new)
            if gone:
                transport.unlisten(gone)
                self._live.difference_update(gone)
            known = wanted
            self._live.update(new)
            if first:
                self._mark_working()
                first = False
            if new:
                # What was sent before the subscription was in force was missed.
                self.request_poll(new)
            self._send_all(transport, outgoing)
            if not wanted and self._end_if_unused():
                return
            self._receive(transport)

    def _receive(self, transport: Transport) -> None:
        """Pass on notifications until there is something else to do, or an unused sender's connection can be closed.

        The code between a notification and the next wait is kept short: the woken worker waits for this thread.
        """
        received_at = time.monotonic()
        # A connection that only sends is checked in time to be closed when it is unused.
        seconds = PROBE_SECONDS if self._listeners else min(PROBE_SECONDS, SENDER_SECONDS / 2)
        while not self._is_new:
            received = transport.wait(seconds)
            if received:
                for topic, notifications in received:
                    self.dispatch(topic, notifications)
                received_at = time.monotonic()
            elif time.monotonic() - received_at >= seconds:
                transport.probe()
                return

    def _send_all(self, transport: Transport, outgoing: list[tuple[Topic, Sequence[str]]]) -> None:
        for topic, notifications in outgoing:
            transport.send(topic, notifications)
        if outgoing:
            with self._drained:
                self._sending = False
                self._sent_at = time.monotonic()
                self._drained.notify_all()

    def _mark_working(self) -> None:
        self._state = "working"
        if self._failure_logged:
            log.info(
                "wake-ups over %s work again", self._description, extra={"event": "wake_healed", "channel": self.kind}
            )
        self._failure_logged = False

    def _mark_broken(self, error: Exception) -> None:
        with self._drained:
            self._state = "broken"
            self._live.clear()
            # A notification that is late is of no use.
            self._outgoing.clear()
            self._sending = False
            self._drained.notify_all()
        if not self._failure_logged:
            self._failure_logged = True
            log.warning(
                "wake-ups over %s do not work (%s): workers poll until they do",
                self._description,
                redact_text(str(error), self._url),
                extra={"event": "wake_broken", "channel": self.kind},
            )
        self.request_poll()


_hubs: WeakValueDictionary[tuple[int, str, object], Hub] = WeakValueDictionary()
_hubs_lock = threading.Lock()


def shared_hub(kind: str, place: object, make: Callable[[], Hub]) -> Hub:
    """The hub of this process for a channel: one for all clients and workers that name the same place."""
    with _hubs_lock:
        key = (os.getpid(), kind, place)
        hub = _hubs.get(key)
        if hub is None:
            hub = _hubs[key] = make()
        return hub
