"""The records of workers: two keys in their own slot, separate from those of any queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from waypost import policy
from waypost.store.port import Call, Heartbeat
from waypost.store.register import pack, registered
from waypost.store.valkey.command import ValkeyCall, command
from waypost.store.valkey.scripts import script
from waypost.values import Requested, WorkerRecord, WorkerRequest

if TYPE_CHECKING:
    from waypost.store.valkey.store import ValkeyStore

T = TypeVar("T")


def _call(store: ValkeyStore, verb: str, arguments: Sequence[bytes], decode: Callable[[Any], T]) -> Call[T]:
    # No queue has this tag: those have a colon and their name in it.
    base = f"{{{store.namespace}}}:"
    keys = [(base + name).encode() for name in ("workers", "records")]
    if store.source.cluster:
        # Never written: so that no script begins while the slot is moving, as for the keys of a queue.
        keys.append(f"{base}never".encode())
    clock = b"%d" % store.clock() if store.clock else b""
    text = script(verb)
    packed = command(b"EVALSHA", text.sha, b"%d" % len(keys), *keys, clock, b"", b"", b"", *arguments)
    return ValkeyCall(verb, "", packed, decode, text, place=keys[0])


def heartbeat(store: ValkeyStore, heartbeat: Heartbeat, ttl_ms: int) -> Call[int]:
    """Keep a worker until its expiry."""
    arguments = [heartbeat.name.encode(), pack(heartbeat), b"%d" % ttl_ms, b"%d" % policy.WORKERS_MAX]
    return _call(store, "heartbeat", arguments, lambda reply: int(reply[0]))


def request_worker(store: ValkeyStore, name: str, request: WorkerRequest) -> Call[bool]:
    """Request something of a worker."""
    return _call(store, "request_worker", [name.encode(), request.encode()], bool)


def unpack_request(packed: bytes) -> Requested | None:
    """What was requested of a worker, and when."""
    if not packed:
        return None
    return Requested(cast(WorkerRequest, packed[8:].decode()), int.from_bytes(packed[:8], "big"))


def unregister(store: ValkeyStore, name: str) -> Call[bool]:
    """Remove a worker at once."""
    return _call(store, "unregister", [name.encode()], bool)


def workers(store: ValkeyStore) -> Call[list[WorkerRecord]]:
    """Return the workers that have not expired, by name."""

    def decode(reply: Any) -> list[WorkerRecord]:
        found = []
        for name, until, record, packed in zip(*reply, strict=True):
            if record is not None:
                requested = unpack_request(packed)
                request = (None, None) if requested is None else (requested.request, requested.at_ms)
                at_ms = int.from_bytes(record[:8], "big")
                found.append(registered(name.decode(), record[8:], at_ms, int(until), *request))
        return sorted(found, key=lambda worker: worker.name)

    return _call(store, "workers", [b"%d" % policy.WORKERS_MAX], decode)
