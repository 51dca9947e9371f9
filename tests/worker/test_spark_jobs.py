"""Spark jobs as they are declared: what is refused, before Spark is there at all."""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from waypost import AsyncWaypost, Message, Waypost
from waypost.errors import ConfigurationError, MissingExtra, UnknownOption
from waypost.spark.jobs import JobStopped, Run, SharedSession, SparkJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.promise("SPARK-9")


@pytest.fixture(params=[Waypost, AsyncWaypost], ids=["sync", "async"])
def post(request: pytest.FixtureRequest) -> Any:
    return request.param("memory://")


def count(body: int, spark: SparkSession) -> None: ...


def test_a_job_is_a_handler_that_can_be_stopped_one_at_a_time(post: Any) -> None:
    post.spark_job("jobs", timeout=60)(count)
    (handler,) = post.handlers
    assert (handler.name, handler.concurrency, handler.can_be_stopped) == ("count", 1, True)
    assert (handler.where, handler.parameter_kinds, handler.as_type) == ("on Spark", ("body",), int)


@pytest.mark.promise("QUEUE-9")
def test_a_job_may_serve_several_queues_and_choose_messages_by_their_type(post: Any) -> None:
    def add(body: int, spark: SparkSession) -> None: ...

    def other(body: int, spark: SparkSession) -> None: ...

    assert post.spark_job({"urgent": 3, "jobs": 1}, types="Sum")(add) is add
    assert not hasattr(add, "publish")
    post.spark_job(["jobs"], types=["Rest"])(other)
    urgent, jobs, rest = post.handlers
    assert [(one.queue, one.weight, one.types) for one in (urgent, jobs, rest)] == [
        ("urgent", 3, {"Sum"}), ("jobs", 1, {"Sum"}), ("jobs", 1, {"Rest"}),
    ]  # fmt: skip
    assert urgent.pool is jobs.pool is not None
    assert urgent.function is jobs.function
    post.spark_job("jobs")(add)
    with pytest.raises(ConfigurationError, match="give types="):
        post.spark_job("jobs")(other)
    with pytest.raises(ConfigurationError, match="listed twice"):
        post.spark_job(["jobs", "jobs"])


def test_the_session_is_found_by_name_or_annotation_without_importing_spark(post: Any) -> None:
    found: list[Any] = []

    def by_name(spark: Any, body: int, message: Message[int]) -> None:
        found.append((spark, body))

    def by_annotation(body: int, session: SparkSession, more: int = 3) -> None:
        found.append((session, body, more))

    def by_keyword(body: int, more: int = 3, *, spark: Any) -> None:
        found.append((spark, body, more))

    for number, function in enumerate((by_name, by_annotation, by_keyword)):
        post.spark_job(f"jobs{number}")(function)
    kinds = [handler.parameter_kinds for handler in post.handlers]
    assert kinds == [("body", "message"), ("body",), ("body",)]
    session: Any = object()
    for handler, arguments in zip(post.handlers, [(1, None), (2,), (3,)], strict=True):
        job: SparkJob = handler.function
        job._call(arguments, session)
    assert found == [(session, 1), (session, 2, 3), (session, 3, 3)]


def test_what_cannot_be_a_job_is_refused_with_the_reason(post: Any) -> None:
    async def waits(body: int, spark: Any) -> None: ...

    def without(body: int) -> None: ...

    def settles(body: int, spark: Any, session: sqlite3.Connection) -> None: ...

    for function, text in (
        (waits, "is async, and calls of Spark block"),
        (without, "has no parameter for the session: name one spark"),
        (settles, "runs on Spark, so it cannot be given a session"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            post.spark_job("jobs")(function)
    with pytest.raises(ConfigurationError, match="spark_job"):
        post.spark_job(count)
    with pytest.raises(UnknownOption, match="process"):
        post.spark_job("jobs", process=True)
    assert post.handlers == []


def test_the_jobs_of_a_client_agree_on_their_session(post: Any) -> None:
    post.spark_job("plain")(count)
    post.spark_job("given", master="local[2]", config={"spark.driver.memory": "2g"})(count)
    post.spark_job("same", master="local[2]")(count)
    for options, text in (
        ({"master": "sc://127.0.0.1"}, "share one session, and another job has master='local\\[2\\]'"),
        ({"config": {"spark.driver.memory": "4g"}}, "another config, which differs in spark.driver.memory"),
        ({"session": lambda: None}, "another has master= or config="),
        ({"session": lambda: None, "master": "local"}, "session= makes the session"),
        ({"master": 7}, "master is the URL of a Spark master"),
        ({"config": {"spark.cores": 2}}, "config has settings of Spark, as text"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            post.spark_job("other", **options)(count)
    assert [handler.queue for handler in post.handlers] == ["plain", "given", "same"]


def test_errors_about_the_session_name_no_secret(post: Any) -> None:
    secret = "Hush-4711"
    url = f"sc://127.0.0.1:15002/;token={secret}"
    config = {"spark.hadoop.fs.s3a.secret.key": secret, "spark.cores.max": "2"}
    post.spark_job("given", master=url, config=config)(count)
    for options, text in (
        ({"master": "sc://other"}, "master='sc://127.0.0.1:15002/…', not 'sc://other'"),
        ({"master": url + "2"}, "master='sc://127.0.0.1:15002/…' with other parameters"),
        ({"config": config | {"spark.cores.max": "3"}}, "another config, which differs in spark.cores.max:"),
        ({"config": {}}, "another config, which differs in spark.cores.max, spark.hadoop.fs.s3a.secret.key:"),
        ({"config": config | {"spark.cores.max": 3}}, "not a int for 'spark.cores.max'"),
        ({"config": secret}, "not a str"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(text)) as raised:
            post.spark_job("other", **options)(count)
        assert secret not in str(raised.value)


class RemoteSession:
    """What a session of Spark Connect has in this process, without its server."""

    def __init__(self, number: int) -> None:
        self.session_id = f"4f2c-{number}"
        self.tags: set[str] = set()
        self.addTag, self.removeTag = self.tags.add, self.tags.discard
        self.is_stopped = False

    def stop(self) -> None:
        self.is_stopped = True


def open_remote() -> tuple[SharedSession, list[RemoteSession]]:
    made: list[RemoteSession] = []

    def make() -> Any:
        made.append(RemoteSession(len(made)))
        return made[-1]

    opened = SharedSession()
    opened.choose("count", None, None, make)
    return opened, made


@pytest.mark.parametrize("condition", ["SESSION_CLOSED", "SESSION_NOT_FOUND"])
def test_a_session_that_its_server_has_closed_is_replaced(condition: str) -> None:
    opened, made = open_remote()

    def fail(spark: Any) -> None:
        try:
            raise RuntimeError(f"[INVALID_HANDLE.{condition}] The handle {spark.session_id} is invalid.")
        except RuntimeError as error:
            raise ValueError("the day was not summed up") from error

    def fail_otherwise(spark: Any) -> None:
        raise RuntimeError(f"[INVALID_HANDLE.{condition}] The handle of another session is invalid.")

    with pytest.raises(RuntimeError):
        Run(fail_otherwise, opened, None).run()
    assert Run(id, opened, None).run() == id(made[0])
    with pytest.raises(ValueError, match="summed up"):
        Run(fail, opened, None).run()
    assert Run(id, opened, None).run() == id(made[1])
    assert [one.is_stopped for one in made] == [True, False]


def test_a_job_that_is_stopped_before_its_function_begins_ends_its_group() -> None:
    opened, made = open_remote()
    run = Run(id, opened, None)
    run._stopped.set()
    with pytest.raises(JobStopped):
        run.run()
    assert made[0].tags == set(), "the thread continues with another message"


def test_a_worker_does_not_start_without_spark(post: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    post.spark_job("jobs")(count)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="pip install"):
        post.worker()
