"""Timers in the order of their due times: of one queue, or of all."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from waypost import StoredMessage
from waypost.errors import Undecodable
from waypost.web import documents, reading

if TYPE_CHECKING:
    from waypost.web.pages import Visit

#: Queues whose timers are read for one list of all; the list is exact as far as it goes.
QUEUES_READ_MAX = 16


def timer_document(message: StoredMessage[Any], at: datetime) -> documents.Timer:
    """A message that is not due."""
    try:
        type_name = message.open().type_name
    except Undecodable:
        type_name = None
    return documents.Timer(
        queue=message.queue,
        id=message.id,
        key=message.key,
        group=message.group,
        due_at=message.ready_at,
        due_in_seconds=max(0.0, (message.ready_at - at).total_seconds()),
        attempts=message.attempts,
        type_name=type_name,
    )


async def next_timers(place: reading.Place, query: documents.TimersQuery) -> documents.NextTimers:
    """The soonest timers. Of all queues those with the soonest one are read, and the list ends where others begin."""
    if query.queue is not None:
        figures = await reading.known_queue(place, query.queue)
        async with reading.answered():
            page = await place.post.page(query.queue, "delayed", cursor=query.cursor, limit=query.limit)
        found = [timer_document(one, figures.at) for one in page.messages]
        return documents.NextTimers(timers=found, next=page.cursor, complete=page.cursor is None)
    await place.watch.refresh()
    waiting = sorted(
        (one.figures.next_due, name, one.figures.at)
        for name, one in place.watch.readings.items()
        if one.figures.ledger.delayed and one.figures.next_due is not None
    )
    timers: list[documents.Timer] = []
    complete = len(waiting) <= QUEUES_READ_MAX
    async with reading.answered():
        for _, name, at in waiting[:QUEUES_READ_MAX]:
            page = await place.post.page(name, "delayed", limit=query.limit)
            timers += [timer_document(one, at) for one in page.messages]
            complete = complete and page.cursor is None
    if len(waiting) > QUEUES_READ_MAX:
        # A queue that was not read has none before this.
        timers = [one for one in timers if one.due_in_seconds <= waiting[QUEUES_READ_MAX][0]]
    timers.sort(key=lambda one: (one.due_at, one.queue, one.id))
    complete = complete and len(timers) <= query.limit
    return documents.NextTimers(timers=timers[: query.limit], next=None, complete=complete)


async def show_timers(visit: Visit) -> Response:
    """What comes due, soonest first."""
    query = visit.query(documents.TimersQuery)
    listed = await reading.timers(visit.here)
    soonest = await next_timers(visit.here, query)
    saved = await visit.saved_filters()
    return visit.draw("timers.html", title="Timers", listed=listed, soonest=soonest, query=query, saved=saved)
