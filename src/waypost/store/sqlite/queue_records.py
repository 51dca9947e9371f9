"""One queue inside one step: its row, its counters and journal, and the messages that the step uses.

`QueueRecords` collects changes in memory and writes them in bulk, so that a batch takes a few statements. Two rules
keep it consistent with the file: `flush_messages` precedes every query that must find the step's own changes, and a
message has one `Record` only as long as `messages` contains it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, structs

from waypost.errors import SchemaTooNew
from waypost.policy import DEFAULT_POLICY, FAILURE_EVENTS, GROUP_FIELDS, MINUTES_KEPT, PolicyRecord
from waypost.store.repeats import id_in_use
from waypost.store.sqlite.entries import COLUMNS as EVENT_COLUMNS
from waypost.store.sqlite.entries import (
    ENTRY_EVENTS_MAX,
    Entry,
    constant_or_all,
    pack_events,
    sweep_events,
    write_entries,
)
from waypost.store.sqlite.grouping import Grouping
from waypost.store.sqlite.remove import RemovalMark, read_mark, write_mark
from waypost.store.sqlite.schema import DEAD, DELAYED, LEASED, WAITING
from waypost.values import MINUTE_COUNTERS, MINUTE_MAXIMA, SIDE_EVENTS, EventName, is_side_effect

if TYPE_CHECKING:
    from waypost.store.sqlite.step import Step

#: The counter in the queue's row for each state.
STATE_COUNTERS = ("ready", "delayed", "leased", "waiting", "dead_kept")

#: The columns of a queue's row after its number, name, policy and `paused`: see `schema.sql`.
NUMBERS = (
    "sequence", "sleepers_known_until", "journal_first", "journal_last", "journal_swept", "completed_last", "rate_sum",
    "ready", "delayed", "leased", "waiting", "dead_kept", "completed",
    "published", "redriven", "done", "dead", "dropped", "cancelled", "replaced", "claims", "first_claims",
    "again_expired", "again_released", "again_retried", "again_snoozed", "again_redriven",
    "expired", "released", "retried", "snoozed", "duplicates", "transferred", "over_cap",
)  # fmt: skip
_FRESH_NUMBERS = dict.fromkeys(NUMBERS, 0) | {"journal_first": 1, "journal_swept": 1}

#: The order of the fields of `Record`.
COLUMNS = (
    'm.seq, m.id, m.state, m.priority, m.position, m.ready_ms, m.published_ms, m.size, m.key, m."group", m.token, '
    "m.deliveries, m.attempts, m.nonce, m.worker, m.claimed_ms, m.lease_end_ms, m.lease_ms, m.cancel_requested, "
    "m.cause, m.ended_ms, m.reason, m.error_type, m.error, m.chain, m.rank, m.holds, m.key_mode, m.freed_key"
)

#: How many trimmed rows of the journal one step deletes: more than a step adds, but few enough not to block others.
SWEEP_MAX = 4096

_QUEUE_UPDATE = (
    "UPDATE {queue} SET policy = ?, paused = ?, " + ", ".join(f"{name} = ?" for name in NUMBERS) + " WHERE number = ?"
)
_ENVELOPE_INSERT = "INSERT INTO {envelope} (seq, data) VALUES (?, ?)"
_ENVELOPES_DELETE = "DELETE FROM {envelope} WHERE seq BETWEEN ? AND ?"
#: The position of an envelope in the bytes of all envelopes is one number: its start, and in these bits its length.
_LENGTH_BITS = 24
ENVELOPE_BYTES_MAX = 2**_LENGTH_BITS - 1
_ENVELOPES_INSERT = f"""
    INSERT INTO {{envelope}} (seq, data)
    SELECT ?1 + j.key, substr(?2, j.value >> {_LENGTH_BITS}, j.value & {ENVELOPE_BYTES_MAX}) FROM json_each(?3) j"""
_READY_INSERT = """
    INSERT INTO {message} (seq, queue, id, state, priority, position, ready_ms, published_ms, size, "group")
    SELECT ?1 + j.key, ?2, j.value, {READY}, ?3, ?4 + j.key, ?5, ?5, length(e.data), ?6
    FROM json_each(?7) j CROSS JOIN {envelope} e ON e.seq = ?1 + j.key"""
#: The same with a rank and a group for each message, after its id. The ids have the same length.
_READY_INSERT_GROUPS = """
    INSERT INTO {message} (seq, queue, id, state, priority, position, ready_ms, published_ms, size, rank, "group")
    SELECT ?1 + j.key, ?2, substr(j.value, 1, ?8), {READY}, ?3, ?4 + j.key, ?5, ?5, length(e.data),
        CASE WHEN length(j.value) > ?8 THEN ?7 ELSE ?6 END, nullif(substr(j.value, ?8 + 1), '')
    FROM json_each(?9) j CROSS JOIN {envelope} e ON e.seq = ?1 + j.key"""
_MESSAGE_COLUMNS = (
    "seq", "queue", "id", "state", "priority", "position", "ready_ms", "published_ms", "size", "key", "group",
    "chain", "rank",
)  # fmt: skip
_MESSAGE_UPDATE = """
    UPDATE {message} SET state = ?, position = ?, ready_ms = ?, token = ?, deliveries = ?, attempts = ?, nonce = ?,
        worker = ?, claimed_ms = ?, lease_end_ms = ?, lease_ms = ?, cancel_requested = ?, cause = ?,
        ended_ms = ?, reason = ?, error_type = ?, error = ?, rank = ?, holds = ?
    WHERE seq = ?"""
_MESSAGES_DELETE = "DELETE FROM {message} WHERE seq BETWEEN ? AND ?"
_MESSAGES_DELETE_LISTED = "DELETE FROM {message} WHERE seq IN (SELECT value FROM json_each(?))"
_ENVELOPES_DELETE_LISTED = "DELETE FROM {envelope} WHERE seq IN (SELECT value FROM json_each(?))"
_READERS = "SELECT name, read_to FROM {reader} WHERE queue = ?"
_NEXT_DUE = "SELECT min(ready_ms) FROM {message} INDEXED BY {message:delayed} WHERE queue = ? AND state = {DELAYED}"
_NEXT_LEASE = "SELECT min(lease_end_ms) FROM {message} INDEXED BY {message:leased} WHERE queue = ? AND state = {LEASED}"
_BY_ID = f"SELECT {COLUMNS} FROM {{message}} m WHERE m.queue = ? AND m.id = ?"
_BY_IDS = f"""
    SELECT {COLUMNS} FROM json_each(?) j CROSS JOIN {{message}} m INDEXED BY {{message:id}}
    WHERE m.queue = ? AND m.id = j.value"""
_OWNERS = f"""
    SELECT {COLUMNS} FROM json_each(?) j CROSS JOIN {{message}} m INDEXED BY {{message:owner}}
    WHERE m.queue = ? AND m.key = j.value AND m.state < {WAITING}"""
_PARKED = f"""
    SELECT {COLUMNS} FROM json_each(?) j CROSS JOIN {{message}} m INDEXED BY {{message:parked}}
    WHERE m.queue = ? AND m.key = j.value AND m.state = {WAITING}"""
_MINUTE = (
    f"INSERT INTO {{minute}} (queue, minute, {', '.join(MINUTE_COUNTERS)}) VALUES (?, ?{', ?' * len(MINUTE_COUNTERS)}) "
    "ON CONFLICT DO UPDATE SET "
    + ", ".join(
        f"{name} = max({name}, excluded.{name})" if name in MINUTE_MAXIMA else f"{name} = {name} + excluded.{name}"
        for name in MINUTE_COUNTERS
    )
)
_WAITERS = "SELECT 1 FROM {waiter} WHERE queue = ? LIMIT 1"
_MINUTES_OLD = "DELETE FROM {minute} WHERE queue = ? AND minute <= ?"
#: A few expired rows of these tables are deleted with every insert: faster than rows are added, and never for long.
_SWEEPS = {
    table: f"""
    DELETE FROM {{{table}}} WHERE rowid IN (
        SELECT rowid FROM {{{table}}} INDEXED BY {{{table}:until}} WHERE until_ms <= ? ORDER BY until_ms LIMIT ?)"""
    for table in ("window", "result", "arrival", "waiter", "ending")
}


class Record(Struct, gc=False):
    """A message as in its row, or as it will be after the flush."""

    seq: int
    id: str
    state: int
    priority: int
    position: int
    ready_ms: int
    published_ms: int
    size: int
    key: str | None
    group: str | None
    token: int = 0
    deliveries: int = 0
    attempts: int = 0
    nonce: bytes = b""
    worker: str | None = None
    claimed_ms: int | None = None
    lease_end_ms: int | None = None
    #: The length of a renewed lease: the queue's setting when it was claimed.
    lease_ms: int = 0
    cancel_requested: int = 0
    #: Why it is claimable again, for the event of the next claim.
    cause: str | None = None
    ended_ms: int | None = None
    reason: str | None = None
    error_type: str | None = None
    error: str | None = None
    chain: str | None = None
    #: The first part of its place in its group, before `position`; None if no group counts it. See `grouping.py`.
    rank: int | None = None
    holds: int = 0
    #: How long it keeps its key, a number of `UNIQUE_NUMBERS`; None: while it is unfinished.
    key_mode: int | None = None
    #: The key that it released when it was claimed; since then it has none.
    freed_key: str | None = None

    def ready_after_wait(self, now: int) -> int:
        """Return when it may be claimed if it no longer has to wait: now, unless it was published with a delay.

        Without a delay `ready_ms` is the time of the publish, which is in the future if the clock was set back since.
        """
        return now if self.ready_ms == self.published_ms else max(self.ready_ms, now)

    @property
    def published_key(self) -> str | None:
        """The key with which it was published."""
        return self.key if self.freed_key is None else self.freed_key


class AtStart(Struct, gc=False):
    """What a step knows of a queue when it begins, read together with the queue's row."""

    #: The largest number of the session's operations, and until when their results are kept.
    newest: int | None
    session_until_ms: int | None
    due_ms: int | None
    lease_end_ms: int | None
    lease_end_last_ms: int | None
    expires_ms: int | None
    #: The last minute that was counted.
    minute: int | None
    is_awaited: int
    has_sleepers: int
    has_reserve: int
    seq_last: int | None


class Holder(Struct):
    """The owner of a key: its message, and the next generation, which waits until that message ends."""

    owner: Record
    parked: Record | None = None


@lru_cache(maxsize=256)
def read_policy(text: bytes) -> PolicyRecord:
    """Decode a policy from its row. Every step does that, so the result is cached."""
    try:
        return msgspec.json.decode(text, type=PolicyRecord)
    except msgspec.DecodeError as error:
        raise SchemaTooNew(
            f"a queue's policy cannot be read by this release ({error}); update waypost to use it"
        ) from None


#: Settings that release 0.1.0 does not know.
LATER_SETTINGS = ("hide_bodies", "no_tracebacks", *sorted(GROUP_FIELDS))


def write_policy(policy: PolicyRecord) -> bytes:
    """Encode a policy for its row, without the settings that release 0.1.0 does not know, unless they are set."""
    fields = structs.asdict(policy)
    for name in LATER_SETTINGS:
        if fields[name] == getattr(DEFAULT_POLICY, name):
            del fields[name]
    return msgspec.json.encode(fields)


DEFAULT_POLICY_TEXT = write_policy(DEFAULT_POLICY)


def as_list(values: Any) -> str:
    """Return texts or numbers as one parameter, for `json_each`."""
    return msgspec.json.encode(values).decode()


def consecutive(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return numbers as ranges. Messages of a batch have consecutive rows, so that one statement finds them all."""
    ordered = sorted(numbers)
    if ordered and ordered[-1] - ordered[0] == len(ordered) - 1:
        return [(ordered[0], ordered[-1])]
    ranges: list[tuple[int, int]] = []
    first = last = None
    for number in ordered:
        if last is None or first is None:
            first = number
        elif number != last + 1:
            ranges.append((first, last))
            first = number
        last = number
    if last is not None and first is not None:
        ranges.append((first, last))
    return ranges


def is_scattered(ranges: Sequence[tuple[int, int]]) -> bool:
    """Return whether rows are in so many ranges that a statement with a list of them is faster."""
    return len(ranges) > 4


class QueueRecords:
    """A queue that a step uses. `number` is 0 if it is not in the file."""

    __slots__ = (
        "_added",
        "_awaited",
        "_before",
        "_buried",
        "_entries",
        "_events",
        "_events_noted",
        "_gone",
        "_kept_envelopes",
        "_mark_before",
        "_minute",
        "_touched",
        "at_start",
        "damaged",
        "freshly_ready",
        "groups",
        "holders",
        "mark",
        "may_have_sleepers",
        "messages",
        "moments_changed",
        "name",
        "new_leases_end_ms",
        "now",
        "number",
        "numbers",
        "paused",
        "policy",
        "policy_text",
        "session",
        "session_newest",
        "session_until_ms",
        "step",
    )  # fmt: skip

    def __init__(self, step: Step, name: str, row: tuple[Any, ...] | None, at_start: AtStart | None = None) -> None:
        self.step = step
        #: None if it was not read: each of its values is then read when it is needed.
        self.at_start = at_start
        self.may_have_sleepers = at_start is None or bool(at_start.has_sleepers)
        #: Whether the step has changed messages that are delayed or leased or can lapse, other than by new leases.
        self.moments_changed = False
        #: The first end of the leases that the step has given.
        self.new_leases_end_ms: int | None = None
        #: A session whose newest operation and expiry are known: see `replays.py`.
        self.session: bytes | None = None
        self.session_newest, self.session_until_ms = 0, 0
        self.now = step.now
        self.name = name
        self.number: int = 0
        self.policy_text = DEFAULT_POLICY_TEXT
        self.paused = False
        self.numbers: dict[str, int] = dict(_FRESH_NUMBERS)
        #: Whether the name is a queue, and when a queue of this name was removed.
        self.mark = RemovalMark(gone=True) if row is None else read_mark(row[-1])
        self._mark_before = None if row is None else structs.replace(self.mark)
        if row is not None:
            grouping, row = row[-2], row[:-2]
            self.number, _, self.policy_text, paused = row[:4]
            self.paused = bool(paused)
            self.numbers = dict(zip(NUMBERS, row[4:], strict=False))
        self._before = None if row is None else row[: 4 + len(NUMBERS)]
        self.messages: dict[str, Record] = {}
        self.holders: dict[str, Holder | None] = {}
        #: The number of messages that became claimable in the current step: as many sleepers are woken.
        self.freshly_ready = 0
        #: Ids that this step set aside, because their rows cannot be used.
        self.damaged: list[str] = []
        self._awaited: bool | None = None if at_start is None else bool(at_start.is_awaited)
        self._added: dict[str, tuple[Record, bytes]] = {}
        self._touched: dict[str, Record] = {}
        self._buried: dict[str, Record] = {}
        self._gone: list[int] = []
        self._kept_envelopes: set[int] = set()
        #: The last events of the journal, which are not packed yet; and the packed ones.
        self._events: list[tuple[Any, ...]] = []
        self._entries: list[Entry] = []
        self._minute: dict[str, int] = {}
        self._follow(read_policy(self.policy_text))
        #: None for a queue that never took turns between groups, or has been converted back.
        self.groups = None if row is None or grouping is None else Grouping(self, grouping)

    def _follow(self, policy: PolicyRecord) -> None:
        self.policy = policy
        self._events_noted = policy.journal in ("all", "full")

    def set_policy(self, policy: PolicyRecord) -> None:
        """Change the policy; it applies from here on."""
        self.policy_text = write_policy(policy)
        self._follow(policy)

    @property
    def is_made(self) -> bool:
        """Whether the name is a queue: a claim from a name does not make it one."""
        return not self.mark.gone

    def make(self) -> None:
        """Make the name a queue, because something is added to it."""
        self.mark.gone = False

    def begin_anew(self, mark: RemovalMark, policy: PolicyRecord) -> None:
        """Begin again after a removal: its number, the last number of its journal, and the removal remain."""
        last = self.numbers["journal_last"]
        self.numbers = _FRESH_NUMBERS | {
            "journal_last": last, "journal_first": last + 1, "journal_swept": last + 1,
        }  # fmt: skip
        self.paused = False
        self.set_policy(policy)
        self.groups = None
        self.mark = mark

    # ---- counting ----------------------------------------------------------------------------------------

    def count_up(self, name: str, by: int = 1) -> None:
        """Count an event in the totals, and in the minute if it is one of the minute's counters."""
        self.numbers[name] += by
        self._minute[name] = self._minute.get(name, 0) + by

    def count_waits(self, total_ms: int, longest_ms: int) -> None:
        """Add the waits of claimed messages to the minute."""
        self._time("wait_ms", total_ms, longest_ms)

    def count_run(self, record: Record) -> None:
        """Add the run of a delivery that ended to the minute."""
        ran = max(0, self.now - (record.claimed_ms or 0))
        self.count_runs(1, ran, ran)

    def count_runs(self, count: int, total_ms: int, longest_ms: int) -> None:
        """Add the runs of deliveries that ended to the minute."""
        self._minute["runs"] = self._minute.get("runs", 0) + count
        self._time("run_ms", total_ms, longest_ms)

    def _time(self, name: str, total: int, longest: int) -> None:
        self._minute[name] = self._minute.get(name, 0) + total
        self._minute[f"{name}_max"] = max(self._minute.get(f"{name}_max", 0), longest)

    def move(self, record: Record, state: int) -> None:
        """Change the state of a message, and the counts of both states."""
        if self.groups is not None:
            self.groups.move(record, state)
        if state in (DELAYED, LEASED) or record.state in (DELAYED, LEASED):
            self.moments_changed = True
        self.numbers[STATE_COUNTERS[record.state]] -= 1
        self.numbers[STATE_COUNTERS[state]] += 1
        record.state = state

    # ---- the journal -------------------------------------------------------------------------------------

    def notes(self, event: EventName) -> bool:
        """Whether the journal keeps this kind of event."""
        return self._events_noted or (self.policy.journal == "failures" and event in FAILURE_EVENTS)

    def note(
        self,
        event: EventName,
        operation: str | None,
        record: Record | None = None,
        *,
        message_id: str | None = None,
        key: str | None = None,
        group: str | None = None,
        worker: str | None = None,
        due_ms: int | None = None,
        cause: str | None = None,
        reason: str | None = None,
        error_type: str | None = None,
        error: str | None = None,
        run_ms: int | None = None,
        wait_ms: int | None = None,
        size: int | None = None,
        body: bytes | None = None,
        schedule: str | None = None,
    ) -> None:
        """Append one event, in the same step as the change."""
        if event in SIDE_EVENTS and record is not None and is_side_effect(event, cause, leased=record.state == LEASED):
            self.step.also.add(self.name, event, record.id, record.token, reason or cause)
        if not self._events_noted and not self.notes(event):
            return
        self.numbers["journal_last"] += 1
        if record is None:
            self._events.append((
                event, message_id, key, group, None, None, None, None, worker, due_ms, cause, reason, error_type,
                run_ms, wait_ms, size, operation, None, schedule, body, error,
            ))  # fmt: skip
        else:
            self._events.append((
                event, record.id, record.published_key, record.group, record.priority, record.token, record.deliveries,
                record.attempts, worker, due_ms, cause, reason, error_type,
                run_ms, wait_ms, record.size, operation, record.chain, schedule, body, error,
            ))  # fmt: skip

    def note_many(self, event: EventName, operation: str | None, ids: Sequence[str], **columns: Any) -> None:
        """Append one event for each of these messages. A column is a value for all of them, or a list of values."""
        if not self.notes(event):
            return
        self._pack_events()
        first, count = self.numbers["journal_last"] + 1, len(ids)
        self.numbers["journal_last"] += count
        columns |= {"event": event, "operation_id": operation, "message_id": ids}
        values = [columns.get(name) for name in EVENT_COLUMNS]
        for start in range(0, count, ENTRY_EVENTS_MAX):
            end = min(count, start + ENTRY_EVENTS_MAX)
            part = [constant_or_all(one[start:end]) if isinstance(one, (list, tuple)) else one for one in values]
            self._entries.append(Entry(first + start, first + end - 1, self.now, part))

    def _pack_events(self) -> None:
        if self._events:
            first = self.numbers["journal_last"] - len(self._events) + 1
            self._entries += pack_events(first, self.now, self._events)
            self._events = []

    def note_run(self, event: EventName, operation: str | None, record: Record, **details: Any) -> None:
        """Add an event that ends a lease: with its worker, and how long the delivery ran."""
        self.note(event, operation, record, worker=record.worker, run_ms=self.now - (record.claimed_ms or 0), **details)

    def readers(self) -> dict[str, int]:
        """Return the readers of the journal, and how far each has read."""
        return dict(self.step.execute(_READERS, (self.number,)).fetchall())

    def _cut_journal(self, first: int, cause: str) -> None:
        """Keep only events from `first` on, and journal which of the others a reader has not read."""
        unread_from = min(self.readers().values(), default=first - 1) + 1
        before = self.numbers["journal_first"]
        self.numbers["journal_first"] = first
        if unread_from < first:
            cut = max(before, unread_from)
            self.note("trimmed", None, cause=cause, reason=f"{cut}-{first - 1}", size=first - cut)

    def trim_journal(self, up_to: int) -> int:
        """Delete events up to a number, except those that a registered reader has not read. Returns the first kept."""
        last = self.numbers["journal_last"]
        first = min(up_to, min(self.readers().values(), default=last), last) + 1
        self.numbers["journal_first"] = max(first, self.numbers["journal_first"])
        return self.numbers["journal_first"]

    def give_way(self) -> None:
        """Delete the oldest history, to make room in a full file for the next steps."""
        first, last = self.numbers["journal_first"], self.numbers["journal_last"]
        if last >= first:
            self._cut_journal(min(last, first + SWEEP_MAX // 2), "store_full")
        self._sweep_journal()

    def _sweep_journal(self) -> None:
        first, swept = self.numbers["journal_first"], self.numbers["journal_swept"]
        if swept < first:
            self.numbers["journal_swept"] = upto = min(first, swept + SWEEP_MAX)
            sweep_events(self.step, self.number, upto)

    # ---- messages ----------------------------------------------------------------------------------------

    def hold(self, row: tuple[Any, ...]) -> Record:
        """Return the record of a row that was just read: the existing one, if there is one."""
        record = self.messages.get(row[1])
        if record is None:
            record = self.messages[row[1]] = Record(*row)
        return record

    def find(self, message_id: str) -> Record | None:
        """Find one message of this queue."""
        record = self.messages.get(message_id)
        if record is None:
            self.flush_messages()
            row = self.step.execute(_BY_ID, (self.number, message_id)).fetchone()
            record = None if row is None else self.hold(row)
        return record

    def load(self, ids: list[str]) -> None:
        """Load many messages into `messages` at once."""
        self.flush_messages()
        for row in self.step.execute(_BY_IDS, (as_list(ids), self.number)).fetchall():
            self.hold(row)

    def load_holders(self, keys: list[str]) -> None:
        """Load the owners of these keys into `holders`."""
        unknown = [key for key in keys if key not in self.holders]
        if not unknown:
            return
        self.flush_messages()
        parameters = (as_list(unknown), self.number)
        for key in unknown:
            self.holders[key] = None
        for row in self.step.execute(_OWNERS, parameters).fetchall():
            record = self.hold(row)
            self.holders[record.key or ""] = Holder(record)
        for row in self.step.execute(_PARKED, parameters).fetchall():
            record = self.hold(row)
            holder = self.holders[record.key or ""]
            if holder is not None:
                holder.parked = record

    def holder(self, key: str) -> Holder | None:
        """Return the owner of a key."""
        if key not in self.holders:
            self.load_holders([key])
        return self.holders[key]

    def add(self, record: Record, envelope: bytes) -> None:
        """Add a message that is new in this queue."""
        if self.groups is not None:
            self.groups.add(record)
        if record.state == DELAYED:
            self.moments_changed = True
        self.numbers[STATE_COUNTERS[record.state]] += 1
        self.messages[record.id] = record
        self._added[record.id] = (record, envelope)

    def touch(self, record: Record) -> None:
        """Mark the record as changed, to be written."""
        (self._buried if record.state == DEAD else self._touched)[record.id] = record

    def remove(self, record: Record, *, keep_envelope: bool = False) -> None:
        """Remove the message from the queue."""
        if self.groups is not None:
            self.groups.remove(record)
        if record.state in (DELAYED, LEASED):
            self.moments_changed = True
        self.numbers[STATE_COUNTERS[record.state]] -= 1
        self.messages.pop(record.id, None)
        self._touched.pop(record.id, None)
        self._buried.pop(record.id, None)
        if record.id in self._added:
            self.flush_messages()
        self._gone.append(record.seq)
        if keep_envelope:
            self._kept_envelopes.add(record.seq)

    def flush_messages(self) -> None:
        """Write the changed messages. Changes that release a key come first: two rows cannot have one key."""
        step = self.step
        if self._gone:
            step.execute_many(_MESSAGES_DELETE, consecutive(self._gone))
            step.execute_many(
                _ENVELOPES_DELETE, consecutive(seq for seq in self._gone if seq not in self._kept_envelopes)
            )
            self._gone.clear()
            self._kept_envelopes.clear()
        for changed in (self._buried, self._touched):
            if changed:
                step.execute_many(
                    _MESSAGE_UPDATE,
                    [
                        (
                            r.state, r.position, r.ready_ms, r.token, r.deliveries, r.attempts, r.nonce,
                            r.worker, r.claimed_ms, r.lease_end_ms, r.lease_ms, r.cancel_requested, r.cause,
                            r.ended_ms, r.reason, r.error_type, r.error, r.rank, r.holds, r.seq,
                        )
                        for r in changed.values()
                    ],
                )  # fmt: skip
                changed.clear()
        if self._added:
            step.execute_many(_ENVELOPE_INSERT, [(r.seq, envelope) for r, envelope in self._added.values()])
            queue = self.number
            rows = [
                (
                    r.seq, queue, r.id, r.state, r.priority, r.position, r.ready_ms, r.published_ms, r.size,
                    r.key, r.group, r.chain, r.rank,
                )
                for r, _ in self._added.values()
            ]  # fmt: skip
            with self._ids_unused([(row[0], row[2]) for row in rows]):
                step.insert("message", _MESSAGE_COLUMNS, rows)
            self._added.clear()

    def add_ready(
        self, first: int, ids: Sequence[str], envelopes: Sequence[bytes], priority: int, groups: Sequence[str | None]
    ) -> None:
        """Add messages that are ready now and have neither key nor chain, by one statement for each table.

        They have consecutive rows, from `first` on. SQLite receives one value with all envelopes, and splits it.
        """
        self.flush_messages()
        step, numbers, count = self.step, self.numbers, len(ids)
        starts = accumulate(map(len, envelopes), initial=1)
        places = [start << _LENGTH_BITS | len(data) for start, data in zip(starts, envelopes, strict=False)]
        step.execute(_ENVELOPES_INSERT, (first, b"".join(envelopes), as_list(places)))
        values = (first, self.number, priority, numbers["sequence"] + 1, self.now)
        grouping = self.groups if self.policy.grouped else None
        with self._ids_unused(list(enumerate(ids, first))):
            if grouping is None and groups.count(groups[0]) == count:
                step.execute(_READY_INSERT, (*values, groups[0], as_list(ids)))
            else:
                ranks = (None, None) if grouping is None else (-1 - priority, grouping.rank_of(priority, ""))
                named = as_list([id + (group or "") for id, group in zip(ids, groups, strict=True)])
                step.execute(_READY_INSERT_GROUPS, (*values, *ranks, len(ids[0]), named))
        numbers["sequence"] += count
        numbers["ready"] += count
        self.freshly_ready += count if grouping is None else grouping.add_ready(groups)

    @contextmanager
    def _ids_unused(self, added: list[tuple[int, str]]) -> Iterator[None]:
        """Raise an error with the id if one of these rows has the id of another message."""
        try:
            yield
        except sqlite3.IntegrityError as error:
            if not str(error).endswith(".id"):
                raise
            raise id_in_use(self.name, self._known_id(added)) from None

    def _known_id(self, added: list[tuple[int, str]]) -> str:
        """Return which of these messages has the id of another one."""
        for seq, id in added:
            found = self.step.execute(_BY_ID, (self.number, id)).fetchone()
            if found is not None and found[0] != seq:
                return id
        ids = [id for _, id in added]
        return next((id for id in ids if ids.count(id) > 1), "")

    def remove_rows(self, seqs: Sequence[int]) -> None:
        """Delete messages and their envelopes."""
        runs = consecutive(seqs)
        if is_scattered(runs):
            listed = (as_list(seqs),)
            self.step.execute(_MESSAGES_DELETE_LISTED, listed)
            self.step.execute(_ENVELOPES_DELETE_LISTED, listed)
        else:
            self.step.execute_many(_MESSAGES_DELETE, runs)
            self.step.execute_many(_ENVELOPES_DELETE, runs)

    def flush_and_forget(self) -> None:
        """Write the changed messages and forget all: the next read is from the file."""
        self.flush_messages()
        self.messages.clear()
        self.holders.clear()

    @property
    def is_awaited(self) -> bool:
        """Whether a client waits for the end of a message of this queue; read once a step."""
        if self._awaited is None:
            self._awaited = self.step.execute(_WAITERS, (self.number,)).fetchone() is not None
        return self._awaited

    def next_due(self) -> int | None:
        """Return the milliseconds until the next timer is due."""
        self.flush_messages()
        if self.at_start is not None and not self.moments_changed:
            due = self.at_start.due_ms
        else:
            due = self.step.execute(_NEXT_DUE, (self.number,)).fetchone()[0]
        return None if due is None else max(0, due - self.now)

    def next_lease(self) -> int | None:
        """Return the milliseconds until the next lease ends."""
        self.flush_messages()
        if self.at_start is not None and not self.moments_changed:
            ends = [at for at in (self.at_start.lease_end_ms, self.new_leases_end_ms) if at is not None]
            end = min(ends, default=None)
        else:
            end = self.step.execute(_NEXT_LEASE, (self.number,)).fetchone()[0]
        return None if end is None else max(0, end - self.now)

    def sweep(self, table: str, added: int) -> None:
        """Delete expired rows from a table to which `added` rows are about to be added."""
        self.step.execute(_SWEEPS[table], (self.now, 2 * added + 8))

    # ---- the end of the step -----------------------------------------------------------------------------

    def flush(self) -> None:
        """Write everything that the step collected for this queue."""
        self.flush_messages()
        if self.groups is not None:
            self.groups.save()
        last, policy = self.numbers["journal_last"], self.policy
        if last - self.numbers["journal_first"] + 1 >= policy.journal_max + policy.journal_slack:
            self._cut_journal(last - policy.journal_max + 1, "hard_cap")
        self._sweep_journal()
        self._pack_events()
        if self._entries:
            first = self.numbers["journal_first"]
            write_entries(self.step, self.number, [entry for entry in self._entries if entry.last >= first])
            self._entries = []
        counted = [self._minute.get(name, 0) for name in MINUTE_COUNTERS]
        if any(counted):
            minute = self.now // 60_000
            self.step.execute(_MINUTE, (self.number, minute, *counted))
            if self.at_start is None or self.at_start.minute != minute:
                self.step.execute(_MINUTES_OLD, (self.number, minute - MINUTES_KEPT))
            self._minute = {}
        after = (self.policy_text, int(self.paused), *self.numbers.values())
        if self._before is None or self._before[2:] != after:
            self.step.execute(_QUEUE_UPDATE, (*after, self.number))
        if self.mark != (self._mark_before or RemovalMark()):
            write_mark(self.step, self.name, self.mark)
