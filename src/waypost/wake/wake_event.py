"""What a call that waits for a message sleeps on: rung from any thread, waited for in either colour."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from waypost.wake.port import Listening


class WakeEvent:
    """Rings stay until `clear`, so that none is missed by somebody who is about to wait."""

    def __init__(self, name: str) -> None:
        #: The sleeper that rings it.
        self.name = name
        self.listening: Listening | None = None
        self._is_set = False
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    @property
    def working(self) -> bool:
        """Whether somebody can ring it now."""
        return self.listening is not None and self.listening.working

    def set(self, word: str = "") -> None:
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
                return  # the loop is closed, and with it whoever waited

    def clear(self) -> None:
        """Begin anew: only rings from here on count."""
        with self._changed:
            self._is_set = False

    def wait(self, seconds: float) -> bool:
        """Wait in a thread; whether it rang."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_set, seconds)

    async def wait_async(self, seconds: float) -> bool:
        """Wait on an event loop; whether it rang."""
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
        """Nobody can ring it any more."""
        if self.listening is not None:
            self.listening.close()


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
