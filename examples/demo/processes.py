"""The processes of the demo and their ends: servers, workers, the rest of the set-up, Spark."""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.demo.storefront import OUTBOX_VARIABLE
from waypost.cli.demo.runner import DemoProcesses, DemoTimeout, signal_group
from waypost.cli.demo.shop import CONCURRENCY_VARIABLE, STORE_VARIABLE

ROOT = Path(__file__).parents[2]
#: The password of both servers; random if it is not set.
PASSWORD_VARIABLE = "WAYPOST_DEMO_PASSWORD"
CONCURRENCY = 100
#: Modules are found without pip's help: the set-up installs waypost anew while the demo runs.
PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT)])


class Environment:
    """Everything that runs. The end of the `with` block ends all of it, in order."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes = DemoProcesses()
        self._stack = ExitStack()
        self.valkey = ""
        self.postgres = ""

    def __enter__(self) -> Environment:
        return self

    def __exit__(self, *ended: Any) -> None:
        # Clients end before their servers.
        self._stack.push(self.processes.__exit__)
        self._stack.__exit__(*ended)

    def start_servers(self) -> None:
        """Start a Valkey with an append-only file, and a PostgreSQL that waits for its disk."""
        from waypost.testing.postgres import PostgresServer
        from waypost.testing.servers import ValkeyServer

        # Any user of the machine can reach a port, so both servers have a password, which no output may contain.
        password = os.environ.get(PASSWORD_VARIABLE) or secrets.token_urlsafe(18)
        valkey = ValkeyServer(appendonly=True, appendfsync="everysec", tcp=False, requirepass=password)
        postgres = PostgresServer(durable=True)
        postgres.password = password
        self.valkey = self._stack.enter_context(valkey).url
        self.postgres = self._stack.enter_context(postgres).url

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of all processes. URLs with a password are passed nowhere else."""
        variables = {"PYTHONPATH": PATHS, "PYTHONUNBUFFERED": "1", CONCURRENCY_VARIABLE: str(CONCURRENCY)}
        if self.valkey:
            variables |= {STORE_VARIABLE: self.valkey, OUTBOX_VARIABLE: self.postgres}
        return variables

    def start(self, *command: str, log: str, output: int | None = None) -> subprocess.Popen[bytes]:
        """Start a Python process."""
        return self.processes.start(
            [sys.executable, *command], self.variables, self.directory / f"{log}.log", output=output
        )

    def kill_all(self) -> None:
        """Kill all processes but the servers, with all that they started."""
        for process in self.processes.processes:
            signal_group(process, signal.SIGKILL)
        for process in list(self.processes.processes):
            self.processes.stop(process)


class Setup:
    """The rest of the set-up, which installs Spark while the demo runs. It ends at once if there is nothing to do."""

    def __init__(self, environment: Environment) -> None:
        self.log = environment.directory / "setup.log"
        self.process = environment.start("-m", "examples.demo.install_spark", log="setup")

    @property
    def is_running(self) -> bool:
        """Whether it still runs."""
        code = self.process.poll()
        if code:
            raise DemoTimeout(f"the set-up failed: {self.log.read_text(errors='replace').strip()[-2000:]}")
        return code is None


class SparkProcess:
    """Sends requests to `examples.demo.spark_process` and reads its replies."""

    def __init__(self, environment: Environment) -> None:
        self.log = environment.directory / "spark.log"
        self.process = environment.start(
            "-m", "examples.demo.spark_process", str(environment.directory), log="spark", output=subprocess.PIPE
        )
        self.replies: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, name="spark-replies", daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.replies.put(json.loads(line))
        self.replies.put({"error": "the Spark process has ended"})

    def send(self, do: str, **request: Any) -> None:
        """Send a request; `reply` returns the answer later."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
        self.process.stdin.flush()

    def reply(self) -> dict[str, Any] | None:
        """Return the next reply, or None if there is none yet."""
        try:
            reply = self.replies.get_nowait()
        except queue.Empty:
            return None
        if "error" in reply:
            log = self.log.read_text(errors="replace").strip()[-1000:]
            raise DemoTimeout(f"Spark: {reply['error']}\n{log}".rstrip())
        return reply
