"""Batch reads: planned once where the query starts, read by tasks that know nothing of each other."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition

from waypost.errors import JournalTrimmed, StoreError
from waypost.spark.source.bulk import Bulk, open_bulk
from waypost.spark.source.credentials import Place
from waypost.spark.source.options import ReadOptions
from waypost.spark.source.partitions import (
    PARTITION_ROWS_MIN,
    EventRange,
    Partition,
    check_machine,
    machine_of,
    split_ranges,
    split_spans,
)
from waypost.spark.source.short_errors import short_errors
from waypost.spark.source.tables import PUBLISHED
from waypost.store.bulk.columns import batch_of
from waypost.store.bulk.reader import Span
from waypost.values import MessageState

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

log = logging.getLogger("waypost")

#: Columns that the journal knows by another name.
NAMES = {"id": "message_id", "published_ms": "at_ms"}


def chosen_columns(options: ReadOptions, schema: StructType) -> tuple[str, ...]:
    """The columns to read: all of the table, or those that the user's own schema names."""
    return options.table.chosen([(field.name, field.dataType.simpleString()) for field in schema.fields])


def list_queues(bulk: Bulk, options: ReadOptions) -> list[str]:
    """The queues to read."""
    return list(options.queues) if options.queues is not None else bulk.run(bulk.store.queues())


def open_on_machine(place: Place, machine: str | None) -> Bulk:
    """Connect in a task; refused if the store is a file on another machine."""
    check_machine(machine)
    return open_bulk(place)


class Reader(DataSourceReader):
    """A batch read of one kind."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.columns = chosen_columns(options, schema)

    def partitions(self) -> Sequence[InputPartition]:
        """Parts with real boundaries: numbers of the journal, or places of messages as they are now."""
        options = self.options
        with short_errors(), open_bulk(options.place) as bulk:
            machine = machine_of(bulk.store)
            queues = list_queues(bulk, options)
            if options.follows_journal:
                if options.offsets is not None:
                    work = [EventRange(queue, after, to) for queue, (after, to) in sorted(options.offsets.items())]
                else:
                    work = [self._numbers(bulk, queue) for queue in queues]
                return [Partition(numbers=part, machine=machine) for part in split_ranges(work, options.partitions)]
            if options.kind == "schedules":
                return [Partition(queues=queues, machine=machine)] if queues else []
            spans = [span for queue in queues for span in self._spans(bulk, queue)]
            return [Partition(spans=part, machine=machine) for part in split_spans(spans, options.partitions)]

    def _numbers(self, bulk: Bulk, queue: str) -> EventRange:
        first, newest = bulk.bounds(queue)
        start = self.options.start
        if start == "latest":
            first = newest + 1
        elif isinstance(start, int):
            first = bulk.first_since(queue, start)
        return EventRange(queue, first - 1, newest)

    def _spans(self, bulk: Bulk, queue: str) -> list[Span]:
        state = cast("MessageState", self.options.kind)
        waiting = getattr(bulk.run(bulk.store.stats(queue)).ledger, "dead_kept" if state == "dead" else state)
        parts = max(1, min(self.options.partitions, waiting // PARTITION_ROWS_MIN))
        return bulk.spans(queue, state, parts)

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        """The rows of one part. Without any part there is one task, which has nothing to read."""
        if not isinstance(partition, Partition):
            return  # a read without any part still has one task, with a stand-in for it
        part = partition
        with short_errors(), open_on_machine(self.options.place, part.machine) as bulk:
            for numbers in part.numbers:
                # A batch read begins with what is there: what is trimmed while it runs is not missed. A read between
                # offsets must have all of them.
                fail = self.options.offsets is not None and self.options.fail_on_data_loss
                yield from read_range(bulk, numbers, self.options, self.columns, fail_if_trimmed=fail)
            for span in part.spans:
                yield from bulk.messages(span, self.columns)
            for queue in part.queues:
                yield from bulk.schedules(queue, self.columns)


def read_range(
    bulk: Bulk, numbers: EventRange, options: ReadOptions, columns: Sequence[str], *, fail_if_trimmed: bool
) -> Iterator[Any]:
    """Yield the rows of a range of events: the events, or the messages that they published."""
    if options.kind == "journal":
        yield from read_events(bulk, numbers, columns, fail=fail_if_trimmed)
        return
    for batch in read_events(bulk, numbers, journal_columns(columns), fail=fail_if_trimmed):
        yield published_batch(numbers.queue, batch, columns, fail=options.fail_on_data_loss)


def read_events(bulk: Bulk, numbers: EventRange, columns: Sequence[str], *, fail: bool) -> Iterator[Any]:
    """Yield the events of a range and count them: numbers have no gap, so a missing event was trimmed."""
    seen = 0
    for batch in bulk.journal(numbers.queue, numbers.after, numbers.to, columns):
        seen += batch.num_rows
        yield batch
    missing = numbers.rows - seen
    if missing == 0:
        return
    first, _ = bulk.bounds(numbers.queue)
    if missing < 0 or first <= numbers.after + 1:
        # Not trimmed, and yet not as many as there must be: nothing may be made of such a read.
        raise StoreError(
            f"queue {numbers.queue}: events {numbers.after + 1} to {numbers.to} are {numbers.rows}, but {seen} were "
            "read; nothing of this read can be trusted"
        )
    report_gone(bulk, numbers.queue, numbers.after, first, fail=fail)


def report_gone(bulk: Bulk, queue: str, after: int, first: int, *, fail: bool) -> None:
    """Report that the events between `after` and `first` are gone: as an error, or in the log."""
    gone = f"events {after + 1} to {first - 1} are gone"
    if queue in bulk.run(bulk.store.queues()):
        event = "journal_trimmed"
        what = f"queue {queue}: the journal was trimmed past this read: {gone}, and the first that is kept is {first}"
        way_out = "to go on from there; keep more with journal_max, or"
    else:
        event = "queue_removed"
        what = f"queue {queue} was removed, and its journal with it: {gone}"
        way_out = "to go on without them. To keep a queue until all of it is read,"
    if fail:
        raise JournalTrimmed(
            f"{what}. Set the option failOnDataLoss to false {way_out} register the query with the option reader"
        )
    log.warning("%s", what, extra={"event": event, "queue": queue})


def journal_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """What must be read of the journal to give these columns."""
    wanted = dict.fromkeys([*(NAMES.get(name, name) for name in columns), "number", "event", "body"])
    return tuple(wanted)


def published_batch(queue: str, batch: Any, columns: Sequence[str], *, fail: bool) -> Any:
    """The messages among events."""
    batch = batch.filter(pc.equal(batch.column("event"), "published"))
    if fail and batch.column("body").null_count:
        first = pc.min(batch.filter(pc.is_null(batch.column("body"))).column("number")).as_py()
        raise JournalTrimmed(
            f"queue {queue}: event {first} is of a message whose body was not journalled. Set the queue's journal "
            "to full and begin after that event (startingOffsets), or set the option failOnDataLoss to false to get "
            "such messages without their bodies"
        )
    arrays = {name: batch.column(NAMES.get(name, name)) for name in columns}
    return batch_of(PUBLISHED, columns, arrays, batch.num_rows)
