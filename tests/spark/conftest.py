"""One Spark session and one server of each kind for the whole run, and for each test a namespace of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.shop import Shop
from waypost.spark import terminal
from waypost.spark.lake.pipeline import SETTINGS, Pipeline
from waypost.spark.session import session
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer(tcp=False) as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as running:
        yield running


@pytest.fixture(params=["sqlite", "valkey", "postgres"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """An empty store of each kind."""
    namespace = fresh_namespace()
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/orders.db"
    elif request.param == "valkey":
        url = request.getfixturevalue("valkey").url
    else:
        url = request.getfixturevalue("postgres").socket_url
        migrate(url, namespace=namespace)
    with Shop(url, namespace) as made:
        yield made


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[Shop]:
    """A store in a file, for tests that do not depend on the kind of store."""
    with Shop(f"sqlite:///{tmp_path}/orders.db", "wp") as shop:
        yield shop


@pytest.fixture
def postgres_shop(postgres: PostgresServer) -> Iterator[Shop]:
    namespace = fresh_namespace()
    migrate(postgres.socket_url, namespace=namespace)
    with Shop(postgres.socket_url, namespace) as shop:
        yield shop


@pytest.fixture
def pipeline(spark: SparkSession, tmp_path: Path) -> Callable[..., Pipeline]:
    """Make pipelines from a shop into a lake."""

    def make(shop: Shop, lake: str = "a lake", **options: Any) -> Pipeline:
        return Pipeline(spark, str(tmp_path / lake), store=shop.url, namespace=shop.namespace, **options)

    return make


@pytest.fixture
def running_session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process use the running session."""

    @contextmanager
    def running(*arguments: Any) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(terminal, "quiet_session", running)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two cores, and a task that fails is tried again, as on a cluster."""
    folder = tmp_path_factory.mktemp("spark")
    os.environ["SPARK_LOCAL_DIRS"] = str(folder)
    interrupts = signal.getsignal(signal.SIGINT)
    running = session(
        "local[2,4]",
        {
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.streaming.stopTimeout": "120s",  # or a stream that does not stop is waited for without end
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
            # A server for Spark Connect is started in this JVM by the test that needs one, on a free port.
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": "0",
            **SETTINGS,
        },
        name="waypost tests",
    )
    # Spark handles interrupts for the whole process; other tests use them too.
    signal.signal(signal.SIGINT, interrupts)
    yield running
    running.stop()
