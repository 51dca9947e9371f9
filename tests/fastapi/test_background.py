"""`background_task`: calls of functions that run after the response, and after a restart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, SecretStr

from tests.fastapi.running import run, serving
from tests.waiting import until_async
from waypost import AsyncWaypost, Constant, Waypost
from waypost.errors import ConfigurationError, InvalidBody
from waypost.fastapi import AsyncPublisher, Publisher, WaypostLifespan, background_task, publisher

pytestmark = pytest.mark.promise("FACE-4")
WHEN = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


class Order(BaseModel):
    id: int


@dataclass
class Address:
    street: str


def make_async_app(url: str, seen: list[Any], *, worker: bool) -> FastAPI:
    post = AsyncWaypost(url)

    @background_task(post, retry=Constant(attempts=3, pause=0.01, jitter=0))
    async def send(order: Order, address: Address, at: datetime, copies: int = 1) -> None:
        seen.append((order, address, at, copies))
        if len(seen) == 1:
            raise ConnectionError("the mail server is away")

    app = FastAPI(lifespan=WaypostLifespan(post, worker=worker))

    @app.post("/")
    async def create(publish: Annotated[AsyncPublisher, Depends(publisher(post))]) -> str:
        return (await publish.add_task(send, Order(id=7), address=Address("Main"), at=WHEN)).status

    return app


def make_app(url: str, seen: list[Any], *, worker: bool) -> FastAPI:
    post = Waypost(url)

    @background_task(post, queue="mails", retry=Constant(attempts=3, pause=0.01, jitter=0))
    def send(order: Order, address: Address, at: datetime, copies: int = 1) -> None:
        seen.append((order, address, at, copies))
        if len(seen) == 1:
            raise ConnectionError("the mail server is away")

    app = FastAPI(lifespan=WaypostLifespan(post, worker=worker))

    @app.post("/")
    def create(publish: Annotated[Publisher, Depends(publisher(post))]) -> str:
        return publish.add_task(send, Order(id=7), address=Address("Main"), at=WHEN).status

    return app


@pytest.mark.parametrize(("make", "queue"), [(make_async_app, "background.send"), (make_app, "mails")])
def test_a_task_runs_after_a_restart_and_is_retried(make: Any, queue: str, tmp_path: Path) -> None:
    url, seen = f"sqlite:///{tmp_path / 'shop.db'}", list[Any]()

    async def request() -> None:
        async with serving(make(url, seen, worker=False)) as web:
            assert (await web.post("/")).json() == "queued"

    async def work() -> None:
        with Waypost(url) as reader:
            async with serving(make(url, seen, worker=True)):
                await until_async(lambda: reader.ledger(queue).done == 1, "the task")

    run(request())
    assert seen == []
    run(work())
    assert seen == [(Order(id=7), Address("Main"), WHEN, 1)] * 2


def test_wrong_arguments_are_refused_where_the_task_is_added() -> None:
    post = Waypost("memory://")

    @background_task(post)
    def send(order: int, address: str = "") -> int:
        return order

    publish = Publisher(post, {})
    for args, kwargs in (((), {}), (("seven",), {}), ((1, "a", 2), {}), ((1,), {"other": 1})):
        with pytest.raises(InvalidBody, match=r"background task .*send cannot be called so"):
            publish.add_task(send, *args, **kwargs)
    with pytest.raises(ConfigurationError, match="is no background task"):
        publish.add_task(test_wrong_arguments_are_refused_where_the_task_is_added)
    assert post.ledger("background.send").published == 0
    assert send(3) == 3, "called directly it is a function as any other"
    post.close()


def test_functions_whose_calls_no_message_can_carry_are_refused() -> None:
    post = Waypost("memory://")

    def many(*orders: int) -> None: ...

    def unknown(order: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    class Odd:
        pass

    def odd(order: Odd) -> None: ...

    for function, why in ((many, "parameter orders"), (unknown, "Nowhere"), (odd, "Odd")):
        with pytest.raises(ConfigurationError, match=why):
            background_task(post)(function)
    post.close()


@pytest.mark.parametrize("body", [{}, {"order": "seven"}, {"order": 1, "gone": 2}, [1]])
def test_a_call_of_another_version_of_the_function_is_a_dead_letter(body: Any) -> None:
    with Waypost("memory://") as post:

        @background_task(post)
        def send(order: int) -> None: ...

        post.publish("background.send", body)
        post.worker().run(until_empty=True)
        (letter,) = post.dead_letters("background.send")
        assert letter.reason == "undecodable"


class Aliased(BaseModel):
    order_id: int = Field(alias="orderId")
    note: str = Field(default="", alias="theNote")


class WrittenByAnotherName(BaseModel):
    order_id: int = Field(serialization_alias="orderId")


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    at: datetime


class ReadByAnotherName(BaseModel):
    id: int = Field(validation_alias=AliasChoices("number", "no"))


@pytest.mark.parametrize(
    ("annotation", "given", "arrives"),
    [
        (Aliased, Aliased(orderId=7, theNote="fragile"), Aliased(orderId=7, theNote="fragile")),
        (WrittenByAnotherName, WrittenByAnotherName(order_id=7), WrittenByAnotherName(order_id=7)),
        (Strict, Strict(at=WHEN), Strict(at=WHEN)),
        (Sequence[Aliased], (Aliased(orderId=7),), [Aliased(orderId=7)]),
        (dict[str, Strict], {"a": Strict(at=WHEN)}, {"a": Strict(at=WHEN)}),
        (Any, (1, [2]), [1, [2]]),
    ],
)
def test_models_with_aliases_and_strict_ones_arrive_as_they_were_given(
    annotation: Any, given: Any, arrives: Any
) -> None:
    seen = list[Any]()
    with Waypost("memory://") as post:

        def send(value: Any) -> None:
            seen.append(value)

        send.__annotations__["value"] = annotation
        Publisher(post, {}).add_task(background_task(post)(send), given)
        post.worker().run(until_empty=True)
        assert list(post.dead_letters("background.send")) == []
    assert seen == [arrives]


def test_arguments_that_would_not_come_back_are_refused_where_the_task_is_added() -> None:
    with Waypost("memory://") as post:
        publish = Publisher(post, {})

        @background_task(post)
        def log_in(password: SecretStr) -> None: ...

        @background_task(post)
        def send(order: ReadByAnotherName) -> None: ...

        @background_task(post)
        def count(numbers: Iterable[int]) -> None: ...

        with pytest.raises(InvalidBody, match="password would arrive as a different value") as refused:
            publish.add_task(log_in, SecretStr("swordfish"))
        assert "swordfish" not in str(refused.value)
        with pytest.raises(InvalidBody, match="order cannot be read again from its JSON: number: Field required"):
            publish.add_task(send, ReadByAnotherName.model_validate({"number": 7}))
        assert publish.add_task(count, iter([1, 2])).status == "queued"
        assert post.ledger("background.log_in").published == post.ledger("background.send").published == 0
