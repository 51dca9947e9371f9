"""One worker: its health, and the messages that it holds."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from waypost import StoredMessage
from waypost.web import documents, reading
from waypost.web.figures import worker_document
from waypost.web.problems import Problem

if TYPE_CHECKING:
    from waypost.web.pages import Visit

#: Queues of a worker whose leases are read, and how many leases of each.
QUEUES_READ_MAX, LEASES_READ_MAX = 10, 400


async def worker_detail(place: reading.Place, name: str) -> documents.WorkerDetail:
    """A worker with what it holds now."""
    async with reading.answered():
        worker = next((one for one in await place.post.workers() if one.name == name), None)
        if worker is None:
            raise Problem(404, "unknown-worker", f"there is no worker {name!r}: it has stopped, or was never there")
        running: list[documents.RunningMessage] = []
        served = [queue.name for queue in worker.queues if queue.in_flight]
        complete = len(served) <= QUEUES_READ_MAX and not worker.unlisted
        at = worker.seen_at
        for queue in served[:QUEUES_READ_MAX]:
            at = max(at, (await place.post.stats(queue)).at)
            cursor, read = None, 0
            while read < LEASES_READ_MAX:
                page = await place.post.page(queue, "leased", cursor=cursor, limit=documents.PAGE_LIMIT_MAX)
                running += [running_message(one, at) for one in page.messages if one.worker == name]
                read, cursor = read + len(page.messages), page.cursor
                if cursor is None:
                    break
            complete = complete and cursor is None
    running.sort(key=lambda one: -(one.running_seconds or 0.0))
    return documents.WorkerDetail(worker=worker_document(worker), at=at, running=running, complete=complete)


def running_message(message: StoredMessage[Any], at: datetime) -> documents.RunningMessage:
    """A message under a lease."""
    claimed, end = message.claimed_at, message.lease_end_at
    return documents.RunningMessage(
        queue=message.queue,
        id=message.id,
        key=message.key,
        group=message.group,
        deliveries=message.deliveries,
        claimed_at=claimed,
        running_seconds=None if claimed is None else max(0.0, (at - claimed).total_seconds()),
        lease_left_seconds=None if end is None else max(0.0, (end - at).total_seconds()),
        cancel_requested=message.cancel_requested,
    )


async def show_worker(visit: Visit) -> Response:
    """One worker."""
    detail = await worker_detail(visit.here, visit.path["name"])
    return visit.draw("worker.html", title=f"Worker {detail.worker.name}", detail=detail)
