"""Messages as they were published, from the journal: nothing is consumed, the same offsets give the same messages.

A queue must journal bodies for this (`journal="full"`). What was published before that has an event without a body, and
is an error unless the reader said that such gaps are fine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow.compute as pc

from waypost.errors import JournalTrimmed
from waypost.spark.tables import PUBLISHED
from waypost.store.bulk.columns import batch_of

#: Columns that the journal knows by another name.
NAMES = {"id": "message_id", "published_ms": "at_ms"}


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
            f"queue {queue}: event {first} tells of a message whose body was not journalled. Set the queue's journal "
            "to full and begin after that event (startingOffsets), or set the option failOnDataLoss to false to get "
            "such messages without their bodies"
        )
    arrays = {name: batch.column(NAMES.get(name, name)) for name in columns}
    return batch_of(PUBLISHED, columns, arrays, batch.num_rows)
