"""What clients return about queues, events and workers: datetimes in UTC and timedeltas.

Stores answer with the records of `waypost.values`, whose times are integer milliseconds. A client converts them here,
once, on the way to the caller. `to_json` is the one form that these values have in JSON.
"""

from __future__ import annotations

import typing
from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from msgspec import Struct, structs

from waypost.policy import JournalLevel, OnFailure, Order, Overload, PolicyRecord, format_rate, policy_changes
from waypost.times import format_datetime, to_datetime, to_timedelta
from waypost.values import (
    EventName,
    EventPage,
    EventRecord,
    GroupLimit,
    GroupPage,
    GroupRecord,
    HealthStatus,
    HolderState,
    Ledger,
    MinuteRecord,
    ObservedOutcome,
    RecordPage,
    RecordSaved,
    SharedRecord,
    StatsRecord,
    WorkerRecord,
    WorkerRequest,
    WorkerState,
)

#: The states of a worker in which it does what was requested of it.
DONE_BY: dict[str | None, tuple[WorkerState, ...]] = {"quiet": ("quiet", "stopping"), "stop": ("stopping",)}
#: Counters of messages that left the backlog: what the ledger adds up after `leased`.
ENDS = ("done", "dead", "dropped", "cancelled", "replaced")


class Event(Struct, frozen=True):
    """One state change, as the journal keeps it. Fields that an event has no use for are None."""

    queue: str
    #: Counts the events of a queue.
    number: int
    #: When it happened, by the store's clock.
    at: datetime
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
    #: When the message may be claimed.
    due_at: datetime | None = None
    cause: str | None = None
    reason: str | None = None
    error_type: str | None = None
    #: How long the message was under its lease.
    run_time: timedelta | None = None
    #: How long it was ready before it was claimed.
    wait_time: timedelta | None = None
    size: int | None = None
    operation_id: str | None = None
    chain_id: str | None = None
    schedule: str | None = None
    #: The envelope, at journal level `full` only (redacted if the publisher has a redact hook).
    body: bytes | None = None
    #: The first 500 characters of the error's text, of `retried` and `dead`.
    error: str | None = None

    @classmethod
    def from_record(cls, record: EventRecord) -> Event:
        """Return the public form of an event."""
        return cls(
            record.queue, record.number, to_datetime(record.at_ms), record.event, record.message_id, record.key,
            record.group, record.priority, record.token, record.claims, record.deliveries, record.attempts,
            record.worker, to_datetime(record.due_ms), record.cause, record.reason, record.error_type,
            to_timedelta(record.run_ms), to_timedelta(record.wait_ms), record.size, record.operation_id,
            record.chain_id, record.schedule, record.body, record.error,
        )  # fmt: skip


class JournalPage(Struct, frozen=True):
    """A run of events. `last` is the offset to go on from; `first_kept` is the oldest event still there."""

    events: list[Event]
    last: int
    first_kept: int
    newest: int

    @classmethod
    def from_record(cls, page: EventPage) -> JournalPage:
        """Return the public form of a page."""
        return cls([Event.from_record(one) for one in page.events], page.last, page.first_kept, page.newest)


class Observed(Struct, frozen=True):
    """An event for `on_event`, named as in the journal; `at` is by this process's own clock.

    `outcome` is how the step itself went: `success`, `failure`, `skipped` (there was nothing to do) or `unknown` (its
    reply was lost). That a handler failed is in `handled`, and in the error of `retried` and `dead`.
    """

    # One is made for every step of every message: its times become datetimes and timedeltas when they are read.
    event: str
    outcome: ObservedOutcome
    queue: str
    _at_ms: int
    worker: str
    message_id: str | None = None
    key: str | None = None
    group: str | None = None
    priority: int | None = None
    token: int | None = None
    deliveries: int | None = None
    attempts: int | None = None
    #: How many messages a step concerned, where one event stands for all of them.
    count: int | None = None
    reason: str | None = None
    error_type: str | None = None
    error: str | None = None
    _run_ms: float | None = None
    _wait_ms: int | None = None
    #: Of a tick: timers left, and instants that were missed.
    depth: int | None = None
    missed: int | None = None

    @property
    def at(self) -> datetime:
        """When this process saw it."""
        return to_datetime(self._at_ms)

    @property
    def run_time(self) -> timedelta | None:
        """How long a handler call took, to the microsecond."""
        return to_timedelta(self._run_ms)

    @property
    def wait_time(self) -> timedelta | None:
        """How long a message was ready before it was claimed; how late a schedule or a timer was."""
        return to_timedelta(self._wait_ms)

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in _OBSERVED_NAMES}
        return f"Observed({', '.join(f'{name}={value!r}' for name, value in fields.items() if value is not None)})"


_OBSERVED_NAMES = tuple(
    {"_at_ms": "at", "_run_ms": "run_time", "_wait_ms": "wait_time"}.get(name, name)
    for name in Observed.__struct_fields__
)


class Minute(Struct, frozen=True):
    """Counters of one minute; `at` is its start. Counters that are missing were not counted by the release then.

    `runs` are deliveries that ended by any outcome but a release.
    """

    at: datetime
    counts: dict[str, int]
    #: How long messages that were claimed in this minute had been ready, and how long `runs` took. None without any.
    wait_mean: timedelta | None = None
    wait_max: timedelta | None = None
    run_mean: timedelta | None = None
    run_max: timedelta | None = None

    @classmethod
    def from_record(cls, record: MinuteRecord) -> Minute:
        """Return the public form of a minute's counters."""
        counts = record.counts
        times: list[timedelta | None] = []
        for time, number in (("wait_ms", counts["claims"]), ("run_ms", counts.get("runs", 0))):
            known = number > 0 and time in counts
            times.append(timedelta(milliseconds=counts[time] / number) if known else None)
            times.append(timedelta(milliseconds=counts[f"{time}_max"]) if known else None)
        counters = {name: count for name, count in counts.items() if "_ms" not in name}
        return cls(to_datetime(record.at_ms), counters, *times)

    @property
    def change(self) -> int | None:
        """By how many messages the backlog grew in this minute; None where that was not counted."""
        counts = self.counts
        if "redriven" not in counts:
            return None
        return counts["published"] + counts["redriven"] - sum(counts[name] for name in ENDS)


class Change(Struct, frozen=True):
    """A change of a queue's settings: `configured`, `paused` or `resumed`. `text` has the settings and their values."""

    at: datetime
    event: EventName
    text: str


class Backlog(Struct, frozen=True):
    """How many unfinished messages a queue had at a time: ready, delayed, waiting and leased."""

    at: datetime
    messages: int


class Stats(Struct, frozen=True):
    """The state of a queue. Times are by the store's clock."""

    queue: str
    at: datetime
    ledger: Ledger
    paused: bool
    #: How long the oldest ready message has been waiting, and how long the oldest lease has lasted.
    oldest_ready_age: timedelta | None
    oldest_leased_age: timedelta | None
    #: How long until the next timer is due and the next lease ends; zero: it is due.
    next_due_in: timedelta | None
    next_lease_end_in: timedelta | None
    sleepers: int
    journal_first: int
    journal_last: int
    journal_readers: dict[str, int]
    minutes: list[Minute]
    #: Records that steps met, could not use and set aside: `check` lists and mends them.
    damaged: int = 0
    #: Changes of the settings in the minutes that were read, oldest first.
    changes: list[Change] = []

    @classmethod
    def from_record(cls, record: StatsRecord) -> Stats:
        """Return the public form of a queue's state."""
        return cls(
            record.queue, to_datetime(record.at_ms), record.ledger, record.paused,
            to_timedelta(record.oldest_ready_ms), to_timedelta(record.oldest_leased_ms),
            to_timedelta(record.next_due_ms), to_timedelta(record.next_lease_ms), record.sleepers,
            record.journal_first, record.journal_last, record.journal_readers,
            [Minute.from_record(one) for one in record.minutes], record.damaged,
            [Change(to_datetime(one.at_ms), one.event, one.text) for one in record.changes],
        )  # fmt: skip

    @property
    def backlog(self) -> list[Backlog]:
        """The backlog at the beginning of each minute that was read, and now; oldest first.

        It is computed backwards: what is unfinished now, less what each minute added. A minute that is not listed
        changed nothing. It ends at a minute that an earlier release counted, which lacks counters.
        """
        ledger = self.ledger
        messages = ledger.ready + ledger.delayed + ledger.waiting + ledger.leased
        found = [Backlog(self.at, messages)]
        for minute in reversed(self.minutes):
            change = minute.change
            if change is None:
                break
            messages -= change
            found.append(Backlog(minute.at, messages))
        return found[::-1]


class Policy(Struct, frozen=True):
    """How a queue behaves, by the names of `configure`, which takes all of these values again."""

    #: None: at most once, a claim removes the message.
    lease: timedelta | None
    #: Here and below, None is no limit.
    max_deliveries: int | None
    max_pending: int | None
    overload: Overload
    max_running: int | None
    #: As "100/m".
    rate: str | None
    journal: JournalLevel
    journal_max: int
    dead_max: int | None
    #: How long dead letters are kept; None: until they are purged.
    dead_keep: timedelta | None
    #: How many finished messages are kept for listings.
    completed: int
    #: Whether web pages show the bodies, headers and results of its messages to no user.
    hide_bodies: bool
    #: Whether the traceback of a message's last error is kept with it.
    tracebacks: bool
    #: Whether claims take turns between groups; a queue with an order or a limit per group does, too.
    fair: bool = False
    #: "group": the messages of a group are handed out one at a time, in order.
    order: Order | None = None
    on_failure: OnFailure = "hold"
    group_max_running: int | None = None
    group_rate: str | None = None
    group_max_pending: int | None = None

    @classmethod
    def from_record(cls, record: PolicyRecord) -> Policy:
        """Return the public form of a queue's policy."""
        return cls(
            to_timedelta(record.lease_ms), record.max_deliveries, record.max_pending, record.overload,
            record.max_running, format_rate(record.rate_count, record.rate_per_ms), record.journal, record.journal_max,
            record.dead_max, to_timedelta(record.dead_keep_ms), record.completed_max, record.hide_bodies,
            not record.no_tracebacks, record.fair, record.order, record.on_failure, record.group_max_running,
            format_rate(record.group_rate_count, record.group_rate_per_ms), record.group_max_pending,
        )  # fmt: skip

    def changed(self, settings: Mapping[str, Any]) -> Policy:
        """Return what `configure` would make of it with these settings; raises `InvalidPolicy`. Nothing is sent."""
        record = PolicyRecord().changed(policy_changes(structs.asdict(self)))
        return Policy.from_record(record.changed(policy_changes(settings)))


class Group(Struct, frozen=True):
    """A group of a queue that takes turns between groups: what it has, and what keeps it from its turn."""

    #: None: all messages without a group, which share one turn.
    group: str | None
    #: Messages that are ready, and those that are delayed or wait for others. `max_pending` counts both.
    ready: int
    later: int
    #: Messages that are leased.
    running: int
    #: How long its next message has been ready.
    oldest: timedelta | None
    paused: bool
    #: The id of the message that holds an ordered group, and its state: a `delayed` one waits to be tried again, and
    #: `skip_held` lets others pass it; a `leased` one is being handled, and is named while at most 512 messages of the
    #: queue are leased.
    held_by: str | None
    held_state: HolderState | None
    #: The limits that it is at: `max_running` or `rate` keep it from its turn, at `max_pending` it takes no more
    #: messages.
    limited_by: list[GroupLimit]
    #: When its rate allows the next message.
    limited_until: datetime | None
    weight: int
    #: Its own limits; None: those of the queue.
    max_running: int | None
    rate: str | None
    max_pending: int | None

    @classmethod
    def from_record(cls, record: GroupRecord) -> Group:
        """Return the public form of a group."""
        limits: list[GroupLimit] = [] if record.limited_by is None else [record.limited_by]
        if record.full:
            limits.append("max_pending")
        return cls(
            record.group, record.ready, record.later, record.running, to_timedelta(record.oldest_ms), record.paused,
            record.held_by, record.held_state, limits, to_datetime(record.limited_until_ms), record.weight,
            record.max_running, format_rate(record.rate_count, record.rate_per_ms), record.max_pending,
        )  # fmt: skip


class GroupList(Struct, frozen=True):
    """A part of the groups of a queue, by name, and the cursor of the next part; None: this is the last one."""

    groups: list[Group]
    cursor: str | None

    @classmethod
    def from_record(cls, page: GroupPage) -> GroupList:
        """Return the public form of a part of the groups."""
        return cls([Group.from_record(one) for one in page.groups], page.cursor)


class WorkerQueue(Struct, frozen=True):
    """A queue as one worker serves it. `handled` counts handler calls since the worker started."""

    name: str
    concurrency: int
    in_flight: int
    handled: int
    #: When the store last answered a claim of this worker here, with messages or with none.
    last_claim_at: datetime | None


class RegisteredWorker(Struct, frozen=True):
    """A worker as it last reported to the store, which forgets it at `expires_at` unless it reports again."""

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
    started_at: datetime
    seen_at: datetime
    expires_at: datetime
    queues: list[WorkerQueue]
    #: Queues that it serves too, and that its record had no room for.
    unlisted: int
    #: What was requested of it (`stop_worker`, `quiet_worker`) and it has not done yet.
    requested: WorkerRequest | None = None

    @classmethod
    def from_record(cls, record: WorkerRecord) -> RegisteredWorker:
        """Return the public form of a worker's record."""
        return cls(
            record.name, record.host, record.pid, record.version, record.state, record.status, record.reasons,
            record.processes, to_datetime(record.started_ms), to_datetime(record.seen_ms),
            to_datetime(record.until_ms),
            [
                WorkerQueue(one.name, one.concurrency, one.in_flight, one.handled, to_datetime(one.last_claim_ms))
                for one in record.queues
            ],
            record.unlisted, None if record.state in DONE_BY.get(record.requested, ()) else record.requested,
        )  # fmt: skip


class StoredRecord(Struct, frozen=True):
    """A shared record: a small piece of data that the programs of one store share."""

    name: str
    data: bytes
    #: Grows with each save: give it to `save_record` to change the record only if it is still the same.
    version: int
    created_at: datetime
    #: When the store forgets it; None: never by itself.
    expires_at: datetime | None

    @classmethod
    def from_record(cls, record: SharedRecord) -> StoredRecord:
        """Return the public form of a record."""
        return cls(
            record.name, record.data, record.version, to_datetime(record.created_ms), to_datetime(record.until_ms)
        )


class SavedRecord(Struct, frozen=True):
    """What became of a save: whether the record is as wanted now, and the record as it is."""

    saved: bool
    record: StoredRecord | None
    #: By the store's clock.
    at: datetime

    @classmethod
    def from_record(cls, answer: RecordSaved) -> SavedRecord:
        """Return the public form of an answer."""
        found = answer.record
        return cls(answer.saved, None if found is None else StoredRecord.from_record(found), to_datetime(answer.now_ms))


class StoredRecords(Struct, frozen=True):
    """A page of shared records, the newest first."""

    records: list[StoredRecord]
    #: For the next page; None: there is none.
    cursor: str | None
    #: By the store's clock.
    at: datetime

    @classmethod
    def from_record(cls, page: RecordPage) -> StoredRecords:
        """Return the public form of a page."""
        return cls([StoredRecord.from_record(one) for one in page.records], page.cursor, to_datetime(page.now_ms))


class ActionUndo(Struct, frozen=True):
    """How an action can be undone, in words; and if another action does it, the name and options of that."""

    text: str
    action: str | None = None
    options: dict[str, Any] = {}

    @classmethod
    def of(cls, done: str, options: dict[str, Any] | None = None, *, changed: bool = True) -> ActionUndo:
        """How an action that was `done` is undone; `options` are those of the action that does it."""
        if not changed:
            return cls("It changed nothing.")
        by = UNDONE_BY.get(done)
        return cls(UNDO_TEXTS.get(done, "It cannot be undone."), by, {} if by is None else options or {})


_REDRIVEN = "Messages that no worker has claimed yet can be cancelled; they then end as cancelled, not as dead letters."
#: How each action is undone, in words. What is not listed cannot be undone.
UNDO_TEXTS = {
    "pause": "Resume the queue.",
    "resume": "Pause the queue.",
    "configure": "Set what was changed back to its values before.",
    "pause_schedule": "Resume the schedule.",
    "resume_schedule": "Pause the schedule.",
    "trigger_schedule": "Cancel the message that was published, if no worker has claimed it yet.",
    "backfill_schedule": "Cancel the messages that no worker has claimed yet; their instants still count as fired.",
    "save_schedule": "Save it with its rule before, or remove it if it is new.",
    "remove_schedule": "Save the schedule again; its counts of fires start anew.",
    "redrive": _REDRIVEN,
    "bulk_redrive": f"Cancel the rest of it while it runs. {_REDRIVEN}",
    "bulk_purge": "Cancel the rest of it while it runs; what is removed is gone.",
    "bulk_cancel": "Cancel the rest of it while it runs; what is cancelled is gone.",
    "bulk_reschedule": "Move the timers again, while they are not due; their times before are in the journal.",
    "bulk_prioritize": "Give the messages their priority before again; it is in the journal.",
    "change_bulk": "Resume it if it was paused; a cancelled one must be started anew.",
    "edit_dead": "Cancel the new message, if no worker has claimed it yet.",
    "reschedule": "Move the timer to its time before, while it is not due.",
    "stop_worker": "Start the worker again.",
    "quiet_worker": "Start the worker again.",
}
#: The action that undoes another.
UNDONE_BY = {
    "pause": "resume", "resume": "pause", "configure": "configure", "pause_schedule": "resume_schedule",
    "resume_schedule": "pause_schedule", "trigger_schedule": "cancel",
}  # fmt: skip


class LoggedAction(Struct, frozen=True):
    """One entry of the log of actions: who did what, through what, and what became of it."""

    user: str
    #: What it was done through, such as web.
    via: str
    action: str
    queue: str | None
    ok: bool
    #: What it did, or why it failed, in a sentence.
    text: str
    #: The same action as a command line, and in Python.
    command: str = ""
    python: str = ""
    undo: ActionUndo | None = None
    #: Where it came from: an address or a host.
    origin: str = ""
    #: The bulk action that it started.
    bulk: str | None = None
    #: Set by the store.
    id: str = ""
    at: datetime | None = None


class LoggedActions(Struct, frozen=True):
    """A page of the log of actions, the newest first."""

    actions: list[LoggedAction]
    #: For the next page; None: there is none.
    cursor: str | None


class BulkAction(Struct, frozen=True):
    """A redrive, purge, cancel or move of many messages, which goes on without the program that started it."""

    id: str
    #: redrive, purge, cancel, reschedule or prioritize.
    verb: str
    queue: str
    #: Which messages: the parts of the filter that are set; of a reschedule also `at`, of a prioritize `priority`.
    filters: dict[str, Any]
    rate: str | None
    user: str
    via: str
    #: running, pausing, paused, cancelling, cancelled, done or failed.
    state: str
    #: Messages of its state that the queue had when it began.
    total: int
    #: Messages moved or removed so far, and letters left because their key is in use.
    done: int
    left: int
    #: Letters of which it is not known whether they were among those moved.
    unknown: int
    started_at: datetime
    ended_at: datetime | None
    error: str | None
    #: Whether a program works on it now.
    carried: bool
    #: Steps that were planned so far; one that finds no letter counts too.
    steps: int = 0
    #: The state whose messages are meant: dead, ready, delayed or waiting.
    source: str = "dead"
    #: Messages that were read so far.
    searched: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens."""
        return self.state in ("done", "cancelled", "failed")


class BulkActions(Struct, frozen=True):
    """A page of bulk actions, the newest first."""

    actions: list[BulkAction]
    #: For the next page; None: there is none.
    cursor: str | None


# ---- JSON ----------------------------------------------------------------------------------------------------


@cache
def _json_names(cls: type) -> tuple[tuple[str, str], ...]:
    """The fields of a class and their names in JSON: that of a duration has its unit, also where it is None.

    In place of private fields stand the properties by which they are read.
    """
    import dataclasses

    hints = typing.get_type_hints(cls)
    is_dataclass = dataclasses.is_dataclass(cls)
    names = [one.name for one in dataclasses.fields(cls)] if is_dataclass else list(cls.__struct_fields__)  # type: ignore[attr-defined]
    public = [name for name in names if not name.startswith("_")]
    if len(public) < len(names):
        for name, member in vars(cls).items():
            if isinstance(member, property):
                hints[name] = typing.get_type_hints(member.fget)["return"]
                public.append(name)
    return tuple((name, f"{name}_seconds" if _is_duration(hints[name]) else name) for name in public)


def _is_duration(hint: Any) -> bool:
    return hint is timedelta or timedelta in typing.get_args(hint)


def to_json(value: Any) -> Any:
    """Return a value as JSON can hold it, the same way for every command and page.

    A time is text in UTC (`2026-03-06T07:00:00.250Z`). A duration is a number of seconds, and its name ends in
    `_seconds`. A token is text, since a number above 2**53 is not exact in many readers; bytes are `{"base64": …}`.
    """
    if isinstance(value, datetime):
        return format_datetime(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return {"base64": b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {str(name): to_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    kind: type = type(value)
    if isinstance(value, Struct) or hasattr(kind, "__dataclass_fields__"):
        found = {short: to_json(getattr(value, name)) for name, short in _json_names(kind)}
        if found.get("token") is not None:
            found["token"] = str(found["token"])
        return found
    return value
