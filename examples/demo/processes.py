"""The processes of the demo and their ends: servers, workers, the rest of the set-up, Spark."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.demo.shop import POSTGRES_VARIABLE, VALKEY_VARIABLE, WORKER_VARIABLE
from waypost.cli.demo.runner import DemoProcesses, DemoTimeout, signal_group

ROOT = Path(__file__).parents[2]
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

        # On sockets: any user of the machine can reach a port, and Spark accepts no URL with a password.
        valkey = ValkeyServer(appendonly=True, appendfsync="everysec", tcp=False)
        self.valkey = self._stack.enter_context(valkey).url
        self.postgres = self._stack.enter_context(PostgresServer(durable=True)).socket_url

    def start(
        self, *command: str, log: str, output: int | None = None, worker: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a Python process."""
        environment = {"PYTHONPATH": PATHS, "PYTHONUNBUFFERED": "1"} | ({WORKER_VARIABLE: "1"} if worker else {})
        if self.valkey:
            environment |= {VALKEY_VARIABLE: self.valkey, POSTGRES_VARIABLE: self.postgres}
        return self.processes.start(
            [sys.executable, *command], environment, self.directory / f"{log}.log", output=output
        )

    def kill_all(self) -> None:
        """Kill all processes but the servers, with all that they started."""
        for process in self.processes.processes:
            signal_group(process, signal.SIGKILL)
        for process in list(self.processes.processes):
            self.processes.stop(process)

    def start_worker(self, name: str, target: str = "examples.demo.shop:post") -> subprocess.Popen[bytes]:
        """Start a process that runs the handlers."""
        command = ("-m", "waypost.cli.main", "worker", target, "--timeout", "10")
        return self.start(*command, log=name, worker=True)


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
