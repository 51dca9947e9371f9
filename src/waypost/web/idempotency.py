"""Idempotency keys: a write that is sent again with the same key gets the first answer and does not run again.

Answers are kept in this process, for a while, in a bounded number. After a restart, or with several processes behind
one address, a repeat can run again; the writes themselves are made so that this does little harm (a second pause
changes nothing, a second redrive finds the letters gone).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from msgspec import Struct

from waypost.web.documents import Done
from waypost.web.problems import Problem

KEPT_SECONDS = 3600.0
KEPT_MAX = 1_000
KEY_CHARACTERS_MAX = 128

Place = tuple[str, ...]


class Kept(Struct):
    """A write under a key: what was sent, and its answer once there is one."""

    request: bytes
    until: float
    answer: Done | Problem | None = None


class Answers:
    """The answers to writes that carried a key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[Place, Kept] = OrderedDict()

    async def once(self, key: str | None, place: Place, request: bytes, run: Callable[[], Awaitable[Done]]) -> Done:
        """Run a write, or return what it answered before under this key. `place` names user, write and target."""
        if key is None:
            return await run()
        if not 1 <= len(key) <= KEY_CHARACTERS_MAX or not key.isprintable():
            raise Problem(422, "invalid-key", f"an idempotency key has 1 to {KEY_CHARACTERS_MAX} printable characters")
        self._forget()
        whole = (*place, key)
        kept = self._kept.get(whole)
        if kept is not None:
            return self._repeated(kept, request)
        kept = self._kept[whole] = Kept(request, self._clock() + KEPT_SECONDS)
        try:
            kept.answer = await run()
        except Problem as problem:
            # What was refused before it ran may run once the reason is gone.
            if problem.status < 500:
                self._kept.pop(whole, None)
            else:
                kept.answer = problem
            raise
        except (Exception, asyncio.CancelledError):
            self._kept.pop(whole, None)
            raise
        return kept.answer

    def _repeated(self, kept: Kept, request: bytes) -> Done:
        if kept.request != request:
            raise Problem(422, "key-reused", "this idempotency key was used for another request: take a new one")
        if kept.answer is None:
            raise Problem(409, "still-running", "a write with this idempotency key still runs: ask again soon",
                          headers={"Retry-After": "1"})  # fmt: skip
        if isinstance(kept.answer, Problem):
            raise kept.answer
        return kept.answer

    def _forget(self) -> None:
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if oldest.until > now and len(self._kept) < KEPT_MAX:
                return
            self._kept.popitem(last=False)
