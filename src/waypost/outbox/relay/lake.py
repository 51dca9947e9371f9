"""The lake as a target: a folder of Parquet files, one for each batch and day, that Spark and others read as one table.

    DIR/date=2026-11-15/0NQ…-0NQ…-500-5f0c….parquet

A file is written under a name that readers skip, synced to disk and renamed; only then is its batch confirmed. So a
reader sees a complete file or none, and settled messages survive a crash. The day is that of the publish, in UTC, and
the file is named by the ids in it: a batch that is sent again replaces its first file. A message that comes again in
another batch, after a worker died between the file and the settle, is searched in the files of its day whose names
span its id, and not written twice. Duplicates remain possible if two workers hold a message at the same time (an
expired lease), or if files were moved meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waypost.errors import ConfigurationError, MissingExtra
from waypost.outbox.relay.target import Confirmation, RelayRecord, Unconfirmed

#: The longest wait for a write before it counts as failed.
WRITE_SECONDS = 60.0
#: Unfinished files older than this were left by a worker that died.
LEFT_SECONDS = 3600.0
COMPRESSIONS = ("zstd", "snappy", "gzip", "none")
#: Readers skip names that begin with a dot.
UNFINISHED = ".waypost-"
#: Parts of a file name, separated by dashes.
PARTS = 4


def columns() -> Any:
    """Return the Arrow schema of every file."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("queue", pa.string(), nullable=False),
            pa.field("id", pa.string(), nullable=False),
            pa.field("published_ms", pa.int64(), nullable=False),
            pa.field("published_at", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("key", pa.string()),
            pa.field("group", pa.string()),
            pa.field("priority", pa.int32(), nullable=False),
            pa.field("content_type", pa.string(), nullable=False),
            pa.field("type_name", pa.string()),
            pa.field("correlation_id", pa.string()),
            pa.field("reply_to", pa.string()),
            pa.field("headers", pa.map_(pa.string(), pa.string()), nullable=False),
            pa.field("body", pa.binary(), nullable=False),
        ]
    )


class LakeTarget:
    """An existing folder. A missing one may be an unmounted disk, so the relay waits for it and does not create it."""

    def __init__(self, folder: str | Path, *, compression: str = "zstd") -> None:
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise MissingExtra(
                'a relay to the lake writes Parquet with pyarrow, which is not installed: pip install "waypost[spark]"'
            ) from None
        if compression not in COMPRESSIONS:
            raise ConfigurationError(f"compression is one of {', '.join(COMPRESSIONS)}, not {compression!r}")
        self.folder = Path(folder)
        if not self.folder.is_absolute():
            raise ConfigurationError("give the absolute path of the folder, as in lake:///data/orders")
        self.compression = compression
        self.description = f"folder {self.folder}"

    async def open(self) -> None:
        """Check that the folder exists, and delete unfinished files of dead workers."""
        await asyncio.wait_for(asyncio.to_thread(self._prepare_folder), WRITE_SECONDS)

    def _prepare_folder(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(f"there is no folder {self.folder}, and the relay does not create it")
        for left in self.folder.glob(f"*/{UNFINISHED}*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > LEFT_SECONDS:
                    left.unlink()

    async def send(self, records: Sequence[RelayRecord]) -> list[Confirmation]:
        """Write a batch, one file per day; messages of a file that cannot be written are not confirmed."""
        by_day: dict[str, list[int]] = {}
        for index, record in enumerate(records):
            day = record.published_at.strftime("%Y-%m-%d")
            by_day.setdefault(day, []).append(index)
        confirmations: list[Confirmation] = [None] * len(records)
        for day, indexes in by_day.items():
            # After a timeout the thread continues to write; its file has a unique name.
            writing = asyncio.to_thread(self._write, day, [records[index] for index in indexes])
            try:
                await asyncio.wait_for(writing, WRITE_SECONDS)
            except Exception as error:
                lost = Unconfirmed(f"{type(error).__name__}: {error}")
                for index in indexes:
                    confirmations[index] = lost
        return confirmations

    async def close(self) -> None:
        """Do nothing: no file stays open between batches."""

    def _write(self, day: str, records: Sequence[RelayRecord]) -> None:
        import pyarrow.parquet as parquet

        folder = self.folder / f"date={day}"
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            _fsync_folder(self.folder)
        records = _without_written(folder, records)
        if not records:
            return
        unfinished = folder / f"{UNFINISHED}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with unfinished.open("xb") as file:
                parquet.write_table(_table(records), file, compression=self.compression, write_statistics=True)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(folder / file_name(records))
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        _fsync_folder(folder)


def file_name(records: Sequence[RelayRecord]) -> str:
    """Return the name of a file: the first and the last id, the count, and a hash of all ids."""
    ids = [record.id for record in records]
    # Two queues may write to one folder, and the same id may be another message there.
    mark = hashlib.sha256("\n".join([records[0].queue, *sorted(ids)]).encode()).hexdigest()
    return f"{min(ids)}-{max(ids)}-{len(ids)}-{mark[:16]}.parquet"


def _without_written(folder: Path, records: Sequence[RelayRecord]) -> Sequence[RelayRecord]:
    """Return the records that are in no file yet. Only messages claimed before can be; the same batch is rewritten."""
    again = [record.id for record in records if record.again]
    if not again or (folder / file_name(records)).exists():
        return records
    import pyarrow as pa
    import pyarrow.parquet as parquet

    first, last, found = min(again), max(again), set[str]()
    for file in folder.glob("*.parquet"):
        parts = file.name.split("-")
        if len(parts) != PARTS or (parts[0] <= last and parts[1] >= first):
            # Other queues and writers may have files here too; a file that is not ours has none of our messages.
            with contextlib.suppress(pa.ArrowException, KeyError, OSError):
                found.update(parquet.ParquetFile(file).read(columns=["id"])["id"].to_pylist())
    return [record for record in records if not (record.again and record.id in found)]


def _fsync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _table(records: Sequence[RelayRecord]) -> Any:
    import pyarrow as pa

    return pa.table(
        [
            pa.array([record.queue for record in records], pa.string()),
            pa.array([record.id for record in records], pa.string()),
            pa.array([record._published_ms for record in records], pa.int64()),
            pa.array([record._published_ms * 1000 for record in records], pa.timestamp("us", tz="UTC")),
            pa.array([record.key if record.key is not None else record.own_key for record in records], pa.string()),
            pa.array([record.group for record in records], pa.string()),
            pa.array([record.priority for record in records], pa.int32()),
            pa.array([record.content_type for record in records], pa.string()),
            pa.array([record.type_name for record in records], pa.string()),
            pa.array([record.correlation_id for record in records], pa.string()),
            pa.array([record.reply_to for record in records], pa.string()),
            pa.array([sorted(record.headers.items()) for record in records], pa.map_(pa.string(), pa.string())),
            pa.array([record.body for record in records], pa.binary()),
        ],
        schema=columns(),
    )
