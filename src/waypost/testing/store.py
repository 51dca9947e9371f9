"""The store of a `TestPost`: the memory store with a clock of its own, which records every message published.

Transactions of SQLAlchemy sessions and of Django work as with a store in the same database: what is published inside is
there after the commit, and not after a rollback. The answer of a call inside is computed on a copy of the queues.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from waypost.errors import ConfigurationError
from waypost.identity import Operation
from waypost.outbox.transaction_adapters import is_instance_of, transaction_support
from waypost.store.memory.queue import QueueModel
from waypost.store.memory.records import Record
from waypost.store.memory.store import MemoryExecutor, MemoryStore
from waypost.store.port import Call, Store
from waypost.store.transactions import CallerTransaction, Checks
from waypost.testing.clock import ManualClock
from waypost.values import EventName, EventRecord

T = TypeVar("T")


class PublishLog:
    """What was published to a store, in order, whatever the queues journal."""

    def __init__(self) -> None:
        self.events: list[EventRecord] = []

    def __deepcopy__(self, memo: object) -> PublishLog:
        # What is published to a copy of the queues, to compute an answer, is not published.
        return PublishLog()


class TestQueue(QueueModel):
    """A queue that records what is published to it."""

    __test__ = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.log = PublishLog()

    def note(
        self, now: int, event: EventName, operation: Operation | None, record: Record | None, **details: Any
    ) -> None:
        """Record a publish with its body as it was published, and append the event to the journal."""
        if event == "published" and record is not None:
            published = EventRecord(
                self.name, len(self.log.events) + 1, now, event, message_id=record.id, key=record.key,
                group=record.group, priority=record.priority, **details | {"body": record.envelope},
            )  # fmt: skip
            self.log.events.append(published)
        super().note(now, event, operation, record, **details)

    def successor(self, now: int, mark: bytes) -> QueueModel:
        """Return what is kept after a removal, with the same record of publishes."""
        model = super().successor(now, mark)
        model.log = self.log  # type: ignore[attr-defined]
        return model


class TestStore(MemoryStore):
    """A memory store for tests of programs: what was published to it is in `log`."""

    __test__ = False

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.log = PublishLog()
        #: The store of the client that a test replaces: a transaction that it would refuse is refused here too.
        self.original: Store | None = None
        self.transactions: TestTransactions = TestTransactions(self)  # type: ignore[assignment]

    def _queue_for_writing(self, name: str) -> QueueModel:
        if name not in self._queues:
            model = self._queues[name] = TestQueue(name)
            model.log = self.log
        return self._queues[name]

    @property
    def models(self) -> dict[str, QueueModel]:
        """The queues by name, for reading."""
        return self._queues

    def answer(self, calls: Iterable[Call[Any]], call: Call[T]) -> T:
        """Return what a call would answer after others, and change nothing."""
        with self.lock:
            before, self._queues = self._queues, copy.deepcopy(self._queues)
            log, self.log = self.log, PublishLog()
            try:
                executor = MemoryExecutor(self)
                executor.run_many(calls)
                return executor.run(call)
            finally:
                self._queues, self.log = before, log


class TestTransactions:
    """Runs calls when the caller's transaction commits, and forgets them when it is rolled back."""

    __test__ = False

    library = ""
    waits = False
    notifies = False
    on_busy: Callable[[], None] | None = None

    def __init__(self, store: TestStore) -> None:
        self._store = store
        #: Run after a commit that ran calls: in the thread of the commit, or awaited by it.
        self.after_commit: Callable[[], object] | None = None
        self.after_commit_async: Callable[[], Awaitable[object]] | None = None
        #: The calls of open transactions of SQLAlchemy sessions.
        self._pending: WeakKeyDictionary[Any, list[Call[Any]]] = WeakKeyDictionary()

    @property
    def engine(self) -> None:
        """None: handlers with a session have an engine of their own."""

    def checks(self, connection: Any, queue: str) -> Checks:
        """Nothing to check: the store is in every database."""
        yield from ()

    def needs_no_checks(self, connection: Any, queue: str) -> bool:
        """Return True."""
        return True

    def executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> _Executor:
        """Runs calls in a transaction that blocks."""
        self._check_original()
        return _Executor(self, transaction)

    def async_executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> _AsyncExecutor:
        """The same for an event loop."""
        self._check_original()
        return _AsyncExecutor(self, transaction)

    def _check_original(self) -> None:
        if self._store.original is not None:
            transaction_support(self._store.original)

    def begin(self, executor: object) -> NoReturn:
        """Refuse: the store has no connections to lend."""
        raise ConfigurationError(
            "a TestPost has no database whose connections a handler or message.transaction() could use: give the "
            "handler engine= (SQLAlchemy), or run this test on the store itself"
        )

    begin_async = begin

    def run(self, given: Any, call: Call[T]) -> T:
        """Answer a call now and run it at the commit of `given`, a session of SQLAlchemy or a connection of Django."""
        if is_instance_of(given, "django", "BaseDatabaseWrapper", "ConnectionProxy"):
            # Django forgets those of a savepoint that is rolled back; a `TestCase` keeps those that it has run.
            hooks = [
                hook for _, hook, *_ in given.run_on_commit if isinstance(hook, _CommitHook) and hook.owner is self
            ]
            answer = self._store.answer([hook.call for hook in hooks if not hook.has_run], call)
            given.on_commit(_CommitHook(self, call))
            return answer
        if is_instance_of(given, "sqlalchemy", "scoped_session", "async_scoped_session"):
            given = given()
        session = getattr(given, "sync_session", given)
        if not is_instance_of(session, "sqlalchemy", "Session"):
            raise ConfigurationError(
                f"a {type(given).__module__}.{type(given).__name__} does not report its commit, so a TestPost cannot "
                "wait for it: use a SQLAlchemy session or Django's connection, or run this test on the store itself"
            )
        pending = self._pending.get(session)
        if pending is None:
            pending = self._pending[session] = []
            self._follow(session, pending, is_async=session is not given)
        answer = self._store.answer(pending, call)
        pending.append(call)
        return answer

    def _follow(self, session: Any, pending: list[Call[Any]], *, is_async: bool) -> None:
        from sqlalchemy import event
        from sqlalchemy.util import await_only

        committed = False
        #: How many calls there were at the begin of each open savepoint.
        savepoints: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

        def on_commit(session: Any) -> None:
            nonlocal committed
            # SQLAlchemy reports the release of a savepoint too.
            if not session.in_nested_transaction():
                self._commit(pending)
                committed = bool(pending)

        def on_begin(session: Any, transaction: Any) -> None:
            if transaction.nested:
                savepoints[transaction] = len(pending)

        def on_rollback(session: Any, transaction: Any) -> None:
            # A savepoint that was there before the first call has none before it.
            if transaction.nested:
                del pending[savepoints.get(transaction, 0) :]

        def on_end(session: Any, transaction: Any) -> None:
            # Also of a session that is closed without a commit or a rollback.
            nonlocal committed
            if transaction.parent is not None:
                return
            pending.clear()
            runs, committed = committed, False
            if runs and is_async and self.after_commit_async is not None:
                await_only(self.after_commit_async())
            elif runs and self.after_commit is not None:
                self.after_commit()

        event.listen(session, "after_transaction_create", on_begin)
        event.listen(session, "after_soft_rollback", on_rollback)
        event.listen(session, "after_commit", on_commit)
        event.listen(session, "after_transaction_end", on_end)

    def _commit(self, calls: list[Call[Any]]) -> None:
        executor = MemoryExecutor(self._store)
        for call in calls:
            executor.run(call)


class _CommitHook:
    """Runs a call when a transaction of Django commits."""

    def __init__(self, owner: TestTransactions, call: Call[Any]) -> None:
        self.owner = owner
        self.call = call
        self.has_run = False

    def __call__(self) -> None:
        self.has_run = True
        self.owner._commit([self.call])
        if self.owner.after_commit is not None:
            self.owner.after_commit()


class _Executor:
    """Runs calls in the caller's transaction."""

    def __init__(self, transactions: TestTransactions, transaction: CallerTransaction) -> None:
        self._transactions = transactions
        self._given: Any = getattr(transaction, "given", None)

    def run(self, call: Call[T]) -> T:
        return self._transactions.run(self._given, call)

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return [self.run(call) for call in calls]

    def close(self) -> None:
        """Nothing to close."""


class _AsyncExecutor:
    """The same for an event loop."""

    def __init__(self, transactions: TestTransactions, transaction: CallerTransaction) -> None:
        self._sync = _Executor(transactions, transaction)

    async def run(self, call: Call[T]) -> T:
        return self._sync.run(call)

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return self._sync.run_many(calls)

    async def close(self) -> None:
        """Nothing to close."""
