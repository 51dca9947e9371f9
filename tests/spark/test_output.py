"""The output of a consumer: a batch is committed once, at whatever point a driver dies, for every reader."""

from __future__ import annotations

import base64
import datetime
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from waypost.cli.main import main
from waypost.errors import ConfigurationError, InvalidInput, StoreError
from waypost.spark import read_output
from waypost.spark.consumer import output as outputs
from waypost.spark.consumer import upgrade as upgrading
from waypost.spark.consumer.output import CONSUMED, VACUUM_EVERY_MS, AlreadyCommitted, Fence, Output
from waypost.spark.consumer.upgrade import upgrade_output
from waypost.spark.delta import compaction, steps, table
from waypost.spark.delta.conversion import copy_files
from waypost.spark.delta.data_source import Target, TargetWriter, write_frame
from waypost.spark.delta.parquet import DataFile, write_rows
from waypost.spark.files import LocalFiles
from waypost.spark.lake.lake import Lake

pytestmark = pytest.mark.xdist_group("spark")
ROWS = pa.schema([("id", pa.string()), ("waypost_batch", pa.string())])


def open_output(path: Path, queue: str = "orders") -> Output:
    output = Output(str(path))
    output.open_for(queue, "wp")
    return output


def fences(ids: Sequence[str]) -> list[Fence]:
    return [Fence(name, 1, b"\xff" * 12) for name in ids]


def write(output: Output, name: str, ids: Sequence[str], batch: str) -> list[DataFile]:
    """Write rows as a batch does, without Spark."""
    output.prepare_table(name, Schema.from_arrow(ROWS), ())
    rows = pa.table({"id": list(ids), "waypost_batch": [batch] * len(ids)}, schema=ROWS)
    return write_rows(output.files, name, rows)


def commit(output: Output, batch: str, ids: Sequence[str], tables: Sequence[str] = ("",)) -> None:
    output.commit(batch, {name: write(output, name, ids, batch) for name in tables}, fences(ids))


def read_by_others(path: Path) -> list[str]:
    """Return the ids in a table, which polars and duckdb must agree on."""
    by_polars = sorted(polars.read_delta(str(path))["id"].to_list())
    by_duckdb = duckdb.from_arrow(DeltaTable(str(path)).to_pyarrow_dataset()).project("id").fetchall()
    assert sorted(row[0] for row in by_duckdb) == by_polars
    return by_polars


def test_a_message_is_committed_once_by_the_first_driver(tmp_path: Path) -> None:
    one, other = open_output(tmp_path), open_output(tmp_path)
    commit(one, "a", ["1", "2"])
    with pytest.raises(AlreadyCommitted) as raised:
        commit(other, "b", ["2", "3"])
    assert raised.value.ids == {"2"}
    commit(other, "b", ["3"])
    # Settled meanwhile by the first driver: the second one still finds it.
    one.mark_settled({"1", "2"})
    one.record_settled()
    with pytest.raises(AlreadyCommitted):
        commit(other, "c", ["1", "4"])
    assert one.read_before_claim() == {"3"}
    assert read_by_others(tmp_path) == ["1", "2", "3"]


def test_of_many_that_commit_at_once_each_message_is_committed_by_one(tmp_path: Path) -> None:
    open_output(tmp_path)
    outputs = [open_output(tmp_path) for _ in range(4)]
    start = threading.Barrier(4, timeout=60)
    refused: list[frozenset[str]] = []

    def work(index: int) -> None:
        start.wait()
        for turn in range(3):
            commit(outputs[index], f"{index}-{turn}", [f"{index}-{turn}"])
        try:
            commit(outputs[index], f"{index}", ["wanted by all"])
        except AlreadyCommitted as error:
            refused.append(error.ids)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert refused == [frozenset({"wanted by all"})] * 3
    assert len(read_by_others(tmp_path)) == 13


class Killed(BaseException):
    """Stands for a kill: no cleanup runs after it."""


def die_at(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next commit die: before its row, after it, between its tables, or after all of them."""
    follow, try_commit = steps.Steps.follow, table.DeltaFolder.try_commit

    def killed(*given: Any, **named: Any) -> Any:
        raise Killed(point)

    def some_tables(self: Any, step: Any, **named: Any) -> Any:
        first = dict(sorted(step.changes.items())[: -1 if point == "between tables" else None])
        follow(self, steps.Step(step.number, step.kind, step.at_ms, step.state, step.inputs, first), **named)
        raise Killed(point)

    def no_row(self: Any, *given: Any) -> Any:
        return killed() if self.name == "_steps" else try_commit(self, *given)

    if point == "before the row":
        monkeypatch.setattr(table.DeltaFolder, "try_commit", no_row)
    else:
        monkeypatch.setattr(steps.Steps, "follow", killed if point == "after the row" else some_tables)


@pytest.mark.promise("SPARK-3")
@pytest.mark.parametrize("point", ["before the row", "after the row", "between tables", "after the tables"])
def test_a_driver_that_dies_at_any_point_shows_only_committed_rows_to_every_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    names = ("eu/orders", "us")
    output = open_output(tmp_path)
    commit(output, "a", ["1", "2"], names)
    output.mark_settled({"1", "2"})
    output.record_settled()
    with monkeypatch.context() as broken:
        made = {name: write(output, name, ["3", "4"], "b") for name in names}
        output.refresh(to_write=True)
        die_at(point, broken)
        broken.setattr(Output, "refresh", lambda *given, **named: None)
        with pytest.raises(Killed):
            output.commit("b", made, fences(["3", "4"]))
    before, after = ["1", "2"], ["1", "2", "3", "4"]
    expected = {
        "before the row": [before, before],
        "after the row": [before, before],
        "between tables": [after, before],
        "after the tables": [after, after],
    }[point]
    assert [read_by_others(tmp_path / name) for name in names] == expected
    # Whichever program opens the output completes what was committed; otherwise the messages are consumed again.
    again = open_output(tmp_path)
    if point == "before the row":
        assert again.read_before_claim() == set()
        commit(again, "c", ["3", "4"], names)
    else:
        assert again.read_before_claim() == {"3", "4"}
        with pytest.raises(AlreadyCommitted):
            commit(again, "c", ["3", "4"], names)
    assert [read_by_others(tmp_path / name) for name in names] == [after, after]


def test_messages_of_old_batches_are_kept_until_they_are_settled_and_a_driver_that_missed_them_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waypost.spark.consumer.output.STEPS_KEPT", 5)
    late, output = open_output(tmp_path), open_output(tmp_path)
    output.commit("first", {}, fences(["done", "never settled"]))
    output.mark_settled({"done"})
    for number in range(9):
        output.read_before_claim()
        output.commit(f"b{number}", {}, fences([str(number)]))
        output.mark_settled({str(number)})
    output.record_settled()
    kept = polars.read_delta(str(tmp_path / CONSUMED))
    assert len(kept) == 6
    assert kept.filter(polars.col("batch") == "first")["id"].to_list() == ["never settled"]
    assert open_output(tmp_path).read_before_claim() == {"never settled"}
    with pytest.raises(StoreError, match="were made since this consumer last read it"):
        late.commit("late", {}, fences(["new"]))
    assert late.read_before_claim() == {"never settled"}
    late.commit("late", {}, fences(["new"]))


def test_small_files_are_merged_and_the_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction.merge_small_files, "__defaults__", ((), 5))
    output = open_output(tmp_path)
    for number in range(12):
        commit(output, f"b{number}", [str(number)])
        output.maintain()
    assert len(DeltaTable(str(tmp_path)).file_uris()) <= 6
    assert read_by_others(tmp_path) == sorted(map(str, range(12)))


def test_a_table_to_which_nothing_was_committed_may_be_created_with_other_columns(tmp_path: Path) -> None:
    output = open_output(tmp_path)
    output.prepare_table("", Schema.from_arrow(pa.schema([("id", pa.int64())])), ())
    output.discard({})
    output.prepare_table("", Schema.from_arrow(ROWS), ())
    commit(output, "a", ["1"])
    with pytest.raises(InvalidInput, match=r"column id of the table .* is string, and the rows have long there"):
        output.prepare_table("", Schema.from_arrow(pa.schema([("id", pa.int64())])), ())
    assert read_by_others(tmp_path) == ["1"]


def test_a_table_that_a_batch_has_written_is_not_created_anew_by_its_next_write(tmp_path: Path) -> None:
    output = open_output(tmp_path)
    made = write(output, "", ["1"], "a")
    numbers = Schema.from_arrow(pa.schema([("id", pa.int64())]))
    with pytest.raises(InvalidInput, match=r"column id of the table .* is string, and the rows have long there"):
        output.prepare_table("", numbers, ())
    with pytest.raises(InvalidInput, match="is partitioned by nothing, not by id"):
        output.prepare_table("", numbers, ("id",))
    output.commit("a", {"": made}, fences(["1"]))
    assert read_by_others(tmp_path) == ["1"]


@pytest.mark.parametrize(
    ("columns", "partition_by", "text"),
    [
        ([("id", pa.int64())], (), "column id of the table .* is long, and the rows have string there"),
        ([("id", pa.string()), ("n", pa.int64())], ("n",), "is partitioned by n, not by nothing"),
    ],
)
def test_a_batch_whose_new_table_another_driver_created_anew_is_not_committed(
    tmp_path: Path, columns: list[tuple[str, pa.DataType]], partition_by: tuple[str, ...], text: str
) -> None:
    one, other = open_output(tmp_path), open_output(tmp_path)
    made = write(one, "", ["1"], "a")
    other.prepare_table("", Schema.from_arrow(pa.schema(columns)), partition_by)
    with pytest.raises(InvalidInput, match=text):
        one.commit("a", {"": made}, fences(["1"]))
    one.discard({"": made})
    assert list(tmp_path.glob("*.parquet")) == []
    assert open_output(tmp_path).step == 0
    # The other driver committed nothing either.
    commit(one, "a", ["1"])
    assert read_by_others(tmp_path) == ["1"]


def test_a_column_that_two_drivers_add_with_different_types_is_committed_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, other = open_output(tmp_path), open_output(tmp_path)
    commit(output, "a", ["1"])
    add_columns = table.DeltaFolder.add_columns
    for one in (output, other):
        one.read_before_claim()

    def add_after_the_other(folder: Any, columns: Any) -> None:
        monkeypatch.undo()
        other.prepare_table("", Schema.from_arrow(pa.schema([*ROWS, ("n", pa.int64())])), ())
        add_columns(folder, columns)

    monkeypatch.setattr(table.DeltaFolder, "add_columns", add_after_the_other)
    output.prepare_table("", Schema.from_arrow(pa.schema([*ROWS, ("n", pa.string())])), ())
    with pytest.raises(InvalidInput, match=r"column n of the table .* is long, and the rows have string there"):
        output.commit("b", {"": []}, fences(["2"]))
    other.commit("b", {"": []}, fences(["2"]))


def test_a_column_with_a_dot_in_its_name_is_added_and_kept_by_a_compaction(tmp_path: Path) -> None:
    output = open_output(tmp_path)
    commit(output, "a", ["1"])
    schema = pa.schema([*ROWS, ("a.b", pa.int64())])
    output.prepare_table("", Schema.from_arrow(schema), ())
    rows = pa.table({"id": ["2"], "waypost_batch": ["b"], "a.b": [7]}, schema=schema)
    output.commit("b", {"": write_rows(output.files, "", rows)}, fences(["2"]))
    folder = output.steps.folder("")
    found = folder.snapshot()
    change = compaction.merge_small_files(output.files, "", found.files, found.schema, (), 1)
    folder.commit(output.step + 1, change)
    assert sorted(polars.read_delta(str(tmp_path)).select("id", "a.b").rows()) == [("1", None), ("2", 7)]


def test_a_column_that_differs_from_a_known_one_in_case_only_is_refused_by_its_name(tmp_path: Path) -> None:
    output = open_output(tmp_path)
    known = pa.schema([("id", pa.string()), ("value", pa.struct([("sum", pa.int64())]))])
    output.prepare_table("", Schema.from_arrow(known), ())
    output.commit("a", {"": []}, fences(["1"]))
    for columns, text in (
        ([("ID", pa.string())], r"column ID of the rows and column id of the table .* in no more than case: rename it"),
        ([("value", pa.struct([("Sum", pa.int64())]))], r"column value\.Sum of the rows and column value\.sum of the"),
    ):
        with pytest.raises(InvalidInput, match=text):
            output.prepare_table("", Schema.from_arrow(pa.schema(columns)), ())


def test_files_are_vacuumed_also_if_the_clock_was_ahead_at_the_last_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = open_output(tmp_path)
    commit(output, "a", ["1"])
    output.state = msgspec.structs.replace(output.state, vacuumed_ms=output.state.vacuumed_ms + 10 * VACUUM_EVERY_MS)
    vacuumed: list[Sequence[str]] = []

    def vacuum(steps: Any, tables: Sequence[str], commit: Callable[[], int]) -> int:
        commit()
        vacuumed.append(tables)
        return 0

    monkeypatch.setattr(outputs, "vacuum", vacuum)
    for _ in range(2):
        output.maintain()
    assert vacuumed == [(CONSUMED, "")]


def test_partitions_are_read_alike_by_every_reader_also_after_a_compaction(tmp_path: Path) -> None:
    files, schema = LocalFiles(str(tmp_path)), pa.schema([("id", pa.string()), ("day", pa.date32()), ("n", pa.int64())])
    folder, day = table.DeltaFolder(files, "t"), datetime.date(2026, 3, 1)
    folder.create(Schema.from_arrow(schema), partition_by=("day", "n"))
    values = {"a": (day, -5), "b": (None, 7), "c": (day, None), "d": (day, -5)}
    rows = pa.RecordBatch.from_pylist([{"id": id, "day": d, "n": n} for id, (d, n) in values.items()], schema=schema)
    for step in (1, 2):
        writer = TargetWriter(files, Target("t", tuple(schema.names), (), ("day", "n")))
        writer.write(rows)
        folder.commit(step, table.Change(tuple(writer.close())))
    found = folder.snapshot().files
    assert len(found) == 6
    folder.commit(3, compaction.merge_small_files(files, "t", found, folder.snapshot().schema, (), 1))
    assert len(folder.snapshot().files) == 3
    wanted = sorted((id, *value) for id, value in values.items() for _ in range(2))
    assert sorted(polars.read_delta(str(tmp_path / "t")).rows()) == wanted
    by_duckdb = duckdb.from_arrow(DeltaTable(str(tmp_path / "t")).to_pyarrow_dataset()).project("id, day, n")
    assert sorted(by_duckdb.fetchall()) == wanted


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: open_output(path, "mails"), "belongs to queue orders of namespace wp"),
        (lambda path: Lake(str(path)), "has no state of a lake"),
        (lambda path: write(open_output(path), "eu", ["1"], "x"), "would be inside of the output itself"),
        (lambda path: (path / "_waypost" / "log").mkdir(parents=True) or Output(str(path)), "upgrade --output"),
        (lambda path: read_output(None, str(path / "no")), "no output of a consumer"),  # type: ignore[arg-type]
        (lambda path: read_output(None, str(path), "no"), "it has the output itself"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_output_of_this_queue_is_refused(tmp_path: Path, make: Callable[[Path], object], text: str) -> None:
    commit(open_output(tmp_path), "a", ["1"])
    with pytest.raises((ConfigurationError, InvalidInput, StoreError), match=text):
        make(tmp_path)


def test_a_table_that_the_output_does_not_know_is_not_written_to(tmp_path: Path) -> None:
    commit(open_output(tmp_path / "other"), "a", ["1"], ("t",))
    output = open_output(tmp_path / "out")
    (tmp_path / "other" / "t").rename(tmp_path / "out" / "t")
    with pytest.raises(ConfigurationError, match="does not know"):
        commit(output, "b", ["2"], ("t",))
    with pytest.raises(ConfigurationError, match="has files already"):
        open_output(tmp_path)
    Lake(str(tmp_path / "lake")).create()
    with pytest.raises(ConfigurationError, match="is no output of a consumer"):
        commit(open_output(tmp_path / "lake"), "b", ["2"])


@pytest.mark.promise("SPARK-3")
def test_a_table_gains_columns_keeps_types_and_may_be_partitioned_by_dates(spark: SparkSession, tmp_path: Path) -> None:
    output = open_output(tmp_path / "an output")
    day = f.to_date(f.lit("2026-03-01"))
    first = spark.range(2).select(f.col("id").cast("string").alias("id"), f.when(f.col("id") == 0, day).alias("day"))
    made = {"t": output.write(first, "t", "a", ("day",))}
    output.commit("a", {**made, "none": output.write(first.where("id is null"), "none", "a", ())}, fences(["0", "1"]))
    output.maintain()
    assert read_output(spark, f"{tmp_path}/an output", "none").count() == 0
    more = first.withColumn("value", f.struct(f.lit(1.5).alias("total"), f.array(f.lit(1)).alias("parts")))
    output.commit("b", {"t": output.write(more, "t", "b", ("day",))}, fences(["2", "3"]))
    found = {
        (row["id"], row["waypost_batch"]): row for row in read_output(spark, f"{tmp_path}/an output", "t").collect()
    }
    assert found["0", "a"].day == datetime.date(2026, 3, 1)
    assert (found["1", "a"].day, found["1", "a"].value) == (None, None)
    assert (found["0", "b"].day, found["0", "b"].value.parts) == (datetime.date(2026, 3, 1), [1])
    by_duckdb = duckdb.from_arrow(DeltaTable(f"{tmp_path}/an output/t").to_pyarrow_dataset())
    assert by_duckdb.filter("day = DATE '2026-03-01'").aggregate("count(*)").fetchall() == [(2,)]
    for frame, partition_by, text in (
        (first.withColumn("value", f.lit("text")), ("day",), "column value of the table .* is struct, and the rows"),
        (first, (), "is partitioned by day, not by nothing"),
        (first, ("id",), "partition by a date or a whole number"),
        (first, ("no",), "there is no column no to partition by"),
        (first.withColumn("at", f.expr("TIMESTAMP_NTZ'2026-03-01'")), ("day",), "column at has the type timestamp_ntz"),
        (first.withColumn("nothing", f.lit(None)), ("day",), "column nothing has the type void"),
        (first.withColumn("waypost_batch", f.lit(1)), ("day",), "the column waypost_batch is added to every row"),
    ):
        with pytest.raises(InvalidInput, match=text):
            output.write(frame, "t", "c", partition_by)


def test_rows_are_written_by_the_driver_up_to_a_limit_and_a_table_with_more_by_tasks_from_then_on(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, by_tasks = open_output(tmp_path), []

    def write_by_tasks(*given: Any) -> Any:
        by_tasks.append(given)
        return write_frame(*given)

    monkeypatch.setattr("waypost.spark.consumer.output.write_frame", write_by_tasks)
    for count, name, tasks in ((5, "t", 0), (6, "t", 1), (2, "t", 2), (2, "other", 2)):
        made = output.write(spark.range(count).coalesce(1), name, "a", (), driver_rows_max=5)
        assert sum(file.rows for file in made) == count
        assert len(by_tasks) == tasks


class OldOutput:
    """Writes an output as release 0.1 laid it out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0

    def commit(self, batch: str, ids: Sequence[str], settled: Sequence[str] | None, *, moved: bool = True) -> None:
        self.count += 1
        for name in ("", "eu/late"):
            staging = self.path / "_waypost" / "staging" / batch / (name or "_waypost")
            folder = self.path / name / f"waypost_batch={batch}" if moved else staging
            folder.mkdir(parents=True)
            at = pa.array(["2026-03-01T12:00:00"] * len(ids)).cast(pa.timestamp("us"))
            rows = pa.table({"id": list(ids), "at": at})
            if self.count > 1:
                rows = rows.append_column("new", pa.array([[1]] * len(ids)))
            pq.write_table(rows, str(folder / f"part-{batch}.parquet"), use_deprecated_int96_timestamps=True)
            (folder / "_SUCCESS").touch()
        log = self.path / "_waypost" / "log"
        log.mkdir(parents=True, exist_ok=True)
        nonce = base64.b64encode(b"n" * 12).decode()
        record = {
            "format": 1, "batch": batch, "queue": "orders", "namespace": "wp", "tables": ["", "eu/late"],
            "messages": [[name, 7, nonce, None] for name in ids],
        }  # fmt: skip
        (log / f"{self.count:012}.json").write_text(json.dumps(record))
        if settled is not None:
            (log / f"{self.count:012}.settled").write_text(json.dumps({"open": list(settled)}))


@pytest.mark.promise("SPARK-3")
def test_an_output_of_0_1_is_converted_with_what_is_not_settled_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = OldOutput(tmp_path / "out")
    old.commit("a", ["1", "2"], [])
    old.commit("b", ["3", "4"], ["4"])
    old.commit("c", ["5"], None, moved=False)
    # The table in the output itself has another one inside of it, which 0.1 allowed in different batches.
    with pytest.raises(InvalidInput, match="would be inside of the output itself"):
        upgrade_output(str(tmp_path / "out"))
    shutil.rmtree(tmp_path / "out" / "eu")
    shutil.rmtree(tmp_path / "out" / "_waypost" / "staging" / "c" / "eu")
    with pytest.raises(ConfigurationError, match="upgrade --output"):
        open_output(tmp_path / "out")
    with monkeypatch.context() as broken:
        broken.setattr(Output, "commit_converted", lambda *given: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            upgrade_output(str(tmp_path / "out"))
    for _ in range(2):
        assert main(["pipeline", "upgrade", "--output", str(tmp_path / "out")]) == 0
        assert capsys.readouterr().out == f"the output {tmp_path / 'out'} consists of Delta tables\n"
        rows = polars.read_delta(str(tmp_path / "out")).sort("id").to_dicts()
        assert [row["waypost_batch"] for row in rows] == ["a", "a", "b", "b", "c"]
        assert [row["new"] for row in rows] == [None, None, [1], [1], [1]]
        assert {row["at"].isoformat() for row in rows} == {"2026-03-01T12:00:00+00:00"}
    assert not (tmp_path / "out" / "_waypost").exists()
    assert not list((tmp_path / "out").glob("waypost_batch=*"))
    output = open_output(tmp_path / "out")
    assert output.read_before_claim() == {"4", "5"}
    assert output.pending["b"].messages == (Fence("4", 7, b"n" * 12),)
    commit(output, "d", ["6"])
    assert read_by_others(tmp_path / "out") == ["1", "2", "3", "4", "5", "6"]


class OldTable(OldOutput):
    """An output of release 0.1 that is one table."""

    def commit(self, batch: str, ids: Sequence[str], settled: Sequence[str] | None, *, moved: bool = True) -> None:
        super().commit(batch, ids, settled, moved=moved)
        shutil.rmtree(self.path / "eu")


def test_batches_that_0_1_writes_after_the_conversion_are_kept_and_refused(tmp_path: Path) -> None:
    old = OldTable(tmp_path)
    old.commit("a", ["1"], [])
    upgrade_output(str(tmp_path))
    assert Output(str(tmp_path)).steps.newest().state.count('"converted":[]') == 1  # type: ignore[union-attr]
    old.commit("b", ["2"], None)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"batch b\. Stop every consumer of release 0\.1, and move the folder"):
            upgrade_output(str(tmp_path))
        assert (tmp_path / "waypost_batch=b" / "part-b.parquet").exists()
        assert (tmp_path / "_waypost" / "log" / f"{2:012}.json").exists()
    shutil.rmtree(tmp_path / "waypost_batch=b")
    shutil.rmtree(tmp_path / "_waypost")
    upgrade_output(str(tmp_path))
    assert read_by_others(tmp_path) == ["1"]


def test_a_batch_that_0_1_writes_during_the_conversion_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = OldTable(tmp_path)
    old.commit("a", ["1"], [])

    def copy_and_commit(*given: Any) -> Any:
        old.commit("b", ["2"], None)
        return copy_files(*given)

    with monkeypatch.context() as changed:
        changed.setattr(upgrading, "copy_files", copy_and_commit)
        with pytest.raises(StoreError, match=r"batch b\. Stop every consumer of release 0\.1, and convert the output"):
            upgrade_output(str(tmp_path))
    # The next call is killed after its step: a batch that 0.1 writes before the files are deleted is kept too.
    with monkeypatch.context() as changed:
        changed.setattr(upgrading, "_remove_old", lambda *given: old.commit("c", ["3"], None))
        upgrade_output(str(tmp_path))
    with pytest.raises(StoreError, match=r"batch c\. Stop every consumer of release 0\.1, and move the folder"):
        upgrade_output(str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("waypost_batch=*")) == [f"waypost_batch={name}" for name in "abc"]
    assert read_by_others(tmp_path) == ["1", "2"]


def test_a_conversion_that_is_killed_while_it_deletes_the_log_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OldTable(tmp_path).commit("a", ["1"], [])
    remove = LocalFiles.remove

    def killed(files: LocalFiles, name: str) -> None:
        if name == "_waypost":
            for entry in (tmp_path / "_waypost" / "log").glob("*.json"):
                entry.unlink()
            raise Killed
        remove(files, name)

    with monkeypatch.context() as broken:
        broken.setattr(LocalFiles, "remove", killed)
        with pytest.raises(Killed):
            upgrade_output(str(tmp_path))
    with pytest.raises(ConfigurationError, match="upgrade --output"):
        open_output(tmp_path)
    upgrade_output(str(tmp_path))
    commit(open_output(tmp_path), "b", ["2"])
    assert read_by_others(tmp_path) == ["1", "2"]


def test_what_cannot_be_converted_is_refused_by_its_path(tmp_path: Path) -> None:
    old = OldOutput(tmp_path)
    old.commit("a", ["1"], [])
    shutil.rmtree(tmp_path / "eu")
    (tmp_path / "waypost_batch=a" / "day=1").mkdir()
    for name, text in (("day=1/part-2.parquet", "partitioned by a column"), ("part-2.orc", "is not Parquet")):
        (tmp_path / "waypost_batch=a" / name).touch()
        with pytest.raises(InvalidInput, match=text):
            upgrade_output(str(tmp_path))
        (tmp_path / "waypost_batch=a" / name).unlink()
    with pytest.raises(InvalidInput, match="there is no output of a consumer"):
        upgrade_output(str(tmp_path / "none"))
