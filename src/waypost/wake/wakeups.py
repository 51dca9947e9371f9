"""The use of a channel by one client: its namespace, its sleepers, and its notifications."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from waypost.wake.port import ALL_SLEEPERS, Channel, Kind, Listening, OnNotification, State, Topic

if TYPE_CHECKING:
    import asyncio


class WakeEvent:
    """An event that stays set until `clear`, so that a wait that is about to begin misses no notification."""

    def __init__(self, name: str) -> None:
        #: The name of the sleeper whose notifications set it.
        self.name = name
        self.listening: Listening | None = None
        self._is_set = False
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    @property
    def working(self) -> bool:
        """Whether a notification can set it now."""
        return self.listening is not None and self.listening.working

    def set(self, notification: str = "") -> None:
        """End the wait, or the next one."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            try:
                loop.call_soon_threadsafe(_end, future)
            except RuntimeError:
                return  # the loop is closed, and with it the call that waited

    def clear(self) -> None:
        """Reset: only later notifications count."""
        with self._changed:
            self._is_set = False

    def wait(self, seconds: float) -> bool:
        """Wait in a thread; return whether it was set."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_set, seconds)

    async def wait_async(self, seconds: float) -> bool:
        """Wait on an event loop; return whether it was set."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._changed:
            if self._is_set:
                return True
            self._waiter = (loop, future)
        alarm = loop.call_later(seconds, _end, future)
        try:
            await future
        finally:
            alarm.cancel()
            with self._changed:
                self._waiter = None
        return self._is_set

    def close(self) -> None:
        """End its subscription."""
        if self.listening is not None:
            self.listening.close()


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


#: The mark of sleepers that listen to the store's channel: the store notifies them in the step that makes work ready.
BY_STORE = "@"
#: How long the close of a client waits until its last notifications are sent.
FLUSH_SECONDS = 0.5
#: The number of events kept for later calls on a queue.
WAKE_EVENTS_KEPT = 16
#: How many worker loops of a client may be in a blocking wait, each on its own connection. The others receive
#: notifications over the connection that the whole process shares.
BLOCKING_WAITS_MAX = 8


def hash_key(key: str) -> str:
    """Return the notification for a key: any text may be a key, and a notification is short."""
    from hashlib import sha256  # few programs need it

    return "=" + sha256(key.encode()).hexdigest()[:32]


class Wakeups:
    """Sends and receives the notifications of one client. `by_store`: the store itself notifies sleepers of work.

    `late_commits`: commits of the store can become visible out of order, and workers that fell asleep in between are
    not notified; so they poll once more soon after they had work. `repeats_polls`: the store sends each poll of a
    worker back to it over the channel.
    """

    def __init__(
        self,
        channel: Channel | None,
        namespace: str,
        *,
        by_store: bool = False,
        late_commits: bool = False,
        repeats_polls: bool = False,
    ) -> None:
        #: None: there is no channel, and all workers poll.
        self.channel = channel
        self.namespace = namespace
        self.late_commits = late_commits
        self._by_store = by_store
        self._repeats_polls = repeats_polls
        self._blocking_waits_left = BLOCKING_WAITS_MAX if by_store else 0
        self._wake_events: dict[tuple[str, bool], list[WakeEvent]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def kind(self) -> str:
        """The kind of channel, `poll` if there is none."""
        return "poll" if self.channel is None else self.channel.kind

    @property
    def state(self) -> State:
        """The state of the channel, `idle` if there is none."""
        return "idle" if self.channel is None else self.channel.state

    @property
    def degraded(self) -> bool:
        """Whether notifications do not reach a listener: work is found by polling, and starts later than it could."""
        return self.state in ("broken", "starting")

    # ---- sending -----------------------------------------------------------------------------------------

    def wake(self, woken: Mapping[str, Sequence[str]]) -> None:
        """Notify the sleepers that a store named, by queue, unless the store does so itself."""
        if self.channel is None:
            return
        for queue, names in woken.items():
            others = [name for name in names if not self._by_store or not name.startswith((BY_STORE, ALL_SLEEPERS))]
            if others:
                self.channel.send(Topic(self.namespace, "ready", queue), others)

    def notify(self, kind: Kind, queue: str, notifications: Sequence[str]) -> None:
        """Notify the listeners of another topic of a queue."""
        if self.channel is not None:
            self.channel.send(Topic(self.namespace, kind, queue), notifications)

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Wait until the last notifications are sent; return whether they are."""
        return self.channel is None or self.channel.flush(timeout)

    # ---- listening -----------------------------------------------------------------------------------------

    def sleeper(self, worker: str) -> str:
        """Return the name under which a worker's loop sleeps."""
        return BY_STORE + worker if self._by_store else worker

    def listen(self, kind: Kind, queue: str, name: str | None, on_notification: OnNotification) -> Listening | None:
        """Listen to a topic; return None if there is no channel."""
        if self.channel is None:
            return None
        return self.channel.listen(Topic(self.namespace, kind, queue), name, on_notification)

    def listen_to_own_polls(self, name: str) -> Listening | None:
        """Listen to polls that the store sends back to this name: proof that notifications arrive. Or return None."""
        if self.channel is None or not self._repeats_polls:
            return None
        return self.channel.listen(Topic(self.namespace, "poll", name), None, lambda notification: None)

    def reserve_blocking_wait(self) -> bool:
        """Return whether one more loop may use blocking waits, and count it. The store must wake sleepers itself."""
        with self._lock:
            self._blocking_waits_left -= (reserved := self._blocking_waits_left > 0)
            return reserved

    def release_blocking_wait(self) -> None:
        """Let another loop use blocking waits."""
        with self._lock:
            self._blocking_waits_left += 1

    def acquire_wake_event(self, worker: str, queue: str, *, for_an_end: bool = False) -> WakeEvent | None:
        """Return an event for one call that waits for messages of a queue, or for the end of one of them.

        The client that ends a message notifies those calls: the store itself notifies only sleepers.
        """
        if self.channel is None:
            return None
        with self._lock:
            kept = self._wake_events.setdefault((queue, for_an_end), [])
            if kept:
                return kept.pop()
        wake_event = WakeEvent(f"{worker if for_an_end else self.sleeper(worker)}#{next(self._numbers)}")
        wake_event.listening = self.listen("ready", queue, wake_event.name, wake_event.set)
        return wake_event

    def release_wake_event(self, queue: str, wake_event: WakeEvent, *, for_an_end: bool = False) -> None:
        """Keep the event of a call that has ended: the next call need not subscribe again."""
        with self._lock:
            kept = self._wake_events.setdefault((queue, for_an_end), [])
            if len(kept) < WAKE_EVENTS_KEPT:
                kept.append(wake_event)
                return
        wake_event.close()

    def close(self) -> None:
        """Stop listening. It may be used again."""
        with self._lock:
            wake_events = [wake_event for kept in self._wake_events.values() for wake_event in kept]
            self._wake_events.clear()
        for wake_event in wake_events:
            wake_event.close()


NO_WAKEUPS = Wakeups(None, "")
