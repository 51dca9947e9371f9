"""How Spark finds `format("waypost")`: it imports every module named `pyspark_…` and loads this class.

Every Spark session of every user who has waypost installed imports this, so it imports nothing but pyspark's own
base class; the source itself is loaded when a query uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """The source by its name; everything else is in `waypost.spark.source`."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "waypost"

    def _source(self) -> DataSource:
        from waypost.spark.source.data_source import WaypostSource

        return WaypostSource(self.options)

    def schema(self) -> StructType | str:
        """See `WaypostSource`."""
        return self._source().schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """See `WaypostSource`."""
        return self._source().reader(schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """See `WaypostSource`."""
        return self._source().streamReader(schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """See `WaypostSource`."""
        return self._source().writer(schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """See `WaypostSource`."""
        return self._source().streamWriter(schema, overwrite)
