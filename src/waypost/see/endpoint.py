"""The HTTP endpoint of a worker: `/metrics` for Prometheus, `/health` and `/ready` for its supervisor.

A small HTTP server in a thread, so it replies while the event loop is busy or blocked. (C code that holds the
interpreter's lock stops it, like the rest of the process.) It is read-only and has no authentication, so it binds to
loopback by default.

    /metrics   the metrics in the format of Prometheus
    /health    200 if the worker is green or degraded, 503 if it is red: it does not consume
    /ready     200 while it claims; 503 before it does, once it was asked to be quiet or to stop, and while it is red
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Protocol, Self

from waypost.errors import ConfigurationError
from waypost.store.port import Store
from waypost.values import Health
from waypost.views import to_json

if TYPE_CHECKING:
    from waypost.see.prometheus import Prometheus
    from waypost.worker.handler import Handler

log = logging.getLogger("waypost")

#: The longest wait for the request of a connected client.
CLIENT_SECONDS = 5.0
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"


class ServedWorker(Protocol):
    """The part of a sync or async worker that the endpoint needs."""

    @property
    def handlers(self) -> list[Handler]: ...
    @property
    def name(self) -> str: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def store(self) -> Store: ...
    def health(self) -> Health: ...


class Endpoint:
    """The endpoint of one worker: `start` and `stop`, or a `with` block around the worker's run.

    Given a `Prometheus`, `/metrics` has its metrics, those of this worker, and those of its queues in the store unless
    it watches a store already. `port=0` takes a free port; `port` then has its number.
    """

    def __init__(
        self, worker: ServedWorker, prometheus: Prometheus | None = None, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65_535:
            raise ConfigurationError(f"a port is a whole number from 0 to 65535, not {port!r}")
        self.host = host
        self.port = port
        self._worker = worker
        self._prometheus = prometheus
        self._reads = False
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The URL of the endpoint."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def start(self) -> Self:
        """Start to serve. Raises `ConfigurationError` if the address is in use, or not one of this machine."""
        if self._server is not None:
            raise ConfigurationError("this endpoint is already started")
        try:
            self._server = server = _Server(self)
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(f"cannot listen on {self.host}, port {self.port}: {error}") from None
        self.port = server.server_address[1]
        if self._prometheus is not None:
            self._prometheus.watch_worker(self._worker)
            if not self._prometheus.watches:
                self._prometheus.watch(self._worker.store, [handler.queue for handler in self._worker.handlers])
                self._reads = True
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="waypost-endpoint", daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            if self._thread is not None:
                self._thread.join()
            if self._prometheus is not None:
                self._prometheus.forget_worker(self._worker)
                if self._reads:
                    self._prometheus.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *ended: object) -> None:
        self.stop()

    def answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Return status, content type and body for a path."""
        match path.partition("?")[0].rstrip("/"):
            case "/metrics" if self._prometheus is not None:
                text, content_type = self._prometheus.exposition(accept)
                return 200, content_type, text
            case "/health":
                health = self._worker.health()
                return self._health_response(health.status != "red", health)
            case "/ready":
                health = self._worker.health()
                return self._health_response(self._worker.is_ready and health.status != "red", health)
        return 404, TEXT, b"not found: use /metrics, /health or /ready\n"

    def _health_response(self, healthy: bool, health: Health) -> tuple[int, str, bytes]:
        document: dict[str, Any] = {
            "status": health.status,
            "ready": self._worker.is_ready,
            "worker": self._worker.name,
            "reasons": health.reasons,
            "queues": [to_json(queue) for queue in health.queues],
        }
        return 200 if healthy else 503, JSON, json.dumps(document).encode() + b"\n"


class _Server(ThreadingHTTPServer):
    """A thread for each request, so that a scrape that waits for the store does not delay a health check."""

    daemon_threads = True
    # A restarted worker must get its port although connections of the previous one are in TIME_WAIT.
    allow_reuse_address = True

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.address_family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        super().__init__((endpoint.host, endpoint.port), _Request)

    def server_bind(self) -> None:
        """Bind without a DNS lookup of our own address, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.endpoint.host, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at debug level: a client that disconnects needs no traceback on the worker's terminal."""
        log.debug("a request to the endpoint failed", exc_info=True, extra={"event": "endpoint_failed"})


class _Request(BaseHTTPRequestHandler):
    """One request."""

    server: _Server
    timeout = CLIENT_SECONDS
    server_version, sys_version = "waypost", ""

    def do_GET(self) -> None:
        """Reply with a body."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Reply without a body."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        try:
            status, content_type, body = self.server.endpoint.answer(self.path, self.headers.get("Accept", ""))
        except Exception:
            log.exception("the endpoint could not reply", extra={"event": "endpoint_failed"})
            status, content_type, body = 500, TEXT, b"internal error; see the log of the worker\n"
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *given: Any) -> None:
        """Log requests at debug level."""
        log.debug("endpoint: " + format, *given, extra={"event": "endpoint_request"})
