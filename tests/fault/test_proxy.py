"""The proxy itself, in front of a server that answers every line with the same line and counts them."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from tests.fault.proxy import Proxy


class LineServer(socketserver.ThreadingTCPServer):
    """Keeps its requests, so that a test can distinguish a lost request from a lost reply."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.received = threading.Condition()
        super().__init__(("127.0.0.1", 0), LineHandler)

    def wait_for_lines(self, count: int) -> bool:
        with self.received:
            return self.received.wait_for(lambda: len(self.lines) >= count, 10)


class LineHandler(socketserver.StreamRequestHandler):
    server: LineServer

    def handle(self) -> None:
        for line in self.rfile:
            with self.server.received:
                self.server.lines.append(line)
                self.server.received.notify_all()
            self.wfile.write(line)


@pytest.fixture
def line_server() -> Iterator[LineServer]:
    with LineServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.fixture
def proxy(line_server: LineServer) -> Iterator[Proxy]:
    with Proxy(line_server.server_address[1]) as one:
        yield one


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), 10)


def send(connection: socket.socket, line: bytes) -> bytes:
    """Send a line and return the reply; empty if the connection broke."""
    try:
        connection.sendall(line)
        answer = b""
        while not answer.endswith(b"\n"):
            data = connection.recv(100_000)
            if not data:
                return answer
            answer += data
        return answer
    except ConnectionError:
        return b""


def test_everything_passes_at_first(proxy: Proxy) -> None:
    with connect(proxy) as first, connect(proxy) as second:
        assert send(first, b"one\n") == b"one\n"
        assert send(second, b"x" * 300_000 + b"\n") == b"x" * 300_000 + b"\n"
        assert send(first, b"two\n") == b"two\n"


def test_a_dropped_reply_means_that_the_server_did_it(proxy: Proxy, line_server: LineServer) -> None:
    with connect(proxy) as first:
        assert send(first, b"before\n") == b"before\n"
        proxy.drop_replies(1)
        assert send(first, b"lost\n") == b""
    assert line_server.lines == [b"before\n", b"lost\n"]
    assert proxy.dropped == 1
    with connect(proxy) as second:
        assert send(second, b"after\n") == b"after\n"


def test_only_replies_to_marked_requests_are_dropped(proxy: Proxy) -> None:
    proxy.drop_replies(1, to=b"SAVE")
    with connect(proxy) as connection:
        assert send(connection, b"HELLO\n") == b"HELLO\n"
        assert send(connection, b"SAVE\n") == b""
    with connect(proxy) as connection:
        assert send(connection, b"SAVE\n") == b"SAVE\n"


def test_a_share_of_replies_is_dropped_by_a_seed(proxy: Proxy) -> None:
    proxy.drop_some(0.5, seed=7)
    answered = 0
    for _ in range(40):
        with connect(proxy) as connection:
            answered += send(connection, b"x\n") == b"x\n"
    assert 0 < answered < 40
    assert proxy.dropped == 40 - answered


def test_a_cut_ends_open_connections_and_accepts_new_ones(proxy: Proxy) -> None:
    with connect(proxy) as first:
        assert send(first, b"one\n") == b"one\n"
        proxy.cut()
        assert send(first, b"two\n") == b""
    with connect(proxy) as second:
        assert send(second, b"three\n") == b"three\n"


def test_a_refusing_proxy_keeps_the_connections_it_has(proxy: Proxy) -> None:
    with connect(proxy) as first:
        assert send(first, b"one\n") == b"one\n"
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        assert send(first, b"two\n") == b"two\n"
        proxy.heal()
        with connect(proxy) as second:
            assert send(second, b"three\n") == b"three\n"


def test_nothing_arrives_during_a_silence(proxy: Proxy, line_server: LineServer) -> None:
    with connect(proxy) as connection:
        proxy.silence()
        connection.settimeout(0.05)
        connection.sendall(b"one\n")
        with pytest.raises(TimeoutError):
            connection.recv(100)
        assert line_server.lines == []
        proxy.heal()
        connection.settimeout(10)
        assert connection.recv(100) == b"one\n"


def test_a_silence_of_replies_lets_requests_through(proxy: Proxy, line_server: LineServer) -> None:
    with connect(proxy) as connection:
        proxy.silence(requests=False)
        connection.sendall(b"one\n")
        assert line_server.wait_for_lines(1)
        connection.settimeout(0.05)
        with pytest.raises(TimeoutError):
            connection.recv(100)


def test_a_closed_proxy_has_no_threads(line_server: LineServer) -> None:
    with Proxy(line_server.server_address[1]) as proxy:
        connections = [connect(proxy) for _ in range(3)]
        assert [send(connection, b"x\n") for connection in connections] == [b"x\n"] * 3
        proxy.silence()
    for connection in connections:
        connection.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("proxy-")]
