"""Adapters for the caller's own transaction, chosen by its class without importing its library.

    psycopg         Connection, AsyncConnection
    asyncpg         a connection, its own or a pool's
    SQLAlchemy      Session, AsyncSession, Connection, AsyncConnection, on any of these drivers or psycopg2
    Django          django.db.connection inside atomic()
    Tortoise        what in_transaction() gives, on asyncpg, psycopg or aiosqlite
    sqlite3         Connection
    aiosqlite       Connection

Each runs statements on the caller's connection and does not begin, flush, commit or roll back. Errors of the driver are
passed on unchanged: the caller's transaction failed, and the caller decides whether to try again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

from waypost.errors import ConfigurationError, InvalidInput
from waypost.operations.flow import Flow, drive, drive_async
from waypost.store.port import AsyncExecutor, Call, Executor, Store, add_wakes

if TYPE_CHECKING:
    from waypost.store.transactions import TransactionSupport

T = TypeVar("T")

KINDS = (
    "a SQLAlchemy Session, AsyncSession, Connection or AsyncConnection, a psycopg Connection or AsyncConnection, an "
    "asyncpg connection, Django's connection, a transaction of Tortoise, or a sqlite3 or aiosqlite connection"
)
#: libpq's codes for the state of a connection.
_IDLE, _ACTIVE = 0, 1
_AUTOCOMMIT = (
    "this connection commits each statement by itself, so a crash could keep a part of your work without the rest; "
)


class Transaction:
    """Runs statements in the caller's sync transaction; `awaited` is whether it is async."""

    awaited = False
    #: How the driver marks values: `$` as in $1, `%` as in %s.
    style = "$"

    def __init__(self, given: Any) -> None:
        self.given = given

    def fetch(self, sql: str, values: Sequence[Any]) -> Any:
        """Return the first value of the first row, or None."""
        raise NotImplementedError

    def begin(self) -> Any:
        """Check that a transaction is open; return the driver's connection, or None if it is unknown."""
        raise NotImplementedError


class AsyncTransaction(Transaction):
    """Runs statements in the caller's async transaction."""

    awaited = True

    async def fetch(self, sql: str, values: Sequence[Any]) -> Any:
        raise NotImplementedError

    async def begin(self) -> Any:
        raise NotImplementedError


# ---- psycopg -------------------------------------------------------------------------------------------------


def check_psycopg(connection: Any) -> None:
    """Refuse a connection that is in no transaction and would begin none."""
    if not connection.autocommit:
        return
    from waypost.store.postgres.psycopg_internals import count_transaction_blocks

    # Inside `with connection.transaction()` a connection with autocommit is in a transaction too. In a pipeline the
    # server has not confirmed it yet, so use psycopg's own count of such blocks.
    status = connection.info.transaction_status
    if status == _IDLE or (status == _ACTIVE and count_transaction_blocks(connection) == 0):
        raise InvalidInput(
            _AUTOCOMMIT + "publish inside `with connection.transaction()`, or connect without autocommit"
        )


class PsycopgTransaction(Transaction):
    """A `psycopg.Connection`."""

    def fetch(self, sql: str, values: Sequence[Any]) -> Any:
        import psycopg
        from psycopg.rows import tuple_row

        # Do not use the caller's cursor and row factories.
        with psycopg.RawCursor(self.given, row_factory=tuple_row) as cursor:
            row = cursor.execute(sql.encode(), values).fetchone()
            return None if row is None else row[0]

    def begin(self) -> Any:
        check_psycopg(self.given)
        return self.given


class AsyncPsycopgTransaction(AsyncTransaction):
    """A `psycopg.AsyncConnection`."""

    async def fetch(self, sql: str, values: Sequence[Any]) -> Any:
        import psycopg
        from psycopg.rows import tuple_row

        async with psycopg.AsyncRawCursor(self.given, row_factory=tuple_row) as cursor:
            await cursor.execute(sql.encode(), values)
            row = await cursor.fetchone()
            return None if row is None else row[0]

    async def begin(self) -> Any:
        check_psycopg(self.given)
        return self.given


# ---- asyncpg -------------------------------------------------------------------------------------------------


class AsyncpgTransaction(AsyncTransaction):
    """An asyncpg connection, or one of its pool."""

    async def fetch(self, sql: str, values: Sequence[Any]) -> Any:
        return await self.given.fetchval(sql, *values)

    async def begin(self) -> Any:
        if not self.given.is_in_transaction():
            raise InvalidInput(_AUTOCOMMIT + "publish inside `async with connection.transaction()`")
        # A pool wraps the connection in a new proxy at each acquire.
        return getattr(self.given, "_con", None) or self.given


# ---- SQLAlchemy ----------------------------------------------------------------------------------------------

_STYLES = {"format": "%", "pyformat": "%", "numeric_dollar": "$"}


class _SqlAlchemy:
    given: Any
    style: str

    def _check_connection(self, dialect: Any, lent: Any) -> Any:
        """Check a connection of the engine's pool; return the driver's connection."""
        driver = lent.driver_connection
        if dialect.name == "sqlite":
            check_sqlite(driver, "use an engine or connection without AUTOCOMMIT")
            return driver
        style = _STYLES.get(dialect.paramstyle)
        if dialect.name != "postgresql" or style is None:
            raise InvalidInput(
                f"a SQLAlchemy connection to {dialect.name} with {dialect.driver} cannot publish messages; use "
                "PostgreSQL with psycopg, psycopg2 or asyncpg, or SQLite"
            )
        self.style = style
        adapted = lent.dbapi_connection
        if hasattr(driver, "is_in_transaction"):
            alone = adapted.isolation_level == "autocommit" and not driver.is_in_transaction()
        else:
            info = getattr(driver, "info", None)
            alone = bool(driver.autocommit) and getattr(info, "transaction_status", 0) == 0
        if alone:
            raise InvalidInput(_AUTOCOMMIT + "use an engine or connection without AUTOCOMMIT")
        return driver


class SqlAlchemyTransaction(_SqlAlchemy, Transaction):
    """A `Connection`, or the connection of a `Session`, which is not flushed for it."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self._connection: Any = None

    def begin(self) -> Any:
        given = self.given
        if is_instance_of(given, "sqlalchemy", "scoped_session"):
            given = given()
        self._connection = given.connection() if is_instance_of(given, "sqlalchemy", "Session") else given
        if self._connection.dialect.name == "sqlite" and not self._connection.in_transaction():
            # SQLAlchemy only commits a transaction that it began, and our statements bypass it, so begin one here.
            self._connection.begin()
        return self._check_connection(self._connection.dialect, self._connection.connection)

    def fetch(self, sql: str, values: Sequence[Any]) -> Any:
        return self._connection.exec_driver_sql(sql, tuple(values)).scalar()


class AsyncSqlAlchemyTransaction(_SqlAlchemy, AsyncTransaction):
    """An `AsyncConnection`, or the connection of an `AsyncSession`."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self._connection: Any = None

    async def begin(self) -> Any:
        given = self.given
        if is_instance_of(given, "sqlalchemy", "async_scoped_session"):
            given = given()
        self._connection = await given.connection() if is_instance_of(given, "sqlalchemy", "AsyncSession") else given
        if self._connection.dialect.name == "sqlite" and not self._connection.in_transaction():
            await self._connection.begin()  # as above
        return self._check_connection(self._connection.dialect, await self._connection.get_raw_connection())

    async def inside(self, step: Callable[[Transaction], T]) -> T:
        """Run a sync step in SQLAlchemy's greenlet: one switch instead of one for each call of the session."""
        given = self.given
        if is_instance_of(given, "sqlalchemy", "async_scoped_session"):
            given = given()  # it does not pass `run_sync` on
        return cast(T, await given.run_sync(lambda blocking: step(SqlAlchemyTransaction(blocking))))

    async def fetch(self, sql: str, values: Sequence[Any]) -> Any:
        return (await self._connection.exec_driver_sql(sql, tuple(values))).scalar()


# ---- Django --------------------------------------------------------------------------------------------------


class DjangoTransaction(Transaction):
    """Django's `connection`, or one of its `connections`."""

    style = "%"

    def begin(self) -> Any:
        given = self.given
        if given.vendor not in ("postgresql", "sqlite"):
            raise InvalidInput(
                f"a Django connection to {given.vendor} cannot publish messages; use PostgreSQL or SQLite"
            )
        if not given.in_atomic_block and given.get_autocommit():
            raise InvalidInput(_AUTOCOMMIT + "publish inside `with transaction.atomic()`")
        given.ensure_connection()
        if given.vendor == "sqlite":
            check_sqlite(given.connection, "publish inside `with transaction.atomic()`")
        return given.connection

    def fetch(self, sql: str, values: Sequence[Any]) -> Any:
        with self.given.cursor() as cursor:
            cursor.execute(sql, values)
            row = cursor.fetchone()
            return None if row is None else row[0]


# ---- SQLite --------------------------------------------------------------------------------------------------


def check_sqlite(connection: Any, advice: str = "") -> None:
    """Refuse a connection that is in no transaction and would begin none before it writes."""
    from waypost.store.aiosqlite_internals import connection_of, is_aiosqlite
    from waypost.store.sqlite.transactions import begins_transactions

    if is_aiosqlite(connection):
        connection = connection_of(connection)
    if not connection.in_transaction and not begins_transactions(connection):
        default = "execute BEGIN IMMEDIATE first, or connect with isolation_level other than None"
        raise InvalidInput(_AUTOCOMMIT + (advice or default))


class SqliteTransaction(Transaction):
    """A `sqlite3.Connection`. The async client may use it too, because it does not wait for a server."""

    def begin(self) -> Any:
        check_sqlite(self.given)
        return self.given


class AiosqliteTransaction(AsyncTransaction):
    """An `aiosqlite.Connection`."""

    async def begin(self) -> Any:
        check_sqlite(self.given)
        return self.given


# ---- Tortoise ------------------------------------------------------------------------------------------------


class TortoiseTransaction(AsyncTransaction):
    """What `in_transaction()` of Tortoise gives: the connection in it decides the rest."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self._inner: Any = None

    async def begin(self) -> Any:
        async with self.given.acquire_connection() as connection:
            self._inner = adapt(connection)
            self.style = self._inner.style
            return await self._inner.begin()

    async def fetch(self, sql: str, values: Sequence[Any]) -> Any:
        # Tortoise's own lock: other tasks may use the transaction at the same time.
        async with self.given.acquire_connection():
            return await self._inner.fetch(sql, values)


# ---- choosing the adapter ------------------------------------------------------------------------------------


def is_instance_of(given: Any, library: str, *names: str) -> bool:
    """Whether an object is an instance of one of these classes of a library, by name."""
    return is_class_of(type(given), library, names)


def is_class_of(kind: type, library: str, names: tuple[str, ...] = ()) -> bool:
    """Whether a class is one of these classes of a library, or derived from one. No library or no names: any."""
    return any(
        (not names or base.__name__ in names) and (not library or base.__module__.partition(".")[0] == library)
        for base in kind.__mro__
    )


def is_session_annotation(annotation: object) -> bool:
    """Whether a parameter with this annotation gets a session."""
    return isinstance(annotation, type) and (
        is_class_of(annotation, "sqlalchemy", ("Session", "AsyncSession", "Connection", "AsyncConnection"))
        or is_class_of(annotation, "psycopg", ("Connection", "AsyncConnection"))
        or is_class_of(annotation, "sqlite3", ("Connection",))
    )


def adapt(given: Any) -> Transaction:
    """Return the adapter for what the caller gave as `transaction=`, or raise `InvalidInput`."""
    if isinstance(given, Transaction):
        return given
    made = _adapter_class(type(given))
    if made is not None:
        return made(given)
    kind = type(given)
    hint = ""
    if is_instance_of(given, "sqlalchemy", "Engine", "AsyncEngine", "sessionmaker", "async_sessionmaker"):
        hint = "; an engine or sessionmaker is not a transaction: open one with it"
    elif kind.__name__.endswith("Pool"):
        hint = "; a pool is not a transaction: take a connection from it"
    elif is_instance_of(given, "tortoise", "BaseDBAsyncClient"):
        hint = "; a connection of Tortoise is not a transaction: async with in_transaction() as transaction"
    raise InvalidInput(f"transaction= is {KINDS}, not {kind.__module__}.{kind.__qualname__}{hint}")


_ADAPTERS: tuple[tuple[type[Transaction], str, tuple[str, ...]], ...] = (
    (AsyncSqlAlchemyTransaction, "sqlalchemy", ("AsyncSession", "AsyncConnection", "async_scoped_session")),
    (SqlAlchemyTransaction, "sqlalchemy", ("Session", "Connection", "scoped_session")),
    (AsyncPsycopgTransaction, "psycopg", ("AsyncConnection",)),
    (PsycopgTransaction, "psycopg", ("Connection",)),
    (AsyncpgTransaction, "asyncpg", ("Connection", "PoolConnectionProxy")),
    (DjangoTransaction, "django", ("BaseDatabaseWrapper", "ConnectionProxy")),
    (TortoiseTransaction, "tortoise", ("TransactionalDBClient",)),
    (SqliteTransaction, "sqlite3", ("Connection",)),
    (AiosqliteTransaction, "aiosqlite", ("Connection",)),
)


#: Cached per class: a publish in a transaction should cost little more than its statement.
_adapter_classes: WeakKeyDictionary[type, type[Transaction] | None] = WeakKeyDictionary()


def _adapter_class(kind: type) -> type[Transaction] | None:
    if kind not in _adapter_classes:
        _adapter_classes[kind] = next(
            (made for made, library, names in _ADAPTERS if is_class_of(kind, library, names)), None
        )
    return _adapter_classes[kind]


def check_mode(transaction: Transaction, *, awaited: bool) -> None:
    """Refuse an async transaction for the sync client, and the reverse."""
    if transaction.awaited and not awaited:
        raise InvalidInput("this transaction is async: publish with AsyncWaypost, or give a sync connection")
    if awaited and not transaction.awaited and not isinstance(transaction, SqliteTransaction):
        raise InvalidInput(
            "this transaction is sync and would block the event loop: publish with Waypost, or give an async connection"
        )


Wake = Callable[[dict[str, list[str]]], None]
#: Where a session of SQLAlchemy keeps the sleepers to notify after its commit.
_SLEEPERS = "waypost_sleepers"


def wake_after_commit(given: Any, wake: Wake, names: dict[str, list[str]]) -> bool:
    """Notify sleepers once the caller's transaction is committed; return whether it reports that.

    Only sessions of SQLAlchemy do.
    """
    if is_instance_of(given, "sqlalchemy", "scoped_session", "async_scoped_session"):
        given = given()
    session = getattr(given, "sync_session", given)
    if not is_instance_of(session, "sqlalchemy", "Session"):
        return False
    waiting: dict[Wake, dict[str, list[str]]] | None = session.info.get(_SLEEPERS)
    if waiting is None:
        from sqlalchemy import event

        waiting = session.info[_SLEEPERS] = {}
        event.listen(session, "after_commit", _wake_all)
        event.listen(session, "after_rollback", _forget_sleepers)
    add_wakes(waiting.setdefault(wake, {}), names)
    return True


def _wake_all(session: Any) -> None:
    if session.in_nested_transaction():
        return  # SQLAlchemy reports the release of a savepoint too, before the commit
    kept: dict[Wake, dict[str, list[str]]] = session.info.get(_SLEEPERS, {})  # `info` is the caller's: it may be empty
    waiting = dict(kept)
    kept.clear()
    for wake, names in waiting.items():
        wake(names)


def _forget_sleepers(session: Any) -> None:
    if session.in_nested_transaction():
        return  # what was published before the savepoint can still be committed; a wake-up in vain does no harm
    session.info.get(_SLEEPERS, {}).clear()


def transaction_support(store: Store) -> TransactionSupport:
    """Return how a store takes part in transactions; raise `ConfigurationError` if it cannot."""
    support = store.transactions
    if support is None:
        raise ConfigurationError(
            f"a {store.kind} store is not in your database, so a transaction cannot publish to it; publish to "
            "PostgreSQL or SQLite beside your tables, and relay from there"
        )
    return support


# ---- executors in the transaction ----------------------------------------------------------------------------

_CHECKS_NEEDED = object()


def open_executor(store: Store, given: object, queue: str, run_on_client: Callable[[Call[Any]], Any]) -> Executor:
    """Return an executor in the caller's transaction. `run_on_client` runs a call on the client's own connection."""
    transaction, support = _adapt_for(store, given, awaited=False)
    connection = transaction.begin()
    executor = support.executor(transaction, connection, queue)
    checks = support.checks(connection, queue)
    answer: Any = None
    try:
        while True:
            on_own, call = checks.send(answer)
            answer = run_on_client(call) if on_own else executor.run(call)
    except StopIteration:
        return executor


async def open_async_executor(
    store: Store, given: object, queue: str, run_on_client: Callable[[Call[Any]], Awaitable[Any]]
) -> AsyncExecutor:
    """Async version of `open_executor`."""
    transaction, support = _adapt_for(store, given, awaited=True)
    connection = (await transaction.begin()) if transaction.awaited else transaction.begin()
    executor = support.async_executor(transaction, connection, queue)
    checks = support.checks(connection, queue)
    answer: Any = None
    try:
        while True:
            on_own, call = checks.send(answer)
            answer = await run_on_client(call) if on_own else await executor.run(call)
    except StopIteration:
        return executor


async def run_in_transaction(
    store: Store, given: object, queue: str, flow: Flow[T], run_on_client: Callable[[Call[Any]], Awaitable[Any]]
) -> T:
    """Run a flow that only makes calls, without pauses, in the caller's async transaction."""
    transaction, support = _adapt_for(store, given, awaited=True)
    if support.waits and isinstance(transaction, AsyncSqlAlchemyTransaction):
        done: Any = await transaction.inside(lambda blocking: _run_without_checks(support, blocking, queue, flow))
        if done is not _CHECKS_NEEDED:
            return cast(T, done)
    return await drive_async(await open_async_executor(store, transaction, queue, run_on_client), flow)


def _run_without_checks(support: TransactionSupport, transaction: Transaction, queue: str, flow: Flow[T]) -> T | object:
    """Run a flow if the connection needs no check first; otherwise return `_CHECKS_NEEDED` without starting it."""
    connection = transaction.begin()
    if not support.needs_no_checks(connection, queue):
        return _CHECKS_NEEDED
    return drive(support.executor(transaction, connection, queue), flow)


def _adapt_for(store: Store, given: object, *, awaited: bool) -> tuple[Transaction, TransactionSupport]:
    transaction = adapt(given)
    support = transaction_support(store)
    check_mode(transaction, awaited=awaited)
    return transaction, support
