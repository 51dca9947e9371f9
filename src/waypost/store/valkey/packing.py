"""The bytes that pass between Python and the scripts: drafts, fences, states, counts and journal entries.

Pure, and the only place besides `lua/common.lua` that knows the layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any

import msgspec

from waypost.errors import SchemaTooNew
from waypost.identity import SESSION_BYTES, operation_id
from waypost.policy import DEFAULT_GROUP, UNIQUE_NUMBERS, GroupSettings, PolicyRecord
from waypost.store.known_events import unknown_event
from waypost.store.port import Draft, Hold, forwarded_draft
from waypost.store.valkey.scripts import CAUSES, COUNTERS, EVENTS
from waypost.values import (
    MINUTE_COUNTERS,
    REDELIVERY_CAUSES,
    ChainState,
    ChangeRecord,
    Continuation,
    EventRecord,
    GroupRecord,
    Lease,
    Ledger,
    Links,
    MessageState,
    MinuteRecord,
    Notice,
    Settlement,
    SideEffect,
    Stored,
    StoredSchedule,
    Watched,
)

STATE = Struct(">cI12sQIIIBBQBQIHHB")
#: A lease as its holder shows it: id, and the beginning of the state it must have.
FENCE = Struct(">24scI12s")
ROUTING = Struct(">BBQQHHI")
#: What stands before the draft of a message that lapses: a mark, whether the expiry is a time, and the expiry.
EXPIRY = Struct(">BBQ")
EXPIRING = 31
#: What stands before the draft of a message whose key is in use for another time than while it is unfinished: a mark,
#: and the number of that time.
UNIQUE = 30
SETTLEMENT = Struct(">24scI12scQQHHIIBB")
CONTINUATION = Struct(">24sHI")
TEXT_ITEM = Struct(">BBIH")
ALSO = Struct(">BBI24s")

#: The first byte of a draft that has more than a priority and an envelope.
ROUTED = 16
#: Added to the priority of a draft whose only option is that its arrival is remembered.
ONCE = 32
#: The same for one that keeps to the cap.
ONCE_CAPPED = 48
#: What stands before a notice in the place of a draft.
NOTICE = b"N"
RULES = {"keep": 0, "replace": 1, "extend": 2, "error": 3}
ABSOLUTE, FORWARDED, HAS_COPY, HAS_CHAIN, WAITS, CAPPED = 4, 8, 16, 32, 64, 128
#: Flags of a state. The extension is behind the texts: what a later release keeps of a message.
CANCEL_REQUESTED, OF_A_CHAIN, LAPSES, EXTENDED = 1, 4, 16, 128

VALUE_HEAD = 9  # published_ms and priority stand before the envelope
STATUS: dict[bytes, MessageState] = {b"R": "ready", b"D": "delayed", b"W": "waiting", b"L": "leased", b"X": "dead"}

#: Events that end a lease whatever the state before, and those that do if the message was leased.
ENDS_LEASE = frozenset(("retried", "snoozed", "released", "expired"))
MAY_END_LEASE = frozenset(("done", "dead", "dropped", "cancelled", "replaced"))
HAS_DUE_TIME = frozenset(("retried", "snoozed", "postponed"))
#: The first bytes of items that contain a state.
STATE_ITEMS = frozenset((b"S", b"s", b"X", b"P", b"F"))

pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder().decode


def pack_routed(draft: Draft) -> bytes:
    """One argument of `publish`, with all options."""
    key = (draft.key or "").encode()
    group = (draft.group or "").encode()
    copy = draft.journal_copy or b""
    flags = RULES[draft.on_conflict]
    due = draft.delay_ms
    if draft.at_ms is not None:
        flags |= ABSOLUTE
        due = draft.at_ms
    if draft.forwarded:
        flags |= FORWARDED | CAPPED if draft.capped else FORWARDED
    if draft.journal_copy is not None:
        flags |= HAS_COPY
    chain = after = b""
    if draft.chain is not None:
        flags |= HAS_CHAIN
        chain = _short(draft.chain)
    if draft.after:
        flags |= WAITS
        chains = "\0".join(draft.after).encode()
        after = len(chains).to_bytes(4, "big") + chains
    head = ROUTING.pack(ROUTED + draft.priority, flags, due, draft.window_ms, len(key), len(group), len(copy))
    expiry = b""
    if draft.expires_ms:
        expiry = EXPIRY.pack(EXPIRING, draft.expires_ms > 0, abs(draft.expires_ms))
    if draft.unique != "live":
        expiry += bytes((UNIQUE, UNIQUE_NUMBERS[draft.unique]))
    return b"".join((expiry, head, key, group, copy, chain, after, draft.envelope))


def once_mark(draft: Draft) -> int:
    """Return what to add to the priority of a draft whose only option is that its arrival is remembered."""
    return ONCE_CAPPED if draft.capped else ONCE


def _short(text: str) -> bytes:
    """A text of at most 255 bytes, with its length before it."""
    data = text.encode()
    return bytes((len(data),)) + data


def unpack_routed(data: bytes, message_id: str) -> Draft:
    """A draft that waits in `outgoing`, without its expiry."""
    mark, flags, due, window, key_length, group_length, copy_length = ROUTING.unpack_from(data)
    group_at = ROUTING.size + key_length
    copy_at = group_at + group_length
    chain_at = envelope_at = copy_at + copy_length
    if flags & HAS_CHAIN:
        envelope_at += 1 + data[chain_at]
    return Draft(
        message_id,
        data[envelope_at:],
        key=_text(data[ROUTING.size : group_at]),
        window_ms=window,
        delay_ms=0 if flags & ABSOLUTE else due,
        at_ms=due if flags & ABSOLUTE else None,
        priority=mark - ROUTED,
        group=_text(data[group_at:copy_at]),
        journal_copy=data[copy_at:chain_at] if flags & HAS_COPY else None,
        forwarded=bool(flags & FORWARDED),
        chain=_text(data[chain_at + 1 : envelope_at]),
    )


def pack_fences(holds: Sequence[Hold]) -> bytes:
    """Ids, tokens and nonces in one text."""
    fence = FENCE.pack
    return b"".join([fence(hold.id.encode(), b"L", hold.token, hold.nonce) for hold in holds])


OUTCOMES = {"done": b"d", "retry": b"r", "snooze": b"s", "dead": b"x", "drop": b"p", "release": b"b"}


def pack_settlement(settlement: Settlement) -> bytes:
    """One argument of `settle`, when it is more than a plain done."""
    reason = (settlement.reason or "").encode()
    error_type = (settlement.error_type or "").encode()
    error = (settlement.error or "").encode()
    result = settlement.result or b""
    parts = [
        SETTLEMENT.pack(
            settlement.id.encode(), b"L", settlement.token, settlement.nonce, OUTCOMES[settlement.outcome],
            settlement.after_ms, settlement.result_ttl_ms, len(reason), len(error_type), len(error), len(result),
            settlement.result is not None, len(settlement.then),
        ),
        reason, error_type, error, result,
    ]  # fmt: skip
    for next_one in settlement.then:
        draft = pack_routed(forwarded_draft(next_one))
        queue = next_one.queue.encode()
        parts += [CONTINUATION.pack(next_one.id.encode(), len(queue), len(draft)), queue, draft]
    return b"".join(parts)


def unpack_outgoing(message_id: str, data: bytes) -> Continuation | Notice:
    """A continuation or a notice that waits to be sent on."""
    length = int.from_bytes(data[32:34], "big")
    queue, at = data[34 : 34 + length].decode(), 34 + length
    if data[at : at + 1] == NOTICE:
        return unpack_notice(queue, data[at + 1 :])
    expires_ms = 0
    if data[at] == EXPIRING:
        _, is_moment, expires_ms = EXPIRY.unpack_from(data, at)
        if not is_moment:
            # From the settle on, whose time the entry begins with, however late it arrives.
            expires_ms += int.from_bytes(data[:8], "big")
        at += EXPIRY.size
    draft = unpack_routed(data[at:], message_id)
    return Continuation(
        message_id, queue, draft.envelope, draft.key, draft.delay_ms, draft.priority, draft.group, draft.chain,
        draft.journal_copy, expires_ms=expires_ms,
    )  # fmt: skip


# ---- chains ----------------------------------------------------------------------------------------------------


def pack_notice(notice: Notice) -> bytes:
    """One argument of `arrive`. Lua has no None in its lists."""
    failed = False if notice.failed is None else notice.failed
    return pack((notice.id, notice.kind, notice.chain, notice.member, failed, "\0".join(notice.begun)))


def unpack_notice(queue: str, data: bytes) -> Notice:
    """A notice that a step of this store made."""
    id, kind, chain, member, failed, begun = unpack(data)
    if failed is False:
        failed = None
    return Notice(id, kind, queue, chain, member, tuple(begun.split("\0")) if begun else (), failed)


def unpack_chain(reply: Sequence[Any]) -> ChainState:
    """How a chain stands."""
    if not reply:
        return ChainState(False)
    open, failed, last = reply
    member, _, reason = failed.decode().partition("\0")
    return ChainState(True, open, (member, reason) if failed else None, _text(last))


def unpack_links(reply: Sequence[Any]) -> Links:
    """What a message has to do with chains."""
    chain, state, *lists = reply
    members, watchers, blockers = (tuple(sorted(name.decode() for name in names)) for names in lists)
    return Links(_text(chain), blockers, unpack_chain(state), members, watchers)


def unpack_watched(reply: Sequence[Any]) -> Watched:
    """How a message stands for who waits for its end."""
    status, *more = reply
    if status == b"X":
        reason, error_type, error = unpack(more[0]) if more[0] else ("", "", "")
        return Watched("dead", "dead", _str(reason), _str(error_type), _str(error))
    if status:
        return Watched(STATUS[status])
    ended: Any = more[0].decode() if more else None
    return Watched(None, ended, result=bytes(more[1]) if len(more) > 1 else None)


# ---- what else a step did --------------------------------------------------------------------------------------


def unpack_also(queue: str, data: bytes) -> tuple[SideEffect, ...]:
    """The items of `add_also` in moves.lua."""
    found = []
    for event, reason, number, id in ALSO.iter_unpack(data):
        name, why = EVENTS[event - 1], CAUSES[reason - 1] if reason else None
        if any(id):
            found.append(SideEffect(queue, name, id.decode(), number, why))
        else:
            found.append(SideEffect(queue, name, None, None, why, number))
    return tuple(found)


def unpack_woken(queue: str, names: Sequence[bytes]) -> tuple[dict[str, list[str]], tuple[SideEffect, ...]]:
    """The end of an answer: the clients to wake and, behind a byte 1, what else the step did."""
    if not names:
        return {}, ()
    also: tuple[SideEffect, ...] = ()
    if names[-1][:1] == b"\1":
        also, names = unpack_also(queue, names[-1][1:]), names[:-1]
    return {queue: [name.decode() for name in names]} if names else {}, also


def unpack_besides(queue: str, data: bytes) -> tuple[dict[str, list[str]], tuple[SideEffect, ...]]:
    """The same in the answer of a claim, where it is one text."""
    length = int.from_bytes(data[:4], "big")
    names = data[4 : 4 + length].decode()
    return {queue: names.split("\0")} if names else {}, unpack_also(queue, data[4 + length :])


def _text(data: bytes) -> str | None:
    return data.decode() if data else None


def _or_none(number: int) -> int | None:
    return None if number < 0 else number


# ---- states ----------------------------------------------------------------------------------------------------


def unpack_leases(reply: Sequence[Any], first: int, lease_end: int, now: int, nonce: bytes) -> list[Lease]:
    """The messages of a claim: value and state by turns; no state: it is claimed for the first time, and plain."""
    leases = []
    read, size, number = STATE.unpack_from, STATE.size, int.from_bytes
    end = _or_none(lease_end)
    for at in range(first, len(reply), 2):
        value, state = reply[at], reply[at + 1]
        message_id, envelope = value[10:34].decode(), value[VALUE_HEAD:]
        if not state:
            published = number(value[:8], "big")
            leases.append(
                Lease(message_id, 1, nonce, 1, 0, value[8], None, None, published, published, now, end, envelope)
            )
            continue
        (
            _, token, _, claimed, _, deliveries, attempts, flags, _, published, priority, ready, _,
            key_length, group_length, worker_length,
        ) = read(state)  # fmt: skip
        group_at = size + key_length
        key, group = _text(state[size:group_at]), _text(state[group_at : group_at + group_length])
        chain = chain_in(state, group_at + group_length + worker_length) if flags & OF_A_CHAIN else None
        leases.append(
            Lease(
                message_id, token, nonce, deliveries, attempts, priority, key, group, published, ready, claimed, end,
                envelope, chain,
            )
        )  # fmt: skip
    return leases


def chain_in(data: bytes, at: int) -> str:
    """The chain of a message whose length is at this place."""
    return data[at + 1 : at + 1 + data[at]].decode()


def tail_length(data: bytes, at: int, texts: int, flags: int) -> int:
    """The length of what is behind the fixed part of a state: its texts, its chain and its extension."""
    length = texts
    if flags & OF_A_CHAIN:
        length += 1 + data[at + length]
    if flags & EXTENDED:
        length += 2 + int.from_bytes(data[at + length : at + length + 2], "big")
    return length


def unpack_stored(state: MessageState, score: bytes, value: bytes, packed: bytes, failure: bytes) -> Stored:
    """One message as peek shows it."""
    fields = STATE.unpack_from(packed)
    key_length, group_length, worker_length = fields[13:]
    key_at = STATE.size
    group_at = key_at + key_length
    worker_at = group_at + group_length
    leased = state == "leased"
    reason, error_type, error = unpack(failure) if failure else ("", "", "")
    score, _, expiry = score.partition(b" ")
    return Stored(
        value[10:34].decode(), state, _text(packed[key_at:group_at]), _text(packed[group_at:worker_at]),
        fields[10], fields[1], fields[5], fields[6], fields[9], fields[11], value[VALUE_HEAD:],
        fields[3] if leased else None, int(float(score)) if leased else None,
        _text(packed[worker_at : worker_at + worker_length]) if leased else None, bool(fields[7] & CANCEL_REQUESTED),
        int(float(score)) if state in ("dead", "done") else None,
        _str(reason), _str(error_type), _str(error), int(expiry) if expiry else None,
    )  # fmt: skip


def lapses(packed: bytes) -> bool:
    """Whether the message of a state lapses."""
    return bool(STATE.unpack_from(packed)[7] & LAPSES)


def _str(value: str | bytes) -> str | None:
    """Lua packs texts that are not ASCII as it likes; both forms come back as text."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return value or None


# ---- counts ------------------------------------------------------------------------------------------------------


def unpack_counts(packed: bytes) -> dict[str, int]:
    """Cumulative counters by name."""
    numbers = unpack(packed) if packed else []
    return dict.fromkeys(COUNTERS, 0) | dict(zip(COUNTERS, (int(number) for number in numbers), strict=False))


def ledger_of(
    counts: dict[str, int], ready: int, delayed: int, waiting: int, leased: int, dead_kept: int, over_cap: int
) -> Ledger:
    """The ledger of a queue from its counters and the sizes of its structures."""
    return Ledger(
        counts["published"], counts["redriven"], ready, delayed, waiting, leased,
        counts["done"], counts["dead"], counts["dropped"], counts["cancelled"], counts["replaced"], dead_kept,
        counts["claims"], counts["first_claims"], {cause: counts[f"again_{cause}"] for cause in REDELIVERY_CAUSES},
        counts["expired"], counts["released"], counts["retried"], counts["snoozed"], counts["duplicates"],
        counts["transferred"], over_cap,
    )  # fmt: skip


def unpack_minute(packed: bytes) -> MinuteRecord:
    """The counters of one minute, as many as the release that counted them knew."""
    minute, *numbers = unpack(packed)
    return MinuteRecord(
        int(minute) * 60_000, dict(zip(MINUTE_COUNTERS, (int(number) for number in numbers), strict=False))
    )


def unpack_changes(packed: bytes, first_minute: int) -> list[ChangeRecord]:
    """The changes of a queue's settings since the beginning of a minute; none if they cannot be read."""
    try:
        changes = _decode_changes(packed) if packed else []
    except msgspec.DecodeError:
        return []
    return [change for change in changes if change.at_ms // 60_000 >= first_minute]


_decode_changes = msgspec.msgpack.Decoder(list[ChangeRecord]).decode
NULLABLE = frozenset(field.name for field in msgspec.structs.fields(PolicyRecord) if field.default is None) | {
    "lease_ms",
    "max_deliveries",
}


def unpack_policy(packed: bytes | None) -> PolicyRecord:
    """The policy of a queue; what a Lua table cannot hold, None, is what is missing from it."""
    if not packed:
        return PolicyRecord()
    fields = dict.fromkeys(NULLABLE) | unpack(packed)
    try:
        return msgspec.convert(fields, PolicyRecord)
    except msgspec.ValidationError as error:
        raise SchemaTooNew(
            f"a queue's policy cannot be read by this release ({error}); update waypost to use it"
        ) from None


# ---- groups ------------------------------------------------------------------------------------------------------


#: How many fields each group of a listing has.
GROUP_FIELDS = 11


def unpack_group(fields: Sequence[Any]) -> GroupRecord:
    """One group of a listing."""
    name, ready, later, running, age, holder, is_leased, until, at_most, full, settings = fields
    own = msgspec.convert(unpack(settings), GroupSettings) if settings else DEFAULT_GROUP
    return GroupRecord(
        _text(name), ready, later, running, _or_none(age), own.paused,
        _text(holder), None if not holder else "leased" if is_leased else "delayed",
        "max_running" if at_most else "rate" if until else None, until or None, bool(full),
        own.weight, own.max_running, own.rate_count, own.rate_per_ms, own.max_pending,
    )  # fmt: skip


# ---- the journal -------------------------------------------------------------------------------------------------


def unpack_entry(queue: str, last: int, data: bytes) -> Iterator[EventRecord]:
    """The events of one journal entry whose last event has number `last`. What is behind them is of a later release."""
    try:
        yield from _unpack_items(queue, last, data)
    except IndexError:
        raise unknown_event(queue, last) from None


def _unpack_items(queue: str, last: int, data: bytes) -> Iterator[EventRecord]:
    at_ms = int.from_bytes(data[:8], "big")
    nonce = data[8:20]
    count = int.from_bytes(data[20:22], "big")
    operation = None
    if any(nonce):
        operation = operation_id(nonce[:SESSION_BYTES], int.from_bytes(nonce[SESSION_BYTES:], "big"))
    number, at, tail = last - count, 22, b""
    for _ in range(count):
        number += 1
        kind = data[at : at + 1]
        at += 1
        if kind == b"p":
            yield EventRecord(
                queue, number, at_ms, "published", data[at + 5 : at + 29].decode(), priority=data[at + 4],
                token=0, claims=0, deliveries=0, attempts=0, size=int.from_bytes(data[at : at + 4], "big"),
                operation_id=operation,
            )  # fmt: skip
            at += 29
        elif kind == b"D":
            length = int.from_bytes(data[at + 24 : at + 26], "big")
            yield EventRecord(
                queue, number, at_ms, "duplicate", data[at : at + 24].decode(),
                key=_text(data[at + 26 : at + 26 + length]), operation_id=operation,
            )  # fmt: skip
            at += 26 + length
        elif kind == b"T":
            event, cause, size, length = TEXT_ITEM.unpack_from(data, at)
            at += TEXT_ITEM.size
            text = data[at : at + length].decode()
            yield text_event(queue, number, at_ms, EVENTS[event - 1], cause, size, text, operation)
            at += length
        elif kind not in STATE_ITEMS:
            raise unknown_event(queue, last)
        else:
            event_name = "published"
            if kind not in b"PF":
                event_name = EVENTS[data[at] - 1]
                at += 1
            cause_name = CAUSES[data[at] - 1] if data[at] else None
            message_id = data[at + 1 : at + 25].decode()
            at += 25
            fields = STATE.unpack_from(data, at)
            at += STATE.size
            if kind != b"s":
                length = tail_length(data, at, sum(fields[13:]), fields[7])
                tail = data[at : at + length]
                at += length
            extra: dict[str, Any] = {}
            if kind == b"X":
                length = int.from_bytes(data[at : at + 2], "big")
                reason, error_type, error = split_failure(data[at + 2 : at + 2 + length])
                extra = {"reason": reason, "error_type": error_type, "error": error}
                at += 2 + length
            elif kind in b"PF":
                length = int.from_bytes(data[at : at + 4], "big")
                at += 4
                if length:  # one more than the body's own, so that 0 means none
                    extra = {"body": data[at : at + length - 1]}
                    at += length - 1
                if kind == b"F":  # fired by a schedule
                    length = int.from_bytes(data[at : at + 2], "big")
                    extra["schedule"] = data[at + 2 : at + 2 + length].decode()
                    at += 2 + length
            extra["cause"] = cause_name
            yield state_event(queue, number, at_ms, event_name, message_id, fields, tail, operation, extra)


def split_failure(text: bytes) -> tuple[str | None, str | None, str | None]:
    """Reason, error type and error of an event. The first release wrote no error."""
    reason, error_type, error, *_ = *text.decode().split("\0", 2), "", ""
    return reason or None, error_type or None, error or None


def text_event(
    queue: str, number: int, at_ms: int, event: Any, cause: int, size: int, text: str, operation: str | None
) -> EventRecord:
    """An event of the queue itself."""
    if event == "trimmed":
        return EventRecord(queue, number, at_ms, event, cause=CAUSES[cause - 1], reason=text, size=size)
    if event == "skipped":
        run, instant, schedule = text.split("\0", 2)
        return EventRecord(
            queue, number, at_ms, event, schedule=schedule, cause="overlap", reason=run, due_ms=int(instant), size=size,
            operation_id=operation,
        )  # fmt: skip
    if cause:  # of a single group
        group, _, text = text.partition("\0")
        return EventRecord(queue, number, at_ms, event, group=group or None, cause=text)
    return EventRecord(queue, number, at_ms, event, cause=text or None)


def state_event(
    queue: str,
    number: int,
    at_ms: int,
    event: Any,
    message_id: str,
    fields: tuple[Any, ...],
    tail: bytes,
    operation: str | None,
    extra: dict[str, Any],
) -> EventRecord:
    """An event of a message, decoded from its packed state."""
    status, token, _, claimed, _, deliveries, attempts, flags, _, _, priority, ready, size = fields[:13]
    key_length, group_length, worker_length = fields[13:]
    worker_at = key_length + group_length
    chain_at = worker_at + worker_length
    if event == "claimed":
        extra |= {"worker": _text(tail[worker_at:chain_at]), "wait_ms": at_ms - ready}
    elif event in ENDS_LEASE or (event in MAY_END_LEASE and status == b"L"):
        extra |= {"worker": _text(tail[worker_at:chain_at]), "run_ms": at_ms - claimed}
    if event in HAS_DUE_TIME or (event == "published" and ready > at_ms):
        extra["due_ms"] = ready
    return EventRecord(
        queue, number, at_ms, event, message_id, _text(tail[:key_length]),
        _text(tail[key_length:worker_at]), priority, token, token, deliveries, attempts,
        size=size, operation_id=None if _follows(event, status, extra["cause"]) else operation,
        chain_id=chain_in(tail, chain_at) if flags & OF_A_CHAIN else None, **extra,
    )  # fmt: skip


def _follows(event: str, status: bytes, cause: str | None) -> bool:
    """Whether an event only follows from others: no operation was about it, though it is in the entry of one."""
    if event == "dead":
        return status == b"W"
    return (event == "dead_trimmed" and cause != "purge") or cause == "unblocked"


# ---- schedules ---------------------------------------------------------------------------------------------------

#: next, due and last instant (0: none), fires, missed, flags (1 paused, 2 has a state), length of the version. Then the
#: version; length (4) and bytes of the state, if it has one; the spec. The first release knows no state.
SCHEDULE_HEAD = Struct(">QQQQQBB")
PAUSED, HAS_STATE = 1, 2


def pack_schedule(schedule: StoredSchedule) -> bytes:
    """A schedule as its hash keeps it, under its key."""
    version = schedule.version.encode()
    head = SCHEDULE_HEAD.pack(
        schedule.next_ms or 0, schedule.due_ms or 0, schedule.last_ms or 0, schedule.fires, schedule.missed,
        schedule.paused * PAUSED + bool(schedule.state) * HAS_STATE, len(version),
    )  # fmt: skip
    state = len(schedule.state).to_bytes(4, "big") + schedule.state if schedule.state else b""
    return head + version + state + schedule.spec


def unpack_schedule(key: str, data: bytes) -> StoredSchedule:
    """Unpack what `pack_schedule` packed."""
    next_ms, due_ms, last_ms, fires, missed, flags, length = SCHEDULE_HEAD.unpack_from(data)
    at = SCHEDULE_HEAD.size + length
    version, state = data[SCHEDULE_HEAD.size : at].decode(), b""
    if flags & HAS_STATE:
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        state, at = bytes(data[at + 4 : end]), end
    return StoredSchedule(
        key, version, bytes(data[at:]), bool(flags & PAUSED), next_ms or None, due_ms or None, fires, missed,
        last_ms or None, state,
    )  # fmt: skip
