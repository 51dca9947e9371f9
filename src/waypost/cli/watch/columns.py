"""The columns of the list of queues: the names of `waypost stats`, what each shows, and what is wrong in color."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from waypost.cli.watch.collector import QueueLine
from waypost.formatting import format_age, format_count
from waypost.views import RegisteredWorker

#: Marks before the name: one that is narrow would be cut off after it, and colors may be off.
PAUSED = "‖"
WRONG = "!"
NAME_WIDTH_MIN, NAME_WIDTH_MAX = 16, 40
BARS = "▁▂▃▄▅▆▇█"
NONE = "–"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the list. Its width includes a space before it; of the highest ranks, as many as fit are shown."""

    name: str
    width: int
    rank: int
    format: Callable[[QueueLine], str]
    #: The same where there is room for all digits.
    format_exact: Callable[[QueueLine], str]
    #: By what lines are sorted, the highest first; None: not by this one.
    sort: Callable[[QueueLine], Any] | None = None
    color: Callable[[QueueLine], str | None] = lambda line: None
    #: Whether the list that is printed once has it too.
    printed: bool = True


def count(name: str, width: int, rank: int, color: Callable[[QueueLine], str | None] = lambda line: None) -> Column:
    """Return the column of a counter."""
    return Column(
        name, width, rank, lambda line: format_number(getattr(line, name)), lambda line: f"{getattr(line, name):,}",
        sort=lambda line: getattr(line, name), color=color,
    )  # fmt: skip


def rate(name: str, field: str, width: int, rank: int) -> Column:
    """Return the column of a rate."""
    return Column(
        name, width, rank, lambda line: format_number(getattr(line, field)),
        lambda line: f"{getattr(line, field):,.1f}", sort=lambda line: getattr(line, field),
    )  # fmt: skip


def duration(name: str, field: str, width: int, rank: int) -> Column:
    """Return the column of a duration."""
    return Column(
        name, width, rank, lambda line: format_duration(getattr(line, field)),
        lambda line: format_age(getattr(line, field)), sort=lambda line: getattr(line, field) or timedelta(0),
    )  # fmt: skip


def format_workers(line: QueueLine) -> str:
    """Return how many workers serve a queue, and how many of them are red."""
    return f"{line.workers}, {line.red_workers} red" if line.red_workers else str(line.workers)


def format_state(line: QueueLine) -> str:
    """Return what a person should know of a queue."""
    parts = ["no worker"] if line.unserved else []
    parts += ["red worker"] if line.red_workers else []
    parts += ["paused"] if line.paused else []
    return ", ".join(parts)


def is_wrong(line: QueueLine) -> bool:
    """Whether a queue has messages that no worker will handle as it is."""
    return line.unserved or line.red_workers > 0


def state_color(line: QueueLine) -> str | None:
    """Return the color of the state of a queue."""
    return "red" if is_wrong(line) else "yellow" if line.paused else None


def format_name(line: QueueLine) -> str:
    """Return the name of a queue behind the marks of its state."""
    marks = (WRONG if is_wrong(line) else "") + (PAUSED if line.paused else "")
    return f"{marks} {line.queue}" if marks else line.queue


def sparkline(values: Sequence[float]) -> str:
    """Return values as bars, the highest as high as can be; `·` is none."""
    most = max(values, default=0)
    return "".join(BARS[min(7, int(value / most * 8))] if value > 0 else "·" for value in values)


#: In the order of the screen. The names of counters are those of `waypost stats`.
COLUMNS = (
    count("ready", 7, 1),
    count("delayed", 8, 4),
    count("waiting", 8, 12),
    count("leased", 7, 3),
    count("dead", 6, 2, lambda line: "red" if line.dead else None),
    count("done", 7, 14),
    duration("oldest", "oldest_ready_age", 7, 5),
    rate("published/s", "published_per_second", 12, 10),
    rate("done/s", "done_per_second", 7, 7),
    duration("wait", "wait_time", 6, 11),
    duration("run", "run_time", 6, 13),
    Column(
        "workers", 9, 6, format_workers, format_workers, sort=lambda line: line.workers,
        color=lambda line: "red" if is_wrong(line) else None,
    ),
    Column(
        "lag", 6, 15, lambda line: NONE if line.lag is None else format_number(line.lag),
        lambda line: NONE if line.lag is None else f"{line.lag:,}", sort=lambda line: line.lag or 0,
    ),
    Column("trend", 13, 9, lambda line: sparkline(line.trend), lambda line: sparkline(line.trend), printed=False),
    Column(
        "state", 12, 8, format_state, format_state, color=state_color,
        sort=lambda line: (is_wrong(line), line.dead > 0, line.paused),
    ),
)  # fmt: skip
NUMBERS = frozenset(column.name for column in COLUMNS) - {"trend", "state"}
#: What the key for sorting goes through.
SORTS = ("queue", "ready", "oldest", "dead", "done/s", "state")


def choose_columns(width: int, name_width: int) -> tuple[Column, ...]:
    """Return the columns that fit beside names of a width, in the order of the screen."""
    room = width - name_width
    chosen = set()
    for column in sorted(COLUMNS, key=lambda one: one.rank):
        if column.width > room:
            break
        room -= column.width
        chosen.add(column.name)
    return tuple(column for column in COLUMNS if column.name in chosen)


def needed_name_width(lines: Sequence[QueueLine], width: int) -> int:
    """Return the width of the column of names: that of the longest, within bounds that leave room for figures."""
    longest = max((len(format_name(line)) for line in lines), default=0) + 1
    return max(NAME_WIDTH_MIN, min(longest, NAME_WIDTH_MAX, width // 3))


def sort_lines(lines: Sequence[QueueLine], by: str) -> list[QueueLine]:
    """Return the lines by name, or those with the most of something first."""
    ordered = sorted(lines, key=lambda line: line.queue)
    key = next((column.sort for column in COLUMNS if column.name == by), None)
    return ordered if key is None else sorted(ordered, key=key, reverse=True)


def printed_columns() -> tuple[Column, ...]:
    """Return the columns of the list that is printed once."""
    return tuple(column for column in COLUMNS if column.printed)


def format_number(number: float) -> str:
    """Format a number in at most five characters."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            scaled = number / (1e3 if unit == "k" else size)
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.1f}{unit}"
    return f"{number:.0f}" if number == int(number) or number >= 100 else f"{number:.1f}"


def format_duration(duration: timedelta | None) -> str:
    """Format a duration in at most five characters."""
    if duration is None:
        return NONE
    seconds = duration.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    for size, unit in ((1, "s"), (60, "m"), (3600, "h")):
        if seconds / size < 100:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def list_totals(lines: Sequence[QueueLine], workers: Sequence[RegisteredWorker]) -> list[tuple[str, str | None]]:
    """Return the totals of a store, those that are wrong with their color."""
    dead, red = sum(line.dead for line in lines), sum(worker.status == "red" for worker in workers)
    unserved, paused = sum(line.unserved for line in lines), sum(line.paused for line in lines)
    return [
        (format_count(len(lines), "queue"), None),
        (f"{sum(line.ready for line in lines):,} ready", None),
        (f"{sum(line.leased for line in lines):,} leased", None),
        (f"{dead:,} dead", "red" if dead else None),
        (format_count(len(workers), "worker"), None),
        *([(f"{red:,} of them red", "red")] if red else []),
        *([(f"{unserved:,} unserved", "red")] if unserved else []),
        *([(f"{paused:,} paused", "yellow")] if paused else []),
    ]


def format_totals(lines: Sequence[QueueLine], workers: Sequence[RegisteredWorker]) -> str:
    """Return the totals of a store in one line."""
    return ", ".join(text for text, _ in list_totals(lines, workers))
