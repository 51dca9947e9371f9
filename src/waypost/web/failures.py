"""What failed in the last minutes, over all queues: by queue and error, with the newest message of each.

The counters of the figures say which queues have failures. Of these a few are read: their newest dead letters, again
only when one has died or left since, or a minute later. So open pages cost the store nothing while nothing fails.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from waypost import StoredMessage
from waypost.errors import WaypostError
from waypost.formatting import error_line
from waypost.web import documents
from waypost.web.figures import RECENT_MINUTES, Figures
from waypost.web.problems import Problem
from waypost.web.reading import Place, answered

log = logging.getLogger("waypost.web")

#: Queues whose dead letters are read, those with the most failures; and groups that are listed.
QUEUES_MAX, GROUPS_MAX = 5, 8
#: Dead letters that are read of each queue. Of a queue with more, those of the last seconds.
LETTERS_MAX = 100
NEWEST = timedelta(seconds=30)


async def recent_failures(place: Place) -> documents.Failures:
    """What failed in the last minutes."""
    await place.watch.refresh()
    assessed = {name: place.watch.assess(name) for name in place.watch.readings}
    counts = {name: (one.died, one.retried) for name, one in assessed.items() if one.died or one.retried}
    worst = sorted(counts, key=lambda name: (-counts[name][0], -counts[name][1], name))
    groups: list[documents.Failure] = []
    # A queue may be removed while the letters of another are read.
    readings = place.watch.readings
    for name in [name for name in worst if counts[name][0]][:QUEUES_MAX]:
        groups += await read_groups(place, readings[name].figures)
    place.watch.failures = {name: known for name, known in place.watch.failures.items() if name in counts}
    groups.sort(key=lambda one: one.last_at, reverse=True)
    return documents.Failures(
        minutes=RECENT_MINUTES,
        groups=groups[:GROUPS_MAX],
        queues=[
            documents.FailingQueue(queue=name, died=counts[name][0], retried=counts[name][1])
            for name in worst[: documents.PAGE_LIMIT]
        ],
    )  # fmt: skip


async def failures_if_known(place: Place) -> documents.Failures:
    """The same for a page that has more to show; nothing while the store cannot be read."""
    try:
        if place.watch.error is None:
            return await recent_failures(place)
    except (Problem, WaypostError) as error:
        log.debug("the failures of store %s cannot be read now: %s", place.name, error)
    return documents.Failures(minutes=RECENT_MINUTES, groups=[], queues=[])


async def read_groups(place: Place, figures: Figures) -> list[documents.Failure]:
    """The newest dead letters of a queue by reason and error, as they were read for these figures."""
    ledger = figures.ledger
    state = (ledger.dead, ledger.dead_kept, figures.at.replace(second=0, microsecond=0))
    known = place.watch.failures.get(figures.name)
    if known is not None and known[0] == state:
        return known[1]
    groups: dict[tuple[str, str | None, str | None], list[StoredMessage[Any]]] = {}
    for letter in await newest_letters(place, figures):
        groups.setdefault((letter.reason or "", letter.error_type, error_line(letter.error)), []).append(letter)
    found = [
        documents.Failure(
            queue=figures.name, reason=reason, error_type=error_type, error=error, count=len(letters),
            last_at=letters[-1].ended_at or letters[-1].published_at, id=letters[-1].id,
        )
        for (reason, error_type, error), letters in groups.items()
    ]  # fmt: skip
    place.watch.failures[figures.name] = (state, found)
    return found


async def newest_letters(place: Place, figures: Figures) -> list[StoredMessage[Any]]:
    """The dead letters of the last minutes, oldest first; of very many those of the last seconds."""
    async with answered():
        since = figures.at - timedelta(minutes=RECENT_MINUTES)
        page = await place.post.page(figures.name, "dead", died_after=since, limit=LETTERS_MAX)
        if page.cursor is not None:
            latest = await place.post.page(figures.name, "dead", died_after=figures.at - NEWEST, limit=LETTERS_MAX)
            page = latest if latest.messages else page
    return page.messages
