"""A real RabbitMQ for tests, from Debian's package `rabbitmq-server`, on loopback, like the other servers.

Its node, port mapper, data and cookie are its own: it is independent of any other one on the machine.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from waypost.errors import MissingExtra
from waypost.testing.servers import EmbeddedServer, answers_with, free_port, write_private

PROGRAM, MAPPER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server"), Path("/usr/bin/epmd")
#: An Erlang system takes seconds to start where others take milliseconds.
START_SECONDS_MAX = 90.0
USER = "waypost"


def _installed(program: Path) -> Path:
    if not os.access(program, os.X_OK):
        raise MissingExtra("no server to start: Debian's package rabbitmq-server is not installed")
    return program


class PortMapper(EmbeddedServer):
    """Erlang's port mapper. One that RabbitMQ starts by itself would outlive the tests."""

    wheel = "erlang-base"
    scheme = "epmd"

    @classmethod
    def _find_program(cls) -> Path:
        return _installed(MAPPER)

    def _command(self) -> list[str]:
        return [str(self._program), "-address", "127.0.0.1", "-port", str(self.port)]

    def _answers(self) -> bool:
        # The answer to a request for all names begins with its port.
        return answers_with(self.port, b"\x00\x01n", self.port.to_bytes(4, "big"))


class RabbitServer(EmbeddedServer):
    """RabbitMQ with one user, whose password is random."""

    wheel = "rabbitmq-server"
    scheme = "amqp"

    def __init__(self) -> None:
        super().__init__()
        self._mapper = PortMapper()

    @classmethod
    def _find_program(cls) -> Path:
        return _installed(PROGRAM)

    @property
    def url(self) -> str:
        """The URL."""
        return f"amqp://{USER}:{self.password}@127.0.0.1:{self.port}/"

    def _command(self) -> list[str]:
        return [str(self._program)]

    def _environment(self) -> dict[str, str]:
        place = self.directory
        return {
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(place),
            "LANG": "C.UTF-8",
            # Without a shell before it, so that our signals reach the server itself.
            "RUNNING_UNDER_SYSTEMD": "true",
            "ERL_EPMD_PORT": str(self._mapper.port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"wp{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(place / "data"),
            "RABBITMQ_LOG_BASE": str(place),
            "RABBITMQ_LOGS": str(place / "server.log"),
            "RABBITMQ_PID_FILE": str(place / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(place / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 -kernel inet_dist_use_interface {127,0,0,1}",
        }

    def _launch(self) -> None:
        self._mapper.start()
        (self.directory / "plugins").write_text("[].\n")
        # The user is made when its data is: `guest`, who needs no secret, is not.
        settings = f"log.console = false\ndefault_user = {USER}\ndefault_pass = {self.password}\n"
        write_private(self.directory / "rabbitmq.conf", settings)
        self._watch(
            lambda: subprocess.Popen(
                self._command(), env=self._environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True, cwd=self.directory,
            )
        )  # fmt: skip

    def _answers(self) -> bool:
        # A server that cannot speak a client's version answers with its own.
        return answers_with(self.port, b"AMQP\x00\x09\x09\x09", b"AMQP")

    def _wait_until_it_answers(self) -> bool:
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline and self.pid is not None:
            if self._answers():
                return True
            time.sleep(0.1)
        return False

    def halt(self) -> None:
        """Stop it cleanly and keep its data. A kill loses queues that were declared in the last seconds before it."""
        self._end(gently=True)

    def stop(self) -> None:
        """Stop it cleanly, and its port mapper."""
        super().stop()
        self._mapper.stop()
