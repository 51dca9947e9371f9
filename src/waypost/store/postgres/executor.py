"""Executors: the only part that touches a socket.

A statement is sent with its parameters in one message and its reply awaited: one round trip, one transaction. The
connection is kept for the next call, or returned to the caller's pool. A step that was rolled back because of a
conflict with another step (a deadlock, a unique index) is sent again at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar, cast

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult

from waypost.errors import ForkedClient, OutcomeUnknown, StoreError, StoreUnavailable, WaypostError
from waypost.store.places import Places
from waypost.store.port import Call
from waypost.store.postgres import psycopg_internals as internals
from waypost.store.postgres import schema
from waypost.store.postgres.failures import AT_ONCE, KNOWN_ID, map_connection_error, map_error
from waypost.store.postgres.prepared import (
    ALREADY_PREPARED,
    NOT_PREPARED,
    Prepared,
    PreparedByConnection,
    Statement,
    name_of,
)
from waypost.store.postgres.schema import Names, check_version
from waypost.store.postgres.sources import Source, UrlSource, check_isolation, check_server
from waypost.store.postgres.statement import PostgresCall, one
from waypost.store.silence import Sending, unsent_bytes

T = TypeVar("T")
Steps = Generator[Any, Any, T]

#: A longer silence means a dead connection. It is this long because a step may wait for a row that a user's
#: transaction holds.
REPLY_TIMEOUT_SECONDS = 30.0
#: How often a step is repeated after conflicts with others.
REPEATS_MAX = 10
#: The number of concurrent calls of one client; further calls wait. A server has some hundred connections for all
#: clients, and more than a few dozen active ones make it slower.
CONNECTIONS_MAX = 32
#: A connection idle for longer is checked before it is used: the server may have closed it.
IDLE_SECONDS = 1.0
CONNECTION_FAILURES = (psycopg.Error, OSError, EOFError)

_GOOD = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)


def send(connection: PGconn, call: PostgresCall[Any], prepared: Prepared) -> Steps[bool]:
    """Send one statement, without waiting for its reply; return whether it was sent as a prepared one."""
    parameters = call.parameters
    kinds, values = tuple([kind for kind, _ in parameters]), [value for _, value in parameters]
    formats, name = [1] * len(parameters), None
    if call.prepares:
        statement = (call.name, call.command, kinds)
        name = prepared.name(statement)
        if name is None and prepared.is_due(statement):
            yield from _prepare(connection, statement, prepared)
            name = prepared.name(statement)
    if name is None:
        connection.send_query_params(
            call.command, values, param_types=kinds, param_formats=formats, result_format=1
        )  # fmt: skip
    else:
        connection.send_query_prepared(name, values, param_formats=formats, result_format=1)
    yield from internals.send(connection)
    return name is not None


def _prepare(connection: PGconn, statement: Statement, prepared: Prepared) -> Steps[None]:
    _, command, kinds = statement
    connection.send_prepare(name_of(statement), command, param_types=kinds)
    yield from internals.send(connection)
    result = yield from receive(connection)
    if result.status in _GOOD or _state(result) == ALREADY_PREPARED:
        prepared.add(statement)
    else:
        prepared.refuse()


def receive(connection: PGconn) -> Steps[PGresult]:
    """Wait for the reply to what was sent."""
    results: list[PGresult] = yield from internals.fetch_many(connection)
    return results[-1]


def execute(connection: PGconn, call: PostgresCall[Any], prepared: Prepared) -> Steps[PGresult]:
    """Run one statement and return its reply; it is sent again if it was rolled back because of a conflict."""
    for repeats in range(REPEATS_MAX):
        by_name = yield from send(connection, call, prepared)
        result = yield from receive(connection)
        if result.status in _GOOD:
            break
        if not _runs_again(result, prepared, by_name=by_name, first=repeats == 0):
            break
    return result


def _runs_again(result: PGresult, prepared: Prepared, *, by_name: bool, first: bool) -> bool:
    """Return whether a step that failed must be sent again at once."""
    state = _state(result)
    if by_name and state in NOT_PREPARED:
        prepared.refuse()
        return True
    # The step that stored this message id has committed: a repeat of it now finds its result, another operation
    # fails.
    return state in AT_ONCE or (state == KNOWN_ID and first)


def in_time(steps: Steps[T], connection: PGconn) -> Steps[T]:
    """Run the same steps with a timeout while nothing is received or sent."""
    deadline, sending = 0.0, Sending()
    try:
        wanted = next(steps)
        while True:
            ready = yield wanted
            if ready:
                deadline = 0.0
            elif deadline == 0.0:
                # Silent since the previous check, a moment ago.
                deadline = time.monotonic() + REPLY_TIMEOUT_SECONDS
            elif time.monotonic() > deadline:
                if not sending.goes_on(unsent_bytes(connection.socket)):
                    raise TimeoutError("no reply in time")
                deadline = time.monotonic() + REPLY_TIMEOUT_SECONDS
            wanted = steps.send(ready)
    except StopIteration as stop:
        return cast(T, stop.value)


def _state(result: PGresult) -> str:
    state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
    if state == "23505" and (result.error_field(DiagnosticField.CONSTRAINT_NAME) or b"").endswith(b"_message_id"):
        return KNOWN_ID
    return state


def read(call: PostgresCall[T], result: PGresult) -> T:
    """Return the result of a reply, or raise its error."""
    if result.status in _GOOD:
        return call.decode(result)
    text = (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
    state = _state(result)
    if state == KNOWN_ID and (detail := result.error_field(DiagnosticField.MESSAGE_DETAIL)):
        text = detail.decode(errors="replace").partition("=(")[2].partition(")")[0].rpartition(" ")[2]
    raise map_error(state, text, call.queue, call.name)


def hello(names: Names) -> PostgresCall[int | None]:
    """The first request of an executor: the version of the tables; None without tables, 0 for an old snapshot."""
    statement = (
        "SELECT (current_setting('transaction_isolation') = 'read committed')::int WHERE to_regclass($1) IS NOT NULL"
    )
    return PostgresCall("connect", "", statement.encode(), [(25, names.of("schema").encode())], _number)


def version_of(names: Names) -> PostgresCall[int | None]:
    """Read the version of the tables in the database."""
    return PostgresCall("connect", "", names.fill("SELECT version FROM {schema}").encode(), (), _number)


def has_functions(names: Names) -> PostgresCall[int | None]:
    """Read whether the functions of this release exist beside newer ones, as 1 or 0."""
    statement = names.fill(f"SELECT count(*)::int FROM {{interface}} WHERE version = {schema.VERSION}")
    return PostgresCall("connect", "", statement.encode(), (), _number)


def _number(result: PGresult) -> int | None:
    value = one(result)
    return None if value is None else int.from_bytes(value, "big", signed=True)


class _Common:
    """The parts of both executors: the source, the idle connections, the check for a fork."""

    def __init__(self, source: Source, names: Names, start_timeout: float) -> None:
        self._source = source
        self._names = names
        self._start_timeout = start_timeout
        self._pid = os.getpid()
        #: Idle connections, with the time of their last use.
        self._idle: deque[tuple[Any, float]] = deque()
        #: A call that was in progress at the close may still end, and must not keep a connection.
        self._closed = False
        self._prepared = PreparedByConnection(are_ours=isinstance(source, UrlSource))

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ForkedClient("this client was made before a fork; make a new one in the child process")

    def _from_idle(self) -> Any:
        """Return an idle connection that is still open, or None."""
        while True:
            try:
                connection, used = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - used < IDLE_SECONDS or _is_alive(connection.pgconn):
                return connection
            connection.pgconn.finish()

    def _connection_error(self, error: BaseException, *, sent: bool) -> StoreError:
        return map_connection_error(error, self._source.display_name, sent=sent)


def _is_alive(connection: PGconn) -> bool:
    """Return whether the server has not closed an idle connection meanwhile."""
    try:
        connection.consume_input()
    except psycopg.Error:
        return False
    return connection.transaction_status == TransactionStatus.IDLE


class PostgresExecutor(_Common):
    """Runs calls on blocking connections. Safe from several threads."""

    def __init__(self, source: Source, names: Names, start_timeout: float) -> None:
        super().__init__(source, names, start_timeout)
        self._places = Places(CONNECTIONS_MAX)
        connection = self._take()
        version = connection.pgconn.server_version  # now, because the caller's pool may close it when it is returned
        self._keep(connection)
        try:
            check_server(version, source.display_name)
            found = check_isolation(self.run(hello(names)), source.display_name)
            made = None if found is None else self.run(version_of(names))
            is_newer = made is not None and made > schema.VERSION
            kept = self.run(has_functions(names)) if is_newer else 0
            check_version(made, names, is_kept=bool(kept))
        except BaseException:
            self.close()
            raise

    def run(self, call: Call[T]) -> T:
        wanted = cast("PostgresCall[T]", call)
        connection = self._take()
        result = self._wait(connection, execute(connection.pgconn, wanted, self._prepared.of(connection)))
        self._keep(connection)
        return read(wanted, result)

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        """Run calls one after the other on one connection; the next is prepared while the server works on this one.

        A settle and the claim that follows it are one statement.
        """
        results: list[T | Exception] = []
        coming = cast("Iterator[PostgresCall[T]]", iter(calls))
        call = next(coming, None)
        while call is not None:
            if call.join is not None and (joined := next(coming, None)) is not None:
                results += self._run_joined(call, joined, call.join)
                call = next(coming, None)
                continue
            following: PostgresCall[T] | None = None
            advanced = False
            try:
                connection = self._take()
            except StoreError as error:
                # There is no server: the remaining calls were not sent either.
                return [*results, error, *(error for _ in coming)]
            try:
                prepared = self._prepared.of(connection)
                by_name = self._wait(connection, send(connection.pgconn, call, prepared))
                try:
                    following, advanced = next(coming, None), True
                except BaseException:
                    self._discard(connection)  # interrupted with a reply in progress
                    raise
                result = self._wait(connection, receive(connection.pgconn))
                if result.status not in _GOOD and _runs_again(result, prepared, by_name=by_name, first=True):
                    result = self._wait(connection, execute(connection.pgconn, call, prepared))
                self._keep(connection)
                results.append(read(call, result))
            except WaypostError as error:
                results.append(error)
            call = following if advanced else next(coming, None)
        return results

    def _run_joined(
        self, call: PostgresCall[Any], following: PostgresCall[Any], join: Callable[..., PostgresCall[tuple[Any, Any]]]
    ) -> list[Any]:
        """Run two calls as one statement. If it is refused, nothing was done: they are run separately."""
        try:
            first, second = self.run(join(following))
            return [first, second]
        except (StoreUnavailable, OutcomeUnknown) as error:
            return [error, error]
        except WaypostError:
            pass
        results: list[Any] = []
        for alone in (call, following):
            try:
                results.append(self.run(alone))
            except WaypostError as error:
                results.append(error)
        return results

    def _wait(self, connection: psycopg.Connection[Any], steps: Steps[T]) -> T:
        try:
            with connection.lock:
                return connection.wait(in_time(steps, connection.pgconn))
        except CONNECTION_FAILURES as error:
            self._discard(connection)
            raise self._connection_error(error, sent=True) from None
        except BaseException:
            self._discard(connection)  # interrupted with a reply in progress
            raise

    def _take(self) -> psycopg.Connection[Any]:
        """Return a connection when it is this call's turn. It is given back by `_keep` or `_discard`."""
        self._check_process()
        self._places.acquire()
        try:
            known = self._from_idle()
            if known is not None:
                return cast("psycopg.Connection[Any]", known)
            return self._source.take(self._start_timeout)
        except CONNECTION_FAILURES as error:
            self._places.release()
            raise self._connection_error(error, sent=False) from None
        except BaseException:
            self._places.release()
            raise

    def _keep(self, connection: psycopg.Connection[Any]) -> None:
        if connection.pgconn.transaction_status != TransactionStatus.IDLE:
            self._discard(connection)
            return
        try:
            if not self._source.give(connection):
                self._idle.append((connection, time.monotonic()))
                if self._closed:
                    self._close_idle()
        finally:
            self._places.release()

    def _discard(self, connection: psycopg.Connection[Any]) -> None:
        try:
            with suppress(*CONNECTION_FAILURES):
                connection.close()
            self._source.give(connection)
        finally:
            self._places.release()

    def lend(self) -> psycopg.Connection[Any]:
        """Lend a connection for a transaction of the caller, until `take_back`."""
        return self._take()

    def take_back(self, connection: psycopg.Connection[Any]) -> None:
        """Take the connection back at the end of the transaction."""
        self._keep(connection)

    def close(self) -> None:
        """Close the connections that are ours."""
        if self._pid != os.getpid():
            return  # the sockets belong to the parent
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        with suppress(IndexError):  # another thread may take the last one
            while True:
                self._idle.pop()[0].close()


class AsyncPostgresExecutor(_Common):
    """The same for an event loop."""

    def __init__(self, source: Source, names: Names, start_timeout: float) -> None:
        super().__init__(source, names, start_timeout)
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)

    async def start(self) -> None:
        """Make the first connection, and check the server and its tables."""
        connection = await self._take()
        version = connection.pgconn.server_version
        await self._keep(connection)
        try:
            check_server(version, self._source.display_name)
            found = check_isolation(await self.run(hello(self._names)), self._source.display_name)
            made = None if found is None else await self.run(version_of(self._names))
            is_newer = made is not None and made > schema.VERSION
            kept = await self.run(has_functions(self._names)) if is_newer else 0
            check_version(made, self._names, is_kept=bool(kept))
        except BaseException:
            await self.close()
            raise

    async def run(self, call: Call[T]) -> T:
        wanted = cast("PostgresCall[T]", call)
        connection = await self._take()
        result = await self._wait(connection, execute(connection.pgconn, wanted, self._prepared.of(connection)))
        await self._keep(connection)
        return read(wanted, result)

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        """Run calls one after the other on one connection; the next is prepared while the server works on this one.

        A settle and the claim that follows it are one statement.
        """
        results: list[T | Exception] = []
        coming = cast("Iterator[PostgresCall[T]]", iter(calls))
        call = next(coming, None)
        while call is not None:
            if call.join is not None and (joined := next(coming, None)) is not None:
                results += await self._run_joined(call, joined, call.join)
                call = next(coming, None)
                continue
            following: PostgresCall[T] | None = None
            advanced = False
            try:
                connection = await self._take()
            except StoreError as error:
                # There is no server: the remaining calls were not sent either.
                return [*results, error, *(error for _ in coming)]
            try:
                prepared = self._prepared.of(connection)
                by_name = await self._wait(connection, send(connection.pgconn, call, prepared))
                try:
                    following, advanced = next(coming, None), True
                except BaseException:
                    await self._discard(connection)
                    raise
                result = await self._wait(connection, receive(connection.pgconn))
                if result.status not in _GOOD and _runs_again(result, prepared, by_name=by_name, first=True):
                    result = await self._wait(connection, execute(connection.pgconn, call, prepared))
                await self._keep(connection)
                results.append(read(call, result))
            except WaypostError as error:
                results.append(error)
            call = following if advanced else next(coming, None)
        return results

    async def _run_joined(
        self, call: PostgresCall[Any], following: PostgresCall[Any], join: Callable[..., PostgresCall[tuple[Any, Any]]]
    ) -> list[Any]:
        """Run two calls as one statement. If it is refused, nothing was done: they are run separately."""
        try:
            first, second = await self.run(join(following))
            return [first, second]
        except (StoreUnavailable, OutcomeUnknown) as error:
            return [error, error]
        except WaypostError:
            pass
        results: list[Any] = []
        for alone in (call, following):
            try:
                results.append(await self.run(alone))
            except WaypostError as error:
                results.append(error)
        return results

    async def _wait(self, connection: psycopg.AsyncConnection[Any], steps: Steps[T]) -> T:
        try:
            async with connection.lock:
                return await connection.wait(in_time(steps, connection.pgconn))
        except CONNECTION_FAILURES as error:
            await self._discard(connection)
            raise self._connection_error(error, sent=True) from None
        except BaseException:
            await self._discard(connection)
            raise

    async def _take(self) -> psycopg.AsyncConnection[Any]:
        self._check_process()
        await self._places.acquire()
        try:
            known = self._from_idle()
            if known is not None:
                return cast("psycopg.AsyncConnection[Any]", known)
            return await self._source.take_async(self._start_timeout)
        except CONNECTION_FAILURES as error:
            self._places.release()
            raise self._connection_error(error, sent=False) from None
        except BaseException:
            self._places.release()
            raise

    async def _keep(self, connection: psycopg.AsyncConnection[Any]) -> None:
        if connection.pgconn.transaction_status != TransactionStatus.IDLE:
            await self._discard(connection)
            return
        try:
            if not await self._source.give_async(connection):
                self._idle.append((connection, time.monotonic()))
                if self._closed:
                    await self._close_idle()
        finally:
            self._places.release()

    async def _discard(self, connection: psycopg.AsyncConnection[Any]) -> None:
        try:
            with suppress(*CONNECTION_FAILURES):
                await connection.close()
            await self._source.give_async(connection)
        finally:
            self._places.release()

    async def lend(self) -> psycopg.AsyncConnection[Any]:
        """Lend a connection for a transaction of the caller's, until `take_back`."""
        return await self._take()

    async def take_back(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Take the connection back at the end of the transaction."""
        await self._keep(connection)

    async def close(self) -> None:
        """Close the connections that are ours."""
        if self._pid != os.getpid():
            return
        self._closed = True
        await self._close_idle()

    async def _close_idle(self) -> None:
        while self._idle:
            await self._idle.pop()[0].close()
