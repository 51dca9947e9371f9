"""Where a client meets a transaction of its caller: once for each connection it is looked where that leads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

from waypost.operations.flow import Flow, drive, drive_async
from waypost.outbox.transactions import (
    AsyncSqlAlchemyTransaction,
    Transaction,
    check_mode,
    check_store,
    elsewhere,
    is_of,
    recognise,
)
from waypost.store.port import AsyncExecutor, Call, Executor, Store

if TYPE_CHECKING:
    from waypost.store.postgres.store import PostgresStore
    from waypost.store.sqlite.store import SqliteStore

T = TypeVar("T")
#: What to ask, and whether on the client's own connection rather than in the transaction.
Looks = Generator[tuple[bool, Call[Any]], Any, None]
#: Queues that are known to be there; beyond so many, some are asked for again.
QUEUES_KNOWN_MAX = 10_000
_NOT_KNOWN = object()


class PostgresWithin:
    """Runs the calls of a store in a transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def run(self, call: Call[T]) -> Any:
        from waypost.store.postgres.within import within

        return self._transaction.run(within(call))

    def run_many(self, calls: Iterable[Call[T]]) -> Any:
        return self._transaction.run_many(calls)

    def close(self) -> Any:
        return self._transaction.close()


class TransactionAdapter:
    """What one client knows of its callers' connections."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: The database of the store, as it tells itself apart.
        self._mark: str | None = None
        #: Connections that lead there. They are their owners', and forgotten with them.
        self._known: WeakSet[Any] = WeakSet()
        self._queues: set[str] = set()

    def enter(self, given: object, queue: str, ask: Callable[[Call[Any]], Any]) -> Executor:
        """An executor in the caller's transaction, after a look at what that is."""
        transaction = self._recognised(given, awaited=False)
        underneath = transaction.begin()
        if self._store.kind == "sqlite":
            return cast("Executor", self._on_file(underneath, queue))
        looks = self._looks(transaction, underneath, queue)
        answer: Any = None
        try:
            while True:
                ours, call = looks.send(answer)
                answer = ask(call) if ours else transaction.run(call)
        except StopIteration:
            return cast("Executor", PostgresWithin(transaction))

    async def enter_async(self, given: object, queue: str, ask: Callable[[Call[Any]], Awaitable[Any]]) -> AsyncExecutor:
        """The same for an event loop."""
        transaction = self._recognised(given, awaited=True)
        underneath = (await transaction.begin()) if transaction.awaited else transaction.begin()
        if self._store.kind == "sqlite":
            from waypost.store.sqlite.within import AsyncSqliteWithin

            return AsyncSqliteWithin(self._on_file(underneath, queue))
        looks = self._looks(transaction, underneath, queue)
        answer: Any = None
        try:
            while True:
                ours, call = looks.send(answer)
                answer = await ask(call) if ours else await cast(Any, transaction.run(call))
        except StopIteration:
            return cast("AsyncExecutor", PostgresWithin(transaction))

    async def run_async(
        self, given: object, queue: str, flow: Flow[T], ask: Callable[[Call[Any]], Awaitable[Any]]
    ) -> T:
        """Run all calls of a flow, which waits for nothing else, in the caller's transaction."""
        transaction = self._recognised(given, awaited=True)
        if isinstance(transaction, AsyncSqlAlchemyTransaction) and self._store.kind == "postgres":
            done: Any = await transaction.inside(lambda blocking: self._run_if_known(blocking, queue, flow))
            if done is not _NOT_KNOWN:
                return cast(T, done)
        return await drive_async(await self.enter_async(transaction, queue, ask), flow)

    def _run_if_known(self, transaction: Transaction, queue: str, flow: Flow[T]) -> T | object:
        """Nothing has to be asked where the connection and the queue are known; otherwise the flow has not begun."""
        if transaction.begin() not in self._known or queue not in self._queues:
            return _NOT_KNOWN
        return drive(cast("Executor", PostgresWithin(transaction)), flow)

    def _recognised(self, given: object, *, awaited: bool) -> Transaction:
        transaction = recognise(given)
        check_store(transaction, self._store)
        check_mode(transaction, awaited=awaited)
        return transaction

    def _on_file(self, underneath: Any, queue: str) -> Any:
        from waypost.store.sqlite.within import SqliteWithin

        if not is_of(underneath, "sqlite3", "Connection"):
            raise elsewhere(self._store)
        return SqliteWithin(cast("SqliteStore", self._store), underneath, queue)

    def _looks(self, transaction: Transaction, underneath: Any, queue: str) -> Looks:
        from waypost.store.postgres.within import open_queue, place

        names = cast("PostgresStore", self._store).names
        if underneath not in self._known:
            if is_of(underneath, "sqlite3", "Connection"):
                raise elsewhere(self._store)
            theirs = yield False, place(names)
            if theirs != self._mark:
                # Ours may be of another day: tables can be made anew.
                self._mark = yield True, place(names)
            if theirs != self._mark:
                raise elsewhere(self._store)
            self._known.add(underneath)
        if queue not in self._queues:
            yield True, open_queue(names, queue)
            if len(self._queues) >= QUEUES_KNOWN_MAX:
                self._queues.clear()
            self._queues.add(queue)
