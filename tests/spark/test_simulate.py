"""`waypost pipeline simulate`: the history of a lake under other settings, as tasks of Spark and by the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.virtual_worker import Handled, Planned, VirtualWorker
from waypost.cli.main import main
from waypost.errors import InvalidInput
from waypost.spark import terminal
from waypost.spark.insight.simulate import simulate
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.pipeline import Pipeline

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.promise("SPARK-10")]
#: Everything that was recorded: the clock of the histories is not today's.
ALL = ("--from", "2020-01-01")


def handle(planned: Planned, delivery: int) -> Handled:
    seconds, failures = planned.body
    if delivery <= failures:
        return seconds, {"outcome": "retry", "after_ms": 5_000, "error_type": "builtins.OSError"}
    return seconds, {}


@pytest.fixture(scope="module")
def served(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A lake with a queue whose messages wait for one of four slots, and with one that is hardly used."""
    folder = tmp_path_factory.mktemp("simulate")
    random, at, plan = Random(4), 0.0, []
    for _ in range(400):
        at += random.expovariate(1 / 0.45)
        plan.append(Planned(at, [round(random.expovariate(1 / 1.6), 3), random.random() < 0.1]))
    url = f"sqlite:///{folder}/orders.db"
    with VirtualWorker(url, slots=4) as worker:
        worker.post.configure("orders", lease=120)
        worker.run(plan, handle)
        worker.post.publish_many("orders", [[1, 0]] * 30)
        worker.post.publish("few", 1)
    Pipeline(spark, str(folder / "lake"), store=url).run()
    return str(folder / "lake")


@pytest.fixture
def here(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process use the running session."""

    @contextmanager
    def running(*arguments: Any) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(terminal, "quiet_session", running)


def test_scenarios_are_served_side_by_side_as_tasks_and_give_what_one_process_gives(
    spark: SparkSession, served: str
) -> None:
    given: dict[str, Any] = {"workers": [1, 2, 3], "concurrency": [4], "lease": [60, 120]}
    found = simulate(served, "orders", **given, spark=spark)
    assert found.fit.is_good, found.fit.text
    assert (found.workers, found.concurrency, found.backlog) == (1, 4, 30)
    assert [(one.workers, one.slots, one.scenario.policy["lease"]) for one in found.outcomes] == [
        (1, 4, 60), (1, 4, 120), (2, 8, 60), (2, 8, 120), (3, 12, 60), (3, 12, 120),
    ]  # fmt: skip
    assert found == simulate(Lake(served), "orders", **given)
    waits = [one.p95_ms for one in found.outcomes]
    assert waits[0] > 3 * waits[2]
    assert all(one.backlog_gone_ms is not None for one in found.outcomes[2:])


def test_the_command_compares_first_and_prints_a_table_and_a_chart(
    served: str, here: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chart = tmp_path / "waits.svg"
    arguments = ["pipeline", "simulate", "--lake", served, "--queue", "orders", *ALL, "--workers", "1,2"]
    assert main([*arguments, "--chart", str(chart)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("orders: model p95 ")
    assert ", observed " in output.splitlines()[0]
    assert "1 worker with 4 at once, 30 messages waiting now" in output
    assert "█" in output
    assert chart.read_text().count("<rect") == 3
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["workers"] for one in found["outcomes"]] == [1, 2]
    assert found["fit"]["observed_ms"] > 1_000


def test_the_command_finds_the_fewest_workers_for_a_target(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One scenario needs no Spark."""
    arguments = ["pipeline", "simulate", "--lake", served, "--queue", "orders", *ALL, "--concurrency", "4"]
    assert main([*arguments, "--target", "p95 wait < 1s"]) == 0
    assert "p95 wait < 1s: 2 workers at least" in capsys.readouterr().out


def test_a_history_that_is_too_small_gets_no_numbers_and_an_exit_code(
    served: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["pipeline", "simulate", "--lake", served, "--queue", "few", *ALL, "--workers", "2"]
    assert main(arguments) == 1
    output = capsys.readouterr().out
    assert "only 0 claims were recorded, and 200 are needed" in output
    assert "no outcomes" in output


def test_arguments_that_make_no_sense_are_refused_before_spark_starts(
    served: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*more: str) -> str:
        assert main(["pipeline", "simulate", "--lake", served, "--queue", "orders", *more]) == 2
        return capsys.readouterr().err

    assert "traffic is a factor" in fails("--traffic", "twice")
    assert "--days must be a number of days more than 0" in fails("--days", "0")
    assert "must be before --to" in fails("--from", "2026-02-01", "--to", "2026-01-01")
    with pytest.raises(InvalidInput, match="has no queue nowhere; it has few, orders"):
        simulate(served, "nowhere")
