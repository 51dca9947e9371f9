"""Bulk actions: redrive, purge, cancel, move or prioritize messages by a filter, in steps that any client can carry on.

A bulk action is a shared record: what is to be done, how far it is, and who works on it until when. A step is planned
first: the letters that it takes and the operation that it is sent with are saved with the record. Then it is run, and
the next one is saved together with what came of it. So a client that ends at any point leaves either a step that has
not run, or one whose repeat by another client gets the first answer from the store: letters are moved and counted once.
A client that was taken for dead and goes on can only repeat that step, and its save is refused.

Only letters that died, or messages that were published, before the action began are meant: what is redriven and dies
again is not redriven for ever. All moved timers get the same due time, so that one that comes up again later in the
listing is recognized; so is a message that has the new priority.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct, structs

from waypost import codec
from waypost.checks import check_choice, check_count, check_text
from waypost.errors import (
    InvalidInput,
    OperationTooOld,
    OutcomeUnknown,
    StoreFull,
    StoreUnavailable,
    Undecodable,
    WaypostError,
)
from waypost.formatting import error_line
from waypost.identity import SESSION_BYTES, Operation, new_mark
from waypost.operations.flow import ClientContext, Flow, Sleep
from waypost.operations.outgoing import deliver_ends
from waypost.operations.records import records, save_record
from waypost.policy import PRIORITY_MAX, PRIORITY_MIN, RECORDS_PAGE_MAX, parse_rate
from waypost.store.port import Target, Woken
from waypost.values import (
    CancelStatus,
    Counted,
    DeadFilter,
    MessageState,
    ObservedOutcome,
    Page,
    RecordPage,
    SharedRecord,
    StatsRecord,
    Stored,
    split_error,
)

T = TypeVar("T")

KIND = "waypost-bulk"
#: Bulk actions that the store keeps, those that have ended among them.
KEPT_MAX = 200
#: Starts at the same time may exceed that by so many before the store removes the oldest, ended or not.
SPARE = 100
#: Letters that are read in one step. Their bodies are read too.
STEP_LETTERS = 100
#: Messages that a count reads at once.
COUNT_PAGE = 200
#: How long a count goes on at most; it returns how far it got.
COUNT_SECONDS = 2.0
#: How long a client works on an action before it must have saved it again.
LEASE_MS = 5_000
#: How often a save is tried again because another client changed the record.
CONFLICTS_MAX = 20
TEXT_CHARACTERS_MAX = 512

Verb = Literal["redrive", "purge", "cancel", "reschedule", "prioritize"]
State = Literal["running", "pausing", "paused", "cancelling", "cancelled", "done", "failed"]
Change = Literal["pause", "resume", "cancel"]
#: The states whose messages each verb acts on.
VERBS: dict[Verb, tuple[MessageState, ...]] = {
    "redrive": ("dead",), "purge": ("dead",), "cancel": ("ready", "delayed", "waiting"), "reschedule": ("delayed",),
    "prioritize": ("ready", "delayed"),
}  # fmt: skip
#: Pages that one step reads in search of messages that fit, so that a filter with few matches has few steps.
STEP_PAGES = 10
#: States in which a client has something to do.
ACTIVE: frozenset[State] = frozenset(("running", "pausing", "cancelling"))
ENDED: frozenset[State] = frozenset(("done", "cancelled", "failed"))
#: Parts of a filter that only dead letters have.
ONLY_DEAD = ("reason", "before_ms", "after_ms")
#: Parts of a filter for which empty text means letters that have none.
MAY_BE_NONE = frozenset(("error_type", "error"))
#: An error that may be gone at the next attempt.
PASSING = (StoreUnavailable, OutcomeUnknown, StoreFull)


class Step(Struct, frozen=True):
    """A step that was planned: the letters it takes, its operation, and where the next one begins."""

    number: int
    stamp: int
    mark: str
    ids: list[str]
    cursor: str | None
    is_last: bool
    #: Messages that were read to choose these.
    read: int = 0


class BulkRecord(Struct, frozen=True):
    """A bulk action as it is stored."""

    verb: Verb
    queue: str
    filter: DeadFilter
    user: str
    via: str
    #: The session of its operations, and when it began, by the store's clock.
    session: str
    start_ms: int
    #: Messages of that state that the queue had when it began.
    total: int
    rate: str | None = None
    state: State = "running"
    #: Letters moved or removed; left because their key is in use; of which it is not known whether they were moved.
    done: int = 0
    left: int = 0
    unknown: int = 0
    cursor: str | None = None
    is_last: bool = False
    step: Step | None = None
    steps: int = 0
    #: Not before: for the rate.
    next_ms: int = 0
    owner: str = ""
    lease_ms: int = 0
    ended_ms: int | None = None
    error: str | None = None
    #: The state whose messages are meant, and the due time that timers get.
    source: MessageState = "dead"
    at_ms: int | None = None
    #: Messages that were read so far.
    searched: int = 0
    #: The priority that messages get.
    priority: int | None = None
    #: Different in each save, so that no save is taken for the repeat of another.
    change: str = ""


class Bulk(Struct, frozen=True):
    """A bulk action, the version of its record, and the store's time of the answer."""

    id: str
    record: BulkRecord
    version: int
    now_ms: int


# ---- starting, reading, changing -----------------------------------------------------------------------------


def start(
    context: ClientContext,
    queue: str,
    verb: Verb,
    filter: DeadFilter,
    *,
    state: MessageState | None,
    delay_ms: int | None,
    at_ms: int | None,
    priority: int | None,
    rate: str | None,
    user: str,
    via: str,
) -> Flow[Bulk]:
    """Save a new bulk action; it runs when a client carries it on."""
    source = check_source(verb, state)
    if (verb == "reschedule") != (delay_ms is not None or at_ms is not None):
        raise InvalidInput(
            "say when the timers are due: delay= or at=" if verb == "reschedule" else f"a {verb} takes no delay= or at="
        )
    if (verb == "prioritize") != (priority is not None):
        raise InvalidInput(
            "give the messages a priority=, from 0 to 9" if priority is None else f"a {verb} takes no priority="
        )
    if priority is not None:
        check_count("priority", priority, PRIORITY_MIN, PRIORITY_MAX)
    if rate is not None:
        parse_rate(rate)
    check_filter(filter, source)
    yield from _make_room(context)
    total = held((yield from context.attempt(context.store.stats(queue))), source)
    now = yield from context.attempt(context.store.time())
    record = BulkRecord(
        verb, queue, filter, user[:TEXT_CHARACTERS_MAX], via, os.urandom(SESSION_BYTES).hex(), now, total, rate,
        source=source, at_ms=now + delay_ms if delay_ms is not None else at_ms, priority=priority,
    )  # fmt: skip
    (id,) = context.session.message_ids(1)
    saved = yield from _save(context, Bulk(id, record, 0, now), record)
    # A web server may have begun with it before the reply came, if the first one was lost.
    return (yield from find(context, id)) if saved is None else saved


def check_source(verb: Verb, state: MessageState | None) -> MessageState:
    """Return the state whose messages a verb acts on, or raise `InvalidInput`."""
    check_choice("verb", verb, tuple(VERBS))
    states = VERBS[verb]
    if state is None and len(states) > 1:
        raise InvalidInput(f"name the state of the messages to {verb}: state= is one of {', '.join(states)}")
    source = states[0] if state is None else state
    check_choice("state", source, states)
    return source


def check_filter(filter: DeadFilter, source: MessageState) -> None:
    """Refuse a filter with an empty or too long part, or one for dead letters on other messages."""
    for name in ("reason", "error_type", "error", "group", "key_prefix", "type_name", "header"):
        value = getattr(filter, name)
        if value is not None and (value or name not in MAY_BE_NONE):
            check_text(name, value, TEXT_CHARACTERS_MAX)
    wrong = [name for name in ONLY_DEAD if getattr(filter, name) is not None] if source != "dead" else []
    if wrong:
        public = {"before_ms": "died_before", "after_ms": "died_after"}.get(wrong[0], wrong[0])
        raise InvalidInput(f"{public} is for dead letters; messages that are {source} have none")


def held(stats: StatsRecord, state: MessageState) -> int:
    """How many messages of a state a queue has."""
    ledger = stats.ledger
    return ledger.dead_kept if state == "dead" else int(getattr(ledger, state))


def _make_room(context: ClientContext) -> Flow[None]:
    """Remove the oldest bulk actions that have ended where there are too many; refuse another if none has ended."""
    found: list[SharedRecord] = []
    cursor = None
    while True:
        page = yield from records(context, KIND, cursor=cursor, limit=RECORDS_PAGE_MAX)
        found += page.records
        cursor = page.cursor
        if cursor is None:
            break
    surplus = len(found) + 1 - KEPT_MAX
    for record in reversed(found):
        if surplus <= 0:
            return
        if _has_ended(record):
            yield from save_record(context, KIND, record.name, None, version=record.version)
            surplus -= 1
    if surplus > 0:
        raise InvalidInput(
            f"the store keeps at most {KEPT_MAX} bulk actions, and none of them has ended: wait until one has, or "
            "cancel one"
        )


def _has_ended(record: SharedRecord) -> bool:
    """Whether a bulk action has ended; one that another release wrote is not known to have."""
    try:
        return msgspec.json.decode(record.data, type=BulkRecord).state in ENDED
    except msgspec.DecodeError:
        return False


def find(context: ClientContext, id: str) -> Flow[Bulk]:
    """Return a bulk action, or raise `InvalidInput`."""
    page = yield from records(context, KIND, names=[check_text("id", id, 128)])
    if not page.records:
        raise InvalidInput(f"there is no bulk action {id}: the store keeps the newest {KEPT_MAX}")
    return _read(page.records[0], page)


def list_bulk(context: ClientContext, *, cursor: str | None, limit: int) -> Flow[tuple[list[Bulk], str | None]]:
    """Return a page of bulk actions, the newest first, without those that only another release can read."""
    page = yield from records(context, KIND, cursor=cursor, limit=limit)
    found = []
    for record in page.records:
        with suppress(InvalidInput):
            found.append(_read(record, page))
    return found, page.cursor


def change(context: ClientContext, id: str, how: Change) -> Flow[Bulk]:
    """Pause, resume or cancel a bulk action. A step that is under way ends first."""
    check_choice("change", how, ("pause", "resume", "cancel"))
    bulk = yield from find(context, id)
    for _ in range(CONFLICTS_MAX):
        state = _changed_state(bulk, how)
        if state == bulk.record.state:
            return bulk
        ended = bulk.now_ms if state == "cancelled" else None
        saved = yield from _save(context, bulk, structs.replace(bulk.record, state=state, ended_ms=ended))
        if saved is not None:
            return saved
        bulk = yield from find(context, id)
    raise StoreUnavailable(f"bulk action {id} is changed by others all the time; nothing was done, try again")


def _changed_state(bulk: Bulk, how: Change) -> State:
    record = bulk.record
    if record.state in ENDED:
        raise InvalidInput(f"bulk action {bulk.id} has ended ({record.state}): there is nothing to {how}")
    if how == "resume":
        return record.state if record.state == "cancelling" else "running"
    if how == "pause":
        return record.state if record.state != "running" else "pausing" if record.step else "paused"
    return "cancelling" if record.step else "cancelled"


# ---- carrying it on ------------------------------------------------------------------------------------------


def carry_on(context: ClientContext, id: str, owner: str, seconds: float) -> Flow[Bulk]:
    """Work on a bulk action until it ends, is paused, or this time is over. Nothing if another client works on it."""
    deadline = context.monotonic() + seconds
    bulk = yield from find(context, id)
    while True:
        record = bulk.record
        if record.state not in ACTIVE or (record.owner not in ("", owner) and record.lease_ms > bulk.now_ms):
            return bulk
        wait = (record.next_ms - bulk.now_ms) / 1000 if record.step is None and record.state == "running" else 0.0
        left = deadline - context.monotonic()
        if left <= 0 or wait > left:
            return bulk
        if wait > 0:
            yield Sleep(wait)
            bulk = yield from find(context, id)
            continue
        if record.step is not None and record.owner != owner:
            # The step of a client that is gone: take it over, so that no third client does the same.
            saved = yield from _save(context, bulk, record, owner)
            if saved is None:
                return (yield from find(context, id))
            bulk = saved
        bulk = yield from _next(context, bulk, owner)


def _next(context: ClientContext, bulk: Bulk, owner: str) -> Flow[Bulk]:
    """Run the step that was planned, plan another, and save both."""
    step, result = bulk.record.step, (0, 0, 0)
    try:
        if step is not None:
            result = yield from _run(context, bulk.record, step)
        for _ in range(CONFLICTS_MAX):
            after = _settled(bulk, step, result)
            # With a rate the next step is planned when it may run: one that is planned counts as one that may have run.
            if after.state == "running" and not after.is_last and after.next_ms <= bulk.now_ms:
                planned = yield from _plan(context, after, bulk.now_ms)
                after = structs.replace(after, step=planned, steps=after.steps + 1)
            saved = yield from _save(context, bulk, _ended(after, bulk.now_ms), owner)
            if saved is not None:
                return saved
            # It was paused or cancelled meanwhile; or another client has taken it over, which has counted this step.
            bulk = yield from find(context, bulk.id)
            is_mine = bulk.record.owner in ("", owner) and bulk.record.step == step
            if not is_mine or bulk.record.state not in ACTIVE:
                return bulk
    except PASSING:
        raise
    except WaypostError as error:
        failed = structs.replace(bulk.record, state="failed", error=str(error)[:2_000], ended_ms=bulk.now_ms)
        return (yield from _save(context, bulk, failed)) or (yield from find(context, bulk.id))
    return bulk


def _settled(bulk: Bulk, step: Step | None, result: tuple[int, int, int]) -> BulkRecord:
    """The record after its step."""
    record = bulk.record
    if step is None:
        return record
    done, left, unknown = result
    next_ms = record.next_ms
    if record.rate is not None and done:
        count, per_ms = parse_rate(record.rate)
        next_ms = max(next_ms, bulk.now_ms) + -(-done * per_ms // count)
    # A step that may or may not have run is planned again from its beginning: what it moved is not there any more.
    place = (record.cursor, False) if unknown else (step.cursor, step.is_last)
    searched = record.searched + (0 if unknown else step.read)
    return structs.replace(
        record, step=None, searched=searched, done=record.done + done, left=record.left + left,
        unknown=record.unknown + unknown, cursor=place[0], is_last=place[1], next_ms=next_ms,
    )  # fmt: skip


def _ended(record: BulkRecord, now_ms: int) -> BulkRecord:
    """The record, ended if nothing is left to do."""
    if record.step is not None:
        return record
    ends: dict[State, State] = {"pausing": "paused", "cancelling": "cancelled", "running": "done"}
    state = ends[record.state] if record.state != "running" or record.is_last else record.state
    return structs.replace(record, state=state, ended_ms=None if state in ("running", "paused") else now_ms)


def _plan(context: ClientContext, record: BulkRecord, now_ms: int) -> Flow[Step]:
    """Choose the letters of the next step: with a rate no more than a second takes."""
    most = STEP_LETTERS
    if record.rate is not None:
        count, per_ms = parse_rate(record.rate)
        most = max(1, min(most, count * 1000 // per_ms))
    # Where most messages do not fit, a page as small as a step would read a large queue in very many steps.
    size = STEP_LETTERS if reads_messages(record.filter) else most
    chosen = yield from choose(
        context, record.queue, record.filter, record.cursor, size, record.start_ms, state=record.source,
        skip_duplicates=record.verb == "redrive", at_ms=record.at_ms, priority=record.priority, most=most,
    )  # fmt: skip
    return Step(record.steps + 1, now_ms, new_mark().hex(), chosen.ids, chosen.cursor, chosen.is_last, chosen.read)


def _run(context: ClientContext, record: BulkRecord, step: Step) -> Flow[tuple[int, int, int]]:
    """Run a step; how many letters were moved, stay dead, and may or may not have been moved."""
    if not step.ids:
        return 0, 0, 0
    operation = Operation(bytes.fromhex(record.session), step.number, step.stamp, bytes.fromhex(step.mark))
    count = len(step.ids)
    targets = [Target(id) for id in step.ids]
    try:
        if record.verb == "cancel":
            woken = yield from context.attempt(context.store.cancel(record.queue, targets, operation))
            counts = _count_cancelled(context, record.queue, step.ids, woken)
            yield from deliver_ends(context, record.queue)
            return counts
        if record.verb == "reschedule":
            statuses = context.wake_and_report(
                (yield from context.attempt(
                    context.store.reschedule(record.queue, targets, operation, at_ms=record.at_ms)
                ))
            )  # fmt: skip
            for id, status in zip(step.ids, statuses, strict=True) if context.on_event is not None else ():
                context.emit("postponed", record.queue, "success" if status == "moved" else "skipped", message_id=id)
            return statuses.count("moved"), 0, 0
        if record.verb == "prioritize":
            assert record.priority is not None
            changes = context.wake_and_report(
                (yield from context.attempt(
                    context.store.change_priority(record.queue, step.ids, record.priority, operation)
                ))
            )  # fmt: skip
            for id, changed in zip(step.ids, changes, strict=True) if context.on_event is not None else ():
                outcome: ObservedOutcome = "success" if changed == "changed" else "skipped"
                context.emit("postponed", record.queue, outcome, message_id=id, reason="priority")
            return changes.count("changed"), 0, 0
        if record.verb == "redrive":
            moved = context.wake_and_report(
                (yield from context.attempt(
                    context.store.redrive(record.queue, count, operation, ids=step.ids)
                ))
            )  # fmt: skip
            for id in moved.moved if context.on_event is not None else ():
                context.emit("redriven", record.queue, message_id=id)
            return len(moved.moved), len(moved.duplicates), 0
        purged = context.wake_and_report(
            (yield from context.attempt(context.store.purge(record.queue, "dead", count, operation, ids=step.ids)))
        )
    except OperationTooOld:
        return 0, 0, count
    context.emit(
        "purged", record.queue, "success" if purged.removed else "skipped", count=purged.removed, reason="dead"
    )
    return purged.removed, 0, 0


def _count_cancelled(
    context: ClientContext, queue: str, ids: Sequence[str], woken: Woken[list[CancelStatus]]
) -> tuple[int, int, int]:
    """Report what a cancel of several messages did; one that began to run meanwhile was asked to stop."""
    statuses = context.wake_and_report(woken)
    for id, status in zip(ids, statuses, strict=True) if context.on_event is not None else ():
        event = "cancelled" if status == "cancelled" else "cancel_requested"
        outcome: ObservedOutcome = "success" if status in ("cancelled", "requested") else "skipped"
        context.emit(event, queue, outcome, message_id=id, reason=status)
    requested = [id for id, status in zip(ids, statuses, strict=True) if status == "requested"]
    if requested:
        context.wakeups.notify("held", queue, requested)
    return statuses.count("cancelled") + statuses.count("requested"), 0, 0


# ---- letters by a filter -------------------------------------------------------------------------------------


class Chosen(Struct, frozen=True):
    """Messages that fit, where to go on, whether these were the last, and how many were read."""

    ids: list[str]
    cursor: str | None
    is_last: bool
    read: int


def choose(
    context: ClientContext,
    queue: str,
    filter: DeadFilter,
    cursor: str | None,
    size: int,
    before_ms: int,
    *,
    state: MessageState = "dead",
    skip_duplicates: bool = False,
    at_ms: int | None = None,
    priority: int | None = None,
    pages: int = STEP_PAGES,
    most: int | None = None,
) -> Flow[Chosen]:
    """Read messages of a state in pages of `size`, and choose those that fit; some pages until there are any.

    At most about `most` are chosen: the last page is read again as far as they go, for the cursor behind the last one.
    """

    def read_page(limit: int) -> Flow[Page]:
        return (
            yield from context.attempt(
                context.store.peek(queue, state, limit, cursor=cursor, reason=filter.reason, group=filter.group)
            )
        )

    def is_meant(message: Stored) -> bool:
        if state != "dead" and message.published_ms > before_ms:
            return False
        if skip_duplicates and filter.reason is None and message.reason == "duplicate":
            # It was left dead because its key is in use: without a filter it would be chosen again and again.
            return False
        if (at_ms is not None and message.ready_ms == at_ms) or message.priority == priority:
            return False
        return fits(message, filter)

    if cursor is None and state == "dead" and filter.after_ms is not None:
        cursor = context.store.dead_since(filter.after_ms)
    ids: list[str] = []
    read = 0
    for _ in range(pages):
        page = yield from read_page(size)
        places = [place for place, message in enumerate(page.messages, 1) if is_meant(message)]
        if most is not None and len(places) > most:
            page = yield from read_page(places[most - 1])
        cursor = page.cursor
        for message in page.messages:
            read += 1
            if state == "dead" and (message.ended_ms or 0) > before_ms:
                return Chosen(ids, None, True, read)
            if is_meant(message):
                ids.append(message.id)
        if ids or cursor is None:
            break
    return Chosen(ids, cursor, cursor is None, read)


def reads_messages(filter: DeadFilter) -> bool:
    """Whether a filter has a part that no store applies itself."""
    return structs.replace(filter, reason=None, group=None) != DeadFilter()


def fits(message: Stored, filter: DeadFilter) -> bool:
    """Whether a message is one that a filter means; reason and group are the store's part."""
    ended, published = message.ended_ms or 0, message.published_ms
    for limit, at in ((filter.before_ms, ended), (filter.published_before_ms, published)):
        if limit is not None and at >= limit:
            return False
    for limit, at in ((filter.after_ms, ended), (filter.published_after_ms, published)):
        if limit is not None and at < limit:
            return False
    text, _ = split_error(message.error)
    wanted = ((filter.error_type, message.error_type), (filter.error, error_line(text)))
    if any(want is not None and want != (have or "") for want, have in wanted):
        return False
    if filter.key_prefix is not None and not (message.key or "").startswith(filter.key_prefix):
        return False
    if filter.type_name is None and filter.header is None:
        return True
    try:
        envelope = codec.open_envelope(message.envelope)
    except Undecodable:
        return False
    if filter.type_name is not None and envelope.type_name != filter.type_name:
        return False
    return filter.header is None or has_header(envelope.headers, filter.header)


def has_header(headers: Mapping[str, str], wanted: str) -> bool:
    """Whether a message has a header NAME=VALUE, or NAME with any value."""
    name, separator, value = (part.strip() for part in wanted.partition("="))
    return any(
        one.casefold() == name.casefold() and (not separator or content == value) for one, content in headers.items()
    )


def purge_chosen(
    context: ClientContext,
    queue: str,
    state: MessageState,
    filter: DeadFilter,
    progress: Callable[[int], object] | None = None,
) -> Flow[int]:
    """Remove the messages that a filter means and that exist at the start, step by step."""
    check_filter(filter, state)
    now = yield from context.attempt(context.store.time())
    removed, cursor = 0, None
    while True:
        chosen = yield from choose(context, queue, filter, cursor, STEP_LETTERS, now, state=state)
        cursor = chosen.cursor
        if chosen.ids and state == "dead":
            part = yield from context.operate_and_wake(
                queue,
                lambda operation, ids=chosen.ids: context.store.purge(queue, "dead", len(ids), operation, ids=ids),  # type: ignore[misc]
            )
            removed += part.removed
        elif chosen.ids:
            targets = [Target(id) for id in chosen.ids]
            woken = yield from context.operate(
                queue, lambda operation, targets=targets: context.store.cancel(queue, targets, operation)  # type: ignore[misc]
            )  # fmt: skip
            removed += _count_cancelled(context, queue, chosen.ids, woken)[0]
        if progress is not None:
            progress(removed)
        if chosen.is_last:
            break
    context.emit("purged", queue, "success" if removed else "skipped", count=removed, reason=state)
    if removed and state != "dead":
        yield from deliver_ends(context, queue)
    return removed


def count(context: ClientContext, queue: str, state: MessageState, filter: DeadFilter, limit: int) -> Flow[Counted]:
    """Count the messages of a state that a filter means, reading at most about `limit` of them."""
    check_filter(filter, state)
    total = held((yield from context.attempt(context.store.stats(queue))), state)
    if filter == DeadFilter():
        return Counted(total, total, total)
    now = yield from context.attempt(context.store.time())
    found = searched = 0
    cursor = None
    until = context.monotonic() + COUNT_SECONDS
    while True:
        chosen = yield from choose(
            context, queue, filter, cursor, min(COUNT_PAGE, limit - searched), now, state=state, pages=1
        )  # fmt: skip
        cursor, found, searched = chosen.cursor, found + len(chosen.ids), searched + chosen.read
        if chosen.is_last:
            # Where an index finds them, messages that do not fit are not read.
            return Counted(found, max(searched, total), max(searched, total))
        # A filter that the store applies itself may read much and return nothing.
        if searched >= limit or context.monotonic() > until:
            return Counted(found, searched, max(searched, total))


# ---- records -------------------------------------------------------------------------------------------------


def _save(context: ClientContext, bulk: Bulk, record: BulkRecord, owner: str | None = None) -> Flow[Bulk | None]:
    """Save a record if no one else has; None otherwise. With an owner, that client works on it for a while."""
    if owner is not None:
        record = structs.replace(record, owner=owner, lease_ms=bulk.now_ms + LEASE_MS)
    record = structs.replace(record, change=os.urandom(8).hex())
    data = msgspec.json.encode(record)
    answer = yield from save_record(context, KIND, bulk.id, data, version=bulk.version, keep=KEPT_MAX + SPARE)
    if not answer.saved or answer.record is None:
        return None
    return Bulk(bulk.id, record, answer.record.version, answer.now_ms)


def _read(record: SharedRecord, page: RecordPage) -> Bulk:
    try:
        return Bulk(record.name, msgspec.json.decode(record.data, type=BulkRecord), record.version, page.now_ms)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"bulk action {record.name} was written by another release: {error}") from None


def plain_filter(filter: DeadFilter) -> dict[str, Any]:
    """The parts of a filter that are set."""
    given: dict[str, Any] = structs.asdict(filter)
    return {name: value for name, value in given.items() if value is not None}
