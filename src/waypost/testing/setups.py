"""Several real servers together: a primary and a replica under Sentinels.

    with SentinelSetup() as setup:
        post = Waypost(setup.url)
        setup.fail_over()       # the primary is killed, the Sentinels promote its replica

Everything is on loopback, belongs to the process that started it, and ends like the servers of `servers`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from waypost.errors import StoreUnavailable
from waypost.testing.servers import ValkeyServer, free_port

#: Sentinels find each other in seconds, and promote in seconds; a busy machine takes longer.
SETUP_SECONDS_MAX = 60.0
#: They look, agree and act often, so that a test waits a second and not a minute. In milliseconds.
QUICK = (
    b"info-period", b"200", b"ping-period", b"100", b"ask-period", b"100", b"publish-period", b"200",
    b"election-timeout", b"1000", b"default-down-after", b"500",
)  # fmt: skip


def client_of(port: int) -> Any:
    """A redis-py client of one server."""
    import redis

    return redis.Redis(port=port, socket_timeout=5)


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

    def __init__(self, service: str, primary_port: int, quorum: int) -> None:
        super().__init__()
        self._service = service
        self._primary_port = primary_port
        self._quorum = quorum

    def _command(self) -> list[str]:
        path = self.directory / "sentinel.conf"
        if not path.exists():
            path.write_text(
                f"port {self.port}\nbind 127.0.0.1\nprotected-mode no\ndaemonize no\n"
                f"dir {self.directory}\nlogfile {self.directory / 'server.log'}\n"
                f"sentinel monitor {self._service} 127.0.0.1 {self._primary_port} {self._quorum}\n"
                f"sentinel down-after-milliseconds {self._service} 500\n"
                f"sentinel failover-timeout {self._service} 3000\n"
            )
        return [str(self._program), str(path), "--sentinel"]


class SentinelSetup:
    """A primary, a replica and three Sentinels. `options` are settings of both servers."""

    service = "orders"

    def __init__(self, **options: str | int) -> None:
        self._options: dict[str, Any] = {"repl_diskless_sync_delay": 0, **options}
        self._stack = ExitStack()
        self.servers: list[ValkeyServer] = []
        self.sentinels: list[Sentinel] = []

    def start(self) -> None:
        """Start all of them and wait until the Sentinels know the replica and each other."""
        primary = self._stack.enter_context(ValkeyServer(**self._options))
        replica = self._stack.enter_context(ValkeyServer(replicaof=f"127.0.0.1 {primary.port}", **self._options))
        self.servers = [primary, replica]
        wait_until("the replica follows", lambda: self._follows(replica))
        for _ in range(3):
            sentinel = Sentinel(self.service, primary.port, quorum=2)
            sentinel.port = free_port()
            self.sentinels.append(self._stack.enter_context(sentinel))
            with client_of(sentinel.port) as client:
                client.execute_command("SENTINEL", "DEBUG", *QUICK)
        wait_until("the Sentinels know each other", lambda: all(map(self._is_informed, self.sentinels)))

    @staticmethod
    def _follows(replica: ValkeyServer) -> bool:
        with client_of(replica.port) as client:
            return bool(client.info("replication").get("master_link_status") == "up")

    def _is_informed(self, sentinel: Sentinel) -> bool:
        with client_of(sentinel.port) as client:
            state = client.sentinel_masters()[self.service]
            return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] >= 1)

    @property
    def url(self) -> str:
        """Where to connect: the Sentinels, and the service that they watch."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"valkey+sentinel://{hosts}/{self.service}"

    @property
    def primary(self) -> ValkeyServer:
        """The server that most of the Sentinels call the primary."""
        named: list[int] = []
        for sentinel in self.sentinels:
            with client_of(sentinel.port) as client:
                named.append(client.sentinel_masters()[self.service]["port"])
        port = max(named, key=named.count)
        return next(server for server in self.servers if server.port == port)

    def fail_over(self, *, wait: bool = True) -> ValkeyServer:
        """Kill the primary. The server that is killed is returned, as soon as another has its place if `wait`."""
        killed = self.primary
        killed.kill()
        if wait:
            self.fail_over_ended()
        return killed

    def fail_over_ended(self) -> None:
        """Wait until a server that runs is the primary."""
        wait_until("a replica is promoted", self._has_primary)

    def _has_primary(self) -> bool:
        primary = self.primary
        if primary.pid is None:
            return False
        with client_of(primary.port) as client:
            return bool(client.info("replication")["role"] == "master")

    def stop(self) -> None:
        """End all of them, the Sentinels first."""
        self._stack.close()

    def logs(self) -> dict[Path, str]:
        """What each of them has written."""
        return {one.directory: one.log() for one in (*self.servers, *self.sentinels)}

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
