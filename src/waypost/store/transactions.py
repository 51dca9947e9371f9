"""The contract of a store in the user's database: its calls can run in the user's transactions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, TypeAlias

from waypost.errors import ConfigurationError, WaypostError
from waypost.store.port import AsyncExecutor, Call, Executor

#: Calls to run before others, each with whether it runs on the client's own connection or in the transaction.
Checks: TypeAlias = Generator[tuple[bool, Call[Any]], Any, None]


class CallerTransaction(Protocol):
    """A transaction of the caller, of any supported library."""

    #: How its driver marks values: `$` as in $1, `%` as in %s.
    style: str

    def fetch(self, sql: str, values: Sequence[Any]) -> Any:
        """Return the first value of the first row, or None; awaitable for an async transaction."""
        ...


class TransactionSupport(Protocol):
    """Runs calls of a store in a transaction. `connection` is the driver's own, without wrappers."""

    #: The library of the connections that handlers can take as a parameter.
    library: str
    #: Calls wait for a server, so they must be awaited inside an event loop. A file needs no wait.
    waits: bool
    #: The store chooses and notifies sleepers when the transaction is committed.
    notifies: bool
    #: Called in the thread of a call of the client that finds the database in use by another transaction, before it
    #: waits; an error ends the call. A store whose calls do not wait for each other never calls it.
    on_busy: Callable[[], None] | None

    @property
    def engine(self) -> object | None:
        """The user's own SQLAlchemy engine, if the store was created from one."""
        ...

    def checks(self, connection: Any, queue: str) -> Checks:
        """Yield the calls that must run before calls about a queue run there. Raises `another_database`."""
        ...

    def needs_no_checks(self, connection: Any, queue: str) -> bool:
        """Return whether `checks` has nothing to run."""
        ...

    def executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> Executor:
        """Runs calls about a queue in a transaction that blocks."""
        ...

    def async_executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> AsyncExecutor:
        """The same for an event loop."""
        ...

    def begin(self, executor: Callable[[], Executor]) -> AbstractContextManager[Any]:
        """A transaction on one of the client's connections, committed at the end of the block unless it raises."""
        ...

    def begin_async(self, executor: Callable[[], Awaitable[AsyncExecutor]]) -> AbstractAsyncContextManager[Any]:
        """The same for an event loop."""
        ...


def another_database(kind: str) -> WaypostError:
    """Return the error for a connection to another database."""
    return ConfigurationError(
        f"this transaction is in another database than the {kind} store of this client, so they cannot be committed "
        "together; nothing was published. Give both the same database"
    )
