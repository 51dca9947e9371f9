"""A proxy between a client and a server on loopback that injects network faults.

    with Proxy(server.port) as proxy:
        proxy.drop_replies(1, to=b"EVALSHA")    # the server does it, the client gets no reply
        proxy.cut()                             # every connection ends now
        proxy.refuse()                          # new connections are refused
        proxy.silence()                         # half-open: connections stay, nothing passes
        proxy.hold_replies(to=b"claim")         # replies to such requests wait, all else passes
        proxy.heal()                            # everything passes again

    Proxy(server.port, bytes_per_second=5_000_000)   # a slow link, shared by all connections, the same both ways

A dropped reply is the most important fault: the request reached the server and was carried out, its reply arrived here,
and then the connection broke. Requests are separated by reads, each of which is one command or one pipeline for
clients that wait for their replies.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from types import TracebackType
from typing import Self

CHUNK_BYTES = 1 << 16
#: No thread of a proxy outlives its `with` block by more than this; a longer wait is a defect and must show.
JOIN_SECONDS_MAX = 10.0


def contains(request: bytes, marker: bytes) -> bool:
    """Return whether a request contains one of the parts of a marker."""
    return any(part in request for part in marker.split(b"|"))


class Bandwidth:
    """One direction of the link: all connections share its bytes a second, piece by piece."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self.carried = 0
        self._guard = threading.Lock()

    def carry(self, count: int) -> None:
        """Wait as long as the transfer of these bytes takes."""
        self.carried += count
        if self._rate is None:
            return
        with self._guard:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._rate
            until = self._free_at
        while (left := until - time.monotonic()) > 0:
            time.sleep(left)


class Connection:
    """One connection of a client to the server: two threads, one for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy = proxy
        self.client, self.server = client, server
        #: The next reply is dropped.
        self.drop_next_reply = False
        self.last_request = b""
        self.threads = [
            threading.Thread(target=self._carry_requests, name="proxy-requests", daemon=True),
            threading.Thread(target=self._carry_replies, name="proxy-replies", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def _carry_requests(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.client.recv(self.proxy.chunk_bytes):
                self.proxy.requests_pass.wait()
                self.proxy.uplink.carry(len(data))
                if self.proxy.takes_reply_of(data):
                    self.drop_next_reply = True
                self.last_request = data
                self.server.sendall(data)
        self.close()

    def _carry_replies(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.server.recv(self.proxy.chunk_bytes):
                if self.drop_next_reply:
                    self.proxy.count_dropped()
                    break
                self.proxy.replies_pass.wait()
                self.proxy.downlink.carry(len(data))
                self.proxy.hold_reply_to(self.last_request)
                self.client.sendall(data)
        self.close()

    def close(self) -> None:
        """End both sides. Safe to call twice, and from any thread."""
        for end in (self.client, self.server):
            # Only a shutdown ends a recv in another thread.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Proxy:
    """Listens on a loopback port of its own, `port`, and passes everything on until a fault is set."""

    def __init__(self, target_port: int, *, bytes_per_second: float | None = None) -> None:
        self.target_port = target_port
        self.bytes_per_second = bytes_per_second
        self.uplink, self.downlink = Bandwidth(bytes_per_second), Bandwidth(bytes_per_second)
        #: On a slow link in small pieces, so that others get their turn between them.
        self.chunk_bytes = CHUNK_BYTES if bytes_per_second is None else max(512, int(bytes_per_second / 200))
        self.requests_pass, self.replies_pass = threading.Event(), threading.Event()
        self.requests_pass.set()
        self.replies_pass.set()
        self.held_pass = threading.Event()
        self.held_pass.set()
        self.held = 0
        self._held_marker = b""
        self.dropped = 0
        self._guard = threading.Lock()
        self._to_drop = 0
        self._share = 0.0
        self._chance = random.Random(0)
        self._marker = b""
        self._connections: list[Connection] = []
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self.port = 0
        self._listen()

    # ---- faults ------------------------------------------------------------------------------------------

    def drop_replies(self, count: int, *, to: bytes = b"") -> None:
        """Lose the replies to the next `count` requests that contain `to`, and cut their connections.

        `to` may have several parts, with | between: one of them is enough.
        """
        with self._guard:
            self._to_drop, self._share, self._marker = count, 0.0, to

    def drop_some(self, share: float, *, seed: int, to: bytes = b"") -> None:
        """Lose a share of all replies to requests that contain `to`, chosen by a seeded random generator."""
        with self._guard:
            self._to_drop, self._share, self._marker, self._chance = 0, share, to, random.Random(seed)

    def cut(self) -> None:
        """End every connection now. New ones are accepted."""
        with self._guard:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def refuse(self) -> None:
        """Stop listening: new connections are refused, open ones stay."""
        listener, accepting = self._listener, self._accepting
        self._listener = self._accepting = None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        if accepting is not None:
            accepting.join(JOIN_SECONDS_MAX)

    def silence(self, *, requests: bool = True, replies: bool = True) -> None:
        """Half-open: connections stay and can be made, but requests, replies or both do not get through."""
        if requests:
            self.requests_pass.clear()
        if replies:
            self.replies_pass.clear()

    def hold_replies(self, *, to: bytes) -> None:
        """Hold back the replies to requests that contain `to`, also to those that were sent before."""
        with self._guard:
            self._held_marker, self.held = to, 0
        self.held_pass.clear()

    def heal(self) -> None:
        """Pass everything again; what was held back is sent now."""
        self.drop_replies(0)
        self.held_pass.set()
        self.requests_pass.set()
        self.replies_pass.set()
        if self._listener is None:
            self._listen()

    # ---- at work -----------------------------------------------------------------------------------------

    def takes_reply_of(self, request: bytes) -> bool:
        """Return whether the reply to this request is to be dropped."""
        with self._guard:
            if not contains(request, self._marker):
                return False
            if self._to_drop > 0:
                self._to_drop -= 1
                return True
            return self._share > 0 and self._chance.random() < self._share

    def hold_reply_to(self, request: bytes) -> None:
        """Hold the reply to this request back if that was demanded."""
        if not self.held_pass.is_set() and contains(request, self._held_marker):
            with self._guard:
                self.held += 1
            self.held_pass.wait()

    def count_dropped(self) -> None:
        """Count a reply that the server sent and no client gets."""
        with self._guard:
            self.dropped += 1

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.bytes_per_second is not None:
            # A slow link buffers little: requests must not be read faster than they are passed on.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.chunk_bytes)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(128)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._accepting = threading.Thread(target=self._accept, args=(listener,), name="proxy-accept", daemon=True)
        self._accepting.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port), 5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._guard:
                self._connections = [one for one in self._connections if one.threads[0].is_alive()]
                # Made under the guard: a connection that passes bytes must be one that a cut can find.
                self._connections.append(Connection(self, client, server))

    def close(self) -> None:
        """Close all connections, and wait for the threads."""
        self.refuse()
        self.requests_pass.set()
        self.replies_pass.set()
        self.held_pass.set()
        with self._guard:
            threads = [thread for connection in self._connections for thread in connection.threads]
        self.cut()
        for thread in threads:
            thread.join(JOIN_SECONDS_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
