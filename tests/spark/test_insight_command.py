"""What needs no Spark of `simulate` and `advise`: which store they take, what they print, and what they record."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from waypost import Waypost
from waypost.cli.commands.insight import format_answer
from waypost.cli.commands.pipeline import estimate_events
from waypost.cli.main import main
from waypost.errors import WaypostError
from waypost.spark.insight.advice import Advice
from waypost.spark.insight.advise import apply_advice
from waypost.spark.insight.history import Delivery, build_history
from waypost.spark.insight.whatif import Fit, Scenario, answer, run_scenario
from waypost.spark.lake.pipeline import Pipeline

pytestmark = pytest.mark.promise("SPARK-6")


def make_lake(folder: Path, queues: tuple[str, ...] | None = None) -> tuple[str, Pipeline]:
    """Return the URL of a store, and a pipeline of its lake that has loaded nothing yet."""
    url = f"sqlite:///{folder}/orders.db"
    with Waypost(url) as post:
        for queue in ("orders", "other"):
            post.publish_many(queue, range(10))
    made = Pipeline(cast("Any", None), str(folder / "lake"), store=url, queues=queues, partitions=1)
    made.prepare()
    return url, made


@pytest.mark.parametrize("command", [["advise", "--apply"], ["simulate", "--queue", "orders", "--workers", "2"]])
@pytest.mark.parametrize("other", ["store", "namespace"])
def test_the_settings_of_another_store_are_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], other: str
) -> None:
    url, _ = make_lake(tmp_path)
    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"
    with Waypost(elsewhere) as post:
        post.publish("orders", 1)
    given = ["--store", elsewhere] if other == "store" else ["--store", url, "--namespace", "else"]
    assert main(["pipeline", *command, "--lake", str(tmp_path / "lake"), *given]) == 2
    error = capsys.readouterr().err
    assert f"was made from {url} (namespace wp), not from this store" in error
    assert "waypost pipeline run --moved" in error


def test_the_events_to_load_are_those_of_the_queues_of_the_lake_after_its_offsets(tmp_path: Path) -> None:
    _, made = make_lake(tmp_path, ("orders",))
    options = argparse.Namespace(
        lake=str(tmp_path / "lake"), store=None, store_env=None, namespace="wp", queue=None, master="local[1]"
    )
    assert estimate_events(options) == 10
    made.lake.commit("run", {}, structs.replace(made.lake.state, offsets={"orders": 4}))
    assert estimate_events(options) == 6
    options.queue = "orders,other"
    assert estimate_events(options) == 16


def test_a_backlog_that_outlasts_the_history_is_printed_as_longer_than_it() -> None:
    rows = [
        Delivery(f"m{number}", 1, "w", 5, None, None, 10 * number, 0, "done", 10 * number + 30, 30)
        for number in range(400)
    ]
    history = build_history("orders", rows, never_claimed_ms=[3_990] * 60)
    outcome = run_scenario(history, Scenario(workers=1, concurrency=2))
    text = format_answer(answer(history, {0: outcome}, Fit(1.0, 1.0, 400)))
    assert "> 4.0 s" in text
    assert "never" not in text


def test_an_error_between_two_schedules_keeps_the_record_and_the_undo_of_the_first() -> None:
    jitter = {"first": 30.0, "gone": 30.0, "last": 30.0}
    advice = Advice(
        "spike", "reports", "", "3 schedules fire at the same moment", {}, 100, "", "", 1.0, 0.5, jitter=jitter,
        jitter_before={"first": 2.0, "gone": 0.0, "last": 0.0},
    )  # fmt: skip
    records: list[Advice] = []
    with Waypost("memory://") as post:
        for key in ("first", "last"):
            post.save_schedule(key, queue="reports", key=key, cron="0 * * * *", jitter=2)
        with pytest.raises(WaypostError):
            apply_advice(post, advice, records.append)
        (record,) = records
        assert (record.jitter, record.jitter_before, record.id) == ({"first": 30.0}, {"first": 2.0}, advice.id)
        assert {one.key: one.jitter.total_seconds() for one in post.schedules("reports")} == {"first": 30, "last": 2}
        (logged,) = post.actions().actions
        assert logged.undo is not None
        assert logged.undo.text.endswith("waypost schedules save first --queue reports --key first --jitter 2")


@pytest.mark.parametrize("days", ["0", "-1", "nan", "inf"])
def test_a_number_of_days_that_is_no_time_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], days: str
) -> None:
    make_lake(tmp_path)
    assert main(["pipeline", "advise", "--lake", str(tmp_path / "lake"), f"--days={days}"]) == 2
    assert "--days must be a number of days more than 0, not" in capsys.readouterr().err
