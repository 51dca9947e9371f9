"""What travels: the values that cross every border of waypost.

Everything here is plain data, frozen and slotted, and imports nothing of ours. Times are integer milliseconds
by the store's clock (`_ms`); a duration ends in `_ms` too. Ids sort by the time the publisher made them, but the
order of delivery is the store's own sequence, never the id.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

PublishStatus = Literal["queued", "delayed", "duplicate", "replaced", "extended", "conflict"]
OutcomeName = Literal["done", "retry", "snooze", "dead", "drop", "release"]
SettleStatus = Literal["done", "retried", "snoozed", "dead", "dropped", "released", "cancelled", "replaced", "lost"]
ExtendStatus = Literal["ok", "lost", "cancel"]
CancelStatus = Literal["cancelled", "requested", "finished", "unknown"]
ObservedOutcome = Literal["success", "failure", "skipped", "unknown"]
MessageState = Literal["ready", "delayed", "waiting", "leased", "dead", "done"]

DeadReason = Literal[
    "max_deliveries",
    "retries_exhausted",
    "rejected",
    "undecodable",
    "retry_policy_failed",
    "undeliverable",
    "blocker_failed",
    "duplicate",
]

EventName = Literal[
    "published",
    "duplicate",
    "postponed",
    "promoted",
    "claimed",
    "done",
    "retried",
    "snoozed",
    "released",
    "expired",
    "dead",
    "dropped",
    "cancel_requested",
    "cancelled",
    "replaced",
    "redriven",
    "dead_trimmed",
    "configured",
    "paused",
    "resumed",
    "trimmed",
]


class Published(Struct, frozen=True, gc=False):
    """What became of one publish: the id of the message that now stands for it, and what happened.

    `duplicate` carries the id of the message that holds the key. `replaced` carries the id of the new message,
    `extended` that of the message whose due time moved. `conflict` never reaches a caller of the faces: with
    `on_conflict="error"` they raise `KeyTaken`.
    """

    id: str
    status: PublishStatus


class Lease(Struct, frozen=True, gc=False):
    """One message as a claim hands it out. `token` and `nonce` are the fence: a settle must show both."""

    id: str
    token: int
    nonce: bytes
    deliveries: int
    attempts: int
    priority: int
    key: str | None
    group: str | None
    published_ms: int
    ready_ms: int
    claimed_ms: int
    #: None: at most once, the message left the store with this claim and needs no settle.
    lease_end_ms: int | None
    envelope: bytes


class Claimed(Struct, frozen=True):
    """The reply to a claim: the leases, and all a worker needs to know to choose its next move."""

    leases: list[Lease]
    #: Milliseconds by the store's clock until the next timer, lease end or rate slot; None if there is none.
    next_due_ms: int | None
    next_lease_ms: int | None
    next_rate_ms: int | None
    paused: bool
    #: Continuations that were decided here but have not arrived at their queue yet.
    outgoing: int
    #: How long leases of this queue are now. Whoever looks at least that often sees each of them before it ends.
    lease_ms: int | None = None


class Continuation(Struct, frozen=True, gc=False):
    """A message that a settle sends on, in the same atomic step. `id` is derived from its source."""

    id: str
    queue: str
    envelope: bytes
    key: str | None = None
    delay_ms: int = 0
    priority: int = 5
    group: str | None = None


class Settlement(Struct, frozen=True, gc=False):
    """How one delivery ended. `after_ms` belongs to retry and snooze, `reason` and the error to dead and retry."""

    id: str
    token: int
    nonce: bytes
    outcome: OutcomeName = "done"
    after_ms: int = 0
    reason: str | None = None
    error_type: str | None = None
    error: str | None = None
    result: bytes | None = None
    result_ttl_ms: int = 0
    then: tuple[Continuation, ...] = ()

    @property
    def is_plain_done(self) -> bool:
        """Done, with nothing to keep and nothing to send on: the common case, which stores may treat in bulk."""
        return self.outcome == "done" and self.result is None and not self.then


class Stored(Struct, frozen=True):
    """A message as it lies in the store: what peek, list and dead letters show."""

    id: str
    state: MessageState
    key: str | None
    group: str | None
    priority: int
    token: int
    deliveries: int
    attempts: int
    published_ms: int
    #: When it may be claimed (ready, delayed, waiting), or could have been when it was.
    ready_ms: int
    envelope: bytes
    claimed_ms: int | None = None
    lease_end_ms: int | None = None
    worker: str | None = None
    cancel_requested: bool = False
    #: When it died or finished, and why.
    ended_ms: int | None = None
    reason: str | None = None
    error_type: str | None = None
    error: str | None = None


class Page(Struct, frozen=True):
    """Part of a listing. `cursor` is opaque; None says that there is no more."""

    messages: list[Stored]
    cursor: str | None


class Event(Struct, frozen=True):
    """One state change, as the journal keeps it. Fields that an event has no use for are None."""

    queue: str
    number: int
    at_ms: int
    event: EventName
    message_id: str | None = None
    key: str | None = None
    group: str | None = None
    priority: int | None = None
    token: int | None = None
    claims: int | None = None
    deliveries: int | None = None
    attempts: int | None = None
    worker: str | None = None
    due_ms: int | None = None
    cause: str | None = None
    reason: str | None = None
    error_type: str | None = None
    run_ms: int | None = None
    wait_ms: int | None = None
    size: int | None = None
    operation_id: str | None = None
    chain_id: str | None = None
    schedule: str | None = None
    #: The envelope, at journal level `full` only (redacted if the publisher has a redact hook).
    body: bytes | None = None


class Observed(Struct, frozen=True):
    """What `on_event` is told, as the journal would name it; `at_ms` is this process's own clock.

    `outcome` says how the step itself went: `success`, `failure`, `skipped` (there was nothing to do) or `unknown` (its
    reply was lost). That a handler failed is told by `handled`, and by the error of `retried` and `dead`.
    """

    event: str
    outcome: ObservedOutcome
    queue: str
    at_ms: int
    worker: str
    message_id: str | None = None
    key: str | None = None
    group: str | None = None
    priority: int | None = None
    token: int | None = None
    deliveries: int | None = None
    attempts: int | None = None
    #: How many messages a step concerned, where it is told once for all of them.
    count: int | None = None
    reason: str | None = None
    error_type: str | None = None
    error: str | None = None
    run_ms: int | None = None
    wait_ms: int | None = None


class Drained(Struct, frozen=True):
    """Where a client or a worker stands after `drain` or `stop`."""

    #: Handler calls that ended since the worker started.
    handled: int = 0
    #: Messages given back, without using a delivery, because they had not started or were cancelled.
    released: int = 0
    #: Handlers that were cancelled because the time was up.
    cancelled: int = 0
    #: Handlers, and blocks of `receive`, that go on. They keep their leases.
    running: int = 0
    #: Publishes under way.
    publishing: int = 0
    #: Deliveries that could not be settled or given back; they come back when their leases end.
    unsettled: int = 0

    @property
    def complete(self) -> bool:
        """Whether nothing is left that this object began."""
        return not (self.running or self.publishing or self.unsettled)

    def __add__(self, other: Drained) -> Drained:
        mine, theirs = structs.astuple(self), structs.astuple(other)
        return Drained(*(one + another for one, another in zip(mine, theirs, strict=True)))


class JournalPage(Struct, frozen=True):
    """A run of events. `last` is the offset to go on from; `first_kept` is the oldest event still there."""

    events: list[Event]
    last: int
    first_kept: int
    newest: int


class TracePage(Struct, frozen=True):
    """Part of one message's history. Stores with an index answer in one page; `cursor` None ends it."""

    events: list[Event]
    cursor: str | None


class Redriven(Struct, frozen=True):
    """What a redrive did: ids that are ready again, and ids left dead because their key was taken meanwhile."""

    moved: list[str]
    duplicates: list[str]
    #: More dead letters match than the call's bound.
    more: bool


class Purged(Struct, frozen=True):
    """How many messages a purge removed, and whether more match than the call's bound."""

    removed: int
    more: bool


class Ledger(Struct, frozen=True):
    """Where every message of a queue went. `balance` is 0, at any moment, on every store.

    published + redriven = ready + delayed + waiting + leased + done + dead + dropped + cancelled + replaced.
    The terms after `leased` are cumulative; `dead_kept` is what is in the dead letters now.
    """

    published: int
    redriven: int
    ready: int
    delayed: int
    waiting: int
    leased: int
    done: int
    dead: int
    dropped: int
    cancelled: int
    replaced: int
    dead_kept: int
    #: Claims, those of a message never claimed before, and every other one by what made it claimable again.
    claims: int
    first_claims: int
    redelivered: dict[str, int]
    #: State changes that send a message back, counted when they happen.
    expired: int
    released: int
    retried: int
    snoozed: int
    duplicates: int
    #: Continuations sent on by settles here.
    transferred: int

    @property
    def unexplained(self) -> int:
        """Redeliveries without a cause. Anything but 0 is a defect."""
        return self.claims - self.first_claims - sum(self.redelivered.values())

    @property
    def balance(self) -> int:
        """Published and redriven less everything they can have become. Anything but 0 is a defect."""
        current = self.ready + self.delayed + self.waiting + self.leased
        ended = self.done + self.dead + self.dropped + self.cancelled + self.replaced
        return self.published + self.redriven - current - ended


#: What can make a message claimable again after a claim.
REDELIVERY_CAUSES = ("expired", "released", "retried", "snoozed", "redriven")

#: The counters kept for each of the last 1,440 minutes, in the order of `Minute.counts`.
MINUTE_COUNTERS = (
    "published",
    "duplicates",
    "claims",
    "done",
    "retried",
    "dead",
    "expired",
    "dropped",
)


class Minute(Struct, frozen=True):
    """Counters of one minute; `at_ms` is its start."""

    at_ms: int
    counts: dict[str, int]


class Stats(Struct, frozen=True):
    """A queue at a glance. Ages are in milliseconds by the store's clock."""

    queue: str
    at_ms: int
    ledger: Ledger
    paused: bool
    #: How long the oldest ready message has been waiting, and how late the oldest due timer is.
    oldest_ready_ms: int | None
    oldest_leased_ms: int | None
    next_due_ms: int | None
    next_lease_ms: int | None
    sleepers: int
    journal_first: int
    journal_last: int
    journal_readers: dict[str, int]
    minutes: list[Minute]
