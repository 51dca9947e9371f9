"""Polling: one script over many queues where all of them lie on one server, one for each queue on a Cluster.

A step of a Cluster cannot span slots. There the heartbeat and each queue are calls of their own, which run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from waypost import policy
from waypost.store.port import Call, Idle, Registration, poll_parts
from waypost.store.register import pack
from waypost.store.valkey.command import ValkeyCall, command
from waypost.store.valkey.scripts import script
from waypost.store.valkey.workers import unpack_request
from waypost.values import Elected, Polled, PolledQueue

if TYPE_CHECKING:
    from waypost.store.valkey.store import ValkeyStore

NEEDS_CLAIM, BLOCKED = 1, 2


def poll(
    store: ValkeyStore, idle: Sequence[Idle], registration: Registration | None, repeat_to: str | None
) -> list[Call[Polled]]:
    """The calls of a poll; the first carries the heartbeat."""
    if not idle and registration is None:
        return []
    if not store.source.cluster:
        parts = poll_parts(idle)
        return [
            _poll(store, part, registration if at == 0 else None, repeat_to if at == 0 else None)
            for at, part in enumerate(parts)
        ]
    calls: list[Call[Polled]] = []
    if registration is not None:
        calls.append(_heartbeat(store, registration))
        if registration.role is not None:
            calls.append(_elect(store, registration, registration.role))
    return [*calls, *(_poll(store, [one], None, repeat_to if at == 0 else None) for at, one in enumerate(idle))]


def _poll(
    store: ValkeyStore, idle: Sequence[Idle], registration: Registration | None, repeat_to: str | None
) -> Call[Polled]:
    text, namespace = script("poll"), store.namespace
    clock = b"%d" % store.clock() if store.clock else b""
    keys: list[bytes] = []
    worker: list[bytes] = []
    if registration is not None:
        # Without a role the key is passed and not read.
        role = registration.role or "scheduler"
        keys = [f"{{{namespace}}}:workers".encode(), f"{{{namespace}}}:records".encode(), leader_key(namespace, role)]
        worker = [
            registration.heartbeat.name.encode(), pack(registration.heartbeat),
            b"%d" % registration.ttl_ms, b"%d" % policy.WORKERS_MAX,
            b"" if registration.role is None else b"%d" % registration.role_ttl_ms,
        ]  # fmt: skip
    before = len(keys)
    bases = [f"{{{namespace}:{one.queue}}}:" for one in idle]
    keys += [f"{base}queue".encode() for base in bases]
    if store.source.cluster:
        # Never written: so that no script begins while the slot is moving.
        keys.append(f"{bases[0]}never".encode())
    channel = b"" if repeat_to is None else f"{{{namespace}:{repeat_to}}}:poll".encode()
    packed = command(
        b"EVALSHA", text.sha, b"%d" % len(keys), *keys, clock, b"", b"", b"", b"%d" % len(idle), b"%d" % before,
        channel, *worker, *((one.sleeper or "").encode() for one in idle),
    )  # fmt: skip
    queue = idle[0].queue if store.source.cluster else ""
    return ValkeyCall("poll", queue, packed, _polled, text, place=keys[0])


def _polled(reply: Any) -> Polled:
    at_ms, leader, requested = reply[:3]
    queues = [
        PolledQueue(bool(flags & NEEDS_CLAIM), _or_none(due), _or_none(end), _or_none(lease), bool(flags & BLOCKED))
        for flags, due, end, lease in zip(*(iter(reply[3:]),) * 4, strict=True)
    ]
    elected = Elected(leader[0].decode(), leader[1], leader[2]) if leader else None
    return Polled(queues, at_ms, elected, unpack_request(requested))


def _heartbeat(store: ValkeyStore, registration: Registration) -> Call[Polled]:
    call = store.heartbeat(registration.heartbeat, registration.ttl_ms)
    assert isinstance(call, ValkeyCall)

    def decode(reply: Any) -> Polled:
        return Polled([], reply[0], None, unpack_request(reply[1]))

    return ValkeyCall("poll", "", call.packed, decode, call.script, place=call.place)


def _elect(store: ValkeyStore, registration: Registration, role: str) -> Call[Polled]:
    call = store.elect(role, registration.heartbeat.name, registration.role_ttl_ms)
    assert isinstance(call, ValkeyCall)

    def decode(reply: Any) -> Polled:
        return Polled([], 0, Elected(reply[0].decode(), reply[1], reply[2]))

    return ValkeyCall("poll", "", call.packed, decode, call.script, place=call.place)


def leader_key(namespace: str, role: str) -> bytes:
    """Return the key of the leader of a role."""
    return f"{namespace}:leader:{role}".encode()


def _or_none(number: int) -> int | None:
    return None if number < 0 else number
