"""The contract of a store that keeps its messages in a database of the user's: its calls in the user's transactions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, TypeAlias

from waypost.errors import ConfigurationError, WaypostError
from waypost.store.port import AsyncExecutor, Call, Executor

#: Calls to run before others, each with whether it runs on the client's own connection or in the transaction.
Checks: TypeAlias = Generator[tuple[bool, Call[Any]], Any, None]


class CallerTransaction(Protocol):
    """A transaction of the caller's, whatever library it is of."""

    #: How its driver marks values: `$` as in $1, `%` as in %s.
    style: str

    def fetch(self, sql: str, values: Sequence[Any]) -> Any:
        """The first value of the first row, None if there is none; to be awaited where the transaction is."""
        ...


class TransactionSupport(Protocol):
    """How calls of a store become a part of a transaction. `connection` is the driver's own, under what wraps it."""

    #: The library whose connections are lent to handlers that take one.
    library: str
    #: Calls wait for a server, so that they must be awaited inside an event loop. A file has nothing to wait for.
    waits: bool

    @property
    def engine(self) -> object | None:
        """The user's own SQLAlchemy engine, if the store was made of one."""
        ...

    def checks(self, connection: Any, queue: str) -> Checks:
        """Yield the calls that must run before calls about a queue run there. Raises `another_database`."""
        ...

    def is_checked(self, connection: Any, queue: str) -> bool:
        """Whether `checks` has nothing to run."""
        ...

    def executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> Executor:
        """Runs calls about a queue in a transaction that blocks."""
        ...

    def async_executor(self, transaction: CallerTransaction, connection: Any, queue: str) -> AsyncExecutor:
        """The same for an event loop."""
        ...

    def begin(self, executor: Callable[[], Executor]) -> AbstractContextManager[Any]:
        """A transaction on a connection of the client's, committed at the end of the block unless it raises."""
        ...

    def begin_async(self, executor: Callable[[], Awaitable[AsyncExecutor]]) -> AbstractAsyncContextManager[Any]:
        """The same for an event loop."""
        ...


def another_database(kind: str) -> WaypostError:
    """The caller's connection leads elsewhere."""
    return ConfigurationError(
        f"this transaction is in another database than the {kind} store of this client, so they cannot be committed "
        "together; nothing was published. Give both the same database"
    )
