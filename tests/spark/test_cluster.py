"""Executors in separate processes, and drivers that are killed: the same code as on a laptop."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

import waypost.spark
from tests.spark.drivers import run_driver
from tests.spark.shop import Shop
from waypost.spark import Batch, read_output
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer
from waypost.testing.servers import ValkeyServer

pytestmark = pytest.mark.xdist_group("spark")


def drive(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    return run_driver("tests.spark.cluster_driver", *arguments)


def write_ids(rows: DataFrame, batch: Batch) -> None:
    batch.write(rows.select("id", "text"))


@pytest.mark.promise("SPARK-1", "SPARK-3", "SPARK-11")
def test_on_a_cluster_nothing_is_read_published_or_written_twice_although_drivers_are_killed(
    spark: SparkSession, valkey: ValkeyServer, postgres: PostgresServer, tmp_path: Path
) -> None:
    namespace, output = fresh_namespace(), tmp_path / "out"
    output.mkdir()
    migrate(postgres.socket_url, namespace=namespace)
    bodies: list[Any] = [{"n": n} for n in range(250)] + [{"é": "見た"}, "x" * (1 << 20)]
    with Shop(valkey.url, namespace) as shop, Shop(postgres.socket_url, namespace) as other:
        ids = [one.id for one in shop.post.publish_many("orders", bodies)]
        other.post.publish_many("orders", bodies)
        shop.post.configure("orders", lease=10)

        ended, lines = drive(
            "local-cluster[2,1,1024]", "written", str(output), namespace, valkey.url, postgres.socket_url
        )  # fmt: skip
        assert ended == -signal.SIGKILL, lines
        assert {"executors": 2} in lines
        for url in (valkey.url, postgres.socket_url):
            (found,) = [line for line in lines if line.get("url") == url]
            assert found["columns"] == ["number", "event"]
            configured = [[253, "configured"]] if url == valkey.url else []
            assert found["events"] == [[number, "published"] for number in range(1, 253)] + configured
            assert (found["longest"], found["has_unicode"]) == (1 << 20, True)
        assert {"failed": True} in lines
        ledger = shop.post.ledger("out")
        assert ledger.published == 60_000
        assert ledger.duplicates > 0
        assert lines[-1]["size"] > 0
        # It died before the commit: its rows are not in the output, and its messages are redelivered.
        assert DeltaTable(f"{output}/lake").file_uris() == []
        assert list(output.glob("lake/*.parquet"))

        ended, lines = drive("local[2]", "committed", str(output), namespace, valkey.url)
        assert ended == -signal.SIGKILL, lines
        assert lines[-1]["size"] > 0
        assert DeltaTable(f"{output}/lake").file_uris()
        assert shop.post.ledger("orders").done == 0

        while shop.post.ledger("orders").done < len(ids):
            waypost.spark.consume(
                spark, valkey.url, "orders", write_ids, output=f"{output}/lake", namespace=namespace, follow=True,
                timeout=2,
            )  # fmt: skip
        found_ids = sorted(row["id"] for row in read_output(spark, f"{output}/lake").select("id").collect())
        assert found_ids == sorted(ids)
        ledger = shop.post.ledger("orders")
        assert (ledger.done, ledger.leased, ledger.ready, ledger.unexplained) == (252, 0, 0, 0)
