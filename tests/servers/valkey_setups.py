"""Several real servers together: a primary and a replica under Sentinels, or three primaries of a Cluster.

    with SentinelSetup() as setup:
        post = Waypost(setup.url)
        setup.fail_over()       # the primary is killed, the Sentinels promote its replica

    with ClusterSetup() as setup:
        post = Waypost(setup.url)
        setup.move_slot(setup.slot_of("{wp:orders}"), setup.servers[1])

Everything is on loopback, belongs to the process that started it, and ends like the servers of `servers`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, Self

from waypost.errors import StoreUnavailable
from waypost.testing.servers import PORT_TRIES_MAX, ValkeyServer, free_port, write_private

#: Sentinels find each other in seconds, and promote in seconds; a busy machine takes longer.
SETUP_SECONDS_MAX = 60.0
#: The number of slots of a Cluster.
SLOTS = 16384
#: Sentinels check, agree and act often, so that a test waits a second, not a minute. In milliseconds. A replica may be
#: promoted if it answered within five ping periods, and while its primary is down it is queried once a second: a
#: shorter period than this would refuse it half of the time.
QUICK = (
    b"info-period", b"200", b"ping-period", b"400", b"ask-period", b"100", b"publish-period", b"200",
    b"election-timeout", b"1000", b"default-down-after", b"500",
)  # fmt: skip


class Located(Protocol):
    """Anything with a URL, such as a server."""

    @property
    def url(self) -> str: ...


def client_of(server: Located | str) -> Any:
    """Return a redis-py client of a server or a URL."""
    import redis

    url = server if isinstance(server, str) else server.url
    return redis.Redis.from_url(url.replace("valkey://", "redis://"), socket_timeout=5)


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    """Wait for a condition. A server that does not answer yet does not fulfil it."""
    import redis

    deadline = time.monotonic() + SETUP_SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except redis.RedisError:
            pass
        time.sleep(0.02)
    raise StoreUnavailable(f"{what}: not within {SETUP_SECONDS_MAX:g} s")


class Sentinel(ValkeyServer):
    """One Sentinel: the same program, which keeps what it learns in its configuration file."""

    def __init__(self, service: str, primary: ValkeyServer, quorum: int) -> None:
        # They share a password with the servers that they watch: each of these may become the primary.
        super().__init__(requirepass=primary.password)
        self._service = service
        self._primary_port = primary.port
        self._quorum = quorum

    def _command(self) -> list[str]:
        path = self.directory / "sentinel.conf"
        if not path.exists():
            write_private(
                path,
                f"port {self.port}\nbind 127.0.0.1\nprotected-mode no\ndaemonize no\nrequirepass {self.password}\n"
                f"dir {self.directory}\nlogfile {self.directory / 'server.log'}\n"
                f"sentinel monitor {self._service} 127.0.0.1 {self._primary_port} {self._quorum}\n"
                f"sentinel down-after-milliseconds {self._service} 500\n"
                f"sentinel failover-timeout {self._service} 1000\n"
                f"sentinel auth-pass {self._service} {self.password}\nsentinel sentinel-pass {self.password}\n",
            )
        return [str(self._program), str(path), "--sentinel"]


class _Setup:
    """What both setups share: they start and stop with a `with` block."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.servers: list[ValkeyServer] = []
        #: All of them have this one.
        self.password = secrets.token_urlsafe(18)

    def _shared(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"requirepass": self.password, "masterauth": self.password, **options}

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Stop all servers, the last first."""
        self._stack.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class SentinelSetup(_Setup):
    """A primary, a replica and three Sentinels. `options` are settings of both servers."""

    service = "orders"

    def __init__(self, **options: str | int) -> None:
        super().__init__()
        self._options: dict[str, Any] = {"repl_diskless_sync_delay": 0} | self._shared(options)
        self.sentinels: list[Sentinel] = []

    def start(self) -> None:
        """Start all servers, and wait until the Sentinels know the replica and each other."""
        primary = self._stack.enter_context(ValkeyServer(**self._options))
        replica = self._stack.enter_context(ValkeyServer(replicaof=f"127.0.0.1 {primary.port}", **self._options))
        self.servers = [primary, replica]
        wait_until("the replica follows", lambda: self._follows(replica))
        for _ in range(3):
            sentinel = Sentinel(self.service, primary, quorum=2)
            sentinel.port = free_port()
            self.sentinels.append(self._stack.enter_context(sentinel))
            with client_of(sentinel) as client:
                client.execute_command("SENTINEL", "DEBUG", *QUICK)
        wait_until("the Sentinels know each other", lambda: all(map(self._knows_the_others, self.sentinels)))

    @staticmethod
    def _follows(replica: ValkeyServer) -> bool:
        with client_of(replica) as client:
            return bool(client.info("replication").get("master_link_status") == "up")

    def _knows_the_others(self, sentinel: Sentinel) -> bool:
        with client_of(sentinel) as client:
            state = client.sentinel_masters()[self.service]
            return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] >= 1)

    @property
    def url(self) -> str:
        """The URL: the Sentinels, and the service that they watch."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"valkey+sentinel://:{self.password}@{hosts}/{self.service}?sentinel_password={self.password}"

    @property
    def primary(self) -> ValkeyServer:
        """The server that most of the Sentinels call the primary."""
        named: list[int] = []
        for sentinel in self.sentinels:
            with client_of(sentinel) as client:
                named.append(client.sentinel_masters()[self.service]["port"])
        port = max(named, key=named.count)
        return next(server for server in self.servers if server.port == port)

    def fail_over(self, *, wait: bool = True) -> ValkeyServer:
        """Kill the primary and return it; with `wait`, after another server was promoted."""
        killed = self.primary
        killed.kill()
        if wait:
            self.fail_over_ended()
        return killed

    def fail_over_ended(self) -> None:
        """Wait until a running server is the primary."""
        wait_until("a replica is promoted", self._has_primary)

    def _has_primary(self) -> bool:
        primary = self.primary
        if primary.pid is None:
            return False
        with client_of(primary) as client:
            return bool(client.info("replication")["role"] == "master")


class ClusterSetup(_Setup):
    """Three primaries that share the slots. `options` are settings of all of them."""

    def __init__(self, **options: str | int) -> None:
        super().__init__()
        settings = {"cluster_enabled": "yes", "cluster_node_timeout": 2000}
        self._options: dict[str, Any] = settings | self._shared(options)
        #: The node ids, in the order of `servers`.
        self.ids: list[str] = []

    def start(self) -> None:
        """Start the nodes, assign the slots, and wait until each node reports a working Cluster."""
        bus_ports = [self._start_node() for _ in range(3)]
        share = -(-SLOTS // len(self.servers))
        for number, server in enumerate(self.servers):
            self.ids.append(self.run_cluster(server, "MYID").decode())
            self.run_cluster(server, "SET-CONFIG-EPOCH", number + 1)
            self.run_cluster(server, "ADDSLOTSRANGE", number * share, min(SLOTS, (number + 1) * share) - 1)
        for other, bus_port in zip(self.servers[1:], bus_ports[1:], strict=True):
            self.run_cluster(self.servers[0], "MEET", "127.0.0.1", other.port, bus_port)
        wait_until("the Cluster is formed", lambda: all(map(self._is_well, self.servers)))

    def _start_node(self) -> int:
        """Start a node and return the port of its bus. Another program may take that port before the node does."""
        for tries_left in reversed(range(PORT_TRIES_MAX)):
            bus_port = free_port()
            server = ValkeyServer(cluster_port=bus_port, **self._options)
            self._stack.callback(server.stop)
            try:
                server.start()
                break
            except StoreUnavailable:
                if not tries_left:
                    raise
        self.servers.append(server)
        return bus_port

    @staticmethod
    def run_cluster(server: ValkeyServer, *arguments: object) -> Any:
        """Run a CLUSTER command on one node."""
        with client_of(server) as client:
            client.response_callbacks.clear()
            return client.execute_command("CLUSTER", *arguments)

    def _is_well(self, server: ValkeyServer) -> bool:
        info = self.run_cluster(server, "INFO").decode()
        named = sum(len(owned) for owned in self.run_cluster(server, "SLOTS"))
        return "cluster_state:ok" in info and "cluster_slots_ok:16384" in info and named >= 3 * len(self.servers)

    @property
    def url(self) -> str:
        """The URL: two of the nodes, the third is discovered."""
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers[:2])
        return f"valkey+cluster://:{self.password}@{hosts}"

    @staticmethod
    def slot_of(key: str) -> int:
        """Return the slot of a key or hash tag."""
        from redis.crc import key_slot

        return int(key_slot(key.encode()))

    def owner(self, slot: int) -> ValkeyServer:
        """Return the node that serves a slot."""
        for first, last, node, *_ in self.run_cluster(self.servers[0], "SLOTS"):
            if first <= slot <= last:
                return self.servers[self.ids.index(node[2].decode())]
        raise StoreUnavailable(f"no node serves slot {slot}")

    def begin_move(self, slot: int, target: ValkeyServer) -> None:
        """Begin to move a slot: from now on its keys may be on either node."""
        source = self.owner(slot)
        self.run_cluster(target, "SETSLOT", slot, "IMPORTING", self.ids[self.servers.index(source)])
        self.run_cluster(source, "SETSLOT", slot, "MIGRATING", self.ids[self.servers.index(target)])

    def move_keys(self, slot: int, target: ValkeyServer, limit: int = SLOTS) -> int:
        """Move up to `limit` keys, one by one. Return how many moved."""
        source = self.owner(slot)
        keys = self.run_cluster(source, "GETKEYSINSLOT", slot, limit)
        with client_of(source) as client:
            for key in keys:
                client.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000, "AUTH", self.password)
        return len(keys)

    def end_move(self, slot: int, target: ValkeyServer) -> None:
        """Make the target the owner of the slot, on all nodes."""
        source = self.owner(slot)
        while self.move_keys(slot, target):
            pass
        others = [server for server in self.servers if server is not target and server is not source]
        for server in (target, source, *others):
            self.run_cluster(server, "SETSLOT", slot, "NODE", self.ids[self.servers.index(target)])

    def move_slot(self, slot: int, target: ValkeyServer) -> None:
        """Move a slot key by key, as an operator's tool does."""
        if self.owner(slot) is target:
            return
        self.begin_move(slot, target)
        self.end_move(slot, target)
