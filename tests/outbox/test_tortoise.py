"""Transactions of Tortoise ORM carry messages, on PostgreSQL and on SQLite."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, HTTPException
from httpx import ASGITransport, AsyncClient
from psycopg.conninfo import conninfo_to_dict
from tortoise import Model, Tortoise, connections, fields
from tortoise.backends.base.executor import EXECUTOR_CACHE
from tortoise.transactions import in_transaction

from tests.outbox.transaction_kinds import TABLE
from waypost import AsyncWaypost
from waypost.errors import InvalidInput
from waypost.fastapi import AsyncPublisher, publisher
from waypost.outbox import AsyncInbox, inbox_sql
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.testing.postgres import PostgresServer

Test = Callable[[AsyncWaypost], Coroutine[Any, Any, None]]


class Sale(Model):
    """A row of the user's table."""

    n = fields.BigIntField(primary_key=True)

    class Meta:
        table = "shop"


class Place:
    """A store, and a database of Tortoise in the same place."""

    def __init__(self, url: str, database: dict[str, Any]) -> None:
        self.url = url
        self.namespace = fresh_namespace()
        self._database = database

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[AsyncWaypost]:
        apps = {"shop": {"models": [__name__], "default_connection": "default"}}
        await Tortoise.init(config={"connections": {"default": self._database}, "apps": apps})
        try:
            await connections.get("default").execute_script(f"{TABLE}; {inbox_sql()} DELETE FROM shop")
            async with AsyncWaypost(self.url, namespace=self.namespace) as post:
                await post.ledger("orders")
                yield post
        finally:
            await Tortoise.close_connections()
            EXECUTOR_CACHE.clear()  # statements of one backend would be used by the next

    def run(self, test: Test) -> None:
        async def run() -> None:
            async with self.opened() as post:
                await test(post)

        asyncio.run(run())


@pytest.fixture(params=["asyncpg", "psycopg", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        path = tmp_path / "shop.db"
        database = {"engine": "tortoise.backends.sqlite", "credentials": {"file_path": str(path)}}
        return Place(f"sqlite:///{path}", database)
    server: PostgresServer = request.getfixturevalue("server")
    given = conninfo_to_dict(server.url)
    credentials = {
        "host": given["host"], "port": int(given["port"] or 5432), "user": given["user"],
        "password": given["password"], "database": given["dbname"], "minsize": 1, "maxsize": 2,
    }  # fmt: skip
    place = Place(server.url, {"engine": f"tortoise.backends.{request.param}", "credentials": credentials})
    migrate(server.url, namespace=place.namespace)
    return place


async def bodies(post: AsyncWaypost, queue: str = "orders") -> list[Any]:
    return [message.body async for message in post.messages(queue)]


async def sold() -> list[int]:
    return [sale.n for sale in await Sale.all().order_by("n")]


@pytest.mark.promise("BOX-1", "BOX-6")
def test_messages_exist_if_and_only_if_the_transaction_of_tortoise_commits(place: Place) -> None:
    async def test(post: AsyncWaypost) -> None:
        async with in_transaction() as transaction:
            await Sale.create(n=1)
            await post.publish("orders", 1, transaction=transaction)
            await transaction.rollback()
        async with in_transaction() as transaction:
            await Sale.create(n=2)
            await post.publish_many("orders", [2, 3], key=str, transaction=transaction)
            assert await bodies(post) == []
            assert await post.cancel("orders", key="3", transaction=transaction) == "cancelled"
        assert await bodies(post) == [2]
        assert await sold() == [2]

    place.run(test)


@pytest.mark.promise("BOX-3")
def test_an_inbox_and_a_settle_join_the_transaction_of_tortoise(place: Place) -> None:
    async def test(post: AsyncWaypost) -> None:
        await post.publish("orders", 1)
        async with post.receive("orders") as message:
            assert message is not None
            async with in_transaction() as transaction:
                assert await AsyncInbox().first(message, transaction)
                assert not await AsyncInbox().first(message, transaction)
                async with message.transaction(transaction):
                    await Sale.create(n=7)
            assert message.settled == "done"
        assert (await post.ledger("orders")).done == 1
        assert await sold() == [7]

    place.run(test)


def test_a_connection_of_tortoise_without_a_transaction_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    place = Place(f"sqlite:///{path}", {"engine": "tortoise.backends.sqlite", "credentials": {"file_path": str(path)}})

    async def test(post: AsyncWaypost) -> None:
        with pytest.raises(InvalidInput, match=r"async with in_transaction\(\)"):
            await post.publish("orders", 1, transaction=connections.get("default"))

    place.run(test)
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM shop").fetchone() == (0,)


@pytest.mark.promise("FACE-4", "BOX-1")
def test_a_request_publishes_in_the_transaction_of_tortoise(place: Place) -> None:
    async def open_transaction() -> AsyncIterator[Any]:
        async with in_transaction() as transaction:
            yield transaction

    async def test(post: AsyncWaypost) -> None:
        app = FastAPI()
        given = Annotated[Any, Depends(open_transaction, scope="function")]
        publish_in = Annotated[AsyncPublisher, Depends(publisher(post, given))]

        @app.post("/orders/{number}")
        async def create(number: int, transaction: given, publish: publish_in) -> str:
            await Sale.create(n=number)
            published = await publish("orders", number)
            if number < 0:
                raise HTTPException(422)
            return published.status

        async with AsyncClient(transport=ASGITransport(app), base_url="http://shop") as client:
            assert (await client.post("/orders/-1")).status_code == 422
            assert (await client.post("/orders/7")).json() == "queued"
        assert await bodies(post) == [7]
        assert await sold() == [7]

    place.run(test)
