"""Polling again soon: work can come so often that a sleep and a wake-up for each message would cost more.

A worker that polls again within milliseconds is not registered as a sleeper. Its claim says when it polls again, and
until then no worker is woken for a few messages: a busy queue sends no wake-ups, and claims take several messages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

#: Work of about the last so long decides.
MEMORY_SECONDS = 0.1
#: With so many messages in the time that one claim takes, a wake-up for each would be one too many.
BUSY_MESSAGES_PER_CLAIM = 0.25
#: How soon it polls again. Long enough for several messages to gather, too short for a delay to be noticed.
POLL_SOON_SECONDS_MIN, POLL_SOON_SECONDS_MAX = 0.002, 0.01
#: After that it sleeps, but polls again after so long, twice: a publish that woke no worker because one was to poll
#: soon may have been committed only after that poll. Longer commits are left to the safety poll.
LATE_COMMIT_POLL_SECONDS = (0.03, 0.2)
#: The store counts whole milliseconds, and a claim may be slower than the last ones were.
SPARE_MS = 2


class PollSoon:
    """Watches one consumer's claims, and decides after which of them it polls again soon."""

    def __init__(self, now: Callable[[], float] = time.monotonic, *, late_commits: bool = False) -> None:
        self._now = now
        self._late_commits = late_commits
        self._began = now()
        self._ended = self._began
        self._messages = 0.0
        self._claim_seconds = POLL_SOON_SECONDS_MIN / 2
        self._found = 0
        self._polls_soon = False
        self._late_commit_polls: list[float] = []
        #: What the next claim says to the store: when it polls again, 0: no longer, None: it never said so.
        self.poll_soon_ms: int | None = None

    @property
    def claim_seconds(self) -> float:
        """How long claims take lately."""
        return self._claim_seconds

    @property
    def seconds(self) -> float:
        """How soon it polls again."""
        return min(POLL_SOON_SECONDS_MAX, max(POLL_SOON_SECONDS_MIN, self._claim_seconds))

    def begin(self, may_sleep: bool) -> bool:
        """A claim begins: return whether another follows soon. Never after one that found nothing."""
        self._began = self._now()
        before = self._polls_soon
        self._polls_soon = may_sleep and self._found > 0 and self.is_busy
        if self._polls_soon:
            self.poll_soon_ms = math.ceil((self.seconds + self._claim_seconds) * 1000) + SPARE_MS
            self._late_commit_polls = list(LATE_COMMIT_POLL_SECONDS)
        else:
            self.poll_soon_ms = 0 if before else None
        return self._polls_soon

    def nap(self, seconds: float) -> float:
        """How long to sleep instead of so long."""
        return min(seconds, self._late_commit_polls.pop(0)) if self._late_commit_polls else seconds

    @property
    def is_busy(self) -> bool:
        """Whether messages come so often that the next is not worth a wake-up."""
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
        if found and self._late_commits:
            self._late_commit_polls = list(LATE_COMMIT_POLL_SECONDS)

    def _fade(self, now: float) -> None:
        self._messages *= math.exp((self._ended - now) / MEMORY_SECONDS)
        self._ended = now
