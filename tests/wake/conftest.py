"""Servers, and a hub of every kind of channel. Two hubs of a kind see each other like two processes do."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fault.proxy import Proxy
from tests.servers.nats import NatsServer
from tests.waiting import until
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer
from waypost.wake.hub import Hub, ThreadHub
from waypost.wake.port import Topic


class Received:
    """The notifications that a listener received."""

    def __init__(self) -> None:
        self.notifications: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, notification: str) -> None:
        with self._lock:
            self.notifications.append(notification)

    def wait_for(self, notification: str) -> Any:
        """Wait until a notification has arrived."""
        return until(lambda: notification in self.notifications, f"the notification {notification!r}")


@dataclass
class ChannelSetup:
    """A channel: hubs on it, and the proxy in front of its server if it has one."""

    maker: Callable[[], Hub]
    topic: Topic
    proxy: Proxy | None = None
    hubs: list[Hub] = field(default_factory=list)

    def make(self) -> Hub:
        """Return a new hub, which is stopped after the test."""
        self.hubs.append(self.maker())
        return self.hubs[-1]

    def stop(self) -> None:
        """Stop all hubs."""
        for hub in self.hubs:
            hub.stop()
        until(lambda: all(hub.state == "idle" for hub in self.hubs), "the end of all hubs")

    def pair(self) -> tuple[Hub, Hub]:
        """Return a hub that listens and one that sends."""
        return self.make(), self.make()


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer(appendonly=True, appendfsync="no") as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def nats() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
def namespace() -> str:
    return fresh_namespace()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: the path of a socket has room for about 100 characters."""
    path = Path(tempfile.mkdtemp(prefix="wp-wake-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def prepared(postgres: PostgresServer, namespace: str) -> PostgresServer:
    """A PostgreSQL server with the tables of this test."""
    migrate(postgres.url, namespace=namespace)
    return postgres


SERVED = ("valkey", "postgres", "nats")


@pytest.fixture(params=("memory", "files", *SERVED))
def channel(request: pytest.FixtureRequest, namespace: str, folder: Path) -> Iterator[ChannelSetup]:
    """Every kind of channel."""
    with ExitStack() as stack:
        made = make_channel(request.param, request.getfixturevalue, stack, namespace, folder)
        yield made
        made.stop()


@pytest.fixture(params=SERVED)
def server_channel(request: pytest.FixtureRequest, namespace: str, folder: Path) -> Iterator[ChannelSetup]:
    """Every channel with a server, behind a proxy."""
    with ExitStack() as stack:
        made = make_channel(request.param, request.getfixturevalue, stack, namespace, folder)
        yield made
        made.stop()


def make_channel(
    kind: str, server_of: Callable[[str], Any], stack: ExitStack, namespace: str, folder: Path
) -> ChannelSetup:
    topic = Topic(namespace, "ready", "orders")
    if kind == "memory":
        hub = Hub()
        return ChannelSetup(lambda: hub, topic)
    if kind == "files":
        from waypost.wake.sqlite import FileHub

        return ChannelSetup(lambda: FileHub(str(folder / "orders.db")), topic)
    server = server_of(kind)
    proxy = stack.enter_context(Proxy(server.port))
    url = server.url.replace(f":{server.port}", f":{proxy.port}")
    return ChannelSetup(lambda: served_hub(kind, url), topic, proxy)


def served_hub(kind: str, url: str, timeout: float = 3.0) -> ThreadHub:
    """Return a new hub, not the one that clients of this process share."""
    if kind == "valkey":
        from waypost.store.valkey.sources import source_of
        from waypost.wake.valkey import ValkeyTransport

        return ThreadHub(kind, lambda: ValkeyTransport(source_of(url), timeout))
    if kind == "postgres":
        from waypost.store.postgres.sources import UrlSource
        from waypost.wake.postgres import PostgresTransport

        return ThreadHub(kind, lambda: PostgresTransport(UrlSource(url), timeout))
    from waypost.wake.nats import NatsTransport

    return ThreadHub(kind, lambda: NatsTransport(url, timeout))
