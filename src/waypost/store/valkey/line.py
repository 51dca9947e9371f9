"""A connection of redis-py's asyncio client, asked and heard without the streams that lie between it and its socket.

redis-py makes the connection: TLS, passwords, Sentinels and the like are its own. From then on a request is one write,
and its reply is read where the event loop brings it: two turns of the loop for a call, where the streams take five.
That is most of what an idle worker's claim takes. When the connection is given back it has its streams again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import redis
from redis.exceptions import InvalidResponse, RedisError

from waypost.errors import MissingExtra
from waypost.store.silence import Sending, unsent_bytes

try:
    import hiredis
except ImportError as error:  # pragma: no cover - exercised in a subprocess without the extra
    raise MissingExtra('the Valkey store needs hiredis: pip install "waypost[valkey]"') from error

#: A reply that arrives in parts is not given up before so long after the last one.
GIVE_UP_SECONDS = 2.0
#: No whole reply is there yet. (No reply can be this.)
NOTHING = object()


class Line(asyncio.Protocol):
    """Bytes to the server and replies from it, one conversation at a time."""

    __slots__ = (
        "_alarm",
        "_clear",
        "_failure",
        "_heard",
        "_loop",
        "_reading",
        "_replies",
        "_sending",
        "_streams",
        "_transport",
        "connection",
        "patience",
    )

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        #: So many seconds more than the connection's own limit may the server be silent.
        self.patience = 0.0
        #: When a part of the reply came, and whether our request is still on its way.
        self._heard = 0.0
        self._sending: Sending | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._replies = hiredis.Reader(
            protocolError=InvalidResponse, replyError=connection._parser.parse_error, notEnoughData=NOTHING
        )
        self._failure: BaseException | None = None
        #: Who waits for a reply, and who for room to write.
        self._reading: asyncio.Future[Any] | None = None
        self._clear: asyncio.Future[None] | None = None
        self._transport = connection._writer.transport
        self._streams = self._transport.get_protocol()
        self._transport.set_protocol(self)

    @property
    def is_closed(self) -> bool:
        """Whether it can be used no more: the server is gone, or said something that nobody asked for."""
        return self._failure is not None or self._transport.is_closing() or self._replies.has_data()

    def leave(self) -> Any:
        """The connection, with its streams as they were."""
        if self._failure is None:
            self._transport.set_protocol(self._streams)
        return self.connection

    def give_up(self) -> None:
        """Wait no longer for a reply of which nothing arrives: the connection is lost, as far as anybody can tell."""
        silent = self._loop.time() - self._heard > GIVE_UP_SECONDS
        if silent and self._reading is not None and not self._reading.done():
            self._reading.set_exception(redis.TimeoutError("the server did not answer in time"))

    async def send(self, request: bytes) -> None:
        """Write a request; wait only if too much is under way already."""
        if self._failure is not None:
            raise self._failure
        self._transport.write(request)
        if self._clear is not None:
            await self._wait(self._clear)

    async def receive(self) -> Any:
        """The next reply. What the server refuses is raised."""
        reply = self._replies.gets()
        if reply is NOTHING:
            if self._failure is not None:
                raise self._failure
            self._reading = self._loop.create_future()
            try:
                reply = await self._wait(self._reading)
            finally:
                self._reading = None
        if isinstance(reply, RedisError):
            raise reply
        return reply

    async def _wait(self, future: asyncio.Future[Any]) -> Any:
        seconds = self.connection.socket_timeout
        if seconds is None:
            return await future
        limit = seconds + self.patience
        self._sending = None
        self._alarm = self._loop.call_later(limit, self._give_up, future, limit)
        try:
            return await future
        finally:
            self._alarm.cancel()

    def _give_up(self, future: asyncio.Future[Any], limit: float) -> None:
        """End a wait in which nothing has come or gone for so long; otherwise look again."""
        if future.done():
            return
        rest = self._heard + limit - self._loop.time()
        if rest <= 0:
            self._sending = self._sending or Sending()
            rest = limit if self._sending.goes_on(self._unsent()) else 0.0
        if rest > 0:
            self._alarm = self._loop.call_later(rest, self._give_up, future, limit)
        else:
            future.set_exception(redis.TimeoutError("the server did not answer in time"))

    def _unsent(self) -> int:
        transport = self._transport
        return int(transport.get_write_buffer_size()) + unsent_bytes(transport.get_extra_info("socket").fileno())

    # ---- what the event loop calls -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._replies.feed(data)
        if self._reading is None or self._reading.done():
            return
        try:
            reply = self._replies.gets()
        except RedisError as error:
            self._reading.set_exception(error)
            return
        if reply is not NOTHING:
            self._reading.set_result(reply)
        else:
            self._heard = self._loop.time()

    def pause_writing(self) -> None:
        self._clear = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._clear is not None and not self._clear.done():
            self._clear.set_result(None)
        self._clear = None

    def connection_lost(self, error: Exception | None) -> None:
        self._failure = redis.ConnectionError(f"the connection was lost ({error or 'closed by the server'})")
        for future in (self._reading, self._clear):
            if future is not None and not future.done():
                future.set_exception(self._failure)
        self._streams.connection_lost(error)
