"""What waypost uses of redis-py that is private to it. No other module touches a private name of redis-py.

Checked with redis-py 6.2.0 and 8.1.0, hiredis 3.0.0 and 3.5.0, which bound the extras in pyproject.toml. `make oldest`
runs the tests with the oldest versions, `make test` with those of constraints.txt. When a new version comes:

- `redis/connection.py`: `_sock` of a connection is its socket, None while it is not connected, and another one after it
  was connected again; `protocol` is the version of the protocol, 2 or 3. Nothing but the socket is used once the
  connection is made.
- `redis/asyncio/connection.py`: `_writer` is an asyncio.StreamWriter, and nothing but its transport is used once the
  connection is made; `disconnect(nowait=True)` works with the protocol of the transport set back to the streams.
- `redis/_parsers/`: `parse_error` of a parser makes an exception of the text of an error reply; `handle_push_response`
  of an asyncio parser is a coroutine that acts on what the server sent without a request.

Public, but described in no manual, and used elsewhere: `read_response(disable_decoding, disconnect_on_error)`,
`send_packed_command(check_health)`, `can_read`, `connection_kwargs` of pools, `get_connection` without arguments, and
in `store/valkey/cluster.py` the nodes manager of cluster clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


def socket_of(connection: Any) -> Any:
    """The socket of a blocking connection that is connected."""
    return connection._sock


def has_pushes(connection: Any) -> bool:
    """Whether the server may send what no request asked for: with version 3 of the protocol."""
    return getattr(connection, "protocol", None) not in (2, "2")


def transport_of(connection: Any) -> asyncio.Transport:
    """The transport of an asyncio connection that is connected."""
    transport: asyncio.Transport = connection._writer.transport
    return transport


def error_maker_of(connection: Any) -> Callable[[str], Exception]:
    """What makes redis-py's exception of the text of an error reply."""
    maker: Callable[[str], Exception] = connection._parser.parse_error
    return maker


def push_handler_of(connection: Any) -> Callable[[Any], Awaitable[Any]]:
    """What acts on a push that an asyncio connection has received."""
    handler: Callable[[Any], Awaitable[Any]] = connection._parser.handle_push_response
    return handler
