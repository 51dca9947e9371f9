"""Delta tables and steps in an object store: a real S3 server, with credentials from the environment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import polars
import pyarrow as pa
import pytest
from deltalake import Schema

from tests.servers.s3 import S3Server
from tests.spark.drivers import run_driver, run_killed
from tests.spark.lakes import live
from tests.spark.readers import read_by_others, read_lake, texts
from tests.spark.shop import Shop
from waypost.errors import ConfigurationError, InvalidInput
from waypost.spark.consumer.output import AlreadyCommitted, Fence, Output
from waypost.spark.delta.parquet import write_rows
from waypost.spark.delta.steps import StepConflict, Steps
from waypost.spark.delta.table import Change, DeltaFolder
from waypost.spark.files import open_lake_files
from waypost.spark.lake.lake import Lake
from waypost.spark.lake.report import write_report
from waypost.spark.lake.tables import BRONZE_JOURNAL

pytestmark = pytest.mark.xdist_group("spark")
COLUMNS = pa.schema([("queue", pa.string()), ("number", pa.int64())])
STATISTICS = ("number",)
WRITERS, STEPS_EACH = 2, 4


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a bucket; whatever opens it finds the server and the credentials in the environment."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{server.bucket}"


def change_of(root: str, table: str, *numbers: int) -> Change:
    rows = pa.Table.from_pylist([{"queue": "orders", "number": number} for number in numbers], schema=COLUMNS)
    return Change(tuple(write_rows(open_lake_files(root), table, rows, STATISTICS)))


def make(root: str, *tables: str) -> Steps:
    files = open_lake_files(root)
    for name in tables:
        DeltaFolder(files, name).create(Schema.from_arrow(COLUMNS), statistics=STATISTICS)
    steps = Steps(files, "_steps")
    steps.create()
    return steps


def numbers(root: str, table: str) -> list[int]:
    found: list[int] = polars.read_delta(f"{root}/{table}").sort("number")["number"].to_list()
    return found


@pytest.mark.promise("SPARK-4")
def test_of_programs_that_commit_the_same_step_to_an_object_store_one_wins(bucket: str) -> None:
    root = f"{bucket}/at-once"
    make(root, "a", "b")
    start = threading.Barrier(WRITERS, timeout=60)
    won: list[int] = []
    failed: list[BaseException] = []

    def write(writer: int) -> None:
        try:
            steps = Steps(open_lake_files(root), "_steps")
            start.wait()
            for turn in range(STEPS_EACH):
                number = writer * 100 + turn
                while True:
                    newest = steps.roll_forward()
                    after = 0 if newest is None else newest.number
                    changes = {"a": change_of(root, "a", number), "b": change_of(root, "b", -number)}
                    try:
                        steps.commit(after, "run", "{}", changes, {})
                    except StepConflict:
                        continue
                    won.append(number)
                    break
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert failed == []
    wanted = sorted(writer * 100 + turn for writer in range(WRITERS) for turn in range(STEPS_EACH))
    assert sorted(won) == wanted
    assert numbers(root, "a") == wanted
    assert numbers(root, "b") == sorted(-number for number in wanted)
    newest = Steps(open_lake_files(root), "_steps").newest()
    assert newest is not None
    assert newest.number == WRITERS * STEPS_EACH


@pytest.mark.promise("SPARK-4")
def test_readers_of_an_object_store_see_no_step_that_was_not_committed_and_the_next_program_completes_it(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"{bucket}/killed"
    steps = make(root, "a", "b")
    steps.commit(0, "run", "{}", {"a": change_of(root, "a", 1), "b": change_of(root, "b", 1)}, {})
    # Files that a killed program wrote, and a step that it committed without any table.
    change_of(root, "a", 98, 99)
    changes = {"a": change_of(root, "a", 2), "b": change_of(root, "b", 2)}
    with monkeypatch.context() as killed:
        killed.setattr(Steps, "follow", lambda *arguments: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            steps.commit(1, "run", "{}", changes, {})
    assert numbers(root, "a") == [1]
    assert numbers(root, "b") == [1]
    newest, found = Steps(open_lake_files(root), "_steps").snapshots(["a", "b"])
    assert newest is not None
    assert newest.number == 2
    assert {name: snapshot.rows for name, snapshot in found.items()} == {"a": 2, "b": 2}
    assert numbers(root, "a") == numbers(root, "b") == [1, 2]


@pytest.mark.promise("SPARK-3")
def test_of_consumers_with_one_output_in_an_object_store_one_commits_a_message(bucket: str) -> None:
    root = f"{bucket}/output"
    outputs = [Output(root), Output(root)]
    for output in outputs:
        output.open_for("orders", "wp")
    for batch, output in zip("ab", outputs, strict=True):
        output.prepare_table("", Schema.from_arrow(COLUMNS), ())
        files = write_rows(output.files, "", pa.table({"queue": [batch], "number": [7]}, schema=COLUMNS))
        fence = Fence("message", 1, b"nonce")
        if batch == "a":
            output.commit(batch, {"": files}, [fence])
        else:
            with pytest.raises(AlreadyCommitted):
                output.commit(batch, {"": files}, [fence])
    assert polars.read_delta(root)["queue"].to_list() == ["a"]


@pytest.mark.promise("SPARK-4", "SPARK-5", "SPARK-7")
def test_a_pipeline_does_everything_in_an_object_store(bucket: str, orders: Shop, tmp_path: Path) -> None:
    """A run that a signal kills, read while it is dead; then a program that completes it and does all the rest."""
    lake = f"{bucket}/a-lake"
    live(orders, 20)
    killed = run_killed("after:3", "run", "--store", orders.url, "--lake", lake)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    dead = texts(read_by_others(lake))
    opened = Lake(lake)
    whole = texts(read_lake(opened))
    assert len(whole[BRONZE_JOURNAL.name]) == len(orders.events())
    # Some tables were committed, as many as at a time; the others are as they were, empty.
    assert 1 <= sum(bool(rows) for rows in dead.values()) < len(dead)
    assert all(rows in ([], whole[name]) for name, rows in dead.items())
    assert texts(read_by_others(lake)) == whole
    code, lines = run_driver("tests.spark.s3_driver", lake, str(tmp_path), orders.url)
    found = {name: value for line in lines for name, value in line.items()}
    assert code == 0, found
    assert found == {
        "at_once": True, "agree": True, "by_tasks": True, "manifests": 0, "clean": True, "audited": True,
        "page": True, "published": orders.post.ledger("orders").published,
    }  # fmt: skip
    with pytest.raises(InvalidInput, match="needs a file on this machine: give it with --output"):
        write_report(lake)
    assert texts(read_by_others(lake)) == texts(read_lake(Lake(lake)))


def test_keys_in_the_uri_of_a_lake_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="AWS_ACCESS_KEY_ID") as raised:
        open_lake_files("s3://waypost:secret@bucket/lake")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("what", ["lake", "output"])
def test_parameters_in_the_uri_of_a_lake_are_refused_by_name(what: str) -> None:
    for uri, text in (
        ("s3://bucket/lake?endpoint_override=127.0.0.1:9000&scheme=http", r"\(endpoint_override, scheme\)"),
        ("gs://bucket/lake?x", "after [?]"),
        ("s3://bucket/lake#part", "after [?] or #"),
    ):
        with pytest.raises(
            ConfigurationError, match=rf"the {what} .* named with parameters .*{text}.*AWS_ENDPOINT_URL"
        ):
            open_lake_files(uri, what)
    with pytest.raises(ConfigurationError, match="is named with its keys") as raised:
        open_lake_files("s3://bucket/lake?secret_key=hunter2&scheme=http", what)
    assert "hunter2" not in str(raised.value)
