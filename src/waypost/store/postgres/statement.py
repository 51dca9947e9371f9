"""A function call in the format of the protocol: the statement, and its parameters in the server's binary format.

The general adapters of a driver inspect every element of every list. Here the types are known, so a batch is packed
with one join, and the reply of most verbs is one text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from waypost.store.port import Call, add_wakes
from waypost.values import SideEffect

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

T = TypeVar("T")

TEXT, BYTES, BOOL, INT2, INT4, INT8, JSONB = 25, 17, 16, 21, 23, 20, 3802
_ARRAY_OF = {TEXT: 1009, BYTES: 1001, BOOL: 1000, INT2: 1005, INT4: 1007, INT8: 1016}
_NULL = b"\xff\xff\xff\xff"
_HEAD = struct.Struct("!IIIII")
_LENGTH = struct.Struct("!I").pack
_int2, _int8 = struct.Struct("!h").pack, struct.Struct("!q").pack
_int4 = struct.Struct("!i").pack

Parameter = tuple[int, bytes | None]


@dataclass(slots=True)
class PostgresCall(Call[T]):
    """One statement and how to read its reply."""

    name: str
    queue: str
    command: bytes
    parameters: Sequence[Parameter]
    decode: Callable[[PGresult], T]
    #: Whether to prepare it: true for the verbs that every message needs.
    prepares: bool = False
    #: Returns one statement for this call and the next one of the same `run_many`; each has its own result.
    join: Callable[[PostgresCall[Any]], PostgresCall[tuple[Any, Any]]] | None = None


def text(value: str | None) -> Parameter:
    """A text, or null."""
    return TEXT, None if value is None else value.encode()


def data(value: bytes | None) -> Parameter:
    """Bytes, or null."""
    return BYTES, value


def number(value: int | None) -> Parameter:
    """A bigint, or null."""
    return INT8, None if value is None else _int8(value)


def small(value: int) -> Parameter:
    """A smallint."""
    return INT2, _int2(value)


def flag(value: bool) -> Parameter:
    """A boolean."""
    return BOOL, b"\1" if value else b"\0"


def jsonb(value: bytes) -> Parameter:
    """JSON, in version 1 of its binary format."""
    return JSONB, b"\1" + value


def nothing(kind: int) -> Parameter:
    """A null array."""
    return _ARRAY_OF[kind], None


def _array(kind: int, elements: Iterable[bytes | None], count: int) -> Parameter:
    if count == 0:
        return _ARRAY_OF[kind], struct.pack("!III", 0, 0, kind)
    parts = [_HEAD.pack(1, 1, kind, count, 1)]
    append = parts.append
    for element in elements:
        if element is None:
            append(_NULL)
        else:
            append(_LENGTH(len(element)))
            append(element)
    return _ARRAY_OF[kind], b"".join(parts)


def array_of_data(values: Sequence[bytes | None]) -> Parameter:
    """bytea[]"""
    return _array(BYTES, values, len(values))


def array_of_text(values: Sequence[str | None]) -> Parameter:
    """text[]"""
    return _array(TEXT, [None if value is None else value.encode() for value in values], len(values))


def array_of_numbers(values: Sequence[int | None]) -> Parameter:
    """bigint[]"""
    return _array(INT8, [None if value is None else _int8(value) for value in values], len(values))


def array_of_ints(values: Sequence[int]) -> Parameter:
    """integer[]"""
    return _array(INT4, [_int4(value) for value in values], len(values))


def array_of_smalls(values: Sequence[int]) -> Parameter:
    """smallint[]"""
    return _array(INT2, [_int2(value) for value in values], len(values))


def array_of_flags(values: Sequence[bool]) -> Parameter:
    """boolean[]"""
    return _array(BOOL, [b"\1" if value else b"\0" for value in values], len(values))


def rows_of(result: PGresult) -> list[tuple[Any, ...]]:
    """All rows, with the driver's usual types."""
    from psycopg.adapt import Transformer

    transformer = Transformer()
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, tuple)


#: The side effects of a step, as the SQL function `take_side_effects` returns them.
Also = tuple[SideEffect, ...]


class PublishReply(Struct, array_like=True):
    """The reply of a publish: a letter for each draft ("": all queued), ids other than the draft's, whom to wake.

    Then the side effects.
    """

    letters: str
    others: list[str] | None
    names: list[str]
    more: list[tuple[str, list[str]]]
    also: Also | None = None

    def wake(self, queue: str) -> dict[str, list[str]]:
        """The sleepers to wake, by queue."""
        return by_queue([(queue, self.names), *self.more])


read_published = msgspec.json.Decoder(PublishReply).decode


def by_queue(wakes: Iterable[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Merge pairs of a queue and the sleepers to wake there."""
    wake: dict[str, list[str]] = {}
    for queue, names in wakes:
        if names:
            add_wakes(wake, {queue: names})
    return wake


def one(result: PGresult) -> bytes | None:
    """Return the only value of a reply: a text, or None."""
    return result.get_value(0, 0) if result.ntuples else None


def safe(value: str | None) -> str | None:
    """Return a text that PostgreSQL can store: without NUL and lone surrogates."""
    if value is None or ("\0" not in value and value.isprintable()):
        return value
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
