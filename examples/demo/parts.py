"""What the demo is made of, and how each part ends: servers, workers, the set-up that goes on, the Spark process."""

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
from waypost.cli.telling import Company, Stuck, signal_group

ROOT = Path(__file__).parents[2]
#: Modules are found without pip's help: the set-up installs waypost anew while the demo runs.
PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT)])


class Parts:
    """Everything that runs. Leaving the `with` block ends all of it, in order."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.company = Company()
        self._stack = ExitStack()
        self.valkey = ""
        self.postgres = ""

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *ended: Any) -> None:
        # Clients end before the servers that they talk to.
        self._stack.push(self.company.__exit__)
        self._stack.__exit__(*ended)

    def start_servers(self) -> None:
        """A Valkey with an append-only file, and a PostgreSQL that waits for its disk."""
        from waypost.testing.postgres import PostgresServer
        from waypost.testing.servers import ValkeyServer

        # By their sockets: any user of the machine can reach a port, and Spark takes no URL with a password in it.
        valkey = ValkeyServer(appendonly=True, appendfsync="everysec", tcp=False)
        self.valkey = self._stack.enter_context(valkey).url
        self.postgres = self._stack.enter_context(PostgresServer(durable=True)).socket_url

    def start(
        self, *command: str, log: str, output: int | None = None, worker: bool = False
    ) -> subprocess.Popen[bytes]:
        """A Python process of ours."""
        environment = {"PYTHONPATH": PATHS, "PYTHONUNBUFFERED": "1"} | ({WORKER_VARIABLE: "1"} if worker else {})
        if self.valkey:
            environment |= {VALKEY_VARIABLE: self.valkey, POSTGRES_VARIABLE: self.postgres}
        return self.company.start([sys.executable, *command], environment, self.home / f"{log}.log", output=output)

    def end_at_once(self) -> None:
        """End all processes but the servers, with all that they started: nobody needs anything of them any more."""
        for process in self.company.processes:
            signal_group(process, signal.SIGKILL)
        for process in list(self.company.processes):
            self.company.stop(process)

    def start_worker(self, name: str, target: str = "examples.demo.shop:post") -> subprocess.Popen[bytes]:
        """A process that runs the handlers."""
        command = ("-m", "waypost.cli.main", "worker", target, "--timeout", "10")
        return self.start(*command, log=name, worker=True)


class Setup:
    """The rest of the set-up, Spark above all, while the story goes on. One that has nothing to do ends at once."""

    def __init__(self, parts: Parts) -> None:
        self.log = parts.home / "setup.log"
        self.process = parts.start("-m", "examples.demo.setting_up", log="setup")

    @property
    def under_way(self) -> bool:
        """Whether it is still at work."""
        code = self.process.poll()
        if code:
            raise Stuck(f"the set-up has failed: {self.log.read_text(errors='replace').strip()[-2000:]}")
        return code is None


class SparkProcess:
    """The other end of `examples.demo.lake`."""

    def __init__(self, parts: Parts) -> None:
        self.log = parts.home / "spark.log"
        self.process = parts.start("-m", "examples.demo.lake", str(parts.home), log="spark", output=subprocess.PIPE)
        self.replies: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, name="spark-replies", daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.replies.put(json.loads(line))
        self.replies.put({"error": "the Spark process has ended"})

    def ask(self, do: str, **request: Any) -> None:
        """Send a request; `reply` has the answer, some time."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
        self.process.stdin.flush()

    def reply(self) -> dict[str, Any] | None:
        """What it said, None while it says nothing."""
        try:
            said = self.replies.get_nowait()
        except queue.Empty:
            return None
        if "error" in said:
            log = self.log.read_text(errors="replace").strip()[-1000:]
            raise Stuck(f"Spark: {said['error']}\n{log}".rstrip())
        return said
