"""A NATS JetStream stream as a target: a batch is published in order, and the confirmations are awaited together.

The message id is sent as `Nats-Msg-Id`, so the server drops a repeat within the stream's duplicate window (two minutes
by default): within it, each message is stored exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from waypost.errors import ConfigurationError, MissingExtra
from waypost.message import error_text, error_type
from waypost.outbox.relay.target import Confirmation, Refused, RelayRecord, Unconfirmed, host_and_port

#: The longest wait for a confirmation before the batch is sent again on a new connection.
CONFIRM_SECONDS = 10.0
#: A valid header name.
NAME = re.compile(r"[A-Za-z0-9!#$&'*+.^_`|~-]+")
#: JetStream's error code for a message larger than its stream allows.
TOO_LARGE_FOR_THE_STREAM = 10054
#: Its codes for headers that it interprets, `Nats-…`, and refuses: an expected stream, id or sequence, a rollup, a time
#: to live, a counter, a batch, a schedule.
REFUSED_HEADERS = frozenset((10060, 10070, 10071, 10111, 10164, 10165, 10166, 10168, 10174, 10188, 10189))
#: Retries of such a message, which take a minute: the stream may come to allow what the header demands.
HEADER_RETRIES = 6
#: The status of a reply when no stream has the subject.
NO_RESPONDERS = "503"


class NatsTarget:
    """A subject that a JetStream stream listens to."""

    def __init__(self, url: str, subject: str, **options: Any) -> None:
        try:
            import nats.js  # noqa: F401
        except ImportError:
            raise MissingExtra(
                'a relay to NATS needs its driver, which is not installed: pip install "waypost[nats]"'
            ) from None
        if not subject or any(character.isspace() or character in "*>" for character in subject):
            raise ConfigurationError(
                f"a NATS subject to publish to has no space and no wildcard, unlike {subject[:80]!r}"
            )
        self.subject = subject
        self.description = f"subject {subject} at {host_and_port(url, 4222)}"
        self._url = url
        self._options = options
        self._client: Any = None
        #: Where the stream replies; each message has a subject below it.
        self._inbox = ""
        self._numbers = itertools.count()
        #: The confirmations that are awaited, by their subjects.
        self._replies: dict[str, asyncio.Future[Any]] = {}
        self._broken: asyncio.Event | None = None

    async def open(self) -> None:
        """Connect."""
        from waypost.wake.nats import connect_nats

        self._broken = broken = asyncio.Event()

        async def on_end() -> None:
            broken.set()

        async def on_error(error: Exception) -> None:
            return  # the confirmation of each message, or its absence, is what counts

        # The relay reconnects: a client that did so would keep waiting for confirmations of the lost connection.
        options = {"connect_timeout": CONFIRM_SECONDS, **self._options}
        self._client = await connect_nats(
            self._url, CONFIRM_SECONDS + 1, allow_reconnect=False, error_cb=on_error, disconnected_cb=on_end,
            closed_cb=on_end, **options,
        )  # fmt: skip
        # Not `publish_async` of the driver: it loses the errors of JetStream, and its futures never end.
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(f"{self._inbox}.*", cb=self._on_reply)

    async def _on_reply(self, reply: Any) -> None:
        future = self._replies.get(reply.subject)
        if future is not None and not future.done():
            future.set_result(reply)

    async def send(self, records: Sequence[RelayRecord]) -> list[Confirmation]:
        """Publish a batch and wait for the confirmations of the stream."""
        if self._client is None:
            await self.open()
        waiting: list[asyncio.Future[Any] | Confirmation] = []
        try:
            for record in records:
                headers = headers_of(record)
                # The server closes the connection of a client that sends a larger message, headers included.
                size, most = len(record.body) + _headers_size(headers), self._client.max_payload
                if size > most:
                    waiting.append(Refused("too_large", f"{size:,} bytes with its headers, the server takes {most:,}"))
                    continue
                subject = f"{self._inbox}.{next(self._numbers)}"
                future = self._replies[subject] = asyncio.get_running_loop().create_future()
                await self._client.publish(self.subject, record.body, reply=subject, headers=headers)
                waiting.append(future)
        except Exception as error:
            # The connection broke: what was published before may be stored.
            lost = Unconfirmed(f"{error_type(error)}: {error_text(error)}")
            waiting += [lost] * (len(records) - len(waiting))
        try:
            return await self._confirmed(waiting)
        finally:
            self._replies.clear()

    async def _confirmed(self, waiting: Sequence[asyncio.Future[Any] | Confirmation]) -> list[Confirmation]:
        futures = [one for one in waiting if isinstance(one, asyncio.Future)]
        assert self._broken is not None
        if futures:
            together = asyncio.ensure_future(asyncio.wait(futures, timeout=CONFIRM_SECONDS))
            broken = asyncio.ensure_future(self._broken.wait())
            try:
                await asyncio.wait((together, broken), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (together, broken):
                    task.cancel()
                await asyncio.gather(together, broken, return_exceptions=True)
        confirmations = [_read(one) if isinstance(one, asyncio.Future) else one for one in waiting]
        if self._broken.is_set() or any(not future.done() for future in futures):
            await self.close()
        return confirmations

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), CONFIRM_SECONDS)


class _Error(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Reply(msgspec.Struct):
    """A reply of a stream: that it has stored a message, or an error."""

    stream: str = ""
    error: _Error | None = None


def _read(future: asyncio.Future[Any]) -> Confirmation:
    if not future.done():
        return Unconfirmed("no confirmation came")
    message = future.result()
    if message.headers is not None and message.headers.get("Status") == NO_RESPONDERS:
        # It may be created, or be back, at any time.
        return Unconfirmed("no stream listens to this subject")
    try:
        reply = msgspec.json.decode(message.data, type=_Reply)
    except msgspec.MsgspecError:
        return Unconfirmed("the reply is not that of a stream")
    if reply.error is None:
        return None if reply.stream else Unconfirmed("the reply is not that of a stream")
    error = f"{reply.error.description} ({reply.error.err_code})"
    if reply.error.err_code == TOO_LARGE_FOR_THE_STREAM:
        return Refused("too_large", error)
    if reply.error.err_code in REFUSED_HEADERS:
        return Refused("rejected", error, HEADER_RETRIES)
    return Unconfirmed(error)


def headers_of(record: RelayRecord) -> dict[str, str]:
    """Return the headers for NATS: characters that it cannot transport are percent-encoded."""
    headers = {_name(name): _plain(value) for name, value in record.headers.items()}
    key = record.key if record.key is not None else record.own_key
    if key is not None:
        headers["waypost-key"] = _plain(key)
    headers["Nats-Msg-Id"] = record.id
    return headers


def _headers_size(headers: dict[str, str]) -> int:
    """Return the size of the version line, a line for each header, and an empty line."""
    return (
        len("NATS/1.0\r\n") + 2 + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())
    )


def _name(text: str) -> str:
    return text if NAME.fullmatch(text) else quote(text, safe="")


def _plain(text: str) -> str:
    return text if text.isprintable() and text == text.strip() else quote(text)
