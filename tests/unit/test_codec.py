"""Bodies and envelopes: what is encoded is decoded unchanged, and what cannot be encoded is refused with the reason."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import GenericAlias
from typing import Annotated, Any, Literal, NewType, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypost import CONTENT, Queue, Waypost, codec, errors
from waypost.identity import Session
from waypost.policy import (
    BODY_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_MAX,
    JSON_DEPTH_MAX,
    Constant,
    Exponential,
    Linear,
    NoRetry,
    RetryPolicy,
    format_retry,
    parse_retry,
)

ID = "0123456789abcdefghjkmnpq"


class Order(msgspec.Struct):
    id: int
    total: float = 0.0


@dataclasses.dataclass
class Note:
    text: str
    score: float = 0.0


class Parcel(pydantic.BaseModel):
    weight: int


class Text(str):
    __slots__ = ()


SHORT_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | SHORT_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SHORT_TEXT, inner, max_size=4),
    max_leaves=10,
)


def through(body: object, as_type: Any = None, **head: Any) -> Any:
    encoded = codec.encode_body(body)
    envelope = codec.make_envelope(ID, encoded, codec.encode_head(type_name=encoded.type_name, **head))
    opened = codec.open_envelope(envelope)
    assert opened.id == ID
    return codec.decode_body(opened.content_type, opened.data, as_type)


def nested(depth: int) -> list[Any]:
    body: list[Any] = []
    for _ in range(depth - 1):
        body = [body]
    return body


# ---- bodies --------------------------------------------------------------------------------------------------


@pytest.mark.promise("PUB-1")
@given(JSON | st.binary() | SHORT_TEXT)
def test_every_plain_body_is_restored_unchanged(body: object) -> None:
    assert through(body) == body


@pytest.mark.promise("PUB-1")
@pytest.mark.parametrize("body", [Order(1, 2.5), Note("a"), Parcel(weight=3)])
def test_a_body_of_a_declared_type_carries_its_type_name_and_is_restored(body: Any) -> None:
    encoded = codec.encode_body(body)
    assert encoded.type_name == f"{__name__}.{type(body).__name__}"
    assert through(body, type(body)) == body


@pytest.mark.parametrize("body", [bytearray(b"a"), memoryview(b"a")])
def test_anything_like_bytes_is_bytes(body: object) -> None:
    assert through(body) == b"a"


def test_text_of_a_subclass_is_text() -> None:
    assert through(Text("a")) == "a"


@pytest.mark.promise("PUB-8")
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (object(), errors.InvalidBody),
        ({"a": object()}, errors.InvalidBody),
        ({1: {2, object()}}, errors.InvalidBody),
        (math.nan, errors.InvalidBody),
        ({"a": [1, (2, math.inf)]}, errors.InvalidBody),
        (Order(1, -math.inf), errors.InvalidBody),
        (Note("a", math.nan), errors.InvalidBody),
        ({"a": {"b": math.nan}, "c": None}, errors.InvalidBody),
        ("\ud800", errors.InvalidBody),
        (b"x" * (BODY_BYTES_MAX + 1), errors.BodyTooLarge),
        ({"a": "x" * BODY_BYTES_MAX}, errors.BodyTooLarge),
        (nested(JSON_DEPTH_MAX + 1), errors.BodyTooDeep),
        ({"a": nested(JSON_DEPTH_MAX)}, errors.BodyTooDeep),
    ],
)
def test_a_body_without_a_faithful_form_is_refused(body: object, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        codec.encode_body(body)
    heads = codec.Heads()
    with pytest.raises(kind) as caught:
        codec.seal_many([ID, ID], [{"fine": 1}, body], heads)
    assert caught.value.__notes__ == ["body number 1 of its chunk, counted from 0"]


def test_a_body_that_holds_itself_is_refused() -> None:
    body: list[Any] = []
    body.append(body)
    with pytest.raises(errors.BodyTooDeep):
        codec.encode_body(body)


@pytest.mark.parametrize(
    "body", [nested(JSON_DEPTH_MAX), {"a": "[" * 500 + '\\"{'}, b"x" * BODY_BYTES_MAX, {"a": None, "b": 1.5}]
)
def test_a_body_at_the_size_limit_is_accepted(body: object) -> None:
    assert through(body) == body
    (envelope,) = codec.seal_many([ID], [body], codec.Heads())
    assert envelope == codec.make_envelope(ID, codec.encode_body(body))


@pytest.mark.parametrize(
    ("content", "data", "as_type"),
    [
        ("application/json", b"{", None),
        ("application/json", b'{"id":"x"}', Order),
        ("application/json", b'{"weight":"heavy"}', Parcel),
        ("text/plain", b"\xff", None),
        ("text/plain", b"a", bytes),
        ("application/octet-stream", b"a", Order),
    ],
)
def test_a_body_of_another_type_than_declared_is_undecodable(content: str, data: bytes, as_type: Any) -> None:
    with pytest.raises(errors.Undecodable) as caught:
        codec.decode_body(content, data, as_type)
    assert "heavy" not in str(caught.value)


# ---- envelopes -----------------------------------------------------------------------------------------------


@pytest.mark.promise("PUB-1")
@given(st.dictionaries(SHORT_TEXT, SHORT_TEXT, max_size=5), SHORT_TEXT, SHORT_TEXT, st.binary(max_size=50))
def test_an_envelope_carries_its_head(headers: dict[str, str], correlation_id: str, reply_to: str, data: bytes) -> None:
    trace = {"traceparent": "00-1-2-3"}
    head = codec.encode_head(
        type_name="a.B", correlation_id=correlation_id, reply_to=reply_to, trace=trace, headers=headers
    )
    opened = codec.open_envelope(codec.make_envelope(ID, codec.encode_body(data), head))
    assert opened == codec.Envelope(
        ID, "application/octet-stream", data, "a.B", correlation_id, reply_to, trace, headers
    )


@pytest.mark.promise("PUB-12")
@pytest.mark.parametrize(
    "retry", [Exponential(attempts=3, first=timedelta(seconds=2)), Linear(total_cap=60), Constant(jitter=0), NoRetry()]
)
def test_an_envelope_carries_a_retry_policy_and_a_time_limit(retry: RetryPolicy) -> None:
    envelope = codec.make_envelope(ID, codec.encode_body("a"), codec.encode_head(retry=retry, timeout=2.5))
    opened = codec.open_envelope(codec.with_trace(envelope, {"traceparent": "new"}))
    assert (opened.retry, opened.timeout, opened.trace) == (retry, 2.5, {"traceparent": "new"})
    # The form in which the first release reads a head: it ignores fields that it does not know.
    known = msgspec.msgpack.decode(envelope[30:-1])
    assert set(known) == {"p", "l"}
    assert parse_retry(format_retry(retry)) == retry


@pytest.mark.promise("PUB-12")
@pytest.mark.parametrize("packed", [{"kind": "fibonacci"}, {"kind": "none", "more": 1}, {}])
def test_a_retry_policy_of_a_newer_release_raises_envelope_too_new(packed: dict[str, object]) -> None:
    head = msgspec.msgpack.encode({"p": packed})
    envelope = codec.make_envelope(ID, codec.encode_body("a"), len(head).to_bytes(4, "big") + head)
    with pytest.raises(errors.EnvelopeTooNew, match="update waypost"):
        codec.open_envelope(envelope)


@pytest.mark.promise("PUB-12")
def test_a_retry_policy_with_impossible_numbers_is_undecodable() -> None:
    head = msgspec.msgpack.encode({"p": {"kind": "constant", "pause": -1}})
    envelope = codec.make_envelope(ID, codec.encode_body("a"), len(head).to_bytes(4, "big") + head)
    with pytest.raises(errors.Undecodable, match="retry policy of the message is damaged"):
        codec.open_envelope(envelope)


def test_envelopes_of_version_one_can_be_read() -> None:
    envelope = b"\x01" + ID.encode() + b"\x02\x00\x00\x00\x0c\x82\xa1t\xa1N\xa1h\x81\xa1a\xa1b" + b'{"n":1}'
    opened = codec.open_envelope(envelope)
    assert (opened.id, opened.type_name, opened.headers) == (ID, "N", {"a": "b"})
    assert codec.decode_body(opened.content_type, opened.data) == {"n": 1}


@pytest.mark.promise("PUB-1")
def test_a_newer_envelope_raises_envelope_too_new() -> None:
    with pytest.raises(errors.EnvelopeTooNew, match="update waypost"):
        codec.open_envelope(bytes([codec.VERSION + 1]))


@given(st.binary(max_size=80).map(lambda tail: b"\1" + tail) | st.just(b"") | st.just(b"\0" * 40))
def test_a_damaged_envelope_is_undecodable_and_nothing_worse(data: bytes) -> None:
    try:
        codec.open_envelope(data)
    except errors.Undecodable:
        pass
    else:
        assert len(data) >= 30


@pytest.mark.promise("PUB-8")
@pytest.mark.parametrize(
    "head",
    [
        {"headers": {str(n): "" for n in range(HEADERS_MAX + 1)}},
        {"headers": {"a": "x" * HEADER_BYTES_MAX}},
        {"headers": {"a": 1}},
        {"headers": {1: "a"}},
        {"headers": {"a": "\ud800"}},
        {"correlation_id": 7},
        {"reply_to": b"a"},
    ],
)
def test_headers_out_of_bounds_are_refused(head: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidHeaders):
        codec.Heads(**head)


# ---- many at once --------------------------------------------------------------------------------------------


@given(st.lists(JSON | st.binary(max_size=5), min_size=1, max_size=8))
def test_many_envelopes_are_what_single_ones_are(bodies: list[Any]) -> None:
    ids = Session().message_ids(len(bodies))
    heads = codec.Heads(headers={"a": "b"})
    singly = [
        codec.make_envelope(id, codec.encode_body(body), heads.plain) for id, body in zip(ids, bodies, strict=True)
    ]
    assert codec.seal_many(ids, bodies, heads) == singly


@given(st.lists(st.dictionaries(SHORT_TEXT, JSON, max_size=3), min_size=1, max_size=8))
def test_many_plain_dicts_are_what_single_ones_are(bodies: list[Any]) -> None:
    ids = Session().message_ids(len(bodies))
    singly = [codec.make_envelope(id, codec.encode_body(body)) for id, body in zip(ids, bodies, strict=True)]
    assert codec.seal_many(ids, bodies, codec.Heads()) == singly


def test_a_line_end_inside_raw_json_does_not_shift_the_others() -> None:
    bodies = [{"a": msgspec.Raw(b"[1,\n2]")}, {"b": 1}]
    opened = [codec.open_envelope(envelope) for envelope in codec.seal_many([ID, ID], bodies, codec.Heads())]
    assert [codec.decode_body(one.content_type, one.data) for one in opened] == [{"a": [1, 2]}, {"b": 1}]


def test_types_in_a_batch_have_heads_of_their_own() -> None:
    heads = codec.Heads(correlation_id="c")
    opened = [codec.open_envelope(one) for one in codec.seal_many([ID] * 3, [Order(1), Note("a"), {}], heads)]
    assert [one.type_name for one in opened] == [f"{__name__}.Order", f"{__name__}.Note", None]
    assert {one.correlation_id for one in opened} == {"c"}


# ---- results and content keys --------------------------------------------------------------------------------


@given(JSON | st.binary())
def test_a_result_is_restored_unchanged(value: object) -> None:
    assert codec.decode_result(codec.encode_result(value)) == value


@pytest.mark.parametrize("data", [b"", b"\x09x", b"\2{"])
def test_a_damaged_result_is_undecodable(data: bytes) -> None:
    with pytest.raises(errors.Undecodable):
        codec.decode_result(data)


@pytest.mark.promise("PUB-4")
def test_a_content_key_depends_on_content_and_type_alone() -> None:
    def key(body: object) -> str:
        return codec.content_key(codec.encode_body(body))

    assert key({"a": 1, "b": [1, {"x": 1, "y": 2}]}) == key({"b": [1, {"y": 2, "x": 1}], "a": 1})
    assert len({key(body) for body in ({"id": 1, "total": 0.0}, Order(1), "a", b"a", ["a"], {"a": 1}, {"a": 2})}) == 7


@pytest.mark.promise("PUB-8")
@pytest.mark.parametrize("body", [{"a": msgspec.Raw(b'{"b"')}, [msgspec.Raw(b"1, ")], msgspec.Raw(b"")])
def test_raw_text_that_is_no_json_is_refused(body: object) -> None:
    with pytest.raises(errors.InvalidBody):
        codec.encode_body(body)
    with pytest.raises(errors.InvalidBody):
        codec.seal_many(["0" * 24], [body], codec.Heads())


@pytest.mark.promise("PUB-1")
def test_a_head_that_is_nested_too_deep_is_damaged() -> None:
    packed = b"\x81\xa1z" + b"\x91" * 5_000 + b"\1"
    with pytest.raises(errors.Undecodable):
        codec.open_envelope(b"\1" + b"0" * 24 + b"\2" + len(packed).to_bytes(4, "big") + packed)


@pytest.mark.promise("PUB-1")
@pytest.mark.parametrize("head", [{"h": 5}, {"h": {"a": 1}}, {"t": b"x"}, {"x": []}, {"c": 3.5}])
def test_a_damaged_head_is_noticed_when_the_envelope_is_opened(head: dict[str, object]) -> None:
    packed = msgspec.msgpack.encode(head)
    envelope = b"\1" + b"0" * 24 + b"\2" + len(packed).to_bytes(4, "big") + packed + b"{}"
    with pytest.raises(errors.Undecodable):
        codec.open_envelope(envelope)


@pytest.mark.promise("PUB-1")
def test_a_head_with_unknown_fields_is_read() -> None:
    packed = msgspec.msgpack.encode({"h": {"a": "b"}, "later": [1]})
    envelope = b"\1" + b"0" * 24 + b"\2" + len(packed).to_bytes(4, "big") + packed + b"{}"
    assert codec.open_envelope(envelope).headers == {"a": "b"}


# ---- types of every kind -------------------------------------------------------------------------------------


class Name(str):
    __slots__ = ()


class Mode(enum.Enum):
    RED = "red"


class Point(TypedDict):
    x: int


Code = NewType("Code", str)
Number = NewType("Number", int)
#: Types that accept the text "red", and the decoded value.
ADMIT_TEXT: list[tuple[Any, object]] = [
    (str, "red"), (object, "red"), (Any, "red"), (int | str, "red"), (bytes | str, "red"), (str | None, "red"),
    (list[int] | str, "red"), (Literal["red", "blue"], "red"), (Code, "red"),
    (Annotated[str, msgspec.Meta(max_length=3)], "red"), (Name, Name("red")), (Mode, Mode.RED),
    (Mode | None, Mode.RED), (Parcel | str, "red"), (Order | str, "red"),
]  # fmt: skip
#: Types that do not.
REFUSE_TEXT: list[Any] = [
    int, Order, Note, Parcel, Point, bytes, dict, list, list[str], list[Order], dict[str, int], tuple[str, ...],
    set[str], int | None, int | list[str], Order | None, Parcel | None, Literal["blue"], Number,
    Annotated[str, msgspec.Meta(max_length=2)], datetime, type(None), list[Parcel], Mapping[str, int], Sequence[str],
]  # fmt: skip


@pytest.mark.promise("FACE-1", "DEAD-1")
@pytest.mark.parametrize(("as_type", "arrives"), ADMIT_TEXT, ids=str)
def test_a_text_body_arrives_as_a_type_that_admits_text(as_type: Any, arrives: object) -> None:
    value = codec.decode_body("text/plain", b"red", as_type)
    assert value == arrives
    assert type(value) is type(arrives)


@pytest.mark.promise("FACE-1", "DEAD-1")
@pytest.mark.parametrize("content", ["text/plain", "application/octet-stream"])
@pytest.mark.parametrize("as_type", REFUSE_TEXT, ids=str)
def test_a_text_or_bytes_body_of_another_type_is_undecodable(as_type: Any, content: str) -> None:
    if as_type is bytes and content == "application/octet-stream":
        assert codec.decode_body(content, b"red", as_type) == b"red"
        return
    with pytest.raises(errors.Undecodable, match=r"the body is (str|bytes), not "):
        codec.decode_body(content, b"red", as_type)


@pytest.mark.promise("FACE-1")
@pytest.mark.parametrize(
    ("body", "as_type", "arrives"),
    [
        ([{"weight": 1}], list[Parcel], [Parcel(weight=1)]),
        ({"weight": 1}, Parcel | None, Parcel(weight=1)),
        ({"weight": 1}, Parcel | str, Parcel(weight=1)),
        ({"id": 1}, Order | None, Order(1)),
        ({"x": 1}, Point, {"x": 1}),
        ([1, "a"], list[int | str], [1, "a"]),
        ({"a": [1]}, Mapping[str, Sequence[int]], {"a": [1]}),
        (7, Number, 7),
        (None, Order | None, None),
    ],
    ids=str,
)
def test_a_json_body_arrives_as_its_declared_type(body: object, as_type: Any, arrives: object) -> None:
    assert through(body, as_type) == arrives


@pytest.mark.promise("FACE-1", "SEE-6")
@pytest.mark.parametrize("as_type", [Parcel, list[Parcel], Parcel | None, dict[str, Parcel]], ids=str)
def test_an_undecodable_body_is_not_quoted_in_its_error(as_type: Any) -> None:
    with pytest.raises(errors.Undecodable) as caught:
        codec.decode_body("application/json", b'[{"weight":"secret"}]', as_type)
    assert "secret" not in str(caught.value)


@pytest.mark.promise("FACE-1", "SEE-6")
@pytest.mark.parametrize(
    "wrong", [5, "Order", [], {"a": 1}, GenericAlias(list, "Nowhere"), set | list, Order | Note], ids=str
)
def test_an_unsupported_body_type_is_refused_when_it_is_declared(wrong: Any) -> None:
    with pytest.raises(errors.InvalidInput, match="type must be a type that a body can be read as"):
        Queue("orders", wrong)

    def handle(body: Any) -> None:
        return None

    handle.__annotations__["body"] = wrong
    if not isinstance(wrong, str):
        with pytest.raises(errors.ConfigurationError, match=r"handler|type"):
            Waypost("memory://").handler("orders")(handle)


@dataclasses.dataclass
class Incomplete:
    part: NotDefinedAnywhere  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.promise("FACE-1")
def test_a_type_with_names_that_are_not_defined_is_refused_when_a_worker_starts() -> None:
    post = Waypost("memory://")
    post.handler(Queue("orders", Incomplete))(lambda body: None)
    with pytest.raises(errors.ConfigurationError, match="NotDefinedAnywhere"):
        post.worker()


class Aliased(pydantic.BaseModel):
    order_id: int = pydantic.Field(alias="orderId")
    note: str = pydantic.Field(default="", alias="theNote")


class WrittenByAlias(pydantic.BaseModel):
    order_id: int = pydantic.Field(default=0, serialization_alias="orderId")


@dataclasses.dataclass
class Crate:
    aliased: Aliased
    written: list[WrittenByAlias]


ALIASED, WRITTEN = Aliased(orderId=7, theNote="fragile"), WrittenByAlias(order_id=7)


@pytest.mark.promise("PUB-1")
@pytest.mark.parametrize(
    ("body", "as_type", "data"),
    [
        (ALIASED, None, b'{"orderId":7,"theNote":"fragile"}'),
        (ALIASED, Aliased | None, b'{"orderId":7,"theNote":"fragile"}'),
        ([ALIASED], list[Aliased], b'[{"orderId":7,"theNote":"fragile"}]'),
        (WRITTEN, None, b'{"order_id":7}'),
        ([WRITTEN], list[WrittenByAlias], b'[{"order_id":7}]'),
    ],
    ids=str,
)
def test_models_with_aliases_arrive_as_they_were_published(body: Any, as_type: Any, data: bytes) -> None:
    encoded = codec.encode_body(body, as_type)
    assert encoded.data == data
    assert codec.decode_body("application/json", data, codec.read_as(body, as_type)) == body
    if as_type is None:
        assert codec.decode_result(codec.encode_result(body), type(body)) == body


@pytest.mark.promise("PUB-1")
def test_models_of_which_some_read_aliases_and_some_only_write_them_are_refused() -> None:
    with pytest.raises(errors.InvalidBody, match="would not arrive as it is"):
        codec.encode_body(Crate(ALIASED, [WRITTEN]))
    assert codec.encode_body(Crate(ALIASED, [])).data == b'{"aliased":{"orderId":7,"theNote":"fragile"},"written":[]}'


@pytest.mark.promise("PUB-4")
def test_a_content_key_of_a_batch_is_that_of_a_single_publish() -> None:
    with Waypost("memory://") as post:
        for body in (ALIASED, WRITTEN):
            first = post.publish("parcels", body, key=CONTENT)
            (again,) = post.publish_many("parcels", [body], key=CONTENT)
            assert (first.status, again.status, again.id) == ("queued", "duplicate", first.id)


def test_decoders_of_types_are_kept_and_bounded() -> None:
    plain = dict[str, int]
    assert codec._json_decoder_of(plain) is codec._json_decoder_of(plain)
    assert codec._json_decoder_of(dict[str, int]) is codec._json_decoder_of(plain)
    unhashable = Annotated[int, ["unhashable"]]
    assert codec.decode_body("application/json", b"1", unhashable) == 1
    assert codec._json_decoder_of(unhashable) is codec._json_decoder_of(unhashable)
    for number in range(3 * codec._DECODERS_MAX):
        assert codec.decode_body("application/json", b"[1]", list[Annotated[int, [number]]]) == [1]
    assert len(codec._decoders) <= codec._DECODERS_MAX


@pytest.mark.promise("PUB-2", "PUB-8")
@pytest.mark.parametrize("place", [0, 63, 64, 130, 199])
def test_one_body_of_a_large_batch_that_would_change_is_refused_by_its_number(place: int) -> None:
    bodies: list[object] = [{"number": number} for number in range(200)]
    ids = [f"{number:024}" for number in range(200)]
    heads = codec.Heads()
    for envelope, id, body in zip(codec.seal_many(ids, bodies, heads), ids, bodies, strict=True):
        opened = codec.open_envelope(envelope)
        assert (opened.id, codec.decode_body(opened.content_type, opened.data)) == (id, body)
    bodies[place] = {"number": (1, 2)}
    with pytest.raises(errors.InvalidBody) as raised:
        codec.seal_many(ids, bodies, heads)
    assert raised.value.__notes__ == [f"body number {place} of its chunk, counted from 0"]
