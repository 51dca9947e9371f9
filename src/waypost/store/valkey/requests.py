"""Requests and their replies without I/O: the bytes to write, the number of replies, and their meaning.

A reply is what the server answered, or the `ResponseError` by which it refused. Executors write and read; a broken
connection is theirs too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from redis.exceptions import NoScriptError, ResponseError

from waypost.errors import OutcomeUnknown, WaypostError
from waypost.store.port import Call
from waypost.store.valkey.command import ValkeyCall, command
from waypost.store.valkey.failures import Redirected, is_wrong_server, map_error
from waypost.store.valkey.scripts import Script

T = TypeVar("T")

#: Requests in progress on one connection: enough to keep the server busy while Python encodes the next.
WINDOW = 4
#: Reads with short replies are written together, up to this number: one write, and one wait for all of them.
READS_TOGETHER = 64
SHORT_READS = frozenset(("holders", "locate", "policy", "stats", "stats_many", "watch"))
#: So is a settle with the claim that follows it.
WRITTEN_WITH_NEXT = SHORT_READS | {"settle"}
#: Sent before a request that another node of a Cluster sent here while its keys are on their way. For one request.
ASKING = command(b"ASKING")


class Request(Generic[T]):
    """A call on one connection: one write, and a reply to each command in it.

    [the queue's announcement] [its script] [ASKING] the call [wait for the disk]
    """

    __slots__ = ("_announce", "_asking", "_load", "call", "expected", "packed", "replies")

    def __init__(
        self, call: ValkeyCall[T], *replies: Any, announce: bool = True, load: bool = False, asking: bool = False
    ) -> None:
        self.call = call
        self._announce = call.announce if announce else None
        self._load = load
        self._asking = asking
        self.packed = call.packed
        #: How many replies answer it, and those that have come.
        self.expected = 1
        self.replies: list[Any] = list(replies)
        if call.on_disk is not None:
            self._add(b"", call.on_disk)
        if asking:
            self._add(ASKING)
        if load and call.script is not None:
            self._add(load_command(call.script))
        if self._announce is not None:
            self._add(self._announce.packed)

    def _add(self, before: bytes, behind: bytes = b"") -> None:
        self.packed = before + self.packed + behind
        self.expected += 1

    @property
    def wrong_server(self) -> bool:
        """Whether the server is a replica or not ready, so that another one should be used."""
        return any(is_wrong_server(reply) for reply in self.replies if isinstance(reply, ResponseError))

    def with_script(self) -> Request[T] | None:
        """The same request behind its script if the server did not know that, None otherwise."""
        reply = self.replies[-1 if self.call.on_disk is None else -2]
        if not isinstance(reply, NoScriptError) or self._load or self.call.script is None:
            return None
        self._confirm()
        return Request(self.call, announce=False, load=True, asking=self._asking)

    def result(self) -> T:
        """The result of the call, once all replies have come."""
        call = self.call
        reply = self.replies[-1 if call.on_disk is None else -2]
        if self._announce is not None:
            self._confirm()
        if isinstance(reply, ResponseError):
            # If the script was refused, that is the reason why it is not there.
            loaded = self.replies[0 if self._announce is None else 1] if self._load else None
            raise map_error(loaded if isinstance(loaded, ResponseError) else reply, call.queue, call.name, call.key)
        if call.on_disk is not None:
            confirmed = self.replies[-1]
            if isinstance(confirmed, ResponseError):
                raise map_error(confirmed, call.queue, call.name, call.key)
            if confirmed[0] < 1:
                raise OutcomeUnknown(
                    f"{call.name} on queue {call.queue} was done, but the server did not confirm in time that "
                    "it is on its disk; a repeat waits again and changes nothing"
                )
        return call.decode(reply)

    def _confirm(self) -> None:
        """Pass on the reply to the announcement. One that a full server refuses (None) is repeated by a later call."""
        if self._announce is not None:
            reply = self.replies[0]
            self._announce.decode(None if isinstance(reply, ResponseError) else reply)


class Batch:
    """Several requests in progress at once. `results` has one entry per call in order, `waiting` those not answered."""

    __slots__ = ("calls", "loaded", "redirected", "results", "waiting", "wrong_server")

    def __init__(self, calls: Iterator[Call[Any]], loaded: set[bytes]) -> None:
        self.calls = calls
        self.loaded = loaded
        self.results: list[Any] = []
        self.waiting: deque[Request[Any]] = deque()
        #: Those that another node of a Cluster has to answer, with their place in the results.
        self.redirected: list[tuple[int, ValkeyCall[Any]]] = []
        self.wrong_server = False

    def requests(self) -> Iterator[bytes]:
        """What to write, one call after the other; each is made when it is asked for. Read while `is_full`."""
        together: list[bytes] = []
        for call in self.calls:
            assert isinstance(call, ValkeyCall)
            # Requests follow each other without waiting, so the script must be there before the first.
            load = call.script is not None and call.script.sha not in self.loaded
            if load and call.script is not None:
                self.loaded.add(call.script.sha)
            request = Request(call, load=load)
            self.waiting.append(request)
            together.append(request.packed)
            if call.name not in WRITTEN_WITH_NEXT or len(together) == READS_TOGETHER:
                yield b"".join(together) if len(together) > 1 else request.packed
                together.clear()
        if together:
            yield b"".join(together)

    @property
    def is_full(self) -> bool:
        """Whether the oldest request must be answered before the next is sent."""
        return len(self.waiting) >= WINDOW

    def finish(self) -> None:
        """The oldest request is answered."""
        request = self.waiting.popleft()
        self.wrong_server = self.wrong_server or request.wrong_server
        if any(isinstance(reply, NoScriptError) for reply in request.replies):
            self.loaded.clear()  # the server was restarted or flushed: load them again
        try:
            self.results.append(request.result())
        except WaypostError as error:
            if isinstance(error, Redirected):
                self.redirected.append((len(self.results), request.call))
            self.results.append(error)

    def fail(self, error: WaypostError, *, rest: bool) -> None:
        """The connection is lost: unanswered requests get this error, and all others too if there is none other."""
        if self.waiting:
            self.loaded.clear()  # a script may not have arrived
        self.results += [error] * len(self.waiting)
        self.waiting.clear()
        if rest:
            self.results += [error for _ in self.calls]


def load_command(script: Script) -> bytes:
    """Give the server a script."""
    return command(b"SCRIPT", b"LOAD", script.text)
