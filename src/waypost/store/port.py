"""The contract of a store: one verb, one atomic step.

    a message     publish  claim  settle  extend  cancel  reschedule  change_priority
    its result    result  watch  watch_chain
    chains        outgoing  forwarded  arrive  links
    reading       peek  stats  stats_many  trace  locate  holders  queues  policy  time
    a queue       configure  pause  resume  redrive  replace_dead  purge  promote  check  remove  unlist
    groups        groups  configure_group  skip_held
    the journal   journal  journal_reader  journal_forget  journal_trim
    schedules     save_schedule  remove_schedule  schedules  scheduled  schedules_changed  fire_schedule
                  trigger_schedule
    workers       poll  heartbeat  unregister  workers  request_worker  elect  resign
    shared data   save_record  records

A verb has the same name as a method of `Store`, as a Lua script (or as the first argument of a script that several
verbs share), as an SQL function, and as the `name` of its `Call`.

A `Store` only translates: each verb turns its arguments into a `Call`, without I/O. An `Executor` (or its
async sibling) runs calls on a connection. So sync and async share all logic. Verbs are
batch-first: one message is a batch of one. `operation` makes a repeated call return its first answer.

Callers observe the limits of `policy`: at most `CHUNK_MESSAGES_MAX` items per call, and no id and no key twice in one
publish. Every verb that can make messages claimable also returns the sleepers to wake, and in `also` the side effects
of its step: expired leases, and other messages that were moved to the dead letters, dropped or promoted.

`repeats.py` decides which operations are answered, run or refused. Each attempt of a claim has its own `nonce`
(new bytes unless given), which fences its leases; a repeat sets its own nonce on the leases that are still held.

A claim ends before the first message that would make its reply longer than `bytes_max`, and returns that there is more;
it takes at least one message. A claim that took all messages and could take more registers its `sleeper`. With
`poll_soon_ms` its worker polls again so soon that no sleeper is woken for a few messages until then; 0 ends that.

Queues with an order, `fair` or a limit per group take turns between groups: `memory/groups.py` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from waypost.errors import InvalidInput, QueueFull, StoreUnavailable
from waypost.identity import Operation
from waypost.policy import (
    CHUNK_MESSAGES_MAX,
    CLAIM_BYTES_MAX,
    GROUPS_KEPT_MAX,
    JOURNAL_ERROR_CHARACTERS_MAX,
    POLL_QUEUES_MAX,
    RECORDS_MAX,
    RECORDS_PAGE_MAX,
    SIDE_EFFECTS_MAX,
    OnConflict,
    PolicyRecord,
    Unique,
)
from waypost.values import (
    CancelStatus,
    ChainState,
    CheckPage,
    Claimed,
    Continuation,
    Elected,
    EventName,
    EventPage,
    ExtendStatus,
    Fired,
    FoundMessage,
    GroupPage,
    Links,
    MessageState,
    Notice,
    Page,
    Polled,
    PriorityStatus,
    Promoted,
    Published,
    Purged,
    RecordPage,
    RecordSaved,
    Redriven,
    Removal,
    RescheduleStatus,
    Saved,
    ScheduleList,
    Settlement,
    SettleStatus,
    SideEffect,
    StatsRecord,
    StoredSchedule,
    TracePage,
    Watched,
    WorkerRecord,
    WorkerRequest,
    split_error,
)

if TYPE_CHECKING:
    from waypost.store.bulk.reader import BulkConnection, BulkReader
    from waypost.store.checkup import Checkup
    from waypost.store.transactions import TransactionSupport

T = TypeVar("T")


class Call(Generic[T]):
    """One step for an executor of the same store. `name` is the verb, for logs and errors."""

    name: str


class Store(Protocol):
    """What differs between stores, and the verbs. See `memory/queue.py` for what each verb means."""

    #: For logs, errors and reports. Use `capabilities` instead of comparing it.
    kind: str
    namespace: str

    @property
    def place(self) -> object:
        """The same for two stores of a kind that keep the same messages."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def channel(self) -> NaturalChannel: ...
    @property
    def blocking_waits(self) -> BlockingWaits | None:
        """None: sleepers are woken by notifications alone."""
        ...

    @property
    def transactions(self) -> TransactionSupport | None:
        """None: messages are not in a database of the user, so they cannot be part of a transaction."""
        ...

    def bulk_reader(self, connection: BulkConnection) -> BulkReader | None:
        """A reader of whole queues and journals as Arrow batches; None if only this process can read them."""
        ...

    def checkup(self, executor: Executor) -> Checkup:
        """What `waypost doctor` checks in this store alone."""
        ...

    def connect(self, *, start_timeout: float) -> Executor: ...
    async def connect_async(self, *, start_timeout: float) -> AsyncExecutor: ...

    #: The store's time in milliseconds, for the stamps of operations.
    def time(self) -> Call[int]: ...

    # the path of a message
    def publish(self, queue: str, drafts: Sequence[Draft], operation: Operation) -> Call[Woken[list[Published]]]: ...
    def claim(
        self,
        queue: str,
        limit: int,
        operation: Operation,
        *,
        worker: str,
        sleeper: str | None = None,
        poll_soon_ms: int | None = None,
        replay: bool = False,
        bytes_max: int = CLAIM_BYTES_MAX,
        nonce: bytes | None = None,
    ) -> Call[Claimed]: ...
    # `next_claim`: the limit of the claim of this queue that follows the settle in the same `run_many`. That takes what
    # the settle makes claimable, so this many sleepers fewer are woken for it.
    def settle(
        self, queue: str, settlements: Sequence[Settlement], operation: Operation, *, next_claim: int = 0
    ) -> Call[Woken[list[SettleStatus]]]: ...
    def extend(self, queue: str, holds: Sequence[Hold], operation: Operation) -> Call[list[ExtendStatus]]: ...
    def cancel(
        self, queue: str, targets: Sequence[Target], operation: Operation
    ) -> Call[Woken[list[CancelStatus]]]: ...

    # another due time for timers, also for messages that wait for a retry; one that is due already stays as it is
    def reschedule(
        self,
        queue: str,
        targets: Sequence[Target],
        operation: Operation,
        *,
        delay_ms: int = 0,
        at_ms: int | None = None,
    ) -> Call[Woken[list[RescheduleStatus]]]: ...

    # another priority for ready and delayed messages; a ready one goes to the end of it
    def change_priority(
        self, queue: str, ids: Sequence[str], priority: int, operation: Operation
    ) -> Call[Woken[list[PriorityStatus]]]: ...

    # chains: continuations and notices that have not arrived yet (none in stores whose steps span queues)
    def outgoing(self, queue: str, limit: int) -> Call[list[Continuation | Notice]]: ...
    def forwarded(self, queue: str, ids: Sequence[str]) -> Call[None]: ...
    def arrive(self, queue: str, notices: Sequence[Notice]) -> Call[Woken[None]]: ...
    def links(self, queue: str, message_id: str) -> Call[Links]: ...

    # waiting: `waiter` is woken like a sleeper at a change, if it calls again within `WAITER_TTL_MS`
    def result(self, queue: str, message_id: str) -> Call[bytes | None]: ...
    def watch(self, queue: str, message_id: str, waiter: str | None) -> Call[Watched]: ...
    def watch_chain(self, queue: str, message_id: str, waiter: str | None) -> Call[ChainState]: ...

    # reading
    def peek(
        self,
        queue: str,
        state: MessageState,
        limit: int,
        *,
        cursor: str | None = None,
        id: str | None = None,
        key: str | None = None,
        group: str | None = None,
        reason: str | None = None,
    ) -> Call[Page]: ...
    # no call: the cursor at which `peek` begins with the dead letters that died at this time or later
    def dead_since(self, at_ms: int) -> str: ...
    def stats(self, queue: str, *, minutes: int = 0) -> Call[StatsRecord]: ...
    # The same for many queues, in their order. The calls run together, each for a part of them.
    def stats_many(self, queues: Sequence[str], *, minutes: int = 0) -> list[Call[list[StatsRecord]]]: ...
    def trace(self, queue: str, message_id: str, cursor: str | None = None) -> Call[TracePage]: ...
    # queue and id of the unfinished messages of a key: the one that has it, then its successor. The calls run together.
    def holders(self, queues: Sequence[str], key: str) -> list[Call[list[tuple[str, str]]]]: ...
    def queues(self) -> Call[list[str]]: ...

    # finding a message by its id: those of the queues that have it or remember its end; `in_journals`: those whose
    # journal may have an event of it, which `trace` decides. The calls run together, each for a part of the queues.
    def locate(
        self, queues: Sequence[str], message_id: str, *, in_journals: bool = False
    ) -> list[Call[list[FoundMessage]]]: ...

    # running a queue
    def redrive(
        self,
        queue: str,
        limit: int,
        operation: Operation,
        *,
        ids: Sequence[str] = (),
        reason: str | None = None,
        cursor: str | None = None,
    ) -> Call[Woken[Redriven]]: ...
    # `replace_dead`: publish a message in place of a dead letter, which is removed; None if there is no such letter. If
    # the publish stores nothing, because the key is in use, the letter stays.
    def replace_dead(
        self, queue: str, message_id: str, draft: Draft, operation: Operation
    ) -> Call[Woken[Published | None]]: ...
    # `ids`: only these, of dead letters.
    def purge(
        self, queue: str, state: MessageState, limit: int, operation: Operation, *, ids: Sequence[str] = ()
    ) -> Call[Woken[Purged]]: ...
    def configure(self, queue: str, changes: Mapping[str, Any]) -> Call[Woken[PolicyRecord]]: ...
    def policy(self, queue: str) -> Call[PolicyRecord]: ...
    def pause(self, queue: str) -> Call[bool]: ...
    def resume(self, queue: str) -> Call[Woken[bool]]: ...

    # the groups of a queue that takes turns between them; on another queue all three raise `not_grouped`.
    # `groups`: by name, or only this one. `configure_group`: changes of `GroupSettings`, pausing among them; whether
    # anything changed. `skip_held`: let the next message pass the one that holds the group; its id, None if none does.
    def groups(
        self, queue: str, limit: int, *, cursor: str | None = None, group: str | None = None
    ) -> Call[GroupPage]: ...
    def configure_group(self, queue: str, group: str, changes: Mapping[str, Any]) -> Call[Woken[bool]]: ...
    def skip_held(self, queue: str, group: str, operation: Operation) -> Call[Woken[str | None]]: ...

    # removing an empty queue: claims, settles and reads create no queue, the next publish or configure does.
    # `unlist`: calls that remove it from lists that are not part of the same step.
    def remove(self, queue: str, operation: Operation) -> Call[Removal]: ...
    def unlist(self, queue: str) -> list[Call[None]]: ...

    # finding damaged records, in bounded steps: start without a cursor, continue until there is none
    def check(self, queue: str, cursor: str | None, *, mend: bool = False) -> Call[CheckPage]: ...

    # idle workers: whether a claim of many queues may return something. The registrations of sleepers are renewed. The
    # calls run together: each returns the result for its part of `idle`, in order; the first has the heartbeat, and is
    # published on the store's own channel to the worker `repeat_to`: so that worker knows that wake-ups arrive.
    def poll(
        self, idle: Sequence[Idle], *, registration: Registration | None = None, repeat_to: str | None = None
    ) -> list[Call[Polled]]: ...

    # workers: `heartbeat` returns the store's time, `unregister` whether the worker was registered
    def heartbeat(self, heartbeat: Heartbeat, ttl_ms: int) -> Call[int]: ...
    def unregister(self, name: str) -> Call[bool]: ...
    def workers(self) -> Call[list[WorkerRecord]]: ...
    # what a worker is to do, which its next heartbeat returns (`Polled.requested`); whether there is such a worker
    def request_worker(self, name: str, request: WorkerRequest) -> Call[bool]: ...

    # the journal
    def journal(self, queue: str, after: int, limit: int) -> Call[EventPage]: ...
    def journal_reader(self, queue: str, name: str, read_to: int | None) -> Call[int]: ...
    def journal_forget(self, queue: str, name: str) -> Call[bool]: ...
    def journal_trim(self, queue: str, up_to: int) -> Call[int]: ...

    # schedules: stored with their queue; a change names the version that it read
    def save_schedule(
        self, queue: str, schedule: StoredSchedule, *, version: str | None, next_ms: int | None
    ) -> Call[Saved]: ...
    def remove_schedule(self, queue: str, key: str) -> Call[bool]: ...
    def schedules(self, queue: str) -> Call[ScheduleList]: ...
    def scheduled(self) -> Call[dict[str, int]]: ...
    def schedules_changed(self, queue: str) -> Call[None]: ...
    def fire_schedule(
        self, queue: str, step: FireStep, drafts: Sequence[Draft], operation: Operation
    ) -> Call[Woken[Fired]]: ...
    def trigger_schedule(
        self, queue: str, key: str, draft: Draft, operation: Operation
    ) -> Call[Woken[Published | None]]: ...

    # Small records that the programs of one store share, by kind and name. A save with a `version` happens only if the
    # record has that version (0: there is none). A record that has exactly this data already counts as saved, so that a
    # repeat after a lost reply does: what several programs compete for must contain what tells them apart. `data` None
    # removes. A new record beyond `keep` of its kind removes the oldest. `records`: the newest first, or those named.
    def save_record(
        self,
        kind: str,
        name: str,
        data: bytes | None,
        *,
        version: int | None = None,
        ttl_ms: int | None = None,
        keep: int = RECORDS_MAX,
    ) -> Call[RecordSaved]: ...
    def records(
        self, kind: str, *, names: Sequence[str] = (), cursor: str | None = None, limit: int = RECORDS_PAGE_MAX
    ) -> Call[RecordPage]: ...

    # leaders of roles, and timers of queues without claims
    def elect(self, role: str, name: str, ttl_ms: int) -> Call[Elected]: ...
    def resign(self, role: str, name: str) -> Call[bool]: ...
    def promote(self, queue: str) -> Call[Woken[Promoted]]: ...


# ---- what a store has besides its verbs ----------------------------------------------------------------------------


class ConnectionClosed(StoreUnavailable):
    """Raised when this side has closed the connection: it does not come back, so the call is not repeated."""


class Executor(Protocol):
    """Runs calls; every error is one of `waypost.errors`. Safe to use from several threads."""

    def run(self, call: Call[T]) -> T: ...
    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]: ...
    def close(self) -> None: ...


class AsyncExecutor(Protocol):
    """The same for an event loop."""

    async def run(self, call: Call[T]) -> T: ...
    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]: ...
    async def close(self) -> None: ...


class BlockingWaiter(Protocol):
    """Follows one blocking wait: the executor calls it with each reply of the server."""

    #: The claim did not begin before this `lease_clock` time, as a poll has shown.
    not_before: float

    def sent(self, give_up: Callable[[], None]) -> None:
        """The wait was sent to the server. `give_up` ends it as if the connection had failed."""
        ...

    def started(self, *, waits: bool) -> None:
        """The server has registered the wait; an unblock reaches it. Without `waits` it was notified, and ends."""
        ...

    def ended(self, value: str) -> None:
        """The wait has ended and the claim begins: by an unblock with this value, or '' by work or the timeout."""
        ...


class BlockingWaits(Protocol):
    """Lets an idle sleeper wait in the store's server, so that a wake-up and the claim after it are one step."""

    def claim_after_wait(
        self, claim: Call[Claimed], sleeper: str, seconds: float, waiter: BlockingWaiter
    ) -> Call[Claimed]:
        """Return the same claim, but it begins when its sleeper is woken, or after this time at the latest.

        Only for a sleeper that the last claim registered. It can be run once; a repeat is the claim alone.
        """
        ...

    def unblock(self, queue: str, sleeper: str, value: str) -> Call[None]:
        """End a wait that has started: its claim begins now, and the waiter receives the value."""
        ...


class Capabilities(Struct, frozen=True):
    """The differences between stores that matter to their callers. Callers check these, never the kind of a store."""

    #: Which processes can open it: this one, all of this machine, or all that can connect to its server.
    reach: Literal["process", "machine", "network"]
    #: A line of text on the durability of an acknowledged message.
    durability: str
    #: `waypost migrate` creates its tables; clients do not.
    needs_migration: bool = False
    #: One step may change several queues. Otherwise continuations are in `outgoing` until a client delivers them.
    spans_queues: bool = True
    #: A step can become visible after one that began later, so that a poll in between misses it: poll again soon.
    commits_out_of_order: bool = False
    #: A poll is sent back over the store's own channel (`repeat_to`).
    repeats_polls: bool = False
    #: Calls of several queues in one `run_many` take one round trip, not one each.
    runs_together: bool = True


class NaturalChannel(Struct, frozen=True):
    """The notification channel of a store, used unless a client names another."""

    #: `process` and `files`: clients notify each other. Servers send the notifications, in the step of the change.
    transport: Literal["process", "files", "valkey", "postgres"]
    #: The store itself, the path of its file, or the source of connections to its server.
    address: Any

    @property
    def by_server(self) -> bool:
        """Whether the store's own steps notify sleepers."""
        return self.transport in ("valkey", "postgres")


# ---- arguments and results of the verbs ----------------------------------------------------------------------------


class Draft(Struct, frozen=True, gc=False):
    """A message to publish. `at_ms` is absolute and takes precedence over `delay_ms`, which starts at store time."""

    id: str
    envelope: bytes
    key: str | None = None
    #: 0: the key is in use while its message is unfinished (`live`); otherwise also for this long after the publish.
    window_ms: int = 0
    on_conflict: OnConflict = "keep"
    delay_ms: int = 0
    at_ms: int | None = None
    priority: int = 5
    group: str | None = None
    #: What the journal keeps at level `full` instead of the envelope (made by the redact hook).
    journal_copy: bytes | None = None
    #: A continuation: the queue remembers its arrival, so that it is stored once however often it is sent.
    forwarded: bool = False
    #: The chain that it belongs to (`chain_id`); it starts one if that has its own queue and id.
    chain: str | None = None
    #: Chains that must succeed before it may be claimed. Such a message has no key.
    after: tuple[str, ...] = ()
    #: With `forwarded`: `max_pending` applies as for a publish. No message has ended for it, so it can be refused.
    capped: bool = False
    #: When it lapses: from this moment on, or if negative, so long after the publish, it is not handed out. 0: never.
    #: One number, because stores check it for each message of a batch.
    expires_ms: int = 0
    #: How long it has its key. `until_claimed` and a window exclude each other.
    unique: Unique = "live"

    def expiry(self, now: int) -> int | None:
        """Return when it lapses if it is published now; None: never."""
        return (self.expires_ms if self.expires_ms > 0 else now - self.expires_ms) if self.expires_ms else None


class Hold(Struct, frozen=True, gc=False):
    """The fence of one lease: what `extend` must match."""

    id: str
    token: int
    nonce: bytes


class Target(Struct, frozen=True, gc=False):
    """What to cancel: a message id, or a key."""

    id: str | None = None
    key: str | None = None


class ServedQueue(Struct, frozen=True, array_like=True):
    """A queue in a heartbeat. `claim_age_ms` is how long ago a claim was answered: ages need no common clock."""

    name: str
    concurrency: int = 0
    in_flight: int = 0
    handled: int = 0
    claim_age_ms: int | None = None


class Heartbeat(Struct, frozen=True, array_like=True):
    """The report of a worker. New fields are added only at the end, because several releases send it."""

    name: str
    host: str = ""
    pid: int = 0
    version: str = ""
    state: str = "running"
    status: str = "green"
    reasons: tuple[str, ...] = ()
    processes: int = 1
    #: By the store's clock, as the answer to the first heartbeat gave it; None in that one.
    started_ms: int | None = None
    queues: tuple[ServedQueue, ...] = ()
    unlisted: int = 0


class Idle(Struct, frozen=True, gc=False):
    """An idle queue of a worker, and the worker's sleeper there; None if no notification reaches it."""

    queue: str
    sleeper: str | None = None


class Registration(Struct, frozen=True):
    """The content of a poll: the worker's heartbeat, its lifetime, and the role that it wants to lead."""

    heartbeat: Heartbeat
    ttl_ms: int
    #: A role, and how long it would lead before it has to be elected again.
    role: str | None = None
    role_ttl_ms: int = 0


class FireStep(Struct, frozen=True):
    """One fire of a schedule: the conditions of the step, and the new state of the schedule."""

    key: str
    version: str
    #: The next fire that the client read; None: there was none.
    expected_ms: int | None
    #: The store's time must be between these.
    last_due_ms: int
    valid_until_ms: int
    #: The newest instant that fires; None if the step only counts instants as missed.
    last_ms: int | None
    missed: int
    next_ms: int | None
    due_ms: int | None
    #: What schedulers remember of it from now on; None: as before.
    state: bytes | None = None
    #: Set by steps that leave the next fire where it is, so that of two such steps one happens.
    new_version: str | None = None
    #: Published on request, not by the rule: also while it is paused, and not counted as fires.
    by_hand: bool = False
    #: Fire only if this run has ended.
    after_run: AfterRun | None = None


class AfterRun(Struct, frozen=True):
    """A run that must have ended before a fire: its message is done, dead or otherwise not in the queue any more."""

    run_id: str
    #: While it runs: the state with which the schedule is advanced without a fire; None: nothing changes.
    state: bytes | None = None
    #: Then the journal says that so many instants were skipped, of which this is the newest; 0: none was.
    skipped: int = 0
    instant_ms: int = 0


def check_chunk(items: Sequence[object]) -> None:
    """Refuse more items than one step may have: a longer step would block every other client of the store."""
    if len(items) > CHUNK_MESSAGES_MAX:
        raise InvalidInput(f"{len(items)} items in one step, the limit is {CHUNK_MESSAGES_MAX}; send them in parts")


def poll_parts(idle: Sequence[Idle]) -> list[Sequence[Idle]]:
    """Yield the queues to poll in parts for one step each; one part without queues if there are none."""
    return [idle[at : at + POLL_QUEUES_MAX] for at in range(0, len(idle), POLL_QUEUES_MAX)] or [()]


def check_purge(state: MessageState, ids: Sequence[str] = ()) -> MessageState:
    """Refuse to purge leased messages: the handler runs, and the successor of its key would run beside it."""
    if ids and state != "dead":
        raise InvalidInput("only dead letters can be purged by their ids: cancel messages that wait")
    if state == "leased":
        raise InvalidInput("leased messages cannot be purged: cancel them, which requests their handlers to stop")
    return state


def read_cursor(cursor: str | None, length: int) -> list[int | str] | None:
    """Return the position of a cursor in a listing, with this many columns; None for the start."""
    if cursor is None:
        return None
    try:
        place = msgspec.json.decode(cursor, type=list[int | str])
    except msgspec.DecodeError:
        place = []
    if len(place) != length:
        raise InvalidInput("this cursor is not one that a listing of this state gave; start again without it")
    return place


def dead_cursor(at_ms: int) -> str:
    """Return the cursor before the dead letters that died at a time, in a listing by time and id."""
    return msgspec.json.encode([at_ms, ""]).decode()


def record_cursor(created_ms: int, name: str) -> str:
    """Return the cursor of a page of shared records that ends with this one."""
    return msgspec.json.encode([created_ms, name]).decode()


def read_record_cursor(cursor: str | None) -> tuple[int, str] | None:
    """Return the creation time and the name of the record that a page ended with; None for the start."""
    if cursor is None:
        return None
    try:
        return msgspec.json.decode(cursor, type=tuple[int, str])
    except msgspec.DecodeError:
        raise InvalidInput("this cursor is not one that a listing of records gave; start again without it") from None


def not_grouped(queue: str) -> InvalidInput:
    """Return the error for a verb of groups on a queue that does not take turns between them."""
    return InvalidInput(
        f'queue {queue} does not treat groups apart; configure it with fair=True, order="group" or a limit per group '
        "first"
    )


def queue_full(queue: str, waiting: int, cap: int, group: str | None = None) -> QueueFull:
    """Return the error for a publish for which a queue, or one of its groups, has no room."""
    what, setting = (f"queue {queue}", "max_pending")
    if group is not None:
        what, setting = f"group {group} of queue {queue}", "group_max_pending"
    return QueueFull(
        f"{what} holds {waiting} messages that wait and its max_pending is {cap}; retry later, raise {setting} or add "
        "workers",
        group=group,
        room=max(0, cap - waiting),
    )


def too_many_groups(queue: str) -> InvalidInput:
    """Return the error for one more group with settings of its own than a queue may have."""
    return InvalidInput(
        f"queue {queue} has {GROUPS_KEPT_MAX:,} groups that are paused or have settings of their own, which is the "
        "limit; resume some, or give them weight 1 and limits None again"
    )


def group_cursor(group: str) -> str:
    """Return the cursor of a page of groups that ends with this one."""
    return msgspec.json.encode([group]).decode()


def blocks(queue: str) -> InvalidInput:
    """Return the error for a queue with overload="block": no call may wait inside the user's transaction."""
    return InvalidInput(
        f'queue {queue} has overload="block", and a publish inside a transaction must not wait for room while it holds '
        'what others need; publish outside of it, or configure overload="raise" or "drop_oldest"'
    )


class Woken(Struct, Generic[T], frozen=True):
    """A result, and the sleepers to wake for it by queue: names, or `*` for all if the store does not know them."""

    result: T
    wake: dict[str, list[str]]
    #: The side effects of the step.
    also: tuple[SideEffect, ...] = ()


def add_wakes(wakes: dict[str, list[str]], more: dict[str, list[str]]) -> dict[str, list[str]]:
    """Add names to the sleepers to wake."""
    for queue, names in more.items():
        known = wakes.setdefault(queue, [])
        known += [name for name in names if name not in known]
    return wakes


class SideEffects:
    """Collects the side effects of a step: each event with an id up to a bound, the rest counted."""

    __slots__ = ("_listed", "_more", "_named")

    def __init__(self) -> None:
        self._listed: list[SideEffect] = []
        self._named: dict[tuple[str, EventName], int] = {}
        self._more: dict[tuple[str, EventName, str | None], int] = {}

    def add(self, queue: str, event: EventName, id: str, token: int, reason: str | None) -> None:
        """One change of a message."""
        named = self._named.get((queue, event), 0)
        if named < SIDE_EFFECTS_MAX:
            self._named[queue, event] = named + 1
            self._listed.append(SideEffect(queue, event, id, token, reason))
        else:
            place = queue, event, reason
            self._more[place] = self._more.get(place, 0) + 1

    def take(self) -> tuple[SideEffect, ...]:
        """Return all of them and remove them."""
        if not self._listed:
            return ()
        rest = [SideEffect(queue, event, None, None, reason, n) for (queue, event, reason), n in self._more.items()]
        effects = (*self._listed, *rest)
        self._listed, self._named, self._more = [], {}, {}
        return effects


def forwarded_draft(next_one: Continuation) -> Draft:
    """Return the draft of a continuation for its target queue."""
    return Draft(
        next_one.id,
        next_one.envelope,
        key=next_one.key,
        delay_ms=next_one.delay_ms,
        priority=next_one.priority,
        group=next_one.group,
        journal_copy=next_one.journal_copy,
        forwarded=True,
        chain=next_one.chain,
        expires_ms=next_one.expires_ms,
    )


def cut_error(error: str | None) -> str | None:
    """Return what the journal keeps of an error's text."""
    text, _ = split_error(error)
    return text[:JOURNAL_ERROR_CHARACTERS_MAX] if text else None


def error_to_keep(policy: PolicyRecord, error: str | None) -> str | None:
    """Return what a queue keeps of an error: with its traceback, unless its policy wants none."""
    return split_error(error)[0] if policy.no_tracebacks else error


def format_changes(changes: Mapping[str, Any]) -> str:
    """Format policy changes for the journal."""
    return " ".join(f"{name}={value}" for name, value in sorted(changes.items()))
