"""The SQLite store: each verb as a call on the file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from waypost.errors import ConfigurationError
from waypost.identity import Operation, new_nonce
from waypost.policy import CLAIM_BYTES_MAX, RECORDS_MAX, RECORDS_PAGE_MAX, REPLAY_TTL_MS, PolicyRecord
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
    poll_parts,
)
from waypost.store.register import pack
from waypost.store.sqlite import (
    admin,
    chains,
    claim,
    groups,
    journal,
    locate,
    peek,
    poll,
    remove,
    replays,
    schedules,
    settle,
    shared,
    stats,
    workers,
)
from waypost.store.sqlite import check as checking
from waypost.store.sqlite.connection import check_library
from waypost.store.sqlite.executor import AsyncSqliteExecutor, SqliteExecutor
from waypost.store.sqlite.known import KnownLeases
from waypost.store.sqlite.publish import publish
from waypost.store.sqlite.queue_records import QueueRecords
from waypost.store.sqlite.schema import NO_STATE, Spelling
from waypost.store.sqlite.step import SqliteCall, Step
from waypost.store.sqlite.transactions import SqliteTransactions
from waypost.store.sqlite.wake import pick_sleepers, waking, waking_groups
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
    StatsRecord,
    StoredSchedule,
    TracePage,
    Watched,
    WorkerRecord,
    WorkerRequest,
)

if TYPE_CHECKING:
    from waypost.store.bulk.reader import BulkConnection
    from waypost.store.sqlite.bulk import SqliteBulkReader
    from waypost.store.sqlite.checkup import SqliteCheckup

T = TypeVar("T")

_QUEUES = """
    SELECT q.name FROM {queue} q LEFT JOIN {meta} m ON m.name = 'removal:' || q.name
    WHERE m.name IS NULL OR NOT json_extract(m.value, '$.gone') ORDER BY q.name"""
_RESULT = "SELECT data FROM {result} WHERE queue = ? AND id = ? AND until_ms > ?"


def wall_clock_ms() -> int:
    """Return the machine's time, which is the same for every process that can open the file."""
    return time.time_ns() // 1_000_000


class SqliteStore:
    """Keeps everything in one file, for all processes of one machine. `clock` is for tests."""

    kind = "sqlite"
    capabilities = Capabilities(reach="machine", durability="each commit is on the disk")
    blocking_waits = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        namespace: str = "wp",
        clock: Callable[[], int] | None = None,
        replay_ttl_ms: int = REPLAY_TTL_MS,
    ) -> None:
        check_library()
        given = os.fspath(path)
        if not given or given.startswith((":memory:", "file:")):
            raise ConfigurationError(
                f"{given!r} is not a file; use memory:// for a store that lives in this process, "
                "or sqlite:///name.db for one in a file"
            )
        #: Absolute: connections are opened again, after a fork for one, and the working directory may be another then.
        self.path = given if os.path.isabs(given) else os.path.join(os.getcwd(), given)
        self.namespace = namespace
        self.clock = clock or wall_clock_ms
        self.replay_ttl_ms = replay_ttl_ms
        self.spelling = Spelling(namespace)
        self.place: object = self.path
        self.channel = NaturalChannel("files", self.path)
        self.transactions = SqliteTransactions(self)
        self._known = KnownLeases()

    def bulk_reader(self, connection: BulkConnection) -> SqliteBulkReader:
        from waypost.store.sqlite.bulk import SqliteBulkReader

        return SqliteBulkReader(self, connection)

    def checkup(self, executor: object) -> SqliteCheckup:
        from waypost.store.sqlite.checkup import SqliteCheckup

        return SqliteCheckup(self)

    def strand(self, queue: str, message_id: str) -> SqliteCall[None]:
        """For tests: remove a message from all indexes in which a claim could find it."""

        def step(step: Step) -> None:
            number = step.queue_for_writing(queue).number
            step.execute("UPDATE {message} SET state = ? WHERE queue = ? AND id = ?", (NO_STATE, number, message_id))

        return SqliteCall("damage", step)

    def _executor(self) -> SqliteExecutor:
        return SqliteExecutor(
            self.path, self.spelling, self.clock, replay_ttl_ms=self.replay_ttl_ms, on_busy=self.transactions.on_busy
        )

    def connect(self, *, start_timeout: float) -> SqliteExecutor:
        """Open the file; its tables are created if they are missing."""
        executor = self._executor()
        executor.start(start_timeout)
        return executor

    async def connect_async(self, *, start_timeout: float) -> AsyncSqliteExecutor:
        """The same for an event loop."""
        executor = AsyncSqliteExecutor(self._executor())
        try:
            await executor.start(start_timeout)
        except BaseException:
            await executor.close()
            raise
        return executor

    @staticmethod
    def _once(
        name: str, queue: str, operation: Operation, form: replays.Form[T], work: Callable[[QueueRecords], T]
    ) -> SqliteCall[T]:
        """Return the call of a verb that runs once per operation: a repeat gets the first result."""

        def run(step: Step) -> T:
            records = step.queue_for_writing(queue, operation.session)
            first = replays.replayed(records, operation)
            if first is not None:
                return form.unpack(first)
            result = work(records)
            replays.remember(records, operation, form.pack(result))
            return result

        fills = name in ("publish", "fire_schedule", "trigger_schedule", "replace_dead")
        return SqliteCall(name, run, fills=fills, shares_step=name == "publish")

    def time(self) -> Call[int]:
        return SqliteCall("time", lambda step: step.now, writes=False)

    # ---- the path of a message ---------------------------------------------------------------------------

    def publish(self, queue: str, drafts: Sequence[Draft], operation: Operation) -> Call[Woken[list[Published]]]:
        def work(records: QueueRecords) -> Woken[list[Published]]:
            return _with_notices(records, _woken(records, lambda: publish(records, drafts, str(operation))))

        return self._once("publish", queue, operation, replays.PUBLISHED, work)

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

        def run(step: Step) -> Claimed:
            records = step.queue_for_writing(queue, operation.session)
            first = replays.replayed(records, operation)
            if first is None and not replay:
                claimed, ids = claim.claim(
                    records, limit, operation, fence, worker, sleeper, poll_soon_ms, bytes_max, self._known
                )
                wake = chains.deliver_notices(step) if step.notices or step.waiters_to_wake else {}
                also = step.also.take()
                replays.remember(records, operation, replays.CLAIMED.pack((fence, ids, also, wake)))
            else:
                # Nothing was run, and must not run now: a request that arrives later finds this result and claims
                # nothing.
                held, ids, also, wake = (fence, [], (), {}) if first is None else replays.CLAIMED.unpack(first)
                replays.remember(records, operation, replays.CLAIMED.pack((fence, ids, also, wake)))
                claimed = claim.claim_again(records, ids, held, fence)
            return structs.replace(claimed, also=also, wake=wake) if also or wake else claimed

        return SqliteCall("claim", run)

    def settle(
        self, queue: str, settlements: Sequence[Settlement], operation: Operation, *, next_claim: int = 0
    ) -> Call[Woken[list[SettleStatus]]]:
        def work(records: QueueRecords) -> Woken[list[SettleStatus]]:
            wake: dict[str, list[str]] = {}

            def freed_slots() -> int:
                if records.policy.max_running is None:
                    return 0
                return min(len(settlements), max(0, records.numbers["ready"] - records.freshly_ready))

            woken = _woken(
                records,
                lambda: settle.settle(records, settlements, str(operation), wake, self._known),
                also=freed_slots,
                next_claim=next_claim,
            )
            return _with_notices(records, Woken(woken.result, wake | woken.wake))

        return self._once("settle", queue, operation, replays.SETTLED, work)

    def extend(self, queue: str, holds: Sequence[Hold], operation: Operation) -> Call[list[ExtendStatus]]:
        return self._once("extend", queue, operation, replays.EXTENDED, lambda records: settle.extend(records, holds))

    def cancel(self, queue: str, targets: Sequence[Target], operation: Operation) -> Call[Woken[list[CancelStatus]]]:
        def work(records: QueueRecords) -> Woken[list[CancelStatus]]:
            return _with_notices(
                records, _groups_woken(records, lambda: settle.cancel(records, targets, str(operation)))
            )

        return self._once("cancel", queue, operation, replays.CANCELLED, work)

    def reschedule(
        self,
        queue: str,
        targets: Sequence[Target],
        operation: Operation,
        *,
        delay_ms: int = 0,
        at_ms: int | None = None,
    ) -> Call[Woken[list[RescheduleStatus]]]:
        def work(records: QueueRecords) -> Woken[list[RescheduleStatus]]:
            due_ms = records.now + delay_ms if at_ms is None else at_ms
            return _woken(records, lambda: settle.reschedule(records, targets, due_ms, str(operation)))

        return self._once("reschedule", queue, operation, replays.RESCHEDULED, work)

    def change_priority(
        self, queue: str, ids: Sequence[str], priority: int, operation: Operation
    ) -> Call[Woken[list[PriorityStatus]]]:
        def work(records: QueueRecords) -> Woken[list[PriorityStatus]]:
            return _woken(records, lambda: settle.change_priority(records, ids, priority, str(operation)))

        return self._once("change_priority", queue, operation, replays.PRIORITY_CHANGED, work)

    def outgoing(self, queue: str, limit: int) -> Call[list[Continuation | Notice]]:
        return SqliteCall("outgoing", lambda step: [], writes=False)

    def forwarded(self, queue: str, ids: Sequence[str]) -> Call[None]:
        return SqliteCall("forwarded", lambda step: None, writes=False)

    def arrive(self, queue: str, notices: Sequence[Notice]) -> Call[Woken[None]]:
        return SqliteCall("arrive", lambda step: Woken(None, {}), writes=False)

    def watch(self, queue: str, message_id: str, waiter: str | None) -> Call[Watched]:
        return SqliteCall(
            "watch", lambda step: chains.watch(step, queue, message_id, waiter), writes=waiter is not None
        )

    def watch_chain(self, queue: str, message_id: str, waiter: str | None) -> Call[ChainState]:
        return SqliteCall(
            "watch_chain", lambda step: chains.watch_chain(step, queue, message_id, waiter), writes=waiter is not None
        )

    def links(self, queue: str, message_id: str) -> Call[Links]:
        return SqliteCall("links", lambda step: chains.links(step, queue, message_id), writes=False)

    def result(self, queue: str, message_id: str) -> Call[bytes | None]:
        def run(step: Step) -> bytes | None:
            row = step.execute(_RESULT, (step.queue_for_reading(queue).number, message_id, step.now)).fetchone()
            return None if row is None else bytes(row[0])

        return SqliteCall("result", run, writes=False)

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
        filters = {"id": id, "key": key, "group": group, "reason": reason}
        return SqliteCall(
            "peek", lambda step: peek.peek(step.queue_for_reading(queue), state, limit, cursor, filters), writes=False
        )

    def dead_since(self, at_ms: int) -> str:
        return dead_cursor(at_ms)

    def stats(self, queue: str, *, minutes: int = 0) -> Call[StatsRecord]:
        return SqliteCall("stats", lambda step: stats.stats(step.queue_for_reading(queue), minutes), writes=False)

    def stats_many(self, queues: Sequence[str], *, minutes: int = 0) -> list[Call[list[StatsRecord]]]:
        def run(step: Step) -> list[StatsRecord]:
            return [stats.stats(step.queue_for_reading(queue), minutes) for queue in queues]

        return [SqliteCall("stats_many", run, writes=False)]

    def trace(self, queue: str, message_id: str, cursor: str | None = None) -> Call[TracePage]:
        return SqliteCall("trace", lambda step: journal.trace(step.queue_for_reading(queue), message_id), writes=False)

    def holders(self, queues: Sequence[str], key: str) -> list[Call[list[tuple[str, str]]]]:
        return [SqliteCall("holders", lambda step: peek.holders(step, queues, key), writes=False)]

    def queues(self) -> Call[list[str]]:
        return SqliteCall("queues", lambda step: [name for (name,) in step.execute(_QUEUES)], writes=False)

    def locate(
        self, queues: Sequence[str], message_id: str, *, in_journals: bool = False
    ) -> list[Call[list[FoundMessage]]]:
        search = locate.find_in_journals if in_journals else locate.find_messages
        return [SqliteCall("locate", lambda step: search(step, queues, message_id), writes=False)]

    # ---- administration ----------------------------------------------------------------------------------

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
        def work(records: QueueRecords) -> Woken[Redriven]:
            return _woken(records, lambda: admin.redrive(records, limit, str(operation), ids, reason))

        return self._once("redrive", queue, operation, replays.REDRIVEN, work)

    def replace_dead(
        self, queue: str, message_id: str, draft: Draft, operation: Operation
    ) -> Call[Woken[Published | None]]:
        def work(records: QueueRecords) -> Woken[Published | None]:
            return _with_notices(
                records, _woken(records, lambda: admin.replace_dead(records, message_id, draft, str(operation)))
            )

        return self._once("replace_dead", queue, operation, replays.TRIGGERED, work)

    def purge(
        self, queue: str, state: MessageState, limit: int, operation: Operation, *, ids: Sequence[str] = ()
    ) -> Call[Woken[Purged]]:
        check_purge(state, ids)

        def work(records: QueueRecords) -> Woken[Purged]:
            return _with_notices(
                records, _groups_woken(records, lambda: admin.purge(records, state, limit, str(operation), ids))
            )

        return self._once("purge", queue, operation, replays.PURGED, work)

    def check(self, queue: str, cursor: str | None, *, mend: bool = False) -> Call[CheckPage]:
        def run(step: Step) -> CheckPage:
            if not mend:
                return checking.check(step.queue_for_reading(queue), cursor, mend=False)
            records = step.queue_for_writing(queue)
            return waking(records, lambda: checking.check(records, cursor, mend=True))[0]

        return SqliteCall("check", run, writes=mend)

    def configure(self, queue: str, changes: Mapping[str, Any]) -> Call[Woken[PolicyRecord]]:
        def run(step: Step) -> Woken[PolicyRecord]:
            records = step.queue_for_writing(queue)
            return _woken(records, lambda: admin.configure(records, changes), also=lambda: admin.worth_waking(records))

        return SqliteCall("configure", run)

    def policy(self, queue: str) -> Call[PolicyRecord]:
        return SqliteCall("policy", lambda step: step.queue_for_reading(queue).policy, writes=False)

    def pause(self, queue: str) -> Call[bool]:
        return SqliteCall("pause", lambda step: admin.set_paused(step.queue_for_writing(queue), True))

    def resume(self, queue: str) -> Call[Woken[bool]]:
        def run(step: Step) -> Woken[bool]:
            records = step.queue_for_writing(queue)
            changed = admin.set_paused(records, False)
            return _woken(records, lambda: changed, also=lambda: admin.worth_resuming(records) if changed else 0)

        return SqliteCall("resume", run)

    # ---- groups --------------------------------------------------------------------------------------------

    def groups(self, queue: str, limit: int, *, cursor: str | None = None, group: str | None = None) -> Call[GroupPage]:
        def run(step: Step) -> GroupPage:
            return groups.page(step.queue_for_reading(queue), limit, cursor, group)

        return SqliteCall("groups", run, writes=False)

    def configure_group(self, queue: str, group: str, changes: Mapping[str, Any]) -> Call[Woken[bool]]:
        def run(step: Step) -> Woken[bool]:
            records = step.queue_for_writing(queue)
            changed = groups.configure_group(records, group, changes)
            names = pick_sleepers(records, groups.worth_configuring(records, group) if changed else 0)
            return Woken(changed, {queue: names} if names else {})

        return SqliteCall("configure_group", run)

    def skip_held(self, queue: str, group: str, operation: Operation) -> Call[Woken[str | None]]:
        def work(records: QueueRecords) -> Woken[str | None]:
            return _groups_woken(records, lambda: groups.skip_held(records, group, str(operation)))

        return self._once("skip_held", queue, operation, replays.SKIPPED, work)

    def strand_group(self, queue: str, group: str) -> SqliteCall[None]:
        """For tests: remove a group from the line that can hand out a message, so that no claim finds its messages."""
        return SqliteCall("damage", lambda step: groups.strand(step, queue, group))

    # ---- removal -------------------------------------------------------------------------------------------

    def remove(self, queue: str, operation: Operation) -> Call[Removal]:
        return SqliteCall("remove", lambda step: remove.remove(step, queue, operation))

    def unlist(self, queue: str) -> list[Call[None]]:
        return []

    # ---- workers -----------------------------------------------------------------------------------------

    def poll(
        self, idle: Sequence[Idle], *, registration: Registration | None = None, repeat_to: str | None = None
    ) -> list[Call[Polled]]:
        def part(chosen: Sequence[Idle], given: Registration | None) -> Call[Polled]:
            record = b"" if given is None else pack(given.heartbeat)
            return SqliteCall("poll", lambda step: poll.poll(step, chosen, given, record))

        return [part(chosen, None if at else registration) for at, chosen in enumerate(poll_parts(idle))]

    def heartbeat(self, heartbeat: Heartbeat, ttl_ms: int) -> Call[int]:
        record = pack(heartbeat)
        return SqliteCall("heartbeat", lambda step: workers.heartbeat(step, heartbeat.name, record, ttl_ms))

    def unregister(self, name: str) -> Call[bool]:
        return SqliteCall("unregister", lambda step: workers.unregister(step, name))

    def workers(self) -> Call[list[WorkerRecord]]:
        return SqliteCall("workers", workers.workers, writes=False)

    def request_worker(self, name: str, request: WorkerRequest) -> Call[bool]:
        return SqliteCall("request_worker", lambda step: workers.request(step, name, request))

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
        return SqliteCall(
            "save_record", lambda step: shared.save(step, kind, name, data, version, ttl_ms, keep), fills=True
        )

    def records(
        self, kind: str, *, names: Sequence[str] = (), cursor: str | None = None, limit: int = RECORDS_PAGE_MAX
    ) -> Call[RecordPage]:
        return SqliteCall("records", lambda step: shared.page(step, kind, names, cursor, limit), writes=False)

    # ---- the journal -------------------------------------------------------------------------------------

    def journal(self, queue: str, after: int, limit: int) -> Call[EventPage]:
        return SqliteCall(
            "journal", lambda step: journal.journal(step.queue_for_reading(queue), after, limit), writes=False
        )

    def journal_reader(self, queue: str, name: str, read_to: int | None) -> Call[int]:
        return SqliteCall("journal_reader", lambda step: journal.reader(step.queue_for_writing(queue), name, read_to))

    def journal_forget(self, queue: str, name: str) -> Call[bool]:
        return SqliteCall("journal_forget", lambda step: journal.forget_reader(step.queue_for_writing(queue), name))

    def journal_trim(self, queue: str, up_to: int) -> Call[int]:
        return SqliteCall("journal_trim", lambda step: step.queue_for_writing(queue).trim_journal(up_to))

    # ---- schedules and leaders ---------------------------------------------------------------------------

    def save_schedule(
        self, queue: str, schedule: StoredSchedule, *, version: str | None, next_ms: int | None
    ) -> Call[Saved]:
        def run(step: Step) -> Saved:
            return schedules.save_schedule(step.queue_for_writing(queue), schedule, version, next_ms)

        return SqliteCall("save_schedule", run, fills=True)

    def remove_schedule(self, queue: str, key: str) -> Call[bool]:
        return SqliteCall("remove_schedule", lambda step: schedules.remove_schedule(step.queue_for_reading(queue), key))

    def schedules(self, queue: str) -> Call[ScheduleList]:
        return SqliteCall("schedules", lambda step: schedules.schedules(step.queue_for_reading(queue)), writes=False)

    def scheduled(self) -> Call[dict[str, int]]:
        return SqliteCall("scheduled", schedules.scheduled, writes=False)

    def schedules_changed(self, queue: str) -> Call[None]:
        return SqliteCall("schedules_changed", lambda step: None, writes=False)

    def fire_schedule(
        self, queue: str, step: FireStep, drafts: Sequence[Draft], operation: Operation
    ) -> Call[Woken[Fired]]:
        def work(records: QueueRecords) -> Woken[Fired]:
            return _with_notices(
                records, _woken(records, lambda: schedules.fire_schedule(records, step, drafts, str(operation)))
            )

        return self._once("fire_schedule", queue, operation, replays.FIRED, work)

    def trigger_schedule(
        self, queue: str, key: str, draft: Draft, operation: Operation
    ) -> Call[Woken[Published | None]]:
        def work(records: QueueRecords) -> Woken[Published | None]:
            return _with_notices(
                records, _woken(records, lambda: schedules.trigger_schedule(records, key, draft, str(operation)))
            )

        return self._once("trigger_schedule", queue, operation, replays.TRIGGERED, work)

    def elect(self, role: str, name: str, ttl_ms: int) -> Call[Elected]:
        return SqliteCall("elect", lambda step: schedules.elect(step, role, name, ttl_ms))

    def resign(self, role: str, name: str) -> Call[bool]:
        return SqliteCall("resign", lambda step: schedules.resign(step, role, name))

    def promote(self, queue: str) -> Call[Woken[Promoted]]:
        def run(step: Step) -> Woken[Promoted]:
            if step.queue_for_reading(queue).number == 0:
                return Woken(Promoted(0, 0, 0, None), {})
            records = step.queue_for_writing(queue)
            return _with_notices(records, _woken(records, lambda: schedules.promote(records)))

        return SqliteCall("promote", run)


def _woken(
    records: QueueRecords, work: Callable[[], T], *, also: Callable[[], int] = lambda: 0, next_claim: int = 0
) -> Woken[T]:
    result, names = waking(records, work, also=also, next_claim=next_claim)
    return Woken(result, {records.name: names} if names else {})


def _groups_woken(records: QueueRecords, work: Callable[[], T]) -> Woken[T]:
    result, names = waking_groups(records, work)
    return Woken(result, {records.name: names} if names else {})


def _with_notices(records: QueueRecords, woken: Woken[T]) -> Woken[T]:
    """Apply the notices of a step, and add the waiters to wake and the side effects to its result."""
    step = records.step
    if step.notices or step.waiters_to_wake:
        add_wakes(woken.wake, chains.deliver_notices(step))
    also = step.also.take()
    return Woken(woken.result, woken.wake, also) if also else woken
