"""Rows that cannot be published, put aside as Parquet: their columns, the reason, and where they were in the write.

A task has one file, named by the write and the partition, so that another attempt of the task replaces it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.fs as arrow_fs
import pyarrow.parquet as pq

from waypost.errors import ConfigurationError
from waypost.urls import holds_secret, redact_text, redact_url

#: What a row has beside its own columns.
ABOUT: Final = (("queue", pa.string()), ("partition", pa.int32()), ("row", pa.int64()), ("reason", pa.string()))


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that cannot be published: its place in its batch, its place in the partition, and the reason."""

    place: int
    row: int
    reason: str


def check_folder(option: str, path: str) -> str:
    """Refuse a path with keys in it: options are part of Spark's plans and logs."""
    if "://" in path and ("@" in path or holds_secret(path)):
        raise ConfigurationError(
            f"{option} is {redact_url(path)}, with its keys, and options are shown in Spark's plans and logs: leave "
            "them out, and set them in the environment of the executors (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        )
    return path


def open_folder(option: str, path: str) -> tuple[Any, str]:
    """Return the file system of a folder, and the folder's path on it; the folder is made if need be."""
    try:
        system, root = (
            arrow_fs.FileSystem.from_uri(path)
            if "://" in path
            else (arrow_fs.LocalFileSystem(), os.path.abspath(path.removeprefix("file:")))
        )
        system.create_dir(root, recursive=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = redact_text(str(error), path)
        raise ConfigurationError(f"{option}: {redact_url(path)} cannot be opened: {reason}") from None
    return system, root.rstrip("/")


class Aside(Protocol):
    """Where rows go that cannot be published."""

    def add(self, batch: Any, refused: Sequence[Refused]) -> None:
        """Put rows of a batch aside."""
        ...


class DivertedRows:
    """The rows of one partition that were put aside."""

    def __init__(self, folder: str, name: str, queue: str, partition: int) -> None:
        self.count = 0
        self._folder, self._queue, self._partition = folder, queue, partition
        self._name = name
        self._system: Any = None
        self._writer: Any = None
        self._path = self._temporary = ""

    def add(self, batch: Any, refused: Sequence[Refused]) -> None:
        """Put some rows of a record batch aside."""
        rows = batch.take(pa.array([one.place for one in refused], pa.int64()))
        added = [
            [self._queue] * len(refused),
            [self._partition] * len(refused),
            [one.row for one in refused],
            [one.reason for one in refused],
        ]
        for (name, kind), values in zip(ABOUT, added, strict=True):
            rows = rows.append_column(name, pa.array(values, kind))
        if self._writer is None:
            self._open(rows.schema)
        self._writer.write_batch(rows)
        self.count += len(refused)

    def _open(self, schema: Any) -> None:
        self._system, root = open_folder("invalidPath", self._folder)
        self._path = f"{root}/{self._name}.parquet"
        # On a disk a file appears whole by its renaming. On an object store it appears when it is closed.
        is_disk = isinstance(self._system, arrow_fs.LocalFileSystem)
        self._temporary = f"{root}/.{self._name}-{os.urandom(4).hex()}.tmp" if is_disk else self._path
        self._writer = pq.ParquetWriter(self._temporary, schema, filesystem=self._system)

    def close(self) -> None:
        """Make the file visible, if there is one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            if self._temporary != self._path:
                self._system.move(self._temporary, self._path)

    def discard(self) -> None:
        """Remove the file of a task that failed. Its next attempt writes another."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._system.delete_file(self._temporary)
