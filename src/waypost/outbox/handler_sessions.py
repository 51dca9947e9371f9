"""A session as a parameter of a handler: its writes and the settle of its messages are one transaction.

    @post.handler("orders", engine=engine)
    async def charge(order: Order, session: AsyncSession) -> None:
        session.add(Charge(order))

The annotation of the parameter chooses its type: a `Session`, `AsyncSession`, `Connection` or `AsyncConnection` of
SQLAlchemy, from the engine or sessionmaker of the handler or else of the client; a psycopg connection of the client; or
a `sqlite3.Connection`. It is committed together with the settle when the handler returns, and rolled back by an error,
a lost lease or a cancellation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from waypost.errors import ConfigurationError
from waypost.message import Message, Outcome, check_returned
from waypost.outbox.message_transaction import MessageTransaction, SessionSource, no_transaction_support
from waypost.outbox.transaction_adapters import is_class_of, is_instance_of
from waypost.store.port import Store

AWAITED = ("AsyncSession", "AsyncConnection")
ENGINES = ("Engine", "AsyncEngine")
MAKERS = ("sessionmaker", "async_sessionmaker")


def session_source(
    name: str, wanted: type, *, is_async: bool, store: Store, engine: object = None
) -> SessionSource | None:
    """Return where the sessions of a handler come from, None for connections of the store.

    Raises `ConfigurationError` if the annotated type is not possible.
    """
    support = store.transactions
    if support is None:
        raise no_transaction_support(store)
    alchemy = is_class_of(wanted, "sqlalchemy")
    awaited = is_class_of(wanted, "", AWAITED)
    source = support.engine if engine is None else engine
    if alchemy and source is None:
        raise ConfigurationError(
            f"handler {name} has a parameter of type {wanted.__name__} of SQLAlchemy: give the handler an engine or a "
            "sessionmaker, engine=…, or make the client with client=engine"
        )
    if not alchemy and source is not None:
        raise ConfigurationError(
            f"handler {name} has a parameter of type {wanted.__module__}.{wanted.__name__}, but its engine is one of "
            "SQLAlchemy: use a Session or Connection of SQLAlchemy"
        )
    if not alchemy and not is_class_of(wanted, support.library):
        raise ConfigurationError(
            f"handler {name} has a parameter of type {wanted.__module__}.{wanted.__name__}, which a {store.kind} store "
            "does not have"
        )
    if awaited != is_async and not is_class_of(wanted, "sqlite3"):
        raise ConfigurationError(
            f"handler {name} {'is async' if is_async else 'is not async'} and its {wanted.__name__} "
            f"{'is not' if is_async else 'is'}: both must be sync or both async"
        )
    if source is None:
        return None
    if not is_instance_of(source, "sqlalchemy", *ENGINES, *MAKERS):
        raise ConfigurationError(
            f"handler {name}: engine= is an engine or sessionmaker of SQLAlchemy, not a {type(source).__name__}"
        )
    if is_instance_of(source, "sqlalchemy", "AsyncEngine", "async_sessionmaker") != awaited:
        raise ConfigurationError(
            f"handler {name} has a parameter of type {wanted.__name__}, which a {type(source).__name__} does not make"
        )
    return SessionSource(_begin_function(name, wanted, source, awaited=awaited))


def _begin_function(name: str, wanted: type, source: Any, *, awaited: bool) -> Callable[[], Any]:
    is_engine = is_instance_of(source, "sqlalchemy", *ENGINES)
    if is_class_of(wanted, "sqlalchemy", ("Connection", "AsyncConnection")):
        if not is_engine:
            raise ConfigurationError(
                f"handler {name} has a parameter of type {wanted.__name__}: engine= must be an engine"
            )
        return source.begin  # type: ignore[no-any-return]
    if not is_engine:
        return source.begin  # type: ignore[no-any-return]
    # The annotated class itself: it may be derived from that of SQLAlchemy.
    made: Any = wanted
    if awaited:

        @asynccontextmanager
        async def begin_async() -> Any:
            async with made(source) as session, session.begin():
                yield session

        return begin_async

    @contextmanager
    def begin() -> Any:
        with made(source) as session, session.begin():
            yield session

    return begin


Given = Callable[[Sequence[Message[Any]], Any], tuple[Any, ...]]
Returned = Callable[[Sequence[Message[Any]], Any], None]


def in_transaction(
    function: Callable[..., Any], sessions: SessionSource | None, given: Given, keep: Returned, *, is_async: bool
) -> Callable[[Sequence[Message[Any]]], Any]:
    """Return a handler's function with a transaction around it. `given` makes its arguments, `keep` gets its result."""

    def around(messages: Sequence[Message[Any]]) -> MessageTransaction:
        return MessageTransaction(messages[0].settle_target, messages, sessions, injected=True)

    def decide(messages: Sequence[Message[Any]], returned: Any) -> None:
        returned = check_returned(returned)
        if isinstance(returned, Outcome):
            for message in messages:
                message.outcome = message.outcome or returned
        else:
            keep(messages, returned)

    def call(messages: Sequence[Message[Any]]) -> None:
        with around(messages) as session:
            decide(messages, function(*given(messages, session)))

    async def call_async(messages: Sequence[Message[Any]]) -> None:
        async with around(messages) as session:
            awaitable: Awaitable[Any] = function(*given(messages, session))
            decide(messages, await awaitable)

    return call_async if is_async else call
