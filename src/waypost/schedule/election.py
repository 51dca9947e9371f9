"""Leader election by a lease in the store: one scheduler and one promoter lead, the others follow.

A leader renews its lease; a follower tries again when the lease of the leader ends.
"""

from __future__ import annotations

import logging
from typing import Literal

from waypost.operations.flow import ClientContext, Flow
from waypost.values import Elected

log = logging.getLogger("waypost")

Election = Literal["elected", "leading", "following"]


class Candidate:
    """The part of a scheduler or a promoter that stands for election, leads or follows.

    `by_polls`: while it follows, the polls of its worker stand for election, and `update` gets the result.
    """

    def __init__(self, context: ClientContext, role: str, *, name: str, ttl_ms: int, by_polls: bool = False) -> None:
        self.context = context
        self.role = role
        self.name = name
        self.ttl_ms = ttl_ms
        self.by_polls = by_polls
        self.leading = False
        self._is_new = False
        #: When to stand for election again, and when the lease of another leader ends, by the monotonic clock.
        self.elect_at = 0.0
        self.lease_end = 0.0

    def elect(self) -> Flow[Election]:
        """Stand for election, or renew the lease, if it is time; return the state."""
        if self.context.monotonic() >= self.elect_at:
            elected = yield from self.context.attempt(self.context.store.elect(self.role, self.name, self.ttl_ms))
            self.update(elected)
        is_new, self._is_new = self._is_new, False
        if not self.leading:
            return "following"
        return "elected" if is_new else "leading"

    def update(self, elected: Elected) -> None:
        """Take over the result of an election."""
        was, self.leading = self.leading, elected.leader == self.name
        self.lease_end = 0.0 if self.leading else self.context.monotonic() + elected.remaining_ms / 1000
        self._is_new = self._is_new or (self.leading and not was)
        # A leader renews in time; a follower tries again when the lease of the leader has ended.
        wait_ms = self.ttl_ms / 3 if self.leading else elected.remaining_ms + 1
        self.elect_at = self.context.monotonic() + wait_ms / 1000
        if self.by_polls and not self.leading:
            self.elect_at = float("inf")
        if self.leading != was:
            event, text = ("elected", "leads") if self.leading else ("lost", "no longer leads")
            fields = {"event": f"{self.role}_{event}", "token": elected.token}
            log.info("%s %s %s", self.role, self.name, text, extra=fields)

    def resign(self) -> Flow[None]:
        """Give up the lease: the next candidate leads at once."""
        if self.leading:
            self.leading = False
            yield from self.context.attempt(self.context.store.resign(self.role, self.name), budget=0)
