"""What a run reports, its metrics, and the views of a lake. None of it needs Spark."""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import duckdb
import pytest
from deltalake import DeltaTable
from msgspec import structs

from tests.spark.shop import Shop
from waypost.cli.commands import pipeline as pipeline_command
from waypost.cli.commands.pipeline import MetricsFile, _print_end
from waypost.cli.main import main
from waypost.errors import InvalidInput, StoreError
from waypost.spark import terminal
from waypost.spark.lake import scheduled
from waypost.spark.lake.freshness import QueueLag, RunReport, format_metrics, measure_lag, report_run, write_metrics
from waypost.spark.lake.lake import Lake, Seen, Source, State
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.scheduled import LagMonitor
from waypost.spark.lake.views import create_views, view_name


@pytest.mark.promise("SPARK-4")
def test_the_lag_of_a_lake_is_what_the_journal_has_and_the_lake_has_not(orders: Shop) -> None:
    orders.post.publish_many("orders", range(5))
    orders.post.publish_many("mails", range(2))
    orders.post.publish_many("new", range(4))
    state = State(offsets={"orders": 2, "mails": 2, "gone": 9}, seen={"orders": Seen(events=1, newest=2)})
    with orders.bulk() as bulk:
        found = measure_lag(bulk, state)
        chosen = measure_lag(bulk, structs.replace(state, source=Source(orders.url, queues=("orders", "mails"))))
    assert sorted(found) == ["gone", "mails", "new", "orders"]
    assert found["mails"] == QueueLag(2, 2, 0, 0.0, 0)
    lag = found["orders"]
    assert (lag.offset, lag.newest, lag.lag_events, lag.not_seen) == (2, 5, 3, 1)
    assert lag.lag_seconds >= 0
    # The lake has nothing of it yet.
    assert (found["new"].offset, found["new"].lag_events) == (0, 4)
    assert sorted(chosen) == ["mails", "orders"]


def test_the_lag_of_a_lake_that_cannot_be_read_grows_from_what_was_known(
    orders: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, metrics = str(tmp_path / "lake"), tmp_path / "lake.prom"
    lake = Lake(path)
    lake.create()
    lake.commit("run", {}, structs.replace(lake.state, offsets={"orders": 2}))
    orders.post.publish_many("orders", range(5))
    monitor = LagMonitor(path, orders.place, path=str(metrics))

    def fail(place: str) -> None:
        raise RuntimeError("of a library")

    with monkeypatch.context() as patch:
        patch.setattr(scheduled, "Lake", fail)
        monitor.measure()
        assert not metrics.exists(), "nothing is known of it"
    monitor.measure()
    assert 'waypost_lake_lag_events{queue="orders"} 3' in metrics.read_text()
    monkeypatch.setattr(scheduled, "Lake", fail)
    orders.post.publish_many("orders", range(4))
    monitor.measure()
    assert 'waypost_lake_lag_events{queue="orders"} 7' in metrics.read_text()
    assert "the lake cannot be read: of a library" in caplog.text


def test_metrics_of_a_run_are_a_file_that_prometheus_reads(tmp_path: Path) -> None:
    report = RunReport("lake", 1500, 7, {"total": 2.5}, 40, {}, {"orders": QueueLag(40, 43, 3, 1.5, 2)})
    text = format_metrics(report)
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples == {
        "waypost_lake_run_timestamp_seconds": "1.5",
        "waypost_lake_run_seconds": "2.5",
        "waypost_lake_run_events": "40",
        'waypost_lake_offset{queue="orders"}': "40",
        'waypost_lake_lag_events{queue="orders"}': "3",
        'waypost_lake_lag_seconds{queue="orders"}': "1.5",
        'waypost_lake_not_seen_events{queue="orders"}': "2",
    }
    for _ in range(2):
        write_metrics(report, str(tmp_path / "lake.prom"))
    assert [path.name for path in tmp_path.iterdir()] == ["lake.prom"]
    assert (tmp_path / "lake.prom").read_text() == text


@pytest.mark.promise("SPARK-4")
def test_views_of_a_lake_are_statements_that_an_engine_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path / "it's a lake")
    lake = Lake(root)
    lake.create()
    assert main(["pipeline", "views", "--lake", root, "--dialect", "duckdb", "--catalog", "waypost"]) == 0
    statements = capsys.readouterr().out.splitlines()
    assert len(statements) == len(lake.table_names()) > 5
    with duckdb.connect() as connection:
        # The function is of an extension that is fetched from the network; what it is given is what counts here.
        connection.execute("CREATE SCHEMA waypost")
        connection.execute("CREATE MACRO delta_scan(path) AS TABLE SELECT path AS path")
        for statement in statements:
            connection.execute(statement)
        for name in lake.table_names():
            found = connection.execute(f"SELECT path FROM waypost.{view_name(name)}").fetchall()
            assert DeltaTable(found[0][0].removeprefix("file://")).version() >= 0


def test_a_view_has_a_plain_name_and_its_folder_is_quoted() -> None:
    assert create_views([("messages/mails:eu", "file:///a`b")], "main.lake", "spark") == [
        "CREATE OR REPLACE VIEW main.lake.messages_mails_eu AS SELECT * FROM delta.`file:///a``b`;"
    ]
    with pytest.raises(InvalidInput, match="--catalog is a schema"):
        create_views([], "a; DROP TABLE b", "spark")


def test_a_run_reports_what_it_added_and_how_long_it_took(
    orders: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders.post.publish("orders", "one")
    lake = Lake(str(tmp_path / "lake"))
    made = cast("Pipeline", SimpleNamespace(lake=lake, place=orders.place))
    before = made.lake.count_rows()
    assert before == {}
    lake.create()
    report = report_run(made, before, {"total": 1.23456})
    assert (report.events_added, report.seconds, report.step) == (0, {"total": 1.235}, lake.step)
    assert set(report.rows_added) == set(lake.table_names())
    _print_end(made, argparse.Namespace(json=True, metrics=str(tmp_path / "lake.prom")), report)
    printed = json.loads(capsys.readouterr().out)
    assert {queue: lag["lag_events"] for queue, lag in printed["offsets"].items()} == {"orders": 1}
    assert printed["lake"] == lake.files.root
    assert (tmp_path / "lake.prom").exists()


def test_a_run_that_follows_writes_its_metrics_in_each_turn(
    orders: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Pipeline(cast("Any", None), str(tmp_path / "lake"), store=orders.url, partitions=1)
    stop, turns = threading.Event(), []
    for path in (tmp_path / "lake.prom", tmp_path / "missing" / "lake.prom"):
        write = MetricsFile(made, str(path), 0.5)

        def count(path: Path = path, write: MetricsFile = write) -> None:
            path.unlink(missing_ok=True)
            write()
            turns.append(path.exists())
            if len(turns) % 2 == 0:
                stop.set()

        made.follow(0.001, stop, count)
        stop.clear()
    assert turns == [True, True, False, False]
    assert "the metrics cannot be written to" in capsys.readouterr().err


@pytest.mark.promise("SPARK-4")
def test_a_run_that_finds_nothing_new_does_not_start_spark(
    orders: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lake, place = str(tmp_path / "lake"), ["--store", orders.url, "--lake", str(tmp_path / "lake")]
    started: list[str] = []

    def start(*arguments: Any) -> None:
        started.append(arguments[0])
        raise StoreError("Spark was started")

    monkeypatch.setattr(terminal, "quiet_session", start)
    for _ in range(2):
        assert main(["pipeline", "run", *place, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["events_added"], found["offsets"]) == (0, {})
    assert started == []
    # An event that comes after the journal was counted: nothing of it is committed without Spark.
    orders.post.publish("orders", 1)
    monkeypatch.setattr(pipeline_command, "estimate_events", lambda options: 0)
    assert main(["pipeline", "run", *place]) == 4
    assert "Spark was started" in capsys.readouterr().err
    assert (len(started), Lake(lake).state.offsets) == (1, {})
    assert not list((tmp_path / "lake").rglob("bronze/journal/*.parquet"))


@pytest.mark.promise("SPARK-4")
@pytest.mark.parametrize("given", ["--every=nan", "--every=-1", "--every=inf"])
def test_a_run_that_would_never_pause_or_for_ever_is_refused_before_spark_starts(
    orders: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    orders.post.publish("orders", 1)
    monkeypatch.setattr(terminal, "quiet_session", lambda *arguments: pytest.fail("Spark was started"))
    assert main(["pipeline", "run", "--store", orders.url, "--lake", str(tmp_path / "lake"), "--follow", given]) == 2


@pytest.mark.parametrize(
    "given",
    [
        ["run", "--batch-rows=-5"],
        ["ingest", "--queue=orders", "--batch-rows=0"],
        ["worker", "--batch-rows=-1"],
        ["tidy", "--keep-days=9999999"],
    ],
)
def test_numbers_with_which_nothing_could_be_done_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", *given, "--lake", str(tmp_path / "lake")])
    assert ended.value.code == 2
    assert "a whole number from 1 to" in capsys.readouterr().err


def test_a_pipeline_needs_batches_with_rows(orders: Shop, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="batch_rows must be a whole number from 1"):
        Pipeline(cast("Any", None), str(tmp_path / "lake"), store=orders.url, partitions=1, batch_rows=-5)


def test_the_token_of_a_spark_connect_server_is_in_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "valkey://:secret@127.0.0.1:1"
    master = ["--master", "sc://spark:15002/;token=hush"]
    assert main(["pipeline", "run", "--store", url, "--lake", str(tmp_path / "lake"), *master]) == 2
    error = capsys.readouterr().err
    assert "executors of sc://spark:15002" in error
    assert "hush" not in error
    assert "secret" not in error


@pytest.mark.promise("SPARK-4")
def test_a_registered_pipeline_does_not_create_a_removed_queue_again(orders: Shop, tmp_path: Path) -> None:
    orders.post.publish("orders", 1)
    lake = str(tmp_path / "lake")
    made = Pipeline(cast("Any", None), lake, store=orders.url, queues=("orders", "new"), partitions=1, reader="lake")
    made.prepare()
    orders.post.purge("orders")
    read = {"orders": len(orders.events())}
    made.lake.commit("run", {}, structs.replace(made.lake.state, offsets=read))
    assert orders.post.remove_queue("orders")
    made.run()
    with orders.bulk() as bulk:
        assert bulk.run(bulk.store.queues()) == ["new"]


@pytest.mark.promise("SPARK-5")
def test_a_list_without_a_queue_means_all_queues(orders: Shop, tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    assert main(["pipeline", "run", "--store", orders.url, "--lake", lake, "--queue", ","]) == 0
    source = Lake(lake).state.source
    assert source is not None
    assert source.queues is None
