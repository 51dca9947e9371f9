"""Records of workers in stores: one for each worker, with its arrival and expiry.

A record contains ages, never times: the store adds its own time. So a worker with a wrong clock
is listed correctly, and no store has to decode a record.
"""

from __future__ import annotations

from typing import cast

import msgspec
from msgspec import structs

from waypost import policy
from waypost.checks import check_text
from waypost.errors import ForeignData, InvalidInput
from waypost.policy import WORKER_CHARACTERS_MAX
from waypost.store.port import Heartbeat
from waypost.values import HealthStatus, WorkerQueueRecord, WorkerRecord, WorkerRequest, WorkerState

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Heartbeat).decode


def pack(heartbeat: Heartbeat) -> bytes:
    """Encode a heartbeat as a record; raises if it is not valid."""
    check_text("the name of a worker", heartbeat.name, WORKER_CHARACTERS_MAX)
    record = _encode(heartbeat)
    if len(record) > policy.WORKER_BYTES_MAX:
        raise InvalidInput(
            f"the heartbeat of worker {heartbeat.name} takes {len(record)} bytes, the limit is "
            f"{policy.WORKER_BYTES_MAX}; name fewer queues"
        )
    return record


def fitting(heartbeat: Heartbeat) -> Heartbeat:
    """Return the heartbeat with as many of its queues as fit into a record."""
    size, room = len(_encode(heartbeat)), policy.WORKER_BYTES_MAX
    if size <= room:
        return heartbeat
    empty = len(_encode(structs.replace(heartbeat, queues=(), unlisted=2**31)))
    kept = 0
    for queue in heartbeat.queues:
        empty += len(_encode(queue))
        if empty + 8 > room:
            break
        kept += 1
    return structs.replace(heartbeat, queues=heartbeat.queues[:kept], unlisted=len(heartbeat.queues) - kept)


def registered(
    name: str, record: bytes, at_ms: int, until_ms: int, request: str | None = None, request_ms: int | None = None
) -> WorkerRecord:
    """Decode the record of a worker."""
    try:
        heartbeat = _decode(record)
    except msgspec.DecodeError:
        raise ForeignData(f"the record of worker {name} was not written by waypost; nothing was changed") from None
    started_ms = at_ms if heartbeat.started_ms is None else heartbeat.started_ms
    # A request from before its start was for another worker of its name.
    is_current = request is not None and request_ms is not None and request_ms >= started_ms
    return WorkerRecord(
        name, heartbeat.host, heartbeat.pid, heartbeat.version, cast(WorkerState, heartbeat.state),
        cast(HealthStatus, heartbeat.status), list(heartbeat.reasons), heartbeat.processes,
        started_ms, at_ms, until_ms,
        [
            WorkerQueueRecord(
                queue.name, queue.concurrency, queue.in_flight, queue.handled,
                None if queue.claim_age_ms is None else at_ms - queue.claim_age_ms,
            )
            for queue in heartbeat.queues
        ],
        heartbeat.unlisted, cast(WorkerRequest, request) if is_current else None,
    )  # fmt: skip
