"""What a consumer hears: wake-ups for its sleep, and that somebody wants one of its messages to stop."""

from __future__ import annotations

from collections.abc import Callable

from waypost.operations import receive
from waypost.operations.flow import ClientContext, drive_async
from waypost.store.port import AsyncExecutor
from waypost.wake.port import Listening


class Ears:
    """One consumer's part in the wake-ups of its client. `wake` and `stop` are called from any thread."""

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
        #: Whether the store has it in its memory of sleepers.
        self.asleep = False

    def open(self) -> None:
        """Begin to listen."""
        wakeups = self._context.wakeups
        self._ready = wakeups.listen("ready", self._queue, self._name, self._wake)
        self._held = wakeups.listen("held", self._queue, None, self._stop)

    @property
    def sleeper(self) -> str | None:
        """The name to fall asleep by, None while a wake-up that is sent now would not be heard."""
        return self._name if self._ready is not None and self._ready.working else None

    async def close(self, executor: AsyncExecutor) -> None:
        """Listen and sleep no longer, so that nobody is woken who has left."""
        for ear in (self._ready, self._held):
            if ear is not None:
                ear.close()
        self._ready = self._held = None
        if self.asleep:
            self.asleep = False
            await drive_async(executor, receive.unregister(self._context, self._queue, self._name))
