"""Arrow columns from bytes and values: functions that the readers of all stores share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from waypost import codec
from waypost.errors import WaypostError
from waypost.store.bulk.tables import ENVELOPE_COLUMNS, JOURNAL, MESSAGES, Table
from waypost.values import EventRecord, Stored, split_error

_JSON, _TEXT = "application/json", "text/plain"


def envelope_columns(envelopes: Sequence[bytes | None], wanted: Iterable[str]) -> dict[str, Any]:
    """Return the requested columns of envelopes."""
    chosen = [name for name in ENVELOPE_COLUMNS if name in set(wanted)]
    if not chosen:
        return {}
    if not any(envelopes):
        return {name: pa.nulls(len(envelopes), JOURNAL.arrow_type(name)) for name in chosen}
    opened = [None if data is None else _opened(data) for data in envelopes]
    getters: dict[str, Callable[[codec.Envelope], Any]] = {
        "content_type": lambda e: e.content_type or None,
        "type_name": lambda e: e.type_name,
        "correlation_id": lambda e: e.correlation_id,
        "headers": lambda e: list(e.headers.items()),
        "body": lambda e: e.data,
        "text": text_of,
    }
    return {
        name: pa.array([None if one is None else getters[name](one) for one in opened], JOURNAL.arrow_type(name))
        for name in chosen
    }


def _opened(data: bytes) -> codec.Envelope:
    try:
        return codec.open_envelope(data)
    except WaypostError:
        # A newer release wrote it, or it is damaged. Return it unchanged rather than fail the whole read.
        return codec.Envelope("", "", data)  # type: ignore[arg-type]


def text_of(envelope: codec.Envelope) -> str | None:
    """Return the body as text, if it is JSON or text."""
    if envelope.content_type in (_JSON, _TEXT):
        try:
            return envelope.data.decode()
        except UnicodeDecodeError:
            return None
    return None


def batch_of(table: Table, columns: Sequence[str], arrays: Mapping[str, Any], rows: int) -> Any:
    """Return a record batch with exactly these columns; those without an array are null."""
    filled = [arrays[name] if name in arrays else pa.nulls(rows, table.arrow_type(name)) for name in columns]
    return pa.RecordBatch.from_arrays(filled, schema=table.arrow(columns))


_EVENT_FIELDS = [name for name in JOURNAL.columns if name not in ENVELOPE_COLUMNS]
_STORED_FIELDS = [name for name in MESSAGES.columns if name not in (*ENVELOPE_COLUMNS, "queue", "size")]


def events_batch(events: Sequence[EventRecord], columns: Sequence[str]) -> Any:
    """Return a batch of events that were read one by one."""
    arrays = {
        name: pa.array([getattr(event, name) for event in events], JOURNAL.arrow_type(name))
        for name in _EVENT_FIELDS
        if name in columns
    }
    arrays |= envelope_columns([event.body for event in events], columns)
    return batch_of(JOURNAL, columns, arrays, len(events))


def stored_batch(queue: str, messages: Sequence[Stored], columns: Sequence[str]) -> Any:
    """Return a batch of messages that were read one by one."""
    arrays = {
        name: pa.array([getattr(message, name) for message in messages], MESSAGES.arrow_type(name))
        for name in _STORED_FIELDS
        if name in columns
    }
    if "error" in columns:
        arrays["error"] = pa.array([split_error(message.error)[0] for message in messages], pa.string())
    arrays["queue"] = constant(queue, len(messages))
    arrays["size"] = pa.array([len(message.envelope) for message in messages], pa.int64())
    arrays |= envelope_columns([message.envelope for message in messages], columns)
    return batch_of(MESSAGES, columns, arrays, len(messages))


def struct_batch(table: Table, queue: str, rows: Sequence[msgspec.Struct], columns: Sequence[str]) -> Any:
    """Return structs as rows; missing fields are null."""
    arrays = {
        name: pa.array([getattr(row, name, None) for row in rows], table.arrow_type(name))
        for name in columns
        if name != "queue"
    }
    arrays["queue"] = constant(queue, len(rows))
    return batch_of(table, columns, arrays, len(rows))


def constant(value: str, rows: int) -> Any:
    """Return a column with the same text in every row."""
    return pa.repeat(pa.scalar(value, pa.string()), rows)


def fixed_texts(data: Any, width: int) -> Any:
    """Return a column of texts of equal length from a contiguous array, without an object for each."""
    rows = len(data)
    offsets = np.arange(0, width * (rows + 1), width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    )


def numbers(values: Any, kind: Any, missing: Any = None) -> Any:
    """Return a column of integers from a numpy array; `missing` marks null rows."""
    dtype = np.int32 if kind == pa.int32() else np.int64
    return pa.array(np.ascontiguousarray(values, dtype=dtype), kind, mask=missing)
