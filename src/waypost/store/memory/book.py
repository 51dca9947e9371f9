"""The book of a queue model: its records, counters and journal, the results it remembers and who sleeps."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from waypost.identity import Operation
from waypost.policy import (
    COVER_MS_MAX,
    COVERED_MAX,
    DEFAULT_POLICY,
    FAILURE_EVENTS,
    MINUTES_KEPT,
    REPLAY_MAX,
    SLEEPER_TTL_MS,
    STAMP_AHEAD_MS,
)
from waypost.store.port import SideEffects
from waypost.store.repeats import is_repeat
from waypost.values import MINUTE_COUNTERS, Event, EventName, MessageState, Stored, is_side_effect


@dataclass(slots=True)
class Record:
    """A message and all that is known of it."""

    id: str
    envelope: bytes
    key: str | None
    group: str | None
    priority: int
    published_ms: int
    ready_ms: int
    state: MessageState = "ready"
    #: Order within a priority: the queue's sequence, or before all of it after a reclaim or release.
    position: int = 0
    token: int = 0
    deliveries: int = 0
    attempts: int = 0
    nonce: bytes = b""
    worker: str | None = None
    claimed_ms: int | None = None
    lease_end_ms: int | None = None
    #: How long a renewal makes the lease: the queue's setting when it was claimed.
    lease_ms: int = 0
    cancel_requested: bool = False
    #: What made it claimable again, for the next claim to say.
    cause: str | None = None
    ended_ms: int | None = None
    reason: str | None = None
    error_type: str | None = None
    error: str | None = None
    chain: str | None = None
    #: The chains that it still waits for.
    blockers: tuple[str, ...] = ()

    def stored(self) -> Stored:
        leased = self.state == "leased"
        return Stored(
            self.id, self.state, self.key, self.group, self.priority, self.token, self.deliveries, self.attempts,
            self.published_ms, self.ready_ms, self.envelope,
            self.claimed_ms if leased else None, self.lease_end_ms if leased else None,
            self.worker if leased else None, self.cancel_requested,
            self.ended_ms, self.reason, self.error_type, self.error,
        )  # fmt: skip


def run_of(now: int, record: Record) -> dict[str, object]:
    """What every event that ends a lease says: who held it, and for how long."""
    return {"worker": record.worker, "run_ms": now - (record.claimed_ms or 0)}


#: Silent sessions that one step may forget.
SESSIONS_SWEPT = 2


@dataclass(slots=True)
class Replays:
    """The last results of one session, by operation number, each with the mark of its operation."""

    newest: int = 0
    until_ms: int = 0
    results: dict[int, tuple[bytes, object]] = field(default_factory=dict)


class Book:
    """Counts and notes. A queue model is a book that also moves messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Whether it is a queue: a claim of a name that is none registers its sleeper, and makes no queue.
        self.made = False
        #: When a queue of this name was last removed, by which operation, and how long that is remembered.
        self.removed_ms = 0
        self.removed_mark = b""
        self.removed_until = 0
        self.policy = DEFAULT_POLICY
        self.paused = False
        self.replays: dict[bytes, Replays] = {}
        self.sleepers: dict[str, int] = {}
        #: Until when the memory of sleepers can be trusted; after it everybody is woken once.
        self.sleepers_known_until = 0
        #: Who looks again soon, and until when that is: nobody need be woken for a few messages until then.
        self.covered: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.minutes: dict[int, Counter[str]] = {}
        self.journal: deque[Event] = deque()
        self.journal_first = 1
        self.journal_last = 0
        self.readers: dict[str, int] = {}
        #: What the step under way does besides its work.
        self.also = SideEffects()

    def count_up(self, now: int, name: str) -> None:
        self.counts[name] += 1
        if name in MINUTE_COUNTERS:
            minute = now // 60_000
            self.minutes.setdefault(minute, Counter())[name] += 1
            for old in [m for m in self.minutes if m <= minute - MINUTES_KEPT]:
                del self.minutes[old]

    # ---- the journal -------------------------------------------------------------------------------------

    def note(
        self, now: int, event: EventName, operation: Operation | None, record: Record | None, **details: Any
    ) -> None:
        """Append one event, in the same step as what it tells."""
        if record is not None and is_side_effect(event, details.get("cause"), leased=record.state == "leased"):
            self.also.add(self.name, event, record.id, record.token, details.get("reason") or details.get("cause"))
        level = self.policy.journal
        if level == "off" or (level == "failures" and event not in FAILURE_EVENTS):
            return
        if record is not None:
            details = {
                "message_id": record.id, "key": record.key, "group": record.group, "priority": record.priority,
                "token": record.token, "claims": record.token, "deliveries": record.deliveries,
                "attempts": record.attempts, "size": len(record.envelope), "chain_id": record.chain,
            } | details  # fmt: skip
        self.journal_last += 1
        details["operation_id"] = None if operation is None else str(operation)
        self.journal.append(Event(self.name, self.journal_last, now, event, **details))

    def cut_journal(self, now: int) -> None:
        """At the end of a step: keep the journal near its cap, read or not."""
        kept = self.journal_last - self.journal_first + 1
        if kept >= self.policy.journal_max + self.policy.journal_slack:
            self._trim_journal(now, self.journal_last - self.policy.journal_max + 1, hard=True)

    def _trim_journal(self, now: int, first: int, *, hard: bool) -> None:
        unread_from = min(self.readers.values(), default=first - 1) + 1
        before = self.journal_first
        while self.journal and self.journal[0].number < first:
            self.journal.popleft()
        self.journal_first = first
        if hard and unread_from < first:
            cut = max(before, unread_from)
            self.note(now, "trimmed", None, None, cause="hard_cap", reason=f"{cut}-{first - 1}", size=first - cut)

    def trim_journal(self, now: int, up_to: int) -> int:
        """Forget events up to a number, but none that a registered reader has not read. Returns the first kept."""
        read_to = min(self.readers.values(), default=self.journal_last)
        first = min(up_to, read_to, self.journal_last) + 1
        if first > self.journal_first:
            self._trim_journal(now, first, hard=False)
        return self.journal_first

    def reader(self, name: str, read_to: int | None) -> int:
        """Register a reader, or move it forward; where it stands."""
        position = self.readers.get(name, self.journal_first - 1)
        self.readers[name] = max(position, min(read_to, self.journal_last)) if read_to is not None else position
        return self.readers[name]

    # ---- operations, sleepers ----------------------------------------------------------------------------

    def replayed(self, now: int, operation: Operation, window_ms: int) -> object | None:
        """The first result of this operation, None if it is new; one that may be forgotten raises."""
        replays = self.replays.get(operation.session)
        known, newest = (None, 0) if replays is None else (replays.results.get(operation.number), replays.newest)
        mark = None if known is None else known[0]
        is_known = is_repeat(
            self.name, operation, now, window_ms=window_ms, known=mark, newest=newest, removed_ms=self.removed_ms
        )
        return known[1] if is_known and known is not None else None

    def remember(self, now: int, operation: Operation, result: object, window_ms: int) -> None:
        """Keep a result for longer than a repeat can come, and forget sessions that were silent for as long."""
        replays = self.replays.pop(operation.session, None) or Replays()
        self.replays[operation.session] = replays
        replays.newest = max(replays.newest, operation.number)
        replays.until_ms = now + window_ms + STAMP_AHEAD_MS
        replays.results[operation.number] = (operation.mark, result)
        replays.results.pop(operation.number - REPLAY_MAX, None)
        for session in list(islice(self.replays, SESSIONS_SWEPT)):
            if self.replays[session].until_ms < now:
                del self.replays[session]

    def wake(self, now: int, count: int) -> list[str]:
        """Take up to `count` sleepers out of the memory, the last to fall asleep first; `*` if the memory is gone."""
        if count == 0 or self.paused:
            return []
        if count <= COVERED_MAX and any(now < until <= now + COVER_MS_MAX for until in self.covered.values()):
            return []
        if self.sleepers_known_until <= now:
            self.sleepers.clear()
            self.sleepers_known_until = now + SLEEPER_TTL_MS
            return ["*"]
        asleep = sorted(((until, name) for name, until in self.sleepers.items() if until > now), reverse=True)
        names = [name for _, name in asleep[:count]]
        for name in names:
            del self.sleepers[name]
        return names
