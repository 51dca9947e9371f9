"""A Cluster: each call goes to the node that serves its slot, and follows it when the slot has moved.

redis-py's cluster client finds the nodes and keeps their connections. It does not run our calls, because its
pipelines do not support scripts. One executor per node sends the calls, as for a single server.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeVar, cast

import redis.asyncio
import redis.asyncio.cluster
import redis.cluster
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from waypost.errors import (
    ConfigurationError,
    InvalidUrl,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    UnusableClient,
    WaypostError,
)
from waypost.policy import Durability
from waypost.store.port import Call
from waypost.store.valkey.command import ValkeyCall
from waypost.store.valkey.executor import AsyncValkeyExecutor, ValkeyExecutor
from waypost.store.valkey.failures import CONNECTION_FAILURES, Redirected, SlotMoving, map_connection_error
from waypost.store.valkey.multi_host_url import read_url
from waypost.store.valkey.sources import REPLY_TIMEOUT_SECONDS, Source, connection_options

T = TypeVar("T")

CLUSTER_PORT = 6379
#: One node serves a slot; more than a few redirections mean that the nodes do not agree yet.
REDIRECTIONS_MAX = 5
#: As many connections to a node as calls run at once: to have fewer, run fewer calls.
NO_LIMIT = 2**31 - 1
TOPOLOGY_FAILURES = (*CONNECTION_FAILURES, RedisClusterException)


# ---- where connections come from ---------------------------------------------------------------------------------


class ClusterSource:
    """`valkey+cluster://[user:password@]host1:6379,host2:6379`: any nodes of the Cluster, the others are found."""

    owned = True
    cluster = True

    def __init__(self, url: str) -> None:
        self.place: object = url
        self._hosts, path, options, tls, self.display_name = read_url(url, "cluster", CLUSTER_PORT)
        if path not in ([], ["0"]) or options.pop("db", 0) != 0:
            raise InvalidUrl("a Cluster has one database, number 0: valkey+cluster://host1:6379,host2:6379")
        self._given = options | ({"ssl": True} if tls else {})

    def _options(self, start_timeout: float, retry: Any) -> dict[str, Any]:
        # If some slots are not served, only calls to them are refused, not those of all queues.
        ours = {"require_full_coverage": False, "max_connections": NO_LIMIT, "socket_keepalive": True}
        return connection_options(start_timeout, retry) | ours | self._given

    def pool(self, start_timeout: float) -> Any:
        kind, node = cast("Any", redis.cluster.RedisCluster), cast("Any", redis.cluster.ClusterNode)
        # It reads the list of commands from one node, or from another if that one is down; it does not run our calls.
        options = self._options(start_timeout, Retry(NoBackoff(), len(self._hosts) + 2))
        return kind(startup_nodes=[node(host, port) for host, port in self._hosts], **options)

    def async_pool(self, start_timeout: float) -> Any:
        kind, node = cast("Any", redis.asyncio.cluster.RedisCluster), cast("Any", redis.asyncio.cluster.ClusterNode)
        options = self._options(start_timeout, redis.asyncio.retry.Retry(NoBackoff(), 0))
        return kind(startup_nodes=[node(host, port) for host, port in self._hosts], **options)

    def close(self, pool: Any) -> None:
        pool.close()

    async def close_async(self, pool: Any) -> None:
        await pool.nodes_manager.aclose()
        await pool.nodes_manager.aclose("startup_nodes")


class ClusterClientSource:
    """The caller's own cluster client, never closed by us."""

    owned = False
    cluster = True

    def __init__(self, client: Any) -> None:
        self.place: object = client
        self._client = client
        self._is_async = hasattr(client, "aclose")
        self.display_name = f"the caller's {type(client).__name__}"

    def pool(self, start_timeout: float) -> Any:
        if self._is_async:
            raise UnusableClient("an asyncio client needs AsyncWaypost; pass redis.RedisCluster to Waypost")
        return self._client

    def async_pool(self, start_timeout: float) -> Any:
        if not self._is_async:
            raise UnusableClient("a synchronous client needs Waypost; pass redis.asyncio.RedisCluster to AsyncWaypost")
        return self._client

    def close(self, pool: Any) -> None:
        """Nothing: it is the caller's."""

    async def close_async(self, pool: Any) -> None:
        """Nothing: it is the caller's."""


class NodeSource:
    """The connections to one node, owned by the owner of the cluster client."""

    cluster = True

    def __init__(self, pool: Any, display_name: str, *, owned: bool) -> None:
        self.place: object = pool
        self._pool = pool
        self.display_name = display_name
        self.owned = owned

    def pool(self, start_timeout: float) -> Any:
        return self._pool

    async_pool = pool

    def close(self, pool: Any) -> None:
        pool.disconnect()  # also those to a node that the cluster client has forgotten

    async def close_async(self, pool: Any) -> None:
        await pool.disconnect()


class AsyncNodePool:
    """A node of redis-py's asyncio cluster client, which is its own pool, used like the pool of a single server."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.connection_kwargs = node.connection_kwargs

    async def get_connection(self) -> Any:
        connection = self._node.acquire_connection()
        try:
            await connection.connect()
        except BaseException:
            self._node.release(connection)
            raise
        return connection

    async def release(self, connection: Any) -> None:
        self._node.release(connection)

    async def disconnect(self) -> None:
        await self._node.disconnect()


# ---- where a call goes -------------------------------------------------------------------------------------------


class NodeRequest(NamedTuple):
    """A node to send a call to; with ASKING if its slot has not arrived there whole."""

    node: Any
    asking: bool


class Slots:
    """Which node serves a slot: as the cluster client knows it, with the redirections since."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._moved: dict[int, tuple[str, int]] = {}

    def node(self, place: bytes) -> Any:
        """The node for a key, None if no node is known."""
        slot = key_slot(place)
        moved = self._moved.get(slot)
        if moved is not None:
            return self._manager.get_node(host=moved[0], port=moved[1])
        try:
            return self._manager.get_node_from_slot(slot)
        except (RedisClusterException, KeyError):
            return None

    def follow(self, redirected: Redirected) -> Any:
        """The node that another one named, None if the client does not know it yet."""
        host, port = self._manager.remap_host_port(redirected.host, redirected.port)
        if not redirected.asking:
            self._moved[redirected.slot] = (host, port)
        return self._manager.get_node(host=host, port=port)

    def forget(self) -> None:
        """Forget redirections, before the client reads the topology again."""
        self._moved.clear()


def route(call: ValkeyCall[T], slots: Slots) -> Generator[NodeRequest | None, Any, T]:
    """Route one call: yield a node, receive its reply or error; yield None to refresh the topology."""
    node, asking = slots.node(call.place), False
    redirected: Redirected | None = None
    for _ in range(REDIRECTIONS_MAX):
        if node is None:
            yield None
            node = slots.node(call.place) if redirected is None else slots.follow(redirected)
        if node is None:
            raise StoreUnavailable(f"no node of the Cluster is known that serves queue {call.queue}")
        try:
            reply: T = yield NodeRequest(node, asking)
            return reply
        except Redirected as elsewhere:
            redirected = elsewhere
            node, asking = slots.follow(elsewhere), elsewhere.asking
        except (StoreUnavailable, OutcomeUnknown) as error:
            if topology_changed(error):
                yield None
            raise
    raise StoreUnavailable(f"the nodes of the Cluster do not agree yet which of them serves queue {call.queue}")


def runs_of_one_slot(calls: Iterable[Call[Any]]) -> Iterator[Iterator[ValkeyCall[Any]]]:
    """Calls that follow each other to the same slot. Each is read only when its turn comes, as from the calls."""
    announced = 0

    def place(call: ValkeyCall[Any]) -> tuple[int, int]:
        # A call with an announcement starts a new run.
        nonlocal announced
        announced += call.announce is not None
        return key_slot(call.place), announced

    for _, group in groupby(cast("Iterable[ValkeyCall[Any]]", calls), place):
        yield group


def cluster_error(error: BaseException, display_name: str) -> WaypostError:
    """Map the error of a client that found no topology."""
    if "Cluster mode is not enabled" in f"{error} {error.__cause__}":
        return ConfigurationError(f"{display_name} is no Cluster; name a single server with valkey:// or redis://")
    return map_connection_error(error.__cause__ or error, display_name, sent=False)


def topology_changed(result: object) -> bool:
    """Whether a node could not be reached or has lost its place, and not only waits for a slot that moves."""
    return isinstance(result, StoreUnavailable | OutcomeUnknown) and not isinstance(result, SlotMoving)


class _Common:
    def __init__(self, source: Source, start_timeout: float, durability: Durability) -> None:
        self._source = source
        self._start_timeout = start_timeout
        self._durability: Durability = durability
        self._pid = os.getpid()

    def _relax_timeouts(self, client: Any, pools: Iterable[Any]) -> None:
        """The first replies had to come within the start timeout; from now on slow ones are waited for."""
        if not self._source.owned:
            return
        for settings in (client.nodes_manager.connection_kwargs, *(pool.connection_kwargs for pool in pools)):
            if settings.get("socket_timeout") == self._start_timeout:
                settings["socket_timeout"] = REPLY_TIMEOUT_SECONDS


# ---- executors ---------------------------------------------------------------------------------------------------


class ClusterExecutor(_Common):
    """Runs calls on blocking sockets. Safe from several threads."""

    def __init__(self, source: Source, start_timeout: float, durability: Durability) -> None:
        super().__init__(source, start_timeout, durability)
        try:
            self._client = source.pool(start_timeout)
        except TOPOLOGY_FAILURES as error:
            raise cluster_error(error, source.display_name) from None
        self._slots = Slots(self._client.nodes_manager)
        self._servers: dict[str, ValkeyExecutor] = {}
        try:
            self._relax_timeouts(self._client, [self._pool(node) for node in self._client.get_nodes()])
            self._check_one_node()
        except BaseException:
            self.close()
            raise

    def _pool(self, node: Any) -> Any:
        return self._client.get_redis_connection(node).connection_pool

    def _check_one_node(self) -> None:
        """Check one node now; the others are checked when they are first used."""
        failure: StoreError = StoreUnavailable(f"{self._source.display_name} has no primary")
        for node in self._client.get_primaries():
            try:
                self._server(node)
                return
            except StoreUnavailable as error:
                failure = error
        raise failure

    def _server(self, node: Any) -> ValkeyExecutor:
        known = self._servers.get(node.name)
        if known is not None:
            return known
        source = NodeSource(self._pool(node), f"node {node.name}", owned=self._source.owned)
        made = ValkeyExecutor(source, self._start_timeout, self._durability)
        kept = self._servers.setdefault(node.name, made)
        if kept is not made:
            made.close()  # another thread was faster
        return kept

    def servers(self) -> list[ValkeyExecutor]:
        """An executor for each node that holds a part of the store."""
        return [self._server(node) for node in self._client.get_primaries()]

    def _refresh(self) -> None:
        """Read the nodes and their slots again. If no node answers, keep what is known."""
        self._slots.forget()
        try:
            self._client.nodes_manager.initialize()
        except TOPOLOGY_FAILURES:
            return

    def run(self, call: Call[T]) -> T:
        ours = cast("ValkeyCall[T]", call)
        if ours.announce is not None:
            self._announce(ours.announce)
        return self._run_routed(ours)

    def _announce(self, call: ValkeyCall[None]) -> None:
        """Add the queue to the list of queues, on another node than its own.

        If that node is full or down, the queue can still be used, and a later call announces it.
        """
        with suppress(StoreError):
            self._run_routed(call)

    def _run_routed(self, call: ValkeyCall[T]) -> T:
        way = route(call, self._slots)
        try:
            step = next(way)
            while True:
                if step is None:
                    self._refresh()
                    step = way.send(None)
                    continue
                try:
                    reply = self._server(step.node).request(call, asking=step.asking)
                except StoreError as error:
                    step = way.throw(error)
                else:
                    step = way.send(reply)
        except StopIteration as stop:
            return cast(T, stop.value)

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        """Each run of calls to one slot goes out together; each call has its own result or error, in order."""
        results: list[Any] = []
        for group in runs_of_one_slot(calls):
            results += self._run_group(group)
        return results

    def _run_group(self, group: Iterator[ValkeyCall[Any]]) -> list[Any]:
        first = next(group)
        if first.announce is not None:
            self._announce(first.announce)
            first.announce = None
        node = self._slots.node(first.place)
        try:
            server = None if node is None else self._server(node)
        except StoreError:
            server = None
        if server is None:
            return [self._result(call) for call in chain([first], group)]
        batch = server.batch(chain([first], group))
        server.drive(batch)
        if any(map(topology_changed, batch.results)):
            self._refresh()
        for place, call in batch.redirected:
            batch.results[place] = self._result(call)
        return batch.results

    def _result(self, call: ValkeyCall[Any]) -> Any:
        try:
            return self._run_routed(call)
        except WaypostError as error:
            return error

    def close(self) -> None:
        """Give the connections back; close them if they are ours."""
        if self._pid != os.getpid():
            return
        for server in self._servers.values():
            server.close()
        if self._source.owned:
            self._source.close(self._client)


class AsyncClusterExecutor(_Common):
    """The same for an event loop."""

    _slots: Slots

    def __init__(self, source: Source, start_timeout: float, durability: Durability) -> None:
        super().__init__(source, start_timeout, durability)
        self._client = source.async_pool(start_timeout)
        self._servers: dict[str, AsyncValkeyExecutor] = {}

    async def start(self) -> None:
        """Read the nodes, and check one of them."""
        try:
            try:
                # Our own client reads only the nodes: the rest would come from one node, which may be down.
                await (self._client.nodes_manager if self._source.owned else self._client).initialize()
            except TOPOLOGY_FAILURES as error:
                raise cluster_error(error, self._source.display_name) from None
            self._slots = Slots(self._client.nodes_manager)
            self._relax_timeouts(self._client, self._client.get_nodes())
            await self._check_one_node()
        except BaseException:
            await self.close()
            raise

    async def _check_one_node(self) -> None:
        failure: StoreError = StoreUnavailable(f"{self._source.display_name} has no primary")
        for node in self._client.get_primaries():
            try:
                await self._server(node)
                return
            except StoreUnavailable as error:
                failure = error
        raise failure

    async def _server(self, node: Any) -> AsyncValkeyExecutor:
        known = self._servers.get(node.name)
        if known is not None:
            return known
        source = NodeSource(AsyncNodePool(node), f"node {node.name}", owned=self._source.owned)
        made = AsyncValkeyExecutor(source, self._start_timeout, self._durability)
        await made.start()
        kept = self._servers.setdefault(node.name, made)
        if kept is not made:
            await made.close()
        return kept

    async def _refresh(self) -> None:
        self._slots.forget()
        try:
            await self._client.nodes_manager.initialize()
        except TOPOLOGY_FAILURES:
            return

    async def run(self, call: Call[T]) -> T:
        ours = cast("ValkeyCall[T]", call)
        if ours.announce is not None:
            await self._announce(ours.announce)
        return await self._run_routed(ours)

    async def _announce(self, call: ValkeyCall[None]) -> None:
        with suppress(StoreError):
            await self._run_routed(call)

    async def _run_routed(self, call: ValkeyCall[T]) -> T:
        way = route(call, self._slots)
        try:
            step = next(way)
            while True:
                if step is None:
                    await self._refresh()
                    step = way.send(None)
                    continue
                try:
                    server = await self._server(step.node)
                    reply = await server.request(call, asking=step.asking)
                except StoreError as error:
                    step = way.throw(error)
                else:
                    step = way.send(reply)
        except StopIteration as stop:
            return cast(T, stop.value)

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        """Each run of calls to one slot goes out together; each call has its own result or error, in order."""
        results: list[Any] = []
        for group in runs_of_one_slot(calls):
            results += await self._run_group(group)
        return results

    async def _run_group(self, group: Iterator[ValkeyCall[Any]]) -> list[Any]:
        first = next(group)
        if first.announce is not None:
            await self._announce(first.announce)
            first.announce = None
        node = self._slots.node(first.place)
        try:
            server = None if node is None else await self._server(node)
        except StoreError:
            server = None
        if server is None:
            return [await self._result(call) for call in chain([first], group)]
        batch = server.batch(chain([first], group))
        await server.drive(batch)
        if any(map(topology_changed, batch.results)):
            await self._refresh()
        for place, call in batch.redirected:
            batch.results[place] = await self._result(call)
        return batch.results

    async def _result(self, call: ValkeyCall[Any]) -> Any:
        try:
            return await self._run_routed(call)
        except WaypostError as error:
            return error

    async def close(self) -> None:
        """Give the connections back; close them if they are ours."""
        if self._pid != os.getpid():
            return
        for server in self._servers.values():
            await server.close()
        if self._source.owned:
            await self._source.close_async(self._client)
