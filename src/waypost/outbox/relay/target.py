"""The contract of a relay target: open, send a batch with a confirmation for each message, close."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Protocol, TypeAlias

from msgspec import Struct

from waypost.errors import InvalidUrl
from waypost.policy import CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX
from waypost.times import to_datetime
from waypost.urls import check_url

PORT_MAX = 65_535


class RelayRecord(Struct, frozen=True):
    """One message as a relay sends it to a target."""

    id: str
    queue: str
    #: The body as it was published: bytes, UTF-8 text or JSON, as `content_type` says.
    body: bytes
    content_type: str
    #: The publisher's headers, the relay's, the trace context, and those of waypost, such as `waypost-id`.
    headers: dict[str, str]
    #: The result of the relay's `key=`: a partition key, a routing key or a key, depending on the target.
    key: str | None
    #: The key and the group of the message in its own queue.
    own_key: str | None
    group: str | None
    priority: int
    _published_ms: int
    #: The whole message as another waypost store keeps it.
    envelope: bytes
    type_name: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    #: Whether it was claimed before, and so may have been sent before.
    again: bool = False

    @property
    def published_at(self) -> datetime:
        """When its own store took it in."""
        return to_datetime(self._published_ms)

    @property
    def size(self) -> int:
        """Its approximate size in bytes."""
        return len(self.envelope) + 512


class Refused(Struct, frozen=True):
    """The target refuses this message: it becomes a dead letter with this reason."""

    reason: str
    error: str
    #: Retries before that, with growing pauses, while others are sent: for a refusal that may be temporary.
    retries: int = 0


class Unconfirmed(Struct, frozen=True):
    """The target did not confirm this message: it is sent again."""

    error: str
    #: Only its group is full: it is snoozed, so that messages of other groups do not wait behind it.
    is_group_full: bool = False


#: None: the target has stored it.
Confirmation: TypeAlias = Refused | Unconfirmed | None


class Target(Protocol):
    """The system that messages are sent to. It runs on one event loop, with one call of `send` at a time.

    An exception from `open` or `send` means that nothing of the call is confirmed: the target is closed, opened again
    and sent the same batch. So `send` must end in bounded time, and should return one confirmation for each record
    rather than raise: what it does not confirm is sent again.
    """

    #: Its name in logs, without a password.
    description: str

    async def open(self) -> None: ...
    async def send(self, records: Sequence[RelayRecord]) -> Sequence[Confirmation]: ...
    async def close(self) -> None: ...


def host_and_port(url: str, port: int) -> str:
    """Return host and port of a URL, without its secrets, or raise `InvalidUrl`, which does not repeat them."""
    hosts = check_url(url).hosts
    given = re.search(r":(\d+)$", hosts[0]) if hosts else None
    if len(hosts) != 1 or (given is not None and int(given[1]) > PORT_MAX):
        raise InvalidUrl(f"a {url.partition('://')[0]}:// URL names one host, with a port up to {PORT_MAX}")
    return hosts[0] if given is not None else f"{hosts[0]}:{port}"


def split_batch(records: Sequence[RelayRecord]) -> Iterator[Sequence[RelayRecord]]:
    """Yield the chunks of a batch that fit in one request, in order."""
    first, size = 0, 0
    for index, record in enumerate(records):
        if index > first and (size + record.size > CHUNK_BYTES_MAX or index - first == CHUNK_MESSAGES_MAX):
            yield records[first:index]
            first, size = index, 0
        size += record.size
    if first < len(records):
        yield records[first:]
