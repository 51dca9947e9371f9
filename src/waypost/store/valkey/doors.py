"""Doors: where a sleeper that has nothing left to do waits at the server itself.

The request is three commands in one write: the sleeper goes to its door, a blocking read of that door, and the claim.
The server holds back what follows a blocking read, so the claim begins in the instant in which somebody knocks, and
its answer is the first that the worker hears. By a word, it would hear the word, ask, and be answered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from waypost.message import Claimed
from waypost.store.port import Call, Visitor
from waypost.store.valkey.command import Door, ValkeyCall, command
from waypost.store.valkey.scripts import AT_DOOR, script


class ValkeyDoors:
    """The doors of a store on one server. On a Cluster there are none: a slot can move away from who waits."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def at_door(self, claim: Call[Claimed], sleeper: str, seconds: float, visitor: Visitor) -> Call[Claimed]:
        call = cast("ValkeyCall[Claimed]", claim)
        text, base = script("wait"), self._base(call.queue)
        sleepers, door = f"{base}sleepers".encode(), f"{base}door:{AT_DOOR}{sleeper}".encode()
        packed = command(b"EVALSHA", text.sha, b"2", sleepers, door, sleeper.encode())
        packed += command(b"BLPOP", door, b"%.3f" % seconds)
        return replace(call, door=Door(packed, text, seconds, visitor))

    def knock(self, queue: str, sleeper: str, word: str) -> Call[None]:
        text, door = script("knock"), f"{self._base(queue)}door:{AT_DOOR}{sleeper}".encode()
        packed = command(b"EVALSHA", text.sha, b"1", door, word.encode())
        return ValkeyCall("knock", queue, packed, lambda reply: None, text, key=door, place=door)

    def _base(self, queue: str) -> str:
        return f"{{{self._namespace}:{queue}}}:"
