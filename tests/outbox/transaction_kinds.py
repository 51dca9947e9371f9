"""Every kind of transaction that can carry messages, each behind the same interface.

    with open_way("asyncpg", url, namespace) as way:
        way.run([("publish", ("orders", 7), {})], row=7, commit=False)

`run` does the steps in one transaction, together with a row in a table of the user's if one is given, and commits or
rolls back. An error of a step takes the place of its result; the transaction goes on.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

from waypost import AsyncWaypost, Waypost
from waypost.errors import WaypostError

Step = tuple[str, tuple[Any, ...], dict[str, Any]]
TABLE = "CREATE TABLE IF NOT EXISTS shop (n bigint)"
Inside = Callable[[], None]


def dialect(url: str, driver: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}+{driver}://{rest}"


class TransactionKind(Protocol):
    """One kind of transaction."""

    def run(
        self, steps: Sequence[Step], *, row: int | None = None, commit: bool = True, inside: Inside | None = None
    ) -> list[Any]: ...
    def close(self) -> None: ...


class RolledBack(Exception):
    """Ends a block so that it is rolled back."""


class Blocking:
    """Sync kinds: each lends a transaction, and a function that executes SQL in it."""

    def __init__(self, url: str, namespace: str, driver: str) -> None:
        self.post = Waypost(url, namespace=namespace)
        self.url = url
        self._lend = getattr(self, f"_{driver}")(url)

    def run(
        self, steps: Sequence[Step], *, row: int | None = None, commit: bool = True, inside: Inside | None = None
    ) -> list[Any]:
        results: list[Any] = []
        try:
            with self._lend() as (transaction, execute):
                if row is not None:
                    execute(f"INSERT INTO shop (n) VALUES ({row:d})")
                for method, given, options in steps:
                    try:
                        results.append(getattr(self.post, method)(*given, transaction=transaction, **options))
                    except WaypostError as error:
                        results.append(error)
                if inside is not None:
                    inside()
                if not commit:
                    raise RolledBack
        except RolledBack:
            pass
        return results

    def close(self) -> None:
        self.post.close()
        self._close()

    def _close(self) -> None:
        """Close what is open beside the client."""

    def _psycopg(self, url: str) -> Any:
        import psycopg

        connection = psycopg.connect(url)
        self._close = connection.close  # type: ignore[method-assign]

        @contextmanager
        def lend() -> Iterator[Any]:
            with connection.transaction():
                yield connection, connection.execute

        return lend

    def _session(self, url: str, driver: str = "psycopg") -> Any:
        from sqlalchemy import create_engine, text
        from sqlalchemy.orm import Session

        engine = create_engine(dialect(url, driver))
        self._close = engine.dispose  # type: ignore[method-assign]

        @contextmanager
        def lend() -> Iterator[Any]:
            with Session(engine) as session, session.begin():
                yield session, lambda sql: session.execute(text(sql))

        return lend

    def _session_psycopg2(self, url: str) -> Any:
        return self._session(url, "psycopg2")

    def _connection(self, url: str) -> Any:
        from sqlalchemy import create_engine, text

        engine = create_engine(dialect(url, "psycopg"))
        self._close = engine.dispose  # type: ignore[method-assign]

        @contextmanager
        def lend() -> Iterator[Any]:
            with engine.begin() as connection:
                yield connection, lambda sql: connection.execute(text(sql))

        return lend

    def _django(self, url: str) -> Any:
        import django
        from django.conf import settings
        from psycopg.conninfo import conninfo_to_dict

        place = conninfo_to_dict(url)
        database = {
            "ENGINE": "django.db.backends.postgresql", "NAME": place["dbname"], "USER": place["user"],
            "PASSWORD": place["password"], "HOST": place["host"], "PORT": place["port"],
        }  # fmt: skip
        if not settings.configured:
            settings.configure(DATABASES={"default": database})
            django.setup()
        from django.db import connection, connections, transaction

        connections.close_all()
        connections.settings["default"].update(database)
        connection.settings_dict.update(database)
        self._close = connection.close  # type: ignore[method-assign]

        @contextmanager
        def lend() -> Iterator[Any]:
            with transaction.atomic(), connection.cursor() as cursor:
                yield connection, cursor.execute

        return lend

    def _sqlite3(self, url: str) -> Any:
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)
        self._close = connection.close  # type: ignore[method-assign]

        @contextmanager
        def lend() -> Iterator[Any]:
            with connection:
                yield connection, connection.execute

        return lend


class Awaited:
    """Async kinds, on an event loop of their own."""

    def __init__(self, url: str, namespace: str, driver: str) -> None:
        self.url = url
        self._runner = asyncio.Runner()
        self._ends: list[Any] = []
        self.post = AsyncWaypost(url, namespace=namespace)
        self._lend = self._runner.run(getattr(self, f"_{driver}")(url))

    def run(
        self, steps: Sequence[Step], *, row: int | None = None, commit: bool = True, inside: Inside | None = None
    ) -> list[Any]:
        return self._runner.run(self._run(steps, row, commit, inside))

    async def _run(self, steps: Sequence[Step], row: int | None, commit: bool, inside: Inside | None) -> list[Any]:
        results: list[Any] = []
        try:
            async with self._lend() as (transaction, execute):
                if row is not None:
                    await execute(f"INSERT INTO shop (n) VALUES ({row:d})")
                for method, given, options in steps:
                    try:
                        results.append(await getattr(self.post, method)(*given, transaction=transaction, **options))
                    except WaypostError as error:
                        results.append(error)
                if inside is not None:
                    inside()
                if not commit:
                    raise RolledBack
        except RolledBack:
            pass
        return results

    def close(self) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        await self.post.close()
        for end in self._ends:
            await end()

    async def _psycopg_async(self, url: str) -> Any:
        import psycopg

        connection = await psycopg.AsyncConnection.connect(url)
        self._ends.append(connection.close)

        @asynccontextmanager
        async def lend() -> AsyncIterator[Any]:
            async with connection.transaction():
                yield connection, connection.execute

        return lend

    async def _asyncpg(self, url: str) -> Any:
        import asyncpg

        pool = await asyncpg.create_pool(url, min_size=1, max_size=1)
        self._ends.append(pool.close)

        @asynccontextmanager
        async def lend() -> AsyncIterator[Any]:
            async with pool.acquire() as connection, connection.transaction():
                yield connection, connection.execute

        return lend

    async def _async_session(self, url: str, driver: str = "psycopg") -> Any:
        from sqlalchemy import text
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

        engine = create_async_engine(dialect(url, driver))
        self._ends.append(engine.dispose)

        @asynccontextmanager
        async def lend() -> AsyncIterator[Any]:
            async with AsyncSession(engine) as session, session.begin():
                yield session, lambda sql: session.execute(text(sql))

        return lend

    async def _async_session_asyncpg(self, url: str) -> Any:
        return await self._async_session(url, "asyncpg")

    async def _async_session_aiosqlite(self, url: str) -> Any:
        return await self._async_session(url, "aiosqlite")

    async def _async_connection_aiosqlite(self, url: str) -> Any:
        return await self._async_connection(url, "aiosqlite")

    async def _aiosqlite(self, url: str) -> Any:
        import aiosqlite

        connection = await aiosqlite.connect(url.removeprefix("sqlite:///"), timeout=30)
        self._ends.append(connection.close)

        @asynccontextmanager
        async def lend() -> AsyncIterator[Any]:
            try:
                yield connection, connection.execute
            except BaseException:
                await connection.rollback()
                raise
            await connection.commit()

        return lend

    async def _async_connection(self, url: str, driver: str = "asyncpg") -> Any:
        from sqlalchemy import text
        from sqlalchemy.ext.asyncio import create_async_engine

        engine = create_async_engine(dialect(url, driver))
        self._ends.append(engine.dispose)

        @asynccontextmanager
        async def lend() -> AsyncIterator[Any]:
            async with engine.begin() as connection:
                yield connection, lambda sql: connection.execute(text(sql))

        return lend


BLOCKING = ("psycopg", "session", "session_psycopg2", "connection", "django", "sqlite3")
AWAITED = (
    "psycopg_async", "asyncpg", "async_session", "async_session_asyncpg", "async_connection", "aiosqlite",
    "async_session_aiosqlite", "async_connection_aiosqlite",
)  # fmt: skip
KINDS = BLOCKING + AWAITED


def is_file(kind: str) -> bool:
    """Whether this kind of transaction is on a SQLite file; all others are on a server."""
    return "sqlite" in kind


@contextmanager
def open_kind(name: str, url: str, namespace: str) -> Iterator[TransactionKind]:
    """Open one kind of transaction. The user's table must exist."""
    kind: TransactionKind = (Blocking if name in BLOCKING else Awaited)(url, namespace, name)
    try:
        yield kind
    finally:
        kind.close()
