"""Whether an upgrade of the processes of a store is finished, and what waits for that.

Processes of two releases run side by side until the last one of the older has ended. Until then queues do not get
settings that the older one does not know, because its workers would not follow them. A shared record of the store has
the version of the data that is confirmed: `waypost migrate --finish` writes it, and so does the creation of tables.
"""

from __future__ import annotations

from collections.abc import Collection

from waypost.errors import InvalidInput
from waypost.operations.flow import ClientContext, Flow
from waypost.release import DATA_VERSION, FINISHED


def finished_version(context: ClientContext) -> Flow[int]:
    """Return the version of the data that is confirmed, 0 for none."""
    kind, name = FINISHED
    page = yield from context.attempt(context.store.records(kind, names=(name,)))
    return int(page.records[0].data) if page.records else 0


def confirm_version(context: ClientContext) -> Flow[None]:
    """Record that every process of this store is of a release that knows this version of the data."""
    kind, name = FINISHED
    yield from context.attempt(context.store.save_record(kind, name, b"%d" % DATA_VERSION))


def check_new(context: ClientContext, new: Collection[str], error: type[InvalidInput]) -> Flow[None]:
    """Raise an error if something is set that the release before does not know, and it may still run.

    Without anything new, this reads nothing. A store without queues and schedules is new: nothing of an older release
    is in it.
    """
    if not new or (yield from finished_version(context)) >= DATA_VERSION:
        return
    if not (yield from context.attempt(context.store.queues())) and not (
        yield from context.attempt(context.store.scheduled())
    ):
        yield from confirm_version(context)
        return
    raise error(
        f"the release before this one does not know {', '.join(sorted(new))}, and its processes may still run on this "
        "store: when the last of them has ended, run `waypost migrate URL --finish`, then set this again"
    )
