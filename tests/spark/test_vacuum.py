"""Files are deleted when no table, reader or writer needs them, whatever the clocks say. None of it needs Spark."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema
from msgspec import structs

from tests.spark.shop import Shop
from waypost.spark.consumer.output import CONSUMED, Fence, Output, RowsDeleted
from waypost.spark.delta import vacuum as vacuums
from waypost.spark.delta.parquet import MANIFESTS, DataFile, write_rows
from waypost.spark.delta.steps import StepConflict
from waypost.spark.delta.table import Change
from waypost.spark.lake.lake import TRIES_MAX, Lake, State, retry_conflicts
from waypost.spark.lake.pipeline import Pipeline
from waypost.spark.lake.tables import BRONZE_JOURNAL

DAY_SECONDS = 86_400
SCHEMA = BRONZE_JOURNAL.arrow(BRONZE_JOURNAL.columns)


def make_lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"))
    lake.create()
    return lake


def write(lake: Lake, *numbers: int) -> tuple[DataFile, ...]:
    """Write events as files of bronze, and commit nothing; those from number 100 on are of now."""
    now = time.time_ns() // 1_000_000
    found = [{"queue": "orders", "number": number, "at_ms": now if number >= 100 else 0} for number in numbers]
    rows = pa.Table.from_pylist(found, schema=SCHEMA)
    return tuple(write_rows(lake.files, BRONZE_JOURNAL.name, rows, BRONZE_JOURNAL.statistics))


def add(lake: Lake, *numbers: int, remove: tuple[DataFile, ...] = ()) -> tuple[DataFile, ...]:
    """Commit a step that adds events, and removes files."""
    files = write(lake, *numbers)
    lake.commit("run", {BRONZE_JOURNAL.name: Change(files, remove)}, lake.state)
    return files


def exists(lake: Lake, *files: DataFile) -> bool:
    return all(lake.files.exists(f"{BRONZE_JOURNAL.name}/{file.path}") for file in files)


def numbers(lake: Lake) -> list[int]:
    return sorted(lake.arrow(BRONZE_JOURNAL, ["number"]).column("number").to_pylist())


def age(folder: Path, seconds: float = DAY_SECONDS + 60) -> None:
    """Let all files below a folder be older by the storage's clock: as if it had been set forward just now."""
    for path in folder.rglob("*"):
        if path.is_file():
            at = path.stat().st_mtime - seconds
            os.utime(path, (at, at))


@pytest.mark.promise("SPARK-4")
def test_a_vacuum_deletes_what_no_version_has_since_a_day(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    forgotten = write(lake, 98, 99)
    first = add(lake, 1)
    (kept,) = add(lake, 1, 2, remove=first)
    manifest = f"{MANIFESTS}/killed.json"
    lake.files.replace(manifest, b"{}")
    foreign = tmp_path / "lake" / BRONZE_JOURNAL.name / "readme.txt"
    foreign.write_text("of a user")
    age(tmp_path / "lake")
    new = write(lake, 3)
    lake.files.replace(f"{MANIFESTS}/new.json", b"{}")
    # The removed file is in one of the newest versions, which readers may have open.
    assert lake.vacuum() == 2
    assert not exists(lake, *forgotten)
    assert not lake.files.exists(manifest)
    assert lake.files.exists(f"{MANIFESTS}/new.json")
    assert exists(lake, *first, kept, *new)
    # Now it is in older versions only.
    for number in range(vacuums.VERSIONS_KEPT):
        add(lake, 10 + number)
    assert lake.vacuum() == 1
    assert not exists(lake, *first)
    age(tmp_path / "lake")
    assert lake.vacuum() == 2
    assert not exists(lake, *new)
    assert lake.files.walk(MANIFESTS) == {}
    assert foreign.exists()
    assert numbers(lake) == numbers(Lake(lake.files.root)) == [1, 2, *range(10, 10 + vacuums.VERSIONS_KEPT)]


@pytest.mark.promise("SPARK-4")
def test_a_vacuum_by_a_process_whose_clock_is_ahead_deletes_nothing_that_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = make_lake(tmp_path)
    first = add(lake, 1)
    for number in range(vacuums.VERSIONS_KEPT + 1):
        add(lake, number, remove=first if number == 0 else ())
    written = write(lake, 50)
    real = time.time_ns
    for days in (1, 30):
        monkeypatch.setattr(time, "time_ns", lambda days=days: real() + days * DAY_SECONDS * 1_000_000_000)
        assert lake.vacuum() == 0
    assert exists(lake, *first, *written)


@pytest.mark.promise("SPARK-4")
def test_after_the_clock_of_the_storage_was_set_forward_no_committed_row_and_no_open_version_is_lost(
    tmp_path: Path,
) -> None:
    """A writer, a reader and a vacuum meet a clock that was set forward by a day: every file looks old."""
    lake = make_lake(tmp_path)
    (old,) = add(lake, 1)
    reader = Lake(lake.files.root)
    version = DeltaTable(lake.files.path(BRONZE_JOURNAL.name)).version()
    writer, merging = Lake(lake.files.root), Lake(lake.files.root)
    pending, merged = write(writer, 2), write(merging, 1)
    age(tmp_path / "lake")
    assert lake.vacuum() == 2
    assert not exists(lake, *pending)
    # The step was computed before the vacuum, so it is computed again.
    with pytest.raises(StepConflict):
        writer.commit("run", {BRONZE_JOURNAL.name: Change(pending)}, writer.state)
    with pytest.raises(StepConflict):
        merging.commit_beside_others(
            "compact", {BRONZE_JOURNAL.name: Change(merged, (old,), changes_rows=False)}, lambda state: state
        )
    writer.refresh(to_write=True)
    add(writer, 2, remove=(old,))
    assert numbers(Lake(lake.files.root)) == [2]
    # Versions that are open, and all that a reader may open by its number.
    age(tmp_path / "lake")
    assert retry_conflicts(lake, lake.vacuum) == 0
    assert numbers(reader) == [1]
    assert polars.read_delta(lake.files.path(BRONZE_JOURNAL.name), version=version)["number"].to_list() == [1]


@pytest.mark.promise("SPARK-4")
def test_of_a_vacuum_and_a_step_at_the_same_time_the_second_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, writer = make_lake(tmp_path), Lake(str(tmp_path / "lake"))
    writer.refresh()
    pending = write(writer, 1)
    age(tmp_path / "lake")
    real = lake.steps.files.modified

    def modified(folder: str) -> dict[str, int]:
        found = real(folder)
        if folder == MANIFESTS:
            # The list is made, and nothing is committed: here the writer commits what is in it.
            writer.commit("run", {BRONZE_JOURNAL.name: Change(pending)}, writer.state)
        return found

    with monkeypatch.context() as meeting:
        meeting.setattr(lake.steps.files, "modified", modified)
        with pytest.raises(StepConflict):
            lake.vacuum()
    assert retry_conflicts(lake, lake.vacuum) == 0
    assert numbers(Lake(lake.files.root)) == [1]


@pytest.mark.promise("SPARK-3")
def test_a_batch_of_a_consumer_is_written_again_if_a_vacuum_took_its_files(tmp_path: Path) -> None:
    slow, other = (Output(str(tmp_path / "output")) for _ in range(2))
    rows = pa.table({"id": ["1"]})
    for output in (slow, other):
        output.open_for("orders", "wp")
        output.prepare_table("", Schema.from_arrow(rows.schema), ())
    other.commit("a", {"": write_rows(other.files, "", pa.table({"id": ["9"]}))}, [Fence("9", 1, b"")])
    slow.read_before_claim()

    def vacuum() -> None:
        """The other driver deletes old files, as it does once a day."""
        other.state = structs.replace(other.state, vacuumed_ms=0)
        other.maintain()
        assert other.state.vacuum_step == other.step

    # A vacuum that leaves the files does not disturb the batch.
    files = write_rows(slow.files, "", rows)
    vacuum()
    slow.commit("b", {"": files}, [Fence("1", 1, b"")])
    slow.read_before_claim()
    other.refresh()
    files = write_rows(slow.files, "", pa.table({"id": ["2"]}))
    age(tmp_path / "output")
    vacuum()
    assert not slow.files.exists(files[0].path)
    with pytest.raises(RowsDeleted):
        slow.commit("c", {"": files}, [Fence("2", 1, b"")])
    slow.discard({"": files})
    slow.prepare_table("", Schema.from_arrow(rows.schema), ())
    slow.commit("c", {"": write_rows(slow.files, "", pa.table({"id": ["2"]}))}, [Fence("2", 1, b"")])
    assert sorted(polars.read_delta(str(tmp_path / "output"))["id"].to_list()) == ["1", "2", "9"]
    assert len(polars.read_delta(str(tmp_path / "output" / CONSUMED))) == 3


@pytest.mark.promise("SPARK-4")
def test_what_release_0_1_had_loaded_and_not_merged_is_kept(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    unmerged = write(lake, 1)
    lake.commit("upgrade", {}, structs.replace(lake.state, unmerged=unmerged))
    age(tmp_path / "lake")
    assert lake.vacuum() == 0
    assert exists(lake, *unmerged)


# ---- tidy beside runs -----------------------------------------------------------------------------------------------


@pytest.mark.promise("SPARK-4")
def test_tidy_goes_on_while_a_run_commits_steps(orders: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are merged, old rows removed and files deleted, and a run commits just before each of these steps."""
    lake, running = make_lake(tmp_path), Lake(str(tmp_path / "lake"))
    for number in range(4):
        add(lake, number)
    made = Pipeline(cast("Any", None), lake.files.root, store=orders.url, partitions=1)
    real, kinds = Lake.commit, list[str]()

    def commit(of: Lake, kind: str, changes: Mapping[str, Change], state: State) -> None:
        if of is made.lake and kind not in kinds:
            kinds.append(kind)
            running.refresh(to_write=True)
            files = write(running, 100 + len(kinds))
            real(running, "run", {BRONZE_JOURNAL.name: Change(files)}, running.state)
        real(of, kind, changes, state)

    monkeypatch.setattr(Lake, "commit", commit)
    made.tidy(keep_days=1)
    assert kinds == ["compact", "remove old rows", "vacuum"]
    made.lake.refresh()
    assert numbers(made.lake) == [101, 102, 103]
    assert made.lake.state.deleted_before_ms > 0


@pytest.mark.promise("SPARK-4")
def test_changes_that_fit_no_more_are_computed_again_and_not_without_end(tmp_path: Path) -> None:
    lake, other = make_lake(tmp_path), Lake(str(tmp_path / "lake"))
    add(lake, 1)
    turns = []

    def merge() -> None:
        turns.append(lake.step)
        files = lake.data_files(BRONZE_JOURNAL)
        change = Change(write(lake, 1), files, changes_rows=False)
        if len(turns) <= disturbed:
            # Another process merges the same files first.
            other.refresh(to_write=True)
            add(other, 1, remove=other.data_files(BRONZE_JOURNAL))
        lake.commit_beside_others("compact", {BRONZE_JOURNAL.name: change}, lambda state: state)

    disturbed = 2
    retry_conflicts(lake, merge)
    assert len(turns) == 3
    disturbed = 99
    with pytest.raises(StepConflict, match=rf"changed the lake .* {TRIES_MAX} times meanwhile: try again, or stop"):
        retry_conflicts(lake, merge)
    assert len(turns) == 3 + TRIES_MAX
    assert numbers(Lake(lake.files.root)) == [1]
