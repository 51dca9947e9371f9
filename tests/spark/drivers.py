"""Driver programs in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

TIMEOUT_SECONDS = 400


def run_driver(module: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a driver to its end; return its exit code and the lines of JSON that it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        lines, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a JVM that outlived its driver
    return process.returncode, [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
