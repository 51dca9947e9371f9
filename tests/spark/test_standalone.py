"""On a standalone cluster: a master and a worker as processes of their own, on loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyspark
import pytest

from tests.spark.drivers import run_driver
from tests.spark.remote_driver import HELD, ROWS
from waypost.spark.session import find_java
from waypost.testing.bench import fresh_namespace
from waypost.testing.servers import ValkeyServer

pytestmark = pytest.mark.xdist_group("spark")
START_SECONDS_MAX = 120


def start(stack: ExitStack, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a program of Spark; ended with the stack."""
    launcher = Path(pyspark.__file__).parent / "bin" / "spark-class"
    environment = {
        **os.environ, "JAVA_HOME": find_java(), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1",
        "SPARK_LOCAL_DIRS": str(log.parent),
    }  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(launcher), *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=log.parent
        )
    stack.callback(process.wait, 60)
    stack.callback(process.kill)
    return process


def wait_for(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> str:
    """Wait until a log has a line, and return the first group of the pattern."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        found = re.search(pattern, log.read_text())
        if found is not None:
            return found[1]
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.fixture
def master_url(tmp_path: Path) -> Iterator[str]:
    """A master and one worker with two cores, on free ports."""
    with ExitStack() as stack:
        folder = tmp_path / "cluster"
        folder.mkdir()
        master_log, worker_log = folder / "master.log", folder / "worker.log"
        here = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        master = start(stack, master_log, "org.apache.spark.deploy.master.Master", *here)
        url = wait_for(master_log, r"Starting Spark master at (spark://\S+)", master)
        worker = start(
            stack, worker_log, "org.apache.spark.deploy.worker.Worker", *here, "--cores", "2", "--memory", "1g",
            "--work-dir", str(folder / "work"), url,
        )  # fmt: skip
        wait_for(worker_log, r"(Successfully registered with master)", worker)
        yield url


@pytest.mark.promise("SPARK-11")
def test_everything_works_on_a_standalone_cluster(master_url: str, valkey: ValkeyServer, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    code, lines = run_driver("tests.spark.remote_driver", master_url, "all", str(folder), fresh_namespace(), valkey.url)
    assert code == 0, lines
    assert lines == [
        {"ready": ROWS, "published": ROWS},
        {"done": ROWS, "rows": ROWS},
        {"clean": True, "accounted": {"done": ROWS, "ready": HELD}},
        {"queue": "orders", "rows": ROWS + HELD, "corrupt": 0, "total": sum(range(ROWS))},
        {"executors": 1},
    ]
