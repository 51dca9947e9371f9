"""What travels: the values that cross every border of waypost.

Everything here is plain data, frozen and slotted, and imports nothing of ours. Times are integer milliseconds
by the store's clock (`_ms`); a duration ends in `_ms` too. What a client returns of these has datetimes and timedeltas
instead (`waypost.views`). Ids sort by the time the publisher made them, but the order of delivery is the store's own
sequence, never the id.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from msgspec import Struct, structs

PublishStatus = Literal["queued", "delayed", "duplicate", "replaced", "extended", "conflict"]
OutcomeName = Literal["done", "retry", "snooze", "dead", "drop", "release"]
SettleStatus = Literal["done", "retried", "snoozed", "dead", "dropped", "released", "cancelled", "replaced", "lost"]
ExtendStatus = Literal["ok", "lost", "cancel"]
CancelStatus = Literal["cancelled", "requested", "finished", "unknown"]
SaveStatus = Literal["saved", "conflict"]
FireStatus = Literal["fired", "skipped", "conflict", "early", "stale", "running"]
ObservedOutcome = Literal["success", "failure", "skipped", "unknown"]
MessageState = Literal["ready", "delayed", "waiting", "leased", "dead", "done"]
WorkerState = Literal["running", "quiet", "stopping"]
WorkerRequest = Literal["quiet", "stop"]
RescheduleStatus = Literal["moved", "due", "unknown"]
#: `unchanged`: it has this priority already, is running or waiting, or is in an ordered group, where none counts.
PriorityStatus = Literal["changed", "unchanged", "unknown"]
HealthStatus = Literal["green", "degraded", "red"]

NoticeKind = Literal["ended", "watch", "completed"]

#: Reasons of a dead letter that say a handler failed: the failure that ended it is one of its attempts.
FAILURE_REASONS: frozenset[str | None] = frozenset(("retries_exhausted", "retry_policy_failed"))

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
    "skipped",
]


#: After these events a message is not in its queue any more.
FINAL_EVENTS = frozenset(("done", "dropped", "cancelled", "replaced", "dead_trimmed"))


def chain_id(queue: str, message_id: str) -> str:
    """The id of the chain that a message begins; it also names any message of one."""
    return f"{queue}/{message_id}"


def split_chain_id(chain: str) -> tuple[str, str]:
    """The queue and the id in a chain id."""
    queue, _, message_id = chain.rpartition("/")
    return queue, message_id


class Published(Struct, frozen=True, gc=False):
    """What became of one publish: the id of the message that now stands for it, and what happened.

    `duplicate` carries the id of the message that holds the key. `replaced` carries the id of the new message,
    `extended` that of the message whose due time moved. `conflict` never reaches a caller of the clients: with
    `on_conflict="error"` they raise `KeyInUse`.
    """

    id: str
    status: PublishStatus
    #: The queue it went to, so that this is all that `wait_result` and `wait_chain` need.
    queue: str = ""

    @property
    def chain_id(self) -> str:
        """The id of the chain that it began, if it was published with `chain=True`."""
        return chain_id(self.queue, self.id)


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
    #: The chain that it belongs to.
    chain: str | None = None


class SideEffect(Struct, frozen=True, gc=False, array_like=True):
    """A change of state that a step made besides what it was called for: it is part of the step's answer.

    A lease that ended (`expired`, or `cancelled` and `replaced` where that was to happen next), a message that was
    buried, dropped, replaced or promoted, a dead letter that was trimmed. An answer names at most `SIDE_EFFECTS_MAX`
    messages of each event; one without an id stands for the others, as many as `count` says.
    """

    queue: str
    event: EventName
    id: str | None
    #: Of the last claim of the message, 0 if it was never claimed. None where it stands for several.
    token: int | None
    #: Why, as in the journal: its reason, or else its cause.
    reason: str | None
    count: int = 1


SIDE_EVENTS = frozenset(("expired", "promoted", "dead_trimmed", "dead", "dropped", "cancelled", "replaced"))


def is_side_effect(event: str, cause: str | None, *, leased: bool) -> bool:
    """Whether a journalled change of a message is one that the step was not called for. `leased`: it was until then."""
    if event not in SIDE_EVENTS:
        return False
    match event:
        case "expired":
            return True
        case "promoted":
            return cause != "mended"
        case "dead_trimmed":
            return cause not in ("purge", "edited")
        case "dead":
            return not leased
    return cause in ("overload", "expired", "publish", "parked", "lapsed")


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
    #: How long leases of this queue are now. A worker that polls at least that often sees each of them before it ends.
    lease_ms: int | None = None
    #: There may be more: the next message would have made the answer too long, or this is the answer to a repeat.
    more: bool = False
    #: When the call that was answered was sent, by `lease_clock`; the client says so, not the store.
    sent_at: float = 0.0
    #: Messages that this claim met whose records are damaged: it set them aside, and `check` lists and mends them.
    damaged: tuple[str, ...] = ()
    #: What else the claim did, and the clients to wake for it by queue: those that wait for the end of a message.
    also: tuple[SideEffect, ...] = ()
    wake: dict[str, list[str]] = {}
    #: The queue takes turns between groups: a worker claims no more than it can start, so that turns and limits hold.
    grouped: bool = False


class PolledQueue(Struct, frozen=True, gc=False):
    """The result of a poll for one queue, for a worker that is idle there."""

    #: Whether a claim may bring something, or is needed to register the sleeper again.
    needs_claim: bool
    #: Milliseconds by the store's clock until the next timer, or the rate of a group allows its next message; and until
    #: the next lease end. None: there is none, or the queue is paused.
    next_due_ms: int | None
    next_lease_ms: int | None
    #: How long leases of this queue are now.
    lease_ms: int | None
    #: Whether the sleeper is still in its blocking wait: the claim behind that has not begun.
    blocked: bool = False


class Polled(Struct, frozen=True):
    """The reply to a poll: the queues in the order in which they were named, and who leads if that was asked."""

    queues: list[PolledQueue]
    #: The store's time.
    at_ms: int
    elected: Elected | None = None
    #: What was requested of the worker whose heartbeat the poll carried, until it unregisters.
    requested: Requested | None = None


class Requested(Struct, frozen=True, gc=False):
    """What was requested of a worker, and when. One from before the worker's start was for an earlier worker."""

    request: WorkerRequest
    at_ms: int


class Continuation(Struct, frozen=True, gc=False):
    """A message that a settle sends on, in the same atomic step. `id` is derived from its source."""

    id: str
    queue: str
    envelope: bytes
    key: str | None = None
    delay_ms: int = 0
    priority: int = 5
    group: str | None = None
    #: The chain that it belongs to, that of the message which sends it on.
    chain: str | None = None
    #: What the journal keeps of it at level `full` in place of the envelope.
    journal_copy: bytes | None = None
    #: The message itself once more (`reschedule`): it has passed publish middleware before.
    again: bool = False
    #: When it lapses, as in `Draft`: a moment, or if negative, so long after the settle. 0: never.
    expires_ms: int = 0


#: Stands in an `error` between the text of an error and its traceback; neither contains it.
TRACEBACK_MARK = "\x1e"


def split_error(error: str | None) -> tuple[str | None, str | None]:
    """Return the text and the traceback of an error as a store keeps it."""
    if error is None:
        return None, None
    text, _, traceback = error.partition(TRACEBACK_MARK)
    return text, traceback or None


class Settlement(Struct, frozen=True, gc=False):
    """How one delivery ended. `after_ms` belongs to retry and snooze, `reason` and the error to dead and retry.

    `error` is the text of the error and may have its traceback behind it (`split_error`); so it is kept.
    """

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
    #: With the traceback behind its text: `split_error`.
    error: str | None = None
    #: When it lapses unless it is claimed before; None of one that does not, and of dead and done ones.
    expires_ms: int | None = None


class Page(Struct, frozen=True):
    """Part of a listing. `cursor` is opaque; None means that there is no more."""

    messages: list[Stored]
    cursor: str | None


class EventRecord(Struct, frozen=True):
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
    #: The beginning of the error's text, of `retried` and `dead`.
    error: str | None = None


class StoredSchedule(Struct, frozen=True):
    """A schedule as it lies in the store. `version` changes with every save that changes something."""

    key: str
    version: str
    #: The rule and its message, packed: stores do not read it.
    spec: bytes
    paused: bool
    #: The instant that fires next and when it is due, later by its jitter; None: there is none left.
    next_ms: int | None
    due_ms: int | None
    fires: int = 0
    missed: int = 0
    #: The newest instant that fired.
    last_ms: int | None = None
    #: What schedulers remember of it (see `schedule.state`), packed: stores do not read it.
    state: bytes = b""


class ScheduleList(Struct, frozen=True):
    """The schedules of a queue in the order of their keys, and store time when they were read."""

    at_ms: int
    schedules: list[StoredSchedule]


class Saved(Struct, frozen=True):
    """What a save did: `saved`, or `conflict` if the schedule is not as the caller saw it."""

    status: SaveStatus
    #: What is there now; None if nothing is.
    schedule: StoredSchedule | None


class Fired(Struct, frozen=True):
    """What a fire did, and where the schedule stands now (None: it is gone).

    `fired`, or nothing: `conflict` (another client fired or changed it), `early` (not due by the store's clock),
    `stale` (the decision is too old), `running` (its run has not ended). `skipped`: its run has not ended, so nothing
    was published, and the schedule is advanced.
    """

    status: FireStatus
    at_ms: int
    schedule: StoredSchedule | None


class Elected(Struct, frozen=True):
    """Who leads in a role. `token` grows with every change of the leader."""

    leader: str
    token: int
    #: How long its lease still lasts.
    remaining_ms: int


class Promoted(Struct, frozen=True):
    """What a promotion did in one queue: timers that became ready, timers left, and how late the oldest was."""

    promoted: int
    depth: int
    oldest_lag_ms: int
    next_due_ms: int | None


class Watched(Struct, frozen=True):
    """The state of one message, for a client that waits for its end."""

    #: Where it is; None if the store has it no more.
    state: MessageState | None
    #: How it ended (done, dead, cancelled, dropped, replaced), if that is remembered.
    ended: EventName | None = None
    reason: str | None = None
    error_type: str | None = None
    error: str | None = None
    result: bytes | None = None


class FoundMessage(Struct, frozen=True):
    """Where a message was found by its id."""

    queue: str
    id: str
    #: Its state, if the queue has it; None if it is known only by how it ended or by the journal.
    state: MessageState | None
    #: How it ended, if that is known: done, dropped, cancelled, replaced, dead_trimmed.
    ended: EventName | None = None


class ChainState(Struct, frozen=True):
    """How far a chain has come, as its first queue knows it."""

    #: False: no such chain was begun here, or it is forgotten.
    known: bool
    #: Messages of it that have not ended.
    open: int = 0
    #: The message whose end broke the chain (`queue/id`), and how: a reason of dead letters, or another end.
    failed: tuple[str, str] | None = None
    #: The message that ended last (`queue/id`): its result is the chain's.
    last: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the result of a wait is final."""
        return self.known and (self.failed is not None or self.open == 0)


class Links(Struct, frozen=True):
    """What a message has to do with chains, as its queue knows it. Chains and messages are named as `queue/id`.

    Of each kind at most `LINKS_MAX` are listed.
    """

    #: The chain that it belongs to; None if it belongs to none, or has left its queue.
    chain: str | None = None
    #: The chains that it waits for.
    blockers: tuple[str, ...] = ()
    #: The chain that it began.
    begun: ChainState = ChainState(False)
    #: Messages of that chain that have not ended, and messages that wait for its end.
    members: tuple[str, ...] = ()
    watchers: tuple[str, ...] = ()


class Notice(Struct, frozen=True):
    """A notice about a chain on its way to another queue. It may arrive more than once.

    ended      to the chain's first queue: `member` has ended, and sent on `begun`; `failed` if it did not end well
    watch      to the chain's first queue: `member` waits for this chain
    completed  to the queue of a message that waits: this chain ended, well or as `failed` says
    """

    #: The same for each sending of it.
    id: str
    kind: NoticeKind
    queue: str
    chain: str
    #: A message as `queue/id`.
    member: str
    begun: tuple[str, ...] = ()
    failed: str | None = None


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
    #: Of those running, handlers in threads whose lease has ended: others may handle their messages by now.
    past_lease: int = 0
    #: Messages that were settled since the worker started: as done, to be tried again, as dead letters.
    done: int = 0
    retried: int = 0
    dead: int = 0

    @property
    def complete(self) -> bool:
        """Whether nothing is left that this object began."""
        return not (self.running or self.publishing or self.unsettled)

    def __str__(self) -> str:
        parts = [f"{self.done:,} done"]
        for count, text in (
            (self.dead, "dead"), (self.retried, "retried"), (self.released, "released"), (self.cancelled, "cancelled"),
            (self.running, "still running: delivered again when their leases end"),
            (self.unsettled, "not settled: delivered again when their leases end"),
        ):  # fmt: skip
            if count:
                parts.append(f"{count:,} {text}")
        return ", ".join(parts)

    def __add__(self, other: Drained) -> Drained:
        mine, theirs = structs.astuple(self), structs.astuple(other)
        return Drained(*(one + another for one, another in zip(mine, theirs, strict=True)))


class EventPage(Struct, frozen=True):
    """A run of events. `last` is the offset to go on from; `first_kept` is the oldest event still there."""

    events: list[EventRecord]
    last: int
    first_kept: int
    newest: int


class TracePage(Struct, frozen=True):
    """Part of one message's history. Stores with an index answer in one page; `cursor` None ends it."""

    events: list[EventRecord]
    cursor: str | None


class Redriven(Struct, frozen=True):
    """What a redrive did: ids that are ready again, and ids left dead because their key was taken meanwhile."""

    moved: list[str]
    duplicates: list[str]
    #: More dead letters match than the call's bound.
    more: bool
    #: Where one call of a store stopped reading, to go on from. A client goes on by itself and returns None.
    cursor: str | None = None


class Purged(Struct, frozen=True):
    """How many messages a purge removed, and whether more match than the call's bound."""

    removed: int
    more: bool


class Removal(Struct, frozen=True):
    """What a store answers to a removal: whether there was a queue, and what is left in it, which keeps it."""

    existed: bool
    left: dict[str, int] = {}
    #: Not done yet: only a part of the journal was removed. Call again.
    more: bool = False
    #: The answer to a repeat: it was removed before, and there is a new queue of its name.
    made_again: bool = False


class WorkerQueueRecord(Struct, frozen=True):
    """A queue as one worker serves it. `handled` counts handler calls since the worker started."""

    name: str
    concurrency: int
    in_flight: int
    handled: int
    #: When the store last answered a claim of this worker here, with messages or with none.
    last_claim_ms: int | None


class DeadFilter(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which messages are meant; what is None does not matter. A filter of a later release that is not known here is
    refused: without it more messages would be meant.

    `error` is the line of the error that says most. Empty text as `error_type` or `error`: letters that have none.
    """

    reason: str | None = None
    error_type: str | None = None
    error: str | None = None
    group: str | None = None
    key_prefix: str | None = None
    type_name: str | None = None
    #: Those that died before and not before, by the store's clock.
    before_ms: int | None = None
    after_ms: int | None = None
    #: A header: NAME=VALUE, or NAME for any value.
    header: str | None = None
    #: Those that were published before and not before, by the store's clock.
    published_before_ms: int | None = None
    published_after_ms: int | None = None


class Counted(Struct, frozen=True):
    """How many messages a filter means: `count` of the `searched` that were read, of `total` in that state."""

    count: int
    searched: int
    total: int


class SharedRecord(Struct, frozen=True):
    """A small piece of data that the programs of one store share. `version` grows with each save."""

    name: str
    data: bytes
    version: int
    created_ms: int
    #: When the store forgets it; None: never by itself.
    until_ms: int | None = None


class RecordSaved(Struct, frozen=True):
    """The answer to a save: whether the record is as wanted now, the record as it is, and the store's time."""

    saved: bool
    record: SharedRecord | None
    now_ms: int


class RecordPage(Struct, frozen=True):
    """A page of shared records, the newest first, and the store's time."""

    records: list[SharedRecord]
    cursor: str | None
    now_ms: int


class WorkerRecord(Struct, frozen=True):
    """A worker as it last reported to the store. `until_ms` is when the store forgets it unless it reports again."""

    name: str
    host: str
    pid: int
    version: str
    state: WorkerState
    status: HealthStatus
    #: Short reasons why its status is not green.
    reasons: list[str]
    #: How many processes run its handlers.
    processes: int
    started_ms: int
    seen_ms: int
    until_ms: int
    queues: list[WorkerQueueRecord]
    #: Queues that it serves too, and that its record had no room for.
    unlisted: int
    #: What was requested of it, and it has not done yet.
    requested: WorkerRequest | None = None


class QueueHealth(Struct, frozen=True):
    """How a worker stands with one queue. `last_claim_age` is how long ago the store answered a claim."""

    name: str
    concurrency: int
    running: int
    in_flight: int
    handled: int
    last_claim_age: timedelta | None


class Health(Struct, frozen=True):
    """Whether a worker consumes: `green`; `degraded`, it does, but not as it should; `red`, it does not."""

    status: HealthStatus
    reasons: list[str]
    queues: list[QueueHealth]


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
    #: Messages accepted although `max_pending` was reached: sent on by a settle, or redriven.
    over_cap: int = 0

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

#: The counters kept for each of the last 1,440 minutes, in the order of `MinuteRecord.counts`. Only append to them.
#: `wait_ms` is the sum over the claims of a minute, `run_ms` the sum over its `runs`: deliveries that ended by any
#: outcome but a release. A lease that expired is none, because nothing is known of when its handler ended.
MINUTE_COUNTERS = (
    "published",
    "duplicates",
    "claims",
    "done",
    "retried",
    "dead",
    "expired",
    "dropped",
    "redriven",
    "cancelled",
    "replaced",
    "runs",
    "wait_ms",
    "wait_ms_max",
    "run_ms",
    "run_ms_max",
)
#: Those of which the largest of a minute is kept, not the sum.
MINUTE_MAXIMA = frozenset(("wait_ms_max", "run_ms_max"))
#: How many of them the first release counted. In minutes that it counted the others are not known.
MINUTE_COUNTERS_FIRST = 8
#: A delivery that ended so is no run: see `MINUTE_COUNTERS`.
NOT_RUNS = frozenset(("expired", "release"))


class MinuteRecord(Struct, frozen=True):
    """Counters of one minute; `at_ms` is its start. Counters that are missing were not counted then."""

    at_ms: int
    counts: dict[str, int]


class ChangeRecord(Struct, frozen=True, array_like=True):
    """A change of a queue's settings: `configured`, `paused` or `resumed`. `text` has the settings and their values."""

    at_ms: int
    event: EventName
    text: str


class StatsRecord(Struct, frozen=True):
    """The state of a queue. Ages are in milliseconds by the store's clock."""

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
    minutes: list[MinuteRecord]
    #: Records that steps met, could not use and set aside: `check` lists and mends them.
    damaged: int = 0
    #: What was changed in the minutes that were read, oldest first, up to `CHANGES_KEPT`.
    changes: list[ChangeRecord] = []


#: What keeps a group from its turn, and all that limits it: at `max_pending` it takes no more messages.
TurnLimit = Literal["max_running", "rate"]
GroupLimit = Literal["max_running", "rate", "max_pending"]
#: The state of a message that holds its ordered group.
HolderState = Literal["delayed", "leased"]


class GroupRecord(Struct, frozen=True):
    """A group of a queue that takes turns. Those are listed that have unfinished messages, are paused or have settings
    of their own.
    """

    #: None: the messages without a group, which share one turn.
    group: str | None
    ready: int = 0
    #: How many are delayed or waiting.
    later: int = 0
    #: How many are leased.
    running: int = 0
    #: How long its next message has been ready.
    oldest_ms: int | None = None
    paused: bool = False
    #: The message that holds an ordered group: the first one that waits to be tried again, or else the leased one. A
    #: leased one is named while at most `CHUNK_MESSAGES_MAX` messages of the queue are leased.
    held_by: str | None = None
    held_state: HolderState | None = None
    #: The limit that keeps it from its turn, and when its rate allows the next message.
    limited_by: TurnLimit | None = None
    limited_until_ms: int | None = None
    #: Whether it is at its `max_pending`.
    full: bool = False
    weight: int = 1
    #: Its own limits; None: those of the queue.
    max_running: int | None = None
    rate_count: int | None = None
    rate_per_ms: int | None = None
    max_pending: int | None = None


class GroupPage(Struct, frozen=True):
    """Part of a listing of groups, by name; those without a group come first. `cursor` None ends it."""

    groups: list[GroupRecord]
    cursor: str | None


#: What `check` can find: a message that no claim can reach; a place that names a message that is not there; a record
#: that cannot be read; a state that contradicts its place; a key of no message; what is to be sent on and cannot be
#: read; counters that do not fit what is stored; a queue that is missing from the list; a group that has messages to
#: hand out and would never have its turn.
DamageKind = Literal[
    "stranded", "missing", "unreadable", "misplaced", "key", "outgoing", "counters", "unlisted", "group"
]


class Damage(Struct, frozen=True):
    """One damaged record that `check` found."""

    queue: str
    kind: DamageKind
    #: The message, or the key or name that it is about.
    id: str | None
    #: What is wrong, as text.
    found: str
    #: What was done about it; None if nothing was.
    mended: str | None = None


class CheckPage(Struct, frozen=True):
    """A bounded part of a check. `cursor` is None at its end."""

    examined: int
    damages: list[Damage]
    cursor: str | None


class CheckReport(Struct, frozen=True):
    """What a check of a queue found. `balance` is that of its ledger afterwards: 0 if each message is accounted for."""

    queue: str
    examined: int
    damages: list[Damage]
    #: None if its counters cannot be read.
    balance: int | None
