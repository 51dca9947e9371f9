"""Over Spark Connect, from a process without a JVM of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.drivers import run_driver
from tests.spark.remote_driver import HELD, ROWS
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
