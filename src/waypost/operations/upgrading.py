"""Whether an upgrade of all processes of a store is finished, and which settings must wait for that.

Processes of two releases run side by side until the last one of the older release has ended. Until then queues get no
settings that the older release does not know, because its workers would ignore them. A shared record of the store has
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
    """Raise an error if a setting is used that the previous release does not know, and that release may still run.

    Without such a setting nothing is read. A store without queues and schedules is new: it has no data of an older
    release.
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
