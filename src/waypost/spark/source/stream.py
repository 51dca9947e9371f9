"""The journal as a stream: offsets are numbers of events, so a batch is the same rows however often it is read.

An offset is `{"orders": 120, "mails": 7}`: by queue, the number of the last event that was read. Numbers have no gap on
any store, so a limit is arithmetic and not a scan, and a missing event is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from waypost.errors import ConfigurationError, StoreError
from waypost.spark.source.bulk import Bulk, open_bulk
from waypost.spark.source.options import ReadOptions
from waypost.spark.source.partitions import EventRange, Partition, machine_of, split_ranges
from waypost.spark.source.reader import chosen_columns, list_queues, open_on_machine, read_range, report_gone
from waypost.spark.source.short_errors import short_errors

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def admit(start: Mapping[str, int], newest: Mapping[str, int], rows: int) -> dict[str, int]:
    """Return an offset at most `rows` after `start`: every queue gets its share, and the unused rest of others."""
    end = {queue: min(start.get(queue, 0), newest[queue]) for queue in newest} | dict(start)
    waiting = {queue: newest[queue] - end[queue] for queue in newest if newest[queue] > end[queue]}
    while rows > 0 and waiting:
        share = max(1, rows // len(waiting))
        for queue in sorted(waiting):
            count = min(share, waiting[queue], rows)
            end[queue] += count
            rows -= count
            waiting[queue] -= count
            if not waiting[queue]:
                del waiting[queue]
    return end


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read of the journal. Runs in one process for as long as the query; `read` runs in tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if not options.follows_journal:
            raise ConfigurationError(
                f"kind journal and kind messages can be read as a stream, not {options.kind}: what lies in a queue "
                "changes under the reader. Read it as a batch, or follow the journal"
            )
        self.options = options
        self.columns = chosen_columns(options, schema)
        self._bulk: Bulk | None = None
        #: Set for Trigger.AvailableNow: what is newer belongs to the next run.
        self._ends: dict[str, int] | None = None
        #: Removed queues of the checkpoint whose unread events have been reported.
        self._removed: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # A connection belongs to its process; tasks make their own.
        return {"options": self.options, "columns": self.columns, "_bulk": None, "_ends": None, "_removed": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def bulk(self) -> Bulk:
        """The connection that plans, made when it is first needed."""
        if self._bulk is None:
            self._bulk = open_bulk(self.options.place)
        return self._bulk

    # ---- offsets ---------------------------------------------------------------------------------------------

    @short_errors()
    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Where a new query begins. A queue that comes later is read from its first event."""
        bulk, start = self.bulk, self.options.start
        offset = {}
        for queue in list_queues(bulk, self.options):
            first, newest = bulk.bounds(queue)
            if start == "latest":
                first = newest + 1
            elif isinstance(start, int):
                first = bulk.first_since(queue, start)
            offset[queue] = first - 1
            if self.options.reader is not None:
                bulk.run(bulk.store.journal_reader(queue, self.options.reader, None))
        return offset

    def _newest(self) -> dict[str, int]:
        return {queue: self.bulk.bounds(queue)[1] for queue in list_queues(self.bulk, self.options)}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of this run: it must end even if events come faster than they are read."""
        self._ends = self._newest()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """How much one batch may read."""
        return ReadAllAvailable() if self.options.max_rows is None else ReadMaxRows(self.options.max_rows)

    @short_errors()
    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """How far the next batch goes."""
        newest = self._ends if self._ends is not None else self._newest()
        for queue, number in newest.items():
            if start.get(queue, 0) > max(number, self._known_newest(queue, number)):
                raise StoreError(
                    f"queue {queue}: the checkpoint has read up to event {start[queue]}, and the newest in the journal "
                    f"is {number}: this is another store than before, it was restored from a backup, or the queue was "
                    "removed long ago. Start the query with a new checkpoint"
                )
        self._report_removed({queue: start[queue] for queue in start if queue not in newest})
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else sum(newest.values())
        return admit(start, newest, rows)

    def _report_removed(self, read_to: Mapping[str, int]) -> None:
        """Report the unread events of queues that are not listed any more."""
        self._removed &= read_to.keys()
        for queue in read_to.keys() - self._removed:
            newest = self.bulk.bounds(queue)[1]
            if newest > read_to[queue]:
                report_gone(self.bulk, queue, read_to[queue], newest + 1, fail=self.options.fail_on_data_loss)
            self._removed.add(queue)

    def _known_newest(self, queue: str, number: int) -> int:
        """The end of an AvailableNow run may lie before a start that a new queue or a late plan brought."""
        return self.bulk.bounds(queue)[1] if self._ends is not None else number

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802
        """For the progress of the query: how far behind it is."""
        return self._newest()

    # ---- a batch ---------------------------------------------------------------------------------------------

    @short_errors()
    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """The parts of a batch. The same offsets give the same rows, unless the journal was trimmed meanwhile."""
        bulk = self.bulk
        work = []
        for queue, to in sorted(end.items()):
            after = start.get(queue, 0)
            if to > after:
                first, _ = bulk.bounds(queue)
                if first > after + 1:
                    # A queue that this query sees for the first time has no history that it could have missed.
                    report_gone(bulk, queue, after, first, fail=self.options.fail_on_data_loss and queue in start)
                    after = min(to, first - 1)
                work.append(EventRange(queue, after, to))
        machine = machine_of(bulk.store)
        return [Partition(numbers=part, machine=machine) for part in split_ranges(work, self.options.partitions)]

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        """Yield the rows of one partition, exactly as many as its range has."""
        if not isinstance(partition, Partition):
            return  # a read without any part still has one task, with a stand-in for it
        part = partition
        with short_errors(), open_on_machine(self.options.place, part.machine) as bulk:
            for numbers in part.numbers:
                fail = self.options.fail_on_data_loss
                yield from read_range(bulk, numbers, self.options, self.columns, fail_if_trimmed=fail)

    @short_errors()
    def commit(self, end: dict[str, int]) -> None:
        """Record for a registered reader that Spark is done up to here. It comes a batch late, never early."""
        if self.options.reader is not None:
            # A registration creates its queue, and the checkpoint has those too that were removed.
            there = self.bulk.run(self.bulk.store.queues())
            for queue in sorted(end.keys() & set(there)):
                self.bulk.run(self.bulk.store.journal_reader(queue, self.options.reader, end[queue]))

    def stop(self) -> None:
        """The query ended."""
        bulk, self._bulk = self._bulk, None
        if bulk is not None:
            bulk.close()
