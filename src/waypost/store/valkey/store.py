"""The translator: each verb of the contract as a script with its arguments, and the reading of its reply."""

from __future__ import annotations

import dataclasses
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from waypost.checks import check_namespace
from waypost.identity import ID_CHARACTERS, Operation, journal_start_ms, new_nonce
from waypost.policy import (
    CHUNK_MESSAGES_MAX,
    CLAIM_BYTES_MAX,
    OUTGOING_TTL_MS,
    RECORDS_MAX,
    RECORDS_PAGE_MAX,
    Durability,
    PolicyRecord,
)
from waypost.store.port import (
    AfterRun,
    AsyncExecutor,
    Call,
    Capabilities,
    Draft,
    Executor,
    FireStep,
    Heartbeat,
    Hold,
    Idle,
    NaturalChannel,
    Registration,
    Target,
    Woken,
    check_chunk,
    check_purge,
    format_changes,
    group_cursor,
    read_cursor,
)
from waypost.store.valkey import locate, packing, poll, shared, workers
from waypost.store.valkey.blocking_wait import ValkeyBlockingWaits
from waypost.store.valkey.command import CRLF, ValkeyCall, command, evalsha_head, part
from waypost.store.valkey.scripts import GIVEN_KEYS, KEY_NAMES, VERSION, Script, script
from waypost.values import (
    FINAL_EVENTS,
    CancelStatus,
    ChainState,
    CheckPage,
    Claimed,
    Continuation,
    Damage,
    Elected,
    EventPage,
    ExtendStatus,
    Fired,
    FireStatus,
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
    PublishStatus,
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
    from waypost.store.valkey.bulk import ValkeyBulkReader
    from waypost.store.valkey.checkup import ValkeyCheckup
    from waypost.store.valkey.sources import Source

T = TypeVar("T")

PUBLISH_STATUS: dict[int, PublishStatus] = {
    ord("q"): "queued", ord("d"): "delayed", ord("u"): "duplicate", ord("r"): "replaced", ord("e"): "extended",
    ord("E"): "extended", ord("c"): "conflict",
}  # fmt: skip
#: Letters that are followed by the id of another message than the draft's own.
NAMES_ANOTHER = frozenset(b"uce")
SETTLE_STATUS: dict[int, SettleStatus] = {
    ord("d"): "done", ord("r"): "retried", ord("s"): "snoozed", ord("x"): "dead", ord("p"): "dropped",
    ord("b"): "released", ord("c"): "cancelled", ord("e"): "replaced", ord("l"): "lost",
}  # fmt: skip
FIRE_STATUS: dict[bytes, FireStatus] = {
    b"f": "fired", b"k": "skipped", b"c": "conflict", b"e": "early", b"s": "stale", b"r": "running"
}  # fmt: skip
EXTEND_STATUS: dict[int, ExtendStatus] = {ord("o"): "ok", ord("l"): "lost", ord("c"): "cancel"}
PRIORITY_STATUS: dict[int, PriorityStatus] = {ord("c"): "changed", ord("s"): "unchanged", ord("u"): "unknown"}
RESCHEDULE_STATUS: dict[int, RescheduleStatus] = {ord("m"): "moved", ord("d"): "due", ord("u"): "unknown"}
CANCEL_STATUS: dict[int, CancelStatus] = {
    ord("c"): "cancelled", ord("r"): "requested", ord("f"): "finished", ord("u"): "unknown"
}  # fmt: skip

ID_BYTES = 24
#: With durability `fsync`: what must not be lost. A lost claim or renewal is harmless, the lease just ends.
KEPT_ON_DISK = frozenset(
    (
        "publish", "settle", "cancel", "reschedule", "change_priority", "redrive",
        "replace_dead", "purge", "configure", "pause", "resume",
        "arrive", "save_schedule", "fire_schedule", "trigger_schedule", "check", "remove", "configure_group",
        "skip_held",
    )
)  # fmt: skip
#: The text of each durability.
DURABILITY: dict[Durability, str] = {
    "server": "as durable as the server's append-only file; a warning is logged if it has none",
    "fsync": "what is acknowledged is on the server's disk (durability fsync)",
}
#: After these a queue is in the list of queues.
ANNOUNCED = frozenset(("publish", "configure", "pause", "save_schedule", "fire_schedule", "trigger_schedule"))
#: A queue is added to the list again after this time: a failover may have lost the list, or a user removed it.
ANNOUNCED_SECONDS = 60.0
#: The pause after a refused attempt. On a Cluster also after a failed one: the list is on another node
#: than the queue, and while that node is down each attempt costs time.
ANNOUNCE_PAUSE_SECONDS = 1.0
#: Bounds the memory of a client that uses very many queue names.
QUEUES_REMEMBERED_MAX = 10_000
#: One local disk, no replica, within 5,000 ms. It applies to the connection that it is sent on.
WAIT_FOR_DISK = command(b"WAITAOF", b"1", b"0", b"5000")
NOTHING = part(b"")
#: Flags in the answer to a claim. No queue: nothing was added to it, or it was removed.
PAUSED, NO_QUEUE, GROUPED = 1, 2, 4
#: What may be left in a queue, in the order in which the script counts it.
LEFT = ("ready", "delayed", "waiting", "leased", "dead", "schedules", "outgoing", "chains", "readers", "damaged")
#: Number, mark and stamp of an operation.
OPERATION = struct.Struct(">I8sQ").pack


class ValkeyStore:
    """The contract on a server of the Redis family. Made by `from_url` or `from_client`; touches no socket itself."""

    kind = "valkey"
    transactions = None

    def __init__(
        self,
        source: Source,
        *,
        namespace: str = "wp",
        clock: Callable[[], int] | None = None,
        replay_ttl_ms: int = 300_000,
        durability: Durability = "server",
    ) -> None:
        self.namespace = check_namespace(namespace)
        self.durability: Durability = durability
        self.source = source
        self.place = source.place
        self.channel = NaturalChannel("valkey", source)
        self.capabilities = Capabilities(
            reach="network", durability=DURABILITY[durability], spans_queues=False, repeats_polls=True,
            runs_together=not source.cluster,
        )  # fmt: skip
        self.blocking_waits = None if source.cluster else ValkeyBlockingWaits(self.namespace)
        #: Tests only: store time comes from here instead of the server.
        self.clock = clock
        self._replay_ttl = part(b"%d" % replay_ttl_ms)
        self._heads: dict[tuple[str, str, bytes], tuple[int, bytes, Script, bytes]] = {}
        #: Queues, and until when they need not be added to the list of queues again (monotonic seconds).
        self._announced: dict[str, float] = {}
        #: Queues that gave messages to a claim of this client: their publisher may have failed to announce them.
        self._claimed_from: set[str] = set()

    @classmethod
    def from_url(cls, url: str, **options: Any) -> ValkeyStore:
        """A store that makes its own connections."""
        from waypost.store.valkey.sources import source_of

        return cls(source_of(url), **options)

    @classmethod
    def from_client(cls, client: Any, **options: Any) -> ValkeyStore:
        """A store on the caller's own client, which is never closed by us."""
        from waypost.store.valkey.sources import source_of_client

        return cls(source_of_client(client), **options)

    def bulk_reader(self, connection: BulkConnection) -> ValkeyBulkReader:
        from waypost.store.valkey.bulk import ValkeyBulkReader

        return ValkeyBulkReader(self, connection)

    def checkup(self, executor: Executor) -> ValkeyCheckup:
        from waypost.store.valkey.checkup import ValkeyCheckup

        return ValkeyCheckup(self, executor)

    def strand(self, queue: str, message_id: str) -> Call[None]:
        """For tests: remove a message from all indexes in which a claim could find it."""
        keys = dict(zip(KEY_NAMES, self.keys_of(queue), strict=True))
        places = [keys[name] for name in ("ready", "due", "leases", "waiting", "dead")]
        text = Script("damage", "for i = 1, #KEYS do redis.call('ZREM', KEYS[i], ARGV[1]) end")
        packed = command(b"EVALSHA", text.sha, b"%d" % len(places), *places, message_id.encode())
        return ValkeyCall("damage", queue, packed, lambda reply: None, text, place=places[0])

    def connect(self, *, start_timeout: float) -> Executor:
        if self.source.cluster:
            from waypost.store.valkey.cluster import ClusterExecutor

            return ClusterExecutor(self.source, start_timeout, self.durability)
        from waypost.store.valkey.executor import ValkeyExecutor

        return ValkeyExecutor(self.source, start_timeout, self.durability)

    async def connect_async(self, *, start_timeout: float) -> AsyncExecutor:
        executor: AsyncClusterExecutor | AsyncValkeyExecutor
        if self.source.cluster:
            from waypost.store.valkey.cluster import AsyncClusterExecutor

            executor = AsyncClusterExecutor(self.source, start_timeout, self.durability)
        else:
            from waypost.store.valkey.executor import AsyncValkeyExecutor

            executor = AsyncValkeyExecutor(self.source, start_timeout, self.durability)
        await executor.start()
        return executor

    # ---- how a verb becomes a command ------------------------------------------------------------------------

    def keys_of(self, queue: str) -> list[bytes]:
        """The keys of a queue, in the order of KEYS: one hash tag, so one slot."""
        base = f"{{{self.namespace}:{queue}}}:"
        return [(base + name).encode() for name in KEY_NAMES]

    def _head(self, name: str, queue: str, session: bytes) -> tuple[int, bytes, Script, bytes]:
        known = self._heads.get((name, queue, session))
        if known is None:
            if len(self._heads) > QUEUES_REMEMBERED_MAX:
                self._heads.clear()
            base = f"{{{self.namespace}:{queue}}}:"
            names = (*GIVEN_KEYS.get(name, KEY_NAMES), f"operations:{session.hex()}")
            keys = [(base + key).encode() for key in names]
            if self.source.cluster:
                # Never written. A node refuses a script that names a missing key while the slot is moving, before the
                # script begins: so none runs among keys of which some are here and some have left.
                keys.append(f"{base}never".encode())
            text = script(name)
            known = (*evalsha_head(text, keys), text, keys[0])
            self._heads[name, queue, session] = known
        return known

    def _call(
        self,
        verb: str,
        queue: str,
        operation: Operation | None,
        arguments: Sequence[bytes],
        decode: Callable[[Any], T],
        *,
        shared: str = "",
        encoded: bytes | None = None,
        more: int = 0,
    ) -> Call[T]:
        """The script of a verb with its arguments. In a `shared` script the verb is the first of them.

        `encoded` are `more` further arguments, in the protocol's form already.
        """
        number, head, text, place = self._head(shared or verb, queue, operation.session if operation else b"")
        if shared:
            arguments = (verb.encode(), *arguments)
        clock = part(b"%d" % self.clock()) if self.clock else NOTHING
        if operation is None:
            common = clock + NOTHING + NOTHING + NOTHING
        else:
            session, count, stamp, mark = operation
            count_text = b"%d" % count
            common = b"%b$%d\r\n%b\r\n$28\r\n%b%b\r\n%b" % (
                clock, len(count_text), count_text, session, OPERATION(count, mark, stamp), self._replay_ttl,
            )  # fmt: skip
        parts = [b"*%d\r\n" % (number + 4 + len(arguments) + more), head, common]
        parts += [part(argument) for argument in arguments]
        if encoded is not None:
            parts.append(encoded)
        announce: ValkeyCall[None] | None = None
        if verb in ANNOUNCED:
            announce = self._announcement(queue)
        elif verb == "claim" and queue in self._claimed_from:
            announce = self._announcement(queue)
            if announce is not None:
                # Once for what was claimed: further claims must not put a removed queue back on the list.
                self._claimed_from.discard(queue)
        on_disk = WAIT_FOR_DISK if self.durability == "fsync" and verb in KEPT_ON_DISK else None
        return ValkeyCall(verb, queue, b"".join(parts), decode, text, announce, on_disk, place=place)

    def _announcement(self, queue: str) -> ValkeyCall[None] | None:
        """The command that adds a queue to the list of queues, or None if the server confirmed it lately.

        The list is in another slot than the queue, so it cannot be part of the same step.
        """
        now = time.monotonic()
        if self._announced.get(queue, 0.0) > now:
            return None
        if len(self._announced) > QUEUES_REMEMBERED_MAX:
            self._announced.clear()
        if self.source.cluster:
            self._announced[queue] = now + ANNOUNCE_PAUSE_SECONDS

        def confirm(reply: int | None) -> None:
            pause = ANNOUNCE_PAUSE_SECONDS if reply is None else ANNOUNCED_SECONDS
            self._announced[queue] = time.monotonic() + pause

        listed = f"{self.namespace}:queues".encode()
        return ValkeyCall("announce", queue, command(b"SADD", listed, queue.encode()), confirm, place=listed)

    def time(self) -> Call[int]:
        def decode(reply: Any) -> int:
            return self.clock() if self.clock else int(reply[0]) * 1000 + int(reply[1]) // 1000

        place = f"{self.namespace}:queues".encode()
        return ValkeyCall("time", "", command(b"TIME"), decode, place=place)

    # ---- the way of a message --------------------------------------------------------------------------------

    def publish(self, queue: str, drafts: Sequence[Draft], operation: Operation) -> Call[Woken[list[Published]]]:
        def decode(reply: Any) -> Woken[list[Published]]:
            statuses = reply[0]
            wake, also = packing.unpack_woken(queue, reply[1:])
            if len(statuses) == len(drafts) and statuses.count(b"q") == len(drafts):
                return Woken([Published(draft.id, "queued", queue) for draft in drafts], wake, also)
            return Woken(_published(queue, statuses, drafts), wake, also)

        check_chunk(drafts)
        # The common draft is a priority and an envelope; its length line is the same for many.
        lines: dict[tuple[int, int], bytes] = {}
        parts: list[bytes] = []
        append = parts.append
        for draft in drafts:
            # Inlined, because it runs for every message.
            if (
                draft.key is None
                and draft.delay_ms == 0
                and draft.group is None
                and draft.at_ms is None
                and draft.journal_copy is None
                and draft.chain is None
                and not draft.after
                and not draft.expires_ms
            ):
                envelope = draft.envelope
                shape = (len(envelope), draft.priority + (packing.once_mark(draft) if draft.forwarded else 0))
                line = lines.get(shape)
                if line is None:
                    line = lines[shape] = b"$%d\r\n%c" % (shape[0] + 1, shape[1])
                append(line)
                append(envelope)
                append(CRLF)
            else:
                append(part(packing.pack_routed(draft)))
        return self._call("publish", queue, operation, (), decode, encoded=b"".join(parts), more=len(drafts))

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

        def decode(reply: Any) -> Claimed:
            lease_end, next_due, next_lease, next_rate, flags, outgoing, now, lease, more, damaged, besides = reply[:11]
            leases = packing.unpack_leases(reply, 11, lease_end, now, fence)
            if flags & NO_QUEUE:
                self._claimed_from.discard(queue)
            elif leases and queue not in self._claimed_from:
                if len(self._claimed_from) > QUEUES_REMEMBERED_MAX:
                    self._claimed_from.clear()
                self._claimed_from.add(queue)
            claimed = Claimed(
                leases, _or_none(next_due), _or_none(next_lease), _or_none(next_rate), flags & PAUSED == PAUSED,
                outgoing, _or_none(lease), more == 1, damaged=_damaged_ids(damaged), grouped=flags & GROUPED == GROUPED,
            )  # fmt: skip
            if not besides:
                return claimed
            wake, also = packing.unpack_besides(queue, besides)
            return structs.replace(claimed, wake=wake, also=also)

        arguments = (
            b"%d" % limit, worker.encode(), (sleeper or "").encode(), b"1" if replay else b"0", _number(poll_soon_ms),
            b"%d" % bytes_max, fence,
        )  # fmt: skip
        return self._call("claim", queue, operation, arguments, decode)

    def settle(
        self, queue: str, settlements: Sequence[Settlement], operation: Operation, *, next_claim: int = 0
    ) -> Call[Woken[list[SettleStatus]]]:
        def decode(reply: Any) -> Woken[list[SettleStatus]]:
            return Woken([SETTLE_STATUS[letter] for letter in reply[0]], *packing.unpack_woken(queue, reply[1:]))

        check_chunk(settlements)
        fence = packing.FENCE.pack
        plain: list[bytes] = []
        for s in settlements:
            if s.outcome != "done" or s.result is not None or s.then:
                arguments = [b"", b"%d" % next_claim, *(packing.pack_settlement(one) for one in settlements)]
                break
            plain.append(fence(s.id.encode(), b"L", s.token, s.nonce))
        else:
            arguments = [b"".join(plain), b"%d" % next_claim]
        return self._call("settle", queue, operation, arguments, decode)

    def extend(self, queue: str, holds: Sequence[Hold], operation: Operation) -> Call[list[ExtendStatus]]:
        check_chunk(holds)
        return self._call(
            "extend",
            queue,
            operation,
            [packing.pack_fences(holds)],
            lambda reply: [EXTEND_STATUS[letter] for letter in reply],
        )

    def cancel(self, queue: str, targets: Sequence[Target], operation: Operation) -> Call[Woken[list[CancelStatus]]]:
        def decode(reply: Any) -> Woken[list[CancelStatus]]:
            return Woken([CANCEL_STATUS[letter] for letter in reply[0]], *packing.unpack_woken(queue, reply[1:]))

        check_chunk(targets)
        return self._call("cancel", queue, operation, _targets(targets), decode)

    def reschedule(
        self,
        queue: str,
        targets: Sequence[Target],
        operation: Operation,
        *,
        delay_ms: int = 0,
        at_ms: int | None = None,
    ) -> Call[Woken[list[RescheduleStatus]]]:
        def decode(reply: Any) -> Woken[list[RescheduleStatus]]:
            return Woken([RESCHEDULE_STATUS[letter] for letter in reply[0]], _wake(queue, reply[1:]))

        check_chunk(targets)
        when = [b"" if at_ms is None else b"%d" % at_ms, b"%d" % delay_ms]
        return self._call("reschedule", queue, operation, [*when, *_targets(targets)], decode)

    def change_priority(
        self, queue: str, ids: Sequence[str], priority: int, operation: Operation
    ) -> Call[Woken[list[PriorityStatus]]]:
        def decode(reply: Any) -> Woken[list[PriorityStatus]]:
            return Woken([PRIORITY_STATUS[letter] for letter in reply[0]], _wake(queue, reply[1:]))

        check_chunk(ids)
        return self._call("change_priority", queue, operation, [b"%d" % priority, *(id.encode() for id in ids)], decode)

    def outgoing(self, queue: str, limit: int) -> Call[list[Continuation | Notice]]:
        def decode(reply: Any) -> list[Continuation | Notice]:
            return [packing.unpack_outgoing(reply[at].decode(), reply[at + 1]) for at in range(0, len(reply), 2)]

        return self._call("outgoing", queue, None, [b"%d" % limit, b"%d" % OUTGOING_TTL_MS], decode, shared="outgoing")

    def forwarded(self, queue: str, ids: Sequence[str]) -> Call[None]:
        arguments = [message_id.encode() for message_id in ids]
        return self._call("forwarded", queue, None, arguments, lambda reply: None, shared="outgoing")

    def arrive(self, queue: str, notices: Sequence[Notice]) -> Call[Woken[None]]:
        check_chunk(notices)
        arguments = [packing.pack_notice(notice) for notice in notices]
        return self._call(
            "arrive", queue, None, arguments, lambda reply: Woken(None, *packing.unpack_woken(queue, reply))
        )

    # ---- waiting -----------------------------------------------------------------------------------------------

    def watch(self, queue: str, message_id: str, waiter: str | None) -> Call[Watched]:
        arguments = [message_id.encode(), (waiter or "").encode()]
        return self._call("watch", queue, None, arguments, packing.unpack_watched, shared="watch")

    def watch_chain(self, queue: str, message_id: str, waiter: str | None) -> Call[ChainState]:
        arguments = [message_id.encode(), (waiter or "").encode()]
        return self._call("watch_chain", queue, None, arguments, packing.unpack_chain, shared="watch")

    def links(self, queue: str, message_id: str) -> Call[Links]:
        return self._call("links", queue, None, [message_id.encode()], packing.unpack_links, shared="watch")

    def result(self, queue: str, message_id: str) -> Call[bytes | None]:
        # By a script, which knows under which name the results of the queue lie.
        return self._call("result", queue, None, [message_id.encode()], lambda reply: reply, shared="watch")

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
        def decode(reply: Any) -> Page:
            messages = [packing.unpack_stored(state, *reply[at : at + 4]) for at in range(1, len(reply), 4)]
            return Page(messages, reply[0].decode() or None)

        wanted = [(text or "").encode() for text in (cursor, id, key, group, reason)]
        return self._call("peek", queue, None, [state.encode(), b"%d" % limit, *wanted], decode)

    def dead_since(self, at_ms: int) -> str:
        # No member has an empty name: all that have this score come behind it.
        return f"{at_ms} "

    def stats(self, queue: str, *, minutes: int = 0) -> Call[StatsRecord]:
        def decode(reply: Any) -> StatsRecord:
            now, paused, packed = reply[:3]
            ready, delayed, waiting, leased, dead_kept = reply[3:8]
            oldest_ready, oldest_leased, next_due, next_lease, sleepers, readers, kept, damaged, over_cap, changes = (
                reply[8:]
            )
            counts = packing.unpack_counts(packed)
            ledger = packing.ledger_of(counts, ready, delayed, waiting, leased, dead_kept, over_cap)
            return StatsRecord(
                queue, now, ledger, paused == 1,
                _or_none(oldest_ready), _or_none(oldest_leased), _or_none(next_due), _or_none(next_lease), sleepers,
                counts["journal_first"] + 1, counts["journal_last"],
                {readers[at].decode(): int(readers[at + 1]) for at in range(0, len(readers), 2)},
                [packing.unpack_minute(minute) for minute in kept], damaged,
                packing.unpack_changes(changes, now // 60_000 - minutes + 1),
            )  # fmt: skip

        return self._call("stats", queue, None, [b"%d" % minutes], decode)

    def stats_many(self, queues: Sequence[str], *, minutes: int = 0) -> list[Call[list[StatsRecord]]]:
        def listed(call: Call[StatsRecord]) -> Call[list[StatsRecord]]:
            assert isinstance(call, ValkeyCall)
            decode = call.decode
            return dataclasses.replace(call, name="stats_many", decode=lambda reply: [decode(reply)])

        return [listed(self.stats(queue, minutes=minutes)) for queue in queues]

    def trace(self, queue: str, message_id: str, cursor: str | None = None) -> Call[TracePage]:
        # An id contains the time when it was made. If the first event is not found from there on, a clock was wrong:
        # then search the whole journal.
        mode, _, place = (cursor or "near:").partition(":")

        def decode(reply: Any) -> TracePage:
            next_place, found = reply[0].decode(), reply[1]
            events = [
                event
                for at in range(0, len(found), 2)
                for event in packing.unpack_entry(queue, int(found[at]), found[at + 1])
                if event.message_id == message_id
            ]
            if mode == "near" and events and events[0].event != "published":
                return TracePage([], "all:1")
            if events and events[-1].event in FINAL_EVENTS:
                return TracePage(events, None)
            if next_place:
                return TracePage(events, f"{'all' if events and mode == 'near' else mode}:{next_place}")
            if mode == "near" and not events:
                return TracePage([], "all:1")
            return TracePage(events, None)

        arguments = [message_id.encode(), place.encode(), b"%d" % journal_start_ms(message_id)]
        return self._call("trace", queue, None, arguments, decode, shared="journal")

    def holders(self, queues: Sequence[str], key: str) -> list[Call[list[tuple[str, str]]]]:
        return [self._holders(queue, key) for queue in queues]

    def _holders(self, queue: str, key: str) -> Call[list[tuple[str, str]]]:
        def decode(reply: Any) -> list[tuple[str, str]]:
            ids = (reply or b"").decode()
            return [(queue, ids[at : at + ID_CHARACTERS]) for at in range(0, len(ids), ID_CHARACTERS)]

        place = f"{{{self.namespace}:{queue}}}:keys".encode()
        return ValkeyCall("holders", queue, command(b"HGET", place, key.encode()), decode, key=place, place=place)

    def queues(self) -> Call[list[str]]:
        def decode(reply: Any) -> list[str]:
            return sorted(name.decode() for name in reply)

        key = f"{self.namespace}:queues".encode()
        return ValkeyCall("queues", "", command(b"SMEMBERS", key), decode, key=key, place=key)

    def locate(
        self, queues: Sequence[str], message_id: str, *, in_journals: bool = False
    ) -> list[Call[list[FoundMessage]]]:
        return locate.locate(self, queues, message_id, in_journals=in_journals)

    # ---- running a queue -------------------------------------------------------------------------------------

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
        def decode(reply: Any) -> Woken[Redriven]:
            more, next_cursor = reply[0][:1] == b"1", reply[0][1:].decode() or None
            return Woken(Redriven(_ids(reply[1]), _ids(reply[2]), more, next_cursor), _wake(queue, reply[3:]))

        wanted = [(text or "").encode() for text in (reason, cursor)]
        arguments = [b"%d" % limit, *wanted, *(message_id.encode() for message_id in ids)]
        return self._call("redrive", queue, operation, arguments, decode)

    def replace_dead(
        self, queue: str, message_id: str, draft: Draft, operation: Operation
    ) -> Call[Woken[Published | None]]:
        def decode(reply: Any) -> Woken[Published | None]:
            if not reply:
                return Woken(None, {})
            return Woken(_published(queue, reply[0], [draft])[0], *packing.unpack_woken(queue, reply[1:]))

        arguments = [message_id.encode(), packing.pack_routed(draft)]
        return self._call("replace_dead", queue, operation, arguments, decode)

    def purge(
        self, queue: str, state: MessageState, limit: int, operation: Operation, *, ids: Sequence[str] = ()
    ) -> Call[Woken[Purged]]:
        def decode(reply: Any) -> Woken[Purged]:
            removed, more = map(int, reply[0].split())
            return Woken(Purged(removed, more == 1), *packing.unpack_woken(queue, reply[1:]))

        check_purge(state, ids)
        check_chunk(ids)
        arguments = [state.encode(), b"%d" % min(limit, CHUNK_MESSAGES_MAX), *(id.encode() for id in ids)]
        return self._call("purge", queue, operation, arguments, decode)

    def configure(self, queue: str, changes: Mapping[str, Any]) -> Call[Woken[PolicyRecord]]:
        # A Lua table cannot hold None; false clears a setting.
        packed = packing.pack({name: False if value is None else value for name, value in changes.items()})
        return self._call(
            "configure",
            queue,
            None,
            [packed, format_changes(changes).encode()],
            lambda reply: Woken(packing.unpack_policy(reply[0]), _wake(queue, reply[1:])),
            shared="configure",
        )

    def policy(self, queue: str) -> Call[PolicyRecord]:
        def decode(reply: Any) -> PolicyRecord:
            version, packed = reply
            if version is not None and int(version) > VERSION:
                from waypost.store.valkey.failures import too_new

                raise too_new(queue, version.decode())
            return packing.unpack_policy(packed)

        key = self.keys_of(queue)[0]
        return ValkeyCall("policy", queue, command(b"HMGET", key, b"version", b"policy"), decode, key=key, place=key)

    def pause(self, queue: str) -> Call[bool]:
        return self._call("pause", queue, None, [], lambda reply: reply[0] == b"1", shared="configure")

    def resume(self, queue: str) -> Call[Woken[bool]]:
        def decode(reply: Any) -> Woken[bool]:
            return Woken(reply[0] == b"1", _wake(queue, reply[1:]))

        return self._call("resume", queue, None, [], decode, shared="configure")

    # ---- groups ------------------------------------------------------------------------------------------------

    def groups(self, queue: str, limit: int, *, cursor: str | None = None, group: str | None = None) -> Call[GroupPage]:
        def decode(reply: Any) -> GroupPage:
            step = packing.GROUP_FIELDS
            found = [packing.unpack_group(reply[at : at + step]) for at in range(1, len(reply), step)]
            return GroupPage(found, group_cursor(reply[0][1:].decode()) if reply[0] else None)

        after = read_cursor(cursor, 1)
        arguments = [
            b"%d" % limit, b"" if after is None else b"1" + str(after[0]).encode(),
            b"" if group is None else b"1" + group.encode(),
        ]  # fmt: skip
        return self._call("groups", queue, None, arguments, decode)

    def configure_group(self, queue: str, group: str, changes: Mapping[str, Any]) -> Call[Woken[bool]]:
        def decode(reply: Any) -> Woken[bool]:
            return Woken(reply[0] == b"1", _wake(queue, reply[1:]))

        packed = packing.pack({name: False if value is None else value for name, value in changes.items()})
        # Not the names of the queue's own settings: readers of the journal must not confuse the two.
        text = format_changes({f"own_{name}": value for name, value in changes.items()})
        return self._call("configure_group", queue, None, [group.encode(), packed, text.encode()], decode)

    def skip_held(self, queue: str, group: str, operation: Operation) -> Call[Woken[str | None]]:
        def decode(reply: Any) -> Woken[str | None]:
            return Woken(reply[0].decode() or None, _wake(queue, reply[1:]))

        return self._call("skip_held", queue, operation, [group.encode()], decode)

    def strand_group(self, queue: str, group: str) -> Call[None]:
        """For tests: take a group out of the turns, so that no claim finds its messages."""
        place = f"{{{self.namespace}:{queue}}}:group_turns".encode()
        return ValkeyCall(
            "damage", queue, command(b"ZREM", place, group.encode()), lambda reply: None, key=place, place=place
        )

    def check(self, queue: str, cursor: str | None, *, mend: bool = False) -> Call[CheckPage]:
        def decode(reply: Any) -> CheckPage:
            damages = []
            for at in range(2, len(reply), 4):
                kind, id, found, mended = (text.decode(errors="backslashreplace") for text in reply[at : at + 4])
                damages.append(Damage(queue, kind, id or None, found, mended or None))
            return CheckPage(reply[0], damages, reply[1].decode() or None)

        return self._call("check", queue, None, [b"1" if mend else b"", (cursor or "").encode()], decode)

    def remove(self, queue: str, operation: Operation) -> Call[Removal]:
        def decode(reply: Any) -> Removal:
            left = {name: count for name, count in zip(LEFT, reply[1:], strict=False) if count}
            return Removal(reply[0] > 0, left, made_again=reply[0] == 2)

        return self._call("remove", queue, operation, [], decode)

    def unlist(self, queue: str) -> list[Call[None]]:
        def forget(reply: Any) -> None:
            self._announced.pop(queue, None)
            self._claimed_from.discard(queue)

        listed, scheduled, name = f"{self.namespace}:queues".encode(), self._scheduled_key, queue.encode()
        return [
            ValkeyCall("unlist", queue, command(b"SREM", listed, name), forget, key=listed, place=listed),
            ValkeyCall(
                "unlist", queue, command(b"HDEL", scheduled, name), lambda reply: None, key=scheduled, place=scheduled
            ),
        ]

    # ---- schedules --------------------------------------------------------------------------------------------

    def save_schedule(
        self, queue: str, schedule: StoredSchedule, *, version: str | None, next_ms: int | None
    ) -> Call[Saved]:
        def decode(reply: Any) -> Saved:
            found = packing.unpack_schedule(schedule.key, reply[1]) if reply[1] else None
            return Saved("saved" if reply[0] == b"1" else "conflict", found)

        arguments = [schedule.key.encode(), (version or "").encode(), _number(next_ms), packing.pack_schedule(schedule)]
        return self._call("save_schedule", queue, None, arguments, decode)

    def remove_schedule(self, queue: str, key: str) -> Call[bool]:
        place = f"{{{self.namespace}:{queue}}}:schedules".encode()
        return ValkeyCall("remove_schedule", queue, command(b"HDEL", place, key.encode()), bool, key=place, place=place)

    def schedules(self, queue: str) -> Call[ScheduleList]:
        def decode(reply: Any) -> ScheduleList:
            found = [packing.unpack_schedule(reply[at].decode(), reply[at + 1]) for at in range(1, len(reply), 2)]
            return ScheduleList(reply[0], sorted(found, key=lambda schedule: schedule.key))

        return self._call("schedules", queue, None, [], decode)

    @property
    def _scheduled_key(self) -> bytes:
        return f"{self.namespace}:scheduled".encode()

    def scheduled(self) -> Call[dict[str, int]]:
        def decode(reply: Any) -> dict[str, int]:
            if isinstance(reply, dict):
                return {name.decode(): int(number) for name, number in reply.items()}
            return {reply[at].decode(): int(reply[at + 1]) for at in range(0, len(reply), 2)}

        key = self._scheduled_key
        return ValkeyCall("scheduled", "", command(b"HGETALL", key), decode, key=key, place=key)

    def schedules_changed(self, queue: str) -> Call[None]:
        # The list of queues that have schedules lies in another slot than they do, so it cannot be part of their step.
        key = self._scheduled_key
        return ValkeyCall(
            "schedules_changed", queue, command(b"HINCRBY", key, queue.encode(), b"1"), lambda reply: None, key=key,
            place=key,
        )  # fmt: skip

    def fire_schedule(
        self, queue: str, step: FireStep, drafts: Sequence[Draft], operation: Operation
    ) -> Call[Woken[Fired]]:
        def decode(reply: Any) -> Woken[Fired]:
            found = packing.unpack_schedule(step.key, reply[2]) if reply[2] else None
            return Woken(Fired(FIRE_STATUS[reply[0]], int(reply[1]), found), *packing.unpack_woken(queue, reply[3:]))

        check_chunk(drafts)
        state = b"" if step.state is None else b"1" + step.state
        arguments = [
            step.key.encode(), step.version.encode(), _number(step.expected_ms), _number(step.last_due_ms),
            _number(step.valid_until_ms), _number(step.last_ms), _number(step.missed), _number(step.next_ms),
            _number(step.due_ms), state, (step.new_version or "").encode(), b"%d" % step.by_hand,
            *_after_run(step.after_run), *(packing.pack_routed(draft) for draft in drafts),
        ]  # fmt: skip
        return self._call("fire_schedule", queue, operation, arguments, decode)

    def trigger_schedule(
        self, queue: str, key: str, draft: Draft, operation: Operation
    ) -> Call[Woken[Published | None]]:
        def decode(reply: Any) -> Woken[Published | None]:
            if not reply:
                return Woken(None, {})
            status: PublishStatus = "delayed" if reply[0] == b"d" else "queued"
            return Woken(Published(draft.id, status, queue), *packing.unpack_woken(queue, reply[1:]))

        arguments = [key.encode(), packing.pack_routed(draft)]
        return self._call("trigger_schedule", queue, operation, arguments, decode)

    def promote(self, queue: str) -> Call[Woken[Promoted]]:
        def decode(reply: Any) -> Woken[Promoted]:
            promoted, depth, lag, next_due = reply[:4]
            due = None if next_due < 0 else next_due
            return Woken(Promoted(promoted, depth, lag, due), *packing.unpack_woken(queue, reply[4:]))

        return self._call("promote", queue, None, [], decode)

    # ---- leaders ---------------------------------------------------------------------------------------------

    def elect(self, role: str, name: str, ttl_ms: int) -> Call[Elected]:
        def decode(reply: Any) -> Elected:
            return Elected(reply[0].decode(), reply[1], reply[2])

        return self._elect("elect", role, name, ttl_ms, decode)

    def resign(self, role: str, name: str) -> Call[bool]:
        return self._elect("resign", role, name, 0, lambda reply: reply == b"1")

    def _elect(self, action: str, role: str, name: str, ttl_ms: int, decode: Callable[[Any], T]) -> Call[T]:
        text = script("elect")
        place = poll.leader_key(self.namespace, role)
        number, head = evalsha_head(text, [place])
        given = (_number(self.clock() if self.clock else None), action.encode(), name.encode(), b"%d" % ttl_ms)
        packed = b"*%d\r\n" % (number + len(given)) + head + b"".join([part(value) for value in given])
        return ValkeyCall(action, "", packed, decode, text, place=place)

    # ---- workers -----------------------------------------------------------------------------------------------

    def poll(
        self, idle: Sequence[Idle], *, registration: Registration | None = None, repeat_to: str | None = None
    ) -> list[Call[Polled]]:
        return poll.poll(self, idle, registration, repeat_to)

    def heartbeat(self, heartbeat: Heartbeat, ttl_ms: int) -> Call[int]:
        return workers.heartbeat(self, heartbeat, ttl_ms)

    def unregister(self, name: str) -> Call[bool]:
        return workers.unregister(self, name)

    def workers(self) -> Call[list[WorkerRecord]]:
        return workers.workers(self)

    def request_worker(self, name: str, request: WorkerRequest) -> Call[bool]:
        return workers.request_worker(self, name, request)

    # ---- the journal -----------------------------------------------------------------------------------------

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
        on_disk = WAIT_FOR_DISK if self.durability == "fsync" else None
        return shared.save(self, kind, name, data, version, ttl_ms, keep, on_disk)

    def records(
        self, kind: str, *, names: Sequence[str] = (), cursor: str | None = None, limit: int = RECORDS_PAGE_MAX
    ) -> Call[RecordPage]:
        return shared.page(self, kind, names, cursor, limit)

    def journal(self, queue: str, after: int, limit: int) -> Call[EventPage]:
        def decode(reply: Any) -> EventPage:
            first_kept, newest, found = reply
            start = max(after, first_kept - 1)
            events = [
                event
                for at in range(0, len(found), 2)
                for event in packing.unpack_entry(queue, int(found[at]), found[at + 1])
                if event.number > start
            ][:limit]
            last = events[-1].number if events else start
            return EventPage(events, last, first_kept, newest)

        return self._call("journal", queue, None, [b"%d" % after, b"%d" % limit], decode, shared="journal")

    def journal_reader(self, queue: str, name: str, read_to: int | None) -> Call[int]:
        place = b"" if read_to is None else b"%d" % read_to
        return self._call("journal_reader", queue, None, [name.encode(), place], int, shared="journal")

    def journal_forget(self, queue: str, name: str) -> Call[bool]:
        return self._call("journal_forget", queue, None, [name.encode()], bool, shared="journal")

    def journal_trim(self, queue: str, up_to: int) -> Call[int]:
        return self._call("journal_trim", queue, None, [b"%d" % up_to], int, shared="journal")


def _published(queue: str, statuses: bytes, drafts: Sequence[Draft]) -> list[Published]:
    """Letters, each followed by an id where the message that counts is not the draft's own."""
    results = []
    at = 0
    for draft in drafts:
        letter = statuses[at]
        at += 1
        message_id = draft.id
        if letter in NAMES_ANOTHER:
            message_id = statuses[at : at + ID_BYTES].decode()
            at += ID_BYTES
        results.append(Published(message_id, PUBLISH_STATUS[letter], queue))
    return results


def _wake(queue: str, names: Sequence[bytes]) -> dict[str, list[str]]:
    return {queue: [name.decode() for name in names]} if names else {}


def _ids(joined: bytes) -> list[str]:
    return [joined[at : at + ID_BYTES].decode() for at in range(0, len(joined), ID_BYTES)]


def _damaged_ids(joined: bytes) -> tuple[str, ...]:
    """Ids of damaged records; what is no id of ours may hold any bytes."""
    return tuple(id.decode(errors="backslashreplace") for id in joined.split(b"\0")) if joined else ()


def _after_run(after: AfterRun | None) -> list[bytes]:
    """A run that must have ended, the state to go on with while it has not, and what is skipped then."""
    if after is None:
        return [b"", b"", b"0", b"0"]
    state = b"" if after.state is None else b"1" + after.state
    return [after.run_id.encode(), state, b"%d" % after.skipped, b"%d" % after.instant_ms]


def _number(value: int | None) -> bytes:
    return b"" if value is None else b"%d" % value


def _or_none(number: int) -> int | None:
    return None if number < 0 else number


def _targets(targets: Sequence[Target]) -> list[bytes]:
    return [
        b"k" + target.key.encode() if target.key is not None else b"i" + (target.id or "").encode()
        for target in targets
    ]
