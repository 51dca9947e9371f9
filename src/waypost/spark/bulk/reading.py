"""What a bulk reader of any store does, and how one is opened."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from waypost.errors import ConfigurationError
from waypost.identity import Session
from waypost.message import MessageState
from waypost.operations.flow import ClientContext, drive
from waypost.policy import START_TIMEOUT_SECONDS
from waypost.spark.bulk.columns import struct_batch
from waypost.spark.credentials import Place
from waypost.spark.tables import SCHEDULES
from waypost.store.port import Call, Store

T = TypeVar("T")

#: How long a reader or writer tries again while the store cannot be reached; Spark repeats the task after that.
RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the messages of one state: from `low` on, up to `high` but not with it. None is open."""

    queue: str
    state: MessageState
    low: str | None
    high: str | None
    #: About how many messages, for sharing out the work.
    rows: int


class PageSize:
    """How many rows to ask for at once: many small ones, few large ones, so that nobody holds too much of them."""

    def __init__(self, first: int, most: int, bytes_wanted: int) -> None:
        self.rows = first
        self._most = most
        self._bytes = bytes_wanted

    def learn(self, rows: int, size: int) -> None:
        """A page had so many rows and so many bytes. It grows by steps: the next rows may be larger than these."""
        if rows:
            self.rows = max(1, min(self._most, self.rows * 8, self._bytes * rows // max(1, size)))


class Bulk:
    """One connection to a store, and reads that go through it in bulk."""

    #: The store; readers of one kind of store say which.
    store: Any

    def __init__(self, store: Store, url: str) -> None:
        self.store = store
        self.url = url
        with without_warnings():
            self._executor = store.connect(start_timeout=START_TIMEOUT_SECONDS)
        self.context = ClientContext(store, session=Session(), worker="spark", retry_budget=RETRY_SECONDS)

    def run(self, call: Call[T]) -> T:
        """Run one call; when the connection fails, again within a budget. Reads may always be repeated."""
        return drive(self._executor, self.context.attempt(call))

    @property
    def executor(self) -> Any:
        """What runs the calls."""
        return self._executor

    def close(self) -> None:
        """Close the connection."""
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
            if page.newest == newest:
                return page.first_kept, newest
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
        """Record batches of the events with numbers in (after, to]."""
        raise NotImplementedError

    def spans(self, queue: str, state: MessageState, parts: int) -> list[Span]:
        """The messages of a state in up to so many parts that do not overlap."""
        raise NotImplementedError

    def messages(self, span: Span, columns: Sequence[str]) -> Iterator[Any]:
        """Record batches of the messages of a span."""
        raise NotImplementedError

    def schedules(self, queue: str, columns: Sequence[str]) -> Iterator[Any]:
        """Record batches of the schedules of a queue."""
        found = self.run(self.store.schedules(queue)).schedules
        if found:
            yield struct_batch(SCHEDULES, queue, found, columns)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Every task connects; that a server may lose its data is for publishers, workers and drivers to hear, once."""

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
    store = place.open()
    url = place.resolve()
    if store.kind == "valkey":
        from waypost.spark.bulk.valkey import ValkeyBulk

        return ValkeyBulk(store, url)
    if store.kind == "postgres":
        from waypost.spark.bulk.postgres import PostgresBulk

        return PostgresBulk(store, url)
    if store.kind == "sqlite":
        from waypost.spark.bulk.sqlite import SqliteBulk

        return SqliteBulk(store, url)
    raise ConfigurationError(
        f"a {store.kind} store lives in one process, and Spark's tasks run in others: use SQLite, Valkey or PostgreSQL"
    )
