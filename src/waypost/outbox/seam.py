"""Where a client meets a transaction of its caller: once for each connection it is looked where that leads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

from waypost.outbox.transactions import Transaction, check_colour, check_store, elsewhere, is_of, recognise
from waypost.store.port import AsyncExecutor, Call, Executor, Store

if TYPE_CHECKING:
    from waypost.store.postgres.store import PostgresStore
    from waypost.store.sqlite.store import SqliteStore

T = TypeVar("T")
#: What to ask, and whether on the client's own connection rather than in the transaction.
Looks = Generator[tuple[bool, Call[Any]], Any, None]
#: Queues that are known to be there; beyond so many, some are asked for again.
QUEUES_KNOWN_MAX = 10_000


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


class Seam:
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

    def _recognised(self, given: object, *, awaited: bool) -> Transaction:
        transaction = recognise(given)
        check_store(transaction, self._store)
        check_colour(transaction, awaited=awaited)
        return transaction

    def _on_file(self, underneath: Any, queue: str) -> Any:
        from waypost.store.sqlite.within import SqliteWithin

        if not is_of(underneath, "sqlite3", "Connection"):
            raise elsewhere(self._store)
        return SqliteWithin(cast("SqliteStore", self._store), underneath, queue)

    def _looks(self, transaction: Transaction, underneath: Any, queue: str) -> Looks:
        from waypost.store.postgres.within import open_queue, place

        if is_of(underneath, "sqlite3", "Connection"):
            raise elsewhere(self._store)
        names = cast("PostgresStore", self._store).names
        if underneath not in self._known:
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
