"""When work comes so often that to sleep and be woken for each piece would cost more than to look again soon.

A worker that lingers is not registered as a sleeper. It tells the store that it looks again within milliseconds, and
until then nobody is woken for what comes: no wake-ups are sent on a busy queue, and claims take several messages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

#: Work of about the last so long decides.
MEMORY_SECONDS = 0.1
#: With so many messages in the time that one claim takes, a wake-up for each would be one too many.
BUSY_MESSAGES_PER_CLAIM = 0.25
#: How soon it looks again. Long enough for several messages to gather, too short for anybody to mind.
LINGER_SECONDS_MIN, LINGER_SECONDS_MAX = 0.002, 0.01
#: After that it sleeps, but looks again after so long, twice: a publish that woke nobody because somebody lingered may
#: have been committed only after the last look. Longer commits are left to the safety poll.
ECHO_SECONDS = (0.03, 0.2)
#: The store counts whole milliseconds, and a claim may be slower than the last ones were.
SPARE_MS = 2


class Linger:
    """Watches one consumer's claims, and says of the next whether it lingers."""

    def __init__(self, now: Callable[[], float] = time.monotonic, *, echo: bool = False) -> None:
        self._now = now
        self._always_echo = echo
        self._began = now()
        self._ended = self._began
        self._messages = 0.0
        self._claim_seconds = LINGER_SECONDS_MIN / 2
        self._found = 0
        self._lingers = False
        self._echoes: list[float] = []
        #: What the next claim tells the store: when it looks again, 0: no longer, None: it never said so.
        self.cover_ms: int | None = None

    @property
    def claim_seconds(self) -> float:
        """How long claims take lately."""
        return self._claim_seconds

    @property
    def seconds(self) -> float:
        """How soon it looks again."""
        return min(LINGER_SECONDS_MAX, max(LINGER_SECONDS_MIN, self._claim_seconds))

    def begin(self, may_sleep: bool) -> bool:
        """A claim begins. Whether it lingers: never where nobody could be woken, nor after having found nothing."""
        self._began = self._now()
        before = self._lingers
        self._lingers = may_sleep and self._found > 0 and self.is_busy
        if self._lingers:
            self.cover_ms = math.ceil((self.seconds + self._claim_seconds) * 1000) + SPARE_MS
            self._echoes = list(ECHO_SECONDS)
        else:
            self.cover_ms = 0 if before else None
        return self._lingers

    def nap(self, seconds: float) -> float:
        """How long to sleep instead of so long."""
        return min(seconds, self._echoes.pop(0)) if self._echoes else seconds

    @property
    def is_busy(self) -> bool:
        """Whether messages come so often that the next is not worth to be woken for."""
        self._fade(self._now())
        return self._messages / MEMORY_SECONDS * self._claim_seconds >= BUSY_MESSAGES_PER_CLAIM

    def end(self, found: int, *, waited: bool = False) -> None:
        """A claim has ended, and brought so many messages. `waited`: it began in the store later than here."""
        now = self._now()
        if not waited:
            self._claim_seconds += (now - self._began - self._claim_seconds) / 8
        self._fade(now)
        self._messages += found
        self._found = found
        if found and self._always_echo:
            self._echoes = list(ECHO_SECONDS)

    def _fade(self, now: float) -> None:
        self._messages *= math.exp((self._ended - now) / MEMORY_SECONDS)
        self._ended = now
