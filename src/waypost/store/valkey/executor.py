"""Executors: the only part that touches a socket.

A connection is taken from redis-py's pool when it is first needed and kept for the next call, so that a call costs one
write and one read. Several threads or coroutines use as many connections as run at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar, cast

from redis.exceptions import NoScriptError, ResponseError

from waypost.errors import ConfigurationError, ForkedClient, StoreError, WaypostError
from waypost.store.port import Call
from waypost.store.valkey.command import ValkeyCall, command
from waypost.store.valkey.connecting import Source
from waypost.store.valkey.failures import CONNECTION_FAILURES, lost, refused
from waypost.store.valkey.scripts import Script

T = TypeVar("T")

log = logging.getLogger("waypost")

#: Requests under way on one connection: enough to keep the server busy while Python encodes the next.
WINDOW = 4
#: A connection idle for longer is looked at before it is used: the server may have closed it.
IDLE_SECONDS = 1.0
INFO = command(b"INFO")
OLDEST_SERVER = (6, 2)


def read_info(reply: bytes) -> dict[str, str]:
    """The lines of INFO as a dictionary."""
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines() if ":" in line)
    return {name: value for name, _, value in lines}


def check_server(info: dict[str, str], shown: str) -> None:
    """Refuse a server that is too old; warn once where acknowledged data can be lost."""
    version = info.get("redis_version", "0.0")
    numbers = tuple(int(number) for number in version.split(".")[:2] if number.isdigit())
    if numbers < OLDEST_SERVER:
        raise ConfigurationError(f"{shown} is version {version}; waypost needs Valkey, or Redis 6.2 or newer")
    if info.get("aof_enabled") == "0":
        warn_once(
            shown, "no_append_only_file", "a restart of the server can lose acknowledged messages: set appendonly yes"
        )
    eviction = info.get("maxmemory_policy", "noeviction")
    if eviction != "noeviction" and info.get("maxmemory", "0") != "0":
        warn_once(
            shown, "evicting", f"messages can vanish when memory is full ({eviction}): set maxmemory-policy noeviction"
        )


_warned: set[tuple[str, str]] = set()


def warn_once(shown: str, problem: str, advice: str) -> None:
    """Say it once for each server and process, not at every connection."""
    if (shown, problem) not in _warned:
        _warned.add((shown, problem))
        log.warning("%s: %s", shown, advice, extra={"event": "durability", "store": shown, "problem": problem})


class _Common:
    """What both executors share: the source, the connections kept at hand, the guard against forks."""

    def __init__(self, source: Source, start_timeout: float) -> None:
        self._source = source
        self._start_timeout = start_timeout
        self._pid = os.getpid()
        #: Connections between two calls, with the time of their last use.
        self._idle: deque[tuple[Any, float]] = deque()
        #: Hashes of scripts that the server has, as far as we know.
        self._loaded: set[bytes] = set()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ForkedClient("this client was made before a fork; make a new one in the child process")

    def _keep(self, connection: Any) -> None:
        self._idle.append((connection, time.monotonic()))

    def _refused(self, error: ResponseError, mine: ValkeyCall[T]) -> WaypostError:
        if isinstance(error, NoScriptError):
            self._loaded.clear()  # the server was restarted or flushed: load them again
        return refused(error, mine.queue, mine.name)

    def _lost(self, error: BaseException, *, sent: bool) -> WaypostError:
        return error if isinstance(error, WaypostError) else lost(error, self._source.shown, sent=sent)


class ValkeyExecutor(_Common):
    """Runs calls on blocking sockets. Safe from several threads."""

    def __init__(self, source: Source, start_timeout: float) -> None:
        super().__init__(source, start_timeout)
        self._pool = source.pool(start_timeout)
        check_server(self.run(ValkeyCall("connect", "", INFO, read_info)), source.shown)

    def run(self, call: Call[T]) -> T:
        mine = cast("ValkeyCall[T]", call)
        connection = self._take()
        try:
            reply = self._ask(connection, mine)
        except ResponseError as error:
            self._keep(connection)
            raise self._refused(error, mine) from None
        except CONNECTION_FAILURES as error:
            self._discard(connection)
            raise self._lost(error, sent=True) from None
        except BaseException:
            self._discard(connection)
            raise
        self._keep(connection)
        return mine.decode(reply)

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        """Several requests under way at once on one connection; each has its own result or error."""
        results: list[T | Exception] = []
        batches = iter(calls)
        while self._run_some(batches, results):
            # The connection failed under way. What was sent has its error; go on with the rest on a new one.
            pass
        return results

    def _run_some(self, calls: Iterator[Call[T]], results: list[T | Exception]) -> bool:
        """Run until the calls or the connection end; whether there may be more calls."""
        waiting: deque[ValkeyCall[T]] = deque()
        connection = None
        try:
            for call in calls:
                mine = cast("ValkeyCall[T]", call)
                waiting.append(mine)
                connection = connection or self._take()
                self._prepare(connection, mine)
                connection.send_packed_command([mine.packed], check_health=False)
                if len(waiting) == WINDOW:
                    self._collect(connection, waiting[0], results)
                    waiting.popleft()
            while waiting:
                self._collect(connection, waiting[0], results)
                waiting.popleft()
        except (*CONNECTION_FAILURES, StoreError) as error:
            if connection is not None:
                self._discard(connection)
            results += [self._lost(error, sent=connection is not None)] * len(waiting)
            return True
        except BaseException:
            if connection is not None:
                self._discard(connection)
            raise
        if connection is not None:
            self._keep(connection)
        return False

    def _collect(self, connection: Any, mine: ValkeyCall[T], results: list[T | Exception]) -> None:
        try:
            results.append(mine.decode(connection.read_response(disable_decoding=True)))
        except ResponseError as error:
            results.append(self._refused(error, mine))

    def _ask(self, connection: Any, mine: ValkeyCall[T]) -> Any:
        if mine.announce is not None:
            self._announce(connection, mine.announce)
        connection.send_packed_command([mine.packed], check_health=False)
        try:
            return connection.read_response(disable_decoding=True)
        except NoScriptError:
            if mine.script is None:
                raise
            self._load(connection, mine.script)
            connection.send_packed_command([mine.packed], check_health=False)
            return connection.read_response(disable_decoding=True)

    def _prepare(self, connection: Any, mine: ValkeyCall[T]) -> None:
        """Before requests follow each other without waiting: the script must be there."""
        if mine.script is not None and mine.script.sha not in self._loaded:
            self._load(connection, mine.script)
        if mine.announce is not None:
            self._announce(connection, mine.announce)

    def _load(self, connection: Any, script: Script) -> None:
        connection.send_packed_command([command(b"SCRIPT", b"LOAD", script.text)], check_health=False)
        connection.read_response(disable_decoding=True)
        self._loaded.add(script.sha)

    @staticmethod
    def _announce(connection: Any, announce: bytes) -> None:
        connection.send_packed_command([announce], check_health=False)
        # A full server refuses it; the list of queues is a convenience, so that is no reason to fail.
        with suppress(ResponseError):
            connection.read_response(disable_decoding=True)

    def _take(self) -> Any:
        self._check_process()
        try:
            while True:
                try:
                    connection, used = self._idle.pop()
                except IndexError:
                    return self._pool.get_connection()
                if time.monotonic() - used < IDLE_SECONDS or not connection.can_read(0):
                    return connection
                self._discard(connection)  # closed by the server meanwhile
        except CONNECTION_FAILURES as error:
            raise self._lost(error, sent=False) from None

    def _discard(self, connection: Any) -> None:
        with suppress(*CONNECTION_FAILURES):
            connection.disconnect()
        self._pool.release(connection)

    def close(self) -> None:
        """Give the connections back; close them if they are ours."""
        if self._pid != os.getpid():
            return  # the sockets belong to the parent
        while self._idle:
            self._pool.release(self._idle.pop()[0])
        if self._source.owned:
            self._pool.disconnect()


class AsyncValkeyExecutor(_Common):
    """The same for an event loop."""

    def __init__(self, source: Source, start_timeout: float) -> None:
        super().__init__(source, start_timeout)
        self._pool = source.async_pool(start_timeout)

    async def start(self) -> None:
        """Make the first connection, and look at the server."""
        check_server(await self.run(ValkeyCall("connect", "", INFO, read_info)), self._source.shown)

    async def run(self, call: Call[T]) -> T:
        mine = cast("ValkeyCall[T]", call)
        connection = await self._take()
        try:
            reply = await self._ask(connection, mine)
        except ResponseError as error:
            self._keep(connection)
            raise self._refused(error, mine) from None
        except CONNECTION_FAILURES as error:
            await self._discard(connection)
            raise self._lost(error, sent=True) from None
        except BaseException:
            # Cancelled with a reply under way: the connection cannot be used for another request.
            await self._discard(connection)
            raise
        self._keep(connection)
        return mine.decode(reply)

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        """Several requests under way at once on one connection; each has its own result or error."""
        results: list[T | Exception] = []
        batches = iter(calls)
        while await self._run_some(batches, results):
            pass
        return results

    async def _run_some(self, calls: Iterator[Call[T]], results: list[T | Exception]) -> bool:
        waiting: deque[ValkeyCall[T]] = deque()
        connection = None
        try:
            for call in calls:
                mine = cast("ValkeyCall[T]", call)
                waiting.append(mine)
                connection = connection or await self._take()
                await self._prepare(connection, mine)
                await connection.send_packed_command([mine.packed], check_health=False)
                if len(waiting) == WINDOW:
                    await self._collect(connection, waiting[0], results)
                    waiting.popleft()
            while waiting:
                await self._collect(connection, waiting[0], results)
                waiting.popleft()
        except (*CONNECTION_FAILURES, StoreError) as error:
            if connection is not None:
                await self._discard(connection)
            results += [self._lost(error, sent=connection is not None)] * len(waiting)
            return True
        except BaseException:
            if connection is not None:
                await self._discard(connection)
            raise
        if connection is not None:
            self._keep(connection)
        return False

    async def _collect(self, connection: Any, mine: ValkeyCall[T], results: list[T | Exception]) -> None:
        try:
            results.append(mine.decode(await connection.read_response(disable_decoding=True)))
        except ResponseError as error:
            results.append(self._refused(error, mine))

    async def _ask(self, connection: Any, mine: ValkeyCall[T]) -> Any:
        if mine.announce is not None:
            await self._announce(connection, mine.announce)
        await connection.send_packed_command([mine.packed], check_health=False)
        try:
            return await connection.read_response(disable_decoding=True)
        except NoScriptError:
            if mine.script is None:
                raise
            await self._load(connection, mine.script)
            await connection.send_packed_command([mine.packed], check_health=False)
            return await connection.read_response(disable_decoding=True)

    async def _prepare(self, connection: Any, mine: ValkeyCall[T]) -> None:
        if mine.script is not None and mine.script.sha not in self._loaded:
            await self._load(connection, mine.script)
        if mine.announce is not None:
            await self._announce(connection, mine.announce)

    async def _load(self, connection: Any, script: Script) -> None:
        await connection.send_packed_command([command(b"SCRIPT", b"LOAD", script.text)], check_health=False)
        await connection.read_response(disable_decoding=True)
        self._loaded.add(script.sha)

    @staticmethod
    async def _announce(connection: Any, announce: bytes) -> None:
        await connection.send_packed_command([announce], check_health=False)
        with suppress(ResponseError):
            await connection.read_response(disable_decoding=True)

    async def _take(self) -> Any:
        self._check_process()
        try:
            while True:
                try:
                    connection, used = self._idle.pop()
                except IndexError:
                    return await self._pool.get_connection()
                if time.monotonic() - used < IDLE_SECONDS or not await connection.can_read_destructive():
                    return connection
                await self._discard(connection)
        except CONNECTION_FAILURES as error:
            raise self._lost(error, sent=False) from None

    async def _discard(self, connection: Any) -> None:
        with suppress(*CONNECTION_FAILURES):
            await connection.disconnect(nowait=True)
        await self._pool.release(connection)

    async def close(self) -> None:
        """Give the connections back; close them if they are ours."""
        if self._pid != os.getpid():
            return
        while self._idle:
            await self._pool.release(self._idle.pop()[0])
        if self._source.owned:
            await self._pool.disconnect()
