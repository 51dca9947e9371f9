"""The records of workers: two keys in their own slot, separate from those of any queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from waypost import policy
from waypost.store.port import Call, Heartbeat
from waypost.store.register import pack, registered
from waypost.store.valkey.command import ValkeyCall, command
from waypost.store.valkey.scripts import script
from waypost.values import WorkerRecord

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
    return _call(store, "heartbeat", arguments, int)


def unregister(store: ValkeyStore, name: str) -> Call[bool]:
    """Remove a worker at once."""
    return _call(store, "unregister", [name.encode()], bool)


def workers(store: ValkeyStore) -> Call[list[WorkerRecord]]:
    """Return the workers that have not expired, by name."""

    def decode(reply: Any) -> list[WorkerRecord]:
        names, untils, records = reply
        found = [
            registered(name.decode(), record[8:], int.from_bytes(record[:8], "big"), int(until))
            for name, until, record in zip(names, untils, records, strict=True)
            if record is not None
        ]
        return sorted(found, key=lambda worker: worker.name)

    return _call(store, "workers", [b"%d" % policy.WORKERS_MAX], decode)
