"""Schedules: saved, found, paused, triggered; and what is published when one fires.

A client that changes a schedule reads it first, computes its next fire, and writes it only over the version that it
read. So instants are computed here, in Python only, and the store only compares.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import date, datetime
from typing import Any

from msgspec import structs

from waypost import codec
from waypost.checks import (
    check_count,
    check_message_timeout,
    check_moment,
    check_seconds,
    check_text,
    check_texts,
    show,
)
from waypost.errors import InvalidInput, InvalidSchedule, SchemaTooNew, StoreFailed, UnknownSchedule
from waypost.operations.flow import ClientContext, Flow, Together
from waypost.operations.publish import with_new_ids
from waypost.operations.publish_middleware import given_expiry, pass_draft
from waypost.operations.upgrading import check_new
from waypost.policy import (
    CHUNK_BYTES_MAX,
    GRACE_SECONDS,
    GROUP_CHARACTERS_MAX,
    KEY_CHARACTERS_MAX,
    OVERLAPS,
    CatchUp,
    Missed,
    Overlap,
    RetryPolicy,
    check_priority,
    pack_retry,
    unpack_retry,
)
from waypost.redaction import journal_copy
from waypost.schedule.cron import join_patterns
from waypost.schedule.rule import Fire, Spec, Timeline, fire_id, interval_ms, new_fields, pack_spec, unpack_spec
from waypost.schedule.schedule import Schedule, describe, missed_policy
from waypost.schedule.state import after_change, after_gap, pack_state, read_state
from waypost.schedule.zones import zone_name
from waypost.store.port import Draft
from waypost.times import Duration, format_datetime, to_datetime
from waypost.values import Published, ScheduleList, StoredSchedule
from waypost.wake.port import ALL_QUEUES, ALL_SLEEPERS

log = logging.getLogger("waypost")

NAME_CHARACTERS_MAX = 128
#: Days that a schedule may exclude: three years of them, in every spec that is read.
EXCLUDED_MAX = 1_000
#: The headers that name the schedule of a message, and its instant.
SCHEDULE_HEADER, INSTANT_HEADER = "waypost-schedule", "waypost-instant"
#: How often a save is tried again when another client changed the schedule after it was read.
SAVE_TRIES = 100
#: A scheduler reads all schedules of a queue at once; use several queues for more.
SCHEDULES_MAX = 10_000
#: How many queues are queried in one flush.
LISTED_TOGETHER = 64


# ---- from keywords to a spec ---------------------------------------------------------------------------------


def make_spec(
    name: str,
    *,
    cron: str | Sequence[str] | None = None,
    every: Duration | None = None,
    tz: str = "UTC",
    exclude: Collection[date] = (),
    missed: Missed = "skip",
    overlap: Overlap | None = None,
    grace: Duration = GRACE_SECONDS,
    start: datetime | None = None,
    end: datetime | None = None,
    max_fires: int | None = None,
    jitter: Duration = 0,
    body: object = None,
    priority: int = 5,
    group: str | None = None,
    headers: Mapping[str, str] | None = None,
    expires: Duration | None = None,
    correlation_id: str | None = None,
    reply_to: str | None = None,
    retry: RetryPolicy | None = None,
    timeout: Duration | None = None,
    declared: bool = False,
    as_type: Any = None,
) -> Spec:
    """Return the validated keywords of `save_schedule`; `as_type` is the declared type of the queue's bodies."""
    check_text("schedule name", name, NAME_CHARACTERS_MAX)
    if (cron is None) == (every is None):
        raise InvalidSchedule('a schedule needs either cron="0 9 * * *" or every=60, one of them')
    if every is not None and not (isinstance(tz, str) and tz == "UTC"):
        raise InvalidSchedule("an interval has no time zone: tz belongs to cron")
    if not isinstance(missed, CatchUp) and not (isinstance(missed, str) and missed in ("skip", "once")):
        raise InvalidSchedule(f'missed is "skip", "once" or CatchUp(n), not {show(missed)}')
    overlap = _check_overlap(overlap, missed, declared)
    if max_fires is not None:
        check_count("max_fires", max_fires, 1, 2**40, InvalidSchedule)
    encoded = codec.encode_body(body, as_type)
    spec = Spec(
        name,
        cron=None if cron is None else join_patterns(cron),
        exclude=_check_exclude(exclude, cron is not None),
        every_ms=None if every is None else interval_ms(every),
        tz=zone_name(tz),
        start_ms=_moment_ms("start", start),
        end_ms=_moment_ms("end", end),
        max_fires=max_fires,
        jitter_ms=_span_ms("jitter", jitter),
        missed="all" if isinstance(missed, CatchUp) else missed,
        max_catchup=missed.max_catchup if isinstance(missed, CatchUp) else 0,
        grace_ms=_span_ms("grace", grace),
        overlap=overlap,
        content=encoded.content,
        body=encoded.data,
        type_name=encoded.type_name,
        headers=check_texts("headers", headers),
        correlation_id=correlation_id,
        reply_to=reply_to,
        priority=check_priority(priority),
        group=None if group is None else check_text("group", group, GROUP_CHARACTERS_MAX),
        retry=None if retry is None else pack_retry(retry),
        timeout=None if timeout is None else check_message_timeout(timeout),
        expires_ms=None if expires is None else _expires_ms(expires),
        declared=declared,
    )
    if spec.start_ms is not None and spec.end_ms is not None and spec.end_ms < spec.start_ms:
        raise InvalidSchedule("the end of a schedule lies before its start")
    _check_sizes(spec)
    return spec


def _check_sizes(spec: Spec) -> None:
    """Refuse invalid headers and sizes now, not when it fires."""
    size = message_size(spec)
    if spec.missed == "all" and size * spec.max_catchup > CHUNK_BYTES_MAX:
        raise InvalidSchedule(
            f"CatchUp({spec.max_catchup}) of a message of {size:,} bytes is more than one step may publish "
            f"({CHUNK_BYTES_MAX:,} bytes); lower it, or publish a reference to the data"
        )


def _check_exclude(exclude: Collection[date], is_cron: bool) -> tuple[str, ...]:
    """Return excluded days in order, each once, as text."""
    # An object of any other type is not iterated: that could run any code.
    is_list = isinstance(exclude, list | tuple | set | frozenset)
    days: list[date] = list(exclude) if is_list else []
    if not is_list or any(not isinstance(day, date) or isinstance(day, datetime) for day in days):
        raise InvalidSchedule(f"exclude is a list of days, as [date(2026, 12, 25)], not {show(exclude)}")
    if len(days) > EXCLUDED_MAX:
        raise InvalidSchedule(f"a schedule has at most {EXCLUDED_MAX:,} excluded days, not {len(days):,}")
    if days and not is_cron:
        raise InvalidSchedule("an interval has no days: exclude belongs to cron")
    return tuple(sorted({day.isoformat() for day in days}))


def _check_overlap(overlap: Overlap | None, missed: Missed, declared: bool) -> Overlap:
    """Return the overlap rule: `skip` for a declared handler, unless it catches up with several fires at once."""
    catches_up = isinstance(missed, CatchUp)
    if overlap is None:
        return "skip" if declared and not catches_up else "allow"
    if not isinstance(overlap, str) or overlap not in OVERLAPS:
        raise InvalidSchedule(f'overlap is "allow", "skip" or "queue_one", not {show(overlap)}')
    if catches_up and overlap != "allow":
        raise InvalidSchedule(
            f'CatchUp publishes several messages at once, which overlap="{overlap}" does not let run: use '
            'missed="once", or overlap="allow"'
        )
    return overlap


def derived_key(spec: Spec) -> str:
    """Return the key of a schedule without a given one: always the same for the same name and rule."""
    rule = f"every:{spec.every_ms}" if spec.cron is None else f"cron:{spec.cron}:{spec.tz}"
    return check_text("schedule key", f"{spec.name}::{rule}", KEY_CHARACTERS_MAX)


def _moment_ms(what: str, at: datetime | None) -> int | None:
    return None if at is None else check_moment(what, at)


def _expires_ms(expires: Duration) -> int:
    if isinstance(expires, datetime):
        raise InvalidSchedule("expires of a schedule is a time after each fire: a moment is its end=")
    return max(1, round(check_seconds("expires", expires, least=0.001, error=InvalidSchedule) * 1000))


def _span_ms(what: str, span: Duration) -> int:
    return round(check_seconds(what, span, error=InvalidSchedule) * 1000)


# ---- what is published -----------------------------------------------------------------------------------------


def _headers(spec: Spec, instant_ms: int) -> dict[str, str]:
    return spec.headers | {SCHEDULE_HEADER: spec.name, INSTANT_HEADER: format_datetime(to_datetime(instant_ms))}


def _envelope(message_id: str, spec: Spec, instant_ms: int) -> bytes:
    head = codec.encode_head(
        type_name=spec.type_name,
        correlation_id=spec.correlation_id,
        reply_to=spec.reply_to,
        headers=_headers(spec, instant_ms),
        retry=None if spec.retry is None else unpack_retry(spec.retry),
        timeout=spec.timeout,
    )
    return codec.make_envelope(message_id, codec.Encoded(spec.content, spec.body, spec.type_name), head)


def message_size(spec: Spec) -> int:
    """Return the size of one message of a schedule, in bytes."""
    return len(_envelope("0" * 24, spec, 0))


def _draft(context: ClientContext, queue: str, message_id: str, spec: Spec, instant_ms: int) -> Flow[Draft | None]:
    """Return the message of one instant; None if a middleware of the client did not pass it on."""
    envelope, priority, group = _envelope(message_id, spec, instant_ms), spec.priority, spec.group
    # From the fire on, not from the instant: one that is made late, by a catch-up or a backfill, is to be handled too.
    expires_ms = -(spec.expires_ms or 0)
    if context.publish_middleware is not None:
        given = {"priority": priority, "group": group, "expires": given_expiry(expires_ms)}
        passed = yield from pass_draft(context, queue, message_id, envelope, given)
        if passed is None:
            return None
        envelope, options = passed
        priority, group = options.priority, options.group if isinstance(options.group, str) else None
        expires_ms = options.expires_ms
    copy = journal_copy(context.redact, queue, message_id, envelope)
    return Draft(message_id, envelope, priority=priority, group=group, journal_copy=copy, expires_ms=expires_ms)


def drafts_of(
    context: ClientContext, queue: str, schedule: StoredSchedule, spec: Spec, fires: Sequence[Fire]
) -> Flow[list[Draft]]:
    """Return the messages of some fires. Their ids are derived from schedule and instant."""
    drafts: list[Draft] = []
    for fire in fires:
        message_id = fire_id(queue, schedule.key, schedule.version, fire.instant_ms)
        draft = yield from _draft(context, queue, message_id, spec, fire.instant_ms)
        if draft is not None:
            drafts.append(draft)
    return drafts


# ---- saving ----------------------------------------------------------------------------------------------------


def _listing(context: ClientContext, queue: str) -> Flow[ScheduleList]:
    return (yield from context.attempt(context.store.schedules(queue)))


def _with_key(listing: ScheduleList, key: str) -> StoredSchedule | None:
    return next((schedule for schedule in listing.schedules if schedule.key == key), None)


#: The fields of a spec behind each keyword of `save_schedule`.
FIELDS: dict[str, tuple[str, ...]] = {
    "cron": ("cron", "every_ms"), "every": ("cron", "every_ms", "tz", "exclude"), "tz": ("tz",),
    "exclude": ("exclude",), "start": ("start_ms",),
    "end": ("end_ms",), "max_fires": ("max_fires",), "jitter": ("jitter_ms",), "missed": ("missed", "max_catchup"),
    "overlap": ("overlap",),
    "grace": ("grace_ms",), "body": ("content", "body", "type_name"), "headers": ("headers",),
    "correlation_id": ("correlation_id",), "reply_to": ("reply_to",), "priority": ("priority",), "group": ("group",),
    "retry": ("retry",), "timeout": ("timeout",), "expires": ("expires_ms",),
}  # fmt: skip


def merged(old: Spec, new: Spec, named: Collection[str]) -> Spec:
    """Return the old spec with the fields of the named keywords from the new one."""
    fields = {field for keyword in named for field in FIELDS[keyword]}
    spec = structs.replace(old, **{field: getattr(new, field) for field in fields})
    _check_overlap(spec.overlap, missed_policy(spec), spec.declared)
    _check_sizes(spec)
    return spec


def change(context: ClientContext, queue: str, name: str, key: str | None, rule: Mapping[str, Any]) -> Flow[Schedule]:
    """Save a schedule; if one has this key, or else this name, change only the fields that `rule` names."""
    found = yield from find(context, name if key is None else key, queue)
    if found is None:
        spec = make_spec(name, **rule)
        return (yield from save(context, queue, derived_key(spec) if key is None else key, spec))
    stored = found[1]
    old = unpack_spec(stored.spec)
    standing: dict[str, Any] = {"cron": old.cron} if old.every_ms is None else {"every": old.every_ms / 1000}
    if "every" in rule or "cron" in rule:
        standing = {}
    if old.cron is not None and "every" not in rule:
        standing["tz"] = old.tz
    new = make_spec(old.name, **(standing | dict(rule)))
    return (yield from save(context, queue, stored.key, new, named=frozenset(rule)))


def save(
    context: ClientContext,
    queue: str,
    key: str,
    spec: Spec,
    named: frozenset[str] | None = None,
    *,
    may_be_over: bool = False,
) -> Flow[Schedule]:
    """Save a schedule. The same rule does not change the next fire; another rule determines it, from now on.

    With `named`, only these keywords of an existing schedule are changed. A schedule that will never fire is refused,
    unless it `may_be_over`.
    """
    given = spec
    yield from check_new(context, new_fields(spec), InvalidSchedule)
    yield from context.attempt(context.store.schedules_changed(queue))
    for _ in range(SAVE_TRIES):
        listing = yield from _listing(context, queue)
        found = _with_key(listing, key)
        if found is None and len(listing.schedules) >= SCHEDULES_MAX:
            raise InvalidSchedule(f"queue {queue} has {SCHEDULES_MAX:,} schedules, the limit; use another queue")
        if named is not None and found is not None:
            spec = merged(unpack_spec(found.spec), given, named)
        wanted = _standing(key, spec, found, listing.at_ms, may_be_over)
        if found is not None and structs.replace(wanted, version=found.version) == found:
            context.emit("schedule_saved", queue, "skipped", key=key)
            return describe(queue, found)
        seen = (None, None) if found is None else (found.version, found.next_ms)
        saved = yield from context.attempt(context.store.save_schedule(queue, wanted, version=seen[0], next_ms=seen[1]))
        if saved.schedule is not None and saved.schedule.version == wanted.version:
            yield from _announce(context, queue)
            context.emit("schedule_saved", queue, key=key)
            return describe(queue, saved.schedule)
    raise _contended(key, queue)


def _announce(context: ClientContext, queue: str) -> Flow[None]:
    """Record that the schedules of a queue have changed, and notify the schedulers of all processes."""
    yield from context.attempt(context.store.schedules_changed(queue))
    context.wakeups.notify("schedules", ALL_QUEUES, [ALL_SLEEPERS])


def _contended(key: str, queue: str) -> StoreFailed:
    return StoreFailed(
        f"schedule {key!r} of queue {queue} was changed by other clients at the same time; it was not saved: try again"
    )


def _standing(key: str, spec: Spec, found: StoredSchedule | None, now_ms: int, may_be_over: bool) -> StoredSchedule:
    """Return the schedule to save over the existing one."""
    version = os.urandom(8).hex()
    if found is not None:
        old = unpack_spec(found.spec)
        if spec.fires_like(old):
            spec = structs.replace(spec, anchor_ms=old.anchor_ms)
            return structs.replace(found, version=version, spec=pack_spec(spec))
        found = structs.replace(found, state=pack_state(after_change(read_state(found), found.last_ms, old)))
    spec = structs.replace(spec, anchor_ms=now_ms if spec.every_ms is not None else 0)
    fire = _first_fire(key, spec, now_ms, 0 if found is None else found.fires)
    if fire is None and not may_be_over:
        raise InvalidSchedule(
            f"schedule {key!r} would never fire: no instant lies between now and its end, or max_fires is used up"
        )
    next_ms, due_ms = (None, None) if fire is None else fire
    if found is None:
        return StoredSchedule(key, version, pack_spec(spec), False, next_ms, due_ms)
    return structs.replace(found, version=version, spec=pack_spec(spec), next_ms=next_ms, due_ms=due_ms)


def _first_fire(key: str, spec: Spec, now_ms: int, fires: int) -> Fire | None:
    if spec.max_fires is not None and fires >= spec.max_fires:
        return None
    return Timeline(key, spec).after(now_ms)


# ---- finding ---------------------------------------------------------------------------------------------------


def listings(context: ClientContext, queue: str | None) -> Flow[dict[str, ScheduleList]]:
    """The schedules of one queue, or of all."""
    if queue is not None:
        return {queue: (yield from _listing(context, queue))}
    queues = sorted((yield from context.attempt(context.store.scheduled())))
    found: dict[str, ScheduleList] = {}
    for at in range(0, len(queues), LISTED_TOGETHER):
        part = queues[at : at + LISTED_TOGETHER]
        results = yield Together([context.store.schedules(name) for name in part])
        for name, result in zip(part, results, strict=True):
            # A failed connection is retried for each: a listing can be repeated.
            found[name] = (yield from _listing(context, name)) if isinstance(result, Exception) else result
    return found


def schedules(context: ClientContext, queue: str | None, count: int) -> Flow[list[Schedule]]:
    """Return all schedules with their next `count` fires, by queue and key."""
    found = yield from listings(context, queue)
    described: list[Schedule] = []
    for name, listing in found.items():
        for stored in listing.schedules:
            try:
                described.append(describe(name, stored, count))
            except SchemaTooNew as error:
                fields = {"event": "schedule_unreadable", "queue": name, "schedule": stored.key}
                log.warning("schedule %s of queue %s is not listed: %s", stored.key, name, error, extra=fields)
    return described


Found = tuple[str, StoredSchedule, int]


def find(context: ClientContext, name: str, queue: str | None) -> Flow[Found | None]:
    """Return the one schedule with a key or name, its queue, and store time; None if there is none."""
    found = yield from listings(context, queue)
    everything = [(place, stored, listing.at_ms) for place, listing in found.items() for stored in listing.schedules]
    fitting = [one for one in everything if one[1].key == name]
    if not fitting:
        fitting = [one for one in everything if _name_of(one[1]) == name]
    if len(fitting) > 1:
        several = ", ".join(f"{stored.key!r} in {place}" for place, stored, _ in fitting[:5])
        raise UnknownSchedule(f"{name!r} means several schedules: {several}; give the key, and queue=")
    return fitting[0] if fitting else None


def find_one(context: ClientContext, name: str, queue: str | None) -> Flow[Found]:
    """The same; raises `UnknownSchedule` if there is none."""
    found = yield from find(context, name, queue)
    if found is None:
        where = "" if queue is None else f" in queue {queue}"
        raise UnknownSchedule(f"there is no schedule {name!r}{where}; schedules() lists what there is")
    return found


def _name_of(stored: StoredSchedule) -> str | None:
    spec = _readable_spec(stored)
    return None if spec is None else spec.name  # without a name it can still be given by its key


def is_declared(stored: StoredSchedule) -> bool:
    """Whether a decorator in a program declared it, as far as this release can read it."""
    spec = _readable_spec(stored)
    return spec is not None and spec.declared


def _readable_spec(stored: StoredSchedule) -> Spec | None:
    try:
        return unpack_spec(stored.spec)
    except SchemaTooNew:
        return None


# ---- changing --------------------------------------------------------------------------------------------------


def remove(context: ClientContext, name: str, queue: str | None) -> Flow[bool]:
    """Remove a schedule. Messages that it has published stay."""
    found = yield from find(context, name, queue)
    if found is None:
        return False
    place, stored, _ = found
    context.name_of(place)
    removed = yield from context.attempt(context.store.remove_schedule(place, stored.key))
    yield from _announce(context, place)
    context.emit("schedule_removed", place, "success" if removed else "skipped", key=stored.key)
    return removed


def set_paused(context: ClientContext, name: str, queue: str | None, paused: bool) -> Flow[bool]:
    """Pause a schedule, or resume it at its next instant; return whether that changed anything."""
    for _ in range(SAVE_TRIES):
        place, stored, now_ms = yield from find_one(context, name, queue)
        context.name_of(place)
        if stored.paused == paused:
            return False
        wanted = structs.replace(stored, version=os.urandom(8).hex(), paused=paused)
        if not paused and stored.next_ms is not None and (stored.due_ms or 0) <= now_ms:
            # Instants during the pause were not meant to fire, so they are not missed.
            fire = _first_fire(stored.key, unpack_spec(stored.spec), now_ms, stored.fires)
            next_ms, due_ms = (None, None) if fire is None else fire
            state = pack_state(after_gap(read_state(stored), stored.last_ms))
            wanted = structs.replace(wanted, next_ms=next_ms, due_ms=due_ms, state=state)
        call = context.store.save_schedule(place, wanted, version=stored.version, next_ms=stored.next_ms)
        saved = yield from context.attempt(call)
        if saved.schedule is not None and saved.schedule.version == wanted.version:
            yield from _announce(context, place)
            context.emit("schedule_paused" if paused else "schedule_resumed", place, key=stored.key)
            return True
    raise _contended(name, queue or "")


def pause(context: ClientContext, name: str, queue: str | None) -> Flow[bool]:
    """Stop firing until it is resumed; return whether that changed anything."""
    return (yield from set_paused(context, name, queue, True))


def resume(context: ClientContext, name: str, queue: str | None) -> Flow[bool]:
    """Fire again from the next instant on; return whether that changed anything."""
    return (yield from set_paused(context, name, queue, False))


def trigger(context: ClientContext, name: str, queue: str | None) -> Flow[Published]:
    """Publish a schedule's message now. Its instants and counts do not change."""
    place, stored, now_ms = yield from find_one(context, name, queue)
    context.name_of(place)
    message_id = context.session.message_ids(1)[0]
    draft = yield from _draft(context, place, message_id, unpack_spec(stored.spec), now_ms)
    if draft is None:
        raise InvalidInput(f"a middleware of this client did not pass on the message of schedule {name!r}")
    drafts = [draft]

    def identify() -> None:
        drafts[:] = with_new_ids(context, place, drafts)

    published = yield from context.operate_and_wake(
        place,
        lambda operation: context.store.trigger_schedule(place, stored.key, drafts[0], operation),
        identify=identify,
    )
    if published is None:
        raise UnknownSchedule(f"schedule {name!r} was removed meanwhile; nothing was published")
    context.emit("published", place, message_id=published.id, key=stored.key, reason="triggered")
    return published
