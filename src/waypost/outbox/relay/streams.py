"""A Valkey or Redis stream as a target: a batch is one pipeline of XADD, in order.

At least once: a stream does not detect duplicates, so after a lost reply entries are added again. An entry has the
fields `id`, `queue`, `body`, `headers` (a JSON object) and, if there is one, `key`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from waypost.errors import ConfigurationError, MissingExtra
from waypost.outbox.relay.target import Confirmation, RelayRecord, Unconfirmed, host_and_port, split_batch

#: The longest wait for a reply.
ANSWER_SECONDS = 10.0


class StreamTarget:
    """A stream. `maxlen` trims it to about this many entries, read or not."""

    def __init__(self, url: str, stream: str, *, maxlen: int | None = None) -> None:
        try:
            import redis.asyncio  # noqa: F401
        except ImportError:
            raise MissingExtra(
                'a relay to a stream needs its driver, which is not installed: pip install "waypost[valkey]"'
            ) from None
        if not stream:
            raise ConfigurationError("name the stream to add to, as in valkey+stream://127.0.0.1:6379/orders")
        if maxlen is not None and (type(maxlen) is not int or maxlen < 1):
            raise ConfigurationError(f"maxlen must be a whole number of at least 1, not {maxlen!r}")
        self.stream = stream
        self.maxlen = maxlen
        self.description = f"stream {stream} at {host_and_port(url, 6379)}"
        self._url = url
        self._client: Any = None

    async def open(self) -> None:
        """Connect."""
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        # No retries in the driver: the relay repeats what fails.
        self._client = Redis.from_url(
            self._url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )  # fmt: skip
        await self._client.ping()

    async def send(self, records: Sequence[RelayRecord]) -> list[Confirmation]:
        """Add a batch in order; after a failure the rest is not sent."""
        confirmations: list[Confirmation] = []
        for chunk in split_batch(records):
            try:
                answers = await self._add(chunk)
            except Exception as error:
                # Earlier chunks are confirmed.
                if not confirmations:
                    raise
                lost = Unconfirmed(str(error))
                return confirmations + [lost] * (len(records) - len(confirmations))
            confirmations += [Unconfirmed(str(answer)) if isinstance(answer, Exception) else None for answer in answers]
        return confirmations

    async def _add(self, chunk: Sequence[RelayRecord]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for record in chunk:
            fields: dict[str, Any] = {
                "id": record.id,
                "queue": record.queue,
                "body": record.body,
                "headers": msgspec.json.encode(record.headers),
            }
            key = record.key if record.key is not None else record.own_key
            if key is not None:
                fields["key"] = key
            pipeline.xadd(self.stream, fields, maxlen=self.maxlen, approximate=True)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                await client.aclose()
