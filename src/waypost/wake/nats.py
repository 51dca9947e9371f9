"""Wake-ups over core NATS: one subject for each topic; every process receives them and checks whether it is named.

The driver is an asyncio driver; it runs on its own event loop in the thread of the hub. It does not reconnect: the hub
does, as for all channels.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from waypost.errors import MissingExtra
from waypost.wake.port import Topic
from waypost.wake.transport import join_notifications, split_notifications

try:
    from nats.aio.client import Client
except ImportError as error:
    raise MissingExtra('wake-ups over NATS need its driver: pip install "waypost[nats]"') from error

T = TypeVar("T")

#: How long the end of a connection that failed may take.
CLOSE_SECONDS = 1.0
#: How often the driver checks an idle connection.
PING_SECONDS = 5


def subject_of(topic: Topic) -> str:
    """The subject of a topic. All characters of a queue name are allowed in a subject, but not dots at any place."""
    queue = re.sub(r"\.(?=\.|$)", "._", topic.queue)
    return f"waypost.{topic.namespace}.{topic.kind}.{queue}"


async def connect_nats(url: str, timeout: float, **options: Any) -> Any:
    """Return a connected client. Where it cannot connect in time or is refused, nats-py leaves its socket open."""
    client = Client()
    try:
        await asyncio.wait_for(client.connect(url, **options), timeout)
    except BaseException:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(client.close(), CLOSE_SECONDS)
        raise
    return client


class NatsTransport:
    """One connection that listens and sends."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url
        self._timeout = timeout
        self._loop = asyncio.new_event_loop()
        self._received: list[tuple[Topic, list[str]]] = []
        self._changed = asyncio.Event()
        self._client: Any = None
        self._subscriptions: dict[Topic, Any] = {}
        self._failure: Exception | None = None

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def open(self) -> None:
        self._do(self._open())

    async def _open(self) -> None:
        async def on_error(error: Exception) -> None:
            self._failure = self._failure or error
            self._changed.set()

        async def on_end() -> None:
            await on_error(ConnectionError("the connection ended"))

        self._client = await connect_nats(
            self._url, self._timeout + 1, name="waypost", allow_reconnect=False, max_reconnect_attempts=1,
            reconnect_time_wait=0, connect_timeout=max(1, round(self._timeout)),
            ping_interval=PING_SECONDS, max_outstanding_pings=1, error_cb=on_error, closed_cb=on_end,
            disconnected_cb=on_end,
        )  # fmt: skip
        # A failed attempt before another server of the list answered does not count as a failure of this connection.
        self._failure = None

    def listen(self, topics: Sequence[Topic]) -> None:
        self._do(self._listen(topics))

    async def _listen(self, topics: Sequence[Topic]) -> None:
        for topic in topics:

            async def on_message(message: Any, topic: Topic = topic) -> None:
                self._received.append((topic, split_notifications(message.data.decode(errors="replace"))))
                self._changed.set()

            self._subscriptions[topic] = await self._client.subscribe(subject_of(topic), cb=on_message)
        await self._client.flush(timeout=self._timeout)

    def unlisten(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            subscription = self._subscriptions.pop(topic, None)
            if subscription is not None:
                self._do(subscription.unsubscribe())

    def send(self, topic: Topic, notifications: Sequence[str]) -> None:
        self._do(self._send(topic, join_notifications(notifications).encode()))

    async def _send(self, topic: Topic, data: bytes) -> None:
        await self._client.publish(subject_of(topic), data)
        await self._client.flush(timeout=self._timeout)

    def wait(self, seconds: float) -> list[tuple[Topic, list[str]]]:
        self._do(self._wait(seconds))
        if self._failure is not None:
            raise self._failure
        received, self._received = self._received, []
        return received

    async def _wait(self, seconds: float) -> None:
        if not self._received:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
        self._changed.clear()

    def interrupt(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._changed.set)

    def probe(self) -> None:
        self._do(self._client.flush(timeout=self._timeout))

    def close(self) -> None:
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._do(asyncio.wait_for(self._client.close(), self._timeout))
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._do(_gather(left))
        self._loop.close()


async def _gather(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
