"""Batch and streaming writes: bulk publish in which nothing is published twice.

A write cannot be undone, so `abort` does nothing: the rows that were published stay, and the next attempt finds
them.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from waypost.client import Waypost
from waypost.client.internals import context_of, run_flow
from waypost.errors import InvalidInput
from waypost.spark.source.bulk import RETRY_SECONDS
from waypost.spark.source.options import WriteOptions
from waypost.spark.source.partitions import check_machine, machine_of
from waypost.spark.source.publishing import WAVE_CHUNKS, RowIds, Rows, chunks, publish_wave, split_wave, wait_for_room
from waypost.spark.source.tables import WRITTEN
from waypost.store.port import Draft

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

log = logging.getLogger("waypost")

#: Local properties of a task: the query and the batch that it works for.
QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass
class Written(WriterCommitMessage):
    """What one task did: how many messages there were of each status. `duplicate` were there already."""

    counts: dict[str, int] = field(default_factory=dict)


def check_columns(schema: StructType) -> None:
    """Refuse a DataFrame that cannot be published, before any task runs."""
    for column in schema.fields:
        known = WRITTEN.get(column.name)
        if known is None:
            raise InvalidInput(
                f"a row to publish has no column {column.name}; it may have {', '.join(WRITTEN)}. Put everything "
                "else into "
                'the body: select(struct("*").alias("body"))'
            )
        kind = column.dataType.simpleString().partition("<")[0].partition("(")[0]
        if kind not in known or (column.name == "headers" and column.dataType.simpleString() != "map<string,string>"):
            wanted = "map<string,string>" if column.name == "headers" else " or ".join(known)
            raise InvalidInput(f"column {column.name} is {column.dataType.simpleString()}; it must be {wanted}")
    if "body" not in schema.fieldNames():
        raise InvalidInput('a row to publish needs a column body: select(struct("*").alias("body"))')


class _Writer:
    """What both writers do in a task."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_columns(schema)
        self.options = options
        self.machine = machine_of(options.place.open())

    def publish(self, batches: Iterator[Any], ids: RowIds) -> Written:
        """Publish a partition."""
        check_machine(self.machine)
        options = self.options
        rows = Rows(options, ids)
        counts: dict[str, int] = {}
        parts = chunks(draft for batch in batches for draft in rows.drafts(batch))
        with Waypost(store=options.place.open(), retry_budget=RETRY_SECONDS) as post:
            wave: list[list[Draft]] = []
            while wave := wave or list(itertools.islice(parts, WAVE_CHUNKS)):
                wanted = sum(map(len, wave))
                room = run_flow(post, wait_for_room(context_of(post), options.queue, wanted, options.block_seconds))
                fitting, wave = split_wave(wave, room)
                sent, refused = run_flow(post, publish_wave(context_of(post), options.queue, fitting))
                wave = refused + wave
                for status, count in sent.items():
                    counts[status] = counts.get(status, 0) + count
        return Written(counts)

    def log_counts(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Log what a write did."""
        total: dict[str, int] = {}
        for message in messages:
            if isinstance(message, Written):
                for status, count in message.counts.items():
                    total[status] = total.get(status, 0) + count
        sent = ", ".join(f"{count:,} {status}" for status, count in sorted(total.items())) or "no rows"
        log.info("wrote to queue %s: %s", self.options.queue, sent, extra={"event": "spark_written", **total})


class BatchWriter(_Writer, DataSourceArrowWriter):
    """A batch write. Planned once, so that all attempts of all its tasks share what names it."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self.made_ms = None if options.write_id else time.time_ns() // 1_000_000
        self.write_id = f"write:{options.write_id}" if options.write_id else f"once:{os.urandom(16).hex()}"

    def write(self, iterator: Iterator[Any]) -> Written:
        """Publish one partition, in a task."""
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        return self.publish(iterator, RowIds(self.write_id, partition, self.made_ms))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        self.log_counts(messages)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """A streaming write. A batch is named by its query and its number, which a restart keeps."""

    def write(self, iterator: Iterator[Any]) -> Written:
        """Publish one partition of one batch, in a task."""
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(QUERY_ID)
        batch = None if context is None else context.getLocalProperty(BATCH_ID)
        if context is None or query is None or batch is None:
            raise InvalidInput("a streaming write needs to know its query and batch, and this task has neither")
        name = self.options.write_id or query
        return self.publish(iterator, RowIds(f"stream:{name}:{batch}", context.partitionId()))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """All tasks of a batch are done."""
        self.log_counts(messages)
