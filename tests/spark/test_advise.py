"""`waypost pipeline advise`: histories with planted problems, their advice, its application, and a second run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pytest
from pyspark.sql import SparkSession

from tests.spark.test_advice_rules import NAMES
from tests.spark.virtual_worker import Handled, Planned, VirtualWorker
from waypost import Waypost
from waypost.cli.main import main
from waypost.errors import InvalidInput
from waypost.spark import terminal
from waypost.spark.insight.advice import TEXT, TEXT_OF_VALUE, Bodies, Facts, FieldValue, sql_text
from waypost.spark.insight.advise import ADVICE, Advised, advise, open_records
from waypost.spark.insight.rules import poison
from waypost.spark.lake.ingest import Ingest
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.tables import BRONZE_JOURNAL, GOLD_MINUTES, SILVER_DELIVERIES, SILVER_MESSAGES
from waypost.spark.lake.views import view_name
from waypost.testing.bench import fresh_namespace
from waypost.testing.clock import ManualClock
from waypost.testing.servers import ValkeyServer

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.promise("SPARK-6")]
ALL = ("--from", "2020-01-01")
#: A time before any real one, so that changes by a command are newer than the histories.
BEGIN_MS = 1_700_000_000_000
SCHEDULES = 20


class Planting:
    """Queues of one store, each with one problem, and one that is well."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url, self.namespace = url, fresh_namespace()
        self.lake = str(folder / "lake")
        self.clock = ManualClock(BEGIN_MS)
        self.random = Random(2)

    def work(self, queue: str, plan: list[Planned], handler: Any, *, slots: int) -> None:
        with VirtualWorker(self.url, queue, slots=slots, clock=self.clock, namespace=self.namespace) as worker:
            worker.run(plan, handler)

    def open(self) -> Waypost:
        return Waypost(self.url, namespace=self.namespace, clock=self.clock)

    def configure(self) -> None:
        with self.open() as post:
            post.configure("slow", lease=10)
            post.configure("country", journal="full")
            for number in range(SCHEDULES):
                post.save_schedule(f"s{number}", queue="reports", key=f"s{number}", cron="0 * * * *")

    def live(self) -> None:
        """An afternoon of all queues. The programs stay as they are: only what is in the store can change."""
        self.slow()
        self.useless()
        self.country()
        self.groups()
        self.reports()
        self.well()

    def slow(self) -> None:
        """One message in eight runs for 12 seconds, with a lease of 10."""

        def handle(planned: Planned, delivery: int) -> Handled:
            return (12.0 if planned.body and delivery == 1 else 1.0 + 8.5 * self.random.random()), {}

        plan = [Planned(2.0 * number, number % 8 == 0) for number in range(160)]
        self.work("slow", plan, handle, slots=12)

    def useless(self) -> None:
        """One message in eight fails with the same error at every attempt, on four days."""

        def handle(planned: Planned, delivery: int) -> Handled:
            if not planned.body:
                return 0.1, {}
            failure = {"error_type": "builtins.ValueError"}
            if delivery < 10:
                return 0.1, {"outcome": "retry", "after_ms": 500 + int(3_000 * self.random.random()), **failure}
            return 0.1, {"outcome": "dead", "reason": "retries_exhausted", **failure}

        self.work("useless", [Planned(2_700.0 * number, number % 8 == 0) for number in range(96)], handle, slots=4)

    def country(self) -> None:
        """Messages of one country are refused. Each country is a group."""

        def handle(planned: Planned, delivery: int) -> Handled:
            return 0.1, {"outcome": "dead", "reason": "rejected"} if planned.body["country"] == "XX" else {}

        countries = ["ES", "DE", "XX", "FR", "PT", "IT"]
        plan = [
            Planned(
                0.5 * number, {"id": number, "country": countries[number % 6], "plan": "free"},
                {"group": countries[number % 6]},
            )
            for number in range(180)
        ]  # fmt: skip
        self.work("country", plan, handle, slots=4)

    def groups(self) -> None:
        """One group publishes hundreds at once, and the others wait behind it."""
        small = [Planned(1.5 * number, None, {"group": f"g{number % 4}"}) for number in range(140)]
        flood = [Planned(100.0, None, {"group": "big"}) for _ in range(300)]
        self.work("groups", [*small, *flood], lambda planned, delivery: (0.2, {}), slots=1)

    def reports(self) -> None:
        """Twenty schedules fire at the same moment, spread over the jitter that they have."""
        with self.open() as post:
            jitter = {one.key: one.jitter.total_seconds() for one in post.schedules("reports")}
        plan = [
            Planned(3_600.0 * turn + jitter[f"s{number}"] * number / SCHEDULES, schedule=f"s{number}")
            for turn in range(4)
            for number in range(SCHEDULES)
        ]
        self.work("reports", plan, lambda planned, delivery: (2.0, {}), slots=1)

    def well(self) -> None:
        def handle(planned: Planned, delivery: int) -> Handled:
            if planned.body and delivery == 1:
                return 0.2, {"outcome": "retry", "after_ms": 1_000, "error_type": "builtins.OSError"}
            return 0.2, {}

        plan = [Planned(0.5 * number, number % 9 == 0, {"group": f"g{number % 3}"}) for number in range(220)]
        self.work("well", plan, handle, slots=3)

    def load(self, spark: SparkSession) -> None:
        Pipeline(spark, self.lake, store=self.url, namespace=self.namespace).run()
        self.ingest(spark).run()

    def ingest(self, spark: SparkSession) -> Ingest:
        return Ingest(spark, self.lake, "country", store=self.url, namespace=self.namespace)

    def advise(self, spark: SparkSession, **options: Any) -> Advised:
        with self.open() as post:
            return advise(self.lake, post, spark=spark, **options)


@pytest.fixture
def planted(spark: SparkSession, tmp_path: Path, valkey: ValkeyServer) -> Planting:
    planting = Planting(tmp_path, valkey.url)
    planting.configure()
    planting.live()
    planting.load(spark)
    return planting


@pytest.fixture
def here(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process use the running session."""

    @contextmanager
    def running(*arguments: Any) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(terminal, "quiet_session", running)


PLANTED = {
    "lease:slow:", "retries:useless:builtins.ValueError", 'poison:country:country="XX"', "groups:groups:big",
    "spike:reports:",
}  # fmt: skip


def test_planted_problems_are_named_proven_cured_by_their_advice_and_judged(
    planted: Planting, spark: SparkSession, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One story, in this order: what is applied changes the store."""
    names_each_problem(planted, capsys)
    evidence_can_be_run_as_it_is(planted, spark)
    begin = apply_and_live_on(planted, spark)
    second = planted.advise(spark, since_ms=begin)
    assert second.advice == ()
    assert {one.id: one.verdict for one in second.judged} == dict.fromkeys(PLANTED, "came true")
    assert planted.advise(spark, since_ms=begin).judged == ()
    records = open_records(Lake(planted.lake)).arrow(ADVICE).to_pylist()
    assert sorted(row["record"] for row in records) == ["advised"] * 5 + ["applied"] * 5 + ["judged"] * 5
    # What was before the changes gives no advice again.
    assert {one.kind for one in planted.advise(spark).advice} <= {"spike"}


def names_each_problem(planted: Planting, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "advise", "--lake", planted.lake, *ALL, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {one["id"] for one in found["advice"]} == PLANTED
    assert set(found["queues"]) == {"slow", "useless", "country", "groups", "reports", "well"}
    by_kind = {one["kind"]: one for one in found["advice"]}
    assert by_kind["lease"]["call"] == "post.configure('slow', lease=20)"
    assert by_kind["lease"]["undo"] == "post.configure('slow', lease=10.0)"
    assert by_kind["retries"]["settings"] == {"max_deliveries": 2}
    assert by_kind["poison"]["figures"]["dead"] == 30
    assert by_kind["poison"]["call"].splitlines() == [
        "post.configure('country', fair=True)", "post.pause_group('country', 'XX')",
    ]  # fmt: skip
    assert by_kind["poison"]["undo"].splitlines() == [
        "post.resume_group('country', 'XX')", "post.configure('country', fair=False)",
    ]  # fmt: skip
    assert by_kind["groups"]["call"] == "post.configure('groups', fair=True)"
    assert by_kind["groups"]["undo"] == "post.configure('groups', fair=False)"
    assert len(by_kind["spike"]["jitter"]) == SCHEDULES
    assert all(one["figures"] and one["sample"] >= 10 for one in found["advice"])
    assert main(["pipeline", "advise", "--lake", planted.lake, *ALL, "--queue", "well"]) == 0
    assert capsys.readouterr().out == "0 pieces of advice for 1 queue\n"
    assert main(["pipeline", "advise", "--lake", planted.lake, *ALL, "--queue", "slow"]) == 1
    output = capsys.readouterr().out
    assert "slow: 20 leases ended before their handlers" in output
    assert "do        post.configure('slow', lease=20)" in output


def evidence_can_be_run_as_it_is(planted: Planting, spark: SparkSession) -> None:
    lake, connection = Lake(planted.lake), duckdb.connect()
    for table in (BRONZE_JOURNAL, SILVER_DELIVERIES, SILVER_MESSAGES, GOLD_MINUTES):
        lake.frame(spark, table).createOrReplaceTempView(view_name(table.name))
        connection.register(view_name(table.name), lake.arrow(table))
    planted.ingest(spark).rows().createOrReplaceTempView("messages_country")
    found = {one.kind: one for one in planted.advise(spark).advice}
    rows = {kind: spark.sql(one.evidence).collect() for kind, one in found.items()}
    assert rows["lease"][0][0] == found["lease"].figures["expired_then_done"]
    assert [tuple(row) for row in rows["retries"]] == [("builtins.ValueError", 108, 0)]
    assert tuple(rows["poison"][0]) == ("XX", 30, 30)
    assert rows["groups"][0][:2] == ("big", 300)
    assert [row[1] for row in rows["spike"]] == [SCHEDULES] * 4
    for kind, one in found.items():
        if kind != "poison":  # by functions of Spark
            assert len(connection.sql(one.evidence).fetchall()) == len(rows[kind])
    connection.close()


def test_evidence_about_a_field_of_any_name_can_be_run_by_spark(spark: SparkSession) -> None:
    literals = ", ".join(f"{sql_text(name)} AS c{number}" for number, name in enumerate(NAMES))
    assert list(spark.sql(f"SELECT {literals}").collect()[0]) == NAMES
    spark.createDataFrame(
        [("m1", "orders", "dead")], "message_id STRING, queue STRING, event STRING"
    ).createOrReplaceTempView("bronze_journal")
    name = 'it\'s \\ "odd"'
    rows = [("m1", json.dumps({name: 5}), (5,)), ("m2", json.dumps({name: 6}), (6,))]
    frame = spark.createDataFrame(rows, f"id STRING, text STRING, value STRUCT<`{name}`: BIGINT>")
    frame.createOrReplaceTempView("messages_orders")
    for text in (TEXT, TEXT_OF_VALUE):
        bodies = Bodies(1_000, 45, (FieldValue(name, "5", 40, 40),), text)
        (found,) = poison.find(Facts("orders", bodies=bodies))
        assert [tuple(row) for row in spark.sql(found.evidence).collect()] == [("5", 1, 1), ("6", 1, 0)]


def apply_and_live_on(planted: Planting, spark: SparkSession) -> int:
    """Apply the advice, and live through another afternoon a day later; return when it began."""
    applied = planted.advise(spark, apply=True)
    assert set(applied.applied) == PLANTED
    with planted.open() as post:
        assert post.policy("slow").lease == timedelta(seconds=20)
        assert post.policy("useless").max_deliveries == 2
        assert {one.jitter.total_seconds() for one in post.schedules("reports")} != {0.0}
        (change,) = post.stats("slow", minutes=1_440).changes[-1:]
        assert change.text == "lease_ms=20000"
        actions = [one for one in post.actions().actions if one.via == "advice"]
        assert {one.action for one in actions} == {"configure", "save_schedule", "pause_group"}
        undone = next(one for one in actions if one.queue == "slow").undo
        assert undone is not None
        assert undone.options == {"lease": 10.0}
    begin = planted.clock.advance(86_400)
    planted.live()
    planted.load(spark)
    with planted.open() as post:
        (poison_group,) = post.groups("country", group="XX").groups
        assert (poison_group.paused, poison_group.ready) == (True, 30)
    return begin


def test_queues_and_targets_that_do_not_exist_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake = str(tmp_path / "lake")
    with Waypost("memory://") as post, pytest.raises(InvalidInput, match="has no queue nowhere"):
        advise(lake, post, queues=["nowhere"])
    assert main(["pipeline", "advise", "--lake", lake, "--target", "soon"]) == 2
    assert "a target is as in" in capsys.readouterr().err
