"""The same verbs as a part of somebody's own transaction, for whatever driver it runs on.

A call is made for our own executors: `$1` for a value, and the value in the server's binary form. Other drivers want
plain values and marks of their own; the cast says of each value what it is. The reply is one text, as always.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

from waypost.errors import ConfigurationError
from waypost.message import ChainState
from waypost.store.port import Call, blocks
from waypost.store.postgres.failures import refused
from waypost.store.postgres.migrating import Names
from waypost.store.postgres.statement import BOOL, BYTES, INT2, INT4, INT8, TEXT, Parameter, PostgresCall, number, one

T = TypeVar("T")

#: Where a verb that runs once per operation has the time for which its result is kept.
TTL_PLACE = 4
_KINDS = {TEXT: "text", BYTES: "bytea", BOOL: "boolean", INT2: "smallint", INT4: "integer", INT8: "bigint"}
_ARRAYS = {1009: TEXT, 1001: BYTES, 1000: BOOL, 1005: INT2, 1007: INT4, 1016: INT8}
_MARK = re.compile(r"\$(\d+)")
_WORD = struct.Struct("!i").unpack_from
#: How a driver marks the places of values.
Style = str
NUMBERED, FORMAT = "$", "%"


def within(call: Call[T]) -> PostgresCall[T]:
    """A call whose result is kept for no repeat: none can come, the transaction ends it either way."""
    mine = cast("PostgresCall[T]", call)
    if len(mine.parameters) <= TTL_PLACE:
        return mine  # no operation, so there is no result to keep
    if mine.name == "watch_chain":
        return cast("PostgresCall[T]", _is_chain_known(mine))
    parameters = list(mine.parameters)
    parameters[TTL_PLACE] = number(None)
    return PostgresCall(mine.name, mine.queue, mine.command, parameters, mine.decode)


def _is_chain_known(call: PostgresCall[Any]) -> PostgresCall[ChainState]:
    """Whether a chain exists: its row is read as the one text that a reply is here."""
    command = b"SELECT count(*)::text FROM (" + call.command + b") found"
    return PostgresCall(call.name, call.queue, command, call.parameters, lambda reply: ChainState(one(reply) == b"1"))


def _scalar(kind: int, raw: bytes) -> Any:
    if kind == TEXT:
        return raw.decode()
    if kind == BYTES:
        return raw
    if kind == BOOL:
        return raw == b"\1"
    return int.from_bytes(raw, "big", signed=True)


def value_of(parameter: Parameter) -> Any:
    """A parameter as Python has it."""
    kind, raw = parameter
    if raw is None:
        return None
    element = _ARRAYS.get(kind)
    if element is None:
        return _scalar(kind, raw)
    dimensions, _, _ = struct.unpack_from("!iii", raw)
    values: list[Any] = []
    if dimensions == 0:
        return values
    place = 20
    for _ in range(_WORD(raw, 12)[0]):
        (length,) = _WORD(raw, place)
        place += 4
        if length < 0:
            values.append(None)
            continue
        values.append(_scalar(element, raw[place : place + length]))
        place += length
    return values


@lru_cache(maxsize=256)
def _spelled(command: bytes, kinds: tuple[int, ...], style: Style) -> str:
    def mark(match: re.Match[str]) -> str:
        kind = kinds[int(match[1]) - 1]
        name = f"{_KINDS[_ARRAYS[kind]]}[]" if kind in _ARRAYS else _KINDS[kind]
        return f"{match[0] if style == NUMBERED else '%s'}::{name}"

    text = command.decode()
    return _MARK.sub(mark, text if style == NUMBERED else text.replace("%", "%%"))


def spelled(call: PostgresCall[Any], style: Style) -> tuple[str, Sequence[Any]]:
    """The statement with the marks of a driver, and its plain values in the order of the marks."""
    kinds = tuple(kind for kind, _ in call.parameters)
    return _spelled(call.command, kinds, style), [value_of(parameter) for parameter in call.parameters]


class Reply:
    """One value, in place of what libpq would have brought."""

    __slots__ = ("_value", "ntuples")

    def __init__(self, value: str | None) -> None:
        self._value = value
        self.ntuples = 0 if value is None else 1

    def get_value(self, row: int, column: int) -> bytes | None:
        return None if self._value is None else self._value.encode()


def read(call: PostgresCall[T], value: Any) -> T:
    """What the one text of a reply means."""
    return call.decode(cast(Any, Reply(value)))


def check_answer(letters: str, told: Sequence[str] | None, queue: str) -> None:
    """Raise what a publish inside a transaction answered in place of raising, so that the transaction lives on."""
    if letters == "F":
        raise refused("WPFUL", (told or [""])[0], queue, "publish")
    if letters == "B":
        raise blocks(queue)
    if letters == "I":
        raise ConfigurationError(
            f"queue {queue} has a max_pending, which is exact only where transactions are read committed; this one is "
            "repeatable read or serializable. Publish it in a transaction of its own, or without a cap"
        )


def open_queue(names: Names, queue: str) -> PostgresCall[None]:
    """Make a queue that is not there, in a step of its own: a row made in a long transaction would hold up workers."""
    command = f"SELECT ({names.of('open')}($1)).number".encode()
    return PostgresCall("publish", queue, command, [(TEXT, queue.encode())], lambda result: None)


def place(names: Names) -> PostgresCall[str | None]:
    """Which database this is, and whether it has our tables: the same text on every connection to it."""
    statement = (
        "SELECT concat_ws(' ', c.system_identifier, d.oid, coalesce(to_regclass($1)::oid, 0)) "
        "FROM pg_control_system() c, pg_database d WHERE d.datname = current_database()"
    )
    return PostgresCall("publish", "", statement.encode(), [(TEXT, names.of("message").encode())], _text)


def _text(result: Any) -> str | None:
    value = one(result)
    return None if value is None else value.decode()
