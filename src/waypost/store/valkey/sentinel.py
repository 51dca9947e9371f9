"""Connections to the primary that Sentinels name. Each new connection queries them, so it finds the current one."""

from __future__ import annotations

from typing import Any

import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from waypost.errors import InvalidUrl
from waypost.store.valkey.multi_host_url import read_url
from waypost.store.valkey.sources import OwnedSource, connection_options

SENTINEL_PORT = 26379
#: Options of the URL that are for the Sentinels, which have users of their own.
FOR_SENTINELS = {"sentinel_username": "username", "sentinel_password": "password"}


class SentinelSource(OwnedSource):
    """`valkey+sentinel://[user:password@]host1:26379,host2:26379/service[/database]`."""

    def __init__(self, url: str) -> None:
        self.place: object = url
        self._hosts, path, options, self._tls, display_name = read_url(url, "sentinel", SENTINEL_PORT)
        if not 1 <= len(path) <= 2:
            raise InvalidUrl(
                "a Sentinel URL names the service behind the hosts: valkey+sentinel://host1:26379,host2:26379/service, "
                "and may end with the number of the database"
            )
        if len(path) == 2:
            if not path[1].isdigit():
                raise InvalidUrl("what follows the service in a Sentinel URL is the number of the database")
            options["db"] = int(path[1])
        self._service = path[0]
        self._for_sentinels = {theirs: options.pop(name) for name, theirs in FOR_SENTINELS.items() if name in options}
        self._given = options
        self.display_name = f"{display_name}/{self._service}"

    def _options(self, start_timeout: float, retry: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """For connections to the primary, and for those to the Sentinels."""
        common = connection_options(start_timeout, retry)
        tls = {name: value for name, value in self._given.items() if name.startswith("ssl_")}
        sentinels = common | self._for_sentinels | ({"ssl": True, **tls} if self._tls else {})
        # Options of the URL override our own, as for one server.
        primary = common | {"socket_keepalive": True} | self._given | ({"ssl": True} if self._tls else {})
        return primary, sentinels

    def pool(self, start_timeout: float) -> Any:
        primary, sentinels = self._options(start_timeout, Retry(NoBackoff(), 0))
        kind: Any = redis.sentinel.Sentinel
        manager = kind(self._hosts, sentinel_kwargs=sentinels)
        pool_kind: Any = redis.sentinel.SentinelConnectionPool
        return pool_kind(self._service, manager, **primary)

    def async_pool(self, start_timeout: float) -> Any:
        primary, sentinels = self._options(start_timeout, redis.asyncio.retry.Retry(NoBackoff(), 0))
        kind: Any = redis.asyncio.sentinel.Sentinel
        manager = kind(self._hosts, sentinel_kwargs=sentinels)
        pool_kind: Any = redis.asyncio.sentinel.SentinelConnectionPool
        return pool_kind(self._service, manager, **primary)

    def close(self, pool: Any) -> None:
        pool.disconnect()
        for client in pool.sentinel_manager.sentinels:
            client.close()

    async def close_async(self, pool: Any) -> None:
        await pool.disconnect()
        for client in pool.sentinel_manager.sentinels:
            await client.aclose()
