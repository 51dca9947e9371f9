"""Processes for CPU-bound handlers: one for each concurrent call, each a Python process that serves one call at a time.

Unlike a thread a process can be stopped: when the lease is lost, a cancel is requested or the call times out, it is
killed, and the next call gets another process. If a process dies, only the call that it was serving fails. It is
started as a separate program and gets the name of the handler, so nothing is forked and nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from waypost.errors import ProcessFailed, Undecodable, UnknownQueue
from waypost.message import Message, Outcome, after_ms
from waypost.worker.handler import Handler, find_object
from waypost.worker.process_protocol import (
    BEGUN,
    LENGTH_BYTES,
    Answer,
    Call,
    Hello,
    apply_end,
    decode,
    decode_error,
    decode_outcome,
    frame,
)

#: Imports may be slow on a cold disk; a process that needs longer than this has failed.
START_SECONDS_MAX = 60.0
#: How long idle processes may take to end when the worker stops.
STOP_SECONDS_MAX = 3.0
#: How long to wait for the exit code after the connection broke.
EXIT_POLL_SECONDS = 0.005
EXIT_POLLS_MAX = 200
READ_BYTES = 256 * 1024
#: How many idle processes in a row may be found dead before it counts as a failure.
IDLE_DEATHS_MAX = 3
#: The process must find the same modules as this one, including waypost.
PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from waypost.worker.process_child import main; \
main(int(sys.argv[1]), int(sys.argv[2]))"

#: A forked copy of this process must not keep the connections open after it has ended.
_connections: WeakSet[socket.socket] = WeakSet()


def _close_in_fork() -> None:
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_fork)


class NotBegun(ProcessFailed):
    """Raised when a process ended before it began a call: it died while it was idle."""


class Child:
    """One process and the connection to it."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        _connections.add(self._connection)
        self._connection.setblocking(False)
        self._data = bytearray()
        with theirs:
            warnings = [f"-W{option}" for option in sys.warnoptions]
            arguments = [str(theirs.fileno()), str(os.getpid()), json.dumps([str(path) for path in sys.path])]
            try:
                self.process = subprocess.Popen(
                    [sys.executable, *warnings, "-c", PROGRAM, *arguments],
                    stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                )  # fmt: skip
            except OSError as error:
                self._connection.close()
                raise ProcessFailed(f"a process for the handler cannot be started: {error}") from None

    async def request(self, request: Hello | Call) -> Answer:
        """Send one frame, wait for the empty frame that confirms the start, and return the reply.

        Raises `ProcessFailed` if the process ends instead of replying, `NotBegun` if it ends before it starts.
        """
        loop = asyncio.get_running_loop()
        kind: type[ProcessFailed] = NotBegun
        try:
            await loop.sock_sendall(self._connection, frame(request))
            await self._read(len(BEGUN))
            kind = ProcessFailed
            head = await self._read(LENGTH_BYTES)
            return decode(await self._read(int.from_bytes(head, "big")), Answer)
        except OSError:
            raise kind(f"the handler's process {self.process.pid} {await self._how_it_ended()}") from None

    async def _read(self, count: int) -> bytes:
        while len(self._data) < count:
            part = await asyncio.get_running_loop().sock_recv(self._connection, READ_BYTES)
            if not part:
                raise ConnectionResetError
            self._data += part
        data = bytes(self._data[:count])
        del self._data[:count]
        return data

    async def _how_it_ended(self) -> str:
        for _ in range(EXIT_POLLS_MAX):
            if self.process.poll() is not None:
                break
            await asyncio.sleep(EXIT_POLL_SECONDS)
        code = self.process.poll()
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def hang_up(self) -> None:
        """Close the connection: an idle process then ends."""
        self._connection.close()

    def kill(self) -> None:
        """Kill it at once. A thread collects its exit code: the end of a large process takes a moment."""
        self._connection.close()
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                self.process.kill()
            threading.Thread(target=self.process.wait, name="waypost-reaper", daemon=True).start()


def _unknown_queue(message: Message[Any]) -> UnknownQueue | None:
    """Return why continuations are refused, or None. The declared queues are known here, not in the process."""
    sent_on, message._then = message._then, ()
    try:
        for next_one in sent_on if message.settle_target is not None else ():
            message.settle_target.context.name_of(next_one.queue)
    except UnknownQueue as error:
        return error
    message._then = sent_on
    return None


class Processes:
    """The processes of one handler. Used on one event loop, in whose thread they are started."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._hello = Hello(
            handler.function.__module__, handler.name, handler.queue, handler.batch, handler.body_type_name,
            None if handler.result_ttl is None else after_ms(handler.result_ttl),
        )  # fmt: skip
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        #: Running calls: their messages, and the process that serves them.
        self._calls: list[tuple[list[Message[Any]], Child]] = []

    async def run(
        self,
        messages: list[Message[Any]],
        on_begun: Callable[[], asyncio.TimerHandle],
        on_unreadable: Callable[[Message[Any], Undecodable], object],
    ) -> Any:
        """Run the handler for these messages in a process; its outcome, or the error that it ended with.

        `on_begun` is called when the handler starts; it returns its timeout. `on_unreadable` is called for
        messages whose bodies the process could not decode, and which were not part of the call.
        """
        call = Call([message._lease for message in messages])
        for left in reversed(range(IDLE_DEATHS_MAX + 1)):
            child = await self._take()
            alarm = on_begun()
            serving = (messages, child)
            self._calls.append(serving)
            try:
                answer = await child.request(call)
                break
            except NotBegun:
                # The idle process had died, which was not visible yet; the message is not the cause.
                self._end(child)
                if left == 0:
                    raise
            except BaseException:
                self._end(child)
                raise
            finally:
                self._calls.remove(serving)
                alarm.cancel()
        self._idle.append(child)
        for message, end in zip(messages, answer.ends, strict=False):
            if end.unreadable is None:
                apply_end(message, end)
            else:
                error = decode_error(end.unreadable, find_object)
                on_unreadable(message, error if isinstance(error, Undecodable) else Undecodable(str(error)))
        unknown = [refusal for message in messages if (refusal := _unknown_queue(message)) is not None]
        if answer.failure is not None:
            raise decode_error(answer.failure, find_object)
        if unknown:
            raise unknown[0]
        outcome = None if answer.outcome is None else decode_outcome(answer.outcome)
        return outcome if isinstance(outcome, Outcome) else None

    async def _take(self) -> Child:
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            self._end(child)
        child = Child()
        self._all.add(child)
        try:
            async with asyncio.timeout(START_SECONDS_MAX):
                answer = await child.request(self._hello)
        except TimeoutError:
            self._end(child)
            raise ProcessFailed(f"the handler's process did not start within {START_SECONDS_MAX:g} s") from None
        except BaseException:
            self._end(child)
            raise
        if answer.failure is not None:
            # A module may become importable after a repair, so a process that could not import it is not kept.
            self._end(child)
            raise decode_error(answer.failure, find_object)
        return child

    def kill_lost(self) -> None:
        """Kill processes whose leases are all lost. Called from a thread; the event loop does the rest later."""
        for messages, child in list(self._calls):
            if all(message.lease_lost for message in messages):
                with suppress(ProcessLookupError):
                    child.process.kill()

    def _end(self, child: Child) -> None:
        child.kill()
        self._all.discard(child)

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return [child.process.pid for child in self._all]

    async def stop(self) -> None:
        """Let idle processes end, then kill the others."""
        for child in self._idle:
            child.hang_up()
        polls = round(STOP_SECONDS_MAX / EXIT_POLL_SECONDS)
        while polls > 0 and any(child.is_alive for child in self._idle):
            polls -= 1
            await asyncio.sleep(EXIT_POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill all of them at once."""
        for child in list(self._all):
            self._end(child)
        self._idle.clear()
