"""Simulations as tasks of Spark: a data source whose partitions are the work, and whose rows are the results."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


class SimulationSource(DataSource):
    """Scenarios that tasks serve; a row has the outcomes of a task."""

    @classmethod
    def name(cls) -> str:
        """Internal: options are encoded work."""
        return "waypost-simulation"

    def schema(self) -> str:
        """The outcomes of a task as JSON."""
        return "outcomes BINARY"

    def reader(self, schema: StructType) -> DataSourceReader:
        """One partition for each task."""
        return _SimulationReader(msgspec.json.decode(self.options["works"], type=list[str]))


class _SimulationReader(DataSourceReader):
    def __init__(self, works: Sequence[str]) -> None:
        self.works = works

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(work) for work in self.works]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        from waypost.spark.insight.simulate import Work, serve_work

        work = msgspec.json.decode(base64.b64decode(partition.value), type=Work)
        outcomes = msgspec.json.encode(list(serve_work(work)))
        yield pa.RecordBatch.from_arrays([pa.array([outcomes], pa.binary())], names=["outcomes"])


def run_tasks(spark: SparkSession, works: Sequence[bytes]) -> list[bytes]:
    """Run each work as a task and return their results."""
    spark.dataSource.register(SimulationSource)
    encoded = msgspec.json.encode([base64.b64encode(work).decode() for work in works]).decode()
    rows = spark.read.format(SimulationSource.name()).option("works", encoded).load().collect()
    return [bytes(row["outcomes"]) for row in rows]
