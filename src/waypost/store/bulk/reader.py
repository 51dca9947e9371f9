"""The contract of a bulk reader: whole journals and queues as Arrow batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from waypost.store.port import Call
from waypost.values import MessageState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the messages of one state: from `low` up to but excluding `high`. None is unbounded."""

    queue: str
    state: MessageState
    low: str | None
    high: str | None
    #: The approximate number of messages, to distribute the work.
    rows: int


class PageSize:
    """The number of rows to read at once: many small ones or few large ones, so that a page fits in memory."""

    def __init__(self, first: int, most: int, bytes_wanted: int) -> None:
        self.rows = first
        self._most = most
        self._bytes = bytes_wanted

    def learn(self, rows: int, size: int) -> None:
        """Adapt to a page with these rows and bytes. It grows step by step: the next rows may be larger."""
        if rows:
            self.rows = max(1, min(self._most, self.rows * 8, self._bytes * rows // max(1, size)))


class BulkConnection(Protocol):
    """A connection to the store that repeats a read when it fails, within a budget. Reads may always be repeated."""

    def run(self, call: Call[T]) -> T:
        """Run a call of the store."""
        ...

    def attempt(self, read: Callable[[], T]) -> T:
        """Run a read on the reader's own connection; raises the errors of an executor."""
        ...


class BulkReader(Protocol):
    """Reads of one store. Columns are those of `waypost.store.bulk.tables`."""

    def journal(self, queue: str, after: int, to: int, columns: Sequence[str]) -> Iterator[Any]:
        """Yield record batches of the events with numbers in (after, to]."""
        ...

    def unnumbered(self, queue: str) -> set[str]:
        """Return the messages of events that are committed and have no number yet; none where numbers come at once."""
        ...

    def spans(self, queue: str, state: MessageState, parts: int) -> list[Span]:
        """Return the messages of a state in up to this many parts that do not overlap."""
        ...

    def messages(self, span: Span, columns: Sequence[str]) -> Iterator[Any]:
        """Yield record batches of the messages of a span."""
        ...

    def close(self) -> None:
        """Close what the reader opened itself."""
        ...
