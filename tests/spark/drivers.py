"""Driver programs in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 400
ROOT = Path(__file__).parents[2]
QUICK = ["--master", "local[1]", "--config", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"]


def run_killed(point: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `waypost pipeline` in a process that kills itself at a commit, such as `before:4`, or at none."""
    command = [sys.executable, "-m", "tests.spark.killed_pipeline", point, "pipeline", *arguments, *QUICK]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, check=False)


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
