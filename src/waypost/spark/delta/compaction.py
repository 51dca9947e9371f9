"""Compaction of tables to which rows are only added: fewer and larger files with the same rows.

Files are merged with others of about their size, and only when there are many of these. So a row is rewritten a few
times however long the history, and the number of files stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa

from waypost.spark.delta.parquet import FILE_BYTES, DataFile, FileWriter, read_batches
from waypost.spark.delta.table import Change
from waypost.spark.files import LakeFiles, join_path

#: Files of about the same size are merged when there are more of them than this.
FILES_MAX: Final = 32
#: Sizes are about the same if their lengths in bits are in the same range of this many: a factor of 16 at most.
SIZE_BITS: Final = 4


def choose_small_files(files: Iterable[DataFile], more_than: int = FILES_MAX) -> list[list[DataFile]]:
    """Return groups of files to merge: of one partition, of about the same size, and more than this many.

    With `more_than=1` all small files of a partition are one group.
    """
    groups: dict[tuple[tuple[str | None, ...], int], list[DataFile]] = {}
    for file in files:
        if file.size < FILE_BYTES // 2:
            size = file.size.bit_length() // SIZE_BITS if more_than > 1 else 0
            groups.setdefault((tuple(file.partition.values()), size), []).append(file)
    return [group for group in groups.values() if len(group) > more_than]


def merge_small_files(
    files: LakeFiles,
    table: str,
    data: Iterable[DataFile],
    schema: pa.Schema,
    statistics: Sequence[str] = (),
    more_than: int = FILES_MAX,
) -> Change:
    """Write the rows of small files as fewer ones; return the change, which is empty if there are not many."""
    removed: list[DataFile] = []
    added: list[DataFile] = []
    for group in choose_small_files(data, more_than):
        added += concatenate(files, table, group, schema, statistics)
        removed += group
    return Change(tuple(added), tuple(removed), changes_rows=False)


def concatenate(
    files: LakeFiles, table: str, data: Sequence[DataFile], schema: pa.Schema, statistics: Sequence[str] = ()
) -> list[DataFile]:
    """Write the rows of some files of one partition as fewer files, a part at a time."""
    partition = data[0].partition
    written = pa.schema([field for field in schema if field.name not in partition])
    writer = FileWriter(files, table, written, statistics, partition=partition)
    with writer:
        for file in sorted(data, key=lambda one: one.modified_ms):
            for rows in read_batches(files, join_path(table, file.path), written):
                writer.write(rows)
    return writer.made
