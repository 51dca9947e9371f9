"""Spark's tasks write and read data files of Delta tables with pyarrow: also where Spark itself cannot reach them.

A write to several tables routes each row by the column `_to`, and by the columns that a table is partitioned by to a
file of its own. It leaves a manifest of its files below the lake: Spark gives a commit to a process of its own, so the
files come back to the driver through the storage. What a manifest names is in no table until a step is committed. Files
of tasks that failed are in no manifest.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

from waypost.errors import StoreError
from waypost.spark.delta.parquet import MANIFESTS, Bounds, DataFile, FileWriter, read_batches
from waypost.spark.files import LakeFiles, join_path, open_lake_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

#: The column that names the table of a row.
TO: Final = "_to"
#: About how many bytes of files one task reads.
TASK_BYTES: Final = 64 * 1024 * 1024


class Target(msgspec.Struct, frozen=True):
    """A table that rows are written to: its columns, those with statistics, and those it is partitioned by."""

    table: str
    columns: tuple[str, ...]
    statistics: tuple[str, ...] = ()
    partition_by: tuple[str, ...] = ()


@dataclass
class WrittenFiles(WriterCommitMessage):
    """What one task wrote: JSON of the files of each table."""

    files: bytes = b"{}"


class TargetWriter:
    """Writes rows as files of one table, those of each partition apart."""

    def __init__(self, files: LakeFiles, target: Target) -> None:
        self._files, self._target = files, target
        self._writers: dict[tuple[str | None, ...], FileWriter] = {}

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows."""
        target = self._target
        for values, part in _split(rows, target.partition_by):
            if values not in self._writers:
                names = [name for name in target.columns if name not in target.partition_by]
                schema = pa.schema([rows.schema.field(name) for name in names])
                partition = dict(zip(target.partition_by, values, strict=True))
                self._writers[values] = FileWriter(
                    self._files, target.table, schema, target.statistics, partition=partition
                )
            self._writers[values].write(part)

    def close(self) -> list[DataFile]:
        """Write what is left; return the files, which are on disk now."""
        return [file for writer in self._writers.values() for file in writer.close()]


class FilesSource(DataSource):
    """Data files below a lake, written or read by tasks."""

    @classmethod
    def name(cls) -> str:
        """Internal: `write_frame` and `read_frame` use it."""
        return "waypost-files"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Read a list of files."""
        bounds = msgspec.json.decode(self.options.get("bounds", "null"), type=Bounds | None)
        return _FilesReader(self.options["root"], msgspec.json.decode(self.options["files"]), schema, bounds)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Write new files."""
        targets = msgspec.json.decode(self.options["targets"], type=dict[str, Target])
        return _FilesWriter(self.options["root"], self.options["manifest"], targets)


class _FilesWriter(DataSourceArrowWriter):
    def __init__(self, root: str, manifest: str, targets: Mapping[str, Target]) -> None:
        self.root, self.manifest, self.targets = root, manifest, dict(targets)

    def write(self, iterator: Iterator[Any]) -> WrittenFiles:
        files = open_lake_files(self.root)
        writers: dict[str, TargetWriter] = {}
        for batch in iterator:
            for name, rows in self._route(batch):
                if name not in writers:
                    writers[name] = TargetWriter(files, self.targets[name])
                writers[name].write(rows)
        return WrittenFiles(msgspec.json.encode({name: writer.close() for name, writer in writers.items()}))

    def _route(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if len(self.targets) == 1:
            yield next(iter(self.targets)), batch
            return
        for name in pc.unique(batch.column(TO)).to_pylist():
            yield name, batch.filter(pc.equal(batch.column(TO), name))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave a manifest for the driver."""
        made: dict[str, list[DataFile]] = {}
        for message in messages:
            if isinstance(message, WrittenFiles):
                for name, data in _decode_manifest(message.files).items():
                    made.setdefault(name, []).extend(data)
        open_lake_files(self.root).replace(self.manifest, msgspec.json.encode(made))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: files that no step names are removed by a vacuum."""


def _split(rows: pa.RecordBatch, columns: Sequence[str]) -> Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]:
    """Yield rows with equal values of some columns, and these values as text."""
    if not columns:
        yield (), rows
        return
    # Dates and whole numbers: as text they are what a Delta log and a folder's name have.
    texts = [rows.column(name).cast(pa.string()) for name in columns]
    found = pa.table(texts, names=list(columns)).group_by(list(columns)).aggregate([])
    for row in found.to_pylist():
        chosen = None
        for name, text in zip(columns, texts, strict=True):
            value = row[name]
            equal = pc.is_null(text) if value is None else pc.fill_null(pc.equal(text, value), False)
            chosen = equal if chosen is None else pc.and_(chosen, equal)
        yield tuple(row[name] for name in columns), rows.filter(chosen)


def _decode_manifest(content: bytes) -> dict[str, list[DataFile]]:
    return msgspec.json.decode(content, type=dict[str, list[DataFile]])


def write_frame(frame: DataFrame, files: LakeFiles, targets: Mapping[str, Target]) -> dict[str, list[DataFile]]:
    """Write rows to the tables that their column `_to` names; return the new files of each."""
    frame.sparkSession.dataSource.register(FilesSource)
    manifest = f"{MANIFESTS}/{uuid.uuid4().hex}.json"
    options = {
        "root": files.address, "manifest": manifest, "targets": msgspec.json.encode(dict(targets)).decode(),
    }  # fmt: skip
    frame.write.format(FilesSource.name()).options(**options).mode("append").save()
    content = files.read(manifest)
    if content is None:
        raise StoreError(f"{files.path(manifest)} is gone, which names the files that were written: start again")
    files.remove_file(manifest)
    return _decode_manifest(content)


@dataclass
class _Group(InputPartition):
    files: tuple[tuple[str, dict[str, str | None]], ...] = field(default_factory=tuple)


class _FilesReader(DataSourceReader):
    def __init__(self, root: str, data: Sequence[Sequence[Any]], schema: StructType, bounds: Bounds | None) -> None:
        self.root, self.data, self.schema, self.bounds = root, data, schema, bounds

    def partitions(self) -> Sequence[InputPartition]:
        groups: list[list[tuple[str, dict[str, str | None]]]] = []
        room = 0
        for path, size, partition in self.data:
            if room < size or not groups:
                groups.append([])
                room = TASK_BYTES
            groups[-1].append((path, partition))
            room -= size
        return [_Group(tuple(group)) for group in groups]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        from pyspark.sql.pandas.types import to_arrow_schema

        if not isinstance(partition, _Group):
            return
        schema = to_arrow_schema(self.schema, timezone="UTC")
        files = open_lake_files(self.root)
        for path, constants in partition.files:
            yield from read_batches(files, path, schema, constants, self.bounds)


def read_frame(
    spark: SparkSession,
    files: LakeFiles,
    table: str,
    data: Sequence[DataFile],
    schema: str | StructType,
    *,
    with_partition: bool = False,
    bounds: Bounds | None = None,
) -> DataFrame:
    """Return rows of data files: by Spark's own Parquet reader where it reaches them, otherwise by tasks of ours.

    A schema has no column that the table is partitioned by, unless `with_partition` is true. With `bounds` only
    rows within them are returned; groups of rows without any are not read.
    """
    if not data:
        return spark.createDataFrame([], schema)
    if files.is_read_by_spark and not with_partition:
        # A path is a path, also with characters that are patterns to Spark; and its parts are no columns.
        reader = spark.read.schema(schema).options(recursiveFileLookup="true", __globPaths__="false")
        with _listing_on_the_driver(spark):
            found = reader.parquet(*(files.uri(join_path(table, file.path)) for file in data))
        return found if bounds is None else found.where(found[bounds[0]].between(*bounds[1:]))
    spark.dataSource.register(FilesSource)
    listed = [(join_path(table, file.path), file.size, file.partition if with_partition else {}) for file in data]
    source = spark.read.format(FilesSource.name()).schema(schema).options(bounds=msgspec.json.encode(bounds).decode())
    return source.options(root=files.address, files=msgspec.json.encode(listed).decode()).load()


class _listing_on_the_driver:  # noqa: N801
    """Within this, Spark looks up many paths by itself: a query for it takes fifteen times as long."""

    NAME: Final = "spark.sql.sources.parallelPartitionDiscovery.threshold"

    def __init__(self, spark: SparkSession) -> None:
        self._conf = spark.conf

    def __enter__(self) -> None:
        self._before = self._conf.get(self.NAME)
        self._conf.set(self.NAME, "1000000")

    def __exit__(self, *error: object) -> None:
        self._conf.set(self.NAME, str(self._before))
