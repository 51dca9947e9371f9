"""The notifications of a consumer: that there may be work, and that one of its messages is to be cancelled."""

from __future__ import annotations

from collections.abc import Callable

from waypost.operations import receive
from waypost.operations.flow import ClientContext, drive_async
from waypost.store.port import AsyncExecutor
from waypost.wake.port import Listening


class NotificationListener:
    """Listens for one consumer on the channel of its client. `wake` and `stop` are called from any thread."""

    def __init__(
        self, context: ClientContext, queue: str, *, wake: Callable[[str], None], stop: Callable[[str], None]
    ) -> None:
        self._context = context
        self._queue = queue
        self._wake = wake
        self._stop = stop
        self._name = context.wakeups.sleeper(context.worker)
        self._ready: Listening | None = None
        self._held: Listening | None = None
        #: Whether it is registered as a sleeper in the store.
        self.asleep = False

    def open(self) -> None:
        """Subscribe to both topics of the queue."""
        wakeups = self._context.wakeups
        self._ready = wakeups.listen("ready", self._queue, self._name, self._wake)
        self._held = wakeups.listen("held", self._queue, None, self._stop)

    @property
    def sleeper(self) -> str | None:
        """The name to register as a sleeper, None while a notification that is sent now would not arrive."""
        return self._name if self._ready is not None and self._ready.working else None

    async def close(self, executor: AsyncExecutor) -> None:
        """Unsubscribe and unregister, so that no message wakes a consumer that has stopped."""
        for listening in (self._ready, self._held):
            if listening is not None:
                listening.close()
        self._ready = self._held = None
        if self.asleep:
            self.asleep = False
            await drive_async(executor, receive.unregister(self._context, self._queue, self._name))
