"""The messages of a queue model by state: counted, listed, summed up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from waypost.policy import MINUTES_KEPT
from waypost.store.memory.book import Record
from waypost.store.memory.chains import Chains
from waypost.values import MINUTE_COUNTERS, REDELIVERY_CAUSES, Ledger, MessageState, Minute, Stats

#: The order in which each state is listed.
ORDERS: dict[MessageState, Callable[[Record], tuple[object, ...]]] = {
    "ready": lambda r: (-r.priority, r.position, r.id),
    "delayed": lambda r: (r.ready_ms, r.id),
    "waiting": lambda r: (r.id,),
    "leased": lambda r: (r.lease_end_ms or 0, r.id),
    "dead": lambda r: (r.ended_ms or 0, r.id),
}


class Shelves(Chains):
    """The part of a queue model that is looked at."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.completed: deque[Record] = deque()

    def _in(self, state: MessageState) -> list[Record]:
        return [r for r in self.messages.values() if r.state == state]

    def _ready(self) -> list[Record]:
        return self._in("ready")

    def count(self, state: MessageState) -> int:
        return sum(r.state == state for r in self.messages.values())

    def next_due_at(self) -> int | None:
        return min((r.ready_ms for r in self._in("delayed")), default=None)

    def next_due(self, now: int) -> int | None:
        due = self.next_due_at()
        return None if due is None else max(0, due - now)

    def next_lease(self, now: int) -> int | None:
        return min((max(0, (r.lease_end_ms or 0) - now) for r in self._in("leased")), default=None)

    def listing(self, state: MessageState) -> list[Record]:
        if state == "done":
            return list(self.completed)
        return sorted(self._in(state), key=ORDERS[state])

    def _oldest_ready(self, now: int) -> int | None:
        """The longest wait among the messages that stand first: of each priority, reclaimed ones apart."""
        heads: dict[tuple[int, bool], Record] = {}
        for record in self.listing("ready"):
            heads.setdefault((record.priority, record.position < 0), record)
        return max((now - record.ready_ms for record in heads.values()), default=None)

    def ledger(self) -> Ledger:
        c = self.counts
        return Ledger(
            c["published"], c["redriven"],
            self.count("ready"), self.count("delayed"), self.count("waiting"), self.count("leased"),
            c["done"], c["dead"], c["dropped"], c["cancelled"], c["replaced"], self.count("dead"),
            c["claims"], c["first_claims"], {cause: c[f"again_{cause}"] for cause in REDELIVERY_CAUSES},
            c["expired"], c["released"], c["retried"], c["snoozed"], c["duplicates"], c["transferred"],
            c["over_cap"],
        )  # fmt: skip

    def stats(self, now: int, minutes: int) -> Stats:
        first = now // 60_000 - min(minutes, MINUTES_KEPT) + 1
        return Stats(
            self.name, now, self.ledger(), self.paused,
            self._oldest_ready(now),
            max((now - (r.claimed_ms or 0) for r in self._in("leased")), default=None),
            self.next_due(now), self.next_lease(now),
            sum(until > now for until in self.sleepers.values()),
            self.journal_first, self.journal_last, dict(self.readers),
            [
                Minute(minute * 60_000, {name: counts[name] for name in MINUTE_COUNTERS})
                for minute, counts in sorted(self.minutes.items())
                if minute >= first
            ],
        )  # fmt: skip
