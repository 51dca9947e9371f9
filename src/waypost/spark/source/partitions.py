"""The partitions of a read: few, of equal size, cut at real boundaries, each read through one connection."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql.datasource import InputPartition

from waypost.errors import ConfigurationError
from waypost.store.bulk.reader import Span
from waypost.store.port import Store

#: Fewer rows than this are not worth a part of their own: starting one costs more than reading them.
PARTITION_ROWS_MIN = 200_000


@dataclass(frozen=True, slots=True)
class EventRange:
    """Events of one queue: those with numbers behind `after`, up to `to`."""

    queue: str
    after: int
    to: int

    @property
    def rows(self) -> int:
        """How many events."""
        return self.to - self.after


class Partition(InputPartition):
    """What one task reads."""

    def __init__(
        self,
        *,
        numbers: Sequence[EventRange] = (),
        spans: Sequence[Span] = (),
        queues: Sequence[str] = (),
        machine: str | None = None,
    ) -> None:
        super().__init__(None)
        self.numbers = tuple(numbers)
        self.spans = tuple(spans)
        #: Queues that are read as a whole (schedules).
        self.queues = tuple(queues)
        #: The machine with the store's file, if it is a file: no other machine can read it.
        self.machine = machine


def split_ranges(
    work: Iterable[EventRange], parts_max: int, rows_min: int = PARTITION_ROWS_MIN
) -> list[list[EventRange]]:
    """Split events of several queues into at most `parts_max` lists of about the same number of events."""
    ranges = [numbers for numbers in work if numbers.rows > 0]
    total = sum(numbers.rows for numbers in ranges)
    if not total:
        return []
    count = max(1, min(parts_max, total // rows_min))
    size = -(-total // count)
    parts: list[list[EventRange]] = []
    current: list[EventRange] = []
    room = size
    for numbers in ranges:
        after = numbers.after
        while after < numbers.to:
            to = min(numbers.to, after + room)
            current.append(EventRange(numbers.queue, after, to))
            room -= to - after
            after = to
            if room == 0:
                parts.append(current)
                current, room = [], size
    if current:
        parts.append(current)
    return parts


def split_spans(spans: Sequence[Span], parts_max: int) -> list[list[Span]]:
    """Combine spans into at most `parts_max` lists, the largest first and each to the emptiest list."""
    parts: list[list[Span]] = [[] for _ in range(min(parts_max, len(spans)))]
    sizes = [0] * len(parts)
    for span in sorted(spans, key=lambda span: -span.rows):
        emptiest = sizes.index(min(sizes))
        parts[emptiest].append(span)
        sizes[emptiest] += span.rows + 1
    return parts


def machine_of(store: Store) -> str | None:
    """The machine that must run the tasks, if the store is a file there."""
    return this_machine() if store.capabilities.reach == "machine" else None


def this_machine() -> str:
    """A name for the machine that is running, the same for all of its processes and for no other machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


def check_machine(machine: str | None) -> None:
    """Refuse to touch a file that lies on another machine: it would be another file, or no safe one."""
    if machine is not None and machine != this_machine():
        raise ConfigurationError(
            f"the SQLite store is a file on {machine.split()[0]}, and this task runs on {socket.gethostname()}: use a "
            "local master (local[*]), or a Valkey or PostgreSQL store"
        )
