"""Leader election by a lease in the store: one scheduler and one promoter lead, the others follow.

A leader renews its lease; a follower asks again when the lease that it was told of ends.
"""

from __future__ import annotations

import logging
from typing import Literal

from waypost.operations.flow import ClientContext, Flow
from waypost.values import Elected

log = logging.getLogger("waypost")

Election = Literal["elected", "leading", "following"]


class Candidate:
    """Leads in a role, or waits for it. The share of a scheduler and a promoter.

    `by_polls`: while it follows, the polls of its worker ask for it, and `update` is told the answer.
    """

    def __init__(self, context: ClientContext, role: str, *, name: str, ttl_ms: int, by_polls: bool = False) -> None:
        self.context = context
        self.role = role
        self.name = name
        self.ttl_ms = ttl_ms
        self.by_polls = by_polls
        self.leading = False
        self._is_new = False
        #: When to ask the store again, by the monotonic clock.
        self.elect_at = 0.0

    def elect(self) -> Flow[Election]:
        """Lead, go on leading, or follow."""
        if self.context.monotonic() >= self.elect_at:
            elected = yield from self.context.attempt(self.context.store.elect(self.role, self.name, self.ttl_ms))
            self.update(elected)
        is_new, self._is_new = self._is_new, False
        if not self.leading:
            return "following"
        return "elected" if is_new else "leading"

    def update(self, elected: Elected) -> None:
        """Who leads, as the store said just now."""
        was, self.leading = self.leading, elected.leader == self.name
        self._is_new = self._is_new or (self.leading and not was)
        # A leader renews in time; who follows comes back when the lease that it was told of has ended.
        wait_ms = self.ttl_ms / 3 if self.leading else elected.remaining_ms + 1
        self.elect_at = self.context.monotonic() + wait_ms / 1000
        if self.by_polls and not self.leading:
            self.elect_at = float("inf")
        if self.leading != was:
            event, text = ("elected", "leads") if self.leading else ("lost", "leads no more")
            fields = {"event": f"{self.role}_{event}", "token": elected.token}
            log.info("%s %s %s", self.role, self.name, text, extra=fields)

    def resign(self) -> Flow[None]:
        """Hand over: whoever asks next leads at once."""
        if self.leading:
            self.leading = False
            yield from self.context.attempt(self.context.store.resign(self.role, self.name), budget=0)
