"""Wake-ups over the pub/sub of a Valkey server, one channel for each topic of a queue.

The scripts of a Valkey store notify sleepers themselves. This module receives the notifications, and sends them for any
other store. In a Cluster classic channels reach every node, so any node can be used; with Sentinel it is the primary.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from typing import Any

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from waypost.errors import UnusableClient
from waypost.store.valkey.command import command
from waypost.store.valkey.redis_py import socket_of
from waypost.store.valkey.sources import Source
from waypost.wake.port import Topic
from waypost.wake.transport import InterruptibleTransport, join_notifications, split_notifications

READ_BYTES = 65_536
#: The settings of an asyncio client that a blocking connection in a thread can use too.
SHARED_OPTIONS = frozenset(
    ("host", "port", "db", "username", "password", "path", "credential_provider", "socket_keepalive", "ssl_keyfile",
     "ssl_certfile", "ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_check_hostname",
     "ssl_min_version", "ssl_ciphers")
)  # fmt: skip


def channel_of(topic: Topic) -> bytes:
    """The name of the channel, the same as in the scripts: it has the hash tag of the queue."""
    return f"{{{topic.namespace}:{topic.queue}}}:{topic.kind}".encode()


class ValkeyTransport(InterruptibleTransport):
    """One connection that listens, and one that sends once there is something to send."""

    def __init__(self, source: Source, timeout: float) -> None:
        super().__init__()
        self._source = source
        self._timeout = timeout
        self._pool: Any = None
        self._listener: Any = None
        self._sender: Any = None
        self._received: list[tuple[Topic, list[str]]] = []
        self._confirmed = 0
        self._pongs = 0
        self._replies = hiredis.Reader()
        self._topics: dict[bytes, Topic] = {}

    def open(self) -> None:
        try:
            self._pool = self._source.pool(self._timeout)
        except UnusableClient:
            self._pool = self._source.async_pool(self._timeout)
        self._listener = self._connect()

    def _connect(self) -> Any:
        """Return a new connection with the settings of the pool."""
        kind, options = _connection_options(self._pool)
        ours = {
            "protocol": 2, "retry": Retry(NoBackoff(), 0), "socket_timeout": self._timeout,
            "socket_connect_timeout": self._timeout, "health_check_interval": 0,
        }  # fmt: skip
        connection = kind(**{**options, **ours})
        connection.connect()
        return connection

    def listen(self, topics: Sequence[Topic]) -> None:
        self._confirmed = 0
        self._topics |= {channel_of(topic): topic for topic in topics}
        self._send_command(b"SUBSCRIBE", *(channel_of(topic) for topic in topics))
        self._read_until(lambda: self._confirmed >= len(topics))

    def unlisten(self, topics: Sequence[Topic]) -> None:
        channels = [channel_of(topic) for topic in topics]
        self._send_command(b"UNSUBSCRIBE", *channels)
        for channel in channels:
            self._topics.pop(channel, None)

    def _send_command(self, *parts: bytes) -> None:
        self._listener.send_packed_command([command(*parts)], check_health=False)

    def _read_until(self, holds: Any) -> None:
        deadline = time.monotonic() + self._timeout
        while not holds():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the server did not answer")
            if self.wait_readable(socket_of(self._listener).fileno(), left):
                self._read()

    def send(self, topic: Topic, notifications: Sequence[str]) -> None:
        if self._sender is None:
            self._sender = self._connect()
        self._sender.send_packed_command(
            [command(b"PUBLISH", channel_of(topic), join_notifications(notifications).encode())], check_health=False
        )
        self._sender.read_response()

    def wait(self, seconds: float) -> list[tuple[Topic, list[str]]]:
        if not self._received and self.wait_readable(socket_of(self._listener).fileno(), seconds):
            self._read()
        received, self._received = self._received, []
        return received

    def _read(self) -> None:
        """Read the notifications that have arrived, without redis-py's reader, which would delay each wake-up."""
        socket = socket_of(self._listener)
        while True:
            data = socket.recv(READ_BYTES)
            if not data:
                raise redis.ConnectionError("the server closed the connection")
            self._replies.feed(data)
            # TLS may have buffered data that a poll of the socket does not show.
            if not (hasattr(socket, "pending") and socket.pending()):
                break
        while (reply := self._replies.gets()) is not False:
            if isinstance(reply, hiredis.ReplyError):
                raise redis.ResponseError(str(reply))
            kind = reply[0] if isinstance(reply, list) else b"pong"  # without a subscription the reply has another form
            if kind == b"message":
                # A notification that arrives after the last listener has left has no topic.
                if (topic := self._topics.get(reply[1])) is not None:
                    self._received.append((topic, split_notifications(reply[2].decode(errors="replace"))))
            elif kind == b"subscribe":
                self._confirmed += 1
            elif kind == b"pong":
                self._pongs += 1

    def probe(self) -> None:
        before = self._pongs
        self._send_command(b"PING")
        self._read_until(lambda: self._pongs > before or self._received)

    def close(self) -> None:
        for connection in (self._listener, self._sender):
            if connection is not None:
                with contextlib.suppress(redis.RedisError, OSError):
                    connection.disconnect()
        if self._pool is not None and self._source.owned:
            self._source.close(self._pool)
        self.close_pipe()


def _connection_options(pool: Any) -> tuple[Any, dict[str, Any]]:
    """The class and options of a connection like those of a pool, for use in a thread."""
    if hasattr(pool, "nodes_manager"):
        node = random.choice(list(pool.nodes_manager.nodes_cache.values()) or [pool.get_random_node()])
        inner = getattr(node, "redis_connection", None)
        if inner is None and not hasattr(node, "connection_kwargs"):
            inner = pool.get_redis_connection(node)
        if inner is None:
            return _sync_connection_options(
                type(node), {**node.connection_kwargs, "host": node.host, "port": node.port}
            )
        pool = inner.connection_pool
    if pool.connection_class.__module__.startswith("redis.asyncio"):
        return _sync_connection_options(pool.connection_class, pool.connection_kwargs)
    return pool.connection_class, pool.connection_kwargs


def _sync_connection_options(kind: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a blocking connection to the server of an asyncio one."""
    kept = {name: value for name, value in options.items() if name in SHARED_OPTIONS}
    if "path" in kept:
        return redis.UnixDomainSocketConnection, kept
    if "SSL" in kind.__name__ or options.get("ssl") or options.get("connection_class") is redis.asyncio.SSLConnection:
        return redis.SSLConnection, kept
    return redis.Connection, kept
