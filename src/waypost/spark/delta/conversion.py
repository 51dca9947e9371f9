"""Parquet files that Spark wrote before tables were Delta tables: their rows are copied into files of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from waypost.spark.delta.parquet import DataFile, FileWriter
from waypost.spark.files import LakeFiles


def unify_schemas(files: LakeFiles, paths: Iterable[str]) -> pa.Schema:
    """Return all columns of some files. Every column may be null, and times are in UTC.

    Raises `pa.ArrowException` if a column has different types.
    """
    schemas = []
    for path in paths:
        with _open(files, path) as file:
            schemas.append(pa.schema([pa.field(kind.name, _normalize(kind.type)) for kind in file.schema_arrow]))
    return pa.unify_schemas(schemas) if schemas else pa.schema([])


def _open(files: LakeFiles, path: str) -> Any:
    return pq.ParquetFile(files.arrow_system().open_input_file(files.path(path)), coerce_int96_timestamp_unit="us")


def _normalize(kind: Any) -> Any:
    """Return a type with the times that a Delta table has: Spark's older format of times has no zone, and is UTC."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC")
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, _normalize(one.type)) for one in kind])
    if pa.types.is_map(kind):
        return pa.map_(_normalize(kind.key_type), _normalize(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_normalize(kind.value_type))
    return kind


def copy_files(
    files: LakeFiles,
    table: str,
    data: Iterable[tuple[str, Mapping[str, str]]],
    schema: pa.Schema,
    statistics: Sequence[str] = (),
) -> list[DataFile]:
    """Copy rows of old files into new ones of a table, each with some further columns that are the same for a file."""
    writer = FileWriter(files, table, schema, statistics)
    with writer:
        for path, constants in data:
            with _open(files, path) as file:
                for rows in file.iter_batches():
                    known = {name: rows.column(name) for name in rows.schema.names}
                    known |= {name: pa.repeat(pa.scalar(text), rows.num_rows) for name, text in constants.items()}
                    columns = [
                        known[kind.name].cast(kind.type) if kind.name in known else pa.nulls(rows.num_rows, kind.type)
                        for kind in schema
                    ]
                    writer.write(pa.RecordBatch.from_arrays(columns, schema=schema))
    return writer.made
