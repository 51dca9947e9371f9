"""One atomic step on the file: the connection inside its transaction, store time, and the queues that it uses."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from waypost.store.port import Call, SideEffects
from waypost.store.sqlite.queue_records import NUMBERS, AtStart, QueueRecords
from waypost.store.sqlite.remove import sweep_names
from waypost.store.sqlite.schema import RESERVE_BYTES, Spelling
from waypost.values import Notice

T = TypeVar("T")

_QUEUE_COLUMNS = f"""
    q.number, q.name, q.policy, q.paused, {", ".join(f"q.{name}" for name in NUMBERS)}, q.grouping,
    (SELECT value FROM {{meta}} WHERE name = 'removal:' || q.name)"""
_QUEUE = f"SELECT {_QUEUE_COLUMNS} FROM {{queue}} q WHERE q.name = ?"
#: The queue with the other values that most steps need, in the order of the fields of `AtStart`. A separate statement
#: for each would take as long as ten of these lookups.
_QUEUE_AT_START = f"""
    SELECT {_QUEUE_COLUMNS},
        (SELECT max(r.number) FROM {{replay}} r WHERE r.queue = q.number AND r.session = ?2),
        (SELECT s.until_ms FROM {{session}} s WHERE s.queue = q.number AND s.session = ?2),
        (SELECT min(m.ready_ms) FROM {{message}} m INDEXED BY {{message:delayed}}
            WHERE m.queue = q.number AND m.state = {{DELAYED}}),
        (SELECT min(m.lease_end_ms) FROM {{message}} m INDEXED BY {{message:leased}}
            WHERE m.queue = q.number AND m.state = {{LEASED}}),
        (SELECT max(m.lease_end_ms) FROM {{message}} m INDEXED BY {{message:leased}}
            WHERE m.queue = q.number AND m.state = {{LEASED}}),
        (SELECT min(m.expires_ms) FROM {{message}} m INDEXED BY {{message:expires}}
            WHERE m.queue = q.number AND m.expires_ms IS NOT NULL AND m.state <> {{LEASED}} AND m.state < {{DEAD}}),
        (SELECT max(t.minute) FROM {{minute}} t WHERE t.queue = q.number),
        EXISTS (SELECT 1 FROM {{waiter}} w WHERE w.queue = q.number),
        EXISTS (SELECT 1 FROM {{sleeper}} p WHERE p.queue = q.number),
        EXISTS (SELECT 1 FROM {{reserve}}),
        (SELECT max(e.seq) FROM {{envelope}} e)
    FROM {{queue}} q WHERE q.name = ?1"""
_AT_START_FIELDS = len(AtStart.__struct_fields__)
_QUEUE_NEW = "INSERT INTO {queue} (name, policy) VALUES (?, ?)"
_SEQ_LAST = "SELECT max(seq) FROM {envelope}"
_RESERVE_KEPT = "SELECT 1 FROM {reserve}"
_RESERVE_BACK = "INSERT INTO {reserve} (number, room) VALUES (1, zeroblob(?))"


class SqliteCall(Call[T]):
    """A verb with its arguments, to be run as one step. `fills`: its purpose is to add messages.

    `shares_step`: it can be run in the same step after others of its kind, with the same result.
    """

    __slots__ = ("fills", "name", "shares_step", "step", "writes")

    def __init__(
        self,
        name: str,
        step: Callable[[Step], T],
        *,
        writes: bool = True,
        fills: bool = False,
        shares_step: bool = False,
    ) -> None:
        self.name = name
        self.step = step
        self.writes = writes
        self.fills = fills
        self.shares_step = shares_step


class Step:
    """The access of a verb to the file. All its changes are committed together, or none."""

    __slots__ = (
        "_connection",
        "_keeps_reserve",
        "_queues",
        "_seq",
        "_spelling",
        "also",
        "give_way",
        "notices",
        "now",
        "replay_ttl_ms",
        "waiters_to_wake",
    )  # fmt: skip

    def __init__(
        self,
        connection: sqlite3.Connection,
        spelling: Spelling,
        now: int,
        *,
        replay_ttl_ms: int | None,
        give_way: bool = False,
        fills: bool = False,
    ) -> None:
        self._connection = connection
        self._spelling = spelling
        self.now = now
        #: For how long operations may be repeated; None inside the user's own transaction, which is never repeated.
        self.replay_ttl_ms = replay_ttl_ms
        #: The file is full and the reserve is used up: history must be deleted to make room for deliveries.
        self.give_way = give_way
        #: Whether it adds messages and has not yet checked that the reserve exists.
        self._keeps_reserve = fills
        self._queues: dict[str, QueueRecords] = {}
        self._seq: int | None = None
        #: Notices of chains that this step made and has not applied, and the clients that wait for its ends, by queue.
        self.notices: list[Notice] = []
        self.waiters_to_wake: dict[str, list[str]] = {}
        #: The side effects of the step.
        self.also = SideEffects()

    def execute(self, template: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement, written with `{table}` for names."""
        return self._connection.execute(self._spelling[template], parameters)

    def execute_many(self, template: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run one statement for each row."""
        self._connection.executemany(self._spelling[template], rows)

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows, naming only the columns for which any of them has a value.

        To pass a None costs as much as to pass a value, and most columns of a batch are empty: this halves the time.
        """
        values = list(zip(*rows, strict=True))
        used = [index for index, column in enumerate(values) if column.count(None) < len(rows)]
        names = ", ".join(f'"{columns[index]}"' for index in used)
        marks = ", ".join("?" * len(used))
        self.execute_many(
            f"INSERT INTO {{{table}}} ({names}) VALUES ({marks})", zip(*(values[index] for index in used), strict=True)
        )

    def queue_for_reading(self, name: str) -> QueueRecords:
        """Return a queue to read from; one that does not exist is empty."""
        return QueueRecords(self, name, self.execute(_QUEUE, (name,)).fetchone())

    def queue_for_writing(self, name: str, session: bytes | None = None) -> QueueRecords:
        """Return a name to write to; its row is created if there is none. The same object for the whole step.

        The name becomes a queue only when something is added to it: see `QueueRecords.make`. With the session of an
        operation, the values that most steps need are read in the same statement.
        """
        records = self._queues.get(name)
        if records is None:
            if session is None:
                records = self.queue_for_reading(name)
            else:
                row = self.execute(_QUEUE_AT_START, (name, session)).fetchone()
                if row is None:
                    records = QueueRecords(self, name, None)
                else:
                    at_start = AtStart(*row[-_AT_START_FIELDS:])
                    records = QueueRecords(self, name, row[:-_AT_START_FIELDS], at_start)
                    records.session, records.session_newest = session, at_start.newest or 0
                    records.session_until_ms = at_start.session_until_ms or 0
                    self._keeps_reserve = self._keeps_reserve and not at_start.has_reserve
                    if self._seq is None:
                        self._seq = (at_start.seq_last or 0) + 1
            if self._keeps_reserve:
                self.keep_reserve()
            if records.number == 0:
                sweep_names(self)
                records.number = self.execute(_QUEUE_NEW, (name, records.policy_text)).lastrowid or 0
            if self.give_way:
                records.give_way()
            self._queues[name] = records
        return records

    def take_seq(self, count: int) -> int:
        """Reserve this many row numbers for envelopes, and return the first."""
        first = self._seq
        if first is None:
            first = (self.execute(_SEQ_LAST).fetchone()[0] or 0) + 1
        self._seq = first + count
        return first

    def keep_reserve(self) -> None:
        """Restore the reserve before messages are added: otherwise its space would be filled with messages."""
        self._keeps_reserve = False
        if self.execute(_RESERVE_KEPT).fetchone() is None:
            self.execute(_RESERVE_BACK, (RESERVE_BYTES,))

    def finish(self) -> None:
        """Write all changes that the queues of the step collected."""
        for records in self._queues.values():
            records.flush()
