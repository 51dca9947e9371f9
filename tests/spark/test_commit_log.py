"""The log of an output: one commit for each number, and no message in two of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from waypost.errors import ConfigurationError, StoreError
from waypost.identity import Session
from waypost.spark.consumer.commit_log import COMMITS_KEPT, STAGING_KEPT_MS, AlreadyCommitted, CommitLog, Fence
from waypost.spark.files import HadoopFiles, LocalFiles, OutputFiles, open_output_files

pytestmark = pytest.mark.xdist_group("spark")


def log_of(files: OutputFiles) -> CommitLog:
    return CommitLog(files, "orders", "wp")


def fences(*ids: str) -> list[Fence]:
    return [Fence(name, 1, b"\xff" * 12) for name in ids]


@pytest.fixture(params=["local", "hadoop"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> OutputFiles:
    if request.param == "local":
        return LocalFiles(str(tmp_path / "a folder"))
    return HadoopFiles(request.getfixturevalue("spark"), f"file://{tmp_path}/hadoop")


@pytest.mark.promise("SPARK-3")
def test_a_message_is_committed_once_by_the_first_driver(files: OutputFiles) -> None:
    one, other = log_of(files), log_of(files)
    assert one.commit("a", ["t"], fences("1", "2")) == 1
    with pytest.raises(AlreadyCommitted) as raised:
        other.commit("b", [], fences("2", "3"))
    assert raised.value.ids == {"2"}
    assert other.commit("b", [], fences("3")) == 2
    assert one.commit("c", [], fences("4")) == 3
    assert log_of(files).committed() == {"1", "2", "3", "4"}


def test_of_many_that_commit_at_once_each_gets_a_number_of_its_own(tmp_path: Path) -> None:
    logs = [log_of(LocalFiles(str(tmp_path))) for _ in range(8)]
    start = threading.Barrier(8, timeout=30)
    numbers: list[int] = []
    refused: list[frozenset[str]] = []

    def commit(index: int) -> None:
        start.wait()
        for turn in range(10):
            numbers.append(logs[index].commit(f"{index}-{turn}", [], fences(f"{index}-{turn}")))
        try:
            logs[index].commit(f"{index}", [], fences("wanted by all"))
        except AlreadyCommitted as error:
            refused.append(error.ids)

    threads = [threading.Thread(target=commit, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted([*numbers]) == sorted(set(numbers))
    assert len(numbers) == 80
    assert refused == [frozenset({"wanted by all"})] * 7


@pytest.mark.promise("SPARK-3")
def test_a_commit_is_moved_once_and_an_interrupted_move_is_finished(files: OutputFiles) -> None:
    log = log_of(files)
    for table in ("", "eu/orders"):
        files.replace(f"{log.staging('a', table)}/part-1", b"one")
        files.replace(f"{log.staging('a', table)}/day=1/part-2", b"two")
    number = log.commit("a", ["", "eu/orders"], fences("1"))
    # After an interrupted move on an object store: half of the folder is there, and one file is cut short.
    files.move(f"{log.staging('a')}/part-1", "waypost_batch=a/part-1")
    files.replace("waypost_batch=a/day=1/part-2", b"t")
    commit = log.pending[number].commit
    for _ in range(2):
        log.publish(commit)
        for folder in ("waypost_batch=a", "eu/orders/waypost_batch=a"):
            assert {
                name: files.read(f"{folder}/{name}") for name in files.walk(folder) if not name.endswith(".crc")
            } == {
                "part-1": b"one",
                "day=1/part-2": b"two",
            }
    assert files.names("_waypost/staging") == []


def test_settled_messages_are_removed_from_the_log_and_others_are_kept(files: OutputFiles) -> None:
    log, witness = log_of(files), log_of(files)
    log.commit("a", [], fences("1", "2"))
    log.commit("b", [], fences("3"))
    assert witness.refresh() == {"1", "2", "3"}
    log.mark_settled({"1", "3"})
    assert log.committed() == log_of(files).committed() == {"2"}
    assert witness.refresh() == set()
    assert witness.committed() == {"2"}
    log.mark_settled({"2"})
    assert log.committed() == log_of(files).committed() == set()


def test_old_commits_are_removed_and_a_driver_that_missed_them_commits_nothing(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    late, log = log_of(files), log_of(files)
    log.commit("first", [], fences("never settled"))
    for number in range(COMMITS_KEPT + 5):
        log.commit(f"b{number}", [], fences(str(number)))
        log.mark_settled({str(number)})
    old, new = Session().message_ids(1)[0], Session().message_ids(1)[0]
    for batch in (old, new):
        files.replace(f"{log.staging(batch)}/part", b"x")
    log.remove_old(10**15)
    assert files.names("_waypost/staging") == []
    commits = [name for name in files.names("_waypost/log") if name.endswith(".json")]
    assert len(commits) == COMMITS_KEPT + 1
    assert log_of(files).committed() == {"never settled"}
    with pytest.raises(StoreError, match="were made and removed"):
        late.commit("late", [], fences("4"))
    assert late.read_before_claim() == {"never settled"}
    assert late.commit("late", [], fences("new")) == log.seen + 1
    files.replace(f"{log.staging(new)}/part", b"x")
    log.remove_old(STAGING_KEPT_MS)
    assert files.names("_waypost/staging") == [new]


def test_an_output_belongs_to_one_queue(files: OutputFiles) -> None:
    log_of(files).commit("a", [], fences("1"))
    with pytest.raises(ConfigurationError, match="belongs to queue orders of namespace wp"):
        CommitLog(files, "mails", "wp")
    with pytest.raises(ConfigurationError, match="belongs to queue orders of namespace wp"):
        CommitLog(files, "orders", "other")


def test_a_path_is_opened_where_the_session_would_write_it(spark: SparkSession, tmp_path: Path) -> None:
    for path in (str(tmp_path / "ä b"), f"file://{tmp_path}/x%20y", f"file:{tmp_path}/z"):
        assert isinstance(open_output_files(spark, path), LocalFiles)
    # Spark takes %20 for three characters: what it writes to a path must be where this process finds it.
    for root in (str(tmp_path / "ä b"), f"file://{tmp_path}/x%20y", f"file:{tmp_path}/z"):
        files = open_output_files(spark, root)
        spark.range(3).coalesce(1).write.parquet(files.uri("a=1/t"))
        assert files.has_rows("a=1/t")
        assert spark.read.parquet(f"{root}/a=1/t").count() == 3
    remote: Any = object()
    assert isinstance(open_output_files(remote, "/plain"), LocalFiles)
    with pytest.raises(ConfigurationError, match="over Spark Connect"):
        open_output_files(remote, "hdfs://host/lake")
