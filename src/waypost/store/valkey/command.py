"""A call of a script as the bytes that go over the socket, and the reading of its reply.

The general encoder of a client library costs more per argument than the server's whole work on a message. So the
part that never changes, EVALSHA with its hash and keys, is encoded once for each queue and script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from waypost.store.port import BlockingWaiter, Call
from waypost.store.valkey.scripts import Script

T = TypeVar("T")

CRLF = b"\r\n"


@dataclass(slots=True)
class BlockingWait:
    """The blocking wait before a claim: two commands, their script, the timeout, and the waiter."""

    packed: bytes
    script: Script
    seconds: float
    waiter: BlockingWaiter


@dataclass(slots=True)
class ValkeyCall(Call[T]):
    """One request: the bytes for the socket, and how to read the reply."""

    name: str
    queue: str
    packed: bytes
    decode: Callable[[Any], T]
    #: The script that it names by hash; None for a command of the server itself.
    script: Script | None = None
    #: A command to send before it, whose reply does not matter: it adds the queue to the list of queues.
    announce: ValkeyCall[None] | None = None
    #: A command to send behind it: wait until the server has on its disk what this connection wrote.
    on_disk: bytes | None = None
    #: The key that a command reads, for the error if it is not waypost's. Scripts check their keys themselves.
    key: bytes = b""
    #: One of its keys: on a Cluster they all lie on the node that serves its slot.
    place: bytes = b""
    #: The blocking wait that goes before it. Only the asyncio executor runs such a call.
    wait: BlockingWait | None = None


def part(value: bytes) -> bytes:
    """One bulk string of the protocol."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def command(*parts: bytes) -> bytes:
    """A whole command."""
    return b"*%d\r\n" % len(parts) + b"".join([part(value) for value in parts])


def evalsha_head(script: Script, keys: Sequence[bytes]) -> tuple[int, bytes]:
    """The part of a script's command that is the same for every call on a queue: number of parts, and bytes."""
    parts = (b"EVALSHA", script.sha, b"%d" % len(keys), *keys)
    return len(parts), b"".join([part(value) for value in parts])
