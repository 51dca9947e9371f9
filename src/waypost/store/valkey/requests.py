"""Requests and their replies without the connection: generators that both executors drive.

Such a generator yields bytes to send, or None to receive the next reply, which is sent back in; an error reply of the
server is thrown in. A broken connection ends it from outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from redis.exceptions import NoScriptError, ResponseError

from waypost.errors import OutcomeUnknown, WaypostError
from waypost.store.port import Call
from waypost.store.valkey.command import BlockingWait, ValkeyCall, command
from waypost.store.valkey.failures import Redirected, map_error
from waypost.store.valkey.scripts import Script

T = TypeVar("T")
RequestSteps = Generator[bytes | None, Any, T]

#: Requests under way on one connection: enough to keep the server busy while Python encodes the next.
WINDOW = 4


#: Sent before a request that another node of a Cluster sent here while its keys are on their way. For one request.
ASKING = command(b"ASKING")


def run_call(call: ValkeyCall[T]) -> RequestSteps[T]:
    """One request and its reply. The queue's announcement, if there is one, goes before it in the same write."""
    if call.announce is None:
        return (yield from request(call))
    steps = request(call)
    yield call.announce.packed + (next(steps) or b"")
    yield from confirm(call.announce)
    return (yield from steps)


def run_after_wait(call: ValkeyCall[T], wait: BlockingWait, loaded: set[bytes]) -> RequestSteps[T]:
    """The same behind a blocking wait: the server begins with the request when that ends."""
    if wait.script.sha not in loaded:
        with suppress(ResponseError):
            yield from load(wait.script)
            loaded.add(wait.script.sha)
    steps = request(call)
    yield wait.packed + (next(steps) or b"")
    registered = 1
    try:
        registered = yield None
    except NoScriptError:
        loaded.discard(wait.script.sha)
    except ResponseError:
        pass  # not registered, so no publish ends this wait; an unblock still does
    wait.waiter.started(waits=registered != 0)
    popped = None
    with suppress(ResponseError):  # the server refuses blocking reads, and the request runs at once
        popped = yield None
    wait.waiter.ended("" if popped is None else popped[1].decode())
    return (yield from steps)


def request(call: ValkeyCall[T], *, asking: bool = False) -> RequestSteps[T]:
    """One request and its reply. If the server does not know the script, load it and send the request again."""
    packed = call.packed if call.on_disk is None else call.packed + call.on_disk
    if asking:
        packed = ASKING + packed
    try:
        yield packed
        try:
            reply = yield from receive(call, asking=asking)
        except NoScriptError:
            if call.script is None:
                raise
            yield from load(call.script)
            yield packed
            reply = yield from receive(call, asking=asking)
    except ResponseError as error:
        raise map_error(error, call.queue, call.name, call.key) from None
    return call.decode(reply)


def receive(call: ValkeyCall[Any], *, asking: bool = False) -> RequestSteps[Any]:
    """The reply to a request, once what it wrote is on disk if that was asked for."""
    if asking:
        # A node that does not know ASKING answers the request itself as well.
        with suppress(ResponseError):
            yield None
    if call.on_disk is None:
        return (yield None)
    try:
        reply = yield None
    except ResponseError:
        yield None  # the request was refused; the answer about the disk comes all the same
        raise
    confirmed = yield None
    if confirmed[0] < 1:
        raise OutcomeUnknown(
            f"{call.name} on queue {call.queue} was carried out, but the server did not confirm in time that it is on "
            "its disk; a repeat waits again and changes nothing"
        )
    return reply


class Batch:
    """Several requests under way at once. `results` has one entry per call in order, `waiting` those not answered."""

    __slots__ = ("calls", "loaded", "redirected", "results", "unsent", "waiting")

    def __init__(self, calls: Iterator[Call[Any]], loaded: set[bytes]) -> None:
        self.calls = calls
        self.loaded = loaded
        self.results: list[Any] = []
        self.waiting: deque[ValkeyCall[Any]] = deque()
        #: Those that another node of a Cluster has to answer, with their place in the results.
        self.redirected: list[tuple[int, ValkeyCall[Any]]] = []
        #: The next call, held back while what must come before it is under way.
        self.unsent: ValkeyCall[Any] | None = None

    def steps(self) -> RequestSteps[None]:
        """Send the calls as they come, a few ahead of their replies, until there are no more."""
        for call in self.calls:
            assert isinstance(call, ValkeyCall)
            self.unsent = call
            try:
                yield from self._prepare(call)
            except ResponseError as error:
                self.unsent = None
                self.results.append(map_error(error, call.queue, call.name, call.key))
                continue
            self.unsent = None
            self.waiting.append(call)
            yield call.packed if call.on_disk is None else call.packed + call.on_disk
            if len(self.waiting) == WINDOW:
                yield from self._receive()
        yield from self._receive_all()

    def fail(self, error: WaypostError, *, rest: bool) -> None:
        """The connection is gone: what was under way has this error, and all the rest too if there is no other."""
        self.results += [error] * (len(self.waiting) + (self.unsent is not None))
        self.waiting.clear()
        self.unsent = None
        if rest:
            self.results += [error for _ in self.calls]

    def _prepare(self, call: ValkeyCall[Any]) -> RequestSteps[None]:
        """Requests follow each other without waiting, so the script must be there before the first."""
        if call.script is not None and call.script.sha not in self.loaded:
            yield from self._receive_all()
            yield from load(call.script)
            self.loaded.add(call.script.sha)
        if call.announce is not None:
            yield from self._receive_all()
            yield call.announce.packed
            yield from confirm(call.announce)

    def _receive(self) -> RequestSteps[None]:
        call = self.waiting[0]
        try:
            reply = yield from receive(call)
            self.results.append(call.decode(reply))
        except ResponseError as error:
            if isinstance(error, NoScriptError):
                self.loaded.clear()  # the server was restarted or flushed: load them again
            failure = map_error(error, call.queue, call.name, call.key)
            if isinstance(failure, Redirected):
                self.redirected.append((len(self.results), call))
            self.results.append(failure)
        except WaypostError as error:
            self.results.append(error)
        self.waiting.popleft()

    def _receive_all(self) -> RequestSteps[None]:
        while self.waiting:
            yield from self._receive()


def load(script: Script) -> RequestSteps[None]:
    """Give the server a script."""
    yield command(b"SCRIPT", b"LOAD", script.text)
    yield None


def confirm(announcement: ValkeyCall[None]) -> RequestSteps[None]:
    """The reply to an announcement. One that a full server refuses (None) is repeated by a later call."""
    reply = None
    with suppress(ResponseError):
        reply = yield None
    announcement.decode(reply)
