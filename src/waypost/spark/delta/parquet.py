"""Data files: Parquet, cut by size, each with a name of its own and exact statistics, on disk before it is committed.

A reader skips a file by its statistics, so those that are given must be exact: the number of rows always, and the
smallest and largest value of some columns. Text is never cut.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from waypost.spark.files import LakeFiles, join_path

#: A file ends when it has this size; the next row begins another one.
FILE_BYTES: Final = 128 * 1024 * 1024
#: Rows that are compressed together. A reader that searches an id reads the groups that may have it.
GROUP_ROWS: Final = 65_536
#: Where Spark's tasks leave lists of the files that they wrote, until the driver has read them.
MANIFESTS: Final = "_manifests"
#: A column of text, and the smallest and largest value of it that is wanted.
Bounds = tuple[str, str, str]
#: The folder of rows whose column of the partition is null; readers expect this name.
NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"


class DataFile(msgspec.Struct, frozen=True):
    """A file of a table: its path below the table, its size, and what is known of its rows."""

    path: str
    size: int
    rows: int
    modified_ms: int
    #: The value of each column that the table is partitioned by.
    partition: dict[str, str | None] = msgspec.field(default_factory=dict)
    #: Smallest and largest value by column; a column without any value is in neither.
    lowest: dict[str, Any] = msgspec.field(default_factory=dict)
    highest: dict[str, Any] = msgspec.field(default_factory=dict)
    nulls: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def statistics(self) -> str:
        """The statistics as a Delta log has them."""
        return json.dumps(
            {"numRecords": self.rows, "minValues": self.lowest, "maxValues": self.highest, "nullCount": self.nulls}
        )

    def may_hold(self, column: str, low: Any, high: Any) -> bool:
        """Return whether a row may have a value from `low` to `high` in a column."""
        if column not in self.nulls:
            return True
        lowest, highest = self.lowest.get(column), self.highest.get(column)
        return lowest is not None and highest is not None and bool(lowest <= high and highest >= low)


class FileWriter:
    """Writes rows as files of one table, or of one partition of it. No file has the name of another."""

    def __init__(
        self,
        files: LakeFiles,
        table: str,
        schema: pa.Schema,
        statistics: Sequence[str] = (),
        *,
        partition: Mapping[str, str | None] | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.made: list[DataFile] = []
        self._files, self._table, self._schema = files, table, schema
        self._columns = tuple(name for name in statistics if name in schema.names)
        self._partition: dict[str, str | None] = dict(partition or {})
        self._file_bytes = file_bytes
        self._folder = "".join(
            f"{name}={NULL_FOLDER if value is None else value}/" for name, value in self._partition.items()
        )
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self._sink: Any = None
        self._writer: pq.ParquetWriter | None = None
        self._start("")

    def _start(self, path: str) -> None:
        self._path, self._rows = path, 0
        self._lowest: dict[str, Any] = {}
        self._highest: dict[str, Any] = {}
        self._nulls = dict.fromkeys(self._columns, 0)

    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Add rows; their columns may be in any order, and further columns are left out."""
        table = pa.table(rows) if isinstance(rows, pa.RecordBatch) else rows
        table = table.select(self._schema.names).cast(self._schema)
        if table.num_rows:
            self._waiting.append(table)
            self._waiting_rows += table.num_rows
        while self._waiting_rows >= GROUP_ROWS:
            whole = pa.concat_tables(self._waiting)
            self._write_group(whole.slice(0, GROUP_ROWS))
            rest = whole.slice(GROUP_ROWS)
            self._waiting, self._waiting_rows = [rest], rest.num_rows

    def _write_group(self, rows: pa.Table) -> None:
        if self._writer is None:
            self._start(f"{self._folder}part-{uuid.uuid4().hex}.parquet")
            self._sink = self._files.open_output(join_path(self._table, self._path))
            self._writer = pq.ParquetWriter(
                self._sink, self._schema, compression="zstd", compression_level=1, store_schema=False
            )
        self._writer.write_table(rows, row_group_size=GROUP_ROWS)
        self._rows += rows.num_rows
        for name in self._columns:
            column = rows.column(name)
            self._nulls[name] += column.null_count
            found = pc.min_max(column).as_py()
            if found["min"] is not None:
                self._lowest[name] = min(found["min"], self._lowest.get(name, found["min"]))
                self._highest[name] = max(found["max"], self._highest.get(name, found["max"]))
        if self._sink.tell() >= self._file_bytes:
            self._finish_file()

    def _finish_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        size = int(self._sink.tell())
        self._files.close_output(self._sink)
        now = time.time_ns() // 1_000_000
        made = DataFile(
            self._path, size, self._rows, now, self._partition, self._lowest, self._highest, self._nulls
        )  # fmt: skip
        self.made.append(made)

    def close(self) -> list[DataFile]:
        """Write what is left; return the files, which are on disk now."""
        if self._waiting_rows:
            self._write_group(pa.concat_tables(self._waiting))
            self._waiting, self._waiting_rows = [], 0
        self._finish_file()
        if self.made:
            self._files.sync_folder(join_path(self._table, self._folder.rstrip("/")))
        return self.made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._writer is not None:
            # In no table: removed by a later vacuum.
            self._writer.close()
            self._sink.close()
            self._writer = None


def write_rows(
    files: LakeFiles,
    table: str,
    rows: pa.Table,
    statistics: Sequence[str] = (),
    partition: Mapping[str, str | None] | None = None,
) -> list[DataFile]:
    """Write an Arrow table as files of a table; none if it has no rows."""
    writer = FileWriter(files, table, rows.schema, statistics, partition=partition)
    with writer:
        writer.write(rows)
    return writer.made


def describe_file(
    files: LakeFiles, table: str, path: str, statistics: Sequence[str], partition: Mapping[str, str]
) -> DataFile:
    """Return what is known of a file that another program wrote; its columns of statistics are read."""
    system = files.arrow_system()
    name = files.path(join_path(table, path))
    info = system.get_file_info(name)
    with system.open_input_file(name) as source:
        file = pq.ParquetFile(source)
        columns = [column for column in statistics if column in file.schema_arrow.names]
        rows = file.read(columns=columns)
        count = file.metadata.num_rows
    lowest, highest, nulls = {}, {}, {}
    for column in statistics:
        if column not in columns:
            nulls[column] = count
            continue
        nulls[column] = rows.column(column).null_count
        found = pc.min_max(rows.column(column)).as_py()
        if found["min"] is not None:
            lowest[column], highest[column] = found["min"], found["max"]
    return DataFile(path, info.size, count, time.time_ns() // 1_000_000, dict(partition), lowest, highest, nulls)


def read_rows(
    files: LakeFiles,
    table: str,
    data: Iterable[DataFile],
    schema: pa.Schema,
    columns: Sequence[str] | None = None,
    filter: Any = None,
) -> pa.Table:
    """Read data files as one Arrow table; a column that a file does not have is null there."""
    import pyarrow.dataset as ds

    wanted = list(schema.names if columns is None else columns)
    paths = [files.path(join_path(table, file.path)) for file in data]
    if not paths:
        return pa.schema([schema.field(name) for name in wanted]).empty_table()
    rows = ds.dataset(paths, schema=schema, format="parquet", filesystem=files.arrow_system(), partitioning=None)
    return rows.to_table(columns=wanted, filter=filter)


def read_batches(
    files: LakeFiles,
    path: str,
    schema: pa.Schema,
    constants: Mapping[str, str | None] | None = None,
    bounds: Bounds | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one file; a column that it lacks is null, or the same for all rows if a constant is given.

    With `bounds` only rows within them; groups of rows without any are not read.
    """
    given = constants or {}
    with files.arrow_system().open_input_file(files.path(path)) as source:
        file = pq.ParquetFile(source)
        known = {name for name in file.schema_arrow.names if name not in given}
        groups = _groups_within(file, bounds)
        wanted = [name for name in schema.names if name in known]
        for batch in file.iter_batches(row_groups=groups, columns=wanted) if groups else ():
            columns = []
            for kind in schema:
                if kind.name in known:
                    columns.append(batch.column(kind.name).cast(kind.type))
                elif (text := given.get(kind.name)) is not None:
                    columns.append(pa.repeat(pa.scalar(text).cast(kind.type), batch.num_rows))
                else:
                    columns.append(pa.nulls(batch.num_rows, kind.type))
            yield _within(pa.RecordBatch.from_arrays(columns, schema=schema), bounds)


def _groups_within(file: pq.ParquetFile, bounds: Bounds | None) -> list[int]:
    """Return the groups of rows that may have a value within the bounds."""
    groups = list(range(file.num_row_groups))
    places = {file.schema.column(place).path: place for place in range(len(file.schema))}
    if bounds is None or bounds[0] not in places:
        return groups
    column, low, high = bounds
    place = places[column]
    found = []
    for number in groups:
        known = file.metadata.row_group(number).column(place).statistics
        if known is None or not known.has_min_max or (known.min <= high and known.max >= low):
            found.append(number)
    return found


def _within(rows: pa.RecordBatch, bounds: Bounds | None) -> pa.RecordBatch:
    if bounds is None:
        return rows
    values = rows.column(bounds[0])
    return rows.filter(pc.and_(pc.greater_equal(values, bounds[1]), pc.less_equal(values, bounds[2])))
