"""What the checker knows of messages, claims and queues: counted by itself, from what the store was asked and did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

#: Ends after which nothing more can happen to a message. A dead letter can be redriven.
FINAL = frozenset(("done", "dropped", "cancelled", "replaced", "trimmed"))
LIVE = frozenset(("ready", "delayed", "waiting", "leased"))
#: Stands before all messages that became ready in the usual way.
AT_HEAD = -1


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that was broken: when by true time, for which message, and what happened in one sentence."""

    rule: str
    at: float
    message_id: str | None
    sentence: str

    def __str__(self) -> str:
        return f"[{self.rule}] at {self.at:.3f} s: {self.sentence}"


@dataclass(slots=True)
class Claim:
    """One lease of one message: from the claim that gave it to what ended it."""

    queue: str
    message_id: str
    token: int
    who: str
    at: float
    step: int
    lease_ms: int | None
    #: Since when the store has meant it to end when: true time, and the end by the store's clock.
    ends: list[tuple[float, int]] = field(default_factory=list)
    nonces: set[bytes] = field(default_factory=set)
    #: When and how the store ended it.
    ended_at: float | None = None
    ended_how: str | None = None


@dataclass(slots=True)
class Entry:
    """A message."""

    id: str
    queue: str
    label: str
    key: str | None
    priority: int
    state: str
    #: When it may be claimed, by the store's clock; 0 if it has no time of its own.
    due_ms: int
    body: bytes
    #: How it was made: publish, forwarded, schedule.
    origin: str
    published_at: float
    token: int = 0
    deliveries: int = 0
    attempts: int = 0
    nonce: bytes = b""
    lease_end_ms: int | None = None
    lease_ms: int | None = None
    #: What made it claimable again after a claim.
    cause: str | None = None
    cancel_requested: bool = False
    position: int = 0
    ready_at: float = 0.0
    ended_at: float | None = None
    reason: str | None = None
    claim: Claim | None = None
    chain: str | None = None
    #: The chains that it was published to wait for.
    after: tuple[str, ...] = ()
    #: When it lapses by the store's clock; None: never. 0: not known, where only the journal is read.
    expires_ms: int | None = None

    def has_lapsed(self, now_ms: int) -> bool:
        """Whether it must not be handed out any more."""
        return bool(self.expires_ms) and (self.expires_ms or 0) <= now_ms and self.state != "leased"


@dataclass(slots=True)
class Policy:
    """The settings of a queue, as far as they matter here."""

    lease_ms: int | None = 60_000
    max_deliveries: int | None = 10
    max_pending: int | None = None
    max_running: int | None = None
    rate_count: int | None = None
    rate_per_ms: int | None = None

    def change(self, changes: dict[str, Any]) -> None:
        for name, value in changes.items():
            if hasattr(self, name):
                setattr(self, name, value)


@dataclass(slots=True)
class QueueRecords:
    """A queue."""

    name: str
    policy: Policy = field(default_factory=Policy)
    paused: bool = False
    entries: dict[str, Entry] = field(default_factory=dict)
    #: Messages that have not ended, by key.
    keys: dict[str, set[str]] = field(default_factory=dict)
    #: Keys that are taken for a while after their publish: by which message, until when.
    windows: dict[str, tuple[str, int]] = field(default_factory=dict)
    #: Counted as the store should.
    counts: Counter[str] = field(default_factory=Counter)
    by_state: dict[str, dict[str, Entry]] = field(default_factory=lambda: {state: {} for state in (*LIVE, "dead")})
    #: The store's times of the last claims, for the rate.
    claimed_ms: list[int] = field(default_factory=list)
    sequence: int = 0
    #: The state in which the message of a key was when the step under way replaced it.
    replaced: dict[str, str] = field(default_factory=dict)
    #: Fires by schedule key: instants.
    instants: dict[str, set[str]] = field(default_factory=dict)

    @property
    def pending(self) -> int:
        return sum(len(self.by_state[state]) for state in ("ready", "delayed", "waiting"))

    def move(self, entry: Entry, state: str) -> None:
        """Put a message into another state."""
        if entry.state == state:
            return
        self.by_state.get(entry.state, {}).pop(entry.id, None)
        if state in self.by_state:
            self.by_state[state][entry.id] = entry
        if entry.key is not None:
            holders = self.keys.setdefault(entry.key, set())
            if state in LIVE:
                holders.add(entry.id)
            else:
                holders.discard(entry.id)
                if not holders:
                    del self.keys[entry.key]
        entry.state = state
