"""Over Spark Connect, from a process without a JVM of its own: in Python and on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.drivers import run_driver
from tests.spark.remote_driver import HELD, ROWS
from waypost import Waypost
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer

pytestmark = pytest.mark.xdist_group("spark")


@pytest.fixture
def connect_url(spark: SparkSession) -> Iterator[str]:
    """A Connect server in the JVM of the session that all tests share, on a free port."""
    java: Any = spark._jvm
    service = getattr(java.org.apache.spark.sql.connect.service, "SparkConnectService$").__getattr__("MODULE$")
    service.start(spark.sparkContext._jsc.sc())
    yield f"sc://127.0.0.1:{service.localPort()}"
    service.stop(getattr(service, "stop$default$1")(), getattr(service, "stop$default$2")())


@pytest.mark.promise("SPARK-11")
def test_everything_works_over_spark_connect(connect_url: str, postgres: PostgresServer, tmp_path: Path) -> None:
    namespace = fresh_namespace()
    migrate(postgres.socket_url, namespace=namespace)
    code, lines = run_driver(
        "tests.spark.remote_driver", connect_url, "all", str(tmp_path), namespace, postgres.socket_url
    )
    assert code == 0, lines
    assert lines == [
        {"ready": ROWS, "published": ROWS},
        {"done": ROWS, "rows": ROWS},
        {"clean": True, "accounted": {"done": ROWS, "ready": HELD}},
        {"queue": "orders", "rows": ROWS + HELD, "corrupt": 0, "total": sum(range(ROWS))},
    ]


@pytest.mark.promise("SPARK-9")
def test_a_job_over_spark_connect_is_cancelled_with_its_message_and_gets_a_new_session_for_a_closed_one(
    connect_url: str,
) -> None:
    code, lines = run_driver("tests.spark.remote_job_driver", connect_url)
    assert (code, lines) == (0, [{"status": "requested", "cancelled": 1, "retried": 1}])


@pytest.mark.promise("SPARK-11")
def test_the_pipeline_command_works_over_spark_connect(
    connect_url: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    namespace = fresh_namespace()
    migrate(postgres.socket_url, namespace=namespace)
    lake = str(tmp_path / "lake")
    store = ["--store", postgres.socket_url, "--namespace", namespace]
    with Waypost(postgres.socket_url, namespace=namespace) as post:
        post.configure("orders", journal="full")
        post.publish_many("orders", [{"id": n} for n in range(HELD)])
        with post.receive("orders") as message:
            assert message is not None
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    # No Java for the command: everything is run by the server.
    environment |= {"JAVA_HOME": str(tmp_path / "none")}

    def run(action: str, *arguments: str) -> Any:
        program = "import sys; from waypost.cli.main import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", program, "pipeline", action, "--lake", lake, "--master", connect_url]
        ended = subprocess.run(
            [*command, "--json", *arguments], capture_output=True, text=True, env=environment, timeout=300, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    assert run("run", *store)["events_added"] == HELD + 3
    assert run("audit", *store)["unaccounted_count"] == 0
    assert run("ingest", *store, "--queue", "orders", "--schema", "id BIGINT")["rows"] == HELD
    assert run("tidy") == {"lake": lake}
