"""`waypost pipeline`: its output, its exit codes, and the tables after it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.lakes import live, plant, rows, tables, totals
from tests.spark.shop import Shop
from waypost import Waypost
from waypost.cli.main import main
from waypost.spark import terminal
from waypost.spark.lake.compaction import remove_old_rows
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.tables import BRONZE_JOURNAL, FOLDER_TABLES, SILVER_MESSAGES
from waypost.testing.servers import ValkeyServer

pytestmark = pytest.mark.xdist_group("spark")
ROOT = Path(__file__).parents[2]
QUICK = ["--master", "local[1]", "--config", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"]


@pytest.fixture
def here(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process use the running session."""

    @contextmanager
    def running(*arguments: Any) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(terminal, "quiet_session", running)


def run(point: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.spark.killed_pipeline", point, "pipeline", *arguments, *QUICK]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, check=False)


@pytest.mark.promise("SPARK-4")
def test_tables_are_the_same_after_a_driver_is_killed_between_bronze_and_silver_or_in_compaction(
    orders: Shop, pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    lake = str(tmp_path / "a lake")
    live(orders, 30)
    killed = run("silver", "run", "--store", orders.url, "--lake", lake, "--batch-rows", "40")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    made = pipeline(orders)
    assert rows(made, BRONZE_JOURNAL)
    assert rows(made, SILVER_MESSAGES) == []
    live(orders, 20)
    made.run()
    whole = pipeline(orders, "whole")
    whole.run()
    wanted = tables(whole)
    assert tables(made) == wanted

    killed = run("compaction", "tidy", "--lake", lake)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    made = pipeline(orders)
    assert tables(made) == wanted
    made.tidy()
    assert tables(made) == wanted
    for table in FOLDER_TABLES:
        assert len(made.lake.state.folders(table)) == 1
        assert len(made.lake.files.folders(table.name)) <= 2


@pytest.mark.promise("SPARK-5")
def test_the_audit_command_prints_its_verdict_and_no_log_of_spark(orders: Shop, tmp_path: Path) -> None:
    live(orders, 20)
    done = run("nowhere", "audit", "--store", orders.url, "--lake", str(tmp_path / "a lake"))
    published = orders.post.ledger("orders").published
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"0 unaccounted of {published}"
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["bronze", "silver", "gold", "audit"]


@pytest.mark.usefixtures("here")
def test_commands_answer_with_lines_and_exit_codes(
    orders: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = str(tmp_path / "a lake")
    orders.post.configure("orders", journal="full")
    orders.post.publish_many("orders", [{"id": n} for n in range(3)])
    assert main(["pipeline", "run", "--lake", lake]) == 2
    assert "is new: give its store" in capsys.readouterr().err
    assert main(["pipeline", "run", "--store", "mysql://x", "--lake", lake]) == 2
    assert main(["pipeline", "run", "--store", orders.url, "--lake", lake]) == 0
    assert "4 events of 1 queues in the lake" in capsys.readouterr().out
    schema = ["--schema", "id BIGINT"]
    assert main(["pipeline", "ingest", "--store", orders.url, "--lake", lake, "--queue", "orders", *schema]) == 0
    assert capsys.readouterr().out == "3 messages of queue orders in the lake\n"
    assert main(["pipeline", "ingest", "--lake", lake, "--queue", "orders", "--schema", "id NUMBERS"]) == 2
    assert "is no schema" in capsys.readouterr().err
    plant(orders, "DELETE FROM wp_message WHERE id = ?", orders.stored("ready")[0].id)
    assert main(["pipeline", "audit", "--lake", lake, "--json"]) == 1
    assert '"unaccounted_count": 1' in capsys.readouterr().out


@pytest.mark.promise("SPARK-4", "SPARK-5", "FACE-2")
@pytest.mark.usefixtures("here")
def test_commands_answer_on_every_store(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake = str(tmp_path / "a lake")
    shop.post.publish_many("orders", [{"id": n} for n in range(5)])
    shop.work("orders", 3)
    place = ["--store", shop.url, "--namespace", shop.namespace, "--lake", lake]
    assert main(["pipeline", "run", *place, "--json"]) == 0
    assert '"queues":["orders"]' in capsys.readouterr().out
    assert main(["pipeline", "audit", *place]) == 0
    assert capsys.readouterr().out.endswith("0 unaccounted of 5\n")
    assert main(["pipeline", "report", "--lake", lake]) == 0
    assert Path(capsys.readouterr().out.strip()).read_text().startswith("<!doctype html>")


def test_rows_older_than_keep_days_are_removed_and_gold_stays(orders: Shop, pipeline: Callable[..., Pipeline]) -> None:
    orders.post.publish_many("orders", range(6))
    orders.work("orders", 3)
    plant(orders, "UPDATE wp_journal SET at_ms = at_ms - ?", 40 * 86_400_000)
    made = pipeline(orders)
    made.run()
    orders.post.publish_many("orders", range(2))
    made.run()
    before = totals(made)
    assert remove_old_rows(made.lake, 30, datetime.now(UTC).date()) == 3
    assert len(rows(made, BRONZE_JOURNAL)) == 2
    # Rows that may still change are kept, however old.
    assert {row["state"] for row in rows(made, SILVER_MESSAGES)} == {"ready"}
    assert totals(made) == before
    with pytest.raises(ValueError, match="at least 1"):
        remove_old_rows(made.lake, 0, datetime.now(UTC).date())


@pytest.mark.promise("SPARK-4", "SPARK-7", "SEE-6")
def test_the_password_of_a_store_is_not_in_its_lake_nor_in_the_report(tmp_path: Path) -> None:
    canary, output = "Canary7Secret", ""
    place = ["--lake", str(tmp_path / "a lake")]
    with ValkeyServer(requirepass=canary) as server:
        url = f"valkey://:{canary}@127.0.0.1:{server.port}"
        with Waypost(url) as post:
            post.configure("orders", journal="full")
            post.publish_many("orders", list(range(20)))
            post.handler("orders")(lambda body: None)
            post.worker().run(until_empty=True, signals=False)
        log = ["--log", str(tmp_path / "log")]
        for command in (
            ["run", "--store", url, *place, *log, *QUICK],
            ["ingest", "--store", url, "--queue", "orders", *place, *log, *QUICK],
            ["audit", "--store", url, *place, *log, *QUICK],
            ["report", *place, "--output", str(tmp_path / "report.html")],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "waypost.cli.main", "pipeline", *command], capture_output=True, text=True,
                cwd=ROOT, timeout=300, check=False,
            )  # fmt: skip
            output += done.stdout + done.stderr
            assert done.returncode == 0, done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {tmp_path / "report.html", tmp_path / "log"} <= set(written)
    assert len(written) > 10
    assert [path for path in written if canary.encode() in path.read_bytes()] == []
    assert canary not in output
