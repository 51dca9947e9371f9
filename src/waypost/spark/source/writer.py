"""Batch and streaming writes: bulk publish in which nothing is published twice.

A write cannot be undone, so `abort` does nothing: the rows that were published stay, and the next attempt finds
them.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import DataType, StringType, StructType

from waypost import errors
from waypost.client import Waypost
from waypost.client.internals import context_of, run_flow
from waypost.errors import InvalidInput, WaypostError
from waypost.operations.waves import WAVE_CHUNKS, Wave
from waypost.spark.source.bodies import check_body_type
from waypost.spark.source.bulk import RETRY_SECONDS
from waypost.spark.source.diverting import DivertedRows, open_folder
from waypost.spark.source.options import WriteOptions
from waypost.spark.source.partitions import check_machine, machine_of
from waypost.spark.source.publishing import (
    RowIds,
    Rows,
    SentKeys,
    chunks,
    publish_wave,
)
from waypost.spark.source.short_errors import is_permanent, short_errors
from waypost.spark.source.tables import WRITTEN

if TYPE_CHECKING:
    from collections.abc import Iterable

log = logging.getLogger("waypost")

#: Local properties of a task: the query and the batch that it works for.
QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"


#: Counts that a user should see without a log level: rows that are no message of their own.
REPORTED: Final = ("collapsed", "diverted")


@dataclass
class Written(WriterCommitMessage):
    """What one task did: how many messages there were of each status. `duplicate` were there already.

    `collapsed` are rows with the key of another row of the write, `diverted` those that were put aside. A task that is
    refused for good returns that too, instead of raising: Spark would run it again, three times.
    """

    counts: dict[str, int] = field(default_factory=dict)
    #: The class and the text of the error.
    refusal: tuple[str, str] | None = None


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
        text = column.dataType.simpleString()
        # A string may have a collation or a length.
        kind = "string" if isinstance(column.dataType, StringType) else text.partition("<")[0].partition("(")[0]
        if kind not in known or (column.name == "headers" and text != "map<string,string>"):
            wanted = "map<string,string>" if column.name == "headers" else " or ".join(known)
            raise InvalidInput(f"column {column.name} is {text}; it must be {wanted}")
    if "body" not in schema.fieldNames():
        raise InvalidInput('a row to publish needs a column body: select(struct("*").alias("body"))')
    check_body_type(schema["body"].dataType)


def task_attempt() -> int:
    """Return how often this task was begun before."""
    context = TaskContext.get()
    return 0 if context is None else context.attemptNumber()


class _Writer:
    """What both writers do in a task."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_columns(schema)
        self.options = options
        self.body_type: DataType = schema["body"].dataType
        self.machine = machine_of(options.place.open())

    def write_rows(self, batches: Iterator[Any], ids: RowIds, *, is_first: bool = False) -> Written:
        """Publish a partition in a task; return what became of it, also if it was refused for good."""
        with short_errors():
            try:
                return self.publish(batches, ids, is_first=is_first)
            except WaypostError as error:
                if not is_permanent(error):
                    raise
                return Written(refusal=(type(error).__name__, str(error)))

    def publish(self, batches: Iterator[Any], ids: RowIds, *, is_first: bool = False) -> Written:
        """Publish a partition. `is_first`: no earlier attempt can have published any of its rows."""
        check_machine(self.machine)
        options, diverted = self.options, None
        if options.invalid_path is not None:
            name = f"{hashlib.blake2b(ids.write.encode(), digest_size=8).hexdigest()}-{ids.partition:05}"
            diverted = DivertedRows(options.invalid_path, name, options.queue, ids.partition)
        try:
            counts = self._send(Rows(options, ids, self.body_type, diverted), batches, is_first)
        except BaseException:
            if diverted is not None:
                diverted.discard()
            raise
        if diverted is not None:
            diverted.close()
            counts["diverted"] += diverted.count
        return Written({status: count for status, count in counts.items() if count})

    def _send(self, rows: Rows, batches: Iterator[Any], is_first: bool) -> Counter[str]:
        options, sent, counts = self.options, SentKeys(), Counter[str]()
        parts = chunks((draft for batch in batches for draft in rows.drafts(batch)), sent)
        with Waypost(store=options.place.open(), retry_budget=RETRY_SECONDS) as post:
            context = context_of(post)
            while wave := Wave(options.queue, itertools.islice(parts, WAVE_CHUNKS)):
                counts += run_flow(post, publish_wave(context, wave, options.block_seconds, is_first=is_first))
        counts["collapsed"] += sent.collapsed
        return counts

    def finish(self, messages: Sequence[WriterCommitMessage | None], name: str) -> None:
        """Report what a write did, and raise what it was refused for."""
        with short_errors():
            found = [message for message in messages if isinstance(message, Written)]
            counts = sum_counts(found)
            self._report(counts, name)
            refusals = [message.refusal for message in found if message.refusal is not None]
            if refusals:
                raise join_refusals(refusals)

    def _report(self, counts: dict[str, int], name: str) -> None:
        queue = self.options.queue
        sent = ", ".join(f"{count:,} {status}" for status, count in sorted(counts.items())) or "no rows"
        # A warning reaches the user's terminal from the process in which Spark runs this.
        level = logging.WARNING if any(status in counts for status in REPORTED) else logging.INFO
        log.log(level, "wrote to queue %s: %s", queue, sent, extra={"event": "spark_written", **counts})
        if self.options.counts_path is not None:
            try:
                system, root = open_folder("countsPath", self.options.counts_path)
                with system.open_output_stream(f"{root}/{name}.json") as file:
                    file.write(msgspec.json.encode({"queue": queue, "write": name, "counts": counts}))
            except (OSError, pa.ArrowException, WaypostError) as error:
                # The messages are published: a write that fails now would be repeated for nothing.
                log.warning(
                    "the counts of a write to queue %s cannot be written to countsPath: %s", queue, error,
                    extra={"event": "counts_failed"},
                )  # fmt: skip


def sum_counts(written: Iterable[Written]) -> dict[str, int]:
    """Return the counts of all tasks together."""
    total: Counter[str] = Counter()
    for one in written:
        total.update(one.counts)
    return dict(sorted(total.items()))


def join_refusals(refusals: Sequence[tuple[str, str]]) -> WaypostError:
    """Return the refusals of tasks as one error: the first, and how many more there are."""
    name, text = refusals[0]
    kind = getattr(errors, name, InvalidInput)
    more = "" if len(refusals) == 1 else f" ({len(refusals) - 1} more tasks were refused)"
    made: WaypostError = kind(f"{text}{more}")
    return made


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
        is_first = self.options.write_id is None and task_attempt() == 0
        return self.write_rows(iterator, RowIds(self.write_id, partition, self.made_ms), is_first=is_first)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        self.finish(messages, file_name(self.write_id))


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
        return self.write_rows(iterator, RowIds(f"stream:{name}:{batch}", context.partitionId()))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """All tasks of a batch are done."""
        self.finish(messages, f"batch-{batchId:09}")


def file_name(write_id: str) -> str:
    """Return a name of a file for a write, whatever characters its own name has."""
    kind, _, name = write_id.partition(":")
    plain = "".join(one if one.isascii() and (one.isalnum() or one in "-_.") else "_" for one in name)
    return f"{kind}-{plain}"
