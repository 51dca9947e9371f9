"""What a publish in the caller's transaction costs: one statement on the caller's connection, and none on ours."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from tests.outbox.transaction_kinds import dialect
from waypost import AsyncWaypost, Waypost
from waypost.store.postgres.schema import VERSION
from waypost.testing.postgres import PostgresServer


def fail_call(*given: object) -> Any:
    raise AssertionError("a question was asked on the client's own connection")


@pytest.mark.promise("BOX-1", "STORE-4")
def test_a_publish_is_one_statement_on_asyncpg(server: PostgresServer, namespace: str) -> None:
    async def count() -> list[str]:
        statements: list[str] = []
        async with AsyncWaypost(server.url, namespace=namespace) as post:
            connection = await asyncpg.connect(server.url)
            async with connection.transaction():
                await post.publish("orders", 0, transaction=connection)
                # Once for each connection, the driver itself queries the server for types that are new to it.
                await post.publish("orders", 0, key="k", transaction=connection)
            post._call = fail_call  # type: ignore[assignment,method-assign]
            connection.add_query_logger(lambda record: statements.append(record.query))
            async with connection.transaction():
                await post.publish("orders", 1, transaction=connection)
                await post.publish("orders", 2, key="k", delay=60, transaction=connection)
                await post.publish_many("orders", range(200), transaction=connection)
            await connection.close()
        return statements

    begin, *published, commit = asyncio.run(count())
    assert (begin, commit) == ("BEGIN;", "COMMIT;")
    assert len(published) == 3
    assert {f'"{namespace}_publish_{VERSION}"' in statement for statement in published} == {True}


@pytest.mark.promise("BOX-1", "STORE-4")
def test_a_publish_is_one_statement_of_a_session(server: PostgresServer, namespace: str) -> None:
    statements: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)

    engine = create_engine(dialect(server.url, "psycopg"))
    with Waypost(server.url, namespace=namespace) as post, Session(engine) as session:
        for number in range(3):
            if number == 1:
                post._call = fail_call  # type: ignore[assignment,method-assign]
                event.listen(engine, "before_cursor_execute", note)
            post.publish("orders", number, transaction=session)
            session.commit()
    engine.dispose()
    assert len(statements) == 2

    async def count() -> int:
        statements.clear()
        engine = create_async_engine(dialect(server.url, "asyncpg"))
        async with AsyncWaypost(server.url, namespace=namespace) as post:
            for number in range(3):
                if number == 1:
                    post._call = fail_call  # type: ignore[assignment,method-assign]
                    event.listen(engine.sync_engine, "before_cursor_execute", note)
                async with AsyncSession(engine) as session, session.begin():
                    await session.execute(text("SELECT 1"))
                    await post.publish("orders", number, transaction=session)
        await engine.dispose()
        return len(statements)

    assert asyncio.run(count()) == 4
