"""A connection of redis-py's asyncio client, without the streams between it and its socket.

redis-py opens the connection and handles TLS, passwords and Sentinels. After that a request is one write,
and its reply is parsed in the callback of the event loop: two iterations of the loop for a call, where the streams take
five. That is most of the time of an idle worker's claim. When the connection is returned it has its streams again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import redis
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from waypost.errors import MissingExtra
from waypost.store.silence import Sending, unsent_bytes
from waypost.store.valkey.redis_py import error_maker_of, push_handler_of, transport_of
from waypost.store.valkey.requests import Request

try:
    import hiredis
except ImportError as error:  # pragma: no cover - exercised in a subprocess without the extra
    raise MissingExtra('the Valkey store needs hiredis: pip install "waypost[valkey]"') from error

#: A reply that arrives in parts fails only after this long without a further part.
SILENCE_SECONDS = 2.0
#: The marker for an incomplete reply: an object that no reply can be.
NO_REPLY = object()


class AsyncConnection(asyncio.Protocol):
    """Bytes to the server and replies from it, for one call or batch at a time."""

    __slots__ = (
        "_awaited",
        "_failure",
        "_last_data",
        "_limit",
        "_loop",
        "_pushes",
        "_reader",
        "_sending",
        "_since",
        "_stream_protocol",
        "_timer",
        "_transport",
        "_waited_for",
        "_writable",
        "extra_seconds",
        "redis_connection",
    )

    def __init__(self, connection: Any) -> None:
        self.redis_connection = connection
        #: Seconds that the server may be silent beyond the connection's own limit.
        self.extra_seconds = 0.0
        #: The current wait: since when, its timeout without data from the server, whether the request is still being
        #: sent; when the last part of a reply came.
        self._waited_for: asyncio.Future[Any] | None = None
        self._since = 0.0
        self._limit = 0.0
        self._sending: Sending | None = None
        self._last_data = 0.0
        #: Checks the current wait. It outlives that, because setting and cancelling one per reply would cost more.
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse, replyError=error_maker_of(connection), notEnoughData=NO_REPLY
        )
        #: What the server sent without a request: redis-py acts on it with the next reply.
        self._pushes: list[Any] = []
        self._failure: BaseException | None = None
        #: What a receive waits for, and what a send waits for while the write buffer is full.
        self._awaited: asyncio.Future[Any] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._transport = transport_of(connection)
        self._stream_protocol = self._transport.get_protocol()
        self._transport.set_protocol(self)

    @property
    def is_closed(self) -> bool:
        """Whether it can no longer be used: the server closed it, or sent a reply without a request."""
        if self._failure is not None or self._transport.is_closing():
            return True
        try:
            return self._next() is not NO_REPLY or self._reader.has_data()
        except RedisError:
            return True

    def detach(self) -> Any:
        """Return the connection with its original streams."""
        if self._timer is not None:
            self._timer.cancel()
        if self._failure is None:
            self._transport.set_protocol(self._stream_protocol)
        return self.redis_connection

    def give_up(self) -> None:
        """Fail the current receive, unless a part of its reply has just arrived: the connection seems to be lost."""
        silent = self._loop.time() - self._last_data > SILENCE_SECONDS
        if silent and self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(redis.TimeoutError("the server did not answer in time"))

    async def send(self, request: bytes) -> None:
        """Write a request; wait only if the write buffer is full."""
        if self._failure is not None:
            raise self._failure
        self._transport.write(request)
        if self._writable is not None:
            await self._wait(self._writable)

    async def receive(self) -> Any:
        """The next reply, or the server's refusal."""
        reply = self._next()
        if reply is NO_REPLY:
            if self._failure is not None:
                raise self._failure
            self._awaited = self._loop.create_future()
            try:
                reply = await self._wait(self._awaited)
            finally:
                self._awaited = None
        while self._pushes:
            await push_handler_of(self.redis_connection)(self._pushes.pop(0))
        if isinstance(reply, RedisError) and not isinstance(reply, ResponseError):
            raise reply
        return reply

    def _next(self) -> Any:
        """The next reply that has arrived, or NO_REPLY."""
        reply = self._reader.gets()
        # With version 3 of the protocol the server also sends notices without a request.
        while type(reply) is hiredis.PushNotification:
            self._pushes.append(reply)
            reply = self._reader.gets()
        return reply

    async def receive_all(self, request: Request[Any]) -> None:
        """Read the replies of a request."""
        for _ in range(request.expected):
            request.replies.append(await self.receive())

    async def _wait(self, future: asyncio.Future[Any]) -> Any:
        seconds = self.redis_connection.socket_timeout
        if seconds is None:
            return await future
        self._waited_for, self._sending = future, None
        self._since, self._limit = self._loop.time(), seconds + self.extra_seconds
        ends = self._since + self._limit
        if self._timer is None or self._timer.when() > ends:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(ends, self._check_silence)
        try:
            return await future
        finally:
            self._waited_for = None

    def _check_silence(self) -> None:
        """Fail a wait in which nothing was received or sent until the timeout; otherwise check again later."""
        self._timer, future = None, self._waited_for
        if future is None or future.done():
            return
        left = max(self._since, self._last_data) + self._limit - self._loop.time()
        if left <= 0:
            self._sending = self._sending or Sending()
            left = self._limit if self._sending.goes_on(self._unsent()) else 0.0
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_silence)
        else:
            future.set_exception(redis.TimeoutError("the server did not answer in time"))

    def _unsent(self) -> int:
        transport = self._transport
        return int(transport.get_write_buffer_size()) + unsent_bytes(transport.get_extra_info("socket").fileno())

    # ---- called by the event loop -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._awaited is None or self._awaited.done():
            return
        try:
            reply = self._next()
        except RedisError as error:
            self._awaited.set_exception(error)
            return
        if reply is not NO_REPLY:
            self._awaited.set_result(reply)
        else:
            self._last_data = self._loop.time()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def connection_lost(self, error: Exception | None) -> None:
        self._failure = redis.ConnectionError(f"the connection was lost ({error or 'closed by the server'})")
        for future in (self._awaited, self._writable):
            if future is not None and not future.done():
                future.set_exception(self._failure)
        self._stream_protocol.connection_lost(error)
