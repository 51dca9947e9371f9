"""A blocking connection of redis-py, without its layers between a request and the socket.

redis-py opens the connection and handles TLS, passwords and Sentinels. After that a request is one write, and its reply
is parsed where it is received.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from waypost.errors import MissingExtra
from waypost.store.silence import Sending, unsent_bytes
from waypost.store.valkey.redis_py import error_maker_of, has_pushes, socket_of

try:
    import hiredis
except ImportError as error:  # pragma: no cover - exercised in a subprocess without the extra
    raise MissingExtra('the Valkey store needs hiredis: pip install "waypost[valkey]"') from error

#: A long request is written in pieces of this size: over a slow link a limit for the whole of it would be too short.
PIECE_BYTES = 1 << 16
#: As much of a reply is read at once.
READ_BYTES = 1 << 16
#: The marker for an incomplete reply: an object that no reply can be.
NO_REPLY = object()


class Connection:
    """Bytes to the server and replies from it, for one call or batch at a time."""

    __slots__ = ("_buffer", "_reader", "_socket", "redis_connection")

    def __init__(self, connection: Any) -> None:
        self.redis_connection = connection
        self._socket = socket_of(connection)
        self._buffer = bytearray(READ_BYTES)
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse, replyError=error_maker_of(connection), notEnoughData=NO_REPLY
        )

    @property
    def is_open(self) -> bool:
        """Whether this side has not closed it: the caller may close a client of its own while we keep a connection."""
        return socket_of(self.redis_connection) is self._socket

    @property
    def is_closed_by_server(self) -> bool:
        """Whether the server closed an idle connection: the end can be read, or raises an error."""
        try:
            return bool(self.redis_connection.can_read(0))
        except (RedisError, OSError):
            return True

    def send(self, request: bytes) -> None:
        """Write a request in pieces, each of which has the socket's time limit to itself."""
        if len(request) <= PIECE_BYTES:
            self._socket.sendall(request)
            return
        view = memoryview(request)
        for start in range(0, len(request), PIECE_BYTES):
            self._socket.sendall(view[start : start + PIECE_BYTES])

    def receive(self) -> Any:
        """The next reply, or the server's refusal."""
        reader = self._reader
        while (reply := reader.gets()) is NO_REPLY:
            count = self._read()
            if count == 0:
                raise redis.ConnectionError("closed by the server")
            reader.feed(self._buffer, 0, count)  # type: ignore[arg-type]  # it takes any buffer
        if isinstance(reply, RedisError) and not isinstance(reply, ResponseError):
            raise reply
        return reply

    def _read(self) -> int:
        """Each read has the socket's time limit, and while our request is on its way another one."""
        sending: Sending | None = None
        while True:
            try:
                return int(self._socket.recv_into(self._buffer))
            except TimeoutError:
                sending = sending or Sending()
                if not sending.goes_on(unsent_bytes(self._socket.fileno())):
                    raise


class PushConnection(Connection):
    """One on which the server may also send what no request asked for: redis-py reads that, and acts on it."""

    __slots__ = ()

    def __init__(self, connection: Any) -> None:
        self.redis_connection = connection

    @property
    def is_open(self) -> bool:
        return True  # redis-py connects again

    def send(self, request: bytes) -> None:
        view = memoryview(request)
        pieces = [view[start : start + PIECE_BYTES] for start in range(0, len(request), PIECE_BYTES)]
        self.redis_connection.send_packed_command(pieces, check_health=False)

    def receive(self) -> Any:
        sending = Sending()
        while True:
            try:
                return self.redis_connection.read_response(disable_decoding=True, disconnect_on_error=False)
            except ResponseError as error:
                return error
            except redis.TimeoutError:
                if not sending.goes_on(unsent_bytes(socket_of(self.redis_connection).fileno())):
                    raise


def open_connection(connection: Any) -> Connection:
    """What sends requests through a connection that redis-py has made."""
    return PushConnection(connection) if has_pushes(connection) else Connection(connection)
