"""Connections borrowed from the caller's own SQLAlchemy engine, one for each call; the engine is never disposed of.

Only the psycopg connection of the engine's pool is used, without SQLAlchemy's transactions: a call is one statement
that commits by itself. The engine's own timeouts, pre-ping and events apply.
"""

from __future__ import annotations

from typing import Any, cast

import psycopg
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import AssertionPool, PoolProxiedConnection, SingletonThreadPool, StaticPool
from sqlalchemy.util import greenlet_spawn

from waypost.errors import UnusableClient
from waypost.store.postgres.sources import STALE_MAX, is_fresh, options

#: Pools that give the same connection to two callers at once, or refuse the second.
ONE_FOR_ALL = (StaticPool, SingletonThreadPool, AssertionPool)


class EngineSource:
    """The caller's `Engine` or `AsyncEngine`, with psycopg as its driver."""

    def __init__(self, engine: Any) -> None:
        if not isinstance(engine, Engine | AsyncEngine):
            kind = type(engine)
            raise UnusableClient(
                f"{kind.__module__}.{kind.__qualname__} is one conversation with the database; "
                "pass the engine it came from"
            )
        name, driver = engine.dialect.name, engine.dialect.driver
        maker = "create_async_engine" if isinstance(engine, AsyncEngine) else "create_engine"
        if name != "postgresql":
            raise UnusableClient(
                f'an engine for {name} cannot be used; pass one made by {maker}("postgresql+psycopg://…"), or a URL'
            )
        if driver not in ("psycopg", "psycopg_async"):
            raise UnusableClient(
                f"an engine with the driver {driver} cannot be used, waypost speaks through psycopg (version 3); pass "
                f'a second engine made by {maker}("postgresql+psycopg://…"), or a URL'
            )
        if isinstance(engine.pool, ONE_FOR_ALL):
            raise UnusableClient(
                f"an engine with a {type(engine.pool).__name__} has one connection for everybody; pass one with a "
                "QueuePool, the default, or with a NullPool"
            )
        self.engine = engine
        #: Borrowed connections: the pool needs its own object back, not the connection inside.
        self._lent: dict[int, PoolProxiedConnection] = {}
        self.display_name = f"the caller's {type(engine).__name__}"
        self._url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        self.place: object = self._url

    def dedicated(self, start_timeout: float) -> psycopg.Connection[Any]:
        """Return a separate connection, which the caller closes, because the pool may be small."""
        return psycopg.connect(self._url, **options(start_timeout))

    def uri(self) -> str:
        """Return the connection string with secrets, for another driver based on libpq."""
        return self._url

    def take(self, start_timeout: float) -> psycopg.Connection[Any]:
        if isinstance(self.engine, AsyncEngine):
            raise UnusableClient("an AsyncEngine needs AsyncWaypost; pass an Engine to Waypost")
        for _ in range(STALE_MAX):
            try:
                lent = self.engine.raw_connection()
            except SQLAlchemyError as error:
                raise _plain(error) from None
            connection: Any = lent.driver_connection
            if is_fresh(connection.pgconn):
                break
            _end(lent, True)
        else:
            raise ConnectionError("the engine has only connections that the server has ended")
        self._lent[id(connection)] = lent
        return cast("psycopg.Connection[Any]", connection)

    def give(self, connection: psycopg.Connection[Any]) -> bool:
        _end(self._lent.pop(id(connection)), connection.closed)
        return True

    async def take_async(self, start_timeout: float) -> psycopg.AsyncConnection[Any]:
        if isinstance(self.engine, Engine):
            raise UnusableClient("an Engine needs Waypost; pass an AsyncEngine to AsyncWaypost")
        for _ in range(STALE_MAX):
            try:
                lent = await self.engine.raw_connection()
            except SQLAlchemyError as error:
                raise _plain(error) from None
            connection: Any = lent.driver_connection
            if is_fresh(connection.pgconn):
                break
            await greenlet_spawn(_end, lent, True)
        else:
            raise ConnectionError("the engine has only connections that the server has ended")
        self._lent[id(connection)] = lent
        return cast("psycopg.AsyncConnection[Any]", connection)

    async def give_async(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        await greenlet_spawn(_end, self._lent.pop(id(connection)), connection.closed)
        return True


def _end(lent: PoolProxiedConnection, closed: bool) -> None:
    if closed:
        lent.invalidate()
    lent.close()


def _plain(error: SQLAlchemyError) -> Exception:
    """Return the error of psycopg or the system inside an error of SQLAlchemy."""
    if isinstance(error, DBAPIError) and isinstance(error.orig, psycopg.Error):
        return error.orig
    if isinstance(error, PoolTimeout):
        return TimeoutError("the engine's pool had no connection to spare")
    return ConnectionError(str(error))
