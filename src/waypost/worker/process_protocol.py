"""The protocol between a worker and a handler process: MessagePack of plain data, each frame after its length.

No frame is executed as code: an outcome is sent as its fields, an error as the name of its class and its text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from waypost.errors import ProcessFailed
from waypost.message import Dead, Drop, Message, Outcome, Retry, Snooze, cut_text, error_text, traceback_text
from waypost.values import Continuation, Lease

T = TypeVar("T")
LENGTH_BYTES = 4
#: The frame with which a process confirms that it starts a call: empty.
BEGUN = bytes(LENGTH_BYTES)
#: The types of error arguments that are transferred, so that the error can be created again.
PLAIN = (str, int, float, bool, type(None))
#: Only the end of a traceback is transferred.
TRACEBACK_CHARACTERS_MAX = 16 * 1024


class Hello(Struct, frozen=True):
    """The first frame: the handler of the process."""

    module: str
    name: str
    queue: str
    batch: int | None
    #: `module:name` of the body's type if the function has no annotation for it.
    body_type: str | None
    result_ttl_ms: int | None = None


class Call(Struct, frozen=True):
    """The messages of one handler call."""

    leases: list[Lease]


class OutcomeFields(Struct, frozen=True):
    """An outcome."""

    kind: Literal["done", "retry", "snooze", "dead", "drop"]
    after_ms: int | None = None
    reason: str | None = None
    error: str | None = None


class Failure(Struct, frozen=True):
    """The parts of an error that are transferred."""

    module: str
    name: str
    text: str
    arguments: list[str | int | float | bool | None] | None
    traceback: str


class End(Struct, frozen=True):
    """The outcome that a handler set on a message, or why the message could not be decoded."""

    outcome: OutcomeFields | None = None
    then: tuple[Continuation, ...] = ()
    result: bytes | None = None
    result_ttl_ms: int = 0
    unreadable: Failure | None = None


class Answer(Struct, frozen=True):
    """How a call ended. The reply to `Hello` is one without ends, with the import error if there was one."""

    ends: list[End] = []
    outcome: OutcomeFields | None = None
    failure: Failure | None = None


def _plain_type(value: object) -> object:
    """Return text or a number of a class of its own, such as a `numpy.float64`, as text or a number."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"a handler process cannot send a {type(value).__name__}")


encode = msgspec.msgpack.Encoder(enc_hook=_plain_type).encode
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def frame(value: Struct) -> bytes:
    """Return the encoded form of a value."""
    data = encode(value)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def decode(data: bytes, kind: type[T]) -> T:
    """Return the value of an encoded form."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    value: T = decoder.decode(data)
    return value


# ---- outcomes ------------------------------------------------------------------------------------------------


def encode_outcome(outcome: Outcome | Literal["done"] | None) -> OutcomeFields | None:
    """Return the fields of an outcome."""
    match outcome:
        case None:
            return None
        case Retry():
            return OutcomeFields("retry", outcome._after_ms, outcome.reason)
        case Snooze():
            return OutcomeFields("snooze", outcome._after_ms)
        case Dead():
            return OutcomeFields("dead", None, outcome.reason, outcome.error)
        case Drop():
            return OutcomeFields("drop")
    return OutcomeFields("done")


def decode_outcome(outcome: OutcomeFields) -> Outcome | Literal["done"]:
    """Return the outcome of these fields."""
    after = None if outcome.after_ms is None else outcome.after_ms / 1000
    match outcome.kind:
        case "retry":
            return Retry(after, outcome.reason)
        case "snooze":
            return Snooze(after or 0)
        case "dead":
            return Dead(outcome.reason or "rejected", outcome.error)
        case "drop":
            return Drop()
    return "done"


def read_end(message: Message[Any]) -> End:
    """Return what a handler set on a message."""
    return End(encode_outcome(message.outcome), message._then, message._result, message._result_ttl_ms)


def apply_end(message: Message[Any], end: End) -> None:
    """Apply what the handler set on its copy of a message to ours."""
    if end.outcome is not None:
        message.outcome = decode_outcome(end.outcome)
    message._then = end.then
    message._result = end.result
    message._result_ttl_ms = end.result_ttl_ms


# ---- errors --------------------------------------------------------------------------------------------------


def encode_error(error: BaseException) -> Failure:
    """Return the parts of an error to transfer: the name of its class, its text, its arguments if they are plain."""
    kind = type(error)
    try:
        plain = all(isinstance(one, PLAIN) for one in error.args)
        arguments = [_plain(one) for one in error.args] if plain else None
    except Exception:
        arguments = None  # attributes of an error are user code
    text = traceback_text(error, TRACEBACK_CHARACTERS_MAX) or ""
    return Failure(str(kind.__module__), kind.__qualname__, error_text(error), arguments, text)


def _plain(value: Any) -> Any:
    """Return the value without what MessagePack cannot encode: huge numbers and lone surrogates."""
    if isinstance(value, str):
        return cut_text(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    return value


def decode_error(failure: Failure, find_object: Callable[[str, str], Any]) -> BaseException:
    """Return an error of the same class and text, so that a retry policy by class works; else a `ProcessFailed`."""
    error = _same_class(failure, find_object) or ProcessFailed(f"{failure.module}.{failure.name}: {failure.text}")
    if failure.traceback:
        error.add_note(f"In the handler's process:\n{failure.traceback}")
    return error


def _same_class(failure: Failure, find_object: Callable[[str, str], Any]) -> BaseException | None:
    kind = find_object(failure.module, failure.name) if failure.module not in ("__main__", "") else None
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        return None
    arguments = [failure.text] if failure.arguments is None else failure.arguments
    try:
        # Without __init__, which may require other arguments.
        error = kind.__new__(kind, *arguments)
        if str(error) == failure.text:
            return error
    except Exception:
        error = None
    try:
        text = failure.text
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__str__": lambda self: text}
        subclass: Any = type(kind.__name__, (kind,), names)
        made: BaseException = subclass.__new__(subclass, text)
        return made
    except Exception:
        return error
