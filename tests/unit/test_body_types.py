"""The table of Python types: the decoded form of each, with and without a declared type, or its refusal."""

from __future__ import annotations

import dataclasses
import enum
import math
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pydantic
import pytest

from tests.unit.clients import MODES, open_client
from waypost import CONTENT, Queue, codec, errors

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "envelope.md"
REFUSED = object()


class Mode(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Kind(enum.StrEnum):
    A = "a"


class Name(str):
    __slots__ = ()


class Count(int):
    pass


class Pair(NamedTuple):
    x: int
    y: int


class Order(msgspec.Struct):
    id: int
    total: float = 0.0


@dataclasses.dataclass
class Parcel:
    at: datetime
    tags: set[str]
    size: tuple[int, int]
    price: Decimal
    names: dict[int, str]
    data: bytes
    kind: Mode


@dataclasses.dataclass(eq=False)
class Loose:
    anything: Any


class Model(pydantic.BaseModel):
    at: datetime
    tags: set[str] = set()


AT = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
ID = uuid.UUID(int=7)
PARCEL = Parcel(AT, {"a", "b"}, (1, 2), Decimal("1.50"), {1: "one"}, b"\xff", Mode.RED)


class Row(NamedTuple):
    #: The name of the value on the page, and the declared type.
    value: str
    declared: str
    body: Any
    as_type: Any
    #: The decoded form without a declared type, and its text on the page.
    plain: Any
    plain_text: str = "the same"
    #: The decoded form with it.
    typed: Any = None
    typed_text: str = "the same"


def row(value: str, declared: str, body: Any, as_type: Any, plain: Any = REFUSED, plain_text: str = "") -> Row:
    """Return the row of a value that its declared type restores."""
    text = plain_text or ("refused" if plain is REFUSED else "the same")
    return Row(value, declared, body, as_type, plain, text, body)


TABLE = [
    row("`None`, `True`, `False`", "`bool \\| None`", True, bool | None, True),
    row("`int` of any size", "`int`", 2**70, int, 2**70),
    row("`float`", "`float`", 0.1, float, 0.1),
    Row("NaN, infinity", "`float`", math.nan, float, REFUSED, "refused", REFUSED, "refused"),
    row("`str`", "`str`", "text", str, "text"),
    row("`bytes`", "`bytes`", b"\0\xff", bytes, b"\0\xff"),
    Row("`bytearray`, `memoryview`", "`bytes`", bytearray(b"a"), bytes, b"a", "`bytes`", b"a", "`bytes`"),
    row("`dict` with text as keys", "`dict[str, int]`", {"a": 1}, dict[str, int], {"a": 1}),
    row("`list`", "`list[int]`", [1, 2], list[int], [1, 2]),
    row("`dict` with other keys", "`dict[int, str]`", {1: "a"}, dict[int, str]),
    row("`tuple`", "`tuple[int, ...]`", (1, 2), tuple[int, ...]),
    row("`NamedTuple`", "itself", Pair(1, 2), Pair),
    row("`set`, `frozenset`", "`set[int]`", {1, 2}, set[int]),
    row("`datetime`, `date`, `time`", "`datetime`", AT, datetime),
    row("`date`", "`date`", date(2030, 1, 2), date),
    row("`time`", "`time`", time(3, 4), time),
    row("`timedelta`", "`timedelta`", timedelta(days=1, microseconds=5), timedelta),
    row("`Decimal`", "`Decimal`", Decimal("1.50"), Decimal),
    row("`UUID`", "`UUID`", ID, uuid.UUID),
    row("`bytes` inside another value", "`list[bytes]`", [b"a"], list[bytes]),
    row("any of these inside a `dict` or `list`", "`dict[str, datetime]`", {"at": AT}, dict[str, datetime]),
    row("`Enum`", "itself", Mode.RED, Mode),
    Row("`IntEnum`, `StrEnum`", "itself", [Level.HIGH], list[Level], [3], "the number or text, which equals it",
        [Level.HIGH]),
    Row("a subclass of `str` or `int`", "itself", [Name("a")], list[Name], ["a"], "the text or number, which equals it",
        [Name("a")]),
    Row("a subclass of `dict`", "`dict`", OrderedDict(a=1), dict[str, int], {"a": 1}, "a `dict`, which equals it",
        {"a": 1}, "a `dict`, which equals it"),
    row("a msgspec `Struct`", "itself", Order(1, 2.5), Order, {"id": 1, "total": 2.5}, "a `dict` of its fields"),
    row("a dataclass, its fields of any type of this table", "itself", PARCEL, Parcel, codec.JSON,
        "a `dict` of its fields, as JSON has them"),
    row("a pydantic model", "itself", Model(at=AT), Model, codec.JSON, "a `dict` made by its own serializers"),
    row("`Struct`, dataclass or model inside a `dict` or `list`", "`list[Order]`", [Order(1)], list[Order]),
    row("pydantic models in a `list`", "`list[Model]`", [Model(at=AT)], list[Model]),
    Row("anything else", "any", object(), object, REFUSED, "refused", REFUSED, "refused"),
]  # fmt: skip


@pytest.mark.promise("PUB-1")
@pytest.mark.parametrize("row", TABLE, ids=lambda one: one.value)
def test_the_page_lists_each_type_with_its_decoded_form(row: Row) -> None:
    assert f"| {row.value} | {row.declared} | {row.plain_text} | {row.typed_text} |" in PAGE.read_text()


@pytest.fixture(params=MODES)
def post(request: pytest.FixtureRequest) -> Iterator[Any]:
    with open_client(request.param, "memory://") as client:
        yield client


def check_arrives(post: Any, publish: Any, queue: Any, expected: Any) -> None:
    if expected is REFUSED:
        with pytest.raises(errors.InvalidBody):
            publish()
        assert post.ledger("orders").published == 0
        return
    publish()
    with post.receive(queue) as message:
        if expected is codec.JSON:
            assert isinstance(message.body, dict)
        else:
            assert message.body == expected
            assert type(message.body) is type(expected)


@pytest.mark.promise("PUB-1")
@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("row", TABLE, ids=lambda one: one.value)
def test_the_decoded_form_without_a_declared_type(post: Any, row: Row, many: bool) -> None:
    def publish() -> None:
        post.publish_many("orders", [row.body]) if many else post.publish("orders", row.body)

    check_arrives(post, publish, "orders", row.plain)


@pytest.mark.promise("PUB-1", "FACE-1")
@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("row", TABLE, ids=lambda one: one.value)
def test_the_decoded_form_with_a_declared_type(post: Any, row: Row, many: bool) -> None:
    queue: Queue[Any] = Queue("orders", row.as_type)

    def publish() -> None:
        post.publish_many(queue, [row.body]) if many else post.publish(queue, row.body)

    check_arrives(post, publish, queue, row.typed)


@pytest.mark.promise("PUB-1")
def test_continuations_and_schedules_follow_the_same_table(post: Any) -> None:
    post.publish("orders", 1)
    with post.receive("orders") as message:
        with pytest.raises(errors.InvalidBody, match="is a tuple and would arrive as a list"):
            message.then("next", (1, 2))
        message.then(Queue("next", tuple[int, int]), (1, 2))
    with post.receive(Queue("next", tuple[int, int])) as message:
        assert message.body == (1, 2)
    with pytest.raises(errors.InvalidBody, match="is a datetime"):
        post.save_schedule("nightly", queue="orders", every=60, body={"at": AT})
    dated: Queue[Any] = Queue("orders", dict[str, datetime])
    post.save_schedule("nightly", queue=dated, every=60, body={"at": AT})
    post.trigger_schedule("nightly")
    with post.receive(dated) as message:
        assert message.body == {"at": AT}


@pytest.mark.promise("PUB-1", "SEE-6")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"secret": (1, 2)}, r"\$\[...\] is a tuple and would arrive as a list"),
        ([{"secret": {1}}], r"\$\[0\]\[...\] is a set and would arrive as a list"),
        ({7: "secret"}, r"a key of \$ is a int and would arrive as text"),
        ({"a": math.inf}, "NaN or infinity"),
        (Order("secret"), "Expected `int`, got `str` - at `\\$.id`"),  # type: ignore[arg-type]
        (Loose({1}), r"\$.anything is a set and would arrive as a list"),
    ],
)
def test_a_refusal_names_place_and_type_and_quotes_nothing(body: object, reason: str) -> None:
    with pytest.raises(errors.InvalidBody, match=reason) as caught:
        codec.encode_body(body)
    assert "secret" not in str(caught.value)


@pytest.mark.promise("PUB-1")
def test_a_field_takes_a_tuple_for_a_sequence_and_a_class_needs_no_equality() -> None:
    assert codec.encode_body(Loose((1, [2]))).data == b'{"anything":[1,[2]]}'


@pytest.mark.promise("PUB-1", "FACE-1")
def test_a_body_that_is_not_of_the_declared_type_is_refused_at_the_publish(post: Any) -> None:
    orders: Queue[Any] = Queue("orders", Order)
    for wrong in ({"id": "x"}, "text", b"bytes", 7, [Order(1)]):
        with pytest.raises(errors.InvalidBody, match="could not be read again"):
            post.publish(orders, wrong)
    assert post.ledger("orders").published == 0


@pytest.mark.promise("PUB-4")
def test_a_content_key_is_made_from_the_decoded_form(post: Any) -> None:
    queue: Queue[Any] = Queue("names", set[str])
    names = [f"name-{n}" for n in range(50)]
    assert post.publish(queue, set(names), key=CONTENT).status == "queued"
    backwards = names[::-1]
    assert post.publish(queue, set(backwards), key=CONTENT).status == "duplicate"
    assert post.publish_many(queue, [set(backwards)], key=CONTENT)[0].status == "duplicate"
    assert post.publish("orders", Order(1, 2), key=CONTENT).status == "queued"
    assert post.publish("orders", Order(1, 2.0), key=CONTENT).status == "duplicate"
    assert post.publish("orders", {"id": 1, "total": 2.0}, key=CONTENT).status == "queued"
    assert post.publish("orders", {"id": 1, "total": 2}, key=CONTENT).status == "queued"


class Member(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)
    number: int


class Team(pydantic.BaseModel):
    numbers: set[int] = pydantic.Field(alias="teamNumbers")
    members: frozenset[Member] = frozenset()
    parts: list[dict[str, set[int]]] = []


@dataclasses.dataclass
class Club:
    team: Team


def team(*numbers: int) -> Team:
    members = frozenset(Member(number=number) for number in numbers)
    return Team(teamNumbers=set(numbers), members=members, parts=[{"a": set(numbers)}])


@pytest.mark.promise("PUB-4")
@pytest.mark.parametrize(
    "made",
    [team, lambda *n: Club(team(*n)), lambda *n: pydantic.RootModel[set[int]](set(n))],
    ids=["model", "in a dataclass", "root"],
)
def test_a_content_key_does_not_depend_on_the_order_of_a_models_sets(made: Any) -> None:
    def key(body: object) -> str:
        return codec.content_key(codec.encode_body(body), codec.read_as(body))

    one, other = made(0, 8, 16), made(16, 8, 0)  # their hashes are the same in a small set, so they keep this order
    assert codec.encode_body(one).data != codec.encode_body(other).data
    assert key(one) == key(other) != key(made(0, 8))


@pytest.mark.promise("CHAIN-1")
def test_a_result_is_kept_as_json_and_restored_by_as_type(post: Any) -> None:
    published = post.publish("orders", 1)
    with post.receive("orders") as message:
        message.keep_result((1, AT))
    assert post.result("orders", published.id) == [1, "2030-01-02T03:04:05.678901Z"]
    assert post.result("orders", published.id, as_type=tuple[int, datetime]) == (1, AT)
