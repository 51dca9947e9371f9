"""Spark jobs as messages: a session for a handler, and a job group that ends with the right to handle the message."""

from __future__ import annotations

import os
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.spark.drivers import ROOT, run_driver
from tests.waiting import until
from tests.worker.harness import Harness
from waypost import ByException, Constant, Message, NoRetry
from waypost.errors import StoreUnavailable
from waypost.testing.post import TestPost
from waypost.worker.renewer import Renewer

pytestmark = pytest.mark.xdist_group("spark")

LEASE = 1.0


@pytest.fixture(params=["sync", "async"])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with Harness(request.param, "memory://") as made:
        yield made


def running_jobs(spark: SparkSession, group: str) -> int:
    """Return how many jobs of a group run."""
    tracker = spark.sparkContext.statusTracker()
    found = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(group)]
    return sum(info is not None and info.status == "RUNNING" for info in found)


def group_of(spark: SparkSession) -> str | None:
    name: str | None = spark.sparkContext.getLocalProperty("spark.jobGroup.id")
    return name


class Endless:
    """A job that writes a file for each of its rows, without end: in one long Spark job, or in many short ones."""

    def __init__(self, folder: Path, *, is_long: bool) -> None:
        self.folder, self.is_long = folder, is_long
        self.groups: list[str] = []
        self.ended = threading.Event()

    def run(self, body: int, spark: SparkSession, message: Message[int]) -> None:
        folder = str(self.folder)

        def write(number: int) -> int:
            import time

            Path(folder, f"{number}-{time.monotonic_ns()}").touch()
            threading.Event().wait(0.05)
            return number

        self.groups.append(group_of(spark) or "")
        try:
            while True:
                rows = 100_000 if self.is_long else 1
                spark.sparkContext.parallelize(range(rows), 1).map(write).count()
        finally:
            self.ended.set()

    @property
    def written(self) -> int:
        return len(os.listdir(self.folder))


@pytest.fixture(params=["one long job", "many short jobs"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> Endless:
    folder = tmp_path / "written"
    folder.mkdir()
    return Endless(folder, is_long=request.param == "one long job")


def check_has_ended(endless: Endless, spark: SparkSession) -> None:
    """The function has ended, none of its jobs runs, and nothing more is written by the tasks that it had."""
    until(endless.ended.is_set)
    (group,) = endless.groups
    until(lambda: not running_jobs(spark, group))
    seen = [endless.written]

    def is_still() -> bool:
        # Three readings of the folder, a job of another group between them.
        spark.range(1000).count()
        seen.append(endless.written)
        return seen[-1] == seen[-2] == seen[max(0, len(seen) - 3)] and len(seen) >= 3

    until(is_still, "the end of the writing")


@pytest.mark.promise("SPARK-9")
def test_a_job_is_given_a_session_its_body_and_a_job_group(harness: Harness, spark: SparkSession) -> None:
    seen: list[Any] = []

    @harness.post.spark_job("sums", session=lambda: spark, result_ttl=60)  # type: ignore[untyped-decorator]
    def add(numbers: list[int], message: Message[list[int]], spark: SparkSession) -> int:
        seen.append((group_of(spark), threading.current_thread().name, message.id))
        return int(spark.createDataFrame([(one,) for one in numbers], "n INT").agg({"n": "sum"}).collect()[0][0])

    first, second = harness.publish("sums", [1, 2, 3]), harness.done(add.publish([40, 2]))
    assert harness.run().done == 2
    assert [harness.wait_result(one, timeout=5) for one in (first, second)] == [6, 42]
    assert [group for group, _, _ in seen] == [f"waypost-sums-{one.id}-1" for one in (first, second)]
    assert {name for _, name, _ in seen} == {"waypost-spark-1"}, "one thread, since one job runs at a time"


@pytest.mark.promise("SPARK-9")
def test_a_lost_lease_cancels_the_jobs_of_its_message(
    harness: Harness, spark: SparkSession, endless: Endless, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.configure("copies", lease=LEASE)
    healed, lost = threading.Event(), list[str]()

    def hang(self: Renewer, *given: Any) -> Any:
        healed.wait(60)
        raise StoreUnavailable("cut off")

    harness.post.spark_job("copies", session=lambda: spark, on_lease_lost=lambda one: lost.append(one.id))(endless.run)
    published = harness.publish("copies", 1)
    with harness.working() as worker:
        until(lambda: endless.written)
        worker.quiet()
        monkeypatch.setattr(Renewer, "_extend", hang)
        try:
            until(lambda: lost == [published.id])
            check_has_ended(endless, spark)
        finally:
            healed.set()
    with harness.receive("copies", wait=20) as again:
        assert (again.id, again.deliveries) == (published.id, 2)


@pytest.mark.promise("SPARK-9")
@pytest.mark.parametrize("harness", ["sync"], indirect=True)
@pytest.mark.parametrize("why", ["cancel", "timeout", "stop"])
def test_a_cancel_a_timeout_and_a_stop_cancel_the_jobs(
    harness: Harness, spark: SparkSession, endless: Endless, why: str
) -> None:
    options: dict[str, Any] = {"timeout": 1} if why == "timeout" else {}
    harness.configure("copies", lease=LEASE)
    harness.post.spark_job("copies", session=lambda: spark, retry=NoRetry(), **options)(endless.run)
    published = harness.publish("copies", 1)
    with harness.working(timeout=0) as worker:
        until(lambda: endless.written)
        if why == "stop":
            worker.request_stop(0)
        elif why == "cancel":
            assert harness.cancel("copies", id=published.id) == "requested"
        check_has_ended(endless, spark)
        wanted = {"cancel": "cancelled", "timeout": "dead", "stop": "ready"}[why]
        until(lambda: getattr(harness.ledger("copies"), wanted) == 1, f"one message {wanted}")
    if why == "timeout":
        (letter,) = harness.peek("copies", state="dead")
        assert (letter.reason, letter.error_type) == ("retries_exhausted", "TimeoutError")
    elif why == "stop":
        with harness.receive("copies", wait=20) as again:
            assert again.deliveries == 1, "given back without using a delivery"


@pytest.mark.promise("SPARK-9")
@pytest.mark.parametrize("harness", ["sync"], indirect=True)
def test_an_error_of_spark_is_kept_in_one_line_and_keeps_its_class(harness: Harness, spark: SparkSession) -> None:
    policy = ByException(((PySparkException, Py4JJavaError), NoRetry()), otherwise=Constant(pause=3600))

    @harness.post.spark_job("reports", session=lambda: spark, retry=policy)  # type: ignore[untyped-decorator]
    def fail(kind: str, spark: SparkSession) -> None:
        def refuse(number: int) -> str:
            raise ValueError(f"row {number} has no country")

        if kind == "table":
            spark.table("no_such_table")
        if kind == "rows":
            spark.sparkContext.parallelize([0], 1).map(refuse).collect()
        raise RuntimeError("the function's own error\nwith two lines")

    for kind in ("table", "rows", "own"):
        harness.publish("reports", kind)
    harness.run()
    letters = {one.body: one for one in harness.peek("reports", state="dead")}
    assert sorted(letters) == ["rows", "table"]
    assert letters["rows"].error == "ValueError: row 0 has no country"
    assert "no_such_table" in (letters["table"].error or "")
    assert all("\n" not in (one.error or "") for one in letters.values())
    (own,) = harness.peek("reports", state="delayed")
    assert own.error == "the function's own error\nwith two lines"


@pytest.mark.promise("SPARK-9")
def test_a_test_runs_a_job_without_a_worker(spark: SparkSession) -> None:
    with TestPost() as post:
        seen: list[Any] = []

        @post.spark_job("counts", session=lambda: spark)
        def count(rows: int, spark: SparkSession) -> None:
            seen.append((spark.range(rows).count(), (group_of(spark) or "").startswith("waypost-")))

        count.publish(7)
        post.run_all()
        assert seen == [(7, True)]


@pytest.mark.promise("SPARK-9")
def test_the_example_of_a_spark_job_writes_its_table(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "spark_job.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == ["2026-03-01: 2 countries", "Spain 50", "Italy 20", "1 done, 0 dead"]


@pytest.mark.promise("SPARK-9")
def test_a_worker_goes_on_after_its_java_has_died_and_imports_spark_late(tmp_path: Path) -> None:
    code, lines = run_driver("tests.spark.job_driver", f"sqlite:///{tmp_path}/jobs.db")
    assert (code, lines) == (0, [{"imported": False}, {"done": 2, "retried": 1, "error_lines": 1}])
