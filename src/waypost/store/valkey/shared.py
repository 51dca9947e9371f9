"""Shared records: two keys for each kind, beside those of workers, separate from those of any queue."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from waypost.store.port import Call, read_record_cursor, record_cursor
from waypost.store.valkey.command import ValkeyCall, command
from waypost.store.valkey.scripts import script
from waypost.values import RecordPage, RecordSaved, SharedRecord

if TYPE_CHECKING:
    from waypost.store.valkey.store import ValkeyStore

T = TypeVar("T")

#: Version, creation, expiry or 0.
_HEAD = struct.Struct(">QQQ")


def _call(
    store: ValkeyStore,
    verb: str,
    kind: str,
    arguments: Sequence[bytes],
    decode: Callable[[Any], T],
    on_disk: bytes | None,
) -> Call[T]:
    # One slot for each kind. No queue has this tag: those have a colon and their name in it.
    base = f"{{{store.namespace}}}:shared:{kind}"
    keys = [base.encode(), f"{base}:data".encode()]
    if store.source.cluster:
        # Never written: so that no script begins while the slot is moving, as for the keys of a queue.
        keys.append(f"{{{store.namespace}}}:never".encode())
    clock = b"%d" % store.clock() if store.clock else b""
    text = script(verb)
    packed = command(b"EVALSHA", text.sha, b"%d" % len(keys), *keys, clock, b"", b"", b"", *arguments)
    return ValkeyCall(verb, "", packed, decode, text, on_disk=on_disk, place=keys[0])


def _record(name: bytes, packed: bytes) -> SharedRecord:
    version, created, until = _HEAD.unpack_from(packed)
    return SharedRecord(name.decode(), packed[_HEAD.size :], version, created, until or None)


def save(
    store: ValkeyStore,
    kind: str,
    name: str,
    data: bytes | None,
    version: int | None,
    ttl_ms: int | None,
    keep: int,
    on_disk: bytes | None,
) -> Call[RecordSaved]:
    """Save or remove a record, if it has the version that is expected."""
    named = name.encode()

    def decode(reply: Any) -> RecordSaved:
        now, saved, packed = reply
        return RecordSaved(bool(saved), _record(named, packed) if packed else None, now)

    arguments = [
        named, b"" if version is None else b"%d" % version, b"%d" % (ttl_ms or 0), b"%d" % keep,
        *(() if data is None else (data,)),
    ]  # fmt: skip
    return _call(store, "save_record", kind, arguments, decode, on_disk)


def page(store: ValkeyStore, kind: str, names: Sequence[str], cursor: str | None, limit: int) -> Call[RecordPage]:
    """Return records, the newest first, or those of these names."""
    before = read_record_cursor(cursor)

    def decode(reply: Any) -> RecordPage:
        now, more, found = reply
        records = [_record(found[at], found[at + 1]) for at in range(0, len(found), 2)]
        if names:
            records.sort(key=lambda record: (record.created_ms, record.name), reverse=True)
        next_cursor = record_cursor(int(more[0]), more[1].decode()) if more else None
        return RecordPage(records, next_cursor, now)

    place = (b"", b"") if before is None else (b"%d" % before[0], before[1].encode())
    arguments = [b"%d" % limit, *place, *(name.encode() for name in names)]
    return _call(store, "records", kind, arguments, decode, None)
