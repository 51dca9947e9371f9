"""Bronze: the journal as it was written, followed by a stream and kept batch by batch.

Spark's own checkpoint has the events of a batch; the state of the lake records whether they are in it. A batch that
Spark runs again after a crash is in it already, or is written anew under another name: never twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as f

from waypost.errors import StoreError
from waypost.spark.lake.lake import CHECKPOINT, DATE, Folder, Lake
from waypost.spark.lake.tables import BRONZE_JOURNAL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

#: Events of one batch, by default: it bounds what is repeated after a crash.
BATCH_ROWS = 1_000_000


def journal(spark: SparkSession, options: dict[str, str]) -> DataFrame:
    """The journal as a stream, without bodies."""
    return spark.readStream.format("waypost").schema(BRONZE_JOURNAL.ddl).options(kind="journal", **options).load()


def with_date(events: DataFrame) -> DataFrame:
    """Events with the day on which they happened, in UTC."""
    day = f.date_from_unix_date((f.col("at_ms") / 86_400_000).cast("int"))
    return events.withColumn(DATE, day.cast("string"))


def batch_name(number: int) -> str:
    """The number of a batch so that names sort like numbers."""
    return f"{number:09d}"


class Bronze:
    """Writes the batches of one stream into a lake."""

    def __init__(self, lake: Lake, then: Callable[[Any], None] | None = None) -> None:
        self.lake = lake
        #: What follows each batch, for a stream that stays.
        self._then = then

    def check(self) -> None:
        """Refuse a lake whose stream has forgotten where it was."""
        if self.lake.state.bronze_batch >= 0 and not self.lake.files.exists(CHECKPOINT):
            raise StoreError(
                f"the lake {self.lake.files.root} has batches but its checkpoint ({CHECKPOINT}) is gone: the stream "
                "would begin anew, and every event would be there twice. Restore it, or begin a new lake"
            )

    def write_batch(self, events: DataFrame, batch: int) -> None:
        """One batch of the stream: written, made part of the lake, and passed on."""
        lake = self.lake
        if batch > lake.state.bronze_batch:
            folder = lake.write(events.transform(with_date), BRONZE_JOURNAL, batch_name(batch))
            state = lake.state
            days = [name.removeprefix(f"{DATE}=") for name in lake.files.folders(f"{BRONZE_JOURNAL.name}/{folder}")]
            tables = dict(state.tables)
            if days:
                made = Folder(folder, batch, batch, max(days))
                tables[BRONZE_JOURNAL.name] = (*state.folders(BRONZE_JOURNAL), made)
            lake.commit(msgspec.structs.replace(state, bronze_batch=batch, tables=tables))
        if self._then is not None:
            self._then(events.sparkSession)

    def start(self, spark: SparkSession, options: dict[str, str], *, every_seconds: float | None) -> StreamingQuery:
        """Start the stream: for the events of now, or to poll every `every_seconds`."""
        self.check()
        stream: DataStreamWriter = journal(spark, options).writeStream.foreachBatch(self.write_batch)
        stream = stream.option("checkpointLocation", self.lake.files.uri(CHECKPOINT))
        if every_seconds is None:
            return stream.trigger(availableNow=True).start()
        return stream.trigger(processingTime=f"{every_seconds} seconds").start()


def new_folders(lake: Lake) -> Sequence[Folder]:
    """Return the folders of bronze that are not in silver yet."""
    return [folder for folder in lake.state.folders(BRONZE_JOURNAL) if folder.last > lake.state.silver_batch]
