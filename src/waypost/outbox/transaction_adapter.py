"""Entering a transaction of the caller's: what it is, whether it leads to the store, and an executor in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from waypost.operations.flow import Flow, drive, drive_async
from waypost.outbox.transactions import (
    AsyncSqlAlchemyTransaction,
    Transaction,
    check_mode,
    recognise,
    support_of,
)
from waypost.store.port import AsyncExecutor, Call, Executor, Store

if TYPE_CHECKING:
    from waypost.store.transactions import TransactionSupport

T = TypeVar("T")
_NOT_CHECKED = object()


def enter(store: Store, given: object, queue: str, ask: Callable[[Call[Any]], Any]) -> Executor:
    """An executor in the caller's transaction. `ask` runs a call on the client's own connection."""
    transaction, support = _recognised(store, given, awaited=False)
    connection = transaction.begin()
    executor = support.executor(transaction, connection, queue)
    checks = support.checks(connection, queue)
    answer: Any = None
    try:
        while True:
            on_own, call = checks.send(answer)
            answer = ask(call) if on_own else executor.run(call)
    except StopIteration:
        return executor


async def enter_async(
    store: Store, given: object, queue: str, ask: Callable[[Call[Any]], Awaitable[Any]]
) -> AsyncExecutor:
    """The same for an event loop."""
    transaction, support = _recognised(store, given, awaited=True)
    connection = (await transaction.begin()) if transaction.awaited else transaction.begin()
    executor = support.async_executor(transaction, connection, queue)
    checks = support.checks(connection, queue)
    answer: Any = None
    try:
        while True:
            on_own, call = checks.send(answer)
            answer = await ask(call) if on_own else await executor.run(call)
    except StopIteration:
        return executor


async def run_async(
    store: Store, given: object, queue: str, flow: Flow[T], ask: Callable[[Call[Any]], Awaitable[Any]]
) -> T:
    """Run all calls of a flow, which waits for nothing else, in the caller's transaction."""
    transaction, support = _recognised(store, given, awaited=True)
    if support.waits and isinstance(transaction, AsyncSqlAlchemyTransaction):
        done: Any = await transaction.inside(lambda blocking: _run_if_checked(support, blocking, queue, flow))
        if done is not _NOT_CHECKED:
            return cast(T, done)
    return await drive_async(await enter_async(store, transaction, queue, ask), flow)


def _run_if_checked(support: TransactionSupport, transaction: Transaction, queue: str, flow: Flow[T]) -> T | object:
    """Run a flow where nothing has to be asked first; otherwise it has not begun."""
    connection = transaction.begin()
    if not support.is_checked(connection, queue):
        return _NOT_CHECKED
    return drive(support.executor(transaction, connection, queue), flow)


def _recognised(store: Store, given: object, *, awaited: bool) -> tuple[Transaction, TransactionSupport]:
    transaction = recognise(given)
    support = support_of(store)
    check_mode(transaction, awaited=awaited)
    return transaction, support
