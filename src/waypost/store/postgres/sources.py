"""Where connections come from: a URL, or the caller's own pool or engine.

From a URL each executor keeps as many connections as calls run at once; the caller's pool lends one per call. No
session settings are changed, and no call depends on a prepared statement (see `prepared.py`), so pgbouncer in
transaction mode works.
"""

from __future__ import annotations

import inspect
import math
import re
import select
from typing import Any, Protocol

from waypost.errors import ConfigurationError, InvalidUrl, MissingExtra, UnusableClient
from waypost.store.postgres.failures import map_connection_error
from waypost.urls import check_percent, redact_text, redact_url
from waypost.urls import check_url as check_parts

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.pq import TransactionStatus
    from psycopg.pq.abc import PGconn
except ImportError as error:  # pragma: no cover - exercised in a subprocess without the extra
    raise MissingExtra('the PostgreSQL store needs psycopg: pip install "waypost[postgres]"') from error

OLDEST_SERVER = 140000
#: After a restart of the server a pool may be full of closed connections; each is discarded when it is found.
STALE_MAX = 100
#: The settings of a pool that determine the server and the user.
CONNECTION_OPTIONS = frozenset(
    (
        "host",
        "hostaddr",
        "port",
        "dbname",
        "user",
        "password",
        "passfile",
        "sslmode",
        "sslcert",
        "sslkey",
        "sslrootcert",
    )
)


class Source(Protocol):
    """Provides connections, and takes them back."""

    display_name: str
    #: Identity: two sources with an equal place connect to the same database as the same user.
    place: object

    def take(self, start_timeout: float) -> psycopg.Connection[Any]: ...
    def give(self, connection: psycopg.Connection[Any]) -> bool: ...
    async def take_async(self, start_timeout: float) -> psycopg.AsyncConnection[Any]: ...
    async def give_async(self, connection: psycopg.AsyncConnection[Any]) -> bool: ...
    def dedicated(self, start_timeout: float) -> psycopg.Connection[Any]: ...
    def uri(self) -> str: ...


def options(start_timeout: float) -> dict[str, Any]:
    """Return the options of all connections that we make."""
    return {
        "autocommit": True,
        "prepare_threshold": None,
        "connect_timeout": max(2, math.ceil(start_timeout)),
        "application_name": "waypost",
        "keepalives_idle": 30,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }


def check_url(url: str) -> str:
    """Refuse a URL that libpq cannot read; the error does not contain it."""
    check_percent(check_parts(url))
    try:
        conninfo_to_dict(url)
    except (psycopg.Error, ValueError) as error:
        # After its first quotation mark the text of libpq repeats a part of the URL.
        reason = re.split("[\"']", redact_text(str(error), url))[0].strip(" :")[:120]
        raise InvalidUrl(f"this postgresql:// URL cannot be used: {reason}") from None
    return url


def connect(url: str, start_timeout: float) -> psycopg.Connection[Any]:
    """Return one connection for one script, which does not commit by itself."""
    try:
        return psycopg.connect(check_url(url), **(options(start_timeout) | {"autocommit": False}))
    except (psycopg.Error, OSError) as error:
        raise map_connection_error(error, redact_url(url), sent=False) from None


def check_server(version: int, display_name: str) -> None:
    """Refuse a server that is too old."""
    if version < OLDEST_SERVER:
        raise ConfigurationError(f"{display_name} is version {version // 10000}; waypost needs PostgreSQL 14 or newer")


def check_isolation(found: int | None, display_name: str) -> int | None:
    """Refuse sessions whose isolation level would make limits inexact."""
    if found == 0:
        raise ConfigurationError(
            f"{display_name} begins transactions as repeatable read or serializable; limits of queues are exact only "
            "as read committed; run ALTER ROLE … SET default_transaction_isolation = 'read committed' for this user"
        )
    return found


def is_fresh(connection: PGconn) -> bool:
    """Return whether an idle connection of a pool is still open.

    A server sends nothing to an idle client unless it ended the session, so a connection is checked only if there is
    something to read.
    """
    waiting = select.poll()
    waiting.register(connection.socket, select.POLLIN)
    if not waiting.poll(0):
        return True
    try:
        connection.consume_input()  # read what it sent last
        connection.consume_input()  # and the end, if that is what follows
    except psycopg.Error:
        return False
    return connection.transaction_status == TransactionStatus.IDLE


class UrlSource:
    """Connections made from a URL: `give` returns False, so that the executor keeps them and closes them."""

    def __init__(self, url: str) -> None:
        self._url = check_url(url)
        self.display_name = redact_url(url)
        self.place: object = url

    def dedicated(self, start_timeout: float) -> psycopg.Connection[Any]:
        """Return a connection for one purpose; the caller closes it."""
        return self.take(start_timeout)

    def uri(self) -> str:
        """Return the address of the connections, including secrets, for another driver based on libpq."""
        return self._url

    def take(self, start_timeout: float) -> psycopg.Connection[Any]:
        return psycopg.connect(self._url, **options(start_timeout))

    def give(self, connection: psycopg.Connection[Any]) -> bool:
        return False

    async def take_async(self, start_timeout: float) -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(self._url, **options(start_timeout))

    async def give_async(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        return False


def source_of(client: Any) -> Source:
    """Return the caller's own client as a source: a SQLAlchemy engine, or a pool of psycopg_pool."""
    if any(kind.__module__.partition(".")[0] == "sqlalchemy" for kind in type(client).__mro__):
        from waypost.store.postgres.engine import EngineSource

        return EngineSource(client)
    return PoolSource(client)


class PoolSource:
    """The caller's own pool of psycopg_pool, never closed by us."""

    def __init__(self, pool: Any) -> None:
        kind = type(pool)
        if not hasattr(pool, "getconn") or not hasattr(pool, "putconn"):
            raise UnusableClient(
                f"{kind.__module__}.{kind.__qualname__} cannot be shared safely; pass a psycopg_pool.ConnectionPool, "
                "an AsyncConnectionPool, a SQLAlchemy engine, or a URL"
            )
        self._pool = pool
        self._is_async = inspect.iscoroutinefunction(pool.getconn)
        self.display_name = f"the caller's {kind.__name__}"
        self.place: object = pool

    def dedicated(self, start_timeout: float) -> psycopg.Connection[Any]:
        """Return a separate connection to the pool's server, which the caller closes."""
        address = self.uri()
        given = {name: value for name, value in dict(self._pool.kwargs or {}).items() if name in CONNECTION_OPTIONS}
        return psycopg.connect(address, **(given | options(start_timeout)))

    def uri(self) -> str:
        """Return the address of the connections, including secrets, for another driver based on libpq."""
        address = self._pool.conninfo
        if not isinstance(address, str):
            raise UnusableClient(
                "this pool computes its address for each connection, so no other driver can connect to the same place; "
                "give a URL (for wake-ups: wake=URL)"
            )
        return address

    def take(self, start_timeout: float) -> psycopg.Connection[Any]:
        if self._is_async:
            raise UnusableClient("an asyncio pool needs AsyncWaypost; pass psycopg_pool.ConnectionPool to Waypost")
        for _ in range(STALE_MAX):
            connection: psycopg.Connection[Any] = self._pool.getconn(timeout=start_timeout)
            if is_fresh(connection.pgconn):
                break
            connection.close()
            self._pool.putconn(connection)
        else:
            raise ConnectionError("the pool has only connections that the server has ended")
        return connection

    def give(self, connection: psycopg.Connection[Any]) -> bool:
        self._pool.putconn(connection)
        return True

    async def take_async(self, start_timeout: float) -> psycopg.AsyncConnection[Any]:
        if not self._is_async:
            raise UnusableClient("a synchronous pool needs Waypost; pass AsyncConnectionPool to AsyncWaypost")
        for _ in range(STALE_MAX):
            connection: psycopg.AsyncConnection[Any] = await self._pool.getconn(timeout=start_timeout)
            if is_fresh(connection.pgconn):
                break
            await connection.close()
            await self._pool.putconn(connection)
        else:
            raise ConnectionError("the pool has only connections that the server has ended")
        return connection

    async def give_async(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        await self._pool.putconn(connection)
        return True
