"""A store under test: short verbs over the store contract, so that tests are easy to read.

Verbs take seconds and act on one queue by default. Each makes a fresh operation; give `operation=` to
repeat one, as a client does whose reply was lost. The sleepers that a verb would wake are kept in `woken`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

from waypost.codec import encode_body, make_envelope, open_envelope
from waypost.identity import Operation, Session, continuation_id
from waypost.policy import (
    CHUNK_MESSAGES_MAX,
    CLAIM_BYTES_MAX,
    OnConflict,
    PolicyRecord,
    Unique,
    group_changes,
    policy_changes,
)
from waypost.store.port import (
    AsyncExecutor,
    Call,
    Draft,
    Executor,
    Hold,
    Idle,
    Registration,
    Store,
    Target,
    Woken,
    forwarded_draft,
)
from waypost.testing.clock import ClockTime, ManualClock
from waypost.values import (
    CancelStatus,
    ChainState,
    Claimed,
    Continuation,
    EventRecord,
    ExtendStatus,
    GroupRecord,
    Lease,
    Ledger,
    Links,
    MessageState,
    Notice,
    OutcomeName,
    Page,
    Polled,
    PolledQueue,
    PriorityStatus,
    Published,
    Purged,
    Redriven,
    Removal,
    RescheduleStatus,
    Settlement,
    SettleStatus,
    SideEffect,
    StatsRecord,
    Stored,
    Watched,
    chain_id,
    split_chain_id,
)

T = TypeVar("T")
Mode = Literal["sync", "async"]
StoreMaker = Callable[[ManualClock, str], Store]
#: What to settle or extend: a lease, or a lease with another fence.
Fence = Lease | Hold

QUEUE = "orders"
STATES: tuple[MessageState, ...] = ("ready", "delayed", "waiting", "leased", "dead", "done")
_numbers = itertools.count(1)


def fresh_namespace() -> str:
    """Return a namespace that no other test of this or another process uses."""
    return f"t{os.getpid()}-{os.urandom(4).hex()}-{next(_numbers)}"


def ms(seconds: float) -> int:
    """Return seconds as whole milliseconds."""
    return round(seconds * 1000)


def strand(store: Any, queue: str, message_id: str) -> Call[Any]:
    """Return the call that damages a store: no claim, listing or settle finds the message any more, its body stays.

    It is a method `strand` of the store. The contract does not require it: only tests use it.
    """
    return cast("Call[Any]", store.strand(queue, message_id))


def strand_group(store: Any, queue: str, group: str) -> Call[Any]:
    """Return the call that takes a group out of the turns, so that no claim finds its messages: as `strand`."""
    return cast("Call[Any]", store.strand_group(queue, group))


class Runner:
    """Runs calls sync or async behind one interface."""

    def __init__(self, store: Store, mode: Mode) -> None:
        self._loop: asyncio.Runner | None = None
        self._sync: Executor | None = None
        self._async: AsyncExecutor | None = None
        if mode == "sync":
            self._sync = store.connect(start_timeout=5)
            return
        self._loop = asyncio.Runner()
        self._async = self._wait(store.connect_async(start_timeout=5))

    def _wait(self, awaitable: Awaitable[T]) -> T:
        async def waiting() -> T:
            return await awaitable

        assert self._loop is not None
        return self._loop.run(waiting())

    def run(self, call: Call[T]) -> T:
        """Run one call."""
        if self._sync is not None:
            return self._sync.run(call)
        assert self._async is not None
        return self._wait(self._async.run(call))

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        """Run several calls in one flush; return the result or error of each."""
        if self._sync is not None:
            return self._sync.run_many(calls)
        assert self._async is not None
        return self._wait(self._async.run_many(calls))

    def close(self) -> None:
        """Close the executor and the loop."""
        if self._sync is not None:
            self._sync.close()
        if self._async is not None:
            self._wait(self._async.close())
        if self._loop is not None:
            self._loop.close()


class Bench:
    """The subject of a conformance test."""

    def __init__(self, make_store: StoreMaker, mode: Mode, *, clock: ManualClock | None = None) -> None:
        self.make_store = make_store
        self.mode: Mode = mode
        self.clock = clock or ManualClock()
        self.namespace = fresh_namespace()
        self.store = make_store(self.clock, self.namespace)
        self.session = Session(self._time())
        self.runner = Runner(self.store, mode)
        #: The reply to the last verb that may wake: sleepers by queue.
        self.woken: dict[str, list[str]] = {}
        #: The side effects of that verb.
        self.also: tuple[SideEffect, ...] = ()
        #: The last operation that was made.
        self.last_operation = Operation(self.session.id, 0, 0, b"")
        self._queues_used: set[str] = set()
        self._others: list[Bench] = []

    def _time(self) -> ClockTime:
        """The clock of the store; that of this machine if the store has no manual one."""
        return ClockTime(getattr(self.store, "clock", None))

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for other in self._others:
            other.runner.close()
        self.runner.close()

    def another_client(self, *, namespace: str | None = None) -> Bench:
        """Return a second client with its own session and connection, of the same or another namespace."""
        other = Bench.__new__(Bench)
        other.__dict__ |= self.__dict__
        if namespace is not None:
            other.namespace = namespace
            other.store = self.make_store(self.clock, namespace)
        other.session, other._others = Session(other._time()), []
        other.runner = Runner(other.store, self.mode)
        self._others.append(other)
        return other

    # ---- time and operations -----------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """The time of the store."""
        return self.clock()

    def after(self, seconds: float) -> None:
        """Advance the time of the store."""
        self.clock.advance(seconds)

    def operation(self, queue: str = QUEUE) -> Operation:
        """Return a new operation on a queue."""
        self._queues_used.add(queue)
        self.last_operation = self.session.operation(queue)
        return self.last_operation

    def run(self, call: Call[T]) -> T:
        """Run one call in the mode of this bench."""
        return self.runner.run(call)

    def _woken(self, call: Call[Woken[T]]) -> T:
        woken = self.run(call)
        self.woken, self.also = dict(woken.wake), woken.also
        return woken.result

    # ---- publish -----------------------------------------------------------------------------------------

    def draft(
        self,
        body: object = b"a body",
        *,
        id: str | None = None,
        key: str | None = None,
        window: float = 0,
        on_conflict: OnConflict = "keep",
        delay: float = 0,
        at_ms: int | None = None,
        priority: int = 5,
        group: str | None = None,
        journal_copy: bytes | None = None,
        forwarded: bool = False,
        capped: bool = False,
        chain: str | None = None,
        after_chains: Sequence[str] = (),
        expires: float = 0,
        expires_at_ms: int | None = None,
        unique: Unique = "live",
    ) -> Draft:
        """Return a message to publish, with a new id unless one is given."""
        id = id or self.session.message_ids(1)[0]
        return Draft(
            id, make_envelope(id, encode_body(body)), key, ms(window), on_conflict, ms(delay), at_ms, priority, group,
            journal_copy, forwarded, chain, tuple(after_chains), capped, expires_at_ms or -ms(expires),
            unique,
        )  # fmt: skip

    def publish_drafts(
        self, drafts: Sequence[Draft], *, queue: str = QUEUE, operation: Operation | None = None
    ) -> list[Published]:
        """Publish a batch in one step."""
        return self._woken(self.store.publish(queue, drafts, operation or self.operation(queue)))

    def publish(
        self, body: object = b"a body", *, queue: str = QUEUE, operation: Operation | None = None, **options: Any
    ) -> Published:
        """Publish one message; the options are those of `draft`."""
        return self.publish_drafts([self.draft(body, **options)], queue=queue, operation=operation)[0]

    def publish_count(self, count: int, *, queue: str = QUEUE, **options: Any) -> list[str]:
        """Publish `count` messages in chunks; return their ids in order."""
        ids = []
        for start in range(0, count, CHUNK_MESSAGES_MAX):
            drafts = [self.draft(**options) for _ in range(min(CHUNK_MESSAGES_MAX, count - start))]
            ids += [published.id for published in self.publish_drafts(drafts, queue=queue)]
        return ids

    # ---- claim and settle --------------------------------------------------------------------------------

    def claimed(
        self,
        limit: int = 1,
        *,
        queue: str = QUEUE,
        worker: str = "worker-1",
        sleeper: str | None = None,
        poll_soon_ms: int | None = None,
        replay: bool = False,
        bytes_max: int = CLAIM_BYTES_MAX,
        operation: Operation | None = None,
        nonce: bytes | None = None,
    ) -> Claimed:
        """Claim, and return the whole reply."""
        operation = operation or self.operation(queue)
        options: dict[str, Any] = {
            "sleeper": sleeper, "poll_soon_ms": poll_soon_ms, "replay": replay, "bytes_max": bytes_max, "nonce": nonce,
        }  # fmt: skip
        return self.run(self.store.claim(queue, limit, operation, worker=worker, **options))

    def poll(self, *idle: Idle, registration: Registration | None = None) -> Polled:
        """Poll many queues, and return the combined answers."""
        found: list[PolledQueue] = []
        elected, requested, at_ms = None, None, 0
        for answer in self.runner.run_many(self.store.poll(idle, registration=registration)):
            if isinstance(answer, Exception):
                raise answer
            found += answer.queues
            elected, at_ms = elected or answer.elected, max(at_ms, answer.at_ms)
            requested = requested or answer.requested
        return Polled(found, at_ms, elected, requested)

    def claim(self, limit: int = 1, **options: Any) -> list[Lease]:
        """Claim, and return the leases."""
        return self.claimed(limit, **options).leases

    def claim_one(self, **options: Any) -> Lease:
        """Claim exactly one message."""
        leases = self.claim(1, **options)
        assert len(leases) == 1, "nothing could be claimed"
        return leases[0]

    def claim_all(self, *, queue: str = QUEUE, **options: Any) -> list[Lease]:
        """Claim everything, in claims of a full chunk, and return the leases in order."""
        leases: list[Lease] = []
        while found := self.claim(CHUNK_MESSAGES_MAX, queue=queue, **options):
            leases += found
        return leases

    def settlement(
        self,
        fence: Fence,
        outcome: OutcomeName = "done",
        *,
        after: float = 0,
        reason: str | None = None,
        error_type: str | None = None,
        error: str | None = None,
        result: bytes | None = None,
        result_ttl: float = 3600,
        then: Sequence[Continuation] = (),
    ) -> Settlement:
        """Return the settlement of a delivery."""
        return Settlement(
            fence.id, fence.token, fence.nonce, outcome, ms(after), reason, error_type, error, result,
            ms(result_ttl) if result is not None else 0, tuple(then),
        )  # fmt: skip

    def settle_batch(
        self, settlements: Sequence[Settlement], *, queue: str = QUEUE, operation: Operation | None = None
    ) -> list[SettleStatus]:
        """Settle many deliveries in one step."""
        return self._woken(self.store.settle(queue, settlements, operation or self.operation(queue)))

    def settle_and_claim(
        self,
        settlements: Sequence[Settlement],
        limit: int = 1,
        *,
        operations: tuple[Operation, Operation] | None = None,
        sleeper: str | None = None,
    ) -> tuple[Any, Any]:
        """Settle and claim in one flush; return the statuses and the reply of the claim, or the error of each."""
        first, second = operations or (self.operation(QUEUE), self.operation(QUEUE))
        settle = self.store.settle(QUEUE, settlements, first, next_claim=limit)
        claim = self.store.claim(QUEUE, limit, second, worker="worker-1", sleeper=sleeper)
        settled, claimed = self.runner.run_many(cast("list[Call[Any]]", [settle, claim]))
        if not isinstance(settled, Exception):
            self.woken, settled = settled.wake, settled.result
        return settled, claimed

    def settle(
        self,
        fence: Fence,
        outcome: OutcomeName = "done",
        *,
        queue: str = QUEUE,
        operation: Operation | None = None,
        **options: Any,
    ) -> SettleStatus:
        """Settle one delivery; the options are those of `settlement`."""
        settlement = self.settlement(fence, outcome, **options)
        return self.settle_batch([settlement], queue=queue, operation=operation)[0]

    def extend_batch(
        self, fences: Sequence[Fence], *, queue: str = QUEUE, operation: Operation | None = None
    ) -> list[ExtendStatus]:
        """Renew many leases in one step."""
        holds = [Hold(fence.id, fence.token, fence.nonce) for fence in fences]
        return self.run(self.store.extend(queue, holds, operation or self.operation(queue)))

    def extend(self, fence: Fence, *, queue: str = QUEUE, operation: Operation | None = None) -> ExtendStatus:
        """Renew one lease."""
        return self.extend_batch([fence], queue=queue, operation=operation)[0]

    def cancel(
        self,
        id: str | None = None,
        *,
        key: str | None = None,
        queue: str = QUEUE,
        operation: Operation | None = None,
    ) -> CancelStatus:
        """Cancel by id or by key."""
        return self._woken(self.store.cancel(queue, [Target(id, key)], operation or self.operation(queue)))[0]

    # ---- chains ------------------------------------------------------------------------------------------

    def continuation(
        self, source: Lease, queue: str, body: object = b"the next step", *, index: int = 0, **options: Any
    ) -> Continuation:
        """Return the next message of a chain, with the id that its source gives it."""
        id = continuation_id(source.id, source.token, index)
        options["delay_ms"] = ms(options.pop("delay", 0))
        expires = -ms(options.pop("expires", 0))
        options["expires_ms"] = options.pop("expires_at_ms", None) or expires
        options.setdefault("chain", source.chain)
        return Continuation(id, queue, make_envelope(id, encode_body(body)), **options)

    def begin_chain(self, *, queue: str = QUEUE, **options: Any) -> str:
        """Publish the first message of a chain, and return the chain id."""
        id = self.session.message_ids(1)[0]
        return self.publish(queue=queue, id=id, chain=chain_id(queue, id), **options).chain_id

    def links(self, message_id: str, *, queue: str = QUEUE) -> Links:
        """Return what a message has to do with chains."""
        return self.run(self.store.links(queue, message_id))

    def chain_state(self, chain: str, waiter: str | None = None) -> ChainState:
        """Return the state of a chain in the queue where it began."""
        queue, id = split_chain_id(chain)
        return self.run(self.store.watch_chain(queue, id, waiter))

    def watch(self, message_id: str, waiter: str | None = None, *, queue: str = QUEUE) -> Watched:
        """Return the state of a message for its waiters."""
        return self.run(self.store.watch(queue, message_id, waiter))

    def deliver_outgoing(self, queue: str = QUEUE) -> list[str]:
        """Deliver what a queue sends to others, as clients do where a step of the store cannot span queues."""
        delivered = []
        while found := self.run(self.store.outgoing(queue, CHUNK_MESSAGES_MAX)):
            for one in found:
                self.carry(one)
                self.run(self.store.forwarded(queue, [one.id]))
                delivered.append(one.id)
        return delivered

    def deliver_all(self) -> None:
        """Deliver everything that any queue sends to others, until nothing is under way."""
        carried = True
        while carried:
            carried = any(self.deliver_outgoing(queue) for queue in sorted(self._queues_used))

    def carry(self, one: Continuation | Notice) -> None:
        """Deliver an outgoing entry of a queue to its target, possibly again."""
        before, also = self.woken, self.also
        if isinstance(one, Notice):
            self._queues_used.add(one.queue)
            self._woken(self.store.arrive(one.queue, [one]))
        else:
            self.forward(one)
        self.woken = {name: before.get(name, []) + self.woken.get(name, []) for name in before | self.woken}
        self.also = also + self.also

    def forward(self, one: Continuation) -> Published:
        """Publish a continuation at its target, possibly again."""
        return self.publish_drafts([forwarded_draft(one)], queue=one.queue)[0]

    def result(self, message_id: str, *, queue: str = QUEUE) -> bytes | None:
        """Return the kept result of a message."""
        return self.run(self.store.result(queue, message_id))

    # ---- running a queue ---------------------------------------------------------------------------------

    def configure(self, *, queue: str = QUEUE, **settings: Any) -> PolicyRecord:
        """Change the queue's policy, with the keywords that users give."""
        self._queues_used.add(queue)
        return self._woken(self.store.configure(queue, policy_changes(settings)))

    def pause(self, queue: str = QUEUE) -> bool:
        """Pause the queue; return whether that changed anything."""
        self._queues_used.add(queue)
        return self.run(self.store.pause(queue))

    def resume(self, queue: str = QUEUE) -> bool:
        """Resume the queue; return whether that changed anything."""
        return self._woken(self.store.resume(queue))

    def redrive(
        self,
        *ids: str,
        reason: str | None = None,
        limit: int = 100,
        queue: str = QUEUE,
        operation: Operation | None = None,
    ) -> Redriven:
        """Redrive dead letters."""
        operation = operation or self.operation(queue)
        return self._woken(self.store.redrive(queue, limit, operation, ids=ids, reason=reason))

    def reschedule(
        self,
        id: str | None = None,
        *,
        key: str | None = None,
        delay: float = 0,
        at_ms: int | None = None,
        queue: str = QUEUE,
        operation: Operation | None = None,
    ) -> RescheduleStatus:
        """Give one timer another due time."""
        operation = operation or self.operation(queue)
        call = self.store.reschedule(queue, [Target(id, key)], operation, delay_ms=ms(delay), at_ms=at_ms)
        return self._woken(call)[0]

    def change_priority(
        self, *ids: str, priority: int, queue: str = QUEUE, operation: Operation | None = None
    ) -> list[PriorityStatus]:
        """Give messages another priority."""
        return self._woken(self.store.change_priority(queue, ids, priority, operation or self.operation(queue)))

    def replace_dead(
        self, message_id: str, body: object = b"edited", *, operation: Operation | None = None, **options: Any
    ) -> Published | None:
        """Publish a message in place of a dead letter; the options are those of `draft`."""
        draft = self.draft(body, **options)
        return self._woken(self.store.replace_dead(QUEUE, message_id, draft, operation or self.operation(QUEUE)))

    def purge(
        self,
        state: MessageState,
        *ids: str,
        limit: int = 100,
        queue: str = QUEUE,
        operation: Operation | None = None,
    ) -> Purged:
        """Remove messages of one state, or some dead letters."""
        return self._woken(self.store.purge(queue, state, limit, operation or self.operation(queue), ids=ids))

    def remove(self, *, queue: str = QUEUE, operation: Operation | None = None) -> Removal:
        """Remove a queue as clients do, and then its entries in separate lists."""
        removal = self.run(self.store.remove(queue, operation or self.operation(queue)))
        while removal.more:
            removal = self.run(self.store.remove(queue, self.operation(queue)))
        if not removal.left and not removal.made_again:
            for call in self.store.unlist(queue):
                self.run(call)
        return removal

    # ---- groups ------------------------------------------------------------------------------------------

    def groups(self, *, queue: str = QUEUE, page_size: int = 100, group: str | None = None) -> list[GroupRecord]:
        """Return the groups of a queue, read page by page."""
        found: list[GroupRecord] = []
        cursor: str | None = None
        while True:
            page = self.run(self.store.groups(queue, page_size, cursor=cursor, group=group))
            found += page.groups
            cursor = page.cursor
            if cursor is None:
                return found

    def group(self, group: str, *, queue: str = QUEUE) -> GroupRecord:
        """Return a group that must be listed."""
        (found,) = self.groups(queue=queue, group=group)
        return found

    def configure_group(self, group: str, *, queue: str = QUEUE, **settings: Any) -> bool:
        """Change the settings of a group, with the keywords that users give; return whether anything changed."""
        return self._woken(self.store.configure_group(queue, group, group_changes(settings)))

    def pause_group(self, group: str, *, queue: str = QUEUE) -> bool:
        """Pause a group; return whether that changed anything."""
        return self._woken(self.store.configure_group(queue, group, {"paused": True}))

    def resume_group(self, group: str, *, queue: str = QUEUE) -> bool:
        """Resume a group; return whether that changed anything."""
        return self._woken(self.store.configure_group(queue, group, {"paused": False}))

    def skip_held(self, group: str, *, queue: str = QUEUE, operation: Operation | None = None) -> str | None:
        """Let the next message pass the one that holds a group; return its id."""
        return self._woken(self.store.skip_held(queue, group, operation or self.operation(queue)))

    # ---- reading -----------------------------------------------------------------------------------------

    def page(self, state: MessageState, limit: int = 100, *, queue: str = QUEUE, **filters: Any) -> Page:
        """Return one page of a listing."""
        return self.run(self.store.peek(queue, state, limit, **filters))

    def listing(self, state: MessageState, *, queue: str = QUEUE, page_size: int = 500, **filters: Any) -> list[Stored]:
        """Return a whole listing, read page by page."""
        messages: list[Stored] = []
        cursor: str | None = None
        while True:
            page = self.page(state, page_size, queue=queue, cursor=cursor, **filters)
            messages += page.messages
            cursor = page.cursor
            if cursor is None:
                return messages

    def ids(self, state: MessageState, *, queue: str = QUEUE, **filters: Any) -> list[str]:
        """Return the ids of a listing, in its order."""
        return [message.id for message in self.listing(state, queue=queue, **filters)]

    def state_of(self, message_id: str, *, queue: str = QUEUE) -> MessageState | None:
        """Return the state of a message, None if the store does not have it."""
        for state in STATES:
            if self.page(state, 1, queue=queue, id=message_id).messages:
                return state
        return None

    def stored(self, message_id: str, *, queue: str = QUEUE) -> Stored:
        """Return a message that the store must have."""
        for state in STATES:
            if found := self.page(state, 1, queue=queue, id=message_id).messages:
                return found[0]
        raise AssertionError(f"{message_id} is not in queue {queue}")

    def stats(self, *, queue: str = QUEUE, minutes: int = 0) -> StatsRecord:
        """Return the statistics of the queue."""
        return self.run(self.store.stats(queue, minutes=minutes))

    def ledger(self, *, queue: str = QUEUE) -> Ledger:
        """Return the ledger of the queue."""
        return self.stats(queue=queue).ledger

    def events(
        self, *names: str, queue: str = QUEUE, after: int = 0, message_id: str | None = None
    ) -> list[EventRecord]:
        """Return the journal after a number: all of it, or only events of some names or of one message."""
        found: list[EventRecord] = []
        while True:
            page = self.run(self.store.journal(queue, after, 500))
            found += page.events
            if not page.events:
                break
            after = page.last
        return [
            event
            for event in found
            if (not names or event.event in names) and (message_id is None or event.message_id == message_id)
        ]

    def holders(self, key: str, *queues: str) -> dict[str, list[str]]:
        """Return the unfinished messages of a key in these queues."""
        found: dict[str, list[str]] = {}
        for call in self.store.holders(queues or (QUEUE,), key):
            for queue, id in self.run(call):
                found.setdefault(queue, []).append(id)
        return found

    def trace(self, message_id: str, *, queue: str = QUEUE) -> list[EventRecord]:
        """Return the history of one message."""
        events: list[EventRecord] = []
        cursor: str | None = None
        while True:
            page = self.run(self.store.trace(queue, message_id, cursor))
            events += page.events
            cursor = page.cursor
            if cursor is None:
                return events

    def locate(self, message_id: str, queues: Sequence[str]) -> list[tuple[str, str | None]]:
        """Return which queues know a message, and its state or how it ended."""
        calls = self.store.locate(queues, message_id)
        return [(one.queue, one.state or one.ended) for call in calls for one in self.run(call)]

    def locate_in_journals(self, message_id: str, queues: Sequence[str]) -> list[str]:
        """Return the queues whose journal may have an event of a message."""
        calls = self.store.locate(queues, message_id, in_journals=True)
        return [one.queue for call in calls for one in self.run(call)]

    def event_names(self, message_id: str, *, queue: str = QUEUE) -> list[str]:
        """Return the names of the events of one message, in order."""
        return [event.event for event in self.events(queue=queue, message_id=message_id)]

    @staticmethod
    def body(message: Lease | Stored) -> bytes:
        """Return the bytes that were published."""
        return open_envelope(message.envelope).data

    # ---- invariants --------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Check what must hold for every queue at any moment."""
        for queue in sorted(self._queues_used):
            self.check_queue(queue)

    def check_queue(self, queue: str) -> None:
        """Check that the ledger balances and agrees with the listings, and the number of messages of each key."""
        ledger = self.ledger(queue=queue)
        assert ledger.balance == 0, ledger
        assert ledger.unexplained == 0, ledger
        kept: dict[MessageState, int] = {
            "ready": ledger.ready,
            "delayed": ledger.delayed,
            "waiting": ledger.waiting,
            "leased": ledger.leased,
            "dead": ledger.dead_kept,
        }
        waiting: Counter[str] = Counter()
        leased: Counter[str] = Counter()
        for state, count in kept.items():
            messages = self.listing(state, queue=queue)
            assert len(messages) == count, f"{len(messages)} are listed as {state}, the ledger has {count}"
            keys = [message.key for message in messages if message.key is not None]
            if state == "leased":
                leased.update(keys)
            elif state != "dead":
                waiting.update(keys)
        waits: tuple[MessageState, ...] = ("ready", "delayed", "waiting")
        assert [key for key, count in waiting.items() if count > 1 and self._owners(queue, key, *waits) > 1] == []
        assert [key for key, count in leased.items() if count > 1 and self._owners(queue, key, "leased") > 1] == []

    def _owners(self, queue: str, key: str, *states: MessageState) -> int:
        """Return how many have a key. A listing by key does not show those that gave it up when they were claimed."""
        return sum(len(self.listing(state, queue=queue, key=key)) for state in states)
