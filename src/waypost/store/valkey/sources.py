"""Where connections come from: a URL, or the caller's own client.

redis-py's pools, TLS and Sentinel handling are used as they are. A source hands out pools; it never runs a command.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol
from urllib.parse import urlsplit

from waypost.errors import InvalidUrl, MissingExtra, UnusableClient
from waypost.urls import check_url, redact_text, redact_url

try:
    import redis
    import redis.asyncio
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
    from redis.retry import Retry
except ImportError as error:  # pragma: no cover - exercised in a subprocess without the extra
    raise MissingExtra('the Valkey store needs redis-py: pip install "waypost[valkey]"') from error

SCHEMES = {"valkey": "redis", "valkeys": "rediss", "redis": "redis", "rediss": "rediss", "unix": "unix"}
#: A silence that lasts longer means a dead connection: no script runs for more than a few milliseconds.
REPLY_TIMEOUT_SECONDS = 10.0


class Source(Protocol):
    """Pools of connections, and whether they are ours to close. A Cluster's pool is a client that has one per node."""

    display_name: str
    owned: bool
    cluster: bool
    #: Identity: two sources with the same place lead to the same servers as the same user.
    place: object

    def pool(self, start_timeout: float) -> Any: ...
    def async_pool(self, start_timeout: float) -> Any: ...
    def close(self, pool: Any) -> None: ...
    async def close_async(self, pool: Any) -> None: ...


class OwnedSource:
    """Connections that are ours to close."""

    owned = True
    cluster = False

    def close(self, pool: Any) -> None:
        pool.disconnect()

    async def close_async(self, pool: Any) -> None:
        await pool.disconnect()


def source_of(url: str) -> Source:
    """What a URL names: one server, a service that Sentinels watch over, or a Cluster."""
    scheme = url.partition("://")[0]
    if scheme.endswith("+cluster"):
        from waypost.store.valkey.cluster import ClusterSource

        return ClusterSource(url)
    if scheme.endswith("+sentinel"):
        from waypost.store.valkey.sentinel import SentinelSource

        return SentinelSource(url)
    return UrlSource(url)


def source_of_client(client: Any) -> Source:
    """What the caller's own client leads to."""
    if hasattr(client, "nodes_manager") and "Pipeline" not in type(client).__name__:
        from waypost.store.valkey.cluster import ClusterClientSource

        return ClusterClientSource(client)
    return ClientSource(client)


def connection_options(start_timeout: float, retry: Any) -> dict[str, Any]:
    """Return the options of every connection. The driver must not retry: retries need operation numbers."""
    return {
        "socket_connect_timeout": start_timeout,
        "socket_timeout": start_timeout,  # until the server has answered once: see the executors
        "retry": retry,
        "protocol": 2,
    }


class UrlSource(OwnedSource):
    """Connections made from a URL."""

    def __init__(self, url: str) -> None:
        self.place: object = url
        scheme = url.partition("://")[0]
        if scheme not in SCHEMES:
            named = scheme if "://" in url and scheme.isalnum() else "no"
            raise InvalidUrl(
                f"{named} scheme: a Valkey URL begins with valkey://, valkeys:// (TLS), redis://, rediss:// or unix://"
            )
        check_url(url)
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise InvalidUrl("the port of the Valkey URL is not a number from 0 to 65535") from None
        if parts.scheme == "unix":
            if not parts.path:
                raise InvalidUrl("a unix:// URL names a socket: unix:///run/valkey.sock")
            self.display_name = redact_url(f"unix://{parts.path}")
        else:
            if parts.path.strip("/") and not parts.path.strip("/").isdigit():
                raise InvalidUrl("the path of a Valkey URL is the number of the database: valkey://host:6379/0")
            self.display_name = f"{parts.scheme}://{parts.hostname or 'localhost'}:{port or 6379}"
        # Cut the text instead of rebuilding the URL, which would lose its slashes without a host.
        self._url = SCHEMES[parts.scheme] + url[len(parts.scheme) :]

    def _options(self, start_timeout: float, retry: Any) -> dict[str, Any]:
        options = connection_options(start_timeout, retry)
        return options if self._url.startswith("unix") else options | {"socket_keepalive": True}

    def pool(self, start_timeout: float) -> Any:
        try:
            return redis.ConnectionPool.from_url(self._url, **self._options(start_timeout, Retry(NoBackoff(), 0)))
        except (ValueError, RedisError) as error:
            raise InvalidUrl(f"the Valkey URL cannot be used: {redact_text(str(error), self._url)}") from None

    def async_pool(self, start_timeout: float) -> Any:
        retry = redis.asyncio.retry.Retry(NoBackoff(), 0)
        try:
            return redis.asyncio.ConnectionPool.from_url(self._url, **self._options(start_timeout, retry))
        except (ValueError, RedisError) as error:
            raise InvalidUrl(f"the Valkey URL cannot be used: {redact_text(str(error), self._url)}") from None


class ClientSource:
    """The pool of the caller's own client, never closed by us."""

    owned = False
    cluster = False

    def __init__(self, client: Any) -> None:
        kind = type(client)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if "Sentinel" in kind.__name__:
            raise UnusableClient(
                f"{name} manages Sentinels and is not a client; pass the client that sentinel.master_for(name) returns"
            )
        if "Pipeline" in kind.__name__:
            raise UnusableClient(f"{name} collects commands instead of running them; pass the client it was made from")
        if not hasattr(client, "connection_pool"):
            raise UnusableClient(f"{name} is not a redis-py client; pass redis.Redis, redis.asyncio.Redis or a URL")
        if getattr(client, "connection", None) is not None or getattr(client, "single_connection_client", False):
            raise UnusableClient(
                f"{name} was made with single_connection_client=True and owns one socket, which cannot be shared "
                "safely; pass a client with a pool"
            )
        self.place: object = client.connection_pool
        self._pool = client.connection_pool
        # Not by a method of the pool: some versions of redis-py wrap those of asyncio in plain functions.
        self._is_async = inspect.iscoroutinefunction(client.execute_command)
        self.display_name = f"the caller's {kind.__name__}"

    def pool(self, start_timeout: float) -> Any:
        if self._is_async:
            raise UnusableClient("an asyncio client needs AsyncWaypost; pass redis.Redis to Waypost")
        return self._pool

    def async_pool(self, start_timeout: float) -> Any:
        if not self._is_async:
            raise UnusableClient("a synchronous client needs Waypost; pass redis.asyncio.Redis to AsyncWaypost")
        return self._pool

    def close(self, pool: Any) -> None:
        """Nothing: it is the caller's."""

    async def close_async(self, pool: Any) -> None:
        """Nothing: it is the caller's."""
