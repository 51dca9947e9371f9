"""The journal on disk: one row for the events of one step, packed by columns.

A row for each event took a third of the time of every step, most of it for the index by which the events of a message
are found. An entry stores a column whose events all have the same value as that value, and the ids without their common
prefix. It is found by the smallest and the largest message id in it: ids begin with their time, so few entries include
a given id.

Files of release 0.1.0 have a row for each event in `journal`. These are read as they are, until they are trimmed.
"""

from __future__ import annotations

import os.path
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import msgspec

from waypost.errors import StoreFailed
from waypost.store.known_events import check_events
from waypost.store.sqlite.schema import Spelling
from waypost.values import EventRecord

if TYPE_CHECKING:
    from waypost.store.sqlite.queue_records import QueueRecords
    from waypost.store.sqlite.step import Step

#: Events in one entry: reading one of them unpacks all.
ENTRY_EVENTS_MAX = 512
#: The columns of an entry, in their order on disk: append only. `claims` is the token; the numbers are consecutive.
COLUMNS = (
    "event", "message_id", "key", "group", "priority", "token", "deliveries", "attempts", "worker", "due_ms", "cause",
    "reason", "error_type", "run_ms", "wait_ms", "size", "operation_id", "chain_id", "schedule", "body", "error",
)  # fmt: skip
_PLACES = {name: place for place, name in enumerate(COLUMNS)} | {"claims": COLUMNS.index("token")}
_IDS = COLUMNS.index("message_id")
#: All fields of an event except its queue, in the order of `EventRecord`.
FIELDS = EventRecord.__struct_fields__[1:]

_INSERT = "INSERT INTO {entry} (queue, last, first, low, high, data) VALUES (?, ?, ?, ?, ?, ?)"
_BETWEEN = "SELECT first, last, data FROM {entry} WHERE queue = ? AND last > ? ORDER BY last"
#: Entries whose ids are all the same, or all in one range.
_OF_ONE = """
    SELECT first, last, data FROM {entry} INDEXED BY {entry:one} WHERE queue = ? AND low = ? AND low = high"""
_OF_MANY = """
    SELECT first, last, data FROM {entry} INDEXED BY {entry:many}
    WHERE queue = ? AND high >= ? AND low <= ? AND low < high ORDER BY high"""
_ROWS = """
    SELECT {columns} FROM {{journal}} WHERE queue = ? AND number > ? AND number <= ? ORDER BY number LIMIT ?"""
_ROWS_OF = """
    SELECT {columns} FROM {{journal}} INDEXED BY {{journal:message}}
    WHERE queue = ? AND message_id = ? ORDER BY number"""
_SWEEP = ("DELETE FROM {journal} WHERE queue = ? AND number < ?", "DELETE FROM {entry} WHERE queue = ? AND last < ?")
_FIRST = """
    SELECT min(n) FROM (
        SELECT min(number) AS n FROM {journal} WHERE queue = ?1
        UNION ALL SELECT first FROM (SELECT first FROM {entry} WHERE queue = ?1 ORDER BY last LIMIT 1))"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Any]).decode


def constant_or_all(values: Sequence[Any]) -> Any:
    """Return the value that all elements have, or else all values."""
    first = values[0]
    return first if values.count(first) == len(values) else values


class Entry:
    """Events of one step. Each of `columns` is a list with a value for each event, or the value that all have."""

    __slots__ = ("at_ms", "columns", "first", "last")

    def __init__(self, first: int, last: int, at_ms: int, columns: Sequence[Any]) -> None:
        self.first = first
        self.last = last
        self.at_ms = at_ms
        self.columns = columns

    def row(self, queue: int) -> tuple[Any, ...]:
        """Return the row that stores it."""
        columns = list(self.columns)
        ids = columns[_IDS]
        low = high = ids
        if isinstance(ids, (list, tuple)):
            known = [id for id in ids if id is not None] if None in ids else ids
            low, high = min(known), max(known)
            prefix = os.path.commonprefix((low, high))
            cut = len(prefix)
            columns[_IDS] = (prefix, [None if id is None else id[cut:] for id in ids])
        return queue, self.last, self.first, low, high, _encode((self.at_ms, *columns))

    def values(self, name: str) -> Iterable[Any]:
        """Return the values of a field, one for each event."""
        count = self.last - self.first + 1
        if name == "number":
            return range(self.first, self.last + 1)
        if name == "at_ms":
            return repeat(self.at_ms, count)
        place = _PLACES[name]
        value = self.columns[place] if place < len(self.columns) else None
        return value if isinstance(value, (list, tuple)) else repeat(value, count)

    def rows(self, fields: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Return these fields of each event."""
        return zip(*(self.values(name) for name in fields), strict=True)


def pack_events(first: int, at_ms: int, events: Sequence[tuple[Any, ...]]) -> Iterator[Entry]:
    """Yield entries of events that are given as tuples of `COLUMNS`; the first event has the number `first`."""
    for start in range(0, len(events), ENTRY_EVENTS_MAX):
        part = events[start : start + ENTRY_EVENTS_MAX]
        columns = [constant_or_all(values) for values in zip(*part, strict=True)]
        yield Entry(first + start, first + start + len(part) - 1, at_ms, columns)


def read_entry(first: int, last: int, data: bytes) -> Entry:
    """Unpack a row."""
    try:
        at_ms, *columns = _decode(data)
        ids = columns[_IDS]
        if isinstance(ids, list):
            prefix, rests = ids
            columns[_IDS] = [None if rest is None else prefix + rest for rest in rests]
        count = last - first + 1
        if any(isinstance(column, list) and len(column) != count for column in columns):
            raise ValueError(f"a column has not {count} values")
    except (msgspec.DecodeError, TypeError, ValueError, IndexError) as error:
        raise StoreFailed(
            f"the events {first} to {last} of a journal are damaged ({error}); restore the file, or trim the journal "
            f"up to {last}"
        ) from error
    return Entry(first, last, at_ms, columns)


def write_entries(step: Step, queue: int, entries: Iterable[Entry]) -> None:
    """Append entries to the journal of a queue."""
    step.execute_many(_INSERT, [entry.row(queue) for entry in entries])


def _columns_of(fields: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in fields)


def events_between(
    records: QueueRecords, after: int, to: int, limit: int, fields: Sequence[str] = FIELDS[1:]
) -> list[tuple[Any, ...]]:
    """Return the number and these fields of the events with numbers in (after, to], in order, `limit` at most."""
    step, queue = records.step, records.number
    found: list[tuple[Any, ...]] = []
    for first, last, data in step.execute(_BETWEEN, (queue, after)):
        if first > to or len(found) >= limit:
            break
        entry = read_entry(first, last, data)
        check_events(records.name, last, entry.values("event"))
        rows = entry.rows(("number", *fields))
        found += rows if after < first and last <= to else [row for row in rows if after < row[0] <= to]
    single = step.execute(_ROWS.format(columns=_columns_of(("number", *fields))), (queue, after, to, limit)).fetchall()
    if single:
        found = sorted(found + single, key=_number)
    return found[:limit]


def _number(row: tuple[Any, ...]) -> int:
    return int(row[0])


def events_of(step: Step, queue: int, message_id: str, fields: Sequence[str] = FIELDS[1:]) -> list[tuple[Any, ...]]:
    """Return the number and these fields of the events of one message, in order."""
    found = step.execute(_ROWS_OF.format(columns=_columns_of(("number", *fields))), (queue, message_id)).fetchall()
    one = step.execute(_OF_ONE, (queue, message_id))
    # Read one by one: where old messages end together with new ones, many entries include an id and few of them have
    # it.
    for first, last, data in chain(one, step.execute(_OF_MANY, (queue, message_id, message_id))):
        entry = read_entry(first, last, data)
        ids = list(entry.values("message_id"))
        if message_id in ids:
            rows = entry.rows(("number", *fields))
            found += [row for row, id in zip(rows, ids, strict=True) if id == message_id]
    return sorted(found, key=_number)


def sweep_events(step: Step, queue: int, before: int) -> None:
    """Delete the events with smaller numbers. An entry that also has others remains until these are deleted."""
    for statement in _SWEEP:
        step.execute(statement, (queue, before))


def first_event(step: Step, queue: int) -> int | None:
    """Return the number of the oldest event in the file."""
    first: int | None = step.execute(_FIRST, (queue,)).fetchone()[0]
    return first


def entries_to_rows(connection: sqlite3.Connection, spelling: Spelling) -> None:
    """For tests and benchmarks: turn all entries into rows, which SQL can change."""
    names = _columns_of(("queue", *FIELDS))
    marks = ", ".join("?" * (1 + len(FIELDS)))
    for queue, first, last, data in connection.execute(
        spelling["SELECT queue, first, last, data FROM {entry}"]
    ).fetchall():
        rows = read_entry(first, last, data).rows(FIELDS)
        connection.executemany(
            spelling[f"INSERT INTO {{journal}} ({names}) VALUES ({marks})"], [(queue, *row) for row in rows]
        )
    connection.execute(spelling["DELETE FROM {entry}"])
