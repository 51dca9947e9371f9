"""Executors: the only part that touches a socket.

A connection is taken from redis-py's pool when it is first needed and kept for the next call, so that a call costs one
write and one read. Several threads or coroutines use as many connections as run at once, up to a limit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar, cast

from redis.exceptions import NoScriptError, ResponseError

from waypost.errors import ConfigurationError, ForkedClient, OutcomeUnknown, StoreError
from waypost.policy import Durability
from waypost.store.places import Places
from waypost.store.port import Call
from waypost.store.valkey.async_connection import AsyncConnection
from waypost.store.valkey.command import BlockingWait, ValkeyCall, command
from waypost.store.valkey.connection import Connection, open_connection
from waypost.store.valkey.failures import CONNECTION_FAILURES, map_connection_error
from waypost.store.valkey.requests import Batch, Request, load_command
from waypost.store.valkey.sources import REPLY_TIMEOUT_SECONDS, Source

T = TypeVar("T")

log = logging.getLogger("waypost")

#: The number of concurrent calls of one client, on a Cluster per node; the others wait for their turn. More
#: would not be answered sooner by a server that runs one after the other.
CONNECTIONS_MAX = 32
#: A connection idle for longer is checked before it is used: the server may have closed it.
IDLE_SECONDS = 1.0
OLDEST_SERVER = (6, 2)
WAITS_FOR_DISK = (7, 2)


def read_info(reply: bytes) -> dict[str, str]:
    """The lines of INFO as a dictionary."""
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines() if ":" in line)
    return {name: value for name, _, value in lines}


#: The first request of an executor.
HELLO = ValkeyCall("connect", "", command(b"INFO"), read_info)


def check_server(
    info: dict[str, str], display_name: str, durability: Durability = "server", *, cluster: bool = False
) -> None:
    """Refuse a server that cannot do what is asked for; warn once where acknowledged data can be lost."""
    version = info.get("redis_version", "0.0")
    numbers = tuple(int(number) for number in version.split(".")[:2] if number.isdigit())
    if numbers < OLDEST_SERVER:
        raise ConfigurationError(f"{display_name} is version {version}; waypost needs Valkey, or Redis 6.2 or newer")
    if info.get("cluster_enabled") == "1" and not cluster:
        # Queues of other nodes could not be reached, and slots that move need keys that only a Cluster's calls name.
        raise ConfigurationError(
            f"{display_name} is one node of a Cluster; name the Cluster with valkey+cluster://, or pass a RedisCluster"
        )
    if durability == "fsync" and (numbers < WAITS_FOR_DISK or info.get("aof_enabled") != "1"):
        raise ConfigurationError(
            f'durability="fsync" needs Valkey, or Redis 7.2 or newer, with an append-only file; {display_name} is '
            f"version {version}, appendonly {'yes' if info.get('aof_enabled') == '1' else 'no'}"
        )
    if info.get("aof_enabled") == "0":
        warn_once(
            display_name,
            "no_append_only_file",
            "a restart of the server can lose acknowledged messages: set appendonly yes",
        )
    eviction = info.get("maxmemory_policy", "noeviction")
    if eviction != "noeviction" and info.get("maxmemory", "0") != "0":
        warn_once(
            display_name,
            "evicting",
            f"messages can vanish when memory is full ({eviction}): set maxmemory-policy noeviction",
        )


_warned: set[tuple[str, str]] = set()


def warn_once(display_name: str, problem: str, advice: str) -> None:
    """Log a warning once for each server and process, not at every connection."""
    if (display_name, problem) not in _warned:
        _warned.add((display_name, problem))
        log.warning(
            "%s: %s", display_name, advice, extra={"event": "durability", "store": display_name, "problem": problem}
        )


class _Common:
    """What both executors share: the source, the connections kept at hand, the guard against forks."""

    _pool: Any

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pid = os.getpid()
        #: Connections between two calls, with the time of their last use.
        self._idle: deque[tuple[Any, float]] = deque()
        #: A call that was in progress at the close may still end, and must not keep a connection.
        self._closed = False
        #: Hashes of scripts that the server has, as far as we know.
        self._loaded: set[bytes] = set()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ForkedClient("this client was made before a fork; make a new one in the child process")

    def batch(self, calls: Iterator[Call[Any]]) -> Batch:
        """Calls to run together here."""
        return Batch(calls, self._loaded)

    def _keep(self, connection: Any) -> None:
        self._idle.append((connection, time.monotonic()))

    def _take_idle(self) -> Any:
        try:
            return self._idle.pop()[0]
        except IndexError:
            return None

    def _relax_timeouts(self, start_timeout: float) -> bool:
        """The first reply had to come within the start timeout; from now on a slow one is waited for.

        Not if the limit is the caller's own: of a client that was handed in, or named in the URL.
        """
        settings = self._pool.connection_kwargs
        if not self._source.owned or settings["socket_timeout"] != start_timeout:
            return False
        settings["socket_timeout"] = REPLY_TIMEOUT_SECONDS
        return True

    def _connection_error(self, error: BaseException, *, sent: bool) -> StoreError:
        return map_connection_error(error, self._source.display_name, sent=sent)


def _read_all(connection: Connection, request: Request[Any]) -> None:
    for _ in range(request.expected):
        request.replies.append(connection.receive())


class ValkeyExecutor(_Common):
    """Runs calls on blocking sockets. Safe from several threads."""

    def __init__(self, source: Source, start_timeout: float, durability: Durability) -> None:
        super().__init__(source)
        self._places = Places(CONNECTIONS_MAX)
        self._pool = source.pool(start_timeout)
        try:
            check_server(self.run(HELLO), source.display_name, durability, cluster=source.cluster)
        except BaseException:
            self.close()
            raise
        if self._relax_timeouts(start_timeout):
            # Its socket has the old limit, and only a new one can have another.
            first, _ = self._idle.pop()
            first.redis_connection.socket_timeout = REPLY_TIMEOUT_SECONDS
            self._discard(first)

    @property
    def display_name(self) -> str:
        """Where it leads, without secrets."""
        return self._source.display_name

    def servers(self) -> list[ValkeyExecutor]:
        """An executor for each server that holds a part of the store: this one."""
        return [self]

    def run(self, call: Call[T]) -> T:
        self._check_process()  # first: in a forked child no thread releases the places
        ours = cast("ValkeyCall[T]", call)
        with self._places:
            connection = self._take()
            if ours.announce is not None or ours.on_disk is not None:
                return self._exchange(connection, Request(ours))
            # One command with one reply, as most calls are.
            try:
                connection.send(ours.packed)
                reply = connection.receive()
            except BaseException as error:
                raise self._broken(connection, error) from None
            if isinstance(reply, ResponseError):
                return self._finish(connection, Request(ours, reply))
            self._keep(connection)
            if self._closed:
                self._discard_idle()
            return ours.decode(reply)

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        """Several requests in progress at once on one connection; each has its own result or error."""
        batch = self.batch(iter(calls))
        self.drive(batch)
        return batch.results

    def request(self, call: ValkeyCall[T], *, asking: bool) -> T:
        """One call without its announcement."""
        self._check_process()
        with self._places:
            return self._exchange(self._take(), Request(call, announce=False, asking=asking))

    def drive(self, batch: Batch) -> None:
        """Run a batch to its end."""
        self._check_process()
        with self._places:
            while True:
                try:
                    self._run_batch(self._take(), batch)
                    return
                except OutcomeUnknown as error:
                    batch.fail(error, rest=False)  # go on with the rest on a new connection
                except StoreError as error:
                    batch.fail(error, rest=True)
                    return

    def _run_batch(self, connection: Connection, batch: Batch) -> None:
        try:
            for packed in batch.requests():
                connection.send(packed)
                while batch.is_full:
                    _read_all(connection, batch.waiting[0])
                    batch.finish()
            while batch.waiting:
                _read_all(connection, batch.waiting[0])
                batch.finish()
        except BaseException as error:
            raise self._broken(connection, error) from None
        self._give_back(connection, good=not batch.wrong_server)

    def _exchange(self, connection: Connection, request: Request[T]) -> T:
        """Write a request and read its replies."""
        try:
            connection.send(request.packed)
            _read_all(connection, request)
        except BaseException as error:
            raise self._broken(connection, error) from None
        return self._finish(connection, request)

    def _finish(self, connection: Connection, request: Request[T]) -> T:
        """Send a request again behind its script if the server did not know that; keep the connection if it is good."""
        if (again := request.with_script()) is not None:
            return self._exchange(connection, again)
        self._give_back(connection, good=not request.wrong_server)
        return request.result()

    def _broken(self, connection: Connection, error: BaseException) -> BaseException:
        """Discard a connection that failed, or that was interrupted with a reply in progress; return what to raise."""
        self._discard(connection)
        return self._connection_error(error, sent=True) if isinstance(error, CONNECTION_FAILURES) else error

    def _give_back(self, connection: Connection, *, good: bool) -> None:
        if good:
            self._keep(connection)
            if not self._closed:
                return
        else:
            # After a promotion all others lead to the same wrong server.
            self._discard(connection)
        self._discard_idle()

    def _discard_idle(self) -> None:
        while (other := self._take_idle()) is not None:
            self._discard(other)

    def _take(self) -> Connection:
        try:
            while True:
                try:
                    connection, used = self._idle.pop()
                except IndexError:
                    return open_connection(self._pool.get_connection())
                if connection.is_open and (
                    time.monotonic() - used < IDLE_SECONDS or not connection.is_closed_by_server
                ):
                    return cast(Connection, connection)
                self._discard(connection)
        except CONNECTION_FAILURES as error:
            raise self._connection_error(error, sent=False) from None

    def _discard(self, connection: Connection) -> None:
        with suppress(*CONNECTION_FAILURES):
            connection.redis_connection.disconnect()
        self._pool.release(connection.redis_connection)

    def close(self) -> None:
        """Give the connections back; close them if they are ours."""
        if self._pid != os.getpid():
            return  # the sockets belong to the parent
        self._closed = True
        while (idle := self._take_idle()) is not None:
            self._pool.release(idle.redis_connection)
        if self._source.owned:
            self._source.close(self._pool)


class AsyncValkeyExecutor(_Common):
    """The same for an event loop."""

    def __init__(self, source: Source, start_timeout: float, durability: Durability) -> None:
        super().__init__(source)
        self._durability = durability
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)
        self._pool = source.async_pool(start_timeout)
        self._start_timeout = start_timeout

    async def start(self) -> None:
        """Make the first connection, and check the server."""
        try:
            check_server(
                await self.run(HELLO), self._source.display_name, self._durability, cluster=self._source.cluster
            )
        except BaseException:
            await self.close()
            raise
        if self._relax_timeouts(self._start_timeout):
            for connection, _ in self._idle:
                connection.redis_connection.socket_timeout = REPLY_TIMEOUT_SECONDS

    async def run(self, call: Call[T]) -> T:
        self._check_process()
        ours = cast("ValkeyCall[T]", call)
        if ours.wait is not None:
            return await self._run_after_wait(ours, ours.wait)
        async with self._places:
            connection = await self._take()
            if ours.announce is not None or ours.on_disk is not None:
                return await self._exchange(connection, Request(ours))
            try:
                await connection.send(ours.packed)
                reply = await connection.receive()
            except BaseException as error:
                raise await self._broken(connection, error) from None
            if isinstance(reply, ResponseError):
                return await self._finish(connection, Request(ours, reply))
            self._keep(connection)
            if self._closed:
                await self._discard_idle()
            return ours.decode(reply)

    async def _run_after_wait(self, call: ValkeyCall[T], wait: BlockingWait) -> T:
        """A call behind a blocking wait does not count as in progress: the unblock must be able to run beside it."""
        connection = await self._take()
        connection.extra_seconds = wait.seconds
        wait.waiter.sent(connection.give_up)
        try:
            return await self._exchange(connection, Request(call), wait)
        finally:
            connection.extra_seconds = 0.0

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        """Several requests in progress at once on one connection; each has its own result or error."""
        batch = self.batch(iter(calls))
        await self.drive(batch)
        return batch.results

    async def request(self, call: ValkeyCall[T], *, asking: bool) -> T:
        """One call without its announcement."""
        self._check_process()
        async with self._places:
            return await self._exchange(await self._take(), Request(call, announce=False, asking=asking))

    async def drive(self, batch: Batch) -> None:
        """Run a batch to its end."""
        self._check_process()
        async with self._places:
            while True:
                try:
                    await self._run_batch(await self._take(), batch)
                    return
                except OutcomeUnknown as error:
                    batch.fail(error, rest=False)
                except StoreError as error:
                    batch.fail(error, rest=True)
                    return

    async def _run_batch(self, connection: AsyncConnection, batch: Batch) -> None:
        try:
            for packed in batch.requests():
                await connection.send(packed)
                while batch.is_full:
                    await connection.receive_all(batch.waiting[0])
                    batch.finish()
            while batch.waiting:
                await connection.receive_all(batch.waiting[0])
                batch.finish()
        except BaseException as error:
            raise await self._broken(connection, error) from None
        await self._give_back(connection, good=not batch.wrong_server)

    async def _exchange(self, connection: AsyncConnection, request: Request[T], wait: BlockingWait | None = None) -> T:
        try:
            if wait is None:
                await connection.send(request.packed)
            else:
                await self._wait(connection, request, wait)
            await connection.receive_all(request)
        except BaseException as error:
            raise await self._broken(connection, error) from None
        return await self._finish(connection, request)

    async def _finish(self, connection: AsyncConnection, request: Request[T]) -> T:
        if (again := request.with_script()) is not None:
            return await self._exchange(connection, again)
        await self._give_back(connection, good=not request.wrong_server)
        return request.result()

    async def _wait(self, connection: AsyncConnection, request: Request[Any], wait: BlockingWait) -> None:
        """Send a request behind a blocking wait: the server begins with it when that ends."""
        script, loads = wait.script, wait.script.sha not in self._loaded
        await connection.send((load_command(script) if loads else b"") + wait.packed + request.packed)
        if loads and not isinstance(await connection.receive(), ResponseError):
            self._loaded.add(script.sha)
        registered = await connection.receive()
        if isinstance(registered, NoScriptError):
            self._loaded.discard(script.sha)
        # If it was refused, the sleeper is not registered, so no publish ends this wait; an unblock still does.
        wait.waiter.started(waits=registered != 0)
        popped = await connection.receive()
        # A server that refuses blocking reads runs the request at once.
        ended_by = "" if popped is None or isinstance(popped, ResponseError) else popped[1].decode()
        wait.waiter.ended(ended_by)

    async def _broken(self, connection: AsyncConnection, error: BaseException) -> BaseException:
        await self._discard(connection)
        return self._connection_error(error, sent=True) if isinstance(error, CONNECTION_FAILURES) else error

    async def _give_back(self, connection: AsyncConnection, *, good: bool) -> None:
        if good:
            self._keep(connection)
            if not self._closed:
                return
        else:
            await self._discard(connection)
        await self._discard_idle()

    async def _discard_idle(self) -> None:
        while (other := self._take_idle()) is not None:
            await self._discard(other)

    async def _take(self) -> AsyncConnection:
        try:
            while True:
                try:
                    connection, used = self._idle.pop()
                except IndexError:
                    return AsyncConnection(await self._pool.get_connection())
                if time.monotonic() - used >= IDLE_SECONDS:
                    # The loop may have been busy since: it learns of the end in its next turn, and we in the one after.
                    try:
                        for _ in range(2):
                            await asyncio.sleep(0)
                    except BaseException:
                        self._idle.append((connection, used))  # cancelled: nothing was sent
                        raise
                if not connection.is_closed:
                    return cast(AsyncConnection, connection)
                await self._discard(connection)
        except CONNECTION_FAILURES as error:
            raise self._connection_error(error, sent=False) from None

    async def _discard(self, connection: AsyncConnection) -> None:
        redis_connection = connection.detach()
        with suppress(*CONNECTION_FAILURES):
            await redis_connection.disconnect(nowait=True)
        await self._pool.release(redis_connection)

    async def close(self) -> None:
        """Give the connections back; close them if they are ours."""
        if self._pid != os.getpid():
            return
        self._closed = True
        while (idle := self._take_idle()) is not None:
            await self._pool.release(idle.detach())
        if self._source.owned:
            await self._source.close_async(self._pool)
