"""Find a message by its id in many queues: one script over many queues, one for each queue on a Cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from waypost.identity import journal_start_ms
from waypost.policy import POLL_QUEUES_MAX
from waypost.store.port import Call
from waypost.store.valkey.command import ValkeyCall, command
from waypost.store.valkey.packing import STATUS
from waypost.store.valkey.scripts import script
from waypost.values import FoundMessage

if TYPE_CHECKING:
    from waypost.store.valkey.store import ValkeyStore


def locate(
    store: ValkeyStore, queues: Sequence[str], message_id: str, *, in_journals: bool
) -> list[Call[list[FoundMessage]]]:
    """The calls of a search, each for a part of the queues."""
    together = 1 if store.source.cluster else POLL_QUEUES_MAX
    return [
        _locate(store, queues[at : at + together], message_id, in_journals=in_journals)
        for at in range(0, len(queues), together)
    ]


def _locate(
    store: ValkeyStore, queues: Sequence[str], message_id: str, *, in_journals: bool
) -> Call[list[FoundMessage]]:
    text = script("locate")
    clock = b"%d" % store.clock() if store.clock else b""
    bases = [f"{{{store.namespace}:{queue}}}:" for queue in queues]
    keys = [f"{base}queue".encode() for base in bases]
    if store.source.cluster:
        # Never written: so that no script begins while the slot is moving.
        keys.append(f"{bases[0]}never".encode())
    packed = command(
        b"EVALSHA", text.sha, b"%d" % len(keys), *keys, clock, b"", b"", b"", b"%d" % len(queues), message_id.encode(),
        b"journal" if in_journals else b"message", b"%d" % journal_start_ms(message_id),
    )  # fmt: skip

    def decode(reply: Any) -> list[FoundMessage]:
        return [found(queue, known) for queue, known in zip(queues, reply, strict=True) if known]

    def found(queue: str, known: bytes) -> FoundMessage:
        if in_journals:
            return FoundMessage(queue, message_id, None)
        if known == b"X":
            return FoundMessage(queue, message_id, "dead", "dead")
        if known in STATUS:
            return FoundMessage(queue, message_id, STATUS[known])
        ended: Any = known.decode()
        return FoundMessage(queue, message_id, None, ended)

    queue = queues[0] if store.source.cluster else ""
    return ValkeyCall("locate", queue, packed, decode, text, place=keys[0])
