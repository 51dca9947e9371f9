"""Delta tables and steps: a step happens once in every table, whichever process dies and however many try."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, Schema

from waypost.errors import StoreError
from waypost.spark.delta.parquet import FileWriter, describe_file, write_rows
from waypost.spark.delta.steps import STEPS_KEPT, StepConflict, Steps
from waypost.spark.delta.table import APP_ID, Change, DeltaFolder, Snapshot, TableMismatch
from waypost.spark.files import LocalFiles

COLUMNS = pa.schema([("queue", pa.string()), ("number", pa.int64()), ("message_id", pa.string())])
STATISTICS = ("number", "message_id")


def make(tmp_path: Path, *tables: str) -> tuple[LocalFiles, Steps]:
    files = LocalFiles(str(tmp_path / "lake"))
    for name in tables:
        DeltaFolder(files, name).create(Schema.from_arrow(COLUMNS), statistics=STATISTICS)
    steps = Steps(files, "_steps")
    steps.create()
    return files, steps


def rows(*numbers: int, ids: bool = True) -> pa.Table:
    found = [
        {"queue": "orders", "number": n, "message_id": f"é{n:04}" * 20 if ids and n % 3 else None} for n in numbers
    ]
    return pa.Table.from_pylist(found, schema=COLUMNS)


def added(files: LocalFiles, table: str, *numbers: int) -> Change:
    return Change(tuple(write_rows(files, table, rows(*numbers), STATISTICS)))


def numbers(files: LocalFiles, table: str) -> list[int]:
    found: list[int] = polars.read_delta(files.path(table)).sort("number")["number"].to_list()
    return found


def query(table: DeltaTable, condition: str) -> list[int]:
    """Return numbers that duckdb finds."""
    with duckdb.connect() as connection:
        connection.register("rows", table.to_pyarrow_dataset())
        found = connection.execute(f"SELECT number FROM rows WHERE {condition} ORDER BY 1").fetchall()
    return [row[0] for row in found]


@pytest.mark.promise("SPARK-4")
def test_a_step_is_in_every_table_once_and_readers_see_nothing_else(tmp_path: Path) -> None:
    files, steps = make(tmp_path, "a", "b")
    first = added(files, "a", 1, 2)
    write_rows(files, "a", rows(98, 99), STATISTICS)  # a file that was never committed
    steps.commit(0, "run", "{}", {"a": first, "b": added(files, "b", 7)}, {})
    with pytest.raises(StepConflict, match="committed step 1"):
        steps.commit(0, "run", "{}", {"a": added(files, "a", 1, 2)}, {})
    second = Change(added(files, "a", 3).add, first.add)
    steps.commit(1, "run", '{"x":1}', {"a": second, "b": Change()}, {})
    steps.follow(steps.newest() or pytest.fail("no step"))
    assert numbers(files, "a") == [3]
    assert numbers(files, "b") == [7]
    newest, found = steps.snapshots(["a", "b"])
    assert newest is not None
    assert (newest.number, newest.state) == (2, '{"x":1}')
    assert (found["a"].step, found["b"].step) == (2, 1)
    assert query(DeltaTable(files.path("a"), version=1), "true") == [1, 2]
    protocol = DeltaTable(files.path("a")).protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (1, 2)


@pytest.mark.promise("SPARK-4")
def test_a_step_whose_process_died_is_completed_by_the_next_that_opens_the_lake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, steps = make(tmp_path, "a", "b", "c")
    steps.commit(0, "run", "0", {name: added(files, name, 1) for name in "abc"}, {})
    before = {name: steps.folder(name).snapshot().version for name in "abc"}
    real = DeltaFolder.commit
    for died_after in range(4):
        done = 0

        def commit(folder: DeltaFolder, step: int, change: Change, left: int = died_after, **options: Any) -> Snapshot:
            nonlocal done
            done += 1
            if done > left:
                raise OSError("no space left")
            return real(folder, step, change, **options)

        number = died_after + 1
        with monkeypatch.context() as broken:
            broken.setattr(DeltaFolder, "commit", commit)
            if died_after < 3:
                with pytest.raises(OSError, match="no space"):
                    steps.commit(number, "run", str(number), {n: added(files, n, number + 1) for n in "abc"}, before)
                # A reader that may not write sees the step before, in all tables.
                seen, found = Steps(files, "_steps").snapshots(list("abc"))
                assert seen is not None
                assert seen.state == str(number - 1)
                assert [found[name].rows for name in "abc"] == [number] * 3
            else:
                steps.commit(number, "run", str(number), {n: added(files, n, number + 1) for n in "abc"}, before)
        _, found = Steps(files, "_steps").snapshots(list("abc"))
        assert [numbers(files, name) for name in "abc"] == [list(range(1, number + 2))] * 3
        before = {name: found[name].version for name in "abc"}


@pytest.mark.promise("SPARK-4")
def test_of_many_that_commit_at_once_one_wins_each_step_and_nothing_is_doubled(tmp_path: Path) -> None:
    files, _ = make(tmp_path, "a", "b")
    start, won, lost = threading.Barrier(4, timeout=60), [], []

    def work(worker: int) -> None:
        start.wait()
        for turn in range(6):
            while True:
                steps = Steps(files, "_steps")
                newest = steps.roll_forward()
                after = 0 if newest is None else newest.number
                number = 1000 * worker + turn
                try:
                    steps.commit(after, "run", "", {n: added(files, n, number) for n in ("a", "b")}, {})
                except StepConflict:
                    lost.append(number)
                else:
                    won.append(number)
                    break

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(won) == 24
    assert numbers(files, "a") == numbers(files, "b") == sorted(won)
    newest = Steps(files, "_steps").newest()
    assert newest is not None
    assert newest.number == 24


@pytest.mark.promise("SPARK-4")
def test_a_step_that_another_process_left_unsynced_is_synced_before_a_writer_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, steps = make(tmp_path, "a", "b")
    real = DeltaFolder.sync
    for lost in ("a", "_steps"):
        newest = steps.roll_forward()
        after = 0 if newest is None else newest.number

        def sync(folder: DeltaFolder, version: int, lost: str = lost) -> None:
            if folder.name == lost:
                raise OSError("killed")
            real(folder, version)

        with monkeypatch.context() as killed:
            killed.setattr(DeltaFolder, "sync", sync)
            with pytest.raises(OSError, match="killed"):
                steps.commit(after, "run", "", {name: added(files, name, after + 1) for name in "ab"}, {})
        synced: list[str] = []
        with monkeypatch.context() as watched:
            watched.setattr(files, "sync_file", synced.append)
            found, _ = Steps(files, "_steps").snapshots(["a", "b"], to_write=True)
        assert found is not None
        assert found.number == after + 1
        assert {f"{name}/_delta_log/{after + 1:020}.json" for name in ("a", "b", "_steps")} <= set(synced)


def test_a_table_of_another_time_than_the_steps_is_refused_by_name(tmp_path: Path) -> None:
    """As in a copy of a lake that was changing."""
    files, steps = make(tmp_path, "a", "b")
    versions: dict[str, int] = {}
    for number in range(4):
        if number == 2:
            copytree(tmp_path / "lake", tmp_path / "copy2")
        changes = {name: added(files, name, number + 1) for name in (("a", "b") if number < 3 else ("b",))}
        _, made = steps.commit(number, "run", "", changes, versions)
        versions |= {name: snapshot.version for name, snapshot in made.items()}

    for name in ("a", "b", "_steps"):
        # One folder is as it was two steps before the last.
        copytree(tmp_path / "lake", tmp_path / name)
        rmtree(tmp_path / name / name)
        copytree(tmp_path / "copy2" / name, tmp_path / name / name)
    mixed = {name: Steps(LocalFiles(str(tmp_path / name)), "_steps") for name in ("a", "b", "_steps")}
    for to_write in (False, True):
        with pytest.raises(TableMismatch, match=r"/[ab] has step [34], and the newest step of the lake is 2: .*copy"):
            mixed["_steps"].snapshots(["a", "b"], to_write=to_write)
        # The newest step changes b, not a.
        with pytest.raises(TableMismatch, match="/a has version 2, and the newest step of the lake has it at 3"):
            mixed["a"].snapshots(["a", "b"], to_write=to_write)
        with pytest.raises(TableMismatch, match="/b has version 2, and step 4 of the lake needs 3 or later"):
            mixed["b"].snapshots(["a", "b"], to_write=to_write)
        assert steps.snapshots(["a", "b"], to_write=to_write)[1]["b"].rows == 4


def test_a_stale_handle_cannot_repeat_a_step(tmp_path: Path) -> None:
    """A process that was frozen while others went on commits nothing."""
    files, steps = make(tmp_path, "a")
    folder = steps.folder("a")
    stale = folder.open()
    change = added(files, "a", 1)
    assert folder.commit(1, change).step == 1
    assert not folder.try_commit(stale, 1, change)
    assert folder.commit(1, added(files, "a", 1)).rows == 1
    assert folder.open().transaction_version(APP_ID) == 1


def test_rows_of_steps_are_bounded(tmp_path: Path) -> None:
    _, steps = make(tmp_path)
    for number in range(STEPS_KEPT + 6):
        steps.commit(number, "run", str(number + 1), {}, {})
    assert len(steps.table.snapshot().files) == STEPS_KEPT
    newest = steps.newest()
    assert newest is not None
    assert newest.state == str(STEPS_KEPT + 6)


FILTERS: tuple[tuple[str, Callable[[], Any], Callable[[], Any]], ...] = (
    ("number >= 40", lambda: pc.field("number") >= 40, lambda: polars.col("number") >= 40),
    ("number = 7", lambda: pc.field("number") == 7, lambda: polars.col("number") == 7),
    ("message_id IS NULL", lambda: pc.field("message_id").is_null(), lambda: polars.col("message_id").is_null()),
    (
        f"message_id = '{'é0040' * 20}'",
        lambda: pc.field("message_id") == "é0040" * 20,
        lambda: polars.col("message_id") == "é0040" * 20,
    ),
    ("message_id > 'é0041'", lambda: pc.field("message_id") > "é0041", lambda: polars.col("message_id") > "é0041"),
    ("queue = 'orders'", lambda: pc.field("queue") == "orders", lambda: polars.col("queue") == "orders"),
)


@pytest.mark.promise("SPARK-4")
@pytest.mark.parametrize(("sql", "arrow", "lazy"), FILTERS, ids=[given[0][:20] for given in FILTERS])
def test_statistics_never_hide_a_row_from_a_reader(
    tmp_path: Path, sql: str, arrow: Callable[[], Any], lazy: Callable[[], Any]
) -> None:
    files, steps = make(tmp_path, "a")
    parts = [rows(*range(1, 30)), rows(*range(30, 60)), rows(60, 63, ids=False), rows(*range(61, 90))]
    change = Change(tuple(file for part in parts for file in write_rows(files, "a", part, STATISTICS)))
    steps.commit(0, "run", "", {"a": change}, {})
    wanted = sorted(pa.concat_tables(parts).filter(arrow()).column("number").to_pylist())
    assert wanted
    folder = steps.folder("a")
    dataset = DeltaTable(files.path("a")).to_pyarrow_dataset()
    assert sorted(folder.arrow(folder.snapshot(), ["number"], arrow()).column("number").to_pylist()) == wanted
    assert sorted(dataset.to_table(columns=["number"], filter=arrow()).column("number").to_pylist()) == wanted
    assert query(DeltaTable(files.path("a")), sql) == wanted
    found = polars.scan_delta(files.path("a")).filter(lazy()).select("number").collect()
    assert sorted(found["number"].to_list()) == wanted


def test_files_are_cut_by_size_and_described_exactly(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path / "a lake"))
    with FileWriter(files, "t", COLUMNS, STATISTICS, file_bytes=1) as writer:
        for start in range(0, 140_000, 10_000):
            writer.write(rows(*range(start, start + 10_000)))
    assert len(writer.made) == 3
    assert sum(file.rows for file in writer.made) == 140_000
    assert len({file.path for file in writer.made}) == 3
    for file in writer.made:
        known = describe_file(files, "t", file.path, STATISTICS, {})
        assert (known.size, known.rows, known.lowest, known.highest, known.nulls) == (
            file.size, file.rows, file.lowest, file.highest, file.nulls,
        )  # fmt: skip
    first = writer.made[0]
    assert first.may_hold("number", 65_535, 70_000)
    assert not first.may_hold("number", 65_536, 70_000)
    assert first.may_hold("queue", "x", "y")


def test_columns_are_added_and_a_table_with_unknown_features_is_refused_by_name(tmp_path: Path) -> None:
    files, steps = make(tmp_path, "a")
    steps.commit(0, "run", "", {"a": added(files, "a", 1)}, {})
    folder = steps.folder("a")
    for _ in range(2):
        folder.add_columns({"number": pa.int64(), "extra": pa.string()})
    steps.commit(1, "run", "", {"a": added(files, "a", 2)}, {})
    assert folder.arrow(folder.snapshot()).column("extra").to_pylist() == [None, None]
    assert DeltaTable(files.path("a")).transaction_version(APP_ID) == 2
    DeltaTable(files.path("a")).alter.set_table_properties({"delta.enableDeletionVectors": "true"})
    with pytest.raises(StoreError, match=r"deletionVectors.*remove the feature"):
        folder.snapshot()
