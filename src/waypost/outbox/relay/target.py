"""What a relay asks of the system that it sends to: open, send a batch with a word on each message, close."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from waypost.errors import InvalidUrl
from waypost.policy import CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX
from waypost.urls import check_url

PORT_MAX = 65_535


class RelayRecord(Struct, frozen=True):
    """One message on its way to a target."""

    id: str
    queue: str
    #: The body as it was published: bytes, UTF-8 text or JSON, as `content_type` says.
    body: bytes
    content_type: str
    #: The publisher's headers, the relay's own, the trace context, and what waypost knows: `waypost-id` and the like.
    headers: dict[str, str]
    #: What the relay's `key=` gave: a partition, a routing key or a key, as the target has it.
    key: str | None
    #: The key and the group that the message has in its own queue.
    own_key: str | None
    group: str | None
    priority: int
    published_ms: int
    #: All of it as another waypost store keeps it.
    envelope: bytes
    type_name: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    #: It was claimed before, so it may have been sent before.
    again: bool = False

    @property
    def size(self) -> int:
        """About how many bytes it is."""
        return len(self.envelope) + 512


class Refused(Struct, frozen=True):
    """The target does not take this message: it becomes a dead letter with this reason."""

    reason: str
    error: str
    #: Before that it is retried so often, after growing pauses while others go on: for what may heal by itself.
    retries: int = 0


class Unconfirmed(Struct, frozen=True):
    """The target did not say that it has this message, and may later: it is sent again."""

    error: str


#: None: the target has it, as safe as the target keeps things.
Confirmation: TypeAlias = Refused | Unconfirmed | None


class Target(Protocol):
    """Where messages are sent. All of it runs on one event loop, and `send` is not called while one is under way.

    An exception from `open` or `send` says that nothing of the call is confirmed: the target is closed, opened again
    and sent the same once more. So `send` must end in bounded time, and return one confirmation for each parcel
    wherever it knows any: what it does not confirm is sent again.
    """

    #: What is said of it in logs: no password.
    description: str

    async def open(self) -> None: ...
    async def send(self, records: Sequence[RelayRecord]) -> Sequence[Confirmation]: ...
    async def close(self) -> None: ...


def host_and_port(url: str, port: int) -> str:
    """Where a URL leads to, without its secrets: a host and a port. Raises `InvalidUrl`, which repeats nothing."""
    hosts = check_url(url).hosts
    given = re.search(r":(\d+)$", hosts[0]) if hosts else None
    if len(hosts) != 1 or (given is not None and int(given[1]) > PORT_MAX):
        raise InvalidUrl(f"a {url.partition('://')[0]}:// URL names one host, with a port up to {PORT_MAX}")
    return hosts[0] if given is not None else f"{hosts[0]}:{port}"


def split_batch(records: Sequence[RelayRecord]) -> Iterator[Sequence[RelayRecord]]:
    """Parts of a batch that a server takes well in one go, in order."""
    first, size = 0, 0
    for index, record in enumerate(records):
        if index > first and (size + record.size > CHUNK_BYTES_MAX or index - first == CHUNK_MESSAGES_MAX):
            yield records[first:index]
            first, size = index, 0
        size += record.size
    if first < len(records):
        yield records[first:]
