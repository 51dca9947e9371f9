"""A connection through which tasks of Spark read a store in bulk: by the reader that the store brings for that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from waypost.errors import ConfigurationError, OutcomeUnknown, StoreUnavailable
from waypost.identity import Session
from waypost.operations.flow import ClientContext, Flow, RetryBudget, Sleep, drive
from waypost.policy import START_TIMEOUT_SECONDS
from waypost.spark.source.credentials import Place
from waypost.store.bulk.columns import struct_batch
from waypost.store.bulk.reader import BulkReader, Span
from waypost.store.bulk.tables import SCHEDULES
from waypost.store.port import Call, Store
from waypost.values import MessageState

T = TypeVar("T")

#: How long a reader or writer tries again while the store cannot be reached; Spark repeats the task after that.
RETRY_SECONDS = 30.0
#: Events that are numbered in one call, at least, if there are so many: after fewer of them no older one is left.
NUMBERED_MIN = 100_000


class Bulk:
    """One connection to a store, and reads that go through it in bulk."""

    def __init__(self, store: Store) -> None:
        self.store = store
        with without_warnings():
            self._executor = store.connect(start_timeout=START_TIMEOUT_SECONDS)
        self.context = ClientContext(store, session=Session(), worker="spark", retry_budget=RETRY_SECONDS)
        reader = store.bulk_reader(self)
        if reader is None:
            raise ConfigurationError(f"a {store.kind} store has no bulk reader: use SQLite, Valkey or PostgreSQL")
        self._reader: BulkReader = reader

    def run(self, call: Call[T]) -> T:
        """Run one call; when the connection fails, again within a budget. Reads may always be repeated."""
        return drive(self._executor, self.context.attempt(call))

    def attempt(self, read: Callable[[], T]) -> T:
        """Run a read that goes past the executor; again within the same budget."""
        return drive(self._executor, self._attempt(read))

    def _attempt(self, read: Callable[[], T]) -> Flow[T]:
        yield Sleep(0)
        retries: RetryBudget | None = None
        while True:
            try:
                return read()
            except (StoreUnavailable, OutcomeUnknown) as error:
                retries = retries or RetryBudget(self.context, RETRY_SECONDS)
                yield retries.pause("read", error)

    def close(self) -> None:
        """Close the connection, and what the reader opened beside it."""
        self._reader.close()
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def bounds(self, queue: str) -> tuple[int, int]:
        """The first event that is kept and the newest one; the newest is 0 where nothing ever happened."""
        page = self.run(self.store.journal(queue, 0, 1))
        newest = page.newest
        while True:
            # A store whose readers number the events does so a bounded number at a time.
            page = self.run(self.store.journal(queue, newest, 1))
            # Not until there are none: events may come as fast as they are numbered.
            if page.newest - newest < NUMBERED_MIN:
                return page.first_kept, page.newest
            newest = page.newest

    def first_since(self, queue: str, at_ms: int) -> int:
        """The number of the first event at or after a time, or one more than the newest; found by halving."""
        first, newest = self.bounds(queue)
        low, high = first, newest + 1
        while low < high:
            middle = (low + high) // 2
            events = self.run(self.store.journal(queue, middle - 1, 1)).events
            if not events or events[0].at_ms >= at_ms:
                high = middle
            else:
                low = middle + 1
        return low

    def journal(self, queue: str, after: int, to: int, columns: Sequence[str]) -> Iterator[Any]:
        """Yield record batches of the events with numbers in (after, to]."""
        return self._reader.journal(queue, after, to, columns)

    def unnumbered(self, queue: str) -> set[str]:
        """Return the messages of events that are committed and have no number yet, where a store numbers them later."""
        return self._reader.unnumbered(queue)

    def spans(self, queue: str, state: MessageState, parts: int) -> list[Span]:
        """Return the messages of a state in up to this many parts that do not overlap."""
        return self._reader.spans(queue, state, parts)

    def messages(self, span: Span, columns: Sequence[str]) -> Iterator[Any]:
        """Yield record batches of the messages of a span."""
        return self._reader.messages(span, columns)

    def schedules(self, queue: str, columns: Sequence[str]) -> Iterator[Any]:
        """Record batches of the schedules of a queue."""
        found = self.run(self.store.schedules(queue)).schedules
        if found:
            yield struct_batch(SCHEDULES, queue, found, columns)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hide the durability warning: every task connects, and publishers, workers and drivers log it once already."""

    def concerns_reading(record: logging.LogRecord) -> bool:
        return getattr(record, "event", None) != "durability"

    logger = logging.getLogger("waypost")
    logger.addFilter(concerns_reading)
    try:
        yield
    finally:
        logger.removeFilter(concerns_reading)


def open_bulk(place: Place) -> Bulk:
    """Connect to the store that a place names."""
    return Bulk(place.open())
