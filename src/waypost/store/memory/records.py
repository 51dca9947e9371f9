"""The records of a queue model: messages, keys, chains and operations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from waypost.policy import Unique
from waypost.values import ChainState, MessageState, Stored


@dataclass(slots=True)
class Record:
    """A message and its state."""

    id: str
    envelope: bytes
    key: str | None
    group: str | None
    priority: int
    published_ms: int
    ready_ms: int
    state: MessageState = "ready"
    #: Order within a priority: the queue's sequence, or before all of it after a reclaim or release. In an ordered
    #: group: when it first became ready; 0 before that.
    position: int = 0
    token: int = 0
    deliveries: int = 0
    attempts: int = 0
    nonce: bytes = b""
    worker: str | None = None
    claimed_ms: int | None = None
    lease_end_ms: int | None = None
    #: The length of a renewed lease: the queue's setting when it was claimed.
    lease_ms: int = 0
    cancel_requested: bool = False
    #: What made it claimable again, for the event of the next claim.
    cause: str | None = None
    ended_ms: int | None = None
    reason: str | None = None
    error_type: str | None = None
    error: str | None = None
    chain: str | None = None
    #: The chains that it still waits for.
    blockers: tuple[str, ...] = ()
    #: When it lapses, unless it is claimed before.
    expires_ms: int | None = None
    #: Whether it failed or was snoozed in an ordered group, and is delayed since: `groups.holding`.
    holds: bool = False
    #: How long it has its key.
    unique: Unique = "live"

    def ready_after_wait(self, now: int) -> int:
        """Return when it may be claimed if it need not wait any more: now, unless it was published with a delay.

        Without a delay `ready_ms` is the time of the publish, which may be ahead of a clock that was set back since.
        """
        return now if self.ready_ms == self.published_ms else max(self.ready_ms, now)

    def has_lapsed(self, now: int) -> bool:
        """Return whether it must not be handed out any more. A leased message does not lapse until it returns."""
        return self.can_lapse and (self.expires_ms or 0) <= now

    @property
    def can_lapse(self) -> bool:
        """Whether it lapses at its expiry if nothing else happens."""
        return self.expires_ms is not None and self.state in ("ready", "delayed", "waiting")

    def stored(self) -> Stored:
        leased = self.state == "leased"
        return Stored(
            self.id, self.state, self.key, self.group, self.priority, self.token, self.deliveries, self.attempts,
            self.published_ms, self.ready_ms, self.envelope,
            self.claimed_ms if leased else None, self.lease_end_ms if leased else None,
            self.worker if leased else None, self.cancel_requested,
            self.ended_ms, self.reason, self.error_type, self.error, self.expires_ms,
        )  # fmt: skip


def run_of(now: int, record: Record) -> dict[str, object]:
    """The fields of every event that ends a lease: its worker, and how long it ran."""
    return {"worker": record.worker, "run_ms": now - (record.claimed_ms or 0)}


@dataclass(slots=True)
class Holder:
    """The owner of a key: its message, and the successor that waits until that message ends."""

    owner: str
    parked: str | None = None


@dataclass(slots=True)
class ChainRecord:
    """One chain at its first queue."""

    #: It is kept while any of its messages is unfinished, and for some time after.
    until_ms: int
    open: Counter[str] = field(default_factory=Counter)
    failed: tuple[str, str] | None = None
    last: str | None = None
    #: Messages that wait for it, as `queue/id`.
    watchers: dict[str, None] = field(default_factory=dict)
    waiters: dict[str, int] = field(default_factory=dict)

    def state(self) -> ChainState:
        return ChainState(True, len(self.open), self.failed, self.last)


@dataclass(slots=True)
class Replays:
    """The last results of one session, by operation number, each with the mark of its operation."""

    newest: int = 0
    until_ms: int = 0
    results: dict[int, tuple[bytes, object]] = field(default_factory=dict)
