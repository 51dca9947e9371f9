"""The memory store: the contract over `QueueModel`, one lock, one clock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import msgspec
from msgspec import structs

from waypost.identity import Operation, new_nonce
from waypost.policy import (
    CHUNK_BYTES_MAX,
    CLAIM_BYTES_MAX,
    RECORDS_MAX,
    RECORDS_PAGE_MAX,
    REPLAY_TTL_MS,
    SCANNED_MAX,
    PolicyRecord,
)
from waypost.store.checkup import Checkup, Findings, ok
from waypost.store.memory import chains, groups
from waypost.store.memory import schedules as scheduling
from waypost.store.memory.queue import QueueModel
from waypost.store.memory.records import Record
from waypost.store.memory.shared import SharedRecords
from waypost.store.memory.workers import Register
from waypost.store.port import (
    Call,
    Capabilities,
    Draft,
    FireStep,
    Heartbeat,
    Hold,
    Idle,
    NaturalChannel,
    Registration,
    Target,
    Woken,
    add_wakes,
    check_purge,
    dead_cursor,
    forwarded_draft,
    poll_parts,
)
from waypost.store.register import pack
from waypost.store.repeats import check_removal
from waypost.values import (
    CancelStatus,
    ChainState,
    CheckPage,
    Claimed,
    Continuation,
    Elected,
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
)
from waypost.views import Stats

T = TypeVar("T")

#: A state that no message can have.
NO_STATE = "nowhere"


def wall_clock_ms() -> int:
    """The machine's clock, which is the clock of this store."""
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class ModelCall(Call[T]):
    """A step on the model, as a function of store time."""

    name: str
    step: Callable[[int], T]


@dataclass(slots=True)
class KeptClaim:
    """What a repeat of a claim needs: the nonce and messages of its leases, and its side effects."""

    nonce: bytes
    ids: list[str]
    also: tuple[SideEffect, ...] = ()
    wake: dict[str, list[str]] = field(default_factory=dict)


class MemoryCheckup(Checkup):
    """There is no server and no file to check."""

    def check_server(self, found: Sequence[Stats]) -> Findings:
        yield ok("server", "a memory store: it is gone when this process ends")


class MemoryStore:
    """Keeps everything in this process. `clock` gives store time in milliseconds; tests bring their own."""

    kind = "memory"
    capabilities = Capabilities(
        reach="process", durability="in this process only: everything is gone when it ends", spans_queues=True,
    )  # fmt: skip
    blocking_waits = None
    transactions = None

    def __init__(
        self,
        *,
        namespace: str = "wp",
        clock: Callable[[], int] | None = None,
        replay_ttl_ms: int = REPLAY_TTL_MS,
    ) -> None:
        self.namespace = namespace
        self.replay_ttl_ms = replay_ttl_ms
        self.clock = clock or wall_clock_ms
        self.lock = threading.RLock()
        self._queues: dict[str, QueueModel] = {}
        self._register = Register()
        self._shared = SharedRecords()
        self._scheduled: dict[str, int] = {}
        self._leaders = scheduling.Leaders()

    @property
    def place(self) -> object:
        return id(self)

    @property
    def channel(self) -> NaturalChannel:
        return NaturalChannel("process", self)

    def bulk_reader(self, connection: object) -> None:
        """None: other processes cannot read it."""

    def checkup(self, executor: object) -> Checkup:
        return MemoryCheckup()

    def strand(self, queue: str, message_id: str) -> ModelCall[None]:
        """For tests: remove a message from all indexes in which a claim could find it."""

        def step(now: int) -> None:
            self._queues[queue].messages[message_id].state = cast("MessageState", NO_STATE)

        return ModelCall("damage", step)

    def connect(self, *, start_timeout: float) -> MemoryExecutor:
        return MemoryExecutor(self)

    async def connect_async(self, *, start_timeout: float) -> AsyncMemoryExecutor:
        return AsyncMemoryExecutor(self)

    def cut_journals(self, now: int) -> None:
        """The end of every step."""
        for model in self._queues.values():
            model.cut_journal(now)

    def _queue(self, name: str) -> QueueModel:
        return self._queues.get(name) or QueueModel(name)

    def _queue_for_writing(self, name: str) -> QueueModel:
        """Return a queue to write to. Only verbs that add something create one: see `_queue_to_make`."""
        model = self._queues.get(name)
        if model is None:
            model = self._queues[name] = QueueModel(name)
        return model

    def _queue_to_make(self, name: str) -> QueueModel:
        """Return a queue to add something to; from now on it exists."""
        model = self._queue_for_writing(name)
        model.made = True
        return model

    def _once(
        self,
        name: str,
        queue: str,
        operation: Operation,
        step: Callable[[QueueModel, int], T],
        *,
        makes: bool = False,
    ) -> ModelCall[T]:
        """Return a call that runs once per operation: a repeat gets the first result. `makes`: it creates the queue."""

        def run(now: int) -> T:
            model = self._queue_for_writing(queue)
            first = model.replayed(now, operation, self.replay_ttl_ms)
            if first is not None:
                return cast(T, first)
            result = step(model, now)
            model.made = model.made or makes
            model.remember(now, operation, result, self.replay_ttl_ms)
            return result

        return ModelCall(name, run)

    @staticmethod
    def _waking(
        model: QueueModel, now: int, step: Callable[[], T], *, also: Callable[[], int] = lambda: 0, next_claim: int = 0
    ) -> Woken[T]:
        """Run a step and choose as many sleepers as messages became claimable, without those that the caller claims."""
        earliest = model.next_due(now)
        model.freshly_ready = 0
        model.fresh_groups, model.freed_groups = set(), set()
        result = step()
        soonest = model.next_due(now)
        earlier = soonest is not None and (earliest is None or soonest < earliest)
        claimable = model.freshly_ready + groups.worth_waking(model, now) + also()
        names = model.wake(now, max(0, claimable - next_claim) + earlier)
        return Woken(result, {model.name: names} if names else {})

    @staticmethod
    def _waking_groups(model: QueueModel, now: int, step: Callable[[], T]) -> Woken[T]:
        """Run a step that makes no message claimable, but can end what holds a group."""
        model.fresh_groups, model.freed_groups = set(), set()
        result = step()
        names = model.wake(now, groups.worth_waking(model, now))
        return Woken(result, {model.name: names} if names else {})

    def deliver_notices(self, now: int) -> dict[str, list[str]]:
        """Deliver the notices of a step to their queues, and the notices of those; here all of it is one step."""
        wake: dict[str, list[str]] = {}
        while notices := [notice for model in self._queues.values() for notice in take(model.notices)]:
            for notice in notices:
                target = self._queue_for_writing(notice.queue)
                woken = self._waking(target, now, lambda t=target, n=notice: chains.arrive(t, now, n))  # type: ignore[misc]
                add_wakes(wake, woken.wake)
        for model in self._queues.values():
            if model.waiters_to_wake:
                add_wakes(wake, {model.name: take(model.waiters_to_wake)})
        return wake

    def take_also(self) -> tuple[SideEffect, ...]:
        """Return the side effects of the current step, in all queues."""
        return tuple(change for model in self._queues.values() for change in model.also.take())

    def _with_notices(self, now: int, woken: Woken[T]) -> Woken[T]:
        """Return the answer of a step after its notices were delivered, with its side effects."""
        wake = add_wakes(woken.wake, self.deliver_notices(now))
        return Woken(woken.result, wake, self.take_also())

    def time(self) -> Call[int]:
        return ModelCall("time", lambda now: now)

    # ---- the way of a message ----------------------------------------------------------------------------

    def publish(self, queue: str, drafts: Sequence[Draft], operation: Operation) -> Call[Woken[list[Published]]]:
        def step(model: QueueModel, now: int) -> Woken[list[Published]]:
            return self._with_notices(now, self._waking(model, now, lambda: model.publish(now, drafts, operation)))

        return self._once("publish", queue, operation, step, makes=True)

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
    ) -> Call[Claimed]:
        fence = nonce or new_nonce()

        def run(now: int) -> Claimed:
            model = self._queue_for_writing(queue)
            first = cast("KeptClaim | None", model.replayed(now, operation, self.replay_ttl_ms))
            if first is None and replay:
                # Nothing ran, and nothing may run now: a request that arrives later finds this and claims nothing.
                first = KeptClaim(fence, [])
            if first is not None:
                kept = replace(first, nonce=fence)
                claimed = model.claim_again(now, first.ids, first.nonce, fence)
            else:
                claimed, ids = model.claim(now, limit, operation, fence, worker, sleeper, poll_soon_ms, bytes_max)
                wake = self.deliver_notices(now)
                kept = KeptClaim(fence, ids, self.take_also(), wake)
            model.remember(now, operation, kept, self.replay_ttl_ms)
            return structs.replace(claimed, also=kept.also, wake=kept.wake)

        return ModelCall("claim", run)

    def settle(
        self, queue: str, settlements: Sequence[Settlement], operation: Operation, *, next_claim: int = 0
    ) -> Call[Woken[list[SettleStatus]]]:
        def step(model: QueueModel, now: int) -> Woken[list[SettleStatus]]:
            wake: dict[str, list[str]] = {}

            def settle_all() -> list[SettleStatus]:
                return [self._settle_one(model, now, settlement, operation, wake) for settlement in settlements]

            def freed_slots() -> int:
                if model.policy.max_running is None:
                    return 0
                return min(len(settlements), max(0, model.count("ready") - model.freshly_ready))

            woken = self._waking(model, now, settle_all, also=freed_slots, next_claim=next_claim)
            return self._with_notices(now, Woken(woken.result, add_wakes(wake, woken.wake)))

        return self._once("settle", queue, operation, step)

    def _settle_one(
        self, model: QueueModel, now: int, settlement: Settlement, operation: Operation, wake: dict[str, list[str]]
    ) -> SettleStatus:
        status = model.settle(now, settlement, operation)
        if status != "done":
            return status
        for next_one in settlement.then:
            model.counts["transferred"] += 1
            target = self._queue_to_make(next_one.queue)
            draft = forwarded_draft(next_one)
            if target is model:
                target.publish(now, [draft], operation)
            else:
                woken = self._waking(target, now, lambda t=target, d=draft: t.publish(now, [d], operation))  # type: ignore[misc]
                add_wakes(wake, woken.wake)
        return status

    def extend(self, queue: str, holds: Sequence[Hold], operation: Operation) -> Call[list[ExtendStatus]]:
        return self._once("extend", queue, operation, lambda model, now: [model.extend(now, hold) for hold in holds])

    def cancel(self, queue: str, targets: Sequence[Target], operation: Operation) -> Call[Woken[list[CancelStatus]]]:
        def step(model: QueueModel, now: int) -> Woken[list[CancelStatus]]:
            woken = self._waking_groups(
                model, now, lambda: [model.cancel(now, target, operation) for target in targets]
            )
            return self._with_notices(now, woken)

        return self._once("cancel", queue, operation, step)

    def reschedule(
        self,
        queue: str,
        targets: Sequence[Target],
        operation: Operation,
        *,
        delay_ms: int = 0,
        at_ms: int | None = None,
    ) -> Call[Woken[list[RescheduleStatus]]]:
        def step(model: QueueModel, now: int) -> Woken[list[RescheduleStatus]]:
            due_ms = now + delay_ms if at_ms is None else at_ms
            return self._waking(
                model, now, lambda: [model.reschedule(now, target, due_ms, operation) for target in targets]
            )

        return self._once("reschedule", queue, operation, step)

    def change_priority(
        self, queue: str, ids: Sequence[str], priority: int, operation: Operation
    ) -> Call[Woken[list[PriorityStatus]]]:
        def step(model: QueueModel, now: int) -> Woken[list[PriorityStatus]]:
            return self._waking(model, now, lambda: [model.change_priority(now, id, priority, operation) for id in ids])

        return self._once("change_priority", queue, operation, step)

    def outgoing(self, queue: str, limit: int) -> Call[list[Continuation | Notice]]:
        return ModelCall("outgoing", lambda now: [])

    def forwarded(self, queue: str, ids: Sequence[str]) -> Call[None]:
        return ModelCall("forwarded", lambda now: None)

    def arrive(self, queue: str, notices: Sequence[Notice]) -> Call[Woken[None]]:
        return ModelCall("arrive", lambda now: Woken(None, {}))

    def watch(self, queue: str, message_id: str, waiter: str | None) -> Call[Watched]:
        return ModelCall("watch", lambda now: chains.watch(self._queue(queue), now, message_id, waiter))

    def watch_chain(self, queue: str, message_id: str, waiter: str | None) -> Call[ChainState]:
        return ModelCall("watch_chain", lambda now: chains.watch_chain(self._queue(queue), now, message_id, waiter))

    def links(self, queue: str, message_id: str) -> Call[Links]:
        return ModelCall("links", lambda now: chains.links(self._queue(queue), now, message_id))

    def result(self, queue: str, message_id: str) -> Call[bytes | None]:
        def step(now: int) -> bytes | None:
            data, until = self._queue(queue).results.get(message_id, (None, 0))
            return data if until > now else None

        return ModelCall("result", step)

    # ---- reading -----------------------------------------------------------------------------------------

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
    ) -> Call[Page]:
        def fits(record: Record) -> bool:
            if key is not None and state not in ("dead", "done") and not self._queue(queue).has_key(record):
                return False  # it gave its key up when it was claimed
            wanted = ((id, record.id), (key, record.key), (group, record.group), (reason, record.reason))
            return all(want is None or want == have for want, have in wanted)

        def step(now: int) -> Page:
            model = self._queue(queue)
            found: list[Record] = []
            last: list[int | str] = []
            size = 0
            for seen, (record, place) in enumerate(model.listing(state, cursor)):
                # Like the stores that have an index of ids and keys, and of nothing else.
                is_full = len(found) == limit or size >= CHUNK_BYTES_MAX
                if is_full or (seen == SCANNED_MAX and id is None and key is None):
                    return Page([r.stored() for r in found], msgspec.json.encode(last).decode())
                last = place
                if fits(record):
                    found.append(record)
                    size += len(record.envelope)
            return Page([r.stored() for r in found], None)

        return ModelCall("peek", step)

    def dead_since(self, at_ms: int) -> str:
        return dead_cursor(at_ms)

    def stats(self, queue: str, *, minutes: int = 0) -> Call[StatsRecord]:
        return ModelCall("stats", lambda now: self._queue(queue).stats(now, minutes))

    def stats_many(self, queues: Sequence[str], *, minutes: int = 0) -> list[Call[list[StatsRecord]]]:
        def step(now: int) -> list[StatsRecord]:
            return [cast("ModelCall[StatsRecord]", self.stats(queue, minutes=minutes)).step(now) for queue in queues]

        return [ModelCall("stats_many", step)]

    def trace(self, queue: str, message_id: str, cursor: str | None = None) -> Call[TracePage]:
        def step(now: int) -> TracePage:
            return TracePage([e for e in self._queue(queue).journal if e.message_id == message_id], None)

        return ModelCall("trace", step)

    def holders(self, queues: Sequence[str], key: str) -> list[Call[list[tuple[str, str]]]]:
        def step(now: int) -> list[tuple[str, str]]:
            found = [(queue, self._queue(queue).keys.get(key)) for queue in queues]
            return [
                (queue, id)
                for queue, holder in found
                if holder is not None
                for id in (holder.owner, holder.parked)
                if id is not None
            ]

        return [ModelCall("holders", step)]

    def queues(self) -> Call[list[str]]:
        return ModelCall("queues", lambda now: sorted(name for name, model in self._queues.items() if model.made))

    def locate(
        self, queues: Sequence[str], message_id: str, *, in_journals: bool = False
    ) -> list[Call[list[FoundMessage]]]:
        def step(now: int) -> list[FoundMessage]:
            found = list[FoundMessage]()
            for queue in queues:
                model = self._queue(queue)
                if in_journals:
                    if any(event.message_id == message_id for event in model.journal):
                        found.append(FoundMessage(queue, message_id, None))
                    continue
                known = chains.watch(model, now, message_id, None)
                if known.state is not None or known.ended is not None:
                    found.append(FoundMessage(queue, message_id, known.state, known.ended))
            return found

        return [ModelCall("locate", step)]

    # ---- running a queue ---------------------------------------------------------------------------------

    def redrive(
        self,
        queue: str,
        limit: int,
        operation: Operation,
        *,
        ids: Sequence[str] = (),
        reason: str | None = None,
        cursor: str | None = None,
    ) -> Call[Woken[Redriven]]:
        def step(model: QueueModel, now: int) -> Woken[Redriven]:
            return self._waking(model, now, lambda: model.redrive(now, limit, operation, ids, reason))

        return self._once("redrive", queue, operation, step)

    def replace_dead(
        self, queue: str, message_id: str, draft: Draft, operation: Operation
    ) -> Call[Woken[Published | None]]:
        def step(model: QueueModel, now: int) -> Woken[Published | None]:
            woken = self._waking(model, now, lambda: model.replace_dead(now, message_id, draft, operation))
            return self._with_notices(now, woken)

        return self._once("replace_dead", queue, operation, step)

    def purge(
        self, queue: str, state: MessageState, limit: int, operation: Operation, *, ids: Sequence[str] = ()
    ) -> Call[Woken[Purged]]:
        check_purge(state, ids)

        def step(model: QueueModel, now: int) -> Woken[Purged]:
            woken = self._waking_groups(model, now, lambda: model.purge(now, state, limit, operation, ids))
            return self._with_notices(now, woken)

        return self._once("purge", queue, operation, step)

    def check(self, queue: str, cursor: str | None, *, mend: bool = False) -> Call[CheckPage]:
        def step(now: int) -> CheckPage:
            model = self._queue(queue)
            return self._waking(model, now, lambda: model.check(now, mend=mend)).result

        return ModelCall("check", step)

    def configure(self, queue: str, changes: Mapping[str, Any]) -> Call[Woken[PolicyRecord]]:
        def step(now: int) -> Woken[PolicyRecord]:
            model = self._queue_to_make(queue)

            return self._waking(model, now, lambda: model.configure(now, changes), also=lambda: worth_waking(model))

        return ModelCall("configure", step)

    def policy(self, queue: str) -> Call[PolicyRecord]:
        return ModelCall("policy", lambda now: self._queue(queue).policy)

    def pause(self, queue: str) -> Call[bool]:
        return ModelCall("pause", lambda now: self._queue_to_make(queue).set_paused(now, True))

    def resume(self, queue: str) -> Call[Woken[bool]]:
        def step(now: int) -> Woken[bool]:
            model = self._queue_for_writing(queue)
            changed = model.set_paused(now, False)
            return self._waking(model, now, lambda: changed, also=lambda: worth_resuming(model) if changed else 0)

        return ModelCall("resume", step)

    # ---- groups ------------------------------------------------------------------------------------------

    def groups(self, queue: str, limit: int, *, cursor: str | None = None, group: str | None = None) -> Call[GroupPage]:
        return ModelCall("groups", lambda now: groups.page(self._queue(queue), now, limit, cursor, group))

    def configure_group(self, queue: str, group: str, changes: Mapping[str, Any]) -> Call[Woken[bool]]:
        def step(now: int) -> Woken[bool]:
            model = self._queue(queue)
            changed = groups.configure_group(model, now, group, changes)
            names = model.wake(now, groups.worth_configuring(model, now, group) if changed else 0)
            return Woken(changed, {queue: names} if names else {})

        return ModelCall("configure_group", step)

    def skip_held(self, queue: str, group: str, operation: Operation) -> Call[Woken[str | None]]:
        def step(model: QueueModel, now: int) -> Woken[str | None]:
            return self._waking_groups(model, now, lambda: groups.skip_held(model, now, group, operation))

        return self._once("skip_held", queue, operation, step)

    def strand_group(self, queue: str, group: str) -> ModelCall[None]:
        """For tests: take a group that can go on out of the line, so that no claim finds its messages."""

        def step(now: int) -> None:
            del self._queues[queue].line[group]

        return ModelCall("damage", step)

    def remove(self, queue: str, operation: Operation) -> Call[Removal]:
        def step(now: int) -> Removal:
            model = self._queue(queue)
            if model.removed_mark == operation.mark:
                return Removal(True, made_again=model.made)
            check_removal(queue, operation, now, window_ms=self.replay_ttl_ms, removed_ms=model.removed_ms)
            left = model.left(now)
            if left or not model.made:
                return Removal(model.made, left)
            self._sweep(now)
            self._queues[queue] = model.successor(now, operation.mark)
            self._scheduled.pop(queue, None)
            return Removal(True)

        return ModelCall("remove", step)

    def _sweep(self, now: int) -> None:
        """Delete expired records of names that are not queues."""
        for name in [name for name, model in self._queues.items() if not model.is_wanted(now)]:
            del self._queues[name]

    def unlist(self, queue: str) -> list[Call[None]]:
        return []

    # ---- who works -----------------------------------------------------------------------------------------

    def poll(
        self, idle: Sequence[Idle], *, registration: Registration | None = None, repeat_to: str | None = None
    ) -> list[Call[Polled]]:
        def part(chosen: Sequence[Idle], given: Registration | None) -> Call[Polled]:
            record = b"" if given is None else pack(given.heartbeat)

            def step(now: int) -> Polled:
                elected = None
                if given is not None:
                    self._register.heartbeat(now, given.heartbeat.name, record, given.ttl_ms)
                    if given.role is not None:
                        elected = self._leaders.elect(now, given.role, given.heartbeat.name, given.role_ttl_ms)
                requested = None if given is None else self._register.requested(given.heartbeat.name)
                polled = [self._queue(one.queue).poll(now, one.sleeper) for one in chosen]
                return Polled(polled, now, elected, requested)

            return ModelCall("poll", step)

        return [part(chosen, None if at else registration) for at, chosen in enumerate(poll_parts(idle))]

    def heartbeat(self, heartbeat: Heartbeat, ttl_ms: int) -> Call[int]:
        record = pack(heartbeat)
        return ModelCall("heartbeat", lambda now: self._register.heartbeat(now, heartbeat.name, record, ttl_ms))

    def unregister(self, name: str) -> Call[bool]:
        return ModelCall("unregister", lambda now: self._register.unregister(name))

    def workers(self) -> Call[list[WorkerRecord]]:
        return ModelCall("workers", self._register.workers)

    def request_worker(self, name: str, request: WorkerRequest) -> Call[bool]:
        return ModelCall("request_worker", lambda now: self._register.request(now, name, request))

    # ---- shared records ----------------------------------------------------------------------------------

    def save_record(
        self,
        kind: str,
        name: str,
        data: bytes | None,
        *,
        version: int | None = None,
        ttl_ms: int | None = None,
        keep: int = RECORDS_MAX,
    ) -> Call[RecordSaved]:
        def step(now: int) -> RecordSaved:
            return self._shared.save(now, kind, name, data, version, ttl_ms, keep)

        return ModelCall("save_record", step)

    def records(
        self, kind: str, *, names: Sequence[str] = (), cursor: str | None = None, limit: int = RECORDS_PAGE_MAX
    ) -> Call[RecordPage]:
        return ModelCall("records", lambda now: self._shared.page(now, kind, names, cursor, limit))

    # ---- the journal -------------------------------------------------------------------------------------

    def journal(self, queue: str, after: int, limit: int) -> Call[EventPage]:
        def step(now: int) -> EventPage:
            model = self._queue(queue)
            events = [e for e in model.journal if e.number > after][:limit]
            last = events[-1].number if events else max(after, model.journal_first - 1)
            return EventPage(events, last, model.journal_first, model.journal_last)

        return ModelCall("journal", step)

    def journal_reader(self, queue: str, name: str, read_to: int | None) -> Call[int]:
        return ModelCall("journal_reader", lambda now: self._queue_to_make(queue).reader(name, read_to))

    def journal_forget(self, queue: str, name: str) -> Call[bool]:
        return ModelCall(
            "journal_forget", lambda now: self._queue_for_writing(queue).readers.pop(name, None) is not None
        )

    def journal_trim(self, queue: str, up_to: int) -> Call[int]:
        return ModelCall("journal_trim", lambda now: self._queue_for_writing(queue).trim_journal(now, up_to))

    # ---- schedules and leaders ---------------------------------------------------------------------------

    def save_schedule(
        self, queue: str, schedule: StoredSchedule, *, version: str | None, next_ms: int | None
    ) -> Call[Saved]:
        def step(now: int) -> Saved:
            saved, changed = scheduling.save_schedule(self._queue_for_writing(queue), schedule, version, next_ms)
            if changed:
                self._queue_to_make(queue)
                self._scheduled[queue] = self._scheduled.get(queue, 0) + 1
            return saved

        return ModelCall("save_schedule", step)

    def remove_schedule(self, queue: str, key: str) -> Call[bool]:
        return ModelCall("remove_schedule", lambda now: self._queue(queue).schedules.pop(key, None) is not None)

    def schedules(self, queue: str) -> Call[ScheduleList]:
        def step(now: int) -> ScheduleList:
            found = self._queue(queue).schedules
            return ScheduleList(now, [found[key] for key in sorted(found)])

        return ModelCall("schedules", step)

    def scheduled(self) -> Call[dict[str, int]]:
        return ModelCall("scheduled", lambda now: dict(self._scheduled))

    def schedules_changed(self, queue: str) -> Call[None]:
        return ModelCall("schedules_changed", lambda now: None)

    def fire_schedule(
        self, queue: str, step: FireStep, drafts: Sequence[Draft], operation: Operation
    ) -> Call[Woken[Fired]]:
        def run(model: QueueModel, now: int) -> Woken[Fired]:
            woken = self._waking(model, now, lambda: scheduling.fire_schedule(model, now, step, drafts, operation))
            return self._with_notices(now, woken)

        return self._once("fire_schedule", queue, operation, run)

    def trigger_schedule(
        self, queue: str, key: str, draft: Draft, operation: Operation
    ) -> Call[Woken[Published | None]]:
        def run(model: QueueModel, now: int) -> Woken[Published | None]:
            woken = self._waking(model, now, lambda: scheduling.trigger_schedule(model, now, key, draft, operation))
            return self._with_notices(now, woken)

        return self._once("trigger_schedule", queue, operation, run)

    def elect(self, role: str, name: str, ttl_ms: int) -> Call[Elected]:
        return ModelCall("elect", lambda now: self._leaders.elect(now, role, name, ttl_ms))

    def resign(self, role: str, name: str) -> Call[bool]:
        return ModelCall("resign", lambda now: self._leaders.resign(now, role, name))

    def promote(self, queue: str) -> Call[Woken[Promoted]]:
        def step(now: int) -> Woken[Promoted]:
            model = self._queue(queue)
            return self._with_notices(now, self._waking(model, now, lambda: scheduling.promote(model, now)))

        return ModelCall("promote", step)


def take(items: list[T]) -> list[T]:
    """Return all items of a list and empty it."""
    result = items[:]
    items.clear()
    return result


def worth_resuming(model: QueueModel) -> int:
    """Return how many sleepers a resume should wake: one of them for timers and lease ends."""
    return model.count("ready") + (model.next_due(0) is not None or model.next_lease(0) is not None)


def worth_waking(model: QueueModel) -> int:
    """Return how many sleepers a changed limit should wake."""
    return model.count("ready") + (model.next_due(0) is not None)


class MemoryExecutor:
    """Runs model calls under the store's lock."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def run(self, call: Call[T]) -> T:
        with self._store.lock:
            now = self._store.clock()
            self._store.take_also()  # of an earlier step, whose answer could not contain it
            result = cast("ModelCall[T]", call).step(now)
            # Calls that return no names wake no waiter: waiters poll again later.
            self._store.deliver_notices(now)
            self._store.cut_journals(now)
            return result

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        results: list[T | Exception] = []
        for call in calls:
            # One failing part of a batch must not hide the others.
            try:
                results.append(self.run(call))
            except Exception as error:
                results.append(error)
        return results

    def close(self) -> None:
        """Nothing to close: the store exists as long as its owner."""


class AsyncMemoryExecutor:
    """The same for an event loop: a model step is too short to be worth a thread."""

    def __init__(self, store: MemoryStore) -> None:
        self._sync = MemoryExecutor(store)

    async def run(self, call: Call[T]) -> T:
        await asyncio.sleep(0)  # a loop of calls must not block the event loop
        return self._sync.run(call)

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        await asyncio.sleep(0)
        return self._sync.run_many(calls)

    async def close(self) -> None:
        """Nothing to close."""
