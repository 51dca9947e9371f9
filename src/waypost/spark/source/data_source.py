"""`format("waypost")`: which reader and which writer a query gets. Runs wherever Spark plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from waypost.errors import ConfigurationError
from waypost.spark.source.options import read_options, write_options
from waypost.spark.source.short_errors import short_errors

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class WaypostSource(DataSource):
    """Messages, dead letters, schedules and the journal of a waypost store as tables; publishing as a sink."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "waypost"

    def schema(self) -> str:
        """The columns of the kind that is read."""
        with short_errors():
            return read_options(self.options).table.ddl

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        from waypost.spark.source.reader import Reader

        with short_errors():
            return Reader(read_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A streaming read."""
        from waypost.spark.source.stream import StreamReader

        with short_errors():
            return StreamReader(read_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch write."""
        from waypost.spark.source.writer import BatchWriter

        with short_errors():
            _refuse_overwrite(overwrite)
            return BatchWriter(write_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """A streaming write."""
        from waypost.spark.source.writer import StreamWriter

        with short_errors():
            _refuse_overwrite(overwrite)
            return StreamWriter(write_options(self.options), schema)


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise ConfigurationError(
            'a queue cannot be overwritten: write with mode("append"), and purge it if it must be empty'
        )
