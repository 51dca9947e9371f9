"""Runs of the pipeline as messages of a queue: one for each instant, one at a time, retried, with their lag."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from pyspark.sql import SparkSession

from tests.spark.shop import Shop
from tests.waiting import until
from waypost import Waypost
from waypost.cli.commands.pipeline import STORE_VARIABLE
from waypost.cli.commands.pipeline_schedule import worker_command
from waypost.cli.main import main
from waypost.errors import ConfigurationError
from waypost.spark import terminal
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.scheduled import QUEUE, LagMonitor, find_schedule, handle_pipeline_runs, schedule_pipeline

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.promise("SPARK-9")]


def run(*arguments: str) -> int:
    return main(["pipeline", *arguments])


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


def test_the_schedule_of_a_lake_is_saved_listed_and_removed(
    orders: Shop, lake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    orders.post.publish("orders", 1)
    store = ["--store", orders.url, "--lake", lake]
    assert run("schedule", *store, "--show") == 1
    assert "no schedule in queue waypost-pipeline" in capsys.readouterr().out
    assert run("schedule", *store, "--cron", "*/5 * * * *", "--tz", "Europe/Madrid") == 0
    written = capsys.readouterr()
    assert "saved pipeline, next " in written.out
    assert f"run it with: waypost pipeline worker --lake {lake} --store {orders.url}\n" in written.out
    assert "no worker serves queue waypost-pipeline" in written.err
    saved = find_schedule(orders.post)
    assert saved is not None
    assert (saved.cron, saved.tz, saved.overlap, saved.missed) == ("*/5 * * * *", "Europe/Madrid", "skip", "once")
    policy = orders.post.policy(QUEUE)
    assert (policy.max_running, policy.journal) == (1, "failures")
    assert run("schedule", *store, "--show", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["schedule"]["key"] == "pipeline"
    assert listed["runs"]["done"] == 0
    assert run("schedule", *store, "--every", "60") == 0
    capsys.readouterr()
    assert run("schedule", *store, "--show") == 0
    assert "pipeline: every 60 s, next " in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="has the schedule of another lake"):
        schedule_pipeline(orders.post, f"{lake}2", every=60)
    assert [run("schedule", *store, "--remove") for _ in range(2)] == [0, 1]
    assert find_schedule(orders.post) is None
    logged = [action.action for action in orders.post.actions().actions]
    assert Counter(logged) == {"save_schedule": 2, "remove_schedule": 2}


def test_the_log_has_the_calls_that_save_the_schedule_and_the_command_has_its_queue(
    orders: Shop, lake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOP_URL", orders.url)
    assert run("schedule", "--store-env", "SHOP_URL", "--lake", lake, "--every", "60", "--queue", "runs") == 0
    written = capsys.readouterr().out
    assert f"run it with: waypost pipeline worker --lake {lake} --store-env SHOP_URL --queue runs\n" in written
    (action,) = orders.post.actions().actions
    assert action.python == (
        "post.configure('runs', max_running=1, journal='failures'); post.save_schedule('pipeline', key='pipeline', "
        f"queue='runs', overlap='skip', missed='once', body={{'lake': {lake!r}}}, every=60.0)"
    )
    secret = SimpleNamespace(
        lake=lake, store="valkey://:Hush-4711@127.0.0.1", store_env=None, master="local", namespace="wp", queue=QUEUE
    )
    monkeypatch.setenv(STORE_VARIABLE, "")
    assert worker_command(cast("Any", secret)) == (
        f"waypost pipeline worker --lake {lake} --store-env {STORE_VARIABLE} "
        f"(put the URL of the store into {STORE_VARIABLE})"
    )


def test_a_worker_loads_the_journal_for_each_message_and_reports_its_lag(
    orders: Shop, spark: SparkSession, lake: str, tmp_path: Path
) -> None:
    orders.post.publish_many("orders", range(5))
    schedule_pipeline(orders.post, lake, every=3600)
    metrics = tmp_path / "lake.prom"
    monitor = LagMonitor(lake, orders.place, path=str(metrics))
    handle_pipeline_runs(orders.post, lake, store=orders.url, session=lambda: spark, on_run=monitor.on_run)
    orders.post.trigger_schedule("pipeline", queue=QUEUE)
    assert orders.post.worker(scheduler=False).run(until_empty=True, signals=False).done == 1
    assert Lake(lake).state.offsets["orders"] == 5
    assert 'waypost_lake_lag_events{queue="orders"} 0' in metrics.read_text()
    # No run is made, and the lag grows nevertheless.
    orders.post.publish_many("orders", range(3))
    monitor.measure()
    assert 'waypost_lake_lag_events{queue="orders"} 3' in metrics.read_text()
    registry = CollectorRegistry()
    registry.register(monitor)
    assert b'waypost_lake_lag_events{queue="orders"} 3.0' in generate_latest(registry)
    # A quiet store stays quiet: a run leaves nothing for the next one to load.
    orders.post.trigger_schedule("pipeline", queue=QUEUE)
    assert orders.post.worker(scheduler=False).run(until_empty=True, signals=False).done == 1
    step = Lake(lake).step
    orders.post.trigger_schedule("pipeline", queue=QUEUE)
    assert orders.post.worker(scheduler=False).run(until_empty=True, signals=False).done == 1
    assert Lake(lake).step == step


def test_the_worker_command_runs_what_waits_and_serves_the_lag(
    orders: Shop, spark: SparkSession, lake: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(terminal, "start_quietly", lambda *given: spark)
    orders.post.publish_many("orders", range(5))
    schedule_pipeline(orders.post, lake, every=3600)
    orders.post.trigger_schedule("pipeline", queue=QUEUE)
    metrics = tmp_path / "lake.prom"
    options = ["--until-empty", "--no-scheduler", "--metrics-port", "0", "--metrics", str(metrics)]
    assert run("worker", "--store", orders.url, "--lake", lake, *options) == 0
    written = capsys.readouterr().err
    assert "run_pipeline: 1 at once on Spark" in written
    assert "metrics at http://127.0.0.1:" in written
    assert Lake(lake).state.offsets["orders"] == 5
    assert "waypost_lake_run_events 0" not in metrics.read_text()
    assert 'waypost_lake_lag_events{queue="orders"} 0' in metrics.read_text()


def test_a_run_for_another_lake_is_a_dead_letter_and_one_that_fails_is_retried(
    orders: Shop, spark: SparkSession, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.post.publish("orders", 1)
    failures = iter([True])
    load = Pipeline.run

    def fail_once(self: Pipeline, **options: Any) -> Any:
        if next(failures, False):
            raise OSError("the object store is away")
        return load(self, **options)

    monkeypatch.setattr(Pipeline, "run", fail_once)
    handle_pipeline_runs(orders.post, lake, store=orders.url, session=lambda: spark)
    orders.post.publish(QUEUE, {"lake": "/somewhere/else"})
    orders.post.publish(QUEUE, None)
    with orders.post.worker(scheduler=False):
        until(lambda: orders.post.ledger(QUEUE).delayed)
        (waiting,) = orders.post.timers(QUEUE)
        assert waiting.error == "the object store is away"
        orders.post.reschedule(QUEUE, waiting.id, delay=0)
        until(lambda: orders.post.ledger(QUEUE).done == 1)
    (letter,) = orders.post.dead_letters(QUEUE)
    assert (letter.reason, "this worker fills" in (letter.error or "")) == ("other_lake", True)
    assert Lake(lake).state.offsets["orders"] == 1


def test_two_workers_that_both_fire_the_schedule_run_the_pipeline_once_for_each_instant(
    orders: Shop, spark: SparkSession, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.post.publish_many("orders", range(20))
    schedule_pipeline(orders.post, lake, every=0.5)
    orders.post.configure(QUEUE, completed=True)
    lock, under_way, most, runs = threading.Lock(), 0, 0, 0
    load = Pipeline.run

    def counted(self: Pipeline, **options: Any) -> Any:
        nonlocal under_way, most, runs
        with lock:
            under_way, runs = under_way + 1, runs + 1
            most = max(most, under_way)
        try:
            return load(self, **options)
        finally:
            with lock:
                under_way -= 1

    monkeypatch.setattr(Pipeline, "run", counted)
    with Waypost(orders.url) as other:
        for post in (orders.post, other):
            handle_pipeline_runs(post, lake, store=orders.url, session=lambda: spark)
        with orders.post.worker(), other.worker():
            until(lambda: orders.post.ledger(QUEUE).done >= 4)
            orders.post.remove_schedule("pipeline", queue=QUEUE)
            until(lambda: orders.post.ledger(QUEUE).leased + orders.post.ledger(QUEUE).ready == 0)
    instants = Counter(message.instant for message in orders.post.messages(QUEUE, "done"))
    ledger = orders.post.ledger(QUEUE)
    assert max(instants.values()) == 1
    assert (most, runs) == (1, ledger.done)
    assert len(instants) == ledger.published == ledger.done >= 4
    assert Lake(lake).state.offsets["orders"] == 20
