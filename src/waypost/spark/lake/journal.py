"""Bronze: the journal as it was written, read between two offsets and written as files of a table.

A small batch is read and written by the driver itself. A large one is split over Spark's tasks: each reads its events
through one connection and writes them with pyarrow, so no row passes through Java. Both count what gold is made of
while they have the events in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from waypost.checks import check_count
from waypost.errors import StoreError
from waypost.policy import LAKE_BATCH_ROWS_MAX
from waypost.spark.delta.parquet import DataFile, FileWriter
from waypost.spark.files import LakeFiles, open_lake_files
from waypost.spark.lake.sums import merge_sums, sum_events
from waypost.spark.lake.tables import BRONZE_JOURNAL
from waypost.spark.source.bulk import Bulk, open_bulk
from waypost.spark.source.credentials import Place
from waypost.spark.source.partitions import EventRange, check_machine, machine_of, split_ranges
from waypost.spark.source.reader import read_events, report_gone

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

#: Events of one batch, by default: it bounds what is repeated after a crash.
BATCH_ROWS: Final = 1_000_000
#: Up to this many events the driver is faster alone.
DRIVER_EVENTS_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class Written:
    """A batch of events: its files, and its sums as an Arrow table."""

    files: tuple[DataFile, ...]
    sums: Any

    @property
    def rows(self) -> int:
        """How many events."""
        return sum(file.rows for file in self.files)


def check_batch_rows(rows: int) -> int:
    """Return the most rows of a batch unchanged; refuse a number with which nothing would ever be loaded."""
    return check_count("batch_rows", rows, 1, LAKE_BATCH_ROWS_MAX)


def plan_ranges(bulk: Bulk, after: Mapping[str, int], to: Mapping[str, int], *, fail: bool = False) -> list[EventRange]:
    """Return what is to be read. Events that were trimmed before are reported: as an error, or in the log."""
    ranges = []
    for queue, end in sorted(to.items()):
        start = after.get(queue, 0)
        if end > start:
            first, _ = bulk.bounds(queue)
            if first > start + 1:
                # A queue that is seen for the first time has no history that could have been missed.
                report_gone(bulk, queue, start, first, fail=fail and queue in after)
                start = min(end, first - 1)
            ranges.append(EventRange(queue, start, end))
    return [numbers for numbers in ranges if numbers.rows > 0]


def check_offsets(offsets: Mapping[str, int], newest: Mapping[str, int]) -> None:
    """Refuse a store whose journal ends before what was read."""
    for queue, number in newest.items():
        if offsets.get(queue, 0) > number:
            raise StoreError(
                f"queue {queue}: the lake has read up to event {offsets[queue]}, and the newest in the journal is "
                f"{number}: this is another store than before, it was restored from a backup, or the queue was removed "
                "long ago. Begin a new lake"
            )


def write_ranges(bulk: Bulk, files: LakeFiles, ranges: Iterable[EventRange]) -> Written:
    """Read events and write them as files of bronze."""
    columns = list(BRONZE_JOURNAL.columns)
    sums = []
    writer = FileWriter(files, BRONZE_JOURNAL.name, BRONZE_JOURNAL.arrow(columns), BRONZE_JOURNAL.statistics)
    with writer:
        for numbers in ranges:
            for batch in read_events(bulk, numbers, columns, fail=False):
                writer.write(batch)
                sums.append(sum_events(pa.Table.from_batches([batch])))
    return Written(tuple(writer.made), merge_sums(sums))


class Part(msgspec.Struct, frozen=True):
    """What one task reads."""

    numbers: tuple[tuple[str, int, int], ...]
    machine: str | None


class JournalSource(DataSource):
    """Events that tasks write as files of bronze; a row says which."""

    @classmethod
    def name(cls) -> str:
        """Internal: reading it writes files."""
        return "waypost-journal"

    def schema(self) -> str:
        """The files of a task as JSON, and its sums in Arrow's stream format."""
        return "files BINARY, sums BINARY"

    def reader(self, schema: StructType) -> DataSourceReader:
        """One part for each task."""
        place = msgspec.json.decode(self.options["place"], type=Place)
        parts = msgspec.json.decode(self.options["parts"], type=list[Part])
        return _JournalReader(place, self.options["root"], parts)


class _JournalReader(DataSourceReader):
    def __init__(self, place: Place, root: str, parts: Sequence[Part]) -> None:
        self.place, self.root, self.parts = place, root, parts

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(part) for part in self.parts]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        part: Part = partition.value
        check_machine(part.machine)
        with open_bulk(self.place) as bulk:
            ranges = [EventRange(queue, after, to) for queue, after, to in part.numbers]
            written = write_ranges(bulk, open_lake_files(self.root), ranges)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, written.sums.schema) as stream:
            stream.write_table(written.sums)
        content = [msgspec.json.encode(written.files)], [sink.getvalue().to_pybytes()]
        yield pa.RecordBatch.from_arrays(
            [pa.array(content[0], pa.binary()), pa.array(content[1], pa.binary())], names=["files", "sums"]
        )


def write_events(
    spark: SparkSession, place: Place, files: LakeFiles, bulk: Bulk, ranges: Sequence[EventRange], partitions: int
) -> Written:
    """Write events as files of bronze: here if they are few, otherwise by Spark's tasks."""
    if sum(numbers.rows for numbers in ranges) <= DRIVER_EVENTS_MAX:
        return write_ranges(bulk, files, ranges)
    machine = machine_of(bulk.store)
    parts = [
        Part(tuple((one.queue, one.after, one.to) for one in part), machine)
        for part in split_ranges(ranges, partitions, max(1, DRIVER_EVENTS_MAX // 2))
    ]
    spark.dataSource.register(JournalSource)
    options = {
        "place": msgspec.json.encode(place).decode(), "root": files.address,
        "parts": msgspec.json.encode(parts).decode(),
    }  # fmt: skip
    rows = spark.read.format(JournalSource.name()).options(**options).load().collect()
    made = [file for row in rows for file in msgspec.json.decode(bytes(row["files"]), type=list[DataFile])]
    sums = [pa.ipc.open_stream(bytes(row["sums"])).read_all() for row in rows]
    return Written(tuple(made), merge_sums(sums))
