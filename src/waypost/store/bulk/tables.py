"""The tables that bulk readers return, declared once: names, Spark's types and Arrow's types.

A reader returns exactly these columns in this order, or the requested ones. Times are milliseconds
by the store's clock, as everywhere in waypost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from waypost.errors import InvalidInput

#: Spark's name of a type, and Arrow's form of it.
ARROW_TYPES: Final[dict[str, Any]] = {
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "BIGINT": pa.int64(),
    "INT": pa.int32(),
    "BOOLEAN": pa.bool_(),
    "DOUBLE": pa.float64(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "MAP<STRING, STRING>": pa.map_(pa.string(), pa.string()),
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table by its columns, in order: name to Spark type."""

    name: str
    columns: dict[str, str]

    @property
    def ddl(self) -> str:
        """The schema as Spark reads it."""
        return ", ".join(f"`{name}` {kind}" for name, kind in self.columns.items())

    def arrow_type(self, column: str) -> Any:
        """The Arrow type of a column."""
        return ARROW_TYPES[self.columns[column]]

    def arrow(self, columns: Iterable[str]) -> Any:
        """The Arrow schema of some of the columns."""
        return pa.schema([(name, self.arrow_type(name)) for name in columns])

    def chosen(self, wanted: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        """The columns of a schema of the user's, each given as name and Spark type."""
        for name, kind in wanted:
            known = self.columns.get(name)
            if known is None:
                raise InvalidInput(f"there is no column {name} in {self.name}; it has {', '.join(self.columns)}")
            if kind.replace(" ", "").upper() != known.replace(" ", ""):
                raise InvalidInput(
                    f"column {name} of {self.name} is {known}, not {kind.upper()}; cast it after reading"
                )
        return tuple(name for name, _ in wanted)


#: The parts of an envelope. `text` is the body if that is JSON or text, else null. An envelope of a newer
#: release is not decoded: it is the body, and there is no content type.
ENVELOPE: Final = {
    "content_type": "STRING",
    "type_name": "STRING",
    "correlation_id": "STRING",
    "headers": "MAP<STRING, STRING>",
    "body": "BINARY",
    "text": "STRING",
}
ENVELOPE_COLUMNS: Final = tuple(ENVELOPE)

#: The journal, one row for each event. Numbers have no gap within a queue. Bodies are there at level `full` only.
JOURNAL: Final = Table(
    "journal",
    {
        "queue": "STRING",
        "number": "BIGINT",
        "at_ms": "BIGINT",
        "event": "STRING",
        "message_id": "STRING",
        "key": "STRING",
        "group": "STRING",
        "priority": "INT",
        "token": "BIGINT",
        "claims": "BIGINT",
        "deliveries": "INT",
        "attempts": "INT",
        "worker": "STRING",
        "due_ms": "BIGINT",
        "cause": "STRING",
        "reason": "STRING",
        "error_type": "STRING",
        "run_ms": "BIGINT",
        "wait_ms": "BIGINT",
        "size": "BIGINT",
        "operation_id": "STRING",
        "chain_id": "STRING",
        "schedule": "STRING",
        **ENVELOPE,
    },
)

#: Messages in the store, one row for each.
MESSAGES: Final = Table(
    "messages",
    {
        "queue": "STRING",
        "id": "STRING",
        "state": "STRING",
        "key": "STRING",
        "group": "STRING",
        "priority": "INT",
        "token": "BIGINT",
        "deliveries": "INT",
        "attempts": "INT",
        "published_ms": "BIGINT",
        "ready_ms": "BIGINT",
        "claimed_ms": "BIGINT",
        "lease_end_ms": "BIGINT",
        "worker": "STRING",
        "cancel_requested": "BOOLEAN",
        "ended_ms": "BIGINT",
        "reason": "STRING",
        "error_type": "STRING",
        "error": "STRING",
        "expires_ms": "BIGINT",
        "size": "BIGINT",
        **ENVELOPE,
    },
)

#: Schedules, one row for each. `spec` is the stored rule with its message.
SCHEDULES: Final = Table(
    "schedules",
    {
        "queue": "STRING",
        "key": "STRING",
        "version": "STRING",
        "paused": "BOOLEAN",
        "next_ms": "BIGINT",
        "due_ms": "BIGINT",
        "last_ms": "BIGINT",
        "fires": "BIGINT",
        "missed": "BIGINT",
        "spec": "BINARY",
    },
)
