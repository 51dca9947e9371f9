"""The blocking wait: an idle sleeper waits inside the server, and its next claim waits there with it.

One write carries three commands:

    EVALSHA start_wait   register the sleeper as blocked; forget unblocks of an earlier wait
    BLPOP unblock:<name> the blocking read
    EVALSHA claim        the claim

The server does not run commands after a blocking read before that read ends. So the claim begins as soon as
a publish pushes to the list, and the worker only receives its reply. With a notification
the worker would have to receive it, send the claim, and receive the reply.

The worker ends its own wait by a push to the same list, with a value that it recognises. `CLIENT UNBLOCK` cannot do
that: it cannot distinguish a client that is not blocked yet from one that no longer is, and needs rights that a worker
should not have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from waypost.store.port import BlockingWaiter, Call
from waypost.store.valkey.command import BlockingWait, ValkeyCall, command
from waypost.store.valkey.scripts import BLOCKED_MARK, script
from waypost.values import Claimed


class ValkeyBlockingWaits:
    """Blocking waits of a store on one server. A Cluster has none: a slot can move away from a client that waits."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def claim_after_wait(
        self, claim: Call[Claimed], sleeper: str, seconds: float, waiter: BlockingWaiter
    ) -> Call[Claimed]:
        call = cast("ValkeyCall[Claimed]", claim)
        text, sleepers = script("start_wait"), f"{self._base(call.queue)}sleepers".encode()
        unblocks = self._unblocks(call.queue, sleeper)
        packed = command(b"EVALSHA", text.sha, b"2", sleepers, unblocks, sleeper.encode())
        packed += command(b"BLPOP", unblocks, b"%.3f" % seconds)
        return replace(call, wait=BlockingWait(packed, text, seconds, waiter))

    def unblock(self, queue: str, sleeper: str, value: str) -> Call[None]:
        text, unblocks = script("unblock"), self._unblocks(queue, sleeper)
        packed = command(b"EVALSHA", text.sha, b"1", unblocks, value.encode())
        return ValkeyCall("unblock", queue, packed, lambda reply: None, text, key=unblocks, place=unblocks)

    def _base(self, queue: str) -> str:
        return f"{{{self._namespace}:{queue}}}:"

    def _unblocks(self, queue: str, sleeper: str) -> bytes:
        """The list that the sleeper reads, named as `wake` in base.lua names it."""
        return f"{self._base(queue)}unblock:{BLOCKED_MARK}{sleeper}".encode()
