"""The translator: each verb of the contract as a call of one database function, and the decoding of its reply."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from waypost import policy as limits
from waypost.identity import Operation, journal_start_ms, new_nonce
from waypost.policy import (
    CLAIM_BYTES_MAX,
    DEFAULT_POLICY,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    RECORDS_MAX,
    RECORDS_PAGE_MAX,
    UNIQUE_NUMBERS,
    PolicyRecord,
)
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
    check_purge,
    dead_cursor,
    format_changes,
    group_cursor,
    not_grouped,
    poll_parts,
    read_cursor,
    read_record_cursor,
    record_cursor,
)
from waypost.store.postgres import queries
from waypost.store.postgres.constants import NO_STATE, STATES
from waypost.store.postgres.schema import Names
from waypost.store.postgres.statement import (
    BOOL,
    BYTES,
    INT2,
    INT4,
    INT8,
    TEXT,
    Also,
    Parameter,
    PostgresCall,
    array_of_data,
    array_of_flags,
    array_of_ints,
    array_of_numbers,
    array_of_smalls,
    array_of_text,
    by_queue,
    data,
    flag,
    jsonb,
    nothing,
    number,
    one,
    read_published,
    rows_of,
    safe,
    small,
    text,
)
from waypost.store.postgres.transactions import PostgresTransactions, check_publish_reply
from waypost.store.register import pack, registered
from waypost.values import (
    CancelStatus,
    ChainState,
    CheckPage,
    Claimed,
    Continuation,
    Damage,
    DamageKind,
    Elected,
    EventPage,
    ExtendStatus,
    Fired,
    FoundMessage,
    GroupPage,
    GroupRecord,
    Lease,
    Links,
    MessageState,
    Notice,
    Page,
    Polled,
    PolledQueue,
    PriorityStatus,
    Promoted,
    Published,
    PublishStatus,
    Purged,
    RecordPage,
    RecordSaved,
    Redriven,
    Removal,
    Requested,
    RescheduleStatus,
    Saved,
    ScheduleList,
    Settlement,
    SettleStatus,
    SharedRecord,
    StatsRecord,
    StoredSchedule,
    TracePage,
    Watched,
    WorkerRecord,
    WorkerRequest,
)

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

    from waypost.store.bulk.reader import BulkConnection
    from waypost.store.postgres.bulk import PostgresBulkReader
    from waypost.store.postgres.checkup import PostgresCheckup
    from waypost.store.postgres.executor import AsyncPostgresExecutor, PostgresExecutor
    from waypost.store.postgres.sources import Source

T = TypeVar("T")

PUBLISH_STATUS: dict[str, PublishStatus] = {
    "q": "queued", "d": "delayed", "u": "duplicate", "r": "replaced", "e": "extended", "E": "extended", "c": "conflict",
}  # fmt: skip
SETTLE_STATUS: dict[str, SettleStatus] = {
    "d": "done", "r": "retried", "s": "snoozed", "x": "dead", "p": "dropped", "b": "released", "c": "cancelled",
    "e": "replaced", "l": "lost",
}  # fmt: skip
EXTEND_STATUS: dict[str, ExtendStatus] = {"o": "ok", "l": "lost", "c": "cancel"}
PRIORITY_STATUS: dict[str, PriorityStatus] = {"c": "changed", "s": "unchanged", "u": "unknown"}
RESCHEDULE_STATUS: dict[str, RescheduleStatus] = {"m": "moved", "d": "due", "u": "unknown"}
CANCEL_STATUS: dict[str, CancelStatus] = {"c": "cancelled", "r": "requested", "f": "finished", "u": "unknown"}


class _SettleReply(Struct, array_like=True):
    letters: str
    wakes: list[tuple[str, list[str]]]
    also: Also | None = None


class _ClaimReply(Struct, array_like=True):
    next_due_ms: int | None
    next_lease_ms: int | None
    next_rate_ms: int | None
    paused: bool
    lease_ms: int | None
    more: bool
    #: The sleepers to wake, and the side effects.
    besides: tuple[list[tuple[str, list[str]]], Also] | None = None
    grouped: bool = False


_settled_reply = msgspec.json.Decoder(_SettleReply).decode
_claimed_reply = msgspec.json.Decoder(_ClaimReply).decode
_purged_reply = msgspec.json.Decoder(tuple[int, bool, list[tuple[str, list[str]]], Also | None]).decode
_redriven_reply = msgspec.json.Decoder(tuple[list[str], list[str], bool, list[str]]).decode
_check_reply = msgspec.json.Decoder(tuple[int, list[tuple[DamageKind, str | None, str, str | None]], str | None]).decode
_policy_reply = msgspec.json.Decoder(tuple[PolicyRecord, list[str]]).decode
PolledRow = tuple[bool, int | None, int | None, int | None]
_polled_reply = msgspec.json.Decoder(
    tuple[int, tuple[str, int, int] | None, list[PolledRow], tuple[WorkerRequest, int] | None]
).decode
_rescheduled_reply = msgspec.json.Decoder(tuple[str, list[str]]).decode
_links_reply = msgspec.json.Decoder(
    tuple[
        str | None,
        tuple[str, ...],
        tuple[int, str | None, str | None, str | None] | None,
        tuple[str, ...],
        tuple[str, ...],
    ]
).decode
_skipped_reply = msgspec.json.Decoder(tuple[str | None, list[str]]).decode
_groups_reply = msgspec.json.Decoder(list[queries.GroupRow]).decode
_changed_reply = msgspec.json.Decoder(tuple[bool, list[str]]).decode

SCHEDULE_COLUMNS = (
    "status, at_ms, wake, (s).key, (s).version, (s).spec, (s).paused, (s).next_ms, (s).due_ms, (s).fires, (s).missed, "
    "(s).last_ms, (s).state"
)
_promoted_reply = msgspec.json.Decoder(
    tuple[int, int, int, int | None, list[str], Also | None, list[tuple[str, list[str]]]]
).decode
_elected_reply = msgspec.json.Decoder(tuple[str, int, int]).decode
_NOTHING = b"SELECT NULL WHERE false"

_stamp = struct.Struct("!q").pack


class PostgresStore:
    """The contract on PostgreSQL. Made by `from_url` or `from_client`; does no I/O itself."""

    kind = "postgres"
    capabilities = Capabilities(
        reach="network",
        durability="each commit is as durable as the server's synchronous_commit setting",
        needs_migration=True,
        commits_out_of_order=True,
        runs_together=False,
    )
    blocking_waits = None

    def __init__(
        self,
        source: Source,
        *,
        namespace: str = "wp",
        schema: str = "public",
        clock: Callable[[], int] | None = None,
        replay_ttl_ms: int = 300_000,
    ) -> None:
        self.names = Names(schema, namespace)
        self.namespace = namespace
        self.source = source
        self.place = source.place
        self.channel = NaturalChannel("postgres", source)
        self.transactions = PostgresTransactions(self)
        #: For tests: store time comes from this clock instead of the server.
        self.clock = clock
        self._replay_ttl = number(replay_ttl_ms)
        self._commands: dict[tuple[str, int], bytes] = {}

    @classmethod
    def from_url(cls, url: str, **options: Any) -> PostgresStore:
        """Return a store that makes its own connections."""
        from waypost.store.postgres.sources import UrlSource

        return cls(UrlSource(url), **options)

    @classmethod
    def from_client(cls, client: Any, **options: Any) -> PostgresStore:
        """Return a store on the caller's own pool or SQLAlchemy engine, which is never closed by us."""
        from waypost.store.postgres.sources import source_of

        return cls(source_of(client), **options)

    def bulk_reader(self, connection: BulkConnection) -> PostgresBulkReader:
        from waypost.store.postgres.bulk import PostgresBulkReader

        return PostgresBulkReader(self, connection)

    def checkup(self, executor: object) -> PostgresCheckup:
        from waypost.store.postgres.checkup import PostgresCheckup

        return PostgresCheckup(self, executor)

    def strand(self, queue: str, message_id: str) -> Call[None]:
        """For tests: remove a message from all indexes in which a claim could find it."""
        statement = self.names.fill(
            f"UPDATE {{message}} SET state = {NO_STATE} "
            "WHERE queue = (SELECT q.number FROM {queue} q WHERE q.name = $1) AND id = $2"
        )
        return PostgresCall("damage", queue, statement.encode(), [text(queue), text(message_id)], lambda result: None)

    def connect(self, *, start_timeout: float) -> PostgresExecutor:
        from waypost.store.postgres.executor import PostgresExecutor

        return PostgresExecutor(self.source, self.names, start_timeout)

    async def connect_async(self, *, start_timeout: float) -> AsyncPostgresExecutor:
        from waypost.store.postgres.executor import AsyncPostgresExecutor

        executor = AsyncPostgresExecutor(self.source, self.names, start_timeout)
        await executor.start()
        return executor

    # ---- how a verb becomes a statement ------------------------------------------------------------------------

    def _now(self) -> Parameter:
        return number(self.clock() if self.clock else None)

    def _command(self, verb: str, count: int, columns: str = "") -> bytes:
        known = self._commands.get((verb, count))
        if known is None:
            marks = ", ".join(f"${index}" for index in range(1, count + 1))
            call = f"{self.names.of(verb)}({marks})"
            text = f"SELECT {columns} FROM {call}" if columns else f"SELECT {call}"
            known = self._commands[verb, count] = text.encode()
        return known

    def _call(
        self, verb: str, queue: str, parameters: Sequence[Parameter], decode: Callable[[PGresult], T], *, name: str = ""
    ) -> Call[T]:
        return PostgresCall(name or verb, queue, self._command(verb, len(parameters)), parameters, decode)

    def _once(
        self,
        verb: str,
        queue: str,
        operation: Operation,
        parameters: Sequence[Parameter],
        decode: Callable[[PGresult], T],
        *,
        columns: str = "",
        nonce: bytes = b"",
    ) -> PostgresCall[T]:
        """Return the call of a verb that runs once per operation."""
        session, count, stamp, mark = operation
        packed = data(b"".join((session, mark, _stamp(stamp), nonce)))
        common = (text(queue), self._now(), packed, number(count), self._replay_ttl)
        command = self._command(verb, len(common) + len(parameters), columns)
        return PostgresCall(verb, queue, command, (*common, *parameters), decode, prepares=True)

    def time(self) -> Call[int]:
        return self._call(
            "clock", "", [self._now()], lambda result: int.from_bytes(one(result) or b"", "big"), name="time"
        )

    # ---- the path of a message -------------------------------------------------------------------------------

    def publish(self, queue: str, drafts: Sequence[Draft], operation: Operation) -> Call[Woken[list[Published]]]:
        def decode(result: PGresult) -> Woken[list[Published]]:
            reply = read_published(one(result) or b"")
            if not reply.letters:
                return Woken(
                    [Published(draft.id, "queued", queue) for draft in drafts], reply.wake(queue), reply.also or ()
                )
            check_publish_reply(reply.letters, reply.others, queue)
            ids = reply.others or [draft.id for draft in drafts]
            return Woken(
                [Published(id, PUBLISH_STATUS[letter], queue) for id, letter in zip(ids, reply.letters, strict=True)],
                reply.wake(queue),
                reply.also or (),
            )

        if len(drafts) == 1 and _is_simple(drafts[0]):
            parameters = _one_draft(drafts[0])
        else:
            parameters = [array_of_data([draft.envelope for draft in drafts]), *_options(drafts)]
        return self._once("publish", queue, operation, parameters, decode)

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

        def decode(result: PGresult) -> Claimed:
            *rows, last = rows_of(result)
            head = _claimed_reply(last[0])
            wakes, also = head.besides or ((), ())
            leases = [
                Lease(
                    id, token, fence, deliveries, attempts, PRIORITY_MAX - rank, key, group, published_ms, ready_ms,
                    claimed_ms, lease_end_ms, envelope, chain,
                )
                for _, id, token, deliveries, attempts, rank, key, group, published_ms, ready_ms, claimed_ms,
                    lease_end_ms, envelope, chain in rows
            ]  # fmt: skip
            return Claimed(
                leases, head.next_due_ms, head.next_lease_ms, head.next_rate_ms, head.paused, 0, head.lease_ms,
                head.more, also=also, wake=by_queue(wakes), grouped=head.grouped,
            )  # fmt: skip

        parameters = [
            number(limit), text(worker), text(sleeper), flag(replay), number(poll_soon_ms), number(bytes_max),
        ]  # fmt: skip
        return self._once("claim", queue, operation, parameters, decode, columns="*", nonce=fence)

    def settle(
        self, queue: str, settlements: Sequence[Settlement], operation: Operation, *, next_claim: int = 0
    ) -> Call[Woken[list[SettleStatus]]]:
        def read(text: bytes) -> Woken[list[SettleStatus]]:
            reply = _settled_reply(text)
            statuses: list[SettleStatus] = ["done"] * len(settlements)
            if reply.letters:
                statuses = [SETTLE_STATUS[letter] for letter in reply.letters]
            return Woken(statuses, by_queue(reply.wakes), reply.also or ())

        parameters = [*_fences(settlements), *_outcomes(settlements)]
        call = self._once("settle", queue, operation, parameters, lambda result: read(one(result) or b""))
        if next_claim:
            call.join = lambda claim: self._settle_and_claim(call, claim, read)
        return call

    def _settle_and_claim(
        self, settle: PostgresCall[Any], claim: PostgresCall[Any], read: Callable[[bytes], Any]
    ) -> PostgresCall[tuple[Any, Any]]:
        """Join a settle and the next claim in one statement: one round trip, and one commit to wait for."""

        def decode(result: PGresult) -> tuple[Any, Any]:
            # In the last row, which has no message, the reply of the settle is in the column of the id.
            return read(result.get_value(result.ntuples - 1, 1) or b""), claim.decode(result)

        # Both have the same queue, clock and replay time.
        parameters = (*claim.parameters, *settle.parameters[2:4], *settle.parameters[5:])
        command = self._command("settle_and_claim", len(parameters), "*")
        return PostgresCall("settle_and_claim", settle.queue, command, parameters, decode, prepares=True)

    def extend(self, queue: str, holds: Sequence[Hold], operation: Operation) -> Call[list[ExtendStatus]]:
        def decode(result: PGresult) -> list[ExtendStatus]:
            return [EXTEND_STATUS[letter] for letter in (one(result) or b"").decode()]

        return self._once("extend", queue, operation, _fences(holds), decode)

    def cancel(self, queue: str, targets: Sequence[Target], operation: Operation) -> Call[Woken[list[CancelStatus]]]:
        def decode(result: PGresult) -> Woken[list[CancelStatus]]:
            reply = _settled_reply(one(result) or b"")
            return Woken([CANCEL_STATUS[letter] for letter in reply.letters], by_queue(reply.wakes), reply.also or ())

        parameters = [
            array_of_text([target.id or "" for target in targets]),
            array_of_text([target.key for target in targets]),
        ]
        return self._once("cancel", queue, operation, parameters, decode)

    def reschedule(
        self,
        queue: str,
        targets: Sequence[Target],
        operation: Operation,
        *,
        delay_ms: int = 0,
        at_ms: int | None = None,
    ) -> Call[Woken[list[RescheduleStatus]]]:
        def decode(result: PGresult) -> Woken[list[RescheduleStatus]]:
            letters, wake = _rescheduled_reply(one(result) or b"")
            return Woken([RESCHEDULE_STATUS[letter] for letter in letters], _wake(queue, wake))

        parameters = [
            array_of_text([target.id or "" for target in targets]),
            array_of_text([target.key for target in targets]),
            number(at_ms),
            number(delay_ms),
        ]
        return self._once("reschedule", queue, operation, parameters, decode)

    def change_priority(
        self, queue: str, ids: Sequence[str], priority: int, operation: Operation
    ) -> Call[Woken[list[PriorityStatus]]]:
        def decode(result: PGresult) -> Woken[list[PriorityStatus]]:
            letters, wake = _rescheduled_reply(one(result) or b"")
            return Woken([PRIORITY_STATUS[letter] for letter in letters], _wake(queue, wake))

        return self._once("change_priority", queue, operation, [array_of_text(list(ids)), number(priority)], decode)

    # ---- chains and waiting: a step covers several queues, so no notice is ever in transit between two of them
    # ------

    def outgoing(self, queue: str, limit: int) -> Call[list[Continuation | Notice]]:
        return PostgresCall("outgoing", queue, _NOTHING, (), lambda result: [])

    def forwarded(self, queue: str, ids: Sequence[str]) -> Call[None]:
        return PostgresCall("forwarded", queue, _NOTHING, (), lambda result: None)

    def arrive(self, queue: str, notices: Sequence[Notice]) -> Call[Woken[None]]:
        return PostgresCall("arrive", queue, _NOTHING, (), lambda result: Woken(None, {}))

    def result(self, queue: str, message_id: str) -> Call[bytes | None]:
        statement = self.names.fill(
            "SELECT r.data FROM {result} r JOIN {queue} q ON q.number = r.queue "
            "WHERE q.name = $1 AND r.id = $2 AND r.until_ms > {clock}($3)"
        )
        return PostgresCall("result", queue, statement.encode(), (text(queue), text(message_id), self._now()), one)

    def watch(self, queue: str, message_id: str, waiter: str | None) -> Call[Watched]:
        def decode(result: PGresult) -> Watched:
            for state, how, reason, error_type, error, outcome in rows_of(result):
                return Watched(
                    None if state is None else queries.STATE_OF[state], how, reason, error_type, error,
                    None if outcome is None else bytes(outcome),
                )  # fmt: skip
            return Watched(None)

        parameters = self._watching(queue, message_id, waiter)
        return PostgresCall("watch", queue, self._command("watch", len(parameters), "*"), parameters, decode)

    def watch_chain(self, queue: str, message_id: str, waiter: str | None) -> Call[ChainState]:
        def decode(result: PGresult) -> ChainState:
            for still_open, member, failed, last in rows_of(result):
                return ChainState(True, still_open, None if failed is None else (member, failed), last)
            return ChainState(False)

        parameters = self._watching(queue, message_id, waiter)
        return PostgresCall(
            "watch_chain", queue, self._command("watch_chain", len(parameters), "*"), parameters, decode
        )

    def links(self, queue: str, message_id: str) -> Call[Links]:
        def decode(result: PGresult) -> Links:
            chain, blockers, began, members, watchers = _links_reply(one(result) or b"")
            state = ChainState(False)
            if began is not None:
                still_open, member, failed, last = began
                state = ChainState(True, still_open, None if failed is None else (member or "", failed), last)
            return Links(chain, blockers, state, members, watchers)

        return self._call("links", queue, [text(queue), self._now(), text(message_id)], decode)

    def _watching(self, queue: str, message_id: str, waiter: str | None) -> list[Parameter]:
        return [text(queue), self._now(), text(message_id), text(waiter), number(limits.WAITER_TTL_MS)]

    # ---- reading -----------------------------------------------------------------------------------------------

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
        command, parameters = queries.listing(self.names, queue, state, limit, cursor, filters)
        return PostgresCall(
            "peek", queue, command, parameters, lambda result: queries.read_listing(state, limit, result)
        )

    def dead_since(self, at_ms: int) -> str:
        return dead_cursor(at_ms)

    def stats(self, queue: str, *, minutes: int = 0) -> Call[StatsRecord]:
        parameters = [text(queue), self._now(), number(minutes)]
        return self._call("stats", queue, parameters, lambda result: queries.read_stats(queue, result))

    def stats_many(self, queues: Sequence[str], *, minutes: int = 0) -> list[Call[list[StatsRecord]]]:
        def decode(result: PGresult) -> list[StatsRecord]:
            found = {queue: queries.read_figures(queue, figures) for queue, figures in rows_of(result)}
            return [found[queue] for queue in queues]

        # In the order of their names: each step takes the lock of its journal, and two such statements must not wait
        # for each other.
        parameters = [array_of_text(sorted(set(queues))), self._now(), number(minutes)]
        command = self.names.fill("SELECT name, {stats}(name, $2, $3) FROM unnest($1::text[]) name").encode()
        return [PostgresCall("stats_many", "", command, parameters, decode)]

    def trace(self, queue: str, message_id: str, cursor: str | None = None) -> Call[TracePage]:
        parameters = [text(queue), self._now(), text(message_id)]
        command = self._command("trace", len(parameters), f"head, {queries.ENTRY}")
        return PostgresCall(
            "trace", queue, command, parameters, lambda result: queries.read_trace(queue, message_id, result)
        )

    def holders(self, queues: Sequence[str], key: str) -> list[Call[list[tuple[str, str]]]]:
        def decode(result: PGresult) -> list[tuple[str, str]]:
            return msgspec.json.decode(one(result) or b"[]", type=list[tuple[str, str]])

        return [self._call("holders", "", [array_of_text(queues), text(key)], decode)]

    def queues(self) -> Call[list[str]]:
        statement = self.names.fill(
            "SELECT name FROM {queue} q WHERE made OR EXISTS (SELECT 1 FROM {message} m WHERE m.queue = q.number) "
            "ORDER BY name"
        )
        return PostgresCall("queues", "", statement.encode(), (), lambda result: [row[0] for row in rows_of(result)])

    def locate(
        self, queues: Sequence[str], message_id: str, *, in_journals: bool = False
    ) -> list[Call[list[FoundMessage]]]:
        if in_journals:
            since = journal_start_ms(message_id)
            statement = queries.LOCATE_IN_JOURNALS
            parameters = [array_of_text(queues), text(message_id), number(since), number(limits.SCANNED_MAX)]
        else:
            statement = queries.LOCATE
            parameters = [array_of_text(queues), text(message_id), self._now()]
        command = self.names.fill(statement).encode()
        decode = functools.partial(queries.read_located, message_id)
        return [PostgresCall("locate", "", command, parameters, decode)]

    # ---- administration --------------------------------------------------------------------------------------

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
        def decode(result: PGresult) -> Woken[Redriven]:
            moved, duplicates, more, wake = _redriven_reply(one(result) or b"")
            return Woken(Redriven(moved, duplicates, more), _wake(queue, wake))

        parameters = [number(limit), array_of_text(ids) if ids else nothing(TEXT), text(reason)]
        return self._once("redrive", queue, operation, parameters, decode)

    def replace_dead(
        self, queue: str, message_id: str, draft: Draft, operation: Operation
    ) -> Call[Woken[Published | None]]:
        def decode(result: PGresult) -> Woken[Published | None]:
            found = one(result)
            if found is None:
                return Woken(None, {})
            reply = read_published(found)
            check_publish_reply(reply.letters, reply.others, queue)
            id = reply.others[0] if reply.others else draft.id
            status = PUBLISH_STATUS[reply.letters or "q"]
            return Woken(Published(id, status, queue), reply.wake(queue), reply.also or ())

        parameters = [text(message_id), array_of_data([draft.envelope]), *_options([draft])]
        return self._once("replace_dead", queue, operation, parameters, decode)

    def purge(
        self, queue: str, state: MessageState, limit: int, operation: Operation, *, ids: Sequence[str] = ()
    ) -> Call[Woken[Purged]]:
        chosen = array_of_text(ids) if ids else nothing(TEXT)
        parameters = [small(STATES[check_purge(state, ids)]), number(limit), chosen]

        def decode(result: PGresult) -> Woken[Purged]:
            removed, more, wakes, also = _purged_reply(one(result) or b"")
            return Woken(Purged(removed, more), by_queue(wakes), also or ())

        return self._once("purge", queue, operation, parameters, decode)

    def check(self, queue: str, cursor: str | None, *, mend: bool = False) -> Call[CheckPage]:
        def decode(result: PGresult) -> CheckPage:
            examined, found, after = _check_reply(one(result) or b"")
            return CheckPage(examined, [Damage(queue, *damage) for damage in found], after)

        parameters = [text(queue), self._now(), text(cursor), flag(mend)]
        return self._call("check", queue, parameters, decode)

    def configure(self, queue: str, changes: Mapping[str, Any]) -> Call[Woken[PolicyRecord]]:
        def decode(result: PGresult) -> Woken[PolicyRecord]:
            policy, wake = _policy_reply(one(result) or b"")
            return Woken(policy, _wake(queue, wake))

        parameters = [text(queue), self._now(), jsonb(msgspec.json.encode(changes)), text(format_changes(changes))]
        return self._call("configure", queue, parameters, decode)

    def policy(self, queue: str) -> Call[PolicyRecord]:
        def decode(result: PGresult) -> PolicyRecord:
            found = one(result)
            return DEFAULT_POLICY if found is None else msgspec.json.decode(found, type=PolicyRecord)

        return self._call("policy", queue, [text(queue)], decode)

    def pause(self, queue: str) -> Call[bool]:
        parameters = [text(queue), self._now(), flag(True)]
        return self._call("pause", queue, parameters, lambda result: _changed_reply(one(result) or b"")[0])

    def resume(self, queue: str) -> Call[Woken[bool]]:
        def decode(result: PGresult) -> Woken[bool]:
            changed, wake = _changed_reply(one(result) or b"")
            return Woken(changed, _wake(queue, wake))

        return self._call("pause", queue, [text(queue), self._now(), flag(False)], decode, name="resume")

    # ---- groups ----------------------------------------------------------------------------------------------

    def groups(self, queue: str, limit: int, *, cursor: str | None = None, group: str | None = None) -> Call[GroupPage]:
        def decode(result: PGresult) -> GroupPage:
            found = [GroupRecord(*row) for row in _groups_reply(_grouped_reply(queue, result))]
            last = group_cursor(found[limit - 1].group or "") if len(found) > limit else None
            return GroupPage(found[:limit], last)

        after = read_cursor(cursor, 1)
        place = None if after is None else str(after[0])
        parameters = [text(queue), self._now(), text(place), text(group), number(limit + 1)]
        return self._call("groups", queue, parameters, decode)

    def configure_group(self, queue: str, group: str, changes: Mapping[str, Any]) -> Call[Woken[bool]]:
        def decode(result: PGresult) -> Woken[bool]:
            changed, wake = _changed_reply(_grouped_reply(queue, result))
            return Woken(changed, _wake(queue, wake))

        # Not the names of the queue's own settings, with which readers of the journal would confuse them.
        own = format_changes({f"own_{name}": value for name, value in changes.items()})
        parameters = [text(queue), self._now(), text(group), jsonb(msgspec.json.encode(changes)), text(own)]
        return self._call("configure_group", queue, parameters, decode)

    def skip_held(self, queue: str, group: str, operation: Operation) -> Call[Woken[str | None]]:
        def decode(result: PGresult) -> Woken[str | None]:
            skipped, wake = _skipped_reply(_grouped_reply(queue, result))
            return Woken(skipped, _wake(queue, wake))

        return self._once("skip_held", queue, operation, [text(group)], decode)

    def strand_group(self, queue: str, group: str) -> Call[None]:
        """For tests: remove a group from the line, so that no claim finds its messages."""
        statement = self.names.fill(
            "SELECT {leave_line}(q, 0, ARRAY[$2]) FROM {groups}($1, $3, NULL, NULL, 1), {queue} q WHERE q.name = $1"
        )
        parameters = [text(queue), text(group), self._now()]
        return PostgresCall("damage", queue, statement.encode(), parameters, lambda result: None)

    def remove(self, queue: str, operation: Operation) -> Call[Removal]:
        def decode(result: PGresult) -> Removal:
            existed, left, made_again, more = msgspec.json.decode(
                one(result) or b"", type=tuple[bool, dict[str, int], bool, bool]
            )  # fmt: skip
            return Removal(existed, left, more, made_again)

        return self._once("remove", queue, operation, (), decode)

    def unlist(self, queue: str) -> list[Call[None]]:
        return []

    # ---- schedules --------------------------------------------------------------------------------------------

    def save_schedule(
        self, queue: str, schedule: StoredSchedule, *, version: str | None, next_ms: int | None
    ) -> Call[Saved]:
        def decode(result: PGresult) -> Saved:
            (row,) = rows_of(result)
            return Saved(row[0], _read_schedule(row))

        parameters = [
            text(queue), text(schedule.key), text(version), number(next_ms), text(schedule.version),
            data(schedule.spec), flag(schedule.paused), number(schedule.next_ms), number(schedule.due_ms),
            data(schedule.state),
        ]  # fmt: skip
        command = self._command("save_schedule", len(parameters), SCHEDULE_COLUMNS)
        return PostgresCall("save_schedule", queue, command, parameters, decode)

    def remove_schedule(self, queue: str, key: str) -> Call[bool]:
        return self._call("remove_schedule", queue, [text(queue), text(key)], lambda result: one(result) == b"\1")

    def schedules(self, queue: str) -> Call[ScheduleList]:
        def decode(result: PGresult) -> ScheduleList:
            head, *rows = rows_of(result)
            found = [_read_schedule(row) for row in rows]
            return ScheduleList(head[1], [schedule for schedule in found if schedule is not None])

        parameters = [text(queue), self._now()]
        command = self._command("schedules", len(parameters), SCHEDULE_COLUMNS)
        return PostgresCall("schedules", queue, command, parameters, decode)

    def scheduled(self) -> Call[dict[str, int]]:
        statement = self.names.fill(
            "SELECT q.name, max(s.change) FROM {schedule} s JOIN {queue} q ON q.number = s.queue GROUP BY q.name"
        )
        return PostgresCall("scheduled", "", statement.encode(), (), lambda result: dict(rows_of(result)))

    def schedules_changed(self, queue: str) -> Call[None]:
        return PostgresCall("schedules_changed", queue, _NOTHING, (), lambda result: None)

    def fire_schedule(
        self, queue: str, step: FireStep, drafts: Sequence[Draft], operation: Operation
    ) -> Call[Woken[Fired]]:
        def decode(result: PGresult) -> Woken[Fired]:
            (row,) = rows_of(result)
            reply = read_published(row[2])
            return Woken(Fired(row[0], row[1], _read_schedule(row)), reply.wake(queue), reply.also or ())

        after = step.after_run
        parameters = [
            text(step.key), text(step.version), number(step.expected_ms), number(step.last_due_ms),
            number(step.valid_until_ms), number(step.last_ms), number(step.missed), number(step.next_ms),
            number(step.due_ms), data(step.state), text(step.new_version), flag(step.by_hand),
            text(None if after is None else after.run_id), data(None if after is None else after.state),
            number(0 if after is None else after.skipped), number(0 if after is None else after.instant_ms),
            *_fired_drafts(drafts),
        ]  # fmt: skip
        return self._once("fire_schedule", queue, operation, parameters, decode, columns=SCHEDULE_COLUMNS)

    def trigger_schedule(
        self, queue: str, key: str, draft: Draft, operation: Operation
    ) -> Call[Woken[Published | None]]:
        def decode(result: PGresult) -> Woken[Published | None]:
            found = one(result)
            if found is None:
                return Woken(None, {})
            reply = read_published(found)
            return Woken(Published(draft.id, "queued", queue), reply.wake(queue), reply.also or ())

        return self._once("trigger_schedule", queue, operation, [text(key), *_fired_drafts([draft])], decode)

    def promote(self, queue: str) -> Call[Woken[Promoted]]:
        def decode(result: PGresult) -> Woken[Promoted]:
            promoted, depth, lag, next_due, names, also, more = _promoted_reply(one(result) or b"")
            return Woken(Promoted(promoted, depth, lag, next_due), by_queue([(queue, names), *more]), also or ())

        return self._call("promote", queue, [text(queue), self._now()], decode)

    # ---- leaders ---------------------------------------------------------------------------------------------

    def elect(self, role: str, name: str, ttl_ms: int) -> Call[Elected]:
        parameters = [text(role), self._now(), text(name), number(ttl_ms)]
        return self._call("elect", "", parameters, lambda result: Elected(*_elected_reply(one(result) or b"")))

    def resign(self, role: str, name: str) -> Call[bool]:
        return self._call("resign", "", [text(role), self._now(), text(name)], lambda result: one(result) == b"\1")

    # ---- workers -----------------------------------------------------------------------------------------------

    def poll(
        self, idle: Sequence[Idle], *, registration: Registration | None = None, repeat_to: str | None = None
    ) -> list[Call[Polled]]:
        return [self._poll(part, None if at else registration) for at, part in enumerate(poll_parts(idle))]

    def _poll(self, idle: Sequence[Idle], registration: Registration | None) -> Call[Polled]:
        def decode(result: PGresult) -> Polled:
            at_ms, leader, queues, request = _polled_reply(one(result) or b"")
            elected = None if leader is None else Elected(*leader)
            requested = None if request is None else Requested(*request)
            return Polled([PolledQueue(*found) for found in queues], at_ms, elected, requested)

        worker = [text(None), data(None), number(None), number(None), text(None), number(None)]
        if registration is not None:
            worker = [
                text(registration.heartbeat.name), data(pack(registration.heartbeat)), number(registration.ttl_ms),
                number(limits.WORKERS_MAX), text(registration.role), number(registration.role_ttl_ms),
            ]  # fmt: skip
        queues = array_of_text([each.queue for each in idle])
        sleepers = array_of_text([each.sleeper for each in idle])
        return self._call("poll", "", [self._now(), queues, sleepers, *worker], decode)

    def heartbeat(self, heartbeat: Heartbeat, ttl_ms: int) -> Call[int]:
        parameters = [
            text(heartbeat.name),
            self._now(),
            number(ttl_ms),
            data(pack(heartbeat)),
            number(limits.WORKERS_MAX),
        ]
        return self._call("heartbeat", "", parameters, _int)

    def unregister(self, name: str) -> Call[bool]:
        return self._call("unregister", "", [text(name)], lambda result: one(result) == b"\1")

    def workers(self) -> Call[list[WorkerRecord]]:
        def decode(result: PGresult) -> list[WorkerRecord]:
            return [registered(*row) for row in rows_of(result)]

        parameters = [self._now(), number(limits.WORKERS_MAX)]
        command = self._command("workers", len(parameters), "name, record, at_ms, until_ms, request, request_ms")
        return PostgresCall("workers", "", command, parameters, decode)

    def request_worker(self, name: str, request: WorkerRequest) -> Call[bool]:
        parameters = [text(name), self._now(), text(request)]
        return self._call("request_worker", "", parameters, lambda result: one(result) == b"\1")

    # ---- shared records ----------------------------------------------------------------------------------------

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
        def decode(result: PGresult) -> RecordSaved:
            ((now, saved, found, *facts),) = rows_of(result)
            record = None if found is None else SharedRecord(name, found, *facts)
            return RecordSaved(saved, record, now)

        parameters = [
            text(kind), text(name), self._now(), (BYTES, data), number(version), number(ttl_ms), number(keep),
        ]  # fmt: skip
        columns = "o_now, o_saved, o_data, o_version, o_created, o_until"
        command = self._command("save_record", len(parameters), columns)
        return PostgresCall("save_record", "", command, parameters, decode)

    def records(
        self, kind: str, *, names: Sequence[str] = (), cursor: str | None = None, limit: int = RECORDS_PAGE_MAX
    ) -> Call[RecordPage]:
        def decode(result: PGresult) -> RecordPage:
            (now, *_), *rows = rows_of(result)
            found = [SharedRecord(*row[1:]) for row in (rows if names else rows[:limit])]
            is_whole = bool(names) or len(rows) <= limit
            last = None if is_whole else record_cursor(found[-1].created_ms, found[-1].name)
            return RecordPage(found, last, now)

        created, name = read_record_cursor(cursor) or (None, None)
        chosen = array_of_text(names) if names else nothing(TEXT)
        parameters = [text(kind), self._now(), chosen, number(created), text(name), number(limit + 1)]
        columns = "o_now, o_name, o_data, o_version, o_created, o_until"
        command = self._command("records", len(parameters), columns)
        return PostgresCall("records", "", command, parameters, decode)

    # ---- the journal -----------------------------------------------------------------------------------------

    def journal(self, queue: str, after: int, limit: int) -> Call[EventPage]:
        parameters = [text(queue), self._now(), number(after), number(limit)]
        command = self._command("journal", len(parameters), f"head, {queries.ENTRY}")
        return PostgresCall(
            "journal", queue, command, parameters, lambda result: queries.read_journal(queue, after, limit, result)
        )

    def journal_reader(self, queue: str, name: str, read_to: int | None) -> Call[int]:
        parameters = [text(queue), self._now(), text(name), number(read_to)]
        return self._call("journal_reader", queue, parameters, _int)

    def journal_forget(self, queue: str, name: str) -> Call[bool]:
        return self._call("journal_forget", queue, [text(queue), text(name)], lambda result: one(result) == b"\1")

    def journal_trim(self, queue: str, up_to: int) -> Call[int]:
        parameters = [text(queue), self._now(), number(up_to)]
        return self._call("journal_trim", queue, parameters, _int)


def _int(result: PGresult) -> int:
    return int.from_bytes(one(result) or b"", "big", signed=True)


def _grouped_reply(queue: str, result: PGresult) -> bytes:
    """Return the reply of a function of groups; it is null for a queue that does not distinguish groups."""
    reply = one(result)
    if reply is None:
        raise not_grouped(queue)
    return reply


def _wake(queue: str, names: list[str]) -> dict[str, list[str]]:
    return {queue: names} if names else {}


def _read_schedule(row: tuple[Any, ...]) -> StoredSchedule | None:
    key, version, spec, paused, next_ms, due_ms, fires, missed, last_ms, state = row[3:]
    if key is None:
        return None
    return StoredSchedule(
        key, version, bytes(spec), paused, next_ms, due_ms, fires, missed, last_ms, bytes(state or b"")
    )


def _fired_drafts(drafts: Sequence[Draft]) -> list[Parameter]:
    """Envelopes, priorities, groups, journal copies, expiries if any: fires have no keys and no delay."""
    usual = all(draft.priority == PRIORITY_DEFAULT for draft in drafts)
    alone = all(draft.group is None for draft in drafts)
    plain = all(draft.journal_copy is None for draft in drafts)
    expires = any(draft.expires_ms for draft in drafts)
    return [
        array_of_data([draft.envelope for draft in drafts]),
        nothing(INT2) if usual else array_of_smalls([draft.priority for draft in drafts]),
        nothing(TEXT) if alone else array_of_text([draft.group for draft in drafts]),
        nothing(BYTES) if plain else array_of_data([draft.journal_copy for draft in drafts]),
        *([array_of_numbers([draft.expires_ms or None for draft in drafts])] if expires else []),
    ]


def _is_simple(draft: Draft) -> bool:
    """Return whether a message is ready at once and no other message affects it."""
    return (
        draft.key is None
        and not draft.delay_ms
        and draft.at_ms is None
        and not draft.forwarded
        and draft.chain is None
        and not draft.after
        and not draft.expires_ms
    )


def _one_draft(draft: Draft) -> list[Parameter]:
    return [
        text(draft.id), data(draft.envelope), small(draft.priority), text(draft.group), data(draft.journal_copy),
    ]  # fmt: skip


#: The options of a draft as nulls, each with the type of its array.
_NO_OPTIONS = [nothing(kind) for kind in (INT2, TEXT, INT8, INT8, BYTES, TEXT, INT8, TEXT, BOOL)]


def _options(drafts: Sequence[Draft]) -> list[Parameter]:
    """The options of drafts other than the envelope: a list if one of them has the option, null if none has."""
    options = list(_NO_OPTIONS)
    if any(draft.priority != PRIORITY_DEFAULT for draft in drafts):
        options[0] = array_of_smalls([draft.priority for draft in drafts])
    if any(draft.group is not None for draft in drafts):
        options[1] = array_of_text([draft.group for draft in drafts])
    if any(draft.delay_ms for draft in drafts):
        options[2] = array_of_numbers([draft.delay_ms for draft in drafts])
    if any(draft.at_ms is not None for draft in drafts):
        options[3] = array_of_numbers([draft.at_ms for draft in drafts])
    if any(draft.journal_copy is not None for draft in drafts):
        options[4] = array_of_data([draft.journal_copy for draft in drafts])
    if any(draft.key is not None for draft in drafts):
        options[5] = array_of_text([draft.key for draft in drafts])
        if any(draft.window_ms for draft in drafts):
            options[6] = array_of_numbers([draft.window_ms for draft in drafts])
        if any(draft.on_conflict != "keep" for draft in drafts):
            options[7] = array_of_text([draft.on_conflict for draft in drafts])
    if any(draft.forwarded for draft in drafts):
        options[8] = array_of_flags([draft.forwarded for draft in drafts])
    modes = options[5] is not _NO_OPTIONS[5] and any(draft.unique != "live" for draft in drafts)
    expires = modes or any(draft.expires_ms for draft in drafts)
    capped = expires or any(draft.capped for draft in drafts)
    if capped or any(draft.chain is not None or draft.after for draft in drafts):
        waits = [(place, chain) for place, draft in enumerate(drafts, 1) for chain in draft.after]
        options += [
            array_of_text([draft.chain for draft in drafts]),
            array_of_ints([place for place, _ in waits]) if waits else nothing(INT4),
            array_of_text([chain for _, chain in waits]) if waits else nothing(TEXT),
        ]
    if capped:
        options.append(array_of_flags([draft.capped for draft in drafts]))
    if expires:
        options.append(array_of_numbers([draft.expires_ms or None for draft in drafts]))
    if modes:
        options.append(array_of_smalls([UNIQUE_NUMBERS[draft.unique] for draft in drafts]))
    return options


def _once_if_same(values: list[T]) -> list[T]:
    return values[:1] if values and values.count(values[0]) == len(values) else values


def _fences(held: Sequence[Settlement] | Sequence[Hold]) -> list[Parameter]:
    """Ids, tokens and nonces; one token or nonce where all are the same, as after a first claim."""
    return [
        array_of_text([one.id for one in held]),
        array_of_numbers(_once_if_same([one.token for one in held])),
        array_of_data(_once_if_same([one.nonce for one in held])),
    ]


#: The outcomes of settlements as nulls: all are done, without a result or a continuation.
_NO_OUTCOMES = [
    nothing(kind) for kind in (TEXT, INT8, TEXT, TEXT, TEXT, BYTES, INT8, INT4, TEXT, BYTES, TEXT, INT8, INT2, TEXT)
]


def _outcomes(settlements: Sequence[Settlement]) -> list[Parameter]:
    if all(settlement.is_plain_done for settlement in settlements):
        return _NO_OUTCOMES
    outcomes = [
        array_of_text([one.outcome for one in settlements]),
        array_of_numbers([one.after_ms for one in settlements]),
        array_of_text([safe(one.reason) for one in settlements]),
        array_of_text([safe(one.error_type) for one in settlements]),
        array_of_text([safe(one.error) for one in settlements]),
        array_of_data([one.result for one in settlements]),
        array_of_numbers([one.result_ttl_ms for one in settlements]),
    ]
    following = [(place, then) for place, one in enumerate(settlements, 1) for then in one.then]
    if not following:
        return outcomes + _NO_OUTCOMES[len(outcomes) :]
    envelopes: list[bytes | None] = [then.envelope for _, then in following]
    if any(then.journal_copy is not None for _, then in following):
        # After the envelopes, in the same order: what the journal stores in place of them.
        envelopes += [then.journal_copy for _, then in following]
    chained = [then.chain for _, then in following]
    expires = any(then.expires_ms for _, then in following)
    return [
        *outcomes,
        array_of_ints([place for place, _ in following]),
        array_of_text([then.queue for _, then in following]),
        array_of_data(envelopes),
        array_of_text([then.key for _, then in following]),
        array_of_numbers([then.delay_ms for _, then in following]),
        array_of_smalls([then.priority for _, then in following]),
        array_of_text([then.group for _, then in following]),
        *([array_of_text(chained)] if expires or any(chained) else []),
        *([array_of_numbers([then.expires_ms or None for _, then in following])] if expires else []),
    ]
