"""What the API and the pages show, read through the client: one function for each document."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from msgspec import Struct, structs

from waypost import AsyncWaypost, CatchUp, StoredMessage
from waypost import Schedule as ClientSchedule
from waypost.errors import InvalidInput, ResultNotKept, Undecodable, WaypostError
from waypost.formatting import error_line, format_count
from waypost.identity import is_message_id
from waypost.policy import format_retry
from waypost.values import MessageState, chain_id, split_chain_id
from waypost.web import alerts, documents, lake
from waypost.web.chain_graph import make_chain
from waypost.web.figures import (
    Figures,
    HistoryEvent,
    history_document,
    history_events,
    seconds_or_none,
    settings_document,
    worker_document,
)
from waypost.web.problems import RETRY_SECONDS, Problem
from waypost.web.timeline import make_timeline
from waypost.web.watching import ANSWER_SECONDS, StoreWatch

#: A body is shown up to this size.
BODY_BYTES_MAX = 64 * 1024
#: Dead letters that are read to group them, and how long that may take.
GROUPED_MAX, GROUPED_SECONDS = 2_000, 1.0
GROUPED_PAGE = 200
SAMPLES = 3
#: The parts into which the time of the letters that were read is divided.
SPANS = 24
STATES: tuple[MessageState, ...] = ("ready", "leased", "delayed", "waiting", "dead", "done")


class Place(Struct, frozen=True):
    """A store that the server shows: its name, its client, and what is known of it."""

    name: str
    post: AsyncWaypost
    watch: StoreWatch
    #: Patterns of queues whose bodies and headers are never shown.
    hidden_bodies: tuple[str, ...] = ()
    #: Where its lake is, if it has one.
    lake: str | None = None
    #: What carries on its bulk actions (`bulk.BulkRunner`).
    bulk: Any = None

    async def may_show_bodies(self, queue: str, *, allowed: bool) -> bool:
        """Whether bodies of a queue may be shown to a user with or without the scope for it.

        Neither the server nor the queue may hide them: the scope does not override that.
        """
        if not allowed or any(fnmatchcase(queue, pattern) for pattern in self.hidden_bodies):
            return False
        return not (await self.post.policy(queue)).hide_bodies


@contextlib.asynccontextmanager
async def answered() -> AsyncIterator[None]:
    """A read that ends within `ANSWER_SECONDS`: a page must say that the store is away, not hang."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            yield
    except TimeoutError:
        raise Problem(
            503, "store-unavailable", f"the store has not answered for {ANSWER_SECONDS:.0f} seconds",
            headers={"Retry-After": str(RETRY_SECONDS)},
        ) from None  # fmt: skip


# ---- queues --------------------------------------------------------------------------------------------------


async def health(place: Place) -> documents.Health:
    """Whether anything is wrong."""
    watch = place.watch
    await watch.refresh()
    totals = watch.totals()
    others = alerts.store_alerts(watch.workers, watch.schedules, totals.at, watch.error)
    # The sentence names the queue that the list begins with.
    by_queue = {name: watch.alerts(name) for name in watch.ranked()}
    level, sentence = alerts.sentence(by_queue, others, unread=watch.unread, handled=totals.handled)
    return documents.Health(
        level=level,
        sentence=sentence,
        queues=len(watch.names),
        unread=watch.unread,
        ready=totals.ready,
        running=totals.running,
        dead=totals.dead,
        workers=len(watch.workers),
        alerts=others,
    )


def queue_document(place: Place, name: str) -> documents.Queue:
    """A queue of the list, from figures that were read."""
    figures, found = place.watch.readings[name].figures, place.watch.assess(name)
    ledger = figures.ledger
    return documents.Queue(
        name=name,
        level=found.level,
        alerts=found.alerts,
        paused=figures.paused,
        ready=ledger.ready,
        delayed=ledger.delayed,
        waiting=ledger.waiting,
        leased=ledger.leased,
        dead=ledger.dead_kept,
        oldest_ready_seconds=figures.oldest_ready,
        published_rate=figures.rate("published"),
        done_rate=figures.rate("done"),
        workers=len(place.watch.workers_of(name)),
        read_at=figures.at,
    )


def worst_queue(place: Place) -> str | None:
    """The queue that needs attention first; None if none was read."""
    return next(iter(place.watch.ranked()), None)


async def queues(place: Place, query: documents.QueuesQuery) -> documents.Queues:
    """A page of queues. Those that it shows are read first."""
    await refresh_page(place, query)
    if place.watch.error is not None and not place.watch.readings:
        raise Problem(503, "store-unavailable", place.watch.error, headers={"Retry-After": str(RETRY_SECONDS)})
    names = chosen_queues(place, query)
    start = read_offset(query.cursor, len(names))
    page = [queue_document(place, name) for name in names[start : start + query.limit]]
    end = start + len(page)
    return documents.Queues(queues=page, total=len(names), next=str(end) if end < len(names) else None)


async def refresh_page(place: Place, query: documents.QueuesQuery) -> None:
    """Have the queues read that a page shows, as far as that is known before, and then others."""
    names = chosen_queues(place, query)
    start = read_offset(query.cursor, len(names))
    await place.watch.refresh(names[start : start + query.limit])


def chosen_queues(place: Place, query: documents.QueuesQuery) -> list[str]:
    """The names of the queues that were read and that a query means, in its order."""
    ordered = place.watch.ranked() if query.order == "alerts" else sorted(place.watch.readings)
    wanted = query.name_contains.lower()
    return [name for name in ordered if wanted in name.lower()] if wanted else ordered


async def named_queues(place: Place, text: str) -> list[documents.Queue]:
    """Queues whose name contains a text, as many as a page shows; only these are read."""
    wanted = text.lower()
    names = [name for name in await place.watch.list_names() if wanted in name.lower()][: documents.PAGE_LIMIT]
    await place.watch.read_some(names)
    return [queue_document(place, name) for name in names if name in place.watch.readings]


def read_offset(cursor: str | None, length: int) -> int:
    """How many entries of a list that this server holds were shown before."""
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdecimal()) or len(cursor) > 9:
        raise Problem(422, "invalid-input", "this cursor was not given by this list: begin without one")
    return min(int(cursor), length)


async def known_queue(place: Place, name: str) -> Figures:
    """The figures of a queue that exists, read now; a `Problem` otherwise."""
    is_known = await place.watch.read_queue(name)
    if place.watch.error is not None:
        raise Problem(503, "store-unavailable", place.watch.error, headers={"Retry-After": str(RETRY_SECONDS)})
    if not is_known:
        raise Problem(404, "unknown-queue", f"there is no queue {name!r} in this store")
    return place.watch.readings[name].figures


async def queue_detail(place: Place, name: str, query: documents.QueueQuery) -> documents.QueueDetail:
    """A queue with everything that one page shows of it."""
    figures = await known_queue(place, name)
    # Before the next reads: the queue may be removed meanwhile.
    queue = queue_document(place, name)
    async with answered():
        policy = await place.post.policy(name)
        stats = await place.post.stats(name, query.minutes) if query.minutes else None
    settings, ledger = settings_document(policy), figures.ledger
    history = documents.QueueHistory(
        queue=name, at=figures.at, minutes=[], backlog=[], backlog_known_from=None, changes=[]
    )
    if stats is not None:
        history = history_document(stats)
    return documents.QueueDetail(
        queue=queue,
        settings=settings,
        ledger=documents.LedgerSums(
            **{field: getattr(ledger, field) for field in documents.LedgerSums.__struct_fields__}
        ),
        limits=limits_of(figures, settings, queue.workers),
        next_due_seconds=figures.next_due,
        next_lease_end_seconds=figures.next_lease,
        sleeping_workers=figures.sleepers,
        journal_readers=figures.journal_readers,
        journal_last=figures.journal_last,
        minutes=history.minutes,
        history=history,
    )


def limits_of(figures: Figures, settings: documents.Settings, workers: int) -> list[str]:
    """What keeps messages of a queue from being handed out faster; a pause is among its alerts."""
    ledger, found = figures.ledger, list[str]()
    if settings.max_running is not None:
        reached = " This limit is reached." if ledger.leased >= settings.max_running else ""
        found.append(f"At most {settings.max_running:,} run at once (max_running); {ledger.leased:,} do now.{reached}")
    if settings.rate is not None:
        found.append(f"At most {settings.rate} are handed out (rate).")
    pending = ledger.ready + ledger.delayed + ledger.waiting
    if settings.max_pending is not None and pending >= settings.max_pending:
        ways = {"raise": "are refused", "block": "wait for room", "drop_oldest": "drop the oldest message"}
        found.append(f"It is full (max_pending {settings.max_pending:,}): publishes {ways[settings.overload]}.")
    if ledger.ready and workers and not figures.sleepers and not found:
        found.append(f"{format_count(workers, 'worker serves it', 'workers serve it')}, and all of them are busy.")
    return found + limits_of_groups(figures, settings)


def limits_of_groups(figures: Figures, settings: documents.Settings) -> list[str]:
    """What keeps messages of single groups from being handed out, as far as the settings of the queue say it."""
    found = list[str]()
    if settings.order is not None:
        failed = "holds its group" if settings.on_failure == "hold" else "lets the next one pass"
        found.append(f"Messages of a group are handed out one at a time (order); one that failed {failed}.")
    if settings.group_max_running is not None:
        found.append(f"At most {settings.group_max_running:,} of each group run at once (group_max_running).")
    if settings.group_rate is not None:
        found.append(f"At most {settings.group_rate} of each group are handed out (group_rate).")
    if settings.group_max_pending is not None:
        found.append(f"At most {settings.group_max_pending:,} of each group may wait (group_max_pending).")
    if (found or settings.fair) and figures.ledger.ready and figures.sleepers:
        found.append(
            "Messages are ready and workers wait for some: their groups are held, paused or at a limit, as "
            "`waypost groups list` shows."
        )
    return found


# ---- messages ------------------------------------------------------------------------------------------------


def body_document(data: bytes, content_type: str) -> documents.Body:
    """A body as far as it is shown: as text where it is text."""
    form: documents.BodyForm = "json" if content_type == "application/json" else "text"
    visible = data[:BODY_BYTES_MAX]
    if content_type == "application/octet-stream":
        form, text = "base64", base64.b64encode(visible).decode()
    else:
        # A character that the cut splits is left out.
        text = visible.decode(errors="ignore" if len(visible) < len(data) else "replace")
    return documents.Body(
        form=form, content_type=content_type, size=len(data), text=text, truncated=len(visible) < len(data)
    )


def hidden_body(size: int) -> documents.Body:
    """A body that this user may not see."""
    return documents.Body(form="hidden", content_type="", size=size, text=None, truncated=False)


def message_document(message: StoredMessage[Any], *, show_bodies: bool) -> documents.Message:
    """A message of the store. `show_bodies` is what `Place.may_show_bodies` says of its queue."""
    type_name = correlation_id = headers = retry = timeout = None
    try:
        envelope = message.open()
    except Undecodable:
        body = documents.Body(
            form="unreadable", content_type="", size=message.size, text=None, truncated=False
        )  # fmt: skip
    else:
        type_name, retry, timeout = envelope.type_name, envelope.retry, envelope.timeout
        body = body_document(envelope.data, envelope.content_type) if show_bodies else hidden_body(len(envelope.data))
        if show_bodies:
            headers, correlation_id = dict(envelope.headers), envelope.correlation_id
    return documents.Message(
        queue=message.queue,
        id=message.id,
        state=message.state,
        key=message.key,
        group=message.group,
        priority=message.priority,
        token=str(message.token),
        deliveries=message.deliveries,
        attempts=message.attempts,
        published_at=message.published_at,
        ready_at=message.ready_at,
        expires_at=message.expires_at,
        claimed_at=message.claimed_at,
        lease_ends_at=message.lease_end_at,
        worker=message.worker,
        cancel_requested=message.cancel_requested,
        ended_at=message.ended_at,
        reason=message.reason,
        error_type=message.error_type,
        error=message.error,
        # The errors that led to this one may have texts with data that its own text leaves out.
        traceback=message.traceback if show_bodies else None,
        note=message.note,
        type_name=type_name,
        correlation_id=correlation_id,
        retry=None if retry is None else format_retry(retry),
        timeout=timeout,
        headers=headers,
        body=body,
    )


async def messages(place: Place, queue: str, query: documents.MessagesQuery, *, bodies: bool) -> documents.Messages:
    """A page of messages."""
    await known_queue(place, queue)
    filters = {"id": query.id, "key": query.key, "group": query.group, "reason": query.reason}
    given: Any = {name: value for name, value in filters.items() if value is not None}
    async with answered():
        show_bodies = await place.may_show_bodies(queue, allowed=bodies)
        page = await place.post.page(queue, query.state, cursor=query.cursor, limit=query.limit, **given)
    found = [message_document(one, show_bodies=show_bodies) for one in page.messages]
    return documents.Messages(messages=found, next=page.cursor)


async def find_message(place: Place, queue: str, id: str) -> StoredMessage[Any] | None:
    """The message of an id in a queue, whatever its state."""
    for state in STATES:
        cursor: str | None = None
        while True:
            page = await place.post.page(queue, state, id=id, limit=1, cursor=cursor)
            if page.messages:
                return page.messages[0]
            cursor = page.cursor
            if cursor is None:
                break
    return None


async def message_detail(place: Place, queue: str, id: str, *, bodies: bool) -> documents.MessageDetail:
    """A message and its history: of the store, or else of the lake."""
    try:
        figures = await known_queue(place, queue)
    except Problem as problem:
        if problem.kind != "unknown-queue" or place.lake is None:
            raise
        return await lake_detail(place, queue, id)
    async with answered():
        stored = await find_message(place, queue, id)
        events = history_events(await place.post.history(queue, id))
        result, no_result = _NO_RESULT, None
        try:
            result = await place.post.result(queue, id, default=_NO_RESULT)
        except (ResultNotKept, Undecodable) as error:
            no_result = error
        policy = settings_document(await place.post.policy(queue))
        show_bodies = await place.may_show_bodies(queue, allowed=bodies)
        chain = await find_chain(place, queue, id, events)
    if stored is None and not events:
        if place.lake is not None:
            return await lake_detail(place, queue, id)
        raise Problem(404, "unknown-message", f"queue {queue} has no message {id}, and its journal has no event of it")
    condition = stored.state if stored is not None else events[-1].event
    visible = None
    if result is not _NO_RESULT:
        data = msgspec.json.encode(result, enc_hook=repr)
        visible = body_document(data, "application/json") if show_bodies else hidden_body(len(data))
    return documents.MessageDetail(
        queue=queue,
        id=id,
        message=None if stored is None else message_document(stored, show_bodies=show_bodies),
        condition=condition,
        max_deliveries=policy.max_deliveries,
        result=visible,
        result_error=describe_missing(no_result, show_bodies=show_bodies),
        timeline=make_timeline(events, figures.at),
        chain=chain,
        from_lake=False,
    )


def describe_missing(error: WaypostError | None, *, show_bodies: bool) -> str | None:
    """Why the result of a message cannot be shown. The text of the error may hold a part of the result."""
    if error is None:
        return None
    text = "was not kept" if isinstance(error, ResultNotKept) else "cannot be read"
    return f"The result {text}: {error}" if show_bodies else f"The result {text}."


async def lake_detail(place: Place, queue: str, id: str) -> documents.MessageDetail:
    """A message that only the lake knows."""
    events = (await read_lake(place, id)).get(queue, [])
    if not events:
        raise Problem(404, "unknown-message", f"queue {queue}, its journal and the lake have no message {id}")
    timeline = make_timeline(events, events[-1].at)
    return documents.MessageDetail(
        queue=queue, id=id, message=None, condition=events[-1].event, max_deliveries=None, result=None,
        result_error=None, timeline=timeline, chain=None, from_lake=True,
    )  # fmt: skip


async def read_lake(place: Place, id: str) -> dict[str, list[HistoryEvent]]:
    """The events that the lake of a store has of a message, by queue."""
    return {} if place.lake is None or not is_message_id(id) else await lake.read_history(place.lake, id)


async def find_chain(place: Place, queue: str, id: str, events: Sequence[HistoryEvent]) -> documents.Chain | None:
    """The chain of a message, from its own queue and from the one where the chain began."""
    links = await place.post.links(queue, id)
    # A message that has left its queue is known as one of a chain by its events.
    chain = links.chain or next((event.chain for event in events if event.chain is not None), None)
    first_links = None
    if chain is not None and chain != chain_id(queue, id):
        first_links = await place.post.links(*split_chain_id(chain))
    tokens = {event.token for event in events if event.token}
    return make_chain(queue, id, structs.replace(links, chain=chain), first_links, tokens)


_NO_RESULT: Any = object()


async def search(place: Place, id: str) -> documents.SearchAnswer:
    """The queues that know a message."""
    async with answered():
        try:
            found = await place.post.find(id)
        except InvalidInput:
            raise Problem(422, "invalid-id", f"{id!r} is not the id of a message: an id has 24 characters") from None
    names = await place.watch.list_names()
    return documents.SearchAnswer(
        query=id,
        by="id",
        found=[
            documents.Found(queue=one.queue, id=one.id, condition=one.state or one.ended or "known by its journal")
            for one in found
        ],
        queues_searched=len(names),
    )


GroupKey = tuple[str, str | None, str | None]


async def grouped_letters(place: Place, queue: str) -> AsyncIterator[tuple[GroupKey, StoredMessage[Any]]]:
    """The oldest dead letters of a queue, each with its reason, error type and error, for a bounded time."""
    until, cursor, searched = time.monotonic() + GROUPED_SECONDS, None, 0
    while searched < GROUPED_MAX and time.monotonic() < until:
        async with answered():
            page = await place.post.page(queue, "dead", cursor=cursor, limit=GROUPED_PAGE)
        for letter in page.messages:
            yield (letter.reason or "", letter.error_type, error_line(letter.error)), letter
        searched += len(page.messages)
        cursor = page.cursor
        if cursor is None:
            return


async def dead_groups(place: Place, queue: str) -> documents.DeadGroups:
    """The dead letters of a queue by reason and error, oldest first, as many as can be read in bounded time."""
    figures = await known_queue(place, queue)
    groups: dict[GroupKey, list[StoredMessage[Any]]] = {}
    times: dict[GroupKey, list[datetime]] = {}
    async for key, letter in grouped_letters(place, queue):
        times.setdefault(key, []).append(letter.ended_at or letter.published_at)
        # The first ones are samples, the last one tells when it last happened.
        groups.setdefault(key, [])[SAMPLES:] = [letter]
    searched = sum(map(len, times.values()))
    every = [at for one in times.values() for at in one]
    first, last = min(every, default=None), max(every, default=None)
    found = [
        dead_group(key, letters, times[key], counts_over_time(times[key], first, last))
        for key, letters in groups.items()
    ]
    found.sort(key=lambda group: -group.count)
    return documents.DeadGroups(
        queue=queue, groups=found, searched=searched, total=max(searched, figures.ledger.dead_kept)
    )


def dead_group(
    key: GroupKey, letters: Sequence[StoredMessage[Any]], times: Sequence[datetime], over_time: list[int]
) -> documents.DeadGroup:
    """One group, from its first letters and its last."""
    reason, error_type, error = key
    return documents.DeadGroup(
        reason=reason,
        error_type=error_type,
        error=error,
        count=len(times),
        over_time=over_time,
        first_at=letters[0].ended_at,
        last_at=letters[-1].ended_at,
        samples=[letter.id for letter in letters[:SAMPLES]],
    )


def counts_over_time(times: Sequence[datetime], first: datetime | None, last: datetime | None) -> list[int]:
    """How many letters died in each part of a time."""
    counts = [0] * SPANS
    if first is None or last is None:
        return counts
    length = max(last - first, timedelta(seconds=1)) / SPANS
    for at in times:
        counts[min(SPANS - 1, int((at - first) / length))] += 1
    return counts


async def timers(place: Place) -> documents.Timers:
    """The queues that have timers."""
    await place.watch.refresh()
    found = [
        documents.TimerQueue(queue=name, timers=one.figures.ledger.delayed, next_due_seconds=one.figures.next_due)
        for name, one in place.watch.readings.items()
        if one.figures.ledger.delayed
    ]
    found.sort(key=lambda one: (one.next_due_seconds is None, one.next_due_seconds or 0.0, one.queue))
    return documents.Timers(queues=found[: documents.PAGE_LIMIT_MAX], total=len(found))


# ---- workers and schedules -------------------------------------------------------------------------------------


async def workers(place: Place) -> documents.Workers:
    """The registered workers, those with alerts first."""
    async with answered():
        found = [worker_document(one) for one in await place.post.workers()]
    order = ("red", "degraded", "green")
    found.sort(key=lambda one: (order.index(one.status) if one.status in order else 0, one.name))
    releases = Counter(one.version for one in found)
    return documents.Workers(workers=found, releases=dict(releases.most_common()))


async def schedules(place: Place, query: documents.SchedulesQuery) -> documents.Schedules:
    """The schedules of a store or a queue."""
    async with answered():
        found = await place.post.schedules(query.queue, count=query.fires)
    return documents.Schedules(schedules=[schedule_document(one) for one in found])


def schedule_document(schedule: ClientSchedule) -> documents.Schedule:
    """A schedule as the API shows it; its body is not a part of it."""
    missed = schedule.missed
    return documents.Schedule(
        missed=f"catch up {missed.max_catchup}" if isinstance(missed, CatchUp) else missed,
        every=seconds_or_none(schedule.every),
        grace=schedule.grace.total_seconds(),
        jitter=schedule.jitter.total_seconds(),
        expires=seconds_or_none(schedule.expires),
        retry=None if schedule.retry is None else format_retry(schedule.retry),
        timeout=seconds_or_none(schedule.timeout),
        **{
            field: getattr(schedule, field)
            for field in documents.Schedule.__struct_fields__
            if field not in ("missed", "every", "grace", "jitter", "expires", "retry", "timeout")
        },
    )  # fmt: skip
