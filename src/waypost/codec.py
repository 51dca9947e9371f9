"""Bodies and envelopes to bytes and back.

An envelope is the stored form of a message. It is opaque to the store, except for the id at a fixed position:

    byte 0        version, currently 1
    bytes 1–24    the message id
    byte 25       type of the body: 0 bytes, 1 text, 2 JSON
    bytes 26–29   length of the head, big-endian
    head          MessagePack map of optional fields: t type, c correlation id, r reply-to, x trace, h headers,
                  p retry policy, l time limit in seconds
    body          the rest

Every release reads all older versions. A newer version raises `EnvelopeTooNew`, so that a worker can leave the
message for a newer one. Fields of the head that a release does not know are ignored: release 0.1 handles a message with
a retry policy or a time limit by those of its handler. Nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, overload
from uuid import UUID

import msgspec

from waypost.checks import show
from waypost.errors import (
    BodyTooDeep,
    BodyTooLarge,
    ConfigurationError,
    EnvelopeTooNew,
    InvalidBody,
    InvalidHeaders,
    InvalidInput,
    ResultNotKept,
    Undecodable,
    WaypostError,
)
from waypost.identity import ID_CHARACTERS
from waypost.policy import (
    BODY_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_MAX,
    JSON_DEPTH_MAX,
    RetryPolicy,
    pack_retry,
    unpack_retry,
)

T = TypeVar("T")
ContentType = Literal["application/octet-stream", "text/plain", "application/json"]

VERSION = 1
BYTES, TEXT, JSON = 0, 1, 2
CONTENT_TYPES: tuple[ContentType, ...] = ("application/octet-stream", "text/plain", "application/json")
_FIXED = 1 + ID_CHARACTERS + 1 + 4
_NO_HEAD = b"\0\0\0\0"
_CODES = (b"\0", b"\1", b"\2")
#: The first byte of the reason why a result could not be kept; a kept result has the code of its content type there.
_REFUSED = b"\xfe"
REFUSAL_BYTES_MAX = 512
_VERSION_BYTE = bytes([VERSION])

_json_decoder = msgspec.json.Decoder()
_head_encoder = msgspec.msgpack.Encoder()


def _encode_foreign(value: Any) -> Any:
    """Encode what msgspec does not support inside other values: pydantic models, and subclasses of text or numbers."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    plain: tuple[Any, ...] = (str, int, float, dict, list)
    for kind in plain:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


def _encode_foreign_by_names(value: Any) -> Any:
    return value.model_dump(mode="json", by_alias=False) if hasattr(value, "model_dump") else _encode_foreign(value)


_json_encoder = msgspec.json.Encoder(enc_hook=_encode_foreign)
_json_by_names = msgspec.json.Encoder(enc_hook=_encode_foreign_by_names)


def _encode_foreign_sorted(value: Any) -> Any:
    plain = _encode_foreign(value)
    return _sort_sets(plain, value) if hasattr(value, "model_dump") else plain


_json_sorted = msgspec.json.Encoder(enc_hook=_encode_foreign_sorted, order="sorted")


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """An encoded body: its content type (`BYTES`, `TEXT`, `JSON`) and the name of its type, if it has one."""

    content: int
    data: bytes
    type_name: str | None


class _Head(msgspec.Struct):
    """The optional part of an envelope. Typed, so that a damaged one is detected here and not in a handler."""

    t: str | None = None
    c: str | None = None
    r: str | None = None
    x: dict[str, str] = {}
    h: dict[str, str] = {}
    p: dict[str, str | float | None] | None = None
    l: float | None = None  # noqa: E741


_head_decoder = msgspec.msgpack.Decoder(_Head)


class Envelope(msgspec.Struct, frozen=True):
    """A parsed envelope; the body is still bytes."""

    id: str
    content_type: ContentType
    data: bytes
    type_name: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    #: W3C trace context: `traceparent` and `tracestate`.
    trace: dict[str, str] = {}
    headers: dict[str, str] = {}
    #: The message's own retry policy and time limit in seconds, which win over those of its handler.
    retry: RetryPolicy | None = None
    timeout: float | None = None


def encode_body(body: object, as_type: Any = None, *, faithful: bool = True) -> Encoded:
    """Turn a body into bytes, or raise `InvalidBody`, `BodyTooLarge` or `BodyTooDeep`.

    `as_type` is the declared type of its queue. A body that would arrive as a different value is refused: decoded as
    the declared type, as its own type or as plain JSON, it must equal the given one. `faithful=False` skips that check.
    """
    kind = type(body)
    if kind is dict or kind is list:
        if as_type is None and faithful and (plain := _encode_plain(body)) is not None:
            return plain
        encoded = Encoded(JSON, _encode_json(body, faithful), None)
    elif kind is str:
        try:
            encoded = Encoded(TEXT, body.encode(), None)  # type: ignore[attr-defined]
        except UnicodeEncodeError:
            raise InvalidBody("the text has lone surrogates, which UTF-8 cannot encode") from None
    elif isinstance(body, bytes | bytearray | memoryview):
        encoded = Encoded(BYTES, bytes(body), None)
    elif kind is Encoded:
        encoded, faithful = _check_encoded(body), False  # type: ignore[arg-type]
    elif isinstance(body, str) and not isinstance(body, Enum):
        encoded = Encoded(TEXT, encode_body(str(body)).data, None)
    else:
        encoded = Encoded(JSON, _encode_object(body, faithful), type_name_of(body))
    if len(encoded.data) > BODY_BYTES_MAX:
        raise BodyTooLarge(
            f"the body has {len(encoded.data):,} bytes, the limit is {BODY_BYTES_MAX:,}; "
            "put it into object storage and publish a reference"
        )
    if faithful:
        try:
            if _check_faithful(body, encoded, as_type):
                return encoded
        except InvalidBody:
            if (by_names := _encode_by_names(body, encoded, as_type)) is None:
                raise
            return by_names
        return _encode_by_names(body, encoded, as_type) or encoded
    return encoded


def _encode_plain(body: object) -> Encoded | None:
    """Return an encoded JSON value that arrives as it is, as most do; None if it takes more to decide that."""
    try:
        data = _json_encoder.encode(body)
        if len(data) > _SURELY_SHALLOW:
            _check_depth(data)
        if len(data) <= BODY_BYTES_MAX and body == _json_decoder.decode(data):
            return Encoded(JSON, data, None)
    except Exception:
        return None  # the longer way finds what is wrong with it
    return None


def _encode_by_names(body: object, encoded: Encoded, as_type: Any) -> Encoded | None:
    """Return a body whose pydantic models are written by the names of their fields, if it arrives as it is only so.

    Models are written by their aliases, which they read. A model can have aliases that it only writes.
    """
    if encoded.content != JSON:
        return None
    dump = getattr(body, "model_dump_json", None)
    try:
        data: bytes = _json_by_names.encode(body) if dump is None else dump(by_alias=False).encode()
        by_names = Encoded(JSON, data, encoded.type_name)
        if data == encoded.data or len(data) > BODY_BYTES_MAX or not _check_faithful(body, by_names, as_type):
            return None
    except Exception:
        return None
    return by_names


def _check_encoded(encoded: Encoded) -> Encoded:
    """Return a body that another framework has encoded; its JSON must be JSON, and no deeper than ours."""
    if encoded.content == JSON:
        _check_depth(encoded.data)
        try:
            _json_decoder.decode(encoded.data)
        except msgspec.DecodeError as error:
            raise InvalidBody(f"the body was encoded as JSON and is none: {error}") from None
    return encoded


def is_dataclass(kind: type) -> bool:
    """Return whether a class is a dataclass, without the module `dataclasses`, which imports `inspect`."""
    return hasattr(kind, "__dataclass_fields__")


def type_name_of(body: object) -> str | None:
    """Return the name of a body's own type, None for plain JSON values."""
    return name_of_class(type(body))


def name_of_class(kind: type) -> str | None:
    """Return the type name that bodies of a class are published with, None for classes of plain JSON values."""
    if is_dataclass(kind) or issubclass(kind, msgspec.Struct) or hasattr(kind, "model_validate_json"):
        return f"{kind.__module__}.{kind.__qualname__}"
    return None


def _encode_object(body: object, faithful: bool) -> bytes:
    dump = getattr(body, "model_dump_json", None)  # pydantic, without importing it
    if dump is None:
        return _encode_json(body, faithful)
    try:
        data: bytes = dump(by_alias=True).encode()
    except Exception as error:
        raise InvalidBody(f"a {type(body).__name__} cannot be published: {type(error).__name__}") from None
    _check_depth(data)
    return data


def _encode_json(body: object, faithful: bool) -> bytes:
    try:
        data = _json_encoder.encode(body)
    except RecursionError:
        raise BodyTooDeep(f"the body is nested deeper than {JSON_DEPTH_MAX} levels, or holds itself") from None
    except Exception as error:  # also errors raised by a time zone or a class in the body
        raise InvalidBody(
            f"a {type(body).__name__} cannot be published as it is ({error}); give bytes, text, JSON values, "
            "a dataclass, a msgspec Struct or a pydantic model"
        ) from None
    _check_depth(data)
    # msgspec writes NaN and infinity as null. The comparison above finds that; without it, search bodies with a null.
    if not faithful and b"null" in data and _holds_non_finite(body):
        raise InvalidBody("the body holds NaN or infinity, which JSON cannot carry")
    return data


# ---- what arrives must be what was given ---------------------------------------------------------------------


def read_as(body: object, as_type: Any = None) -> Any:
    """Return the type that a body is decoded as: the declared type of its queue, or its own; None for plain JSON."""
    if as_type is None or as_type is Any or as_type is object:
        return None if isinstance(body, Encoded) or type_name_of(body) is None else type(body)
    return as_type


def _check_faithful(body: object, encoded: Encoded, as_type: Any) -> bool:
    """Whether a body arrives as it is. Raises `InvalidBody` if not, unless a pydantic model itself decides that."""
    if as_type is None:
        if encoded.content != JSON:
            return True
        if encoded.type_name is None:
            with suppress(msgspec.DecodeError):  # text of a msgspec.Raw that is no JSON, which is described below
                if _equal(body, _json_decoder.decode(encoded.data)):
                    return True  # nearly always
    as_type = read_as(body, as_type)
    if as_type is None and encoded.content != JSON:
        return True
    try:
        restored = decode_body(CONTENT_TYPES[encoded.content], encoded.data, as_type)
    except ConfigurationError:
        return True  # a type with undefined names: it cannot be decoded as that type, and plain JSON arrives
    except Undecodable as error:
        if _holds_non_finite(body):
            raise InvalidBody("the body holds NaN or infinity, which JSON cannot carry") from None
        raise InvalidBody(f"the body could not be read again when it arrives: {error}") from None
    if _equal(body, restored):
        return True
    if encoded.content == JSON and not hasattr(body, "model_validate_json"):
        difference = _difference(body, restored, "$", in_own_type=False)
        if difference is not None:
            raise InvalidBody(
                f"the body would not arrive as it is: {difference}. Declare a type that says so, as in "
                'Queue("orders", Order), and publish through it, or make it a JSON value before'
            )
        return True
    return False


def _difference(given: Any, restored: Any, place: str, *, in_own_type: bool) -> str | None:
    """Describe the difference between a value and its decoded form, or return None. The body is not quoted."""
    if isinstance(given, msgspec.Raw):
        return None
    if isinstance(given, float) and not math.isfinite(given):
        return f"{place} is NaN or infinity, which JSON cannot carry"
    kind = type(given)
    if is_dataclass(kind) or isinstance(given, msgspec.Struct):
        if type(restored) is kind:
            names = given.__struct_fields__ if isinstance(given, msgspec.Struct) else kind.__dataclass_fields__
            parts = ((getattr(given, name), getattr(restored, name), f"{place}.{name}") for name in names)
            return _first_difference(parts, in_own_type=True)
    elif isinstance(given, dict) and isinstance(restored, dict):
        if given.keys() != restored.keys():
            odd = next((key for key in given if not isinstance(key, str)), "")
            return f"a key of {place} is a {type(odd).__name__} and would arrive as text"
        parts = ((value, restored[key], f"{place}[...]") for key, value in given.items())
        return _first_difference(parts, in_own_type=in_own_type)
    elif isinstance(given, list | tuple) and isinstance(restored, list | tuple) and len(given) == len(restored):
        # The annotation of a field may be a Sequence, so a list is accepted for a tuple.
        if isinstance(given, list) or isinstance(restored, tuple) or in_own_type:
            parts = (
                (one, other, f"{place}[{at}]") for at, (one, other) in enumerate(zip(given, restored, strict=True))
            )
            return _first_difference(parts, in_own_type=in_own_type)
    elif _equal(given, restored):
        return None
    return f"{place} is a {kind.__name__} and would arrive as a {type(restored).__name__}"


def _first_difference(parts: Iterable[tuple[Any, Any, str]], *, in_own_type: bool) -> str | None:
    for given, restored, place in parts:
        if not _equal(given, restored):
            found = _difference(given, restored, place, in_own_type=in_own_type)
            if found is not None:
                return found
    return None


def _equal(given: Any, restored: Any) -> bool:
    try:
        return bool(given == restored)
    except Exception:
        return False


def _check_depth(data: bytes) -> None:
    # With fewer brackets than allowed levels it cannot be too deep: two C scans decide nearly always.
    if data.count(b"[") + data.count(b"{") <= JSON_DEPTH_MAX:
        return
    depth = deepest = 0
    in_text = escaped = False
    for byte in data:
        if in_text:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_text = False
        elif byte == 0x22:
            in_text = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    if deepest > JSON_DEPTH_MAX:
        raise BodyTooDeep(f"the body is nested {deepest} levels deep, the limit is {JSON_DEPTH_MAX}")


#: Types that cannot hold a float.
_HOLD_NOTHING = frozenset((str, int, bool, type(None), bytes))


def _holds_non_finite(body: object) -> bool:
    kind = type(body)
    if kind in _HOLD_NOTHING:
        return False
    if kind is float:
        return not math.isfinite(body)  # type: ignore[arg-type]
    if kind is dict:
        return any(type(value) not in _HOLD_NOTHING and _holds_non_finite(value) for value in body.values())  # type: ignore[attr-defined]
    if isinstance(body, float):
        return not math.isfinite(body)
    if isinstance(body, Mapping):
        return any(_holds_non_finite(value) for value in body.values())
    if isinstance(body, list | tuple | set | frozenset):
        return any(map(_holds_non_finite, body))
    if isinstance(body, msgspec.Struct):
        return any(_holds_non_finite(getattr(body, name)) for name in body.__struct_fields__)
    if is_dataclass(type(body)):
        import dataclasses

        return any(_holds_non_finite(getattr(body, field.name)) for field in dataclasses.fields(cast(Any, body)))
    return False


def content_key(encoded: Encoded, as_type: Any = None) -> str:
    """The deduplication key of a body by its content: SHA-256 of the canonical form, type name included.

    It is computed from the decoded body, as the declared type of the queue if there is one: sets are sorted, and an
    integer in a float field is a float.
    """
    data = encoded.data
    if encoded.content == JSON:
        # A pydantic model has its own order and form, so its JSON text is used.
        is_model = hasattr(as_type, "model_validate_json")
        kind: Any = None if is_model else as_type
        value = decode_body(CONTENT_TYPES[JSON], data, kind)
        if is_model:
            with suppress(WaypostError):
                value = _sort_sets(value, decode_body(CONTENT_TYPES[JSON], data, as_type))
        data = _json_sorted.encode(value)
    from hashlib import sha256  # few programs need it

    digest = sha256(f"{encoded.content}:{encoded.type_name or ''}\n".encode())
    digest.update(data)
    return "sha256:" + digest.hexdigest()


def _sort_sets(plain: Any, value: Any) -> Any:
    """Return the JSON form of a value with its sets sorted: pydantic writes them in an order of their own."""
    if isinstance(value, set | frozenset):
        return sorted(plain, key=_json_sorted.encode) if isinstance(plain, list) else plain
    if isinstance(value, list | tuple) and isinstance(plain, list) and len(plain) == len(value):
        return [_sort_sets(one, other) for one, other in zip(plain, value, strict=True)]
    if isinstance(value, Mapping) and isinstance(plain, dict) and len(plain) == len(value):
        return {name: _sort_sets(one, other) for (name, one), other in zip(plain.items(), value.values(), strict=True)}
    fields = getattr(type(value), "model_fields", None) or getattr(type(value), "__dataclass_fields__", None)
    if not isinstance(fields, Mapping):
        return plain
    if not isinstance(plain, dict):
        return _sort_sets(plain, value.root) if "root" in fields else plain
    given = dict.fromkeys(getattr(type(value), "model_computed_fields", ())) | dict(fields)
    for name, field in given.items():
        for key in (name, getattr(field, "serialization_alias", None), getattr(field, "alias", None)):
            if key in plain:
                plain[key] = _sort_sets(plain[key], getattr(value, name, None))
                break
    return plain


def encode_head(
    *,
    type_name: str | None = None,
    correlation_id: str | None = None,
    reply_to: str | None = None,
    trace: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    retry: RetryPolicy | None = None,
    timeout: float | None = None,
) -> bytes:
    """Return the encoded head with its length before it. Encoded once for a batch that shares it."""
    head: dict[str, Any] = {}
    if type_name is not None:
        head["t"] = type_name
    if correlation_id is not None:
        head["c"] = _header_text("correlation_id", correlation_id)
    if reply_to is not None:
        head["r"] = _header_text("reply_to", reply_to)
    if trace:
        head["x"] = {_header_text("trace", k): _header_text("trace", v) for k, v in trace.items()}
    if headers:
        if len(headers) > HEADERS_MAX:
            raise InvalidHeaders(f"{len(headers)} headers, the limit is {HEADERS_MAX}")
        head["h"] = {_header_text("header name", k): _header_text(f"header {k!r}", v) for k, v in headers.items()}
    if retry is not None:
        head["p"] = pack_retry(retry)
    if timeout is not None:
        head["l"] = timeout
    if not head:
        return _NO_HEAD
    data = _head_encoder.encode(head)
    if len(data) > HEADER_BYTES_MAX:
        raise InvalidHeaders(f"headers take {len(data):,} bytes, the limit is {HEADER_BYTES_MAX:,}")
    return len(data).to_bytes(4, "big") + data


def _header_text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidHeaders(f"{what} must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidHeaders(f"{what} holds characters that UTF-8 cannot carry") from None
    return value


def make_envelope(message_id: str, encoded: Encoded, head: bytes = _NO_HEAD) -> bytes:
    """Return an envelope. `head` comes from `encode_head`."""
    return b"".join((_VERSION_BYTE, message_id.encode(), _CODES[encoded.content], head, encoded.data))


def with_id(envelope: bytes, message_id: str) -> bytes:
    """Return the same envelope with another id."""
    return envelope[:1] + message_id.encode() + envelope[1 + len(message_id) :]


class Heads:
    """The heads of one call's envelopes: they differ only in the type name of the body, so each is encoded once."""

    __slots__ = ("_correlation_id", "_headers", "_reply_to", "_retry", "_timeout", "_trace", "_typed", "plain")

    def __init__(
        self,
        *,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        trace: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        retry: RetryPolicy | None = None,
        timeout: float | None = None,
    ) -> None:
        self._correlation_id = correlation_id
        self._reply_to = reply_to
        self._trace = trace
        self._headers = headers
        self._retry = retry
        self._timeout = timeout
        self._typed: dict[str, bytes] = {}
        self.plain = self._encode(None)

    def _encode(self, type_name: str | None) -> bytes:
        return encode_head(
            type_name=type_name,
            correlation_id=self._correlation_id,
            reply_to=self._reply_to,
            trace=self._trace,
            headers=self._headers,
            retry=self._retry,
            timeout=self._timeout,
        )

    def of(self, type_name: str | None) -> bytes:
        """Return the head for a body of this type."""
        if type_name is None:
            return self.plain
        head = self._typed.get(type_name)
        if head is None:
            head = self._typed[type_name] = self._encode(type_name)
        return head


#: A JSON text this short can be neither too deep, because every level needs two brackets, nor too large.
_SURELY_SHALLOW = 2 * JSON_DEPTH_MAX
#: Bodies that are decoded at once to be compared: with a whole chunk, Python's garbage collector would start again and
#: again, and scan all objects of the program, while the decoded values exist.
_BODIES_COMPARED_AT_ONCE = 64
_PLAIN_JSON = ({dict}, {list}, {dict, list})


def seal_many(ids: Sequence[str], bodies: Sequence[object], heads: Heads, as_type: Any = None) -> list[bytes]:
    """Envelopes for bodies that share their heads: the hot path of a batch.

    Plain dicts and lists are encoded by one call into C and cut at the line ends, which JSON text cannot hold.
    """
    if (as_type is None or as_type is Any) and set(map(type, bodies)) in _PLAIN_JSON:
        lines = _plain_lines(bodies)
        if lines is not None:
            tail = _CODES[JSON] + heads.plain
            return [_VERSION_BYTE + id.encode() + tail + line for id, line in zip(ids, lines, strict=True)]
    envelopes: list[bytes] = []
    for message_id, body in zip(ids, bodies, strict=True):
        try:
            encoded = encode_body(body, as_type)
        except WaypostError as error:
            error.add_note(f"body number {len(envelopes)} of its chunk, counted from 0")
            raise
        envelopes.append(make_envelope(message_id, encoded, heads.of(encoded.type_name)))
    return envelopes


def _plain_lines(bodies: Sequence[object]) -> list[bytes] | None:
    """Return one JSON text for each body; None if one of them is not plain and must be encoded singly."""
    lines: list[bytes] = []
    try:
        for start in range(0, len(bodies), _BODIES_COMPARED_AT_ONCE):
            part = list(bodies[start : start + _BODIES_COMPARED_AT_ONCE])
            text = _json_encoder.encode_lines(part)
            lines += text.split(b"\n")
            lines.pop()
            # Another count means that a body has a line end itself (msgspec.Raw).
            if len(lines) != start + len(part):
                return None
            # A body that would arrive as a different value is encoded singly.
            if _json_decoder.decode_lines(text) != part:
                return None
        for line in lines:
            if len(line) > _SURELY_SHALLOW:
                if len(line) > BODY_BYTES_MAX:
                    return None
                _check_depth(line)
    except Exception:
        return None
    return lines


def encode_result(value: object) -> bytes:
    """Return an encoded result: its content type, then the value, with the limits of a body."""
    try:
        # A model is read again, to write it by aliases or by names; what it cannot read is kept all the same.
        encoded = encode_body(value, faithful=hasattr(value, "model_validate_json"))
    except InvalidBody:
        encoded = encode_body(value, faithful=False)
    return _CODES[encoded.content] + encoded.data


def refused_result(error: Exception) -> bytes:
    """Return what is kept instead of a result that could not be encoded: the reason."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # it may be an error of the value's own code
        text = type(error).__name__
    return _REFUSED + text.encode("utf-8", "replace")[:REFUSAL_BYTES_MAX]


def refusal_of(data: bytes | None) -> str | None:
    """Return why a result could not be kept, or None."""
    return data[1:].decode("utf-8", "replace") if data is not None and data[:1] == _REFUSED else None


def decode_result(data: bytes, as_type: Any = None) -> Any:
    """The value of a kept result; `ResultNotKept` if there was one that could not be kept.

    Raises `Undecodable` if it is damaged or not of this type.
    """
    refusal = refusal_of(data)
    if refusal is not None:
        raise ResultNotKept(
            f"the message is done, but what its handler returned could not be kept as its result ({refusal}): return "
            "something smaller or simpler, such as where the value is stored"
        )
    if not data or data[0] >= len(CONTENT_TYPES):
        raise Undecodable("the result is empty or damaged")
    return decode_body(CONTENT_TYPES[data[0]], data[1:], as_type)


def open_envelope(data: bytes) -> Envelope:
    """Decode an envelope; raise `EnvelopeTooNew` or `Undecodable`."""
    if not data:
        raise Undecodable("the envelope is empty")
    if data[0] > VERSION:
        raise EnvelopeTooNew(
            f"envelope version {data[0]} is newer than this release knows ({VERSION}); update waypost to read it"
        )
    try:
        message_id = data[1 : 1 + ID_CHARACTERS].decode("ascii")
        content_type = CONTENT_TYPES[data[1 + ID_CHARACTERS]]
        body_at = _FIXED + int.from_bytes(data[_FIXED - 4 : _FIXED], "big")
        if data[0] == 0 or len(data) < body_at:
            raise Undecodable("the envelope is cut short or damaged")
        if body_at == _FIXED:
            return Envelope(message_id, content_type, data[_FIXED:])
        head = _head_decoder.decode(data[_FIXED:body_at])
        retry = None if head.p is None else _retry_of(head.p)
        return Envelope(
            message_id, content_type, data[body_at:], head.t, head.c, head.r, head.x, head.h, retry, head.l
        )  # fmt: skip
    except (IndexError, UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        raise Undecodable("the envelope is cut short or damaged") from None


def _retry_of(packed: Mapping[str, str | float | None]) -> RetryPolicy:
    try:
        return unpack_retry(packed)
    except (LookupError, TypeError):
        raise EnvelopeTooNew(
            f"the message has a retry policy {show(packed.get('kind'))} that this release cannot read; update waypost"
        ) from None
    except WaypostError as error:
        raise Undecodable(f"the retry policy of the message is damaged: {error}") from None


def head_of(envelope: Envelope, **changes: Any) -> bytes:
    """Return the head of an envelope, encoded again with these fields in place of its own."""
    fields: dict[str, Any] = {
        "type_name": envelope.type_name, "correlation_id": envelope.correlation_id, "reply_to": envelope.reply_to,
        "trace": envelope.trace, "headers": envelope.headers, "retry": envelope.retry, "timeout": envelope.timeout,
    }  # fmt: skip
    return encode_head(**(fields | changes))


def has_head(data: bytes) -> bool:
    """Whether an envelope has a head, which most have not."""
    return data[_FIXED - 4 : _FIXED] != _NO_HEAD


def with_trace(data: bytes, trace: Mapping[str, str]) -> bytes:
    """Return the same envelope with this trace context."""
    envelope = open_envelope(data)
    head = head_of(envelope, trace=trace)
    return data[: _FIXED - 4] + head + envelope.data


#: What `decode_plain` returns for an envelope that it does not decode.
NOT_PLAIN: Any = object()
_JSON_WITHOUT_HEAD = _CODES[JSON] + _NO_HEAD


def decode_plain(data: bytes, as_type: Any) -> Any:
    """Return the body of an envelope that has a JSON body and no head, as most; `NOT_PLAIN` if it takes more to decide.

    A short way of `plain_body` and `decode_body`: it runs for every message.
    """
    if data[_FIXED - 5 : _FIXED] != _JSON_WITHOUT_HEAD or data[0] != VERSION:
        return NOT_PLAIN
    try:
        if as_type is None or as_type is Any:
            return _json_decoder.decode(data[_FIXED:])
        return _json_decoder_of(as_type)(data[_FIXED:])
    except Exception:
        return NOT_PLAIN  # the longer way describes the error


def plain_body(data: bytes) -> tuple[ContentType, bytes] | None:
    """Return content type and body of an envelope without a head, as most are; None for any other."""
    if data[:1] == _VERSION_BYTE and data[_FIXED - 4 : _FIXED] == _NO_HEAD and data[_FIXED - 5] < len(CONTENT_TYPES):
        return CONTENT_TYPES[data[_FIXED - 5]], data[_FIXED:]
    return None


# ---- reading a body as a type --------------------------------------------------------------------------------


def _json_decoder_of(as_type: Any) -> Callable[[bytes], Any]:
    """How a type is decoded from JSON; cached, because preparing it costs more than decoding a small body."""
    kept = _decoders.get(id(as_type))
    if kept is not None:
        return kept[1]
    try:
        hash(as_type)
    except TypeError:
        decoder = _make_json_decoder(as_type)
    else:
        decoder = _kept_json_decoder_of(as_type)
    if len(_decoders) >= _DECODERS_MAX:
        _decoders.clear()
    _decoders[id(as_type)] = (as_type, decoder)
    return decoder


def _make_json_decoder(as_type: Any) -> Callable[[bytes], Any]:
    if hasattr(as_type, "model_validate_json"):
        read: Callable[[bytes], Any] = as_type.model_validate_json
        return read
    try:
        return msgspec.json.Decoder(as_type, dec_hook=_restore).decode
    except TypeError:
        members = _members(as_type)
        shapes = [shape for shape in map(_json_shape, members) if shape is not None]
        # Of two members that decode from a JSON object, the first match could be the wrong one.
        if len(members) < 2 or len(set(shapes)) < len(shapes):
            raise
    readers = [_make_json_decoder(one) for one in sorted(members, key=lambda one: one is not str)]
    return partial(_read_first, readers)


_DECODERS_MAX = 256
_kept_json_decoder_of = lru_cache(maxsize=_DECODERS_MAX)(_make_json_decoder)
#: By identity, because hashing a type like `dict[str, Any]` takes longer than finding its decoder. The type is kept
#: beside it, so that no other object can get its identity.
_decoders: dict[int, tuple[Any, Callable[[bytes], Any]]] = {}


def _read_first(readers: Sequence[Callable[[bytes], Any]], data: bytes) -> Any:
    """Return the value decoded as the first matching member of a union."""
    for read in readers[:-1]:
        try:
            return read(data)
        except Exception:
            continue
    return readers[-1](data)


def _members(as_type: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(as_type) if get_origin(as_type) in (Union, UnionType) else (as_type,)


def _json_shape(as_type: Any) -> Literal["object", "array"] | None:
    kind = get_origin(as_type) or as_type
    if not isinstance(kind, type) or issubclass(kind, str | bytes):
        return None
    if issubclass(kind, dict | Mapping | msgspec.Struct) or is_dataclass(kind):
        return "object"
    if hasattr(kind, "model_validate_json"):
        return "object"
    return "array" if issubclass(kind, Collection) else None


def _restore(kind: type, value: Any) -> Any:
    """Decode types that msgspec does not support inside others: pydantic models, and subclasses of text or numbers."""
    if kind is object:
        return value
    if isinstance(value, kind):
        return value
    try:
        if hasattr(kind, "model_validate"):
            return kind.model_validate(value)
        if type(value) in _SUBCLASSED and issubclass(kind, type(value)):
            return kind(value)
    except Exception:  # the text of another error may repeat the body
        raise ValueError(f"Expected `{kind.__name__}`, got another `{type(value).__name__}`") from None
    raise ValueError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


_SUBCLASSED = frozenset((str, bytes, int, float, list, dict))


def check_type(what: str, as_type: Any, error: type[WaypostError] = InvalidInput) -> Any:
    """Return a type that bodies can be read as unchanged; None and Any stand for any body.

    A type whose annotations name undefined classes is accepted: it is checked again when a worker starts.
    """
    try:
        _json_decoder_of(as_type)
    except NameError:
        return as_type
    except Exception as failure:
        raise error(f"{what} must be a type that a body can be read as, not {show(as_type)}: {failure}") from None
    return as_type


def check_type_is_complete(what: str, as_type: Any) -> None:
    """Raise `ConfigurationError` if a type names classes that are not defined."""
    try:
        _json_decoder_of(as_type)
    except NameError as failure:
        raise ConfigurationError(f"{what}: {show(as_type)} cannot be resolved: {failure}") from None


@overload
def decode_body(content_type: str, data: bytes) -> Any: ...
@overload
def decode_body(content_type: str, data: bytes, as_type: type[T]) -> T: ...
def decode_body(content_type: str, data: bytes, as_type: Any = None) -> Any:
    """Return the body as it was published, or as `as_type`; `Undecodable` if it does not match."""
    try:
        if content_type == "application/octet-stream":
            value: Any = data
        elif content_type == "text/plain":
            value = data.decode()
        elif as_type is None or as_type is Any:
            return _json_decoder.decode(data)
        else:
            return _json_decoder_of(as_type)(data)
    except NameError as error:
        # The error is in the program, not in the body.
        raise ConfigurationError(f"type {show(as_type)} cannot be resolved: {error}") from None
    except Exception as error:  # also errors of a type's own code: a retry would decode the same bytes
        wanted = "JSON" if as_type is None else _name_of_type(as_type)
        # Pydantic's text repeats the input, and so may a type's own; payloads stay out of errors.
        text = str(error) if type(error) in _SAFE_TO_QUOTE else type(error).__name__
        raise Undecodable(f"the body is not a valid {wanted}: {text}") from None
    return value if as_type is None or as_type is Any else _as_text_or_bytes(value, as_type)


#: Errors whose text has the path and the types, and nothing of the body.
_SAFE_TO_QUOTE = (msgspec.DecodeError, msgspec.ValidationError)
#: Text and bytes are not converted: a text is not parsed as a date.
_UNCONVERTED = (bytes, bytearray, memoryview, datetime, date, time, timedelta, Decimal, UUID)


def _as_text_or_bytes(value: str | bytes, as_type: Any) -> Any:
    """Return a text or bytes body as a type that allows it: `str`, a union with it, a literal, a new type of it."""
    for member in _members(as_type):
        if member is type(value) or member is object:
            return value
        try:
            return msgspec.convert(value, member, builtin_types=_UNCONVERTED, dec_hook=_restore)
        except Exception:
            continue
    raise Undecodable(f"the body is {type(value).__name__}, not {_name_of_type(as_type)}")


def _name_of_type(as_type: Any) -> str:
    return as_type.__name__ if isinstance(as_type, type) and get_origin(as_type) is None else show(as_type)
