"""Wake-ups over LISTEN and NOTIFY of PostgreSQL.

The functions of a PostgreSQL store notify sleepers in the publishing transaction, so a notification is sent with its
commit. This module receives them, and sends notifications for any other store. A pooler that gives a session to several
clients breaks LISTEN without an error, so it is tested once before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Generator, Sequence
from typing import Any

import psycopg

from waypost.store.postgres import psycopg_internals as internals
from waypost.store.postgres.constants import CHANNEL_BYTES_MAX, CHANNEL_HASH_DIGITS
from waypost.store.postgres.sources import Source
from waypost.wake.port import Topic
from waypost.wake.transport import ChannelUnusable, InterruptibleTransport, join_notifications, split_notifications

#: PostgreSQL refuses longer payloads.
PAYLOAD_BYTES_MAX = 7_900


def channel_of(topic: Topic) -> str:
    """The name of the channel, the same as in the SQL function `channel` of the store."""
    name = f"{topic.namespace}_{topic.kind}:{topic.queue}"
    if len(name.encode()) <= CHANNEL_BYTES_MAX:
        return name
    return "waypost:" + hashlib.sha256(name.encode()).hexdigest()[:CHANNEL_HASH_DIGITS]


class PostgresTransport(InterruptibleTransport):
    """One session that listens, and sends too."""

    def __init__(self, source: Source, timeout: float) -> None:
        super().__init__()
        self._source = source
        self._timeout = timeout
        self._connection: psycopg.Connection[Any] | None = None
        self._topics: dict[str, Topic] = {}
        self._received: list[tuple[str, str]] = []

    def open(self) -> None:
        self._connection = self._source.dedicated(self._timeout)
        # What arrives with the reply to a statement comes this way.
        self._connection.add_notify_handler(lambda notice: self._received.append((notice.channel, notice.payload)))
        probe = "waypost:probe:" + secrets.token_hex(8)
        self._run(f'LISTEN "{probe}"')
        # From another session, while ours is idle: with a pooler ours would then receive nothing.
        other = self._source.dedicated(self._timeout)
        try:
            other.execute("SELECT pg_notify(%s, '')", (probe,))
        finally:
            other.close()
        until = time.monotonic() + self._timeout
        while not any(channel == probe for channel, _ in self._take_received()):
            left = until - time.monotonic()
            if left <= 0:
                raise ChannelUnusable(
                    "LISTEN receives nothing through a pooler in transaction mode; connect to the server "
                    "itself for wake-ups with wake=postgresql://..."
                )
            if self.wait_readable(self._pgconn.socket, left):
                self._pgconn.consume_input()
        self._run(f'UNLISTEN "{probe}"')

    @property
    def _pgconn(self) -> Any:
        assert self._connection is not None
        return self._connection.pgconn

    def _run(self, statement: str, *parameters: str) -> None:
        assert self._connection is not None
        with self._connection.lock:
            result = self._connection.wait(self._steps(statement, parameters))
        if result.error_message:
            raise psycopg.OperationalError(result.error_message.decode(errors="replace"))

    def _steps(self, statement: str, parameters: Sequence[str]) -> Generator[Any, Any, Any]:
        """Run one statement and return its reply, with a timeout."""
        pgconn = self._pgconn
        pgconn.send_query_params(statement.encode(), [value.encode() for value in parameters])
        yield from internals.send(pgconn)
        deadline = time.monotonic() + self._timeout
        steps = internals.fetch_many(pgconn)
        try:
            wait_for = next(steps)
            while True:
                ready = yield wait_for
                if not ready and time.monotonic() > deadline:
                    raise TimeoutError("the server did not answer")
                wait_for = steps.send(ready)
        except StopIteration as stop:
            return stop.value[-1]

    def listen(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            channel = channel_of(topic)
            self._topics[channel] = topic
            self._run("LISTEN " + _quote(channel))

    def unlisten(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            channel = channel_of(topic)
            self._topics.pop(channel, None)
            self._run("UNLISTEN " + _quote(channel))

    def send(self, topic: Topic, notifications: Sequence[str]) -> None:
        payload = join_notifications(notifications)
        if len(payload.encode()) > PAYLOAD_BYTES_MAX and len(notifications) > 1:
            half = len(notifications) // 2
            self.send(topic, notifications[:half])
            self.send(topic, notifications[half:])
            return
        self._run("SELECT pg_notify($1, $2)", channel_of(topic), payload)

    def wait(self, seconds: float) -> list[tuple[Topic, list[str]]]:
        received = self._take_received()
        if not received and self.wait_readable(self._pgconn.socket, seconds):
            self._pgconn.consume_input()
            received = self._take_received()
        return [
            (self._topics[channel], split_notifications(payload))
            for channel, payload in received
            if channel in self._topics
        ]

    def _take_received(self) -> list[tuple[str, str]]:
        while (notice := self._pgconn.notifies()) is not None:
            self._received.append((notice.relname.decode(), notice.extra.decode(errors="replace")))
        received, self._received = self._received, []
        return received

    def probe(self) -> None:
        """Send a Sync message of the protocol: the server answers it without a transaction."""
        if not psycopg.Pipeline.is_supported():
            self._run("SELECT 1")
            return
        assert self._connection is not None
        with self._connection.lock:
            self._connection.wait(self._sync())

    def _sync(self) -> Generator[Any, Any, None]:
        pgconn = self._pgconn
        pgconn.enter_pipeline_mode()
        pgconn.pipeline_sync()
        yield from internals.send(pgconn)
        deadline = time.monotonic() + self._timeout
        while pgconn.is_busy():
            ready = yield internals.Wait.R
            if not ready and time.monotonic() > deadline:
                raise TimeoutError("the server did not answer")
            pgconn.consume_input()
        pgconn.get_result()
        pgconn.exit_pipeline_mode()

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error, OSError):
                self._connection.close()
        self.close_pipe()


def _quote(channel: str) -> str:
    return '"' + channel.replace('"', '""') + '"'
